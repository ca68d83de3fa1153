"""How the model is cut into the pieces of a pipeline; rank 0 decides for all ranks."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn

from distdl.config.degrees import at_strategy
from distdl.distributed import process_group
from distdl.strategies.pipeline import balance, probe, stage_rules
from distdl.strategies.pipeline.probe import Edge
from distdl.strategies.pipeline.splitting import Block
from distdl.util import table as tables
from distdl.util.errors import UserError

if TYPE_CHECKING:
    from distdl.strategies.pipeline.exchange import StagedStrategy

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PipelinePlan:
    """How a model is cut: piece i has the blocks from bounds[i] to bounds[i + 1]."""

    bounds: list[int]
    edges: list[Edge]  # before each piece, and after the last
    seconds: list[float] | None  # of each block, forward and backward of one micro-batch


def make(strategy: StagedStrategy, trainer: Trainer, blocks: Sequence[Block]) -> PipelinePlan:
    """The plan for all ranks. Rank 0 measures the blocks with a sample. Collective.

    Raises:
        UserError: More pieces than blocks, or the blocks do not compute the model's forward.
    """
    stages = strategy.position.stages
    problems = [*stage_rules.too_many(stages, strategy.pieces_per_stage, len(blocks))]
    if problems:
        raise UserError(*map(at_strategy, problems))
    plan = None
    if trainer.global_rank == 0:
        plan = _measured(strategy, trainer, blocks)
        log.info("%s", table(strategy, blocks, plan))
    shared = process_group.broadcast(plan)
    assert shared is not None
    return shared


def _measured(strategy: StagedStrategy, trainer: Trainer, blocks: Sequence[Block]) -> PipelinePlan:
    inputs, rows = _inputs(trainer, strategy.root_device)
    probe.check_chain(trainer.lightning_module, blocks, inputs)
    trains = trainer.state.fn == TrainerFn.FITTING
    pieces = strategy.position.stages * strategy.pieces_per_stage
    names = [block.name for block in blocks]
    balanced = isinstance(strategy.balance, str)
    kept = cut_as_before(names, strategy.kept_split, pieces) if balanced else None
    edges, seconds = probe.run_through(
        blocks,
        inputs,
        rows=max(1, rows // strategy.micro_batches),
        trains=trains,
        convert=strategy.precision_plugin.convert_module,
        context=strategy.precision_plugin.forward_context,
        measured=trains and strategy.balance == "measured" and kept is None,
    )
    if kept is not None:
        bounds = kept
    elif balanced:
        costs = seconds or [float(block.size) for block in blocks]
        even = balance.partition(costs, pieces)
        bounds = balance.even_out(costs, even, strategy.position.stages)
    else:
        bounds = balance.cut_at(names, strategy.balance, pieces)
    return PipelinePlan(bounds, [edges[bound] for bound in bounds], seconds)


def cut_as_before(names: Sequence[str], starts: object, pieces: int) -> list[int] | None:
    """The bounds of a run that resumes, whose stages draw random numbers (dropout) each for itself.

    Args:
        names: Of the blocks, in order.
        starts: As the manifest of the checkpoint has them: the first block of each piece, except
            the first piece. None if it has none.
        pieces: How many the model is cut into now.

    Returns:
        None, with a warning, if they are not those of this model in so many pieces.
    """
    if starts is None:
        return None
    if isinstance(starts, list) and set(map(str, starts)) <= set(names):
        bounds = [0, *(names.index(str(name)) for name in starts), len(names)]
        if len(bounds) == pieces + 1 and sorted(set(bounds)) == bounds:
            return bounds
    log.warning(
        "the checkpoint's split %s is none of this model in %d pieces: it is cut anew, and what "
        "stages draw at random (dropout) is not what the run before would have drawn",
        starts,
        pieces,
    )
    return None


def _inputs(trainer: Trainer, device: torch.device) -> tuple[torch.Tensor, int]:
    """Inputs of the first block (at least one row), and the rows of a batch."""
    module, loop = trainer.lightning_module, trainer._active_loop
    assert loop is not None
    loader: Any = probe.first_of(loop._data_source.dataloader())
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        batch = probe.first_sample(loader)
        batch = module._apply_batch_transfer_handler(batch, device=device, dataloader_idx=0)
        inputs = module.pipeline_inputs(batch, 0)[0]  # type: ignore[operator]
    sampler = getattr(loader, "batch_sampler", None)
    rows = getattr(sampler, "batch_size", None) or getattr(loader, "batch_size", None)
    return inputs, rows or len(inputs)


def table(strategy: StagedStrategy, blocks: Sequence[Block], plan: PipelinePlan) -> str:
    """The stages, their costs, the predicted bubble, and the setting that repeats this split."""
    position, count = strategy.position, strategy.micro_batches
    stages = position.stages
    spans = list(itertools.pairwise(plan.bounds))

    def of_stage(stage: int, values: Sequence[float]) -> float:
        return sum(sum(values[start:end]) for start, end in spans[stage::stages])

    seconds = [of_stage(s, plan.seconds) if plan.seconds else 1.0 for s in range(stages)]
    sizes = [of_stage(s, [block.size for block in blocks]) for s in range(stages)]
    idle = balance.bubble(strategy.schedule, seconds, strategy.pieces_per_stage, count)
    assumed = "" if plan.seconds else " if the stages take equally long"
    replicas = f" x {position.replicas} replicas" if position.replicas > 1 else ""
    lines = [
        f"pipeline  {stages} stages{replicas}, {strategy.schedule}, {count} micro-batches: "
        f"predicted bubble {100 * idle:.1f} %{assumed}",
    ]
    rows = []
    for stage in range(stages):
        pieces = spans[stage::stages]
        measured = bool(plan.seconds)
        row = (
            str(stage),
            str(sum(end - start for start, end in pieces)),
            f"{int(sizes[stage]):,}",
            f"{1e3 * seconds[stage]:.1f}" if measured else "-",
            f"{100 * seconds[stage] / sum(seconds):.0f} %" if measured else "-",
            ", ".join(blocks[start].name for start, _ in pieces),
        )
        rows.append(row)
    columns = ("stage", "blocks", "parameters", "ms", "share", "begins at")
    lines.append(tables.text(columns, rows, numbers=True, indent=2).rstrip("\n"))
    starts = ",".join(blocks[start].name for start in plan.bounds[1:-1])
    lines.append(f"  the same split again: strategy.balance=[{starts}]")
    return "\n".join(lines)
