"""`strategy=pipeline` for Lightning: distributes the blocks of a LightningModule over ranks.

Lightning's closure runs training_step, zero_grad, backward. A pipeline schedule runs forward and
backward together, so both run in the strategy's `training_step`. The new gradients are set aside
while Lightning clears the old ones, and `backward` puts them back. The module's own `training_step`
runs after the schedule, on every rank. In it, `self(inputs)` returns the outputs of the last stage,
so loss, metrics and callbacks are the same on all ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from distdl.checkpoint.portable import names_of
from distdl.optim import layerwise
from distdl.strategies.pipeline import partition_plan, splitting, stage_rules
from distdl.strategies.pipeline.engine import Engine, Piece
from distdl.strategies.pipeline.exchange import StagedStrategy
from distdl.strategies.pipeline.reduction import GradientReducer
from distdl.util.errors import UserError
from distdl.util.ranges import AboveZero, Positive


class Splitter(Callback):
    """Splits the module before the `setup` of other callbacks: weight averaging copies it there."""

    def __init__(self, strategy: PipelineStrategy) -> None:
        self._strategy = strategy

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not splitting.is_split(pl_module):
            self._strategy.split(trainer)


class PipelineStrategy(StagedStrategy):
    """Splits a model into stages; several pipelines side by side average their gradients.

    Args:
        stages: Ranks per pipeline; None: all ranks. Must divide the world size. The quotient is the
            number of replicas of the pipeline, which take different data.
        schedule: "gpipe" (Huang et al. 2019), "1f1b" (Narayanan et al. 2019, PipeDream-Flush),
            "interleaved" (Narayanan et al. 2021), "zero_bubble" (Qi et al. 2023, ZB-H1).
        micro_batches: Micro-batches per batch of a rank; None: four per stage.
        balance: "measured": time each block and make the slowest stage as fast as possible;
            "parameters": count parameters instead; or the names of the blocks at which a new piece
            begins.
        pieces_per_stage: Pieces of the model per device, for interleaved and zero_bubble.
        across: "devices" or "nodes", see StagePosition.
        bucket_cap_mb: Size in MiB of the buckets that average gradients over the replicas.

    Raises:
        UserError: The settings do not fit the ranks, or the module cannot be split.
    """

    compiles = False  # the stages are called, not the network
    ends_between_steps = False  # gradients that wait for a step are each rank's own
    unfreezes = False  # what is trained is laid out once, at the start

    def __init__(
        self,
        stages: Positive | None = None,
        schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b",
        micro_batches: Positive | None = None,
        balance: str | list[str] = "measured",
        pieces_per_stage: Positive = 2,
        across: Literal["devices", "nodes"] = "devices",
        bucket_cap_mb: AboveZero = 25,
    ) -> None:
        super().__init__()
        self.schedule = schedule
        self.balance = balance
        self.settings = {
            "stages": stages,
            "schedule": schedule,
            "micro_batches": micro_batches,
            "pieces_per_stage": pieces_per_stage,
            "across": across,
        }
        self.pieces_per_stage = stage_rules.pieces_per_stage(schedule, pieces_per_stage)
        self.bucket_cap_mb = bucket_cap_mb
        self._outputs: torch.Tensor | None = None
        self._new_gradients: list[torch.Tensor | None] = []
        self._window_open = False  # from the first batch of an optimizer step to the step
        self._blocked = False
        self._splitter: Splitter | None = None
        self._plan: partition_plan.PipelinePlan | None = None
        self.split_at: list[str] = []  # the first block of each piece but the first, once it is cut
        self.kept_split: object = None  # the same of the run that resumes, as its checkpoint has it

    check = staticmethod(stage_rules.check)

    @property
    def micro_batches(self) -> int:  # type: ignore[override]
        stages = self.position.stages
        return self.settings["micro_batches"] or stage_rules.default_micro_batches(stages)

    def setup_environment(self) -> None:
        super().setup_environment()
        module = self.lightning_module
        if self._splitter is None:
            self.position = self.position_of(self.global_rank, self.world_size)
            self.pipeline, self.replicas = self.position.groups(self.root_device.type)
            self._splitter = Splitter(self)
        callbacks: list[Any] = module.trainer.callbacks
        if self._splitter not in callbacks:
            callbacks.insert(0, self._splitter)

    def split(self, trainer: Trainer) -> None:
        """Cuts the module; called once by the Splitter."""
        module = trainer.lightning_module
        if str(trainer.precision).startswith("16"):
            raise UserError.at(
                "trainer.precision",
                what="a pipeline does not train in fp16",
                remedy="trainer.precision=bf16-mixed",
                code="unsupported",
            )
        blocks = splitting.blocks_in(module)
        self._plan = partition_plan.make(self, trainer, blocks)
        bounds = self._plan.bounds
        self.split_at = [blocks[start].name for start in bounds[1:-1]]
        self._spans = [blocks[start:end] for start, end in itertools.pairwise(bounds)]
        self._pieces = range(self.position.stage, len(self._spans), self.position.stages)
        self._shapes = [
            torch.nn.Sequential(*(block.on_meta() for block in span)) for span in self._spans
        ]
        self.names = list(module.state_dict())
        kept = [n for piece in self._pieces for n in range(bounds[piece], bounds[piece + 1])]
        splitting.split(module, blocks, kept)
        self._spans = [s if i in self._pieces else [] for i, s in enumerate(self._spans)]

    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        assert self._plan is not None
        module = trainer.lightning_module
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(module)
        self.model_to_device()
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.data, group=self.replicas, group_src=0)
        edges, context = self._plan.edges, self.precision_plugin.forward_context
        count = len(self._spans)
        # The model's inputs and outputs are not sent between pieces.
        inner = [None, *edges[1:count], None]
        pieces = {i: Piece(self._spans[i], inner[i], inner[i + 1], context) for i in self._pieces}
        parameters = [piece.parameters() for piece in pieces.values()]
        self._reducer = GradientReducer(
            parameters,
            self.replicas,
            micro_batches=self.micro_batches,
            bucket_mb=self.bucket_cap_mb,
        )
        self._engine = Engine(
            self.position,
            self.pipeline,
            self.root_device,
            pieces,
            self._shapes,
            edges,
            self.schedule,
            self.micro_batches,
            loss=self._loss,
            done=lambda piece: self._reducer.piece_done(self._pieces.index(piece)),
        )
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            for optimizer in self.optimizers:
                layerwise.refuse_own(
                    layerwise.refuse_some_layers(*layerwise.of_optimizer(optimizer))
                )
        self.setup_precision_plugin()
        self.precision_plugin.clip_grad_by_norm = self._clip_by_global_norm  # type: ignore[method-assign]
        module.forward = self._forward  # type: ignore[method-assign]
        self.count_once(module)

    def setup_optimizers(self, trainer: Trainer) -> None:
        module = trainer.lightning_module
        # Built over the complete model, so that an optimizer has the same groups as in one process.
        with splitting.complete(module):
            super().setup_optimizers(trainer)
            self.optimizer_names = [names_of(o, module) for o in self.optimizers]
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["params"] = [p for p in group["params"] if not p.is_meta]

    def teardown(self) -> None:
        module = self.lightning_module
        if module is not None and "forward" in vars(module):
            del module.forward
            del self.precision_plugin.clip_grad_by_norm
            self._reducer.remove()
            del self._engine
        super().teardown()

    def training_step(self, batch: object, *args: object, **kwargs: object) -> STEP_OUTPUT:
        module = self.lightning_module
        parameters = list(module.parameters())
        if not self._window_open:
            for parameter in parameters:
                parameter.grad = None
            self._window_open = True
        with self.precision_plugin.train_step_context():
            # Not from `args`: a training_step need not take it.
            batch_idx = module.trainer.fit_loop.epoch_loop.batch_idx
            inputs, targets = module.pipeline_inputs(batch, batch_idx)
        self._reducer.begin(reduce=not self._blocked)
        self._outputs = self._engine.train(inputs, targets)
        self._new_gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        try:
            with self.precision_plugin.train_step_context():
                return module.training_step(batch, *args, **kwargs)
        finally:
            self._outputs = None

    def backward(
        self,
        closure_loss: torch.Tensor,
        optimizer: Optimizer | None,
        *args: object,
        **kwargs: object,
    ) -> torch.Tensor:
        module = self.lightning_module
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        for parameter, gradient in zip(module.parameters(), self._new_gradients, strict=True):
            parameter.grad = gradient
        self._new_gradients = []
        self._reducer.finish()
        return self.precision_plugin.post_backward(closure_loss.detach(), module)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: object,
    ) -> object:
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._window_open = False
        return result

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """For batches that are only accumulated: no optimizer step follows."""
        self._blocked = True
        try:
            yield
        finally:
            self._blocked = False

    def _loss(self, outputs: torch.Tensor, targets: object) -> torch.Tensor:
        module = self.lightning_module
        with self.precision_plugin.forward_context():
            loss = module.pipeline_loss(outputs, targets)
        return loss / (self.micro_batches * module.trainer.accumulate_grad_batches)

    def _forward(self, *positional: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        """Replaces the module's forward, whose blocks are on different ranks. Its one argument may
        have any name."""
        given = [*positional, *named.values()]
        if len(given) != 1:
            raise RuntimeError("under strategy=pipeline, forward takes one tensor: its inputs")
        if not self.lightning_module.trainer.training:
            return self._engine.evaluate(given[0])
        outputs = self._outputs
        self._outputs = None
        if outputs is None or len(outputs) != len(given[0]):
            raise RuntimeError(
                "under strategy=pipeline, training_step calls self(inputs) once, with the inputs "
                "that pipeline_inputs(batch, batch_idx) returns"
            )
        return outputs

    def _clip_by_global_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        parameters = [p for p in self.precision_plugin.main_params(optimizer) if p.grad is not None]
        norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
        dtype = torch.promote_types(norm.dtype, torch.float32)
        squared = norm.to(self.root_device, dtype) ** 2
        dist.all_reduce(squared, group=self.pipeline)
        clip_grads_with_norm_(parameters, clip_val, squared.sqrt())
