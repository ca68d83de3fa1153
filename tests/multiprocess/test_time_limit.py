"""`trainer.max_time` with two ranks: they end together, with the curve, and a resume goes on."""

import signal

import pytest
import torch

from distdl.runs.checkpoints import CheckpointStore
from distdl.runs.records import read
from tests.conftest import TINY, UNCHECKED, distdl, last_step, losses, matrix_only, samples, status

SECONDS = 8
TYPED = (
    *TINY,
    "strategy=ddp",
    "trainer.devices=2",
    "trainer.max_epochs=null",
    f"trainer.max_time={{seconds:{SECONDS}}}",
    "callbacks.record_samples.step_seconds=0.1",
    "name=r",
)
RUN = "outputs/default/r"


def ended(run):
    """Of the last checkpoint: the steps, the seconds that were used, the full rate."""
    newest = CheckpointStore(run / "checkpoints").newest()
    saved = torch.load(newest, weights_only=True)
    budget = saved["distdl"]["budget"]
    full = saved["optimizer_states"][0]["param_groups"][0]["initial_lr"]
    return saved["global_step"], budget["used"] / 1e6, full


def logged(run):
    """attempt -> step -> when it was logged, and its rate."""
    found = {}
    for record in read(run / "logs/metrics.jsonl"):
        if "train/loss" in record.metrics:
            steps = found.setdefault(record.attempt, {})
            steps[record.step] = record.time, record.metrics["lr"]
    return found


def seconds(steps):
    """From the first step to the last."""
    times = [time for time, _ in steps.values()]
    return max(times) - min(times) if times else 0.0


@matrix_only
@pytest.mark.parametrize("number", [None, signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_in_time_together_and_a_resume_uses_what_is_left(number, background, tmp_path):
    run = tmp_path / RUN
    job = background(*TYPED, cwd=tmp_path, module=UNCHECKED)
    if number is not None:
        job.until(lambda: last_step(run) >= 25)
        if number is signal.SIGKILL:
            job.kill_all()
        else:
            job.process.send_signal(number)
        job.wait()
        done = distdl("resume", RUN, cwd=tmp_path, module=UNCHECKED)
        assert done.returncode == 0, done.stdout + done.stderr
    else:
        assert job.wait() == 0, job.output()
    steps, used, full = ended(run)
    last = 1 if number is None else 2
    assert status(run, last)["state"] == "SUCCEEDED"
    assert used > SECONDS - 0.5
    attempts = logged(run)
    rates = [rate for _, rate in attempts[last].values()]
    assert rates[-1] / full < 0.05, "the curve has ended"
    # Four steps before the end, ranks knew of time that was left. A host may stall since then.
    *_, before_end, _, _, _ = [at for at, _ in attempts[last].values()]
    assert used < SECONDS + status(run, last)["ended"] - before_end, "the validation comes after it"
    assert rates.count(0.0) <= 3, "and the training with it, as soon as ranks know"
    first = min(attempts[last])
    before = {step: at for step, at in attempts[1].items() if step < first}
    assert seconds(before) + seconds(attempts[last]) <= used, "of all attempts together"
    assert max(losses(run)) == steps, "the journal goes to the last step"
    batches = samples(run)[last]
    assert max(step for _, step in batches) == steps
    assert {len(ids) for ids in batches.values()} == {16}, "both ranks were at every step"
