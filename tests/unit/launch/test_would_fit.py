"""After a failure for lack of device memory: what would have fit, by the numbers of `plan`."""

from __future__ import annotations

import json
import subprocess
from types import SimpleNamespace

import pytest

from distdl.config import compose
from distdl.incident import incident
from distdl.job import JobState
from distdl.launch import would_fit
from distdl.runs.directory import RunDirectory
from distdl.tools.measure import would_fit as tool
from distdl.tools.measure.estimate import Machine, by_strategy, estimates
from distdl.tools.measure.step_profile import measure
from distdl.util.errors import UserError
from tests.conftest import TINY, UNCHECKED, distdl, matrix_only, status

MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 39.39 GiB of "
    "which 1.06 GiB is free. Process 1 has 38.32 GiB memory in use."
)
SIZE = {"num_nodes": 1, "devices": 2, "accelerator": "gpu", "device_ids": None}
FOUND = {"now": "41.2 of 39.4 GiB under ddp", "instead": [["model.recompute=blocks", "12.3 GiB"]]}


@pytest.fixture
def failed(tmp_path):
    """Makes an attempt of a run that failed with a message."""
    run = RunDirectory(tmp_path / "outputs/e/r")
    run.create("seed: 1\n", {"command": ["distdl"]})

    def of(kind, message):
        where = {"launcher": {}}
        attempt = run.begin_attempt({"run_id": "e/r", "where": where, "resources": SIZE})
        attempt.record_error(0, kind, message, "")
        attempt.end(JobState.FAILED)
        incident.write(attempt)
        return attempt

    return of


def test_it_is_said_after_the_report_and_written_into_it(failed, monkeypatch, capsys):
    requests = []

    def run(command, input, **options):
        requests.append(json.loads(input))
        return SimpleNamespace(stdout=json.dumps(FOUND))

    monkeypatch.setattr(subprocess, "run", run)
    attempt = failed("OutOfMemoryError", MESSAGE)
    would_fit.say(attempt)
    (request,) = requests
    assert request["memory"] == 39.39 * 2**30
    said = capsys.readouterr().err
    assert "a step takes 41.2 of 39.4 GiB under ddp, by the numbers of distdl plan" in said
    assert "  model.recompute=blocks (12.3 GiB)\n" in said
    report = (attempt.path / "incident.md").read_text()
    assert "## What would have fit" in report
    assert "model.recompute=blocks (12.3 GiB)" in report
    # Where it cannot be measured, as without the data: one line.
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=""))
    would_fit.say(attempt)
    assert "could not be measured here" in capsys.readouterr().err
    # Nothing after other failures, and where the memory of the device is not known.
    monkeypatch.setattr(subprocess, "run", None)
    for kind, message in (("ValueError", "bad"), ("RuntimeError", "CUDA error: out of memory")):
        would_fit.say(failed(kind, message))
    assert not capsys.readouterr().err


@matrix_only
def test_each_proposal_fits_by_the_numbers_of_plan():
    words = (*TINY, "data.batch_size=64", "strategy=ddp")

    def taken(*more):
        config = compose.compose([*words, *more])
        batch = config.data.batch_size
        name = tool.row_name(config.strategy, 2)
        return by_strategy(estimates(measure(config, 2 * batch), machine))[name].total

    machine = Machine(2, 0.0, 1.0, 1.0)
    memory = 0.95 * taken() / 0.9
    found = tool.would_fit(compose.compose([*words]), 2, memory)
    assert found.now.endswith(f"of {memory / 2**30:.3g} GiB under ddp")
    proposed = {words.split("=")[0] for words, _ in found.instead}
    assert proposed >= {"model.recompute", "data.batch_size"}
    assert any("trainer.accumulate_grad_batches=2" in words for words, _ in found.instead)
    for each, said in found.instead:
        if not each.startswith("strategy="):
            needed = taken(*each.split())
            assert needed <= 0.9 * memory
            assert float(said.split()[0]) == pytest.approx(needed / 2**30, rel=0.01)
    # It fits by plan's numbers: something else holds the memory.
    assert tool.would_fit(compose.compose([*words]), 2, 100 * memory).instead == ()


def test_what_does_not_fit_is_not_proposed(monkeypatch):
    words = (*TINY, "data.batch_size=64", "strategy=ddp", "trainer.accumulate_grad_batches=2")
    config = compose.compose([*words])
    steps = {
        value: measure(compose.compose([*words, f"model.recompute={value}"]), 256)
        for value in ("none", "blocks")
    }

    def measured(config, global_batch):
        return steps[config.model.get("recompute", "none")]

    def not_one_sample(*_):
        raise UserError.at("data.batch_size", "not one sample fits", "less", code="not-enough")

    monkeypatch.setattr(tool, "measure", measured)
    monkeypatch.setattr(tool, "largest_batch", not_one_sample)
    machine = Machine(2, 0.0, 1.0, 1.0)
    plain, less = (by_strategy(estimates(each, machine)) for each in steps.values())
    needed = less["ddp"].total / 0.9
    strategies = set()
    for memory in (1.02 * needed, 0.98 * needed, 0.5 * needed, 0.01 * needed):
        found = dict(tool.would_fit(config, 2, memory).instead)
        assert ("model.recompute=blocks" in found) == (memory > needed)
        named = {word.removeprefix("strategy=") for word in found if word.startswith("strategy=")}
        assert named == {n for n in tool.STRATEGIES if 0 < plain[n].total <= 0.9 * memory}
        strategies |= named
        for word in found:
            if "accumulate" in word:
                parts = [int(each.partition("=")[2]) for each in word.split()]
                assert parts[0] * parts[1] == 64 * 2, "the global batch stays"
                assert parts[1] > 2
    assert not found, "nothing fits a hundredth"
    assert strategies


MODEL = f'''
import torch
from distdl.models import ImageClassifier

class Greedy(ImageClassifier):
    def training_step(self, batch, batch_idx):
        if batch["image"].device.type == "cpu" and not torch._guards.detect_fake_mode():
            raise torch.cuda.OutOfMemoryError("{MESSAGE}")
        return super().training_step(batch, batch_idx)
'''


@matrix_only
def test_a_run_says_it_at_its_end(tmp_path):
    (tmp_path / "mine.py").write_text(MODEL)
    words = (*TINY, "model._target_=mine.Greedy", "data.batch_size=16", "name=r")
    done = distdl(*words, cwd=tmp_path, module=UNCHECKED)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "cause   out of memory (GPU)" in done.stderr
    assert "of 39.4 GiB under single, by the numbers of distdl plan" in done.stderr
    assert status(tmp_path / "outputs/default/r")["would_fit"]
