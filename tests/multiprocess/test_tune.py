"""`distdl tune` with real runs: pruned and paused ones, ranks that agree, kills, what follows."""

import itertools
import json
import os
import random
import signal

import psutil
import pytest

from distdl.runs.directory import RunDirectory
from distdl.tools.search.engine import JOURNAL
from tests.conftest import TINY, UNCHECKED, distdl, matrix_only, samples, status
from tests.waiting import until

pytest.importorskip("optuna")

SHORT = ("data.train_samples=32", "data.val_samples=8", "name=s", "--json")
RATES = ("optimizer.lr=0.01,0.1,0.2", "--sampler", "grid")
STUDY = "outputs/default/s"


def tuned(*words, cwd, code=0):
    done = distdl("tune", *TINY, *SHORT, *words, cwd=cwd, module=UNCHECKED)
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])["answer"]


def attempts(trial, cwd):
    return RunDirectory(cwd / trial["run"]).attempts()


def epochs(trial, cwd):
    """Each epoch that was trained, once for each time."""
    steps = [step for each in samples(cwd / trial["run"]).values() for step in each]
    return [epoch for epoch, group in itertools.groupby(sorted(steps), key=lambda step: step[0])]


def trained_twice(trial, cwd):
    steps = [step for each in samples(cwd / trial["run"]).values() for step in each]
    return len(steps) != len({*steps})


def accounted_once(found, trials):
    """Every trial has an end, in the study as in the answer."""
    assert [each["number"] for each in found["trials"]] == [*range(trials)]
    assert all(each["end"] for each in found["trials"]), found


def test_trials_pause_and_the_best_goes_on(tmp_path):
    words = (*RATES, "--pruner", "halving", "trainer.max_epochs=2", "--parallel", "2")
    found = tuned(*words, cwd=tmp_path)
    accounted_once(found, 3)
    ends = sorted(each["end"] for each in found["trials"])
    assert ends == ["COMPLETE", "PRUNED", "PRUNED"]
    best = found["trials"][found["best"]]
    for trial in found["trials"]:
        assert not trained_twice(trial, tmp_path)
        assert epochs(trial, tmp_path) == ([0, 1] if trial is best else [0])
        first = attempts(trial, tmp_path)[0].status()
        assert (first["state"], first["exit_code"]) == ("PRUNED", 0)
        assert "paused by its search at step 4" in first["error"]
    assert [each.status()["state"] for each in attempts(best, tmp_path)] == ["PRUNED", "SUCCEEDED"]
    assert max(each["validations"][0] for each in found["trials"]) == best["validations"][0]
    assert (tmp_path / found["page"]).exists()


PRUNES = 12  # trials of two ranks, each of which imports torch anew


@matrix_only
def test_pruned_ranks_end_together_and_leave_nothing(tmp_path):
    """Two ranks end at one step each time, and with exit code 0."""
    ranks = ("trainer.devices=2", "strategy=ddp", "data.batch_size=4", "trainer.max_epochs=9")
    rates = ("optimizer.lr=log(0.0001,1)", "--sampler", "random", "--trials", str(PRUNES))
    found = tuned(*rates, *ranks, "--pruner", "asha", cwd=tmp_path)
    accounted_once(found, PRUNES)
    pruned = [each for each in found["trials"] if each["end"] == "PRUNED"]
    assert len(pruned) >= PRUNES // 3
    for trial in pruned:
        (attempt,) = attempts(trial, tmp_path)
        record = attempt.status()
        assert (record["state"], record["exit_code"]) == ("PRUNED", 0)
        assert len(trial["validations"]) < 9
        rows = [*(tmp_path / trial["run"] / "logs").glob("samples-rank*.csv")]
        assert len({len(path.read_text().splitlines()) for path in rows}) == 1
    assert left(tmp_path) == []


def left(folder):
    """Processes that still work on runs of a folder."""
    found = []
    for process in psutil.process_iter(["cmdline", "cwd"]):
        words = " ".join(process.info["cmdline"] or ())
        if str(folder) in words or process.info["cwd"] == str(folder):
            found.append(words)
    return found


@matrix_only
@pytest.mark.parametrize("pruner", ["asha", "halving"])
@pytest.mark.parametrize("moment", range(3))
def test_a_killed_search_goes_on(pruner, moment, background, tmp_path):
    words = ("optimizer.lr=log(0.01,1)", "--trials", "6", "--parallel", "2", "--pruner", pruner)
    typed = ("tune", *TINY, *SHORT, "trainer.max_epochs=6", *words)
    job = background(*typed, cwd=tmp_path, module=UNCHECKED)
    lines = random.Random(moment).randrange(4, 25)
    journal = tmp_path / STUDY / JOURNAL
    job.until(lambda: journal.exists() and len(journal.read_bytes().splitlines()) >= lines)
    job.process.kill()  # and none of its trials
    job.process.wait()
    until(lambda: not left(tmp_path), 30, lambda: left(tmp_path))
    found = tuned("trainer.max_epochs=6", *words, cwd=tmp_path)
    accounted_once(found, 6)
    assert found["best"] is not None
    for trial in found["trials"]:
        if trial["end"] == "COMPLETE":
            assert epochs(trial, tmp_path) == [*range(6)]


@matrix_only
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_trial_that_is_killed_or_preempted_is_resumed(number, background, tmp_path):
    typed = ("tune", *TINY, *SHORT, "trainer.max_epochs=6", *RATES)
    job = background(*typed, cwd=tmp_path, module=UNCHECKED)

    def running():
        for folder in (tmp_path / STUDY).glob("*/attempts/001"):
            run = folder.parents[1]
            if status(run).get("state") == "RUNNING" and [*run.glob("checkpoints/*.ckpt")]:
                return status(run)["pid"]
        return None

    os.kill(until(running), number)
    assert job.wait() == 0, job.output()
    found = json.loads(job.output().splitlines()[-1])["answer"]
    accounted_once(found, 3)
    assert {each["end"] for each in found["trials"]} == {"COMPLETE"}
    assert sorted(len(attempts(each, tmp_path)) for each in found["trials"]) == [1, 1, 2]


@matrix_only
def test_ctrl_c_saves_the_trials_and_the_same_command_goes_on(background, tmp_path):
    typed = ("tune", *TINY, *SHORT, "trainer.max_epochs=6", *RATES, "--parallel", "2")
    job = background(*typed, cwd=tmp_path, module=UNCHECKED)
    runs = tmp_path / STUDY
    job.until(lambda: len([*runs.glob("*/checkpoints/*.ckpt")]) >= 2)
    job.process.send_signal(signal.SIGINT)
    assert job.wait() == 130, job.output()
    until(lambda: not left(tmp_path), 30)
    found = tuned("trainer.max_epochs=6", *RATES, "--parallel", "2", cwd=tmp_path)
    accounted_once(found, 3)
    for trial in found["trials"]:
        assert not trained_twice(trial, tmp_path), "they have saved where they ended"
