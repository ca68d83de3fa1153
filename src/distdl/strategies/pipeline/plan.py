"""Before a pipeline starts: how the model is cut, found out on one rank and told to all."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from distdl import cluster
from distdl.errors import UserError
from distdl.strategies.pipeline import balance, checks, probe
from distdl.strategies.pipeline.probe import Edge
from distdl.strategies.pipeline.splitting import Block, is_split

if TYPE_CHECKING:
    from distdl.strategies.pipeline.strategy import PipelineStrategy

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """How a model is cut.

    Args:
        bounds: Piece i has the blocks from bounds[i] to bounds[i + 1].
        edges: Before each piece, and behind the last.
        seconds: Of each block for one micro-batch, forward and backward; None: not measured.
    """

    bounds: list[int]
    edges: list[Edge]
    seconds: list[float] | None


class Splitter(Callback):
    """Splits the module when the data is there and no other callback has seen the module yet.

    A moving average of the weights copies the module in its own `setup`: it must find the pieces.
    """

    def __init__(self, strategy: PipelineStrategy) -> None:
        self._strategy = strategy

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not is_split(pl_module):
            self._strategy.split(trainer)


def make(strategy: PipelineStrategy, trainer: Trainer, blocks: Sequence[Block]) -> Plan:
    """Runs a sample through the blocks on rank 0; all ranks get what came of it.

    Raises:
        UserError: More pieces than blocks, or the blocks are not what the model's forward does.
    """
    per_stage = strategy.pieces_per_stage
    pieces = strategy.place.stages * per_stage
    problems = list(checks.too_many(pieces, per_stage, len(blocks)))
    if problems:
        raise UserError(*(checks.at_strategy(p) for p in problems))
    found = None
    if trainer.global_rank == 0:
        found = _found_out(strategy, trainer, blocks, pieces)
        log.info("%s", table(strategy, blocks, found))
    return cluster.tell_all(found)


def _found_out(
    strategy: PipelineStrategy, trainer: Trainer, blocks: Sequence[Block], pieces: int
) -> Plan:
    module = trainer.lightning_module
    inputs, rows = _inputs(trainer, strategy.root_device)
    probe.check_chain(module, blocks, inputs)
    trains = trainer.state.fn == TrainerFn.FITTING
    edges, seconds = probe.run_through(
        blocks,
        inputs,
        rows=max(1, rows // strategy.micro_batches),
        trains=trains,
        convert=strategy.precision_plugin.convert_module,
        context=strategy.precision_plugin.forward_context,
        measured=trains and strategy.balance == "measured",
    )
    if isinstance(strategy.balance, str):
        costs = seconds or [float(block.size) for block in blocks]
        bounds = balance.partition(costs, pieces)
        bounds = balance.even_out(costs, bounds, strategy.place.stages)
    else:
        bounds = balance.cut_at([block.name for block in blocks], strategy.balance, pieces)
    return Plan(bounds, [edges[bound] for bound in bounds], seconds)


def _inputs(trainer: Trainer, device: torch.device) -> tuple[torch.Tensor, int]:
    """What the first block takes, at least one row of it, and the rows of a batch."""
    module, loop = trainer.lightning_module, trainer._active_loop
    assert loop is not None
    loader = probe.first_of(loop._data_source.dataloader())
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        batch = probe.first_sample(loader)
        batch = module._apply_batch_transfer_handler(batch, device=device, dataloader_idx=0)
        inputs = module.pipeline_inputs(batch, 0)[0]  # type: ignore[operator]
    sampler = getattr(loader, "batch_sampler", None)
    rows = getattr(sampler, "batch_size", None) or getattr(loader, "batch_size", None)
    return inputs, rows or len(inputs)


def table(strategy: PipelineStrategy, blocks: Sequence[Block], plan: Plan) -> str:
    """The stages, what they cost, the bubble that follows, and how to ask for this very split."""
    place, count = strategy.place, strategy.micro_batches
    stages, per_stage = place.stages, strategy.pieces_per_stage
    spans = list(itertools.pairwise(plan.bounds))

    def of_stage(stage: int, values: Sequence[float]) -> float:
        return sum(sum(values[start:end]) for start, end in spans[stage::stages])

    seconds = [of_stage(s, plan.seconds) if plan.seconds else 1.0 for s in range(stages)]
    sizes = [of_stage(s, [block.size for block in blocks]) for s in range(stages)]
    idle = balance.bubble(strategy.schedule, seconds, per_stage, count)
    assumed = "" if plan.seconds else " if the stages take equally long"
    replicas = f" x {place.replicas} replicas" if place.replicas > 1 else ""
    lines = [
        f"pipeline  {stages} stages{replicas}, {strategy.schedule}, {count} micro-batches: "
        f"predicted bubble {100 * idle:.1f} %{assumed}",
        f"  {'stage':>5}  {'blocks':>6}  {'parameters':>12}  {'ms':>8}  {'share':>6}  begins at",
    ]
    for stage in range(stages):
        own = spans[stage::stages]
        cost = f"{1e3 * seconds[stage]:8.1f}  {100 * seconds[stage] / sum(seconds):4.0f} %"
        lines.append(
            f"  {stage:>5}  {sum(end - start for start, end in own):>6}  {int(sizes[stage]):>12,}  "
            + (cost if plan.seconds else f"{'-':>8}  {'-':>6}")
            + f"  {', '.join(blocks[start].name for start, _ in own)}"
        )
    starts = ",".join(blocks[start].name for start in plan.bounds[1:-1])
    lines.append(f"  the same split again: strategy.balance=[{starts}]")
    return "\n".join(lines)
