"""The typed shape of a composed config, section by section (pydantic, no torch).

Sections that distdl reads itself have fixed keys. A component section (`model`, `data`, ...) names
a class by `_target_`; its other keys are that class's arguments, which `distdl.binding` checks
against the signature. `trainer` is in between: the types of Lightning's arguments are here, so that
most mistakes are found without importing Lightning, and unknown ones are found by binding.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from distdl import words
from distdl.errors import Problem
from distdl.ranges import AboveZero, Count, NotNegative, Positive
from distdl.suggest import did_you_mean, respelt, strategy_for, written

Path = tuple[str | int, ...]


def _named(value: str) -> str:
    """`None` is how Python spells null, and nothing is what a variable leaves that is not set."""
    if value.strip() in ("", "None"):
        raise ValueError("null or a text")
    return value


Text = Annotated[str, AfterValidator(_named)]
Name = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200), AfterValidator(_named)
]
MinusOneOrMore = Annotated[int, Field(ge=-1)]
# "00:12:00:00", {hours: 12}, or a node of datetime.timedelta.
Time = Text | dict[str, Any]
Limit = Annotated[int, Field(ge=0)] | NotNegative | None


def _devices(value: Any) -> Any:
    numbers = value if isinstance(value, list) else [value]
    counted = [type(n) is int and n >= 0 for n in numbers]
    if value not in ("auto", -1) and (value == 0 or not counted or not all(counted)):
        raise ValueError("a number of devices of each node, 1 or more, -1 or auto for all of them")
    return value


def _precision(value: Any) -> Any:
    if value is not None and str(value) not in _LIGHTNINGS:
        raise ValueError("32-true, 16-mixed, bf16-mixed, 16-true, bf16-true or 64-true")
    return value


_LIGHTNINGS = (
    *("16", "32", "64", "bf16", "16-true", "16-mixed", "bf16-true", "bf16-mixed", "32-true"),
    *("64-true", "transformer-engine", "transformer-engine-float16"),
)
Precision = Annotated[Any, AfterValidator(_precision)]


class _Fixed(BaseModel):
    # Strict: "3" is no int and true is no int; an int is fine where a float is asked for.
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _Open(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class Project(_Fixed):
    """Where the user's own code is, and whose classes a config may name."""

    root: Text | None = None
    allow: list[str] = []
    max_snapshot_mb: AboveZero = 300


class Checkpoint(_Fixed):
    every_n_steps: Positive | None = None
    every_minutes: AboveZero | None = None
    every_n_epochs: Positive = 1
    keep_last: Positive = 1
    monitor: Text | None = None
    mode: Literal["min", "max"] = "max"
    sharded: bool = False
    background: bool = True
    resume_from: Text | None = None
    trust_pickle: bool = False


class TrainerArguments(_Open):
    """Types of the arguments of lightning.pytorch.Trainer (2.6) that distdl leaves to the user."""

    accelerator: Literal["auto", "cpu", "gpu", "cuda", "mps"] = "auto"
    devices: Annotated[Any, AfterValidator(_devices)] = "auto"
    num_nodes: Positive = 1
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


# Arguments of the Trainer that distdl fills itself, and what the user sets instead.
TRAINER_OWNED = {
    "logger": "choose loggers by the group tracking: tracking=mlflow, tracking=csv",
    "callbacks": "add callbacks under callbacks: +callbacks.<name>._target_=package.Class",
    "plugins": "choose the precision by trainer.precision, the rest by the group strategy",
    "strategy": "choose the strategy by its group: strategy=ddp",
    "default_root_dir": "choose the place of all runs by output_dir=FOLDER",
    "enable_progress_bar": "the bar is shown on a terminal; callbacks.progress=null removes it",
    "enable_checkpointing": "choose what is saved by checkpoint.*",
    "model_registry": "add litmodels' callback, which uploads: +callbacks.<name>._target_=...",
    "barebones": "task=benchmark measures a step without what is around it",
}


class Component(_Open):
    """A mapping that names a class or function (`_target_`) and its arguments."""

    target: str = Field(alias="_target_")
    partial: bool = Field(False, alias="_partial_")
    recursive: bool = Field(True, alias="_recursive_")
    convert: Literal["none", "partial", "object", "all"] = Field("none", alias="_convert_")
    args: list[Any] = Field([], alias="_args_")


def _some(value: Any) -> Any:
    if type(value) is int and value < 1:
        raise ValueError("an integer of at least 1")
    return value


class Data(Component):
    batch_size: Positive = 1
    num_workers: Count | None = None
    image_size: Annotated[Any, AfterValidator(_some)] = None  # of others it may be a pair


class Optimizer(Component):
    lr: AboveZero = 1.0
    lr_scaling: Literal["linear", "sqrt", "none"] = "linear"
    lr_reference_batch: Positive = 256
    decay_norm_and_bias: bool = False


class Schedule(Component):
    warmup_epochs: NotNegative = 0.0


class Config(_Fixed):
    """The whole config. Groups that `~group` may remove have a default; the rest is required."""

    name: Name | None
    experiment_name: Name | None
    seed: Count
    tags: list[str]
    output_dir: str
    dry_run: bool
    follow: bool
    project: Project
    checkpoint: Checkpoint
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


COMPONENTS = ("model", "data", "optimizer", "schedule", "strategy", "launcher", "task")
COLLECTIONS = ("tracking", "callbacks")
# Groups that are layered over everything else, in this order: `experiment=x` has no key of its own.
LAYERS = ("experiment", "debug")
# What `optimizer=none` composes to: an empty mapping, which is as good as null.
EMPTY_ALLOWED = ("model", "data", "optimizer", "schedule", "strategy", "launcher")


def known_paths() -> Iterator[str]:
    """Every path that the schema itself names, such as `trainer.max_epochs`."""
    sections: dict[str, type[BaseModel]] = {
        "project": Project,
        "checkpoint": Checkpoint,
        "trainer": TrainerArguments,
        "data": Data,
        "optimizer": Optimizer,
        "schedule": Schedule,
    }
    for key in Config.model_fields:
        yield key
        if key in sections:
            for name, field in sections[key].model_fields.items():
                if field.alias is None:
                    yield f"{key}.{name}"


def path_text(path: Path) -> str:
    """Writes a path as the user would: `callbacks.ema.layers[0]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def check(
    values: Mapping[str, Any], *, show: Callable[[Path], str], known: Iterable[str]
) -> list[tuple[Path, Problem]]:
    """Checks resolved values against the schema.

    Args:
        values: The resolved config as plain containers.
        show: Prints the value at a path without giving away what came from the environment.
        known: Paths to choose suggestions from.
    """
    shaped = {key: None if _empty(key, value) else value for key, value in values.items()}
    try:
        Config.model_validate(shaped)
    except ValidationError as error:
        found: dict[Path, list[str]] = {}
        problems = []
        for item in error.errors(include_url=False, include_context=False, include_input=False):
            path, deeper = _real_path(shaped, item["loc"])
            if item["type"] == "extra_forbidden":
                problems += _unknown(path, _at(shaped, path), known, values)
            elif item["type"] == "missing":
                problems.append(_absent(path, deeper, _at(shaped, path), known, values))
            else:
                found.setdefault(path, []).append(_sentence(item["msg"]))
        for path, sentences in found.items():
            expected = " or ".join(dict.fromkeys(sentences))
            what = f"must be {expected}, not {show(path)}"
            problems.append((path, Problem(path_text(path), what, _remedy(path, expected, values))))
        return problems
    return []


def _empty(key: str, value: Any) -> bool:
    return key in EMPTY_ALLOWED and value == {}


def _at(values: Any, path: Path) -> Any:
    for part in path:
        values = values[part]
    return values


def _real_path(values: Any, location: Path) -> tuple[Path, Path]:
    """Splits pydantic's location into the user's path and the rest (a union's branch, a field)."""
    for depth, part in enumerate(location):
        inside = isinstance(values, Mapping) and part in values
        if not inside and not (isinstance(values, list) and isinstance(part, int)):
            return location[:depth], location[depth:]
        values = values[part]
    return location, ()


def _unknown(
    path: Path, value: Any, known: Iterable[str], config: Mapping[str, Any]
) -> list[tuple[Path, Problem]]:
    """One problem for an unknown key, or for each value below it: `optimiser: {lr: 1}`."""
    if isinstance(value, Mapping) and value and path[0] not in LAYERS:
        return [
            p for key, item in value.items() for p in _unknown((*path, key), item, known, config)
        ]
    text = path_text(path)
    if path[0] in LAYERS:
        what = "its keys land below it, not beside model and data"
        return [((path[0],), Problem(str(path[0]), what, "its first line: # @package _global_"))]
    where = f"in {text.rpartition('.')[0]}" if "." in text else "in the config"
    remedy = words.for_key(text, value, config) or did_you_mean(text, known)
    return [(path, Problem(text, f"unknown key {where}", remedy))]


def _absent(
    path: Path, deeper: Path, value: Any, known: Iterable[str], config: Mapping[str, Any]
) -> tuple[Path, Problem]:
    text = path_text(path)
    if deeper[-1:] != ("_target_",):
        full = path_text((*path, *deeper))
        return (*path, *deeper), Problem(full, "missing", f"write {full}=...")
    given = ", ".join(map(str, value)) or "nothing"
    what = f"names no class (_target_), only {given}"
    if path[0] in COLLECTIONS:
        near = did_you_mean(text, [name for name in known if name.count(".") == 1])
        option = words.for_component(str(path[0]), str(path[-1]), config)
        remedy = words.for_key(text) or near or f"write +{text}._target_=package.Class"
        if option:
            remedy = " ".join([option, *(f"{text}.{key}=..." for key in value or ())])
        return path, Problem(text, what, remedy)
    choose = f"choose one: {text}=NAME (--help lists them)"
    if path[0] in ("optimizer", "schedule") and value:
        what = f"there is none here to take {given} ({text}=none, or a file without _target_)"
        own = f"the model's own argument, such as model.{next(iter(value))}=..."
        return path, Problem(text, what, f"{own}, or {choose}")
    return path, Problem(text, what, f"{choose}, or write in a file: _target_: package.Class")


def _sentence(message: str) -> str:
    """Turns "Input should be a valid integer" into "a valid integer"."""
    message = message.removeprefix("Value error, ").removeprefix("Input should be ")
    if message.startswith("a valid dictionary"):
        return "a mapping"
    if message.startswith("String should match pattern"):
        return "made of letters from a to z, digits, dots, underscores and dashes"
    if message.startswith("String should have at most"):
        return "of at most 200 characters"
    return message.replace("a valid ", "a ").replace("a integer", "an integer")


# Numbers of bits, and of what libraries call them.
_PRECISIONS = {
    r"(float|fp|f)?16|half|amp|mixed|16-mix\w*": "16-mixed or bf16-mixed, with weights of 32 bit",
    r"bf(loat)?16(-mix\w*)?": "bf16-mixed, with weights of 32 bit, or bf16-true",
    r"t?(float|fp|f)?32|full|single|float|high(est)?": "32-true",
    r"(float|fp|f)?64|double": "64-true",
}


def _remedy(path: Path, expected: str, values: Mapping[str, Any]) -> str:
    value, text = _at(values, path), path_text(path)
    if path == ("strategy",) and isinstance(value, str):
        return strategy_for(value)
    if path == ("checkpoint",):
        return words.for_key("ckpt_path")
    if path == ("trainer", "precision"):
        name = str(value).lower().removeprefix("torch.").replace("_", "-")
        found = (ours for theirs, ours in _PRECISIONS.items() if re.fullmatch(theirs, name))
        return next((f"write {text}={ours}" for ours in found), "")
    if expected == "a string" and isinstance(value, (int, float)):
        # Without the inner quotes Hydra reads digits as a number again.
        return f"""write {text}='"{value}"'"""
    other = respelt(value)
    fits = repr(other) != repr(value) and path not in _refused(_changed(values, path, other))
    return f"write {written(text, other)}" if fits else ""


def _refused(values: Any) -> list[Path]:
    try:
        Config.model_validate(values)
    except ValidationError as error:
        return [_real_path(values, item["loc"])[0] for item in error.errors()]
    return []


def _changed(values: Any, path: Path, value: Any) -> Any:
    """A copy with another value in one place."""
    if not path:
        return value
    copy: Any = list(values) if isinstance(values, list) else dict(values)
    copy[path[0]] = _changed(values[path[0]], path[1:], value)
    return copy
