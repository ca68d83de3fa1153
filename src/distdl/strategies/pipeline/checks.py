"""Refuses a pipeline that cannot run, before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from distdl.errors import Problem, UserError
from distdl.meta import WEIGHTS
from distdl.suggest import closest

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
SEVERAL_PIECES = ("interleaved", "zero_bubble")  # several pieces of the model per device
BALANCES = ("measured", "parameters")
# torch 2.11 cannot compute the weight gradients of some networks apart, and counts some twice where
# it can: torch/distributed/pipelining/_backward.py, mended there by 2.14.
ZERO_BUBBLE_SINCE = "2.14"


def pieces_per_stage(schedule: str, pieces: int) -> int:
    return pieces if schedule in SEVERAL_PIECES else 1


def stages_of(node: Mapping[str, Any], world_size: int) -> int:
    stages = node.get("stages")
    return world_size if stages is None else stages


def default_micro_batches(stages: int) -> int:
    """Four per stage (Huang et al. 2019, "GPipe", arXiv 1811.06965, section 2.3)."""
    return 4 * stages


def problems(node: Mapping[str, Any], world_size: int) -> Iterator[Problem]:
    """What is wrong with the settings, given how many ranks there are.

    Args:
        node: stages, schedule, micro_batches, pieces_per_stage, across, as the strategy takes them.
    """
    schedule = node.get("schedule", "1f1b")
    if schedule not in SCHEDULES:
        yield Problem("schedule", f"there is no {schedule!r}", f"one of {', '.join(SCHEDULES)}")
        return
    if node.get("across", "devices") not in ("devices", "nodes"):
        yield Problem("across", f"is {node['across']!r}", "devices or nodes")
    cut = node.get("balance", "measured")
    if isinstance(cut, str) and cut not in BALANCES:
        near = closest(cut, BALANCES)
        yield Problem(
            "balance",
            f"is {cut!r}",
            f"did you mean strategy.balance={near}?"
            if near
            else "measured, parameters, or a list of blocks: strategy.balance=[network.layer3.0]",
        )
    if world_size < 2:
        yield Problem(
            "", "a pipeline needs at least two devices, and there is one", "trainer.devices=2"
        )
        return
    stages = stages_of(node, world_size)
    if stages < 2:
        yield Problem("stages", "a pipeline of one stage is none", "strategy=ddp")
        return
    if world_size % stages:
        fit = [str(n) for n in range(2, world_size + 1) if world_size % n == 0]
        yield Problem(
            "stages",
            f"{stages} stages do not divide the {world_size} devices",
            f"strategy.stages={' or '.join(fit)}",
        )
        return
    yield from _micro_batches(node, stages, schedule)


def _micro_batches(node: Mapping[str, Any], stages: int, schedule: str) -> Iterator[Problem]:
    given = node.get("micro_batches")
    count = given or default_micro_batches(stages)
    if count < stages:
        yield Problem(
            "micro_batches",
            f"{count} are too few for {stages} stages: most of them would always wait",
            f"strategy.micro_batches={default_micro_batches(stages)}, at least {stages}",
        )
    elif not _equal_rounds(count, stages, schedule):
        yield Problem(
            "micro_batches",
            f"{count} do not make equal rounds of about {stages}, which schedule={schedule} needs",
            f"strategy.micro_batches={count // stages * stages}",
        )
    if schedule in SEVERAL_PIECES and (node.get("pieces_per_stage") or 2) < 2:
        yield Problem(
            "pieces_per_stage",
            f"schedule={schedule} needs at least two",
            "strategy.pieces_per_stage=2",
        )


def _equal_rounds(count: int, stages: int, schedule: str) -> bool:
    return schedule not in SEVERAL_PIECES or count % (count // stages) == 0


def best_count(rows: int, count: int, stages: int, schedule: str) -> int | None:
    """The number of micro-batches next to `count` that cuts a batch into equal ones of several
    samples, of one of which a batch norm may not be able to train; None: there is none."""
    fit = [
        n
        for n in range(stages, rows // 2 + 1)
        if rows % n == 0 and _equal_rounds(n, stages, schedule)
    ]
    return min(fit, key=lambda n: abs(n - count), default=None)


def splits_backward() -> bool:
    """Whether this torch computes the gradients of weights apart, for any network."""
    import torch  # not above: predictions ask this module, too, and wait for no torch

    return torch.__version__ >= ZERO_BUBBLE_SINCE


def check(node: Mapping[str, Any], context: Mapping[str, Any]) -> Iterator[Problem]:
    """The strategy's hook of validation (distdl.binding): settings, batch, precision, model."""
    world_size = context["world_size"]
    found = list(problems(node, world_size))
    yield from found
    config = context.get("config") or {}
    trainer = config.get("trainer") or {}
    if str(trainer.get("precision")) in ("16", "16-mixed", "16-true"):
        yield Problem(
            "",
            "a pipeline does not train in fp16: the stages would scale their losses differently",
            "trainer.precision=bf16-mixed",
        )
    if node.get("schedule") == "zero_bubble" and not splits_backward():
        what = f"zero_bubble needs torch {ZERO_BUBBLE_SINCE} or later, and there is an older one"
        yield Problem("schedule", what, "strategy.schedule=interleaved")
    if trainer.get("sync_batchnorm"):
        yield Problem(
            "",
            "batch norm cannot be synchronised: each stage sees one micro-batch at a time",
            "trainer.sync_batchnorm=false; model.norm=group does not depend on the batch",
        )
    if not found:
        stages = stages_of(node, world_size)
        yield from _batch(node, stages, config.get("data") or {})
        if "model" not in context.get("refused", ()):
            yield from _model(node, stages, config.get("model"))


def _batch(node: Mapping[str, Any], stages: int, data: Mapping[str, Any]) -> Iterator[Problem]:
    rows = data.get("batch_size")
    count = node.get("micro_batches") or default_micro_batches(stages)
    if type(rows) is int and rows > 0 and rows % count:
        near = best_count(rows, count, stages, node.get("schedule", "1f1b"))
        more = f"strategy.micro_batches={near}, or " if near else ""
        yield Problem(
            "micro_batches",
            f"data.batch_size={rows} does not divide into {count} micro-batches",
            f"{more}data.batch_size={max(2, round(rows / count)) * count}",
        )


def _model(node: Mapping[str, Any], stages: int, model: Any) -> Iterator[Problem]:
    """Builds the model on `meta` and looks for its blocks."""
    if not isinstance(model, Mapping) or "_target_" not in model:
        return
    if model.get("compile"):
        yield Problem("", "the stages of a pipeline are not compiled", "model.compile=false")
    import torch
    from hydra.utils import instantiate

    from distdl.strategies.pipeline import balance, splitting

    try:
        with torch.device("meta"):
            module = instantiate(_without_weights(model), _convert_="all")
    except Exception:
        return  # the model's own check speaks of it, or it cannot be built on meta
    try:
        blocks = splitting.blocks_in(module)
        per_stage = pieces_per_stage(
            node.get("schedule", "1f1b"), node.get("pieces_per_stage") or 2
        )
        pieces = stages * per_stage
        yield from too_many(pieces, per_stage, len(blocks))
        if isinstance(node.get("balance"), list):
            balance.cut_at([block.name for block in blocks], node["balance"], pieces)
    except UserError as error:
        for problem in error.problems:
            path = problem.path.removeprefix("strategy").removeprefix(".")
            yield Problem("" if path == "model" else path, problem.what, problem.remedy)


def too_many(pieces: int, per_stage: int, blocks: int) -> Iterator[Problem]:
    if pieces > blocks:
        stages, several = pieces // per_stage, per_stage > 1
        of = f" of {per_stage} pieces" if several else ""
        what = f"{stages} stages{of} are more than the {blocks} blocks of the model"
        most = blocks // stages
        if several and most > 1:
            yield Problem("pieces_per_stage", what, f"at most strategy.pieces_per_stage={most}")
        else:
            most = blocks // 2 if several else blocks
            fewer = " strategy.pieces_per_stage=2" if per_stage > 2 else ""
            yield Problem("stages", what, f"at most strategy.stages={most}{fewer}")


def at_strategy(problem: Problem) -> Problem:
    """The problem with the path that a user writes."""
    path = f"strategy.{problem.path}" if problem.path else "strategy"
    return Problem(path, problem.what, problem.remedy)


def _without_weights(node: Any) -> Any:
    """Nothing is downloaded to be looked at on `meta`."""
    if isinstance(node, Mapping):
        return {k: _without_weights(v) for k, v in node.items() if k not in WEIGHTS}
    return [_without_weights(v) for v in node] if isinstance(node, list) else node
