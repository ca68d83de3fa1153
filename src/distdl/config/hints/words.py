"""What users of Hydra, lightning-hydra-template or LightningCLI type, and what to write instead."""

from __future__ import annotations

import itertools
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from distdl.config import user_conf
from distdl.config.hints.tables import OTHER_TOOLS, patterns, table
from distdl.util.errors import Problem, UserError
from distdl.util.redact import redact
from distdl.util.suggest import closest, nearest

_SIZE = "trainer.accelerator=cpu or gpu, trainer.devices=N, strategy=ddp"

PLAIN = re.compile(r"\s*[\w./:@%+-]*\s*")  # an item of a list that needs no quotes


_KEYS = table(OTHER_TOOLS, "keys")
_STRATEGIES = patterns(OTHER_TOOLS, "strategies")
_PRECISIONS = patterns(OTHER_TOOLS, "precisions")
_CHOICES = table(OTHER_TOOLS, "choices")
_OPTIONS = table(OTHER_TOOLS, "options")
_VERBS = table(OTHER_TOOLS, "verbs")
TRAINER_OWNED = table(OTHER_TOOLS, "trainer_owned")


def not_global(path: str) -> Problem:
    """The problem of an experiment or debug file without `# @package _global_`."""
    return Problem(
        path,
        what="its keys would be nested below it, not beside model and data",
        remedy="make its first line: # @package _global_",
        code="incomplete",
    )


def strategy_for(name: str) -> str:
    """What to write instead of `ddp_find_unused_parameters_true`; "" for an unknown name."""
    for pattern, ours in _STRATEGIES.items():
        if match := re.fullmatch(pattern, name.lower()):
            return f"strategy={match.expand(ours)}"
    return ""


def precision_for(name: str) -> str:
    """What to write instead of `trainer.precision=fp16`; "" for an unknown name."""
    name = name.lower().removeprefix("torch.").replace("_", "-")
    ours = (ours for pattern, ours in _PRECISIONS.items() if re.fullmatch(pattern, name))
    return next((f"write trainer.precision={each}" for each in ours), "")


def for_key(key: str, value: object = None, config: Mapping[str, Any] | None = None) -> str:
    """What to write instead of a key like `hydra.run.dir`; "" for an unknown key.

    `config` is the resolved config, if it is known already.
    """
    key = "early_stopping.patience" if key == "patience" else key
    name, _, rest = key.partition(".")
    if name in ("logger", "loggers"):  # `logger=wandb`, `logger.wandb.group=x`
        logger, _, argument = rest.partition(".")
        logger = logger or str(value)
        if for_component("tracking", logger):
            return f"tracking={logger}" + (f" tracking.{rest}=..." if argument else "")
    for collection in ("callbacks", "tracking"):  # `early_stopping.patience`
        if option := for_component(collection, name, config):
            return f"{option} {collection}.{key}=..." if rest else option
    while key and key not in _KEYS:
        key = key.rpartition(".")[0] if "." in key else key.rpartition("/")[0]
    return _KEYS.get(key, "")


def for_choice(group: str, option: str) -> str:
    """What to write instead of `trainer=gpu`; "" for an unknown option."""
    ours = strategy_for(option) if group in ("trainer", "strategy") else ""
    rest = ours or (_SIZE if group == "trainer" else _KEYS.get(f"{group}.{option}", ""))
    return _CHOICES.get(f"{group}={option}", rest)


def for_component(collection: str, name: str, config: Mapping[str, Any] | None = None) -> str:
    """How to add an option to those of the config; "" if distdl has no option of that name."""
    shipped = files("distdl.conf").joinpath(collection, f"{name}.yaml").is_file()
    if not shipped or name in ("none", {"callbacks": "default", "tracking": "mlflow"}[collection]):
        return ""
    return f"{collection}=[{','.join([*_chosen(collection, config), name])}]"


def _chosen(collection: str, config: Mapping[str, Any] | None) -> list[str]:
    """The options of a collection that the config uses, found by the keys in the option files.
    Keys that are in no option file are ignored."""
    options: dict[str, set[str]] = {}
    for folder in _folders():
        for file in folder.glob(f"{collection}/*.yaml"):
            for key in re.findall(r"^(\w+):", file.read_text(errors="replace"), re.MULTILINE):
                options.setdefault(key, set()).add(file.stem)
    section = (config or {}).get(collection)
    nodes = section.items() if isinstance(section, Mapping) else ()
    chosen = [key for key, node in nodes if isinstance(node, Mapping) and "_target_" in node]
    names = [options[key] for key in chosen if key in options]
    if config is None or any(len(several) > 1 for several in names):
        return ["<those you have>"]
    return [*dict.fromkeys(name for (name,) in names)]


def _folders() -> list[Path]:
    return [Path(str(files("distdl.conf"))), *user_conf.folders()]


def for_option(option: str, known: Iterable[str], following: str = "") -> str:
    """What to write instead of `--config-name` or `--max_epochs=3`; "" for an unknown option.

    `known` are all keys of the config; `following` is the next word, which may be its value.
    """
    name, equals, value = option.partition("=")
    if not equals and "=" not in following and not following.startswith("-"):
        value = following
    if name in _OPTIONS:
        return _OPTIONS[name]
    key = name.lstrip("-").replace("-", "_")
    if not (meant := for_key(key)):
        known = [*known]
        names = [key] if key in known else nearest(key, known)
        if not names and not equals and "." not in key:
            return ""
        meant = f"{names[0] if names else key}={value or '...'}"
    return f"values are written without dashes: {meant}"


def for_verb(verb: str, rest: Sequence[str]) -> str:
    """What to write instead of `distdl train`; `rest` follows it."""
    ours = _VERBS.get("train" if verb.endswith(".py") else verb, "")
    return ours.format(" ".join(rest) or "experiment=NAME")


def for_experiment(word: str, rest: Sequence[str]) -> str:
    """What to write instead of `distdl ours`; "" if there is no experiment of that name."""
    name = re.sub(r"^(.*/)?experiment/|\.ya?ml$", "", word)
    if not any((folder / f"experiment/{name}.yaml").is_file() for folder in _folders()):
        return ""
    return " ".join(["python -m distdl", f"experiment={name}", *rest])


def for_override(text: str, error: str) -> str:
    """What to write instead of an override that Hydra's grammar refuses with this error."""
    key, equals, value = text.partition("=")
    if not equals or text.startswith("~"):
        return "write key=value, +key=value, group=option or ~key"
    if missing := open_brackets(value):
        return f"it lacks {missing}: {redact(repr(text.rstrip(', ') + missing))}"
    typed = meant(text)
    if typed != text:
        return f"write {redact(shlex.quote(typed))}"
    if value.startswith(("{", '"', "'")):  # a mapping, or quoted already
        return redact(error)
    quoted = quoted_items(value) or '"{}"'.format(value.replace('"', '\\"'))
    return redact(f"{error}\n    quote a text with special characters: '{key}={quoted}'")


def quoted_items(value: str) -> str:
    """A list whose items are quoted where Hydra wants it: `[a,"b[1-2]"]` for `[a,b[1-2]]`; empty if
    the value is no list, or has quotes already."""
    if not re.fullmatch(r"\[[^'\"]*\]", value):
        return ""
    items = re.findall(r"(?:[^],[]|\[[^]]*\])+", value[1:-1])  # a comma in brackets parts none
    texts = [item if PLAIN.fullmatch(item) else f'"{item.strip()}"' for item in items]
    return f"[{','.join(texts)}]"


def open_brackets(text: str) -> str:
    """The closing brackets that a text without quotes lacks: `]` for `[0.1`."""
    closing = {"[": "]", "{": "}", "(": ")"}
    waiting = ""
    for letter in text if not {"'", '"'} & {*text} else "":  # those inside quotes do not count
        if letter in closing:
            waiting = closing[letter] + waiting
        elif waiting.startswith(letter):
            waiting = waiting[1:]
    return waiting


def first_override(words: Sequence[str]) -> tuple[int, str]:
    """The number of words into which the shell split the first override, and that override.

    `seed = 3` gives 3 and `seed=3`; `a=[1,` `2]` gives 2 and `a=[1, 2]`; a complete word gives 1.
    """
    first, *rest = words
    second = rest[0] if rest else ""
    if second in _SIGNS and len(rest) > 1:
        return 3, f"{first}={rest[1]}"
    if "=" not in first and second.startswith(("=", ":=")) and second not in _SIGNS:
        return 2, f"{first}={second.lstrip(':=')}"
    if first.endswith(("=", ":")) and second and "=" not in second:
        return 2, f"{first.rstrip(':=')}={second}"
    if "=" in first and _is_open(first):
        until = itertools.takewhile(lambda word: "=" not in word, rest)  # the next override
        for count, _ in enumerate(until, 2):
            joined = " ".join(words[:count])
            if not _is_open(joined):
                return count, joined
    elif "=" in first and first.endswith(",") and second and "=" not in second:
        count, joined = first_override([first + second, *rest[1:]])  # a sweep's `lr=0.1, 0.2, 0.3`
        return count + 1, joined
    return 1, first


_KEY = re.compile(r"[a-z_]\w*(\.\w+)*")
_SIGNS = ("=", ":", "==", ":=")
# Quotes, dashes and spaces as word processors and web pages write them.
_QUOTES = "\u201c\u201d\u201e\u201f\u00ab\u00bb\u2018\u2019\u201a"
_DASHES = "\u2010\u2011\u2012\u2013\u2014\u2212"
_SIGNS_WIDE = "\u00a0\u3000\uff1d\uff1a\uff0c"
_TYPESET = str.maketrans(
    _QUOTES + _DASHES + _SIGNS_WIDE, '"' * len(_QUOTES) + "-" * 6 + "  =:,", "\u200b\ufeff"
)


def _is_open(text: str) -> bool:
    return bool(open_brackets(text)) or sum(letter in _QUOTES for letter in text) % 2 == 1


def is_quoted(text: str) -> bool:
    """Whether a text contains quotes, including typographic ones."""
    return any(letter in text for letter in f"'\"{_QUOTES}")


def meant(word: str) -> str:
    """A word as it should have been typed; unchanged if nothing is wrong with it.

    `seed : 4` and `seed==4` become `seed=4`, typographic signs plain ones, `~/x` becomes
    `/home/me/x`."""
    text = word.translate(_TYPESET).strip()
    if text.startswith("-"):
        name = text.lstrip("-")
        if word.startswith("-"):
            return text
        dashes = "-" if len(name) == 1 else "--"
        return f"{dashes}{name}"
    key, sign, value = text.partition("=")
    if not sign:
        key, sign, value = text.partition(":")
        if not sign or value[:1] in ("", "/", "\\"):  # a URL or a Windows drive
            return text
    key = re.sub(r"[\s,:.()\[\]]+", ".", key).strip(".")
    value = value.lstrip("=").strip().strip(",;")
    if value[:1] in ('"', "'") and word[-1] != value[0] == value[-1]:  # typographic quotes
        value = value[1:-1]
    return f"{key}={os.path.expanduser(value)}"


@dataclass(frozen=True)
class _Refused:
    """A word that is no override.

    Args:
        problem: With it as the path, as it was typed or as it was meant.
        count: The words that belong to it.
        takes_the_rest: Whether all words behind it belong to it, too.
    """

    problem: Problem
    count: int
    takes_the_rest: bool = False


def _refused(left: Sequence[str], count: int, typed: str, commands: Sequence[str]) -> _Refused:
    """What is wrong with the first of the words that are left.

    Args:
        count: The words into which the shell split it.
        typed: It, as it was meant.
    """
    word = left[0]
    rest = left[count:]
    if count > 1:
        return _Refused(
            Problem(
                typed,
                what="the shell splits it into several words",
                remedy=f"write {shlex.quote(typed)}",
                code="wrong-kind",
            ),
            count,
        )
    if typed != word and ("=" in typed or typed.startswith("-")):
        is_option = typed.startswith("-")
        return _Refused(_no_override(word, f"write {shlex.quote(typed)}"), count, is_option)
    close = closest(word, commands)
    if rest and rest[0].replace(".", "", 1).isdigit():  # a value, and no command takes one
        close = ""
    verb = for_verb(word, list(rest)) or for_experiment(word, list(rest))
    if not (verb or close) and rest and "=" not in rest[0] and _KEY.fullmatch(word):
        remedy = f"write {shlex.quote(f'{word}={rest[0]}')}"
        return _Refused(_no_override(word, remedy), count + 1)
    if not commands:
        return _Refused(_no_override(word, "write key=value, or group=option"), count)
    remedy = f"write key=value, or begin with a command: {', '.join(commands)}"
    if close:
        remedy = f"did you mean: python -m distdl {close}"
    problem = Problem(
        word, what="is neither a command nor an override", remedy=verb or remedy, code="unknown-key"
    )
    return _Refused(problem, count, takes_the_rest=bool(verb or close))


def _no_override(word: str, remedy: str) -> Problem:
    return Problem(word, what="is not an override", remedy=remedy, code="wrong-kind")


def check(words: Sequence[str], commands: Iterable[str] = ()) -> None:
    """Checks overrides as the shell passed them, before they are parsed: refuses, by a UserError,
    words without `=`. These are misspelt or other tools' verbs (if there are `commands`), or a part
    of an override that the shell split."""
    problems = []
    left = list(words)
    while left:
        count, override = first_override(left)
        word = left[0]
        if (count == 1 and "=" in word[1:]) or word.startswith("~"):
            left = left[count:]
            continue
        refused = _refused(left, count, meant(override), [*commands])
        problems.append(refused.problem)
        # The arguments of the command that was meant, or the value of the option.
        left = [] if refused.takes_the_rest else left[refused.count :]
    if problems:
        raise UserError(*problems)
