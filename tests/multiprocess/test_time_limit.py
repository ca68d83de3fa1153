"""`trainer.max_time` with two ranks: they end together, with the curve, and a resume goes on."""

import signal

import pytest
import torch

from distdl.runs.checkpoints import CheckpointStore
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
    """The state in the last checkpoint."""
    newest = CheckpointStore(run / "checkpoints").newest()
    saved = torch.load(newest, weights_only=True)
    budget = saved["distdl"]["budget"]
    rate = saved["optimizer_states"][0]["param_groups"][0]["lr"]
    full = saved["optimizer_states"][0]["param_groups"][0]["initial_lr"]
    return saved["global_step"], budget["used"] / 1e6, rate / full


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
    steps, used, share = ended(run)
    last = 1 if number is None else 2
    assert status(run, last)["state"] == "SUCCEEDED"
    assert SECONDS - 0.5 < used < SECONDS + 3, "the last validation comes after it"
    assert share < 0.05, "the curve has ended"
    assert max(losses(run)) == steps, "the journal goes to the last step"
    batches = samples(run)[last]
    assert max(step for _, step in batches) == steps
    assert {len(ids) for ids in batches.values()} == {16}, "both ranks were at every step"
