"""What any command says to people: no line wider than the terminal, nothing that it acts on."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable

import pytest

from distdl.cli.main import COMMANDS
from distdl.cli.schemas import ANSWERS
from tests.cli.test_json import REFUSED
from tests.conftest import ROOT, Said

RUN = "outputs/default/x"
# Of commands that come to their end. Documents (YAML, scripts, logs) are printed as they are.
ENDED = (
    "--help",
    "jobs list",
    f"jobs status {RUN}",
    f"jobs cancel {RUN}",
    f"compare {RUN} outputs/default/y",
    "explain",
    "explain unknown-key",
    f"report {RUN}",
)


@pytest.fixture
def said(command, monkeypatch) -> Callable[..., Said]:
    """What a command says on a terminal that has so many columns."""

    def run(words: list[str], columns: int) -> Said:
        for stream in (sys.stdout, sys.stderr):
            monkeypatch.setattr(stream, "isatty", lambda: True)
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("NO_COLOR", "1")
        said: Said = command(*words)
        return said

    return run


def typed(name: str) -> list[str]:
    verb = [] if name in ("train", "sweep") else name.split()
    return [*verb, *REFUSED[name].split()]


def too_wide(said: Said, columns: int) -> list[str]:
    return [
        line
        for line in (said.out + said.err).splitlines()
        # A path or an address is not cut.
        if len(line) > columns and len(line.removesuffix(" \\").split()) > 1
    ]


@pytest.mark.parametrize("name", ANSWERS)
def test_a_refusal_fits_into_the_terminal(name, said):
    for columns in (60, 160):
        told = said(typed(name), columns)
        assert told.code == 2
        assert told.err
        assert too_wide(told, columns) == []


@pytest.mark.parametrize("words", ENDED)
def test_an_answer_fits_into_the_terminal(words, said, tmp_path):
    for name in ("x", "y"):
        shutil.copytree(ROOT / "tests/fixtures/frozen_run/run", tmp_path / "outputs/default" / name)
    for columns in (60, 160):
        told = said(words.split(), columns)
        assert told.code == 0, told.err
        assert told.out
        assert too_wide(told, columns) == []


def test_the_help_of_each_verb_fits_into_the_terminal(said):
    for verb in COMMANDS:
        told = said([verb, "--help"], 60)
        assert (told.code, too_wide(told, 60)) == (0, []), verb


def test_a_dry_run_fits_into_the_terminal(said, without_stage_2):
    words = ("model=resnet18", "data=synthetic", "trainer.accelerator=cpu", "trainer.devices=1")
    told = said([*words, "name=x", "launcher.max_attempts=3", "dry_run=true"], 60)
    assert told.code == 0, told.err
    command = told.out.rstrip().splitlines()[-5:]
    assert command[0] == "DISTDL_LAUNCHER=local \\"
    assert command[-1] == "  --attempt 1"
    assert all(line.endswith(" \\") for line in command[:-1])
    assert too_wide(told, 60) == []


@pytest.mark.parametrize("name", [name for name in ANSWERS if "nowhere" in REFUSED[name]])
def test_what_a_terminal_would_act_on_is_shown(name, said):
    words = [word.replace("nowhere", "no\x1b[2J\x07where") for word in typed(name)]
    words = [word.replace("1", "name") for word in words]  # of an endpoint
    told = said(words, 80)
    assert told.code == 2
    shown = told.out + told.err
    assert "\x1b[2J" not in shown
    assert "\x07" not in shown
    assert "where" in shown
