"""kill -9 in the second epoch, while a checkpoint is written: the run resumes exactly.

As many ranks as before: tests/adoption. Runs that old commits made: two ranks of `strategy=ddp`
(96581e3, tests/fixtures/frozen_run), and photographs of a prepared set, augmented (0f269fd,
tests/fixtures/frozen_photographs), when each sample drew from the process's generators. Both were
killed in their second epoch; a file holds what that commit's own resume logged afterwards, and of
the second its weights. One thing was edited, the path of the project in launch.yaml.
"""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from distdl.images.decoding import works
from distdl.runs.checkpoints import CheckpointStore, manifest_of
from tests.conftest import TINY, UNCHECKED, Background, distdl, losses, samples, trained

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
# Three epochs; a checkpoint every third step, so some inside the second epoch. When the one of step
# 15 is begun, that of step 12 is written.
SAMPLES, STEPS = 64, 8
MANY = f"data.train_samples={SAMPLES}"
EVERY = (MANY, "checkpoint.every_n_steps=3")
ONE = "data.batch_size=8"
TWO = ("data.batch_size=4", "trainer.devices=2", "strategy=ddp")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The same run of one rank at the same global batch, with few checkpoints."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    trained(ONE, MANY, "name=r", cwd=folder)
    return folder / "outputs/default/r"


@pytest.fixture(scope="module")
def killed_run(tmp_path_factory):
    """A run of two ranks that a kill -9 ended in its second epoch, in the middle of a write."""
    folder = tmp_path_factory.mktemp("killed")
    run = folder / "outputs/default/k"
    job = Background(*TINY, *TWO, *EVERY, "name=k", cwd=folder, module=UNCHECKED)
    job.until(lambda: len(samples(run).get(1, ())) >= 13)
    job.until(lambda: any(run.glob("checkpoints/.epoch*.tmp")))
    job.kill_all()
    return run


@pytest.fixture
def killed(killed_run, tmp_path):
    return shutil.copytree(killed_run, tmp_path / "outputs/default/k")


def resumed(run, *overrides, **more):
    done = distdl("resume", str(run), *overrides, cwd=run.parents[2], **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def step_of(checkpoint):
    return json.loads(manifest_of(checkpoint).read_text())["step"]


def ids(rows, epoch):
    return sorted(i for (e, _), row in rows.items() if e == epoch for i in row)


def test_another_number_of_ranks_resumes_exactly(uninterrupted, killed):
    newest = step_of(CheckpointStore(killed / "checkpoints").newest())
    assert STEPS < newest < 2 * STEPS, "a checkpoint from inside the second epoch"
    output = resumed(killed, "trainer.devices=1", module=UNCHECKED)
    assert "not resumable" not in output, "Lightning says so, and it is"
    assert "global batch stays 8" in output
    assert not list((killed / "checkpoints").glob(".*")), "the half of a file is gone"
    first, second = samples(killed)[1], samples(killed)[2]
    assert min(step for _, step in second) == newest + 1
    surviving = {k: v for k, v in first.items() if k[1] <= newest} | second
    for epoch in range(3):
        assert ids(surviving, epoch) == list(range(SAMPLES)), f"epoch {epoch}: each sample once"
    result, expected = losses(killed), losses(uninterrupted)
    assert list(expected) == list(range(1, 3 * STEPS + 1)), "one and two ranks lose alike"
    steps = range(newest + 1, 3 * STEPS + 1)
    assert [result[s] for s in steps] == pytest.approx([expected[s] for s in steps], abs=1e-5)


def test_another_batch_after_damage(killed):
    """A damaged checkpoint is skipped; the rate is scaled, and both are reported."""
    newest, older, *_ = CheckpointStore(killed / "checkpoints").all()
    consumed = 16 * math.ceil((step_of(older) - STEPS) / 2)  # in batches of 16, rounded up
    for path in (newest, newest.with_name("last.ckpt")):  # one file with two names, before the copy
        path.write_bytes(path.read_bytes()[:-1])
    output = resumed(killed, "trainer.devices=1", "data.batch_size=16")
    assert "skipped a damaged checkpoint" in output
    assert "the global batch changes from 8 to 16, as asked for" in output
    assert "the learning rate goes from 0.003125 to 0.00625 (linear)" in output
    rows = samples(killed)[2]
    assert ids(rows, 2) == list(range(SAMPLES))
    assert len({*ids(rows, 1)}) == len(ids(rows, 1)) == SAMPLES - consumed


def test_a_run_of_an_old_commit_is_resumed_with_the_same_losses(tmp_path):
    fixture = FIXTURES / "frozen_run"
    run = shutil.copytree(fixture / "run", tmp_path / "outputs/default/frozen")
    shutil.copy(fixture / "mine.py", tmp_path)
    before = (run / "config.yaml").read_bytes()
    resumed(run, f"project.root={tmp_path}")
    assert (run / "config.yaml").read_bytes() == before
    expected = json.loads((fixture / "losses.json").read_text())
    logged = losses(run)
    assert {step: logged[int(step)] for step in expected} == pytest.approx(expected, rel=1e-6)


@pytest.mark.skipif(not works("simplejpeg"), reason="no simplejpeg")
def test_a_run_on_photographs_of_an_old_commit_draws_what_it_would_have_drawn(tmp_path):
    """Its config has no `data.draws`."""
    fixture = FIXTURES / "frozen_photographs"
    shutil.copytree(fixture, tmp_path, dirs_exist_ok=True)
    run = shutil.copytree(fixture / "run", tmp_path / "outputs/default/frozen")
    resumed(run, f"project.root={tmp_path}", module=UNCHECKED)
    expected = json.loads((fixture / "expected.json").read_text())
    logged = losses(run)
    found = {step: logged[int(step)] for step in expected["losses"]}
    assert found == pytest.approx(expected["losses"], rel=1e-6)
    state = torch.load(run / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
    weights = {name: value.flatten().tolist() for name, value in state.items()}
    assert weights.keys() == expected["weights"].keys()
    for name, values in expected["weights"].items():
        # A small element may be the sum of larger ones: another processor rounds it as these.
        rounding = torch.finfo(torch.float32).eps * max(map(abs, values))
        assert weights[name] == pytest.approx(values, rel=1e-6, abs=rounding), name
    if found == expected["losses"]:  # a processor that computes as that of the old run
        assert weights == expected["weights"]


def test_a_finished_run_trains_longer_and_another_starts_from_it(uninterrupted):
    """By a path below the current folder, as `convert` and the docs print it."""
    folder = uninterrupted.parents[2]
    more = ("trainer.max_epochs=4", "checkpoint.resume_from=outputs/default/r", "name=on")
    printed = trained(ONE, MANY, *more, cwd=folder)
    assert list(losses(folder / "outputs/default/on")) == list(range(3 * STEPS + 1, 4 * STEPS + 1))
    assert "share no file system" not in printed
    resumed(uninterrupted, "trainer.max_epochs=4", module=UNCHECKED)
    assert list(losses(uninterrupted)) == list(range(1, 4 * STEPS + 1))
