"""Stage 1 checks beyond the schema: size, batches, secrets, and what a remote job would lack."""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

from distdl.config import epochs, task_facts
from distdl.config import recipe as configs
from distdl.config.degrees import EACH, MESH, at_strategy, division_of
from distdl.config.hints import lightning_1, words
from distdl.config.paths import path_text, walk
from distdl.config.resources import replicas, share_kind
from distdl.config.schema import COLLECTIONS, COMPONENTS, known_paths
from distdl.job import Resources, unprintable, variable_problems
from distdl.util.errors import Problem
from distdl.util.redact import holds_secret, redact
from distdl.util.secret_names import looks_secret
from distdl.util.suggest import did_you_mean
from distdl.validation.resolve import Resolved
from distdl.validation.targets import nodes

_LOCAL = "distdl.launchers.local"  # this machine only
_ON_THIS_MACHINE = (_LOCAL, "distdl.launchers.external")  # the workers run where this command runs

# The package that a tracker's logger imports. Its first word is the name of distdl's extra for it.
PACKAGES = {"WandbLogger": "wandb", "CometLogger": "comet_ml", "ClearMLLogger": "clearml"}
# Launcher keys whose names look secret, but whose values only name something.
_NO_SECRETS = ("kms_key", "key_vault")
_ANOTHER_FOLDER = "choose another folder"
# Values of 0 with which a training does nothing, and what to write instead.
_NOTHING = {
    "limit_train_batches": ("0 would train on no batches", "null for all batches"),
    "max_epochs": ("0 would train for no epoch", "1"),
    "max_steps": ("0 would train for no step", "-1 for no limit"),
}


def strings(value: object) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def is_local(resolved: Resolved, local: bool | None) -> bool:
    """Whether the workers run on this machine: `local` if it is known, else by the launcher."""
    return runs_here(_launcher(resolved)) if local is None else local


def _launcher(resolved: Resolved) -> str:
    return str(resolved.section("launcher").get("_target_") or _LOCAL)


def runs_here(target: str) -> bool:
    """Whether the launcher of this `_target_` starts its workers on this machine."""
    return target.startswith(_ON_THIS_MACHINE)


def trainer(resolved: Resolved) -> Iterator[Problem]:
    """Trainer arguments that distdl sets itself, that only Lightning 1 had, or that are unknown;
    and a training on no batches."""
    takes = _trainer_takes()
    trains = task_facts.of(resolved.values).trains
    for key, value in resolved.section("trainer").items():
        path = f"trainer.{key}"
        strategy = words.strategy_for(str(value))
        if key in words.TRAINER_OWNED:
            remedy = words.TRAINER_OWNED[key]
            if key == "strategy" and strategy:
                remedy = strategy
            yield Problem(path, what="is set by distdl itself", remedy=remedy, code="reserved")
        elif key in lightning_1.TRAINER:
            yield Problem(
                path,
                what="Lightning 2's Trainer no longer has it",
                remedy=lightning_1.TRAINER[key],
                code="unsupported",
            )
        elif key == "accelerator" and strategy:
            yield Problem(
                path,
                what=f"{value} is a strategy",
                remedy=f"{strategy}, and {path}=auto",
                code="wrong-kind",
            )
        elif takes and key not in takes:
            near = did_you_mean(path, [f"trainer.{name}" for name in takes])
            remedy = near or words.for_key(key) or did_you_mean(key, known_paths())
            yield Problem(
                path,
                what=f"lightning's Trainer takes no argument {key!r}",
                remedy=remedy,
                code="unknown-key",
            )
        elif key in _NOTHING and value == 0 and trains:
            what, remedy = _NOTHING[key]
            yield Problem(
                path, what=what, remedy=f"{path}={remedy}, or task=validate", code="out-of-range"
            )


@functools.cache
def _trainer_takes() -> tuple[str, ...]:
    """The arguments of Lightning's Trainer, read from its source: importing it takes seconds."""
    package = importlib.util.find_spec("lightning")
    for folder in (package and package.submodule_search_locations) or ():
        source = Path(folder) / "pytorch/trainer/trainer.py"
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                return tuple(each.arg for each in (*node.args.args[1:], *node.args.kwonlyargs))
    return ()


def class_paths(resolved: Resolved) -> Iterator[Problem]:
    """Nodes in the form of LightningCLI: `class_path` and `init_args`."""
    values = {key: resolved.values.get(key) for key in (*COMPONENTS, *COLLECTIONS)}
    for path, node in nodes(values, key="class_path"):
        if "init_args" in node or "_target_" not in node:
            text = path_text(path)
            arguments = node.get("init_args")
            keys = [f", {key}: ..." for key in arguments] if isinstance(arguments, dict) else []
            remedy = f"{text}: {{_target_: {node['class_path']}{''.join(keys)}}}"
            if "_target_" in node and len(path) == 1:
                remedy += f", and under defaults: - override /{text}: null"
            yield Problem(
                text,
                what="class_path and init_args are LightningCLI's keys",
                remedy=remedy,
                code="unknown-key",
            )


def misspelt(resolved: Resolved) -> Iterator[Problem]:
    """Arguments of distdl's own classes that almost equal an earlier key of the same node, such as
    `batchsize` after `batch_size`. They are found without an import."""
    for path, node in nodes({key: resolved.values.get(key) for key in (*COMPONENTS, *COLLECTIONS)}):
        keys = [*map(str, node)]
        text = path_text(path)
        target = node["_target_"]
        for position, key in enumerate(keys) if configs.is_own(target) else ():
            for near in get_close_matches(key, keys[:position], 1, cutoff=0.85):
                yield Problem(
                    f"{text}.{key}",
                    what=f"{target} takes no argument {key!r}",
                    remedy=f"did you mean {text}.{near}?",
                    code="unknown-key",
                )


def names(resolved: Resolved) -> Iterator[Problem]:
    """Checks texts that go into scripts and command lines: output_dir and names of variables."""
    output = resolved.values.get("output_dir")
    if isinstance(output, str):
        yield from _unwritable(output)
        if odd := unprintable(str(Path(output).absolute())):
            yield Problem(
                "output_dir",
                what=f"the path of {output!r} contains {odd!r}, which no script can contain",
                remedy=_ANOTHER_FOLDER,
                code="wrong-kind",
            )
    for problem in variable_problems(resolved.section("launcher")):
        yield replace(problem, path=f"launcher.{problem.path}")


def _unwritable(output: str) -> Iterator[Problem]:
    """Why a folder cannot be created at the path `output`."""
    folder = Path(output.strip())
    if not output.strip():
        yield Problem(
            "output_dir",
            what="is empty (a variable that is not set?)",
            remedy=_ANOTHER_FOLDER,
            code="missing-key",
        )
        return
    if "://" in output:
        yield Problem(
            "output_dir",
            what=f"{output} is not a folder: mount it, and name the folder where it is mounted",
            remedy=_ANOTHER_FOLDER,
            code="wrong-kind",
        )
        return
    try:
        part = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    except OSError as error:
        yield Problem(
            "output_dir",
            what=f"cannot be created: {error.strerror}",
            remedy=_ANOTHER_FOLDER,
            code="not-writable",
        )
        return
    if not part.is_dir():
        yield Problem(
            "output_dir", what=f"{part} is a file", remedy=_ANOTHER_FOLDER, code="wrong-kind"
        )
    elif not os.access(part, os.W_OK | os.X_OK):
        yield Problem(
            "output_dir",
            what=f"you may not write to {part}",
            remedy=_ANOTHER_FOLDER,
            code="not-writable",
        )


def services(resolved: Resolved, local: bool) -> Iterator[Problem]:
    """Trackers whose package is not installed, if the workers run on this machine."""
    for key, node in resolved.section("tracking").items() if local else ():
        target = str(node.get("_target_")) if isinstance(node, dict) else ""
        package = PACKAGES.get(target.rpartition(".")[2], "")
        if package and importlib.util.find_spec(package) is None:
            yield Problem(
                f"tracking.{key}",
                what=f"needs the package {package}, which is not installed",
                remedy=f"pip install 'distdl[{package.partition('_')[0]}]', or tracking=mlflow",
                code="not-installed",
            )


def environment(resolved: Resolved, local: bool) -> Iterator[Problem]:
    """Checks the environment variables of a job on other machines. Reported are those that the job
    would lack, because it would fail only after its time in the queue, and secrets in the
    launcher's settings, which the request shows."""
    forwarded = strings(resolved.section("launcher").get("forward_env"))
    for path, name, has_default in resolved.variables() if not local else ():
        forward = f"launcher.forward_env=[{','.join([*forwarded, name])}]"
        key = str(path[-1])
        value = os.environ.get(name, "")
        secret = looks_secret(name) or looks_secret(key) or (value and holds_secret(key, value))
        if path[0] != "launcher":
            if not has_default and name not in forwarded:
                yield Problem(
                    path_text(path),
                    what=f"reads the environment variable {name}, which the job will not have",
                    remedy=forward,
                    code="incomplete",
                )
        elif secret and not (len(path) == 2 and key in _NO_SECRETS):
            yield Problem(
                path_text(path),
                what=f"the value of {name} would be readable in the request",
                remedy=f"leave it out: {forward} sends it separately",
                code="private",
            )


def topology(resolved: Resolved, size: Resources | None, local: bool) -> Iterator[Problem]:
    trainer = resolved.section("trainer")
    devices, nodes = trainer.get("devices"), trainer.get("num_nodes")
    if isinstance(devices, list) and not local:
        yield Problem(
            "trainer.devices",
            what="a list names devices of this machine, and the job runs elsewhere",
            remedy=f"write the number per node: trainer.devices={len(devices)}",
            code="unsupported",
        )
    if isinstance(nodes, int) and nodes > 1 and _launcher(resolved).startswith(_LOCAL):
        yield Problem(
            "trainer.num_nodes",
            what=f"launcher=local is one machine, not {nodes}",
            remedy="trainer.num_nodes=1, or another launcher (--help lists them)",
            code="unsupported",
        )
    if size is None:
        return
    strategy = str(resolved.section("strategy").get("_target_", "")).rpartition(".")[2]
    if size.world_size > 1 and strategy.lower().startswith("single"):
        ranks = f"{size.devices} devices x {size.num_nodes} nodes"
        yield Problem(
            "strategy",
            what=f"{strategy} trains on one device, not on {ranks}",
            remedy="strategy=ddp",
            code="unsupported",
        )
    if size.accelerator == "mps" and size.devices > 1:
        yield Problem(
            "trainer.devices",
            what="an Apple GPU is one device",
            remedy="trainer.devices=1",
            code="unsupported",
        )
    yield from _degrees(resolved, size)
    yield from _batches(resolved, size.world_size)
    yield from _epochs(resolved, size.world_size)


def _degrees(resolved: Resolved, size: Resources) -> Iterator[Problem]:
    """Whether the degrees of the strategy make up the ranks of the run."""
    node = resolved.section("strategy")
    yield from map(at_strategy, division_of(node).problems(node, size.world_size, size.num_nodes))


def classes(resolved: Resolved) -> Iterator[Problem]:
    """A model with fewer classes than the data: its first label above them would end the run."""
    model, data = resolved.section("model"), resolved.section("data")
    labels = data.get("num_classes")
    network = model.get("network")
    sizes = {"model.num_classes": model.get("num_classes")}
    if isinstance(network, dict) and network.get("num_classes") != model.get("num_classes"):
        sizes["model.network.num_classes"] = network.get("num_classes")
    for path, size in sizes.items() if configs.is_own(model.get("_target_")) else ():
        if type(size) is int and type(labels) is int and 0 < size < labels:
            yield Problem(
                path,
                what=f"is {size}, and the data have {labels} classes (data.num_classes)",
                remedy=f"{path}={labels}, or leave it out",
                code="mismatch",
            )


def layer_rates(resolved: Resolved) -> Iterator[Problem]:
    """Rates of layers that contradict each other, or have nothing to multiply."""
    optimizer = resolved.section("optimizer")
    given = [key for key in ("layer_decay", "backbone_lr") if optimizer.get(key) is not None]
    if len(given) > 1:
        yield Problem(
            "optimizer.backbone_lr",
            what="has no effect beside optimizer.layer_decay, which gives each layer its rate",
            remedy="leave one of the two out",
            code="conflict",
        )
    if given and "lr" not in optimizer:
        yield Problem(
            "optimizer.lr",
            what=f"is missing, and optimizer.{given[0]} needs it",
            remedy="optimizer.lr=0.01",
            code="missing-key",
        )


def _epochs(resolved: Resolved, world: int) -> Iterator[Problem]:
    """Settings that do not fit an epoch, where the config states its samples."""
    data = resolved.section("data")
    samples = data.get("train_samples")
    if configs.is_own(data.get("_target_")) and epochs.is_count(samples):
        yield from epochs.problems(resolved.values, samples, world)


def _batches(resolved: Resolved, world: int) -> Iterator[Problem]:
    data = resolved.section("data")
    total = data.get("global_batch_size")
    if total is not None and resolved.batch_chosen_later:
        what = f"{total} has no effect beside data.batch_size=auto, which decides the global batch"
        remedy = "leave it out, or a number for data.batch_size"
        yield Problem("data.global_batch_size", what=what, remedy=remedy, code="conflict")
        return
    batch = data.get("batch_size", 1)
    accumulate = resolved.section("trainer").get("accumulate_grad_batches", 1)
    if not all(type(value) is int and value > 0 for value in (total, batch, accumulate)):
        return
    strategy = resolved.section("strategy")
    shares = replicas(strategy, world, resolved.section("trainer").get("num_nodes") or 1)
    parts = shares * accumulate
    kind = f"{share_kind(strategy, shares, world)}s"
    what = f"{total} is not {batch} (data.batch_size) x {shares} {kind} x {accumulate} accumulated"
    remedy = f"data.batch_size={total // parts}"
    if total % parts:
        remedy = f"data.global_batch_size={max(1, total // parts) * parts}"
        what += ", and not divisible"
    if total != batch * parts:
        yield Problem("data.global_batch_size", what=what, remedy=remedy, code="mismatch")


def chosen_batch(resolved: Resolved) -> Iterator[Problem]:
    """Where `data.batch_size=auto` means nothing."""
    path, number = "data.batch_size", "a number, as data.batch_size=32"
    if not resolved.batch_chosen_later:
        return
    strategy = resolved.section("strategy")
    if division_of(strategy) is not EACH:
        yield Problem(
            path,
            what="auto is for strategies in which each device has a batch of its own",
            remedy=number,
            code="unsupported",
        )
    elif not task_facts.of(resolved.values).trains:
        yield Problem(
            path,
            what="auto is chosen by a training, and this task does not train",
            remedy=number,
            code="unsupported",
        )


def chosen_recompute(resolved: Resolved) -> Iterator[Problem]:
    """Where `model.recompute=auto` has nothing to choose by."""
    if resolved.section("model").get("recompute") != "auto":
        return
    path, value = "model.recompute", "model.recompute=blocks or none"
    if resolved.batch_chosen_later:
        yield Problem(
            path,
            what=(
                "auto is chosen for a batch, and data.batch_size=auto is the largest one without it"
            ),
            remedy=f"{value}, or a number for data.batch_size",
            code="conflict",
        )
    if division_of(resolved.section("strategy")) is MESH:
        yield Problem(
            path,
            what="the memory of a module that divides itself is not known among its ranks",
            remedy=value,
            code="unsupported",
        )


def secrets(resolved: Resolved) -> Iterator[Problem]:
    """Literal secrets: config.yaml is kept and shared, so it may name a secret but not hold it."""
    values = dict(walk(resolved.values))
    for path, value in walk(resolved.written):
        if not isinstance(value, str):
            continue
        keys = [part for part in path if isinstance(part, str)]
        reason = holds_secret(keys[-1], value)
        target = values.get(path)
        refers = "${" in value and "oc.env" not in value and looks_secret(keys[-1])
        literal = isinstance(target, str) and target and target not in os.environ.values()
        if not reason and refers and literal:
            reason = "refers to a secret that is plain text"
        if not reason:
            continue
        named = re.search(r"environment variable (\w+)$", reason)
        # With its section as prefix no key is a variable of the shell: PATH, HOME, USER.
        suggested = "_".join(keys[-2:] if len(keys) > 1 else ["my", *keys])
        name = named[1] if named else re.sub(r"\W", "_", suggested).upper()
        text = redact(path_text(path))
        remedy = f"write {text}='${{oc.env:{name}}}' and export {name}"
        if path[:2] == ("launcher", "env"):
            remedy = f"export {name}=... and write launcher.forward_env=[{name}] instead"
        elif path[:2] == ("launcher", "inputs"):  # its value would appear in the request
            remedy = "use a datastore, which keeps it: azureml://datastores/NAME/paths/..."
        yield Problem(text, what=reason, remedy=remedy, code="private")
