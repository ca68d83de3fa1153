"""What a `_target_` may name: the imported object must be of an allowed kind. Nothing is called.

The allowed packages contain functions that run a shell command or unpickle a file, too many for a
list of refusals. So each section takes one kind of object: `callbacks` takes subclasses of
Lightning's Callback, `optimizer` subclasses of torch's Optimizer, and so on. Nodes inside arguments
are parts: layers, networks, transforms, ... from the modules that are listed here. The user's own
code, and code that `project.allow` names, may be of any kind.

Validation checks this (`distdl.validation.located`), and each worker again before it builds
(`refuse`).
"""

from __future__ import annotations

import importlib
import inspect
import sys
import typing
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from distdl.config.paths import path_text
from distdl.config.schema import COLLECTIONS, COMPONENTS
from distdl.job import is_launcher
from distdl.util.errors import NoSuchName, Problem, UserError
from distdl.util.typed import Path
from distdl.validation.targets import ALLOWED, BUILT, Trust, advice, nodes, target_problems, under

# Modules whose layers and networks are allowed: other modules of torch run code from files.
LAYERS = (
    "torch.nn.modules",
    "torchvision.models",
    "torchvision.ops",
    "torchvision.transforms",
    "timm.layers",
    "timm.models",
    "timm.loss",
    "distdl.models",
)
TRANSFORMS = ("torchvision.transforms", "timm.data.mixup", "timm.data.random_erasing")
# Data sets that read images, or verify a checksum before they unpickle a file.
DATASETS = (
    "CIFAR10",
    "CIFAR100",
    "DTD",
    "EMNIST",
    "EuroSAT",
    "FakeData",
    "FashionMNIST",
    "Flowers102",
    "Food101",
    "GTSRB",
    "ImageFolder",
    "KMNIST",
    "MNIST",
    "OxfordIIITPet",
    "STL10",
    "SVHN",
)
# Small objects that configs pass as arguments.
PARTS = (
    "datetime.timedelta",
    "torch.device",
    "torch.Generator",
    "torch.tensor",
    "torch.ones",
    "torch.zeros",
    "torch.profiler.schedule",
    "torch.profiler.tensorboard_trace_handler",
    "torch.distributed.fsdp.MixedPrecision",
    "torch.distributed.fsdp.MixedPrecisionPolicy",
    "torch.distributed.fsdp.CPUOffload",
    "torch.distributed.fsdp.CPUOffloadPolicy",
    "torch.distributed.fsdp.ShardingStrategy",
    "torch.distributed.fsdp.BackwardPrefetch",
    "distdl.models.torchvision_detector",
    "timm.create_model",
    "timm.data.create_transform",
    "timm.models.ByoBlockCfg",
    "timm.models.ByoModelCfg",
    "torchvision.models.get_model",
    *(f"torchvision.datasets.{name}" for name in DATASETS),
)
STRATEGIES = ("distdl.strategies.auto", "distdl.strategies.single")
TRACKERS = ("distdl.tracking.mlflow.MLflowLogger",)
# Arguments of timm's models that name a file to load, or describe where weights come from.
TIMM_LOADS = ("checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir", "_args_")


@dataclass(frozen=True)
class Kind:
    """What a section takes."""

    words: str  # its name in messages: "a Callback of Lightning's"
    example: str  # a target of this kind
    takes: Callable[[object], bool]  # whether an object is of this kind


def kind_of(path: Path) -> Kind:
    """The kind that the target of the node at `path` must be."""
    if path == ("trainer", "profiler"):
        return KINDS["trainer"]
    depth = {**dict.fromkeys(COMPONENTS, 1), **dict.fromkeys(COLLECTIONS, 2)}
    return KINDS[str(path[0])] if depth.get(str(path[0])) == len(path) else PART


def problem_of_kind(
    called: object, node: Mapping[str, Any], path: Path, trust: Trust
) -> Problem | None:
    """Why a node's target is refused; None if it may be called.

    Args:
        called: The target, imported but not called.
        node, path: The target's node, with its arguments, and the path of the node in the config.
        trust: Whose code may be of any kind.
    """
    target = str(node["_target_"])
    if is_trusted(called, target, trust):
        return None
    location = path_text((*path, "_target_"))
    kind = kind_of(path)
    real = name_of(called)
    if not kind.takes(called):
        is_pythons = real.partition(".")[0] in sys.stdlib_module_names
        shown = f"{target} is Python's own {real}, and" if is_pythons else f"{target} is"
        section = "a node in another one's arguments" if kind is PART else path[0]
        return Problem(
            location,
            what=f"{shown} not {kind.words}, and {section} takes nothing else",
            remedy=f"such as {kind.example}" + ("" if is_pythons else f"; {advice(target)}"),
            code="wrong-kind",
        )
    loads = [key for key in TIMM_LOADS if node.get(key)]
    if ":" in str(node.get("model_name")):
        loads.append(f"model_name={node['model_name']}")
    if loads and (called is _known("timm.create_model") or _is_timm_entry(called)):
        return Problem(
            location,
            what=f"{loads[0]} lets timm load a file that may run code",
            remedy=f"model.weights=FILE loads weights and nothing else; {advice(target)}",
            code="not-trusted",
        )
    if node.get("weights_only") not in (None, True):
        return Problem(
            location,
            what="weights_only=false runs code from the file",
            remedy=f"leave it out; {advice(target)}",
            code="not-trusted",
        )
    return None


def is_trusted(called: object, target: str, trust: Trust) -> bool:
    """Whether both the name and the object are trusted code: `mine.torch.load` is torch's."""
    if not trust.covers(target):
        return False
    if target in trust.allow or not (inspect.isclass(called) or inspect.isroutine(called)):
        return True  # allowed by its full name, or an object that a trusted module made
    home = str(getattr(called, "__module__", None) or "")
    return home.partition(".")[0] == target.partition(".")[0] or trust.covers(f"{home}.x")


def refuse(values: Mapping[str, Any], trust: Trust) -> None:
    """The worker's check of every `_target_` that it is about to build, in resolved sections: a
    frozen config may come from somebody else, and validation may not have seen it. Raises a
    UserError with all that is refused."""
    built = {key: values.get(key) for key in BUILT if key != "launcher"}
    refused = dict(target_problems(built, trust))
    problems = [*refused.values()]
    for path, node in nodes(built):
        location = (*path, "_target_")
        called = None
        if location not in refused:
            with suppress(Exception):  # its builder fails in the same way and reports the cause
                called = locate(str(node["_target_"]))
        if called is not None and (why := problem_of_kind(called, node, path, trust)):
            problems.append(why)
    if problems:
        raise UserError(*problems)


def locate(target: str) -> object:
    """The object that a dotted path names. Imports modules, calls nothing.

    Raises:
        NoSuchName: A module or class on the path has no such name.
        Exception: Importing a module failed; it may raise anything.
    """
    reached, *names = target.split(".")
    thing: object = importlib.import_module(reached)
    for name in names:
        if not hasattr(thing, name) and inspect.ismodule(thing):
            try:
                importlib.import_module(f"{reached}.{name}")
            except ModuleNotFoundError as error:
                if error.name != f"{reached}.{name}":
                    raise
        if not hasattr(thing, name):
            raise NoSuchName(reached, name, thing)
        thing = getattr(thing, name)
        reached = f"{reached}.{name}"
    return thing


def name_of(thing: object) -> str:
    """The name by which a class or function is defined, such as `posix.system`."""
    named = thing if inspect.isclass(thing) or inspect.isroutine(thing) else type(thing)
    return f"{getattr(named, '__module__', None) or ''}.{getattr(named, '__qualname__', named)}"


def _classes_of(*bases: str) -> Callable[[object], bool]:
    """A test for classes of allowed packages that derive from one of these bases."""

    def takes(thing: object) -> bool:
        if not inspect.isclass(thing) or thing.__module__.partition(".")[0] not in ALLOWED:
            return False
        known = [base for base in map(_known, bases) if base is not None]
        return issubclass(thing, (*known,))

    return takes


def _one_of(names: tuple[str, ...]) -> Callable[[object], bool]:
    return lambda thing: any(thing is _known(name) for name in names)


def _functions(package: str, returns: Callable[[object], bool]) -> Callable[[object], bool]:
    """A test for functions of a package of distdl that are of a kind: by the type that they return,
    or because `__all__` of the package names them. All others are helpers, which no config calls.

    Args:
        returns: Whether the functions of this kind may return a type.
    """

    def takes(thing: object) -> bool:
        is_method = inspect.isfunction(thing) and thing.__qualname__ != thing.__name__
        if not inspect.isfunction(thing) or is_method or not under(thing.__module__, (package,)):
            return False
        home = vars(sys.modules[package])
        if any(thing is home[name] for name in home["__all__"]):
            return True
        with suppress(NameError):  # a type that is imported for type checkers only
            return returns(typing.get_type_hints(thing).get("return"))
        return False

    return takes


def _is_metrics(hint: object) -> bool:
    return bool(hint == dict[str, float])


def _is_schedule(hint: object) -> bool:
    return inspect.isclass(hint) and issubclass(hint, _known(f"{_LR}.LRScheduler"))


def _known(name: str) -> Any:  # noqa: ANN401 - a class, to derive from, or a function
    """The object of a dotted name in this module; None if its module is not imported, because no
    target can then be that object."""
    module, _, attribute = name.rpartition(".")
    return getattr(sys.modules.get(module), attribute, None)


def _is_part(thing: object) -> bool:
    if _one_of(PARTS)(thing) or _is_registered(thing):
        return True
    if not inspect.isclass(thing):
        return False
    if _classes_of("torch.nn.Module")(thing):
        return under(thing.__module__, LAYERS)
    learns = _classes_of(
        f"{_OPTIM}.Optimizer",
        f"{_OPTIM}.lr_scheduler.LRScheduler",
        f"{_PL}.plugins.precision.Precision",
    )
    return under(thing.__module__, TRANSFORMS) or learns(thing)


def _is_registered(thing: object) -> bool:
    """Whether an object is a model builder that torchvision's or timm's own registry lists."""
    if inspect.isfunction(thing) and thing.__module__.startswith("torchvision.models."):
        models = sys.modules["torchvision.models"]
        name = thing.__name__
        return name in models.list_models() and models.get_model_builder(name) is thing
    return inspect.isfunction(thing) and _is_timm_entry(thing)


def _is_timm_entry(thing: object) -> bool:
    name, home = (str(getattr(thing, key, "")) for key in ("__name__", "__module__"))
    timm = sys.modules["timm"] if home.startswith("timm.models.") else None
    return bool(timm and timm.is_model(name) and timm.model_entrypoint(name) is thing)


def _of(
    words: str,
    example: str,
    base: str,
    one_of: tuple[str, ...] = (),
    functions: Callable[[object], bool] = lambda thing: False,
) -> Kind:
    """The kind of classes that derive from a base, and of these functions."""
    derived = _classes_of(base)
    named = _one_of(one_of)
    return Kind(words, example, lambda thing: derived(thing) or named(thing) or functions(thing))


_PL, _OPTIM, _LR = "lightning.pytorch", "torch.optim", "torch.optim.lr_scheduler"
KINDS = {
    "model": _of(
        "a LightningModule",
        example="distdl.models.ImageClassifier",
        base=f"{_PL}.LightningModule",
    ),
    "data": _of(
        "a LightningDataModule",
        example="distdl.data.StoredImages",
        base=f"{_PL}.LightningDataModule",
    ),
    "optimizer": _of(
        "an Optimizer of torch's",
        example=f"{_OPTIM}.SGD",
        base=f"{_OPTIM}.Optimizer",
    ),
    "schedule": _of(
        "a schedule of torch's or distdl's",
        example=f"{_LR}.StepLR",
        base=f"{_LR}.LRScheduler",
        functions=_functions("distdl.optim", _is_schedule),
    ),
    "strategy": _of(
        "a Strategy of Lightning's",
        example="distdl.strategies.DDPStrategy",
        base=f"{_PL}.strategies.Strategy",
        one_of=STRATEGIES,
    ),
    "launcher": Kind(
        "a launcher",
        "distdl.launchers.local.LocalLauncher",
        lambda thing: is_launcher(thing) and under(thing.__module__, ("distdl.launchers",)),
    ),
    "task": _of(
        "a task of distdl",
        example="distdl.tasks.train",
        base="distdl.worker.task.Task",
        functions=_functions("distdl.tasks", _is_metrics),
    ),
    "tracking": _of(
        "a Logger of Lightning's or distdl's",
        example=f"{_PL}.loggers.CSVLogger",
        base=f"{_PL}.loggers.Logger",
        one_of=TRACKERS,
    ),
    "callbacks": _of(
        "a Callback of Lightning's",
        example=f"{_PL}.callbacks.EarlyStopping",
        base=f"{_PL}.Callback",
    ),
    "trainer": _of(
        "a Profiler of Lightning's",
        example=f"{_PL}.profilers.SimpleProfiler",
        base=f"{_PL}.profilers.Profiler",
    ),
}
PART = Kind(
    "a layer, network, transform, optimizer or schedule of torch, torchvision or timm",
    "torch.nn.Linear, torchvision.models.resnet50 or timm.create_model",
    _is_part,
)
