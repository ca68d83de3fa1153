"""Checks of stage 1 beyond the schema: size, batches, secrets, and what the far side will lack."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
from pathlib import Path as FilePath
from typing import Any, Protocol

from distdl import config as configs
from distdl import lightning_1, words
from distdl.errors import Problem
from distdl.job import unprintable, variable_problems
from distdl.redact import holds_secret, looks_secret, redact
from distdl.resolve import Resolved
from distdl.resources import replicas
from distdl.schema import COLLECTIONS, COMPONENTS, TRAINER_OWNED, Path, known_paths, path_text
from distdl.suggest import did_you_mean, strategy_for
from distdl.targets import nodes

_LOCAL = "distdl.launchers.local"  # one machine: this one
_HERE = (_LOCAL, "distdl.launchers.external")  # the workers run where this command runs

# What a tracker's logger imports once it is made, and which of our extras installs that.
PACKAGES = {
    "WandbLogger": ("wandb", "wandb"),
    "CometLogger": ("comet_ml", "comet"),
    "ClearMLLogger": ("clearml", "clearml"),
}

Found = list[tuple[Path, Problem]]


class Topology(Protocol):
    """What distdl.job.Resources says about the size of a run; devices are per node."""

    @property
    def num_nodes(self) -> int: ...
    @property
    def devices(self) -> int: ...
    @property
    def accelerator(self) -> str: ...


def strings(value: Any) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def launcher(resolved: Resolved) -> str:
    return str(resolved.section("launcher").get("_target_") or _LOCAL)


def is_here(resolved: Resolved, local: bool | None) -> bool:
    """Whether the workers run on this machine: as told, or by the launcher."""
    return runs_here(launcher(resolved)) if local is None else local


def runs_here(target: str) -> bool:
    """Whether the launcher of this `_target_` starts its workers on this machine."""
    return target.startswith(_HERE)


def owned(resolved: Resolved) -> Found:
    """Arguments of the Trainer that distdl fills itself."""
    trainer = resolved.section("trainer")
    found: Found = []
    for key, remedy in TRAINER_OWNED.items():
        if key in trainer:
            if key == "strategy":
                remedy = strategy_for(str(trainer[key])) or remedy
            problem = Problem(f"trainer.{key}", "is set by distdl itself", remedy)
            found.append((("trainer", key), problem))
    return found


def removed(resolved: Resolved) -> Found:
    """Arguments of Lightning 1's Trainer, and values that meant something else to it."""
    given = resolved.section("trainer")
    what = "Lightning 2's Trainer has it no more"
    gone = {key: (what, instead) for key, instead in lightning_1.TRAINER.items() if key in given}
    if ours := strategy_for(name := str(given.get("accelerator"))):
        gone["accelerator"] = f"{name} is a strategy", f"{ours}, and trainer.accelerator=auto"
    return [(("trainer", key), Problem(f"trainer.{key}", *said)) for key, said in gone.items()]


def class_paths(resolved: Resolved) -> Found:
    """Nodes as LightningCLI writes them."""
    found: Found = []
    values = {key: resolved.values.get(key) for key in (*COMPONENTS, *COLLECTIONS)}
    for path, node in nodes(values, key="class_path"):
        if "init_args" in node or "_target_" not in node:
            text, given = path_text(path), node.get("init_args")
            keys = "".join(f", {key}: ..." for key in (given if isinstance(given, dict) else ()))
            remedy = f"{text}: {{_target_: {node['class_path']}{keys}}}"
            if "_target_" in node and len(path) == 1:
                remedy += f", and under defaults: - override /{text}: null"
            problem = Problem(text, "class_path and init_args are LightningCLI's words", remedy)
            found.append((path, problem))
    return found


def unknown(resolved: Resolved) -> Found:
    """What Lightning's Trainer does not take."""
    takes = _trainer_takes()
    found: Found = []
    for key in resolved.section("trainer"):
        if takes and key not in takes and key not in lightning_1.TRAINER:
            own = did_you_mean(f"trainer.{key}", [f"trainer.{name}" for name in takes])
            remedy = own or words.for_key(key) or did_you_mean(key, known_paths())
            what = f"lightning's Trainer takes no argument {key!r}"
            found.append((("trainer", key), Problem(f"trainer.{key}", what, remedy)))
    return found


def _trainer_takes() -> list[str]:
    """The arguments of Lightning's Trainer as its source has them; importing it takes seconds."""
    package = importlib.util.find_spec("lightning")
    for folder in (package and package.submodule_search_locations) or ():
        source = FilePath(folder) / "pytorch/trainer/trainer.py"
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                return [each.arg for each in (*node.args.args[1:], *node.args.kwonlyargs)]
    return []


def names(resolved: Resolved) -> Found:
    """What becomes part of scripts and command lines: the runs' folder, and variables' names."""
    found: Found = []
    output = resolved.values.get("output_dir")
    if isinstance(output, str) and (odd := unprintable(str(FilePath(output).absolute()))):
        what = f"{output!r} has, or lies below, the character {odd!r}, which no script can show"
        found.append((("output_dir",), Problem("output_dir", what, "choose another folder")))
    if isinstance(output, str) and (refused := unwritable(output)):
        found.append((("output_dir",), Problem("output_dir", refused, "choose another folder")))
    for problem in variable_problems(resolved.section("launcher")):
        path = ("launcher", *problem.path.split(".", 1))
        found.append((path, Problem(f"launcher.{problem.path}", problem.what, problem.remedy)))
    return found


def unwritable(output: str) -> str:
    """Why no folder can be made at a path; "" if one can."""
    folder = FilePath(output.strip())
    if not output.strip():
        return "is empty (a variable that is not set?)"
    if "://" in output:
        return f"{output} is no folder: runs lie in one, which may be a mount of that"
    try:
        part = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    except OSError as error:
        return f"cannot be made: {error.strerror}"
    if not part.is_dir():
        return f"{part} is a file"
    return "" if os.access(part, os.W_OK | os.X_OK) else f"{part} is not yours to write to"


def services(resolved: Resolved, here: bool) -> Found:
    """Trackers whose package is not installed, where the workers run here."""
    found: Found = []
    for key, node in resolved.section("tracking").items() if here else ():
        target = str(node.get("_target_")) if isinstance(node, dict) else ""
        package, extra = PACKAGES.get(target.rpartition(".")[2], ("", ""))
        if package and importlib.util.find_spec(package) is None:
            what = f"needs the package {package}, which is not installed"
            remedy = f"pip install 'distdl[{extra}]', or tracking=mlflow"
            found.append((("tracking", key), Problem(f"tracking.{key}", what, remedy)))
    return found


def nothing(resolved: Resolved) -> Found:
    """A training of no batches."""
    limit, task = resolved.section("trainer").get("limit_train_batches"), resolved.section("task")
    if limit != 0 or task.get("_target_") != configs.TRAIN:
        return []
    path, what = "trainer.limit_train_batches", "0 is a training of no batches"
    remedy = f"{path}=null: all; task=validate trains nothing"
    return [(("trainer", "limit_train_batches"), Problem(path, what, remedy))]


def forwarded(resolved: Resolved, here: bool) -> Found:
    """A variable that the far side will not have: refused now and not after an hour in a queue."""
    if here:
        return []
    names = strings(resolved.section("launcher").get("forward_env"))
    found: Found = []
    for path, name, has_default in resolved.variables():
        # The launcher's own settings are read here, before the job is submitted.
        if path[0] == "launcher" or has_default or name in names:
            continue
        what = f"reads the environment variable {name}, which the job will not have"
        remedy = f"launcher.forward_env=[{','.join([*names, name])}]"
        found.append((path, Problem(path_text(path), what, remedy)))
    return found


# Keys of launchers that look like secrets by their names, and name something instead.
_NO_SECRETS = ("kms_key", "key_vault")


def sent(resolved: Resolved, here: bool) -> Found:
    """A secret among the launcher's own settings: they are resolved here and stand in the request,
    and in scripts and consoles from there on."""
    if here:
        return []
    names = strings(resolved.section("launcher").get("forward_env"))
    found: Found = []
    for path, name, _ in resolved.variables():
        key, value = str(path[-1]), os.environ.get(name, "")
        if path[0] != "launcher" or (len(path) == 2 and key in _NO_SECRETS):
            continue
        if looks_secret(name) or looks_secret(key) or (value and holds_secret(key, value)):
            what = f"the value of {name} would stand in the request, for all to read"
            remedy = (
                f"leave it out: launcher.forward_env=[{','.join([*names, name])}] sends it apart"
            )
            found.append((path, Problem(path_text(path), what, remedy)))
    return found


def topology(resolved: Resolved, size: Topology | None, here: bool) -> Found:
    trainer = resolved.section("trainer")
    found: Found = []

    def add(path: str, what: str, remedy: str) -> None:
        found.append((tuple(path.split(".")), Problem(path, what, remedy)))

    devices, nodes = trainer.get("devices"), trainer.get("num_nodes")
    if isinstance(devices, list) and not here:
        add(
            "trainer.devices",
            "a list names devices of this machine, and the job runs elsewhere",
            f"write the number per node: trainer.devices={len(devices)}",
        )
    if isinstance(nodes, int) and nodes > 1 and launcher(resolved).startswith(_LOCAL):
        add(
            "trainer.num_nodes",
            f"launcher=local is one machine, not {nodes}",
            "trainer.num_nodes=1, or another launcher (--help lists them)",
        )
    if size is None:
        return found
    world = size.num_nodes * size.devices
    strategy = str(resolved.section("strategy").get("_target_", "")).rpartition(".")[2]
    if world > 1 and strategy.lower().startswith("single"):
        ranks = f"{size.devices} devices x {size.num_nodes} nodes"
        add("strategy", f"{strategy} trains on one device, not on {ranks}", "strategy=ddp")
    if size.accelerator == "mps" and size.devices > 1:
        add("trainer.devices", "an Apple GPU is one device", "trainer.devices=1")
    _batches(resolved, world, add)
    return found


def _batches(resolved: Resolved, world: int, add: Any) -> None:
    data = resolved.section("data")
    whole, own = data.get("global_batch_size"), data.get("batch_size", 1)
    accumulate = resolved.section("trainer").get("accumulate_grad_batches", 1)
    if not all(type(value) is int and value > 0 for value in (whole, own, accumulate)):
        return
    shares = replicas(resolved.section("strategy"), world)
    parts = shares * accumulate
    if whole == own * parts:
        return
    kind = "devices" if shares == world else "pipelines"
    what = f"{whole} is not {own} (data.batch_size) x {shares} {kind} x {accumulate} accumulated"
    if whole % parts:
        nearest = max(1, whole // parts) * parts
        add("data.global_batch_size", f"{what}, nor divisible", f"data.global_batch_size={nearest}")
    else:
        add("data.global_batch_size", what, f"data.batch_size={whole // parts}")


def secrets(value: Any, resolved: Resolved, path: Path) -> Found:
    """Literal secrets: config.yaml is kept and shared, so it may name a secret, never hold it."""
    if isinstance(value, dict):
        found: Found = []
        for key, item in value.items():
            found += secrets(item, resolved, (*path, str(key)))
        return found
    if isinstance(value, list):
        return [p for i, v in enumerate(value) for p in secrets(v, resolved, (*path, i))]
    if not isinstance(value, str):
        return []
    key = next((str(part) for part in reversed(path) if isinstance(part, str)), "")
    reason = holds_secret(key, value)
    if not reason and "${" in value and "oc.env" not in value and looks_secret(key):
        # `${other.key}`: look at what it leads to.
        target = resolved.values
        for part in path:
            target = target[part]  # type: ignore[index]
        if isinstance(target, str) and target and target not in os.environ.values():
            reason = "refers to a secret that is plain text"
    if not reason:
        return []
    named = re.search(r"environment variable (\w+)$", reason)
    # With its section before it, no key is a variable that a shell has: PATH, HOME, USER.
    parts = [str(part) for part in path if isinstance(part, str)][-2:]
    suggested = "_".join(parts if len(parts) > 1 else ["my", *parts])
    name = named[1] if named else re.sub(r"\W", "_", suggested).upper()
    remedy = f"write {redact(path_text(path))}='${{oc.env:{name}}}' and export {name}"
    if path[:2] == ("launcher", "env"):
        remedy = f"export {name}=... and write launcher.forward_env=[{name}] instead"
    elif path[:2] == ("launcher", "inputs"):  # whose value would stand in the request
        remedy = "give an address without it: azureml://datastores/NAME/paths/... keeps its own"
    return [(path, Problem(redact(path_text(path)), reason, remedy))]
