"""Checks against Lightning: base classes of model and data, hooks that Lightning no longer calls,
and the Trainer's arguments."""

from __future__ import annotations

import inspect
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from distdl.config import task_facts
from distdl.config.hints import lightning_1
from distdl.config.paths import path_text
from distdl.util.errors import Problem
from distdl.util.typed import Path
from distdl.validation import misfits
from distdl.validation.findings import ConfigFindings
from distdl.validation.targets import Trust, lies_in


def component(
    called: Callable[..., Any], path: Path, trust: Trust, findings: ConfigFindings, *, sharded: bool
) -> None:
    """Checks a component: the base class of model and data, whether the strategy can shard
    checkpoints if the config asks for it (`sharded`), and hooks and arguments of Lightning 1."""
    if path[0] == "launcher":  # no part of Lightning's, whose import takes seconds
        return
    import lightning.pytorch as pl

    bases = {"model": pl.LightningModule, "data": pl.LightningDataModule}
    if path == ("strategy",) and sharded and not hasattr(called, "sharded_checkpoints"):
        what = f"{called.__name__} writes each checkpoint as one file"
        remedy = "checkpoint.sharded=false, or strategy=fsdp"
        findings.add(("checkpoint", "sharded"), what, remedy, code="unsupported")
    if not inspect.isclass(called):
        return
    section = str(path[0])
    base = bases.get(section) if len(path) == 1 else None
    if base is not None and not issubclass(called, base):
        remedy = f"derive it from lightning.pytorch.{base.__name__}"
        if section == "model":
            remedy += ", or pass it to distdl's: model._target_=distdl.models.ImageClassifier"
        what = f"{called.__name__} is not a {base.__name__}"
        findings.add((section, "_target_"), what, remedy, code="wrong-kind")
    elif base is pl.LightningModule:
        default = pl.LightningModule.configure_optimizers
        method = getattr(called, "configure_optimizers", None)
        findings.facts["model_configures_optimizers"] = method is not default
    is_users = partial(lies_in, folders=trust.folders)
    for kind in (*bases.values(), pl.Callback):
        if issubclass(called, kind):
            for what, remedy in lightning_1.problems(called, kind, is_users):
                findings.add((*path, "_target_"), what, remedy, code="unsupported")


def trainer(arguments: Mapping[str, Any], findings: ConfigFindings) -> None:
    """Builds a Trainer from those arguments that fit, and reports what Lightning refuses."""
    wrong = {problem.path for problem in findings.problems}
    plain = {k: v for k, v in arguments.items() if f"trainer.{k}" not in wrong}
    refused = try_trainer({k: v for k, v in plain.items() if "_target_" not in str(v)})
    if isinstance(refused, str):
        findings.absent(refused, ("trainer",))
    elif refused is not None:
        findings.problems.append(refused)


def misfits_of(
    config: Mapping[str, Any], called: Mapping[Path, Callable[..., Any]], world_size: int
) -> Iterable[Problem]:
    """Combinations that do not work, of a config whose task trains."""
    if "training_step" not in task_facts.of(config).calls:
        return ()
    classes = {path: each for path, each in called.items() if inspect.isclass(each)}
    return misfits.misfits(
        config["trainer"],
        {path_text(path): cls for path, cls in classes.items() if path[0] == "callbacks"},
        classes.get(("model",)),
        str((config.get("strategy") or {}).get("_target_")),
        world_size,
    )


def try_trainer(arguments: Mapping[str, Any]) -> Problem | str | None:
    """Builds a Trainer: Lightning refuses values that no type check can find. Returns a problem, or
    the name of a missing package, or None."""
    from lightning.fabric.plugins.environments import LightningEnvironment
    from lightning.pytorch import Trainer

    # The devices may be on another machine, and distdl sets loggers, the bar and the cluster
    # itself: Lightning would look for Slurm, LSF, ... in the variables of this shell.
    neutral: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "num_nodes": 1,
        "sync_batchnorm": False,
        # These two would change this process.
        "deterministic": None,
        "benchmark": None,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "plugins": [LightningEnvironment()],
    }
    passed = {**arguments, **neutral}
    logging.disable(logging.INFO)  # the Trainer that trains logs these messages again
    try:
        with warnings.catch_warnings(action="ignore"):
            Trainer(**passed)
    except ModuleNotFoundError as error:  # "Requirement 'torch_xla>=2.1' not met"
        package = re.search(r"'([\w-]+)", str(error))
        return package[1] if package else str(error)
    except Exception as error:  # Lightning raises its own, and Python's
        text = str(error)
        names = [k for k, v in passed.items() if re.search(rf"\b{k}\b", text) or f"={v!r}" in text]
        reason = f"{type(error).__name__}: {next(iter(text.splitlines()), '')}"
        return Problem(
            ".".join(["trainer", *names[:1]]), what=f"Lightning refuses it: {reason}", code="failed"
        )
    finally:
        logging.disable(logging.NOTSET)
    return None
