"""A program runs twenty experiments, and decides by exit codes and JSON alone what to do next."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from distdl.cli.json_output import name_of
from distdl.cli.main import COMMANDS
from distdl.cli.schemas import of_command, of_events
from tests.conftest import SETTINGS, UNCHECKED, distdl, matrix_only

# A network that fails, or is asked to end, in its fifth batch, once for each run.
NETWORK = """
import os, signal
from pathlib import Path
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes: int, what: str = "nothing") -> None:
        super().__init__()
        pool = nn.AdaptiveAvgPool2d(2)
        self.layers = nn.Sequential(pool, nn.Flatten(), nn.Linear(12, num_classes))
        self.what, self.mark, self.batches = what, Path("mark"), 0

    def forward(self, images):
        self.batches += self.training
        if self.batches == 5 and self.what != "nothing" and not self.mark.exists():
            self.mark.touch()
            if self.what == "crashes":
                raise RuntimeError("this was broken")
            os.kill(os.getpid(), signal.SIGTERM)
        return self.layers(images)
"""
TYPED = (
    *(word for word in SETTINGS if not word.startswith("callbacks")),
    "model=classifier",
    "model.network={_target_: mine.Net, num_classes: 10}",
    "trainer.devices=1",
    "trainer.max_epochs=1",
    "checkpoint.every_n_steps=2",
)
# What each experiment has besides, and how it ends at first.
EXPERIMENTS = {
    **{f"plain{n}": ([f"seed={n}"], 0) for n in range(8)},
    **{f"crashed{n}": (["+model.network.what=crashes", f"seed={n}"], 1) for n in range(4)},
    **{f"preempted{n}": (["+model.network.what=ends", f"seed={n}"], 75) for n in range(4)},
    "misspelt_key": (["optimizer.lrr=0.2"], 2),
    "misspelt_group": (["schedul=cosine"], 2),
    "misspelt_option": (["schedule=cosin"], 2),
    "misspelt_argument": (["trainer.max_epoch=1"], 2),
}
MOST = 4  # commands for one experiment


def asked(words: Sequence[str], folder: Path) -> dict[str, Any]:
    """What a command answers, as its schema says."""
    done = distdl(*words, "--json", cwd=folder, module=UNCHECKED)
    *events, last = map(json.loads, done.stdout.splitlines())
    Draft202012Validator(of_command(name_of(words, [*COMMANDS]))).validate(last)
    for event in events:
        Draft202012Validator(of_events()).validate(event)
    assert last["exit_code"] == done.returncode
    return last


def corrected(words: Sequence[str], problem: dict[str, str]) -> list[str]:
    """The words with the name that a refusal suggests in place of the misspelt one."""
    wrong = problem["path"]
    suggested = re.search(r"did you mean:? ([\w./]+)(=[\w.]+)?", problem["remedy"])
    assert suggested, problem
    name, value = suggested.groups()
    right = []
    for word in words:
        key, _, typed = word.partition("=")
        right.append(f"{name}{value or f'={typed}'}" if key == wrong else word)
    assert right != [*words], problem
    return right


@matrix_only
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_comes_to_its_end(name, tmp_path):
    (tmp_path / "mine.py").write_text(NETWORK)
    more, first = EXPERIMENTS[name]
    words = [*TYPED, *more, f"name={name}"]
    codes = []
    for _ in range(MOST):
        last = asked(words, tmp_path)
        code = last["exit_code"]
        codes.append(code)
        if code == 0:
            break
        if code == 2:
            words = corrected(words, last["problems"][0])
            continue
        error = last["answer"]["error"]
        if code == 75:
            assert error is None
            assert "SIGTERM at step" in " ".join(last["answer"]["reasons"])
        else:
            assert error["rank"] == 0
            assert "this was broken" in error["message"]
        words = shlex.split(last["answer"]["next"])[3:]  # behind `python -m distdl`
    assert codes == ([0] if first == 0 else [first, 0])
    run = last["answer"]
    assert run["state"] == "SUCCEEDED"
    assert run["attempt"] == (2 if first in (1, 75) else 1)
    (listed,) = asked(["jobs", "list"], tmp_path)["answer"]["runs"]
    assert listed["metrics"] == run["metrics"]
