"""What a prediction starts from: one device's step, what travels, and on which links."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields

from distdl.errors import Problem, UserError
from distdl.scaling.checks import FROM_0, MORE_THAN_0, amiss
from distdl.scaling.links import ALGORITHMS, Links
from distdl.strategies.pipeline.balance import FILLING, SEVERAL_PIECES
from distdl.suggest import closest

FASTEST = "fastest"
# Of forward and backward, the backward takes two thirds (two products of matrices for each one).
BACKWARD_SHARE = 2 / 3
STRATEGIES = ("ddp", "fsdp", "deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3", "pipeline")
# Of these nothing could be said: told apart from misspelt names.
NOT_PREDICTED = ("single", "local_sgd", "deepspeed_offload")
# Fields that say something of a pipeline only.
OF_A_PIPELINE = ("stages", "micro_batches", "schedule", "pieces_per_stage", "activation_bytes")
WHOLE = ("devices_per_node", "stages", "micro_batches", "pieces_per_stage")
POSITIVE = ("step_seconds", "bucket_bytes", *WHOLE)
# The sizes of what travels may be 0, overheads too.
NOT_NEGATIVE = (
    "backward_share",
    "weight_bytes",
    "gradient_bytes",
    "overhead_seconds",
    "spread_seconds",
    "activation_bytes",
)
OPTIONAL = ("weight_bytes", "micro_batches")


@dataclass(frozen=True)
class Setting:
    """What was measured on one device, and on what it would run.

    Args:
        step_seconds: Of an optimizer step of one device alone.
        gradient_bytes: Of all gradients, as they travel.
        links: Inside a node and between nodes.
        devices_per_node: Of a full node.
        strategy: One of STRATEGIES.
        backward_share: Of the step, in which gradients are made; by default two thirds.
        bucket_bytes: Gradients (of FSDP and ZeRO-3 also weights) travel in pieces of about this
            size; by default DDP's 25 MiB.
        weight_bytes: That FSDP and ZeRO gather; by default as many as gradients.
        algorithm: Of `links.ALGORITHMS`, or "fastest".
        overhead_seconds: Of any step with several devices: hooks, copies, kernels that get in each
            other's way. `fit` finds it.
        spread_seconds: Standard deviation of one device's step; all wait for the slowest.
        stages: Of a pipeline: devices that share one copy of the model, cut evenly.
        micro_batches: Of a pipeline and step; by default 4 per stage.
        schedule: Of a pipeline: "gpipe", "1f1b", "interleaved" or "zero_bubble".
        pieces_per_stage: Of the latter two; the others take 1.
        activation_bytes: Of a pipeline: of one device's batch, at a cut, in one direction.

    Raises:
        UserError: A value makes no sense, alone or with another (a pipeline's under another
            strategy).
    """

    step_seconds: float
    gradient_bytes: float
    links: Links
    devices_per_node: int
    strategy: str = "ddp"
    backward_share: float = BACKWARD_SHARE
    bucket_bytes: float = 25 * 2**20
    weight_bytes: float | None = None
    algorithm: str = FASTEST
    overhead_seconds: float = 0.0
    spread_seconds: float = 0.0
    stages: int = 1
    micro_batches: int | None = None
    schedule: str = "1f1b"
    pieces_per_stage: int = 1
    activation_bytes: float = 0.0

    def __post_init__(self) -> None:
        problems = [*_numbers(self), *_names(self)]
        problems += _together(self, {problem.path for problem in problems})
        if problems:
            raise UserError(*problems)
        # What multiplies a list or is printed as a count must be an int, and 8.0 is as good as 8.
        for name in WHOLE:
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, int(value))

    @property
    def buckets(self) -> int:
        return max(1, math.ceil(self.gradient_bytes / self.bucket_bytes))


def _numbers(setting: Setting) -> Iterator[Problem]:
    for names, bound in ((POSITIVE, MORE_THAN_0), (NOT_NEGATIVE, FROM_0)):
        for name in names:
            value = getattr(setting, name)
            if value is None and name in OPTIONAL:
                continue
            if what := amiss(value, bound, name in WHOLE):
                yield Problem(name, what)
            elif name == "backward_share" and value > 1:
                yield Problem(name, f"is a share of the step, not {value}")
    if not isinstance(setting.links, Links):
        yield Problem(
            "links", f"must be Links, not {setting.links!r}", "Links(inside=Link(...), between=...)"
        )


def _names(setting: Setting) -> Iterator[Problem]:
    for path, value, known in (
        ("strategy", setting.strategy, STRATEGIES),
        ("algorithm", setting.algorithm, (*ALGORITHMS, FASTEST)),
        ("schedule", setting.schedule, tuple(FILLING)),
    ):
        remedy = f"one of {', '.join(known)}"
        if not isinstance(value, str):
            yield Problem(path, f"must be a name, not {value!r}", remedy)
        elif value in known:
            continue
        elif value in NOT_PREDICTED and path == "strategy":
            yield Problem(path, f"{value} is not predicted", remedy)
        else:
            near = closest(value, known)
            yield Problem(
                path, f"there is no {value!r}", f"did you mean {near}?" if near else remedy
            )


def _together(setting: Setting, wrong: Collection[str]) -> Iterator[Problem]:
    """Values that would go unused, or be used for what they do not mean.

    Args:
        wrong: Fields that were refused by themselves: what is wrong with them together nobody
            knows before they are mended.
    """
    name, schedule, pieces = setting.strategy, setting.schedule, setting.pieces_per_stage
    if "strategy" in wrong:
        return
    if name != "pipeline":
        for field in fields(setting):
            if field.name not in OF_A_PIPELINE or field.name in wrong:
                continue
            value = getattr(setting, field.name)
            if value != field.default:
                yield Problem(
                    field.name,
                    f"{value} belongs to a pipeline, and {name} has none",
                    f"strategy='pipeline', or leave {field.name} out",
                )
    elif "schedule" in wrong or "pieces_per_stage" in wrong or schedule in SEVERAL_PIECES:
        return
    elif pieces != 1:
        yield Problem(
            "pieces_per_stage",
            f"{pieces} pieces need a schedule that interleaves them, and {schedule} does not",
            " or ".join(f"schedule='{each}'" for each in SEVERAL_PIECES)
            + ", or leave pieces_per_stage out",
        )
