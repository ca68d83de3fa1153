"""What the classes and functions of configs take, as JSON Schemas.

They are imported in a child process (`python -m distdl.tools.editor.arguments`: a request as JSON
on stdin, the answer on stdout), since imports take seconds and run the user's code. As everywhere,
only names that the user trusts are imported (`validation.targets`). Nothing is called.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import subprocess
import sys
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

from distdl.config.own_code import make_importable
from distdl.job import adapted_launcher, blamed, is_launcher
from distdl.tools.editor.algebra import Schema, described, or_node, united, written
from distdl.util import lightning_names
from distdl.util.imports import no_exit
from distdl.util.redact import redact
from distdl.validation import kinds, signatures
from distdl.validation.targets import Trust, problem_of

TRAINER = "lightning.pytorch.Trainer"
PART = "part"  # of another's arguments: a layer, a network, a transform
# Modules whose public names are all that a section may name directly below them.
HOMES: Mapping[str, tuple[str, ...]] = {
    "model": ("distdl.models",),
    "data": ("distdl.data",),
    "optimizer": ("torch.optim", "timm.optim"),
    "schedule": ("torch.optim.lr_scheduler", "distdl.optim"),
    "callbacks": ("lightning.pytorch.callbacks", "distdl.callbacks"),
    "tracking": ("lightning.pytorch.loggers",),
    PART: ("torch.nn", "torchvision.models"),
}
_DETECTORS = "distdl.models.torchvision_detector"
# What torchvision's functions take out of **kwargs besides the arguments of their class.
_TAKEN_OUT = {"torchvision.models.mobilenetv3": ("width_mult", "reduced_tail", "dilated")}
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_PLAIN = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
_SECONDS = 300


@dataclass(frozen=True)
class Arguments:
    """What a class or function takes.

    Args:
        keys: A schema of each argument.
        positional: Those that may be passed by position, in their order.
        more: Whether it takes any others.
        unread: Why it could not be read; empty: it was.
    """

    keys: dict[str, Schema] = field(default_factory=dict)
    positional: tuple[str, ...] = ()
    more: bool = True
    unread: str = ""


@dataclass(frozen=True)
class Known:
    """What was read.

    Args:
        arguments: By `_target_`.
        homes: By section, the names that there are below `HOMES`.
    """

    arguments: dict[str, Arguments]
    homes: dict[str, list[str]]


def read(targets: Iterable[str], trust: Trust) -> Known:
    """Imports the targets of configs in a child process, and reads what they take."""
    request = json.dumps([sorted(targets), trust.folders, trust.allow])
    # -P: the child imports from the folders in the request, not from the current folder.
    command = [sys.executable, "-P", "-m", "distdl.tools.editor.arguments"]
    done = subprocess.run(
        command, input=request, capture_output=True, text=True, timeout=_SECONDS, check=False
    )
    try:
        arguments, homes = json.loads(done.stdout)
    except ValueError:  # an import has ended Python
        lines = redact(done.stderr).strip().splitlines()
        why = f"an import ended Python (exit code {done.returncode}): {' '.join(lines[-1:])}"
        return Known({target: Arguments(unread=why) for target in targets}, {})
    return Known({name: Arguments(**each) for name, each in arguments.items()}, homes)


@no_exit()
def _read_here(targets: Iterable[str], trust: Trust) -> Known:
    """As `read`, in this process, which imports torch and the user's code."""
    homes = {section: sorted(_names_of(section)) for section in HOMES}
    catalogued = [name for section, names in homes.items() if section != PART for name in names]
    wanted = dict.fromkeys([*targets, *catalogued, TRAINER])
    return Known({target: _read_one(target, trust) for target in wanted}, homes)


def _names_of(section: str) -> Iterable[str]:
    kind = kinds.PART if section == PART else kinds.KINDS[section]
    for home in HOMES[section]:
        for name, thing in [*vars(importlib.import_module(home)).items()]:
            abstract = getattr(thing, "__abstractmethods__", ())
            if not name.startswith("_") and kind.takes(thing) and not abstract:
                yield f"{home}.{name}"


def _read_one(target: str, trust: Trust) -> Arguments:
    if refused := problem_of(target, trust):
        return Arguments(unread=refused.what)
    try:
        called = kinds.locate(target)
        return _taken(target, called)
    except (Exception, SystemExit) as error:  # an import may raise anything
        return Arguments(unread=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")


def _taken(target: str, called: object) -> Arguments:
    parameters = signatures.takes(called)
    if parameters is None:
        return Arguments()
    by_name = {name: each for name, each in parameters.items() if each.kind in _BY_NAME}
    positional = [n for n, each in by_name.items() if each.kind is not each.KEYWORD_ONLY]
    keys = {name: _of_parameter(each) for name, each in by_name.items()}
    more = signatures.takes_anything(parameters)
    if target == _DETECTORS:
        keys |= {name: {} for name in _of_detectors() if name not in keys}
        more = False
    elif more and (further := _of_torchvision(called)):
        keys |= {name: {} for name in further if name not in keys}
        more = False
    if inspect.isclass(called) and is_launcher(called):
        launcher = adapted_launcher(called)
        with blamed(launcher, "about_settings"):
            about = launcher.about_settings()
        keys = {name: described(each, about.get(name, "")) for name, each in keys.items()}
    return Arguments(keys, tuple(positional), more)


def _of_detectors() -> set[str]:
    from torchvision.models import detection, list_models

    from distdl.models.detection_network import options_of

    options = set[str]().union(*map(options_of, list_models(module=detection)))
    return options - {"self", "kwargs", "weights", "weights_backbone"}


def _of_torchvision(called: object) -> set[str]:
    """The arguments that a function of torchvision passes on to the class that it returns; empty
    for any other function."""
    module = str(getattr(called, "__module__", ""))
    if not inspect.isfunction(called) or not module.startswith("torchvision.models."):
        return set()
    made = typing.get_type_hints(called).get("return")
    if not inspect.isclass(made):
        return set()
    inits = [vars(base)["__init__"] for base in made.__mro__ if "__init__" in vars(base)]
    if module.startswith("torchvision.models.detection."):
        from torchvision.models.detection.transform import GeneralizedRCNNTransform

        inits.append(GeneralizedRCNNTransform.__init__)
    names = set[str]().union(*(inspect.signature(init).parameters for init in inits))
    return names.union(_TAKEN_OUT.get(module, ())) - {"self", "args", "kwargs"}


def _of_parameter(parameter: inspect.Parameter) -> Schema:
    """As validation has it: a value fits its annotation, or is the default, or a node."""
    schema = hinted(parameter.annotation)
    if not schema:
        return {}
    fitting = [schema]
    default = parameter.default
    if type(default) in _PLAIN and not signatures.matches(default, parameter.annotation):
        fitting.append({"enum": [default]})
    return or_node(written(united(fitting)))


def hinted(hint: object) -> Schema:
    """What fits an annotation, as `signatures.matches` has it; {} if it checks nothing."""
    origin = typing.get_origin(hint)
    members = typing.get_args(hint)
    if origin is typing.Annotated:
        return _bounded(hinted(members[0]), members[1:])
    if origin in signatures.UNIONS:
        return united(map(hinted, members))
    if origin is Literal:
        plain = all(type(member) in _PLAIN for member in members)
        return {"enum": [*members]} if plain else {}
    if hint is None:
        return {"type": "null"}
    if isinstance(hint, type) and hint in _PLAIN:
        return {"type": _PLAIN[hint]}
    if (origin or hint) in signatures.LISTS:
        return {"type": ["array", "object", "null"]}
    return {}


def _bounded(schema: Schema, bounds: Sequence[object]) -> Schema:
    if "type" not in schema:
        return schema
    names = {"ge": "minimum", "gt": "exclusiveMinimum"}
    limits = {
        names[attribute]: getattr(bound, attribute)
        for bound in bounds
        for attribute in names
        if hasattr(bound, attribute)
    }
    return {**schema, **limits}


def main() -> None:
    # Libraries print: their stdout goes to stderr, so that the real stdout has the answer only.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    targets, folders, allow = json.load(sys.stdin)
    lightning_names.serve()
    make_importable(folders)
    known = _read_here(targets, Trust(tuple(folders), tuple(allow)))
    arguments = {name: asdict(each) for name, each in known.arguments.items()}
    json.dump([arguments, known.homes], answer)
    answer.close()
    sys.stderr.flush()
    os._exit(0)  # a normal exit would take another second to unload torch and Lightning


if __name__ == "__main__":
    main()
