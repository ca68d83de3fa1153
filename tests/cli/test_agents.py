"""AGENTS.md: each of its lines answers in JSON, as its schema says."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

from jsonschema import Draft202012Validator

from distdl.cli.json_output import name_of
from distdl.cli.main import COMMANDS
from distdl.cli.schemas import of_command
from distdl.util.exit_codes import EXIT_CODES
from tests.conftest import ROOT, distdl, matrix_only

PAGE = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
(BLOCK,) = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
LINES = [line.removeprefix("python -m distdl ") for line in BLOCK.splitlines() if line[0] != "#"]


def test_each_line_asks_for_json_and_the_exit_codes_exist():
    assert all(line.endswith(" --json") for line in LINES)
    codes = {
        int(code) for row in re.findall(r"^\| ([\d, ]+) \|", PAGE, re.M) for code in row.split(",")
    }
    assert codes - {137} <= EXIT_CODES.keys()


@matrix_only
def test_every_line(tmp_path):
    answers: dict[str, Any] = {}
    for line in LINES:
        words = shlex.split(line)
        done = distdl(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        name = name_of(words, [*COMMANDS])
        last = json.loads(done.stdout.splitlines()[-1])
        Draft202012Validator(of_command(name)).validate(last)
        answers[line] = last["answer"]
    first, resumed, validated = (
        next(answer for line, answer in answers.items() if text in line)
        for text in ("name=first", "max_epochs=2", "task=validate")
    )
    assert (first["attempt"], resumed["attempt"], validated["attempt"]) == (1, 2, 3)
    assert {first["state"], resumed["state"], validated["state"]} == {"SUCCEEDED"}
    assert validated["metrics"]["val/loss"] > 0
    sweep = next(answer for line, answer in answers.items() if line.startswith("-m "))
    assert [member["run"]["state"] for member in sweep["members"]] == ["SUCCEEDED"] * 2
