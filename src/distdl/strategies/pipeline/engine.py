"""Runs micro-batches through the stages, by the schedules of torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.utils._pytree import tree_map

from distdl.strategies.pipeline.probe import Context, Edge
from distdl.strategies.pipeline.splitting import Block
from distdl.strategies.pipeline.stage_rules import StagePosition
from distdl.util.errors import UserError

# The first schedule of each dict is also used to evaluate.
SINGLE = {"gpipe": schedules.ScheduleGPipe, "1f1b": schedules.Schedule1F1B}
SEVERAL = {
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "zero_bubble": schedules.ScheduleInterleavedZeroBubble,
}


class Piece(nn.Module):
    """Consecutive blocks of a model, as one module of a pipeline.

    Tensors between ranks are sent contiguous; a channels_last tensor is sent as [B, H, W, C].

    Args:
        blocks: Applied in order.
        entering: The input from another piece; None: this is the first piece.
        leaving: The output to another piece; None: this is the last piece.
        context: The context of forward (autocast). Backward runs outside it, as in Lightning.
    """

    def __init__(
        self, blocks: Sequence[Block], entering: Edge | None, leaving: Edge | None, context: Context
    ) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(module for block in blocks for module in block.modules))
        # The model's train() and eval() do not reach modules that have no name in it.
        self.unnamed = [m for block in blocks for name, m in block.parts if name is None]
        self.entering = entering
        self.leaving = leaving
        self.context = context

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad:
            x.register_hook(torch.Tensor.contiguous)  # its gradient is sent back
        if self.entering is not None:
            x = from_wire(x, self.entering)
        with self.context():
            x = self.blocks(x)
        return x if self.leaving is None else to_wire(x, self.leaving)


def to_wire(x: torch.Tensor, edge: Edge) -> torch.Tensor:
    if edge.channels_last:
        x = x.permute(0, 2, 3, 1)
    # torch detaches a sent tensor in place, which fails for a view. torch 2.11 also compares
    # strides, and a contiguous tensor may have any stride in a dimension of size 1.
    if x._is_view() or x.stride() != torch.empty(x.shape, device="meta").stride():
        x = x.clone(memory_format=torch.contiguous_format)
    return x


def from_wire(x: torch.Tensor, edge: Edge) -> torch.Tensor:
    return x.permute(0, 3, 1, 2) if edge.channels_last else x


class Stage(PipelineStage):
    """torch's stage that also calls `done` when its gradients are complete."""

    done: Callable[[int], None] | None = None

    def backward_one_chunk(self, *args: object, **kwargs: object) -> object:
        return self._reported(super().backward_one_chunk, *args, **kwargs)

    def backward_weight_one_chunk(self, *args: object, **kwargs: object) -> object:
        return self._reported(super().backward_weight_one_chunk, *args, **kwargs)

    def _reported(self, backward: Callable[..., Any], *args: object, **kwargs: object) -> object:
        result = backward(*args, **kwargs)
        if kwargs.get("last_backward") and self.done is not None:
            self.done(self.stage_index)
        return result


@dataclass
class Engine:
    """One rank's pieces, and the schedules that run them together with the other ranks' pieces."""

    position: StagePosition
    group: dist.ProcessGroup  # the ranks of its pipeline
    device: torch.device
    pieces: Mapping[int, Piece]  # by number; piece i is on stage `i % position.stages`
    shapes: Sequence[nn.Module]  # every piece of the model on `meta`, to compute sizes
    edges: Sequence[Edge]  # before each piece, and after the last
    schedule: str
    micro_batches: int  # per batch
    loss: Callable[[torch.Tensor, Any], torch.Tensor]  # one micro-batch's share of the loss
    done: Callable[[int], None]  # called with the number of a piece whose gradients are complete

    def __post_init__(self) -> None:
        self._schedules: dict[Any, Any] = {}
        self._targets: list[Any] = []

    def train(self, inputs: torch.Tensor, targets: object) -> torch.Tensor:
        """Forward and backward of a batch; gradients are accumulated.

        Args:
            inputs: [B, ...]; stages after the first use only its sizes.
            targets: Tensors with B rows, in any structure; only the last stage uses them.

        Returns:
            The model's outputs [B, ...], on every rank.

        Raises:
            UserError: B is not a multiple of the micro-batches.
        """
        rows = len(inputs)
        if rows % self.micro_batches:
            raise UserError.at(
                "strategy.micro_batches",
                what=f"a batch of {rows} does not divide into {self.micro_batches} micro-batches",
                remedy=f"a batch size that {self.micro_batches} divides, and drop_last=True",
                code="indivisible",
            )
        schedule, sizes = self._prepared(inputs, training=True)
        self._set_mode_of_unnamed(True)
        keywords = {}
        if self.position.last:
            size = rows // self.micro_batches
            self._targets = [
                tree_map(lambda t, i=i: t[i * size : (i + 1) * size], targets)
                for i in range(self.micro_batches)
            ]
            # torch can split only a single target tensor: give it indices into `_targets`.
            keywords["target"] = torch.arange(self.micro_batches)
        entering = (inputs.detach(),) if self.position.first else ()
        out = schedule.step(*entering, **keywords)
        self._targets = []
        return self._shared(out, (rows, *sizes))

    def evaluate(self, inputs: torch.Tensor) -> torch.Tensor:
        """Forward only, for any number of rows; arguments and result as in `train`."""
        rows = len(inputs)
        missing = -rows % self.micro_batches
        if missing:
            inputs = torch.cat((inputs, inputs[-1:].expand(missing, *inputs.shape[1:])))
        schedule, sizes = self._prepared(inputs, training=False)
        self._set_mode_of_unnamed(False)
        out = schedule.eval(*((inputs.detach(),) if self.position.first else ()))
        return self._shared(out, (len(inputs), *sizes))[:rows]

    def _set_mode_of_unnamed(self, training: bool) -> None:
        for piece in self.pieces.values():
            for module in piece.unnamed:
                module.train(training)

    def _loss(self, output: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        return self.loss(output, self._targets[int(number)])

    def _shared(self, out: torch.Tensor | None, sizes: Sequence[int]) -> torch.Tensor:
        """The last stage's outputs, on every rank of the pipeline."""
        if out is None:
            out = torch.empty(*sizes, dtype=self.edges[-1].torch_dtype, device=self.device)
        out = out.detach().contiguous()
        dist.broadcast(out, group=self.group, group_src=self.position.stages - 1)
        return out

    def _prepared(self, inputs: torch.Tensor, training: bool) -> tuple[Any, tuple[int, ...]]:
        """The schedule for inputs of these sizes, and the shape of an output row."""
        key = (tuple(inputs.shape), training)
        if key not in self._schedules:
            flows = self._flows(inputs)
            stages: list[Any] = []
            for number, piece in self.pieces.items():
                entering = flows[number]
                leaving = flows[number + 1]
                # requires_grad tells torch whether a gradient is sent back for a tensor.
                stage = Stage(
                    piece,
                    number,
                    len(self.shapes),
                    self.device,
                    input_args=entering.requires_grad_(training and number > 0),
                    output_args=leaving.requires_grad_(training),
                    group=self.group,
                )
                stage.done = self.done if training else None
                stages.append(stage)
            kinds: Any = SINGLE if len(stages) == 1 else SEVERAL
            kind = kinds[self.schedule if training else next(iter(kinds))]
            run = stages if len(stages) > 1 else stages[0]
            loss = self._loss if training else None
            schedule = kind(run, self.micro_batches, loss_fn=loss, scale_grads=False)
            self._schedules[key] = schedule, tuple(flows[-1].shape[1:])
        return self._schedules[key]

    def _flows(self, inputs: torch.Tensor) -> list[torch.Tensor]:
        """The tensors before each piece and after the last, for one micro-batch, on `meta`."""
        rows = len(inputs) // self.micro_batches
        x = torch.empty(rows, *inputs.shape[1:], device="meta")
        flows: list[torch.Tensor] = []
        with torch.no_grad():
            for piece, edge in zip(self.shapes, self.edges, strict=False):
                # The first piece gets the batch itself; torch 2.11 compares it with this tensor.
                flows.append(_on_wire(x, edge) if flows else inputs[:rows].detach().to("meta"))
                dtype = next((p.dtype for p in piece.parameters()), x.dtype)
                x = piece(x.to(dtype))
        last = self.edges[-1]
        return [*flows, torch.empty(x.shape, dtype=last.torch_dtype, device="meta")]


def _on_wire(x: torch.Tensor, edge: Edge) -> torch.Tensor:
    shape = x.permute(0, 2, 3, 1).shape if edge.channels_last else x.shape
    return torch.empty(shape, dtype=edge.torch_dtype, device="meta")
