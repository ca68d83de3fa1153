"""A run of a program instead of a training: its command, its parameters, and what its config has.

`distdl run [overrides] -- CMD` and a file with a section `program` compose such a config. It keeps
only what concerns a program; whoever writes about a model, data, ... as well is told so.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from distdl.util.errors import Problem, UserError
from distdl.util.suggest import closest

USAGE = "python -m distdl run [key=value ...] -- COMMAND ARGUMENT ..."
SECTION = "program"
PARAMS = f"{SECTION}.params"
# `params.lr=0.2` is short for `program.params.lr=0.2`.
_SHORT = re.compile(r"^(\+\+|\+|~)?params(?=[.=])")
# The sections and keys of a config that concern a program, besides those of the launch.
KEPT = (
    "name",
    "experiment_name",
    "tags",
    "output_dir",
    "dry_run",
    "follow",
    "project",
    "preflight",
    "watchdog",
    "trainer",
    "launcher",
    "tracking",
    SECTION,
    "hydra",
)
TRAINER = ("accelerator", "devices", "num_nodes")
TRACKED_BY = "mlflow"
TRACKER = "distdl.tracking.mlflow.MLflowLogger"
_LITERAL = re.compile(r"(\\*)\$\{")
# OmegaConf takes this word alone for a value that is missing.
_MISSING = "???"
MISSING_WORD = "${question_marks:}"
OmegaConf.register_new_resolver("question_marks", lambda: _MISSING, replace=True)


def is_program(config: Mapping[Any, Any]) -> bool:
    """Whether a config, composed or frozen, is one of a program."""
    return config.get(SECTION) is not None


def is_about(key: str) -> bool:
    """Whether a key is one of the section."""
    return key == SECTION or key.startswith(f"{SECTION}.")


def full(text: str) -> str:
    """An override with `params.` written in full."""
    return _SHORT.sub(lambda found: f"{found[1] or ''}{PARAMS}", text)


def command_override(words: Sequence[str]) -> str:
    """The override that gives a program the words of its command, each exactly as it is typed."""
    return f"{SECTION}.command=[{','.join(map(quoted, words))}]"


def quoted(word: str) -> str:
    """A word as the value of an override, from which exactly this word is read."""
    from hydra.core.override_parser.types import Quote, QuotedString

    return QuotedString(literal(word), Quote.single).with_quotes()


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words before `--`, and the override that what is behind it makes; empty without it."""
    if "--" not in words:
        return [*words], []
    at = [*words].index("--")
    command = [*words][at + 1 :]
    if not command or not command[0]:
        raise UserError.at(
            "--", what="there is no command behind it", remedy=USAGE, code="missing-key"
        )
    return [*words[:at]], [command_override(command)]


def literal(word: str) -> str:
    """A word as OmegaConf must read it, to give the same word: nothing in it is interpolated."""
    if word == _MISSING:
        return MISSING_WORD
    return _LITERAL.sub(lambda found: f"{found[1] * 2}\\${{", word)


def words_of(command: object) -> object:
    """The command as a list of words, before interpolations are resolved. A text is split as a
    shell splits it, but by no shell: what stands for a parameter stays within its word."""
    if not isinstance(command, str):
        return command
    try:
        return shlex.split(command)
    except ValueError as error:
        raise UserError.at(
            f"{SECTION}.command",
            what=f"cannot be split into words: {error}",
            remedy="write it as a list",
            code="wrong-kind",
        ) from None


def reduce(config: DictConfig, default: DictConfig, typed: Sequence[str]) -> None:
    """Leaves in a composed config only what concerns its program.

    Args:
        config: As composed. Changed in place.
        default: What is composed without any override or file of the user's.
        typed: The keys of the overrides.

    Raises:
        UserError: The user sets something that a program does not have.
    """
    node = config[SECTION]
    if isinstance(node, DictConfig) and "command" in node:
        written: Any = OmegaConf.to_container(node, resolve=False)
        node.command = words_of(written["command"])
    if problems := [*_foreign(config, default, typed)]:
        raise UserError(*problems)
    for key in [str(each) for each in config if each not in KEPT]:
        config.pop(key)
    trainer = config.get("trainer")
    if isinstance(trainer, DictConfig):
        for key in [str(each) for each in trainer if each not in TRAINER]:
            trainer.pop(key)


def _foreign(config: DictConfig, default: DictConfig, typed: Sequence[str]) -> Iterator[Problem]:
    """What the user sets of a training, which a program does not have."""
    plain: Any = OmegaConf.to_container(config, resolve=False)
    before: Any = OmegaConf.to_container(default, resolve=False)
    remedy = "leave it out, or leave out the section program"
    if "debug" in typed:
        yield Problem(
            "debug",
            what="its options are for trainings",
            remedy="trainer.accelerator=cpu trainer.devices=1 makes a run small",
            code="conflict",
        )
        return
    for key, value in ((str(key), value) for key, value in plain.items()):
        said = key in typed or any(each.startswith(f"{key}.") for each in typed)
        if key not in KEPT and (said or value != before.get(key)) and key in before:
            yield Problem(
                key,
                what="a program has none, only trainings of distdl have",
                remedy=remedy,
                code="conflict",
            )
    trainer, usual = plain.get("trainer"), before.get("trainer")
    both = isinstance(trainer, dict) and isinstance(usual, dict)
    for key, value in (trainer if both else {}).items():
        if key in TRAINER or value == usual.get(key):
            continue
        if near := closest(key, TRAINER):
            yield Problem(
                f"trainer.{key}",
                what="unknown key in trainer",
                remedy=f"did you mean trainer.{near}?",
                code="unknown-key",
            )
        else:
            yield Problem(
                f"trainer.{key}",
                what="is an argument of Lightning's Trainer, which a program does not have",
                remedy=f"a program has {', '.join(TRAINER)}",
                code="conflict",
            )
    for key, node in (plain.get("tracking") or {}).items():
        named = node.get("_target_") if isinstance(node, dict) else None
        if key != TRACKED_BY or named != TRACKER:
            yield Problem(
                f"tracking.{key}",
                what="distdl hands a program only its run in MLflow",
                remedy="tracking=mlflow; log to others by yourself",
                code="conflict",
            )
            continue
        # No class is imported for a program: its arguments are those of conf/tracking/mlflow.yaml.
        takes = [*((before.get("tracking") or {}).get(key) or {}), "interval"]
        for name in node if "_target_" in takes else ():
            if name not in takes:
                near = closest(str(name), takes)
                yield Problem(
                    f"tracking.{key}.{name}",
                    what="MLflowLogger takes no such argument",
                    remedy=f"did you mean tracking.{key}.{near}?" if near else ", ".join(takes[1:]),
                    code="unknown-key",
                )


def refuse_none(config: Mapping[Any, Any]) -> None:
    """Refuses a config without a command to start."""
    if not (config.get(SECTION) or {}).get("command"):
        raise UserError.at(
            "run",
            what="there is neither a command behind -- nor one in a file (program.command)",
            remedy=USAGE,
            code="missing-key",
        )


def refuse(config: Mapping[Any, Any], verb: str) -> None:
    """Refuses a program where only a training of distdl's can be looked into."""
    if is_program(config):
        raise UserError.at(
            SECTION,
            what=(
                f"distdl {verb} looks into a training of distdl's, "
                "and a program is not known inside"
            ),
            code="unsupported",
        )


def undeclared(config: DictConfig, typed: Sequence[str]) -> Iterator[Problem]:
    """The parameters that only the command line gives, without declaring them by a `+`.

    Args:
        config: As composed of the files alone.
        typed: The overrides that give values, as texts.
    """
    declared = OmegaConf.select(config, PARAMS)
    known = [str(key) for key in declared] if isinstance(declared, DictConfig) else []
    for text in typed:
        key = text.partition("=")[0]
        if not key.startswith(f"{PARAMS}."):
            continue
        name = key.removeprefix(f"{PARAMS}.")
        if name.partition(".")[0] not in known:
            near = closest(name, known)
            declare = f"declare it: +params.{name}=..., or under program.params in the file"
            yield Problem(
                f"params.{name}",
                what="is no parameter of the program",
                remedy=f"did you mean params.{near}?" if near else declare,
                code="unknown-key",
            )
