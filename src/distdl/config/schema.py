"""The typed shape of a composed config, section by section (pydantic, no torch).

Sections that distdl reads itself have fixed keys. A component section (`model`, `data`, ...) names
a class by `_target_`; its other keys are that class's arguments, which `validation.binder` checks
against the signature. For `trainer` the types of Lightning's arguments are listed here, so that
most mistakes are found without importing Lightning; binding finds unknown arguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

from omegaconf import DictConfig
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, WithJsonSchema

from distdl.config.recipe import plain
from distdl.util.ranges import AboveZero, Count, NotNegative, Positive
from distdl.util.suggest import plain_text

T = TypeVar("T")


def _must(fits: Callable[[Any], bool], expected: str) -> AfterValidator:
    def checked(value: T) -> T:
        if not fits(value):
            raise ValueError(expected)
        return value

    return AfterValidator(checked)


def _are_devices(value: object) -> bool:
    numbers = value if isinstance(value, list) else [value or -1]
    counted = [type(number) is int and number >= 0 for number in numbers]
    return value in ("auto", -1) or (bool(counted) and all(counted))


# Refuses "None", which is Python's null, and "", which an unset variable leaves.
_NAMED = _must(lambda value: value.strip() not in ("", "None"), "null or a text")
Text = Annotated[str, _NAMED, WithJsonSchema({"type": "string", "pattern": r"\S"})]
_LETTERS = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_PLAIN = _must(
    lambda value: re.fullmatch(_LETTERS, value) is not None,
    "made of letters from a to z, digits, dots, underscores and dashes",
)
_NAME = WithJsonSchema({"type": "string", "maxLength": 200, "pattern": f"^{_LETTERS}$"})
Name = Annotated[str, Field(max_length=200), _PLAIN, _NAMED, _NAME]
MinusOneOrMore = Annotated[int, Field(ge=-1)]
# "00:12:00:00", {hours: 12}, or a node of datetime.timedelta.
Time = Text | dict[str, Any]
Limit = Count | NotNegative | None
_DEVICES = "a number of devices of each node, 1 or more, -1 or auto for all of them"
PRECISIONS = (
    "16",
    "32",
    "64",
    "bf16",
    "16-true",
    "16-mixed",
    "bf16-true",
    "bf16-mixed",
    "32-true",
    "64-true",
    "transformer-engine",
    "transformer-engine-float16",
)
_PRECISION = "32-true, 16-mixed, bf16-mixed, 16-true, bf16-true or 64-true"
# What a file may say, for editors: composing makes Lightning's own words and numbers of it.
_SHORT = WithJsonSchema({"enum": [*PRECISIONS, 16, 32, 64]})
Precision = Annotated[Any, _must(lambda value: str(value) in PRECISIONS, _PRECISION), _SHORT] | None
_COUNTED = WithJsonSchema(
    {
        "anyOf": [
            {"enum": ["auto", -1]},
            {"type": "integer", "minimum": 1},
            {"type": "array", "items": {"type": "integer", "minimum": 0}},
            {"type": "string", "pattern": r"^[\s\d,-]+$"},
        ]
    }
)


# Strict: "3" and true are not accepted as an int; an int is accepted as a float.
class _Fixed(BaseModel, extra="forbid", strict=True, allow_inf_nan=False): ...


class _Open(BaseModel, extra="allow", strict=True, allow_inf_nan=False): ...


class Project(_Fixed):
    """Where the user's own code is, and which other code a config may name."""

    root: Text | None = None
    allow: list[str] = []
    max_snapshot_mb: AboveZero = 300


class Checkpoint(_Fixed):
    """When checkpoints are saved, and what of them is kept and trusted: see `conf/distdl.yaml`."""

    every_n_steps: Positive | None = None
    every_minutes: AboveZero | None = 10
    every_n_epochs: Positive = 1
    keep_last: Positive = 2
    monitor: Text | None = None
    mode: Literal["min", "max"] = "max"
    sharded: bool = False
    background: bool = True
    resume_from: Text | None = None
    trust_pickle: bool = False

    @classmethod
    def of(cls, node: Mapping[str, Any]) -> Checkpoint:
        """The section of a config that is validated, or was before it was frozen.

        Raises:
            pydantic.ValidationError: A value does not fit (a ValueError).
        """
        return cls.model_validate(plain(node))


class WatchdogSettings(_Fixed):
    enabled: bool = True
    timeout: AboveZero | None = None


class Size(_Open):
    """The arguments of the Trainer that say on how many devices a run trains, and on which."""

    accelerator: Literal["auto", "cpu", "gpu", "cuda", "mps"] = "auto"
    devices: Annotated[Any, _must(_are_devices, _DEVICES), _COUNTED] = "auto"
    num_nodes: Positive = 1

    @classmethod
    def of(cls, trainer: Mapping[str, Any]) -> Self:
        """The arguments of this class in a `trainer` node. Its other values are not looked at.

        Raises:
            pydantic.ValidationError: A value does not fit (a ValueError).
        """
        values = plain(trainer) if isinstance(trainer, DictConfig) else trainer
        return cls.model_validate({key: values[key] for key in cls.model_fields if key in values})


class TrainerArguments(Size):
    """Types of the arguments of lightning.pytorch.Trainer (2.6) that distdl leaves to the user."""

    precision: Precision = None
    fast_dev_run: bool | Count = False
    max_epochs: MinusOneOrMore | None = None
    min_epochs: Count | None = None
    max_steps: MinusOneOrMore = -1
    min_steps: Count | None = None
    max_time: Time | None = None
    limit_train_batches: Limit = None
    limit_val_batches: Limit = None
    limit_test_batches: Limit = None
    limit_predict_batches: Limit = None
    overfit_batches: Limit = 0.0
    val_check_interval: Positive | AboveZero | Time | None = None
    check_val_every_n_epoch: Positive | None = 1
    num_sanity_val_steps: MinusOneOrMore | None = None
    log_every_n_steps: Positive | None = None
    enable_model_summary: bool | None = None
    accumulate_grad_batches: Positive = 1
    gradient_clip_val: NotNegative | None = None
    gradient_clip_algorithm: Literal["norm", "value"] | None = None
    deterministic: bool | Literal["warn"] | None = None
    benchmark: bool | None = None
    inference_mode: bool = True
    profiler: Text | dict[str, Any] | None = None
    detect_anomaly: bool = False
    sync_batchnorm: bool = False
    reload_dataloaders_every_n_epochs: Count = 0
    use_distributed_sampler: bool = True
    enable_autolog_hparams: bool = True

    @property
    def precision_name(self) -> str:
        """Lightning's word for it, `32-true` by default; a config of before may have 16."""
        return str(self.precision or "32-true")


class Component(_Open):
    """A mapping that names a class or function (`_target_`) and its arguments."""

    target: str = Field(alias="_target_")
    partial: bool = Field(False, alias="_partial_")
    recursive: bool = Field(True, alias="_recursive_")
    convert: Literal["none", "partial", "object", "all"] = Field("none", alias="_convert_")
    args: list[Any] = Field([], alias="_args_")


_SOME = _must(lambda value: type(value) is not int or value >= 1, "an integer of at least 1")


class Data(Component):
    batch_size: Positive = 1
    num_workers: Count | None = None
    image_size: Annotated[Any, _SOME] = None  # a user's class may take a pair


class Optimizer(Component):
    lr: AboveZero = 1.0
    lr_scaling: Literal["linear", "sqrt", "none"] = "none"
    lr_reference_batch: Positive = 256
    decay_norm_and_bias: bool = False
    layer_decay: Annotated[float, Field(gt=0, le=1)] | None = None
    backbone_lr: AboveZero | None = None


class Schedule(Component):
    warmup_epochs: NotNegative = 0.0


class Config(_Fixed):
    """The complete config. Groups that `~group` may remove have a default; the rest is required."""

    name: Name | None
    experiment_name: Name | None
    seed: Count
    tags: list[str]
    output_dir: str
    dry_run: bool
    follow: bool
    project: Project
    checkpoint: Checkpoint
    preflight: bool = False
    watchdog: WatchdogSettings = WatchdogSettings()
    trainer: TrainerArguments
    task: Component
    model: Component | None = None
    data: Data | None = None
    optimizer: Optimizer | None = None
    schedule: Schedule | None = None
    strategy: Component | None = None
    launcher: Component | None = None
    tracking: dict[str, Component | None] | None = None
    callbacks: dict[str, Component | None] | None = None


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


_WORDS = _must(
    lambda words: bool(words) and all(type(w) is str and "\0" not in w for w in words) and words[0],
    "a command: its words",
)
_PARAMS = _must(
    lambda values: all(_is_plain(value) for value in values.values()), "names with plain values"
)


def _as_words(command: object) -> object:
    """A number in a command is a word: `--lr ${program.params.lr}`."""
    if not isinstance(command, list):
        return command
    return [plain_text(word) if _is_plain(word) else word for word in command]


class Program(_Fixed):
    """A program that is started instead of a training (docs/programs.md).

    Args:
        command: Its words, as they are executed, by no shell.
        per: Whether each rank starts it, or the first of each node.
        framework: Whose variables it gets besides torch's.
        parameter_servers: How many of TensorFlow's tasks are parameter servers, the last ones.
        evaluator: Whether TensorFlow's last task is an evaluator.
        params: Values for `${program.params.NAME}` in the command.
        checkpoints: A folder or a store (URL) that outlives the job; None: the run's folder.
        sync: Seconds between two uploads of finished files to a place that is no folder.
    """

    command: Annotated[list[Any], BeforeValidator(_as_words), _WORDS]
    per: Literal["rank", "node"] = "rank"
    framework: Literal["tensorflow", "mpi", "jax"] | None = None
    parameter_servers: Count = 0
    evaluator: bool = False
    params: Annotated[dict[str, Any], _PARAMS] = {}
    checkpoints: Text | None = None
    sync: AboveZero = 300

    @classmethod
    def of(cls, node: Mapping[str, Any]) -> Program:
        """The section of a config that is validated, or was before it was frozen.

        Raises:
            pydantic.ValidationError: A value does not fit (a ValueError).
        """
        return cls.model_validate(plain(node))


class ProgramSize(Size, extra="forbid"):
    """The size of a program's run."""


class ProgramConfig(_Fixed):
    """The complete config of a program."""

    name: Name | None
    experiment_name: Name | None
    tags: list[str]
    output_dir: str
    dry_run: bool
    follow: bool
    project: Project
    preflight: bool = False
    watchdog: WatchdogSettings = WatchdogSettings()
    trainer: ProgramSize
    launcher: Component | None = None
    tracking: dict[str, Component | None] | None = None
    program: Program


COMPONENTS = ("model", "data", "optimizer", "schedule", "strategy", "launcher", "task")
COLLECTIONS = ("tracking", "callbacks")


def known_paths() -> Iterator[str]:
    """Every path that the schema itself names, such as `trainer.max_epochs`."""
    fields = {**ProgramConfig.model_fields, **Config.model_fields}
    for key, field in fields.items():
        yield key
        for kind in (field.annotation, *get_args(field.annotation)):
            inner = getattr(kind, "model_fields", {}).items()
            yield from (f"{key}.{name}" for name, each in inner if each.alias is None)
