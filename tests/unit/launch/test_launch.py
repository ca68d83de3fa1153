"""What a start knows is derived once: calls are counted, not seconds."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distdl.config import grammar
from tests.conftest import TINY, Said

# What is derived from a config: at most once for each of them.
DERIVED = [
    ("distdl.config.own_code", "own_folders"),
    ("distdl.config.recipe", "flat_paths"),
    ("distdl.config.recipe", "where_of"),
    ("distdl.config.resources", "resolve"),
    ("distdl.runs.provenance", "project_root"),
    ("distdl.validation.kinds", "locate"),
    ("distdl.validation.resolve", "resolve"),
    ("distdl.validation.validate", "problems_in"),
]
COUNTED = [
    *DERIVED,
    ("distdl.config.compose", "composed"),
    ("distdl.config.hints.words", "check"),
    ("distdl.config.paths", "walk"),
    ("distdl.runs.git", "_run"),
]
Calls = dict[str, list[tuple[Any, ...]]]

TWO_RANKS = [*TINY, "trainer.devices=2", "name=r"]
NODES = ["launcher=slurm", "trainer.num_nodes=2", "trainer.devices=1"]
RESUME = ["resume", "outputs/default/r", "dry_run=true"]
# What is typed first; what is typed then, and counted; and how many configs Hydra composes for it.
COMMANDS: dict[str, tuple[list[str], list[str], int]] = {
    "a start": ([], TWO_RANKS, 1),
    "a dry run for Slurm": ([], [*TINY, *NODES, "name=r", "dry_run=true"], 1),
    "a resume": (TWO_RANKS, [*RESUME, "trainer.max_epochs=5"], 0),
    "a resume elsewhere": (TWO_RANKS, [*RESUME, *NODES, "tracking=none"], 1),
    "a sweep": ([], ["-m", *TWO_RANKS, "seed=1,2", "dry_run=true"], 2),
}


@pytest.fixture
def project(command: Callable[..., Said], tmp_path: Path, without_worker: None) -> None:
    """The current folder is a git repository with one commit."""
    (tmp_path / ".gitignore").write_text("outputs\n", encoding="utf-8")
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    for words in (["init", "-q"], ["add", "."], [*identity, "commit", "-q", "-m", "one"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)


def counted(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The positional arguments of each call from now on, by the function's full name, also where a
    module has imported it; `parse` has the texts that Hydra's grammar reads for distdl."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    calls: Calls = defaultdict(list)

    def counting(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def count(*args: Any, **more: Any) -> Any:
            calls[name].append(args)
            return function(*args, **more)

        return count

    for module in ("distdl.cli.resume", "distdl.launch.sweeps", "distdl.launch.dry_run"):
        importlib.import_module(module)
    modules = [module for name, module in sys.modules.items() if name.startswith("distdl")]
    for home, name in COUNTED:
        original = getattr(importlib.import_module(home), name)
        for module in modules:
            for attribute, value in list(vars(module).items()):
                if value is original:
                    monkeypatch.setattr(module, attribute, counting(original, f"{home}.{name}"))
    parse = counting(OverridesParser.parse_override, "parse")
    monkeypatch.setattr(OverridesParser, "parse_override", lambda *args: parse(*args))
    grammar.parsed.cache_clear()
    return calls


@pytest.mark.parametrize("typed", COMMANDS)
def test_values_are_derived_once(
    typed: str, project: None, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, words, composed = COMMANDS[typed]
    if before:
        assert command(*before).code == 0
    calls = counted(monkeypatch)
    done = command(*words)
    assert done.code == 0, done.err
    often = Counter({name: len(each) for name, each in calls.items()})
    configs = max(composed, 1)
    derived = {name: often[name] for name in map(".".join, DERIVED)}
    assert max(derived.values()) <= configs, derived
    assert often["distdl.config.compose.composed"] == composed
    asked = Counter(args[1] for args in calls["distdl.runs.git._run"])
    assert asked.total() <= 2, asked
    # It calls itself with a path, too: these are the walks through all values of a config.
    walks = [args for args in calls["distdl.config.paths.walk"] if len(args) == 1]
    assert len(walks) <= 5 * configs
    overrides = sorted(word for word in words if "=" in word)
    checked = calls["distdl.config.hints.words.check"]
    assert sorted(word for args in checked for word in args[0]) == overrides
    members = ["seed=1", "seed=2"] if "-m" in words else []
    assert sorted(text for _, text in calls["parse"]) == sorted([*overrides, *members])
