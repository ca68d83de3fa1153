"""What a run chooses by a measurement: the keys that ask for it, and what launch.yaml keeps."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from omegaconf import DictConfig, OmegaConf

Value = int | str  # bool is an int
_WORD = re.compile("[a-z-]+")


class MeasuredChoice(NamedTuple):
    """A choice by measurement: the `key` that asks for it, if it has the value `word`, and the
    `keys` that it may set."""

    key: str
    word: str | bool
    keys: tuple[str, ...]


CHOICES = {
    "batch_size": MeasuredChoice("data.batch_size", "auto", ("data.batch_size",)),
    "order": MeasuredChoice("data.order", "auto", ("data.order", "data.shuffle_window")),
    "autotune": MeasuredChoice(
        "strategy.autotune",
        True,
        (
            "data.batch_size",
            "trainer.accumulate_grad_batches",
            "strategy.autotune",
            "strategy.stage",
        ),
    ),
    "recompute": MeasuredChoice("model.recompute", "auto", ("model.recompute",)),
    "compile": MeasuredChoice("model.compile", "measured", ("model.compile",)),
}


def asks(config: DictConfig, choice: str) -> bool:
    """Whether a config asks for a choice that has not been made."""
    key, word, _ = CHOICES[choice]
    value = OmegaConf.select(config, key, throw_on_resolution_failure=False)
    return type(value) is type(word) and value == word


def word_of(key: str) -> str:
    """The word that asks for a choice in place of a value; empty: the key takes none."""
    for choice in CHOICES.values():
        if choice.key == key and isinstance(choice.word, str):
            return choice.word
    return ""


def made_in(launch: Mapping[str, object]) -> dict[str, dict[str, Value]]:
    """What the attempt of a launch.yaml has chosen: choice -> changes to the config, by path. The
    file may be somebody else's: what no choice sets is left out, with all of its choice."""
    written = launch.get("chosen")
    found = {}
    for choice, changes in written.items() if isinstance(written, dict) else ():
        known = CHOICES.get(choice)
        if known and isinstance(changes, dict) and _may_set(known, changes):
            found[choice] = changes
    return found


def _may_set(choice: MeasuredChoice, changes: Mapping[str, object]) -> bool:
    return changes.keys() <= {*choice.keys} and all(
        isinstance(value, int) or (isinstance(value, str) and _WORD.fullmatch(value))
        for value in changes.values()
    )
