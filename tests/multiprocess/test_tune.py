"""`distdl tune` with real runs: pruned and paused ones, ranks that agree, kills, what follows."""

import itertools
import json
import math
import os
import signal
import statistics
import time
from contextlib import suppress

import psutil
import pytest

from distdl.runs.directory import RunDirectory
from distdl.tools.search.storage import JOURNAL
from tests.conftest import NO_PROBLEMS, TINY, UNCHECKED, distdl, matrix_only, samples, status
from tests.limits import hanging_store, small_disk
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


LOSS = ("--metric", "val/loss:min", "trainer.max_epochs=3")
# In an order of the seed: some of them are far too small or too large.
MANY = (f"optimizer.lr={','.join(f'{10.0**-n:g}' for n in range(-1, 8))}", "--sampler", "grid")


def engine_view(folder, **options):
    """The study as another program sees it that knows Optuna alone."""
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    storage = JournalStorage(JournalFileBackend(str(folder / STUDY / JOURNAL)))
    return optuna.load_study(study_name="s", storage=storage, **options)


def agrees(found, study):
    """The trials that the engine has pruned; the answer says the same of each trial."""
    for told, known in zip(found["trials"], study.trials, strict=True):
        assert told["end"] == known.state.name
        assert told["validations"] == [*known.intermediate_values.values()]
    return {each.number for each in study.trials if each.state.name == "PRUNED"}


@matrix_only
def test_hyperband_prunes_in_its_first_bracket(tmp_path):
    """Of two brackets the first decides after one validation, and the second at the end alone.
    Optuna shares trials out by the study's name and their number."""
    import optuna

    found = tuned(*MANY, *LOSS, "--pruner", "hyperband", cwd=tmp_path)
    accounted_once(found, 9)
    pruner = optuna.pruners.HyperbandPruner(1, 3, 3)
    study = engine_view(tmp_path, pruner=pruner)
    pruner._try_initialization(study)
    worse = set()
    seen = []
    for trial in study.trials:  # one after the other, so each knows those before it
        if pruner._get_bracket_id(study, trial) == 0:
            seen.append(trial.intermediate_values[1])
            place = max(len(seen) // 3, 1)
            worse |= {trial.number} if seen[-1] > sorted(seen)[place - 1] else set()
    assert 2 <= len(seen) < 9, "both brackets have trials"
    assert agrees(found, study) == worse
    assert worse
    for trial in found["trials"]:
        expected = [0] if trial["number"] in worse else [0, 1, 2]
        assert epochs(trial, tmp_path) == expected


@matrix_only
def test_median_prunes_what_is_worse_than_half_of_the_complete_ones(tmp_path):
    found = tuned(*MANY, *LOSS, "--pruner", "median", cwd=tmp_path)
    accounted_once(found, 9)
    study = engine_view(tmp_path)
    worse = {}
    done = []
    for trial in study.trials:
        values = [*trial.intermediate_values.values()]
        for step in range(1, min(len(values), 2) + 1):  # the third one ends every training
            half = statistics.median(each[step - 1] for each in done) if done else 0.0
            if len(done) >= 4 and min(values[:step]) > half:
                worse.setdefault(trial.number, step)
        if trial.state.name == "COMPLETE":
            done.append(values)
    assert agrees(found, study) == worse.keys()
    assert worse
    for number, step in worse.items():
        trial = found["trials"][number]
        assert epochs(trial, tmp_path) == [*range(step)]
        (attempt,) = attempts(trial, tmp_path)
        assert f"pruned by its search at step {4 * step}" in attempt.status()["error"]


RANKS = ("trainer.devices=2", "strategy=ddp", "data.batch_size=4")


@matrix_only
def test_pruned_ranks_end_together_and_leave_nothing(tmp_path):
    """Two ranks end at one step each time, and with exit code 0."""
    words = ("--pruner", "asha", "--pruned-checkpoints", "remove", "trainer.max_epochs=9")
    rates = ("optimizer.lr=0.1,0.01,0.0001,0.00001", "--sampler", "grid")
    found = tuned(*rates, *RANKS, *words, "--metric", "val/loss:min", cwd=tmp_path)
    accounted_once(found, 4)
    pruned = [each for each in found["trials"] if each["end"] == "PRUNED"]
    assert pruned
    for trial in pruned:
        (attempt,) = attempts(trial, tmp_path)
        record = attempt.status()
        assert (record["state"], record["exit_code"]) == ("PRUNED", 0)
        assert len(trial["validations"]) < 9
        assert trial["freed"] > 100_000
        assert not [*(tmp_path / trial["run"] / "checkpoints").iterdir()]
        same_steps(tmp_path / trial["run"])
    best = found["trials"][found["best"]]
    assert [*(tmp_path / best["run"] / "checkpoints").glob("*.ckpt")]
    assert left(tmp_path) == []


def same_steps(run):
    """Both ranks have trained, and up to the same step."""
    rows = [path.read_text().splitlines() for path in (run / "logs").glob("samples-rank*.csv")]
    assert len(rows) == 2
    assert len(rows[0]) == len(rows[1]) > 0


PRUNES = 50
# What the search does with a trial, without an engine: its word is there before the validation.
SCRIPTED = f"""
import sys
from distdl.launch import start, sweeps
from distdl.runs import verdicts
from distdl.validation import validate
validate._check_in_child = lambda request: {NO_PROBLEMS}
codes = []
for number in range({PRUNES}):
    plan = sweeps.plan([*sys.argv[1:], f"seed={{number}}"], ["seed"], ())
    plan.search = {{"key": "k", "trial": number, "judged": True}}
    verdicts.write(plan.run.path, verdicts.SearchVerdict(verdicts.Word.PRUNE, 0))
    codes.append(start.start(plan, sys.argv))
print("codes", codes)
"""


@matrix_only
@pytest.mark.timeout(1800)
def test_fifty_prunes_leave_no_rank_and_no_process(background, tmp_path):
    """The ranks are started by one command after the other in a single process, and each run is
    pruned after its first validation."""
    before = {process.pid for process in psutil.process_iter()}
    words = (*TINY, *SHORT[:-1], *RANKS, "trainer.max_epochs=2", "checkpoint.background=false")
    job = background(*words, cwd=tmp_path, module=("-c", SCRIPTED))
    job.until(lambda: len(left(tmp_path)) >= 3)  # two ranks and the command: they would be found
    assert job.wait(1200) == 0, job.output()
    assert f"codes {[0] * PRUNES}" in job.output()
    runs = [*(tmp_path / STUDY).iterdir()]
    assert len(runs) == PRUNES
    for run in runs:
        record = status(run)
        assert (record["state"], record["exit_code"]) == ("PRUNED", 0)
        assert "pruned by its search at step 4" in record["error"]
        same_steps(run)
    until(lambda: left(tmp_path) == [], 20, lambda: left(tmp_path))
    mine = psutil.Process().children(recursive=True)
    stayed = [each for each in mine if each.pid not in before and job.process.pid != each.pid]
    assert [each for each in stayed if "distdl" in " ".join(each.cmdline())] == []


def left(folder):
    """Processes that still work on runs of a folder."""
    found = []
    for process in psutil.process_iter(["cmdline", "cwd"]):
        words = " ".join(process.info["cmdline"] or ())
        if str(folder) in words or process.info["cwd"] == str(folder):
            found.append(words)
    return found


def in_journal(folder):
    journal = folder / STUDY / JOURNAL
    return len(journal.read_bytes().splitlines()) if journal.exists() else 0


def in_states(folder):
    runs = [path.parents[1] for path in (folder / STUDY).glob("*/attempts/001")]
    return {status(run).get("state") for run in runs}


# When the command is killed: between the values of its first proposals, while trials train, and
# when the first one has ended or is paused.
MOMENTS = {
    "proposes": lambda folder: in_journal(folder) >= 5,
    "trains": lambda folder: [*(folder / STUDY).glob("*/logs/samples-rank0.csv")],
    "decides": lambda folder: in_states(folder) & {"PRUNED", "SUCCEEDED"},
}
KILLS = [(pruner, moment, ()) for pruner in ("asha", "halving") for moment in MOMENTS]


@matrix_only
@pytest.mark.parametrize(
    ("pruner", "moment", "storage"),
    [*KILLS, ("halving", "decides", ("--storage", "sqlite:///study.db"))],
)
def test_a_killed_search_goes_on(pruner, moment, storage, background, tmp_path):
    words = ("optimizer.lr=log(0.01,1)", "--trials", "6", "--parallel", "2", "--pruner", pruner)
    words += (*storage, "trainer.max_epochs=6")
    job = background("tune", *TINY, *SHORT, *words, cwd=tmp_path, module=UNCHECKED)
    job.until(lambda: MOMENTS[moment](tmp_path), 240)
    job.process.kill()  # and none of its trials
    job.process.wait()
    until(lambda: not left(tmp_path), 90, lambda: left(tmp_path))
    found = tuned(*words, cwd=tmp_path)
    accounted_once(found, 6)
    assert found["best"] is not None
    for trial in found["trials"]:
        if trial["end"] == "COMPLETE":
            assert epochs(trial, tmp_path) == [*range(6)]
    if storage:
        import optuna

        study = optuna.load_study(study_name="s", storage=f"sqlite:///{tmp_path}/study.db")
        assert not (tmp_path / STUDY / JOURNAL).exists()
    else:
        study = engine_view(tmp_path)
    agrees(found, study)


@matrix_only
def test_a_disk_that_is_full_for_a_while(background, tmp_path):
    """What fails then is tried again, and the study knows each trial once."""
    words = ("trainer.max_epochs=3", *RATES, "--pruner", "asha")
    with small_disk(tmp_path / "outputs", megabytes=64):
        job = background("tune", *TINY, *SHORT, *words, cwd=tmp_path, module=UNCHECKED)
        job.until(lambda: [*(tmp_path / STUDY).glob("*/checkpoints/*.ckpt")])
        fill(tmp_path / "outputs/ballast")
        time.sleep(20)
        assert job.process.poll() is None, job.output()
        (tmp_path / "outputs/ballast").unlink()
        assert job.wait(600) == 0, job.output()
        found = json.loads(job.output().splitlines()[-1])["answer"]
        accounted_once(found, 3)
        assert found["best"] is not None
        agrees(found, engine_view(tmp_path))
        assert "No space left" in job.output(), "it was full"


def fill(path):
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 1):
            with suppress(OSError):
                while True:
                    file.write(b"x" * size)


@matrix_only
def test_a_storage_that_is_away_for_a_minute(background, tmp_path):
    """Every access blocks, as with a network mount whose server is gone."""
    words = ("trainer.max_epochs=3", *RATES, "--pruner", "halving", "--parallel", "2")
    with hanging_store(tmp_path) as store:
        folder = store.behind / "here"
        folder.mkdir()
        here = store.path / "here"
        job = background("tune", *TINY, *SHORT, *words, cwd=here, module=UNCHECKED)
        job.until(lambda: MOMENTS["trains"](folder), 240)
        store.hang()
        time.sleep(60)
        store.answer()
        assert job.wait(600) == 0, job.output()
        found = json.loads(job.output().splitlines()[-1])["answer"]
        accounted_once(found, 3)
        assert sorted(each["end"] for each in found["trials"]) == ["COMPLETE", "PRUNED", "PRUNED"]
        agrees(found, engine_view(folder))
        for trial in found["trials"]:
            assert not trained_twice(trial, folder)


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
    assert job.wait(600) == 0, job.output()
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
    assert job.wait(300) == 130, job.output()
    until(lambda: not left(tmp_path), 30)
    found = tuned("trainer.max_epochs=6", *RATES, "--parallel", "2", cwd=tmp_path)
    accounted_once(found, 3)
    for trial in found["trials"]:
        assert not trained_twice(trial, tmp_path), "they have saved where they ended"


@matrix_only
def test_four_trials_at_once_share_the_cores_and_go_on(background, tmp_path):
    """The search is killed while four trials are under way, and typed again."""
    rates = ("optimizer.lr=range(0.01,0.085,0.01)", "--sampler", "grid", "--parallel", "4")
    words = (*rates, "--pruner", "asha", "--metric", "val/loss:min", "trainer.max_epochs=6")
    own = os.sched_getaffinity(0)
    at_once = []

    def look():
        """Counts the trials at work; none may have more cores than its share."""
        cores = []
        for file in (tmp_path / STUDY).glob("*/attempts/*/status.json"):
            with suppress(OSError, psutil.Error):
                record = json.loads(file.read_text())
                if record["state"] == "RUNNING":
                    cores += psutil.Process(record["pid"]).cpu_affinity()
        at_once.append(len(cores) // max(1, len(own) // 4))
        assert max((cores.count(core) for core in own), default=0) <= math.ceil(4 / len(own))
        return at_once[-1]

    job = background("tune", *TINY, *SHORT, *words, cwd=tmp_path, module=UNCHECKED)
    job.until(lambda: look() == 4)
    job.process.kill()
    job.process.wait()
    until(lambda: not left(tmp_path), 30, lambda: left(tmp_path))
    job = background("tune", *TINY, *SHORT, *words, cwd=tmp_path, module=UNCHECKED)
    while job.process.poll() is None:
        look()
    assert job.wait() == 0, job.output()
    found = json.loads(job.output().splitlines()[-1])["answer"]
    accounted_once(found, 8)
    assert max(at_once) == 4
    assert ("4 trials at once share" in job.output()) == (len(own) < 4)
    assert len({each["run"] for each in found["trials"]}) == 8
    assert {each["end"] for each in found["trials"]} == {"COMPLETE", "PRUNED"}
    until(lambda: not left(tmp_path), 30, lambda: left(tmp_path))
    for trial in found["trials"]:
        last = attempts(trial, tmp_path)[-1].status()
        assert last["state"] == ("PRUNED" if trial["end"] == "PRUNED" else "SUCCEEDED")
        if trial["end"] == "COMPLETE":
            assert epochs(trial, tmp_path) == [*range(6)]
