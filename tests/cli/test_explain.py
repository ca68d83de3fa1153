"""`explain`: each code of refusals has an example, which is refused with it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from distdl.cli.explain import EXAMPLES, RUN
from distdl.job import JobState
from distdl.runs.directory import Attempt
from distdl.util.refusal_codes import CODES
from tests.conftest import ROOT, matrix_only

FIXTURES = ROOT / "tests/fixtures"

# These are shown by other tests: a host that is not fit, and a check of a user's own.
ELSEWHERE = {"unfit": "tests/multiprocess/test_examination.py", "refused": "tests/unit/validation"}
# These need a process of their own.
CHECKED = {"conflict", "hidden-module", "indivisible", "not-enough", "unsupported"}


def codes_in(text: str) -> list[str]:
    return re.findall(r"\[([a-z-]+)\]$", text, re.MULTILINE)


def test_each_code_is_explained(command):
    assert EXAMPLES.keys() == CODES.keys()
    listed = command("explain")
    for code, meaning in CODES.items():
        assert meaning in listed.out
        said = command("explain", f"[{code}]")
        assert EXAMPLES[code].command in said.out
        assert meaning in said.out
    assert (
        "did you mean: python -m distdl explain unknown-key" in command("explain", "unknow-key").err
    )


@pytest.mark.parametrize("code", sorted(CODES.keys() - ELSEWHERE.keys() - CHECKED))
def test_examples_are_refused_with_their_code(code, command, without_stage_2, monkeypatch):
    run = Path(shutil.copytree(FIXTURES / "frozen_run/run", RUN))
    if code == "damaged-file":
        run.joinpath("config.yaml").write_text("seed: 1")
    elif code == "under-way":
        monkeypatch.setattr(Attempt, "state", lambda attempt: JobState.RUNNING)
    elif code == "exists-already":
        run.joinpath("../../../notes.html").write_text("mine")
    elif code == "platform-refuses":
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            monkeypatch.delenv(name)
    said = command(*shlex.split(EXAMPLES[code].command))
    assert said.code == 2, said
    assert code in codes_in(said.err), said


@pytest.mark.parametrize(
    "code",
    [
        "not-enough",
        *(pytest.param(c, marks=matrix_only) for c in ("conflict", "indivisible", "unsupported")),
    ],
)
def test_examples_that_classes_refuse(code, command):
    assert code in codes_in(command(*EXAMPLES[code].command.split()).err)


def test_a_file_that_hides_a_module(tmp_path):
    """In a new process, which has imported nothing yet."""
    (tmp_path / "random.py").write_text("")
    typed = [sys.executable, "-m", "distdl", EXAMPLES["hidden-module"].command]
    done = subprocess.run(typed, cwd=tmp_path, capture_output=True, text=True)
    assert codes_in(done.stderr) == ["hidden-module"]
