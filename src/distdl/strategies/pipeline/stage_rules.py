"""Which rank is which stage of a pipeline, and the checks of a pipeline's settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from hydra.errors import InstantiationException
from torch.distributed.device_mesh import init_device_mesh

from distdl.config.degrees import PIPELINE
from distdl.optim import layerwise
from distdl.strategies.pipeline import balance, splitting
from distdl.strategies.pipeline.balance import SEVERAL_PIECES
from distdl.util.errors import Problem, UserError
from distdl.util.suggest import closest
from distdl.validation.meta import build_on_meta, targets_own

BALANCES = ("measured", "parameters")
# For some networks, torch 2.11 cannot compute weight gradients separately; for others it counts
# some of them twice (torch/distributed/pipelining/_backward.py). Fixed by 2.14.
ZERO_BUBBLE_SINCE = "2.14"


@dataclass(frozen=True)
class StagePosition:
    """One rank's position in the mesh of pipelines (replicas of the model) and stages.

    Across "devices", the stages of a pipeline are neighbouring ranks; across "nodes", they are as
    far apart as possible, so that the copies of a stage share a node.
    """

    stage: int  # the part of the model; 0 takes the inputs
    stages: int
    replica: int  # the pipeline; each has its own share of the data
    replicas: int
    across: str = "devices"

    @classmethod
    def of_rank(
        cls, rank: int, world_size: int, stages: int, across: str = "devices"
    ) -> StagePosition:
        assert world_size % stages == 0
        replicas = world_size // stages
        if across == "nodes":
            return cls(rank // replicas, stages, rank % replicas, replicas, across)
        return cls(rank % stages, stages, rank // stages, replicas, across)

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == self.stages - 1

    def groups(self, device_type: str) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """The groups of this pipeline (in the order of its stages) and of this stage's copies.

        Collective.
        """
        names: tuple[str, str] = ("replica", "stage")
        shape = (self.replicas, self.stages)
        if self.across == "nodes":
            names, shape = names[::-1], shape[::-1]
        mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)
        return mesh["stage"].get_group(), mesh["replica"].get_group()


def pieces_per_stage(schedule: str, pieces: int) -> int:
    return pieces if schedule in SEVERAL_PIECES else 1


def default_micro_batches(stages: int) -> int:
    """Four per stage (Huang et al. 2019, "GPipe", arXiv 1811.06965, section 2.3)."""
    return 4 * stages


def splits_backward() -> bool:
    """Whether this torch computes weight gradients separately for any network."""
    return torch.__version__ >= ZERO_BUBBLE_SINCE


def check(node: Mapping[str, Any], context: Mapping[str, Any]) -> Iterator[Problem | str]:
    """The strategy's validation hook: checks settings, batch, precision and model.

    Yields:
        Problems; a text, if the model's blocks cannot be checked.
    """
    config = context.get("config") or {}
    trainer = config.get("trainer") or {}
    unfit = list(problems(node, context["world_size"]))
    yield from unfit
    if str(trainer.get("precision")) in ("16", "16-mixed", "16-true"):
        yield Problem(
            "",
            what=(
                "a pipeline does not train in fp16: the stages would scale their losses differently"
            ),
            remedy="trainer.precision=bf16-mixed",
            code="unsupported",
        )
    if node.get("schedule") == "zero_bubble" and not splits_backward():
        yield Problem(
            "schedule",
            what=f"zero_bubble needs torch {ZERO_BUBBLE_SINCE} or later, and this is an older one",
            remedy="strategy.schedule=interleaved",
            code="unsupported",
        )
    if trainer.get("sync_batchnorm"):
        yield Problem(
            "",
            what="batch norm cannot be synchronised: each stage sees one micro-batch at a time",
            remedy="trainer.sync_batchnorm=false; model.norm=group does not depend on the batch",
            code="unsupported",
        )
    yield from layerwise.refuse_some_layers(*layerwise.of_config(config))
    if not unfit and not [*PIPELINE.problems(node, context["world_size"])]:
        stages = node.get("stages") or context["world_size"]
        yield from _batch(node, stages, (config.get("data") or {}).get("batch_size"))
        if "model" not in context.get("refused", ()):
            yield from _model(node, stages, config.get("model"))


def problems(node: Mapping[str, Any], world_size: int) -> Iterator[Problem]:
    """Problems of the settings for this number of ranks; paths are relative to the node.

    Whether the stages divide the ranks is asked for every strategy, by `distdl.config.degrees`.
    """
    cut = node.get("balance", "measured")
    if isinstance(cut, str) and cut not in BALANCES:
        near = closest(cut, BALANCES)
        listed = "measured, parameters, or a list of blocks: strategy.balance=[network.layer3.0]"
        yield Problem(
            "balance",
            what=f"is {cut!r}",
            remedy=f"did you mean strategy.balance={near}?" if near else listed,
            code="wrong-choice",
        )
    stages = node.get("stages") or world_size
    if world_size < 2 and not node.get("stages"):
        yield Problem(
            "",
            what="a pipeline needs at least two devices, and there is one",
            remedy="trainer.devices=2",
            code="not-enough",
        )
    elif stages < 2:
        yield Problem(
            "stages",
            what="a pipeline needs at least two stages",
            remedy="strategy=ddp",
            code="not-enough",
        )
    elif not [*PIPELINE.problems(node, world_size)]:
        yield from _micro_batches(node, stages)


def _micro_batches(node: Mapping[str, Any], stages: int) -> Iterator[Problem]:
    schedule = node.get("schedule", "1f1b")
    count = node.get("micro_batches") or default_micro_batches(stages)
    if count < stages:
        yield Problem(
            "micro_batches",
            what=f"{count} are too few for {stages} stages: most of them would always wait",
            remedy=f"strategy.micro_batches={default_micro_batches(stages)}, at least {stages}",
            code="not-enough",
        )
    elif not _equal_rounds(count, stages, schedule):
        yield Problem(
            "micro_batches",
            what=f"{count} cannot form equal rounds of about {stages}, which {schedule=!s} needs",
            remedy=f"strategy.micro_batches={count // stages * stages}",
            code="indivisible",
        )
    if schedule in SEVERAL_PIECES and (node.get("pieces_per_stage") or 2) < 2:
        yield Problem(
            "pieces_per_stage",
            what=f"{schedule=!s} needs at least two",
            remedy="strategy.pieces_per_stage=2",
            code="not-enough",
        )


def _equal_rounds(count: int, stages: int, schedule: str) -> bool:
    return schedule not in SEVERAL_PIECES or count % (count // stages) == 0


def _batch(node: Mapping[str, Any], stages: int, rows: object) -> Iterator[Problem]:
    count = node.get("micro_batches") or default_micro_batches(stages)
    if type(rows) is int and rows > 0 and rows % count:
        schedule = node.get("schedule", "1f1b")
        # At least two samples per micro-batch: batch norm may be unable to train on one.
        counts = (n for n in range(stages, rows // 2 + 1) if rows % n == 0)
        fit = [n for n in counts if _equal_rounds(n, stages, schedule)]
        near = min(fit, key=lambda n: abs(n - count), default=None)
        more = f"strategy.micro_batches={near}, or " if near else ""
        yield Problem(
            "micro_batches",
            what=f"data.batch_size={rows} does not divide into {count} micro-batches",
            remedy=f"{more}data.batch_size={max(2, round(rows / count)) * count}",
            code="indivisible",
        )


def _model(node: Mapping[str, Any], stages: int, model: object) -> Iterator[Problem | str]:
    """Builds the model on `meta` and checks its blocks."""
    if not isinstance(model, Mapping) or "_target_" not in model:
        return
    if model.get("compile") not in (None, False, "auto"):
        yield Problem(
            "",
            what="cannot compile the stages of a pipeline",
            remedy="model.compile=false",
            code="unsupported",
        )
    try:
        module = build_on_meta(targets_own(model))
    except InstantiationException as error:  # the model's own check reports what is wrong
        why = type(error.__cause__ or error).__name__
        yield f"the blocks: {why} where the model is built without memory"
        return
    try:
        blocks = splitting.blocks_in(module)
        pieces = node.get("pieces_per_stage") or 2
        per_stage = pieces_per_stage(node.get("schedule", "1f1b"), pieces)
        yield from too_many(stages, per_stage, len(blocks))
        if isinstance(node.get("balance"), list):
            names = [block.name for block in blocks]
            balance.cut_at(names, node["balance"], stages * per_stage)
    except UserError as error:
        for problem in error.problems:
            path = problem.path.removeprefix("strategy").removeprefix(".")
            yield replace(problem, path="" if path == "model" else path)


def too_many(stages: int, per_stage: int, blocks: int) -> Iterator[Problem]:
    """Reports more pieces than the model has blocks."""
    if stages * per_stage <= blocks:
        return
    several = per_stage > 1
    most = blocks // stages
    pieces = f" of {per_stage} pieces" if several else ""
    what = f"{stages} stages{pieces} are more than the {blocks} blocks of the model"
    if several and most > 1:
        yield Problem(
            "pieces_per_stage",
            what=what,
            remedy=f"at most strategy.pieces_per_stage={most}",
            code="not-enough",
        )
    else:
        fewer = " strategy.pieces_per_stage=2" if per_stage > 2 else ""
        most = blocks // 2 if several else blocks
        yield Problem(
            "stages", what=what, remedy=f"at most strategy.stages={most}{fewer}", code="not-enough"
        )
