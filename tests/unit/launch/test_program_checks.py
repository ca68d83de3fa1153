"""Checks of a program before anything starts: which file of the project it is."""

from __future__ import annotations

import pytest

from distdl.launch import program_checks
from tests.written import write

COMMANDS = {
    "train.py --lr 0.1": ["train.py"],
    "-m package.tool": ["package/tool.py"],
    "./run.sh data.csv": ["run.sh"],
    "bash -x run.sh data.csv": ["run.sh"],
    "torchrun --nproc-per-node 2 train.py": ["train.py"],
    "python -u -m package.tool": [],
    "hostname": [],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_file_of_a_command(command, tmp_path):
    names = ("train.py", "package/tool.py", "run.sh", "data.csv")
    write(tmp_path, dict.fromkeys(names, ""))
    found = [*program_checks.files(command.split(), tmp_path)]
    assert found == [tmp_path / name for name in COMMANDS[command]]


def test_a_word_may_be_longer_than_any_name(tmp_path):
    assert [*program_checks.files(["sh", "-c", "x" * 5000], tmp_path)] == []
