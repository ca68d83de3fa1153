"""`distdl tune`: spaces, what is refused, the engine's file, halving, and the loop over trials."""

import importlib.util
import itertools
import json
import math
import os
import re
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from distdl.cli import tune
from distdl.config import recipe as configs
from distdl.config import resources
from distdl.job import JobBase, JobState, Resources
from distdl.launchers.common import leave, read_on
from distdl.runs import verdicts
from distdl.runs.checkpoints import CheckpointStore
from distdl.runs.directory import RunDirectory
from distdl.runs.records import encode
from distdl.runs.verdicts import SearchVerdict, Verdicts, Word
from distdl.stores.files import FileStore
from distdl.tools.search import (
    files,
    following,
    halving,
    objectives,
    pruning,
    slots,
    spaces,
    trials,
)
from distdl.tools.search.engine import SearchEngine, TrialEnd
from distdl.tools.search.halving import Rungs, Standing
from distdl.tools.search.objectives import Objective
from distdl.tools.search.patience import Patience, unwritable
from distdl.tools.search.search import Search
from distdl.tools.search.slots import Slot
from distdl.tools.search.storage import JOURNAL
from distdl.util.errors import UserError
from tests.conftest import TINY, matrix_only

pytest.importorskip("optuna")

ACCURACY = Objective("val/acc1", "max")
LOGGED = {"main": ["val/acc1", "max"], "logged": ["val/acc1", "val/acc5", "val/loss"]}


# ------------------------------------------------------------------------------------- spaces


def test_hydras_syntax_and_the_short_form():
    found = spaces.parsed(
        [
            "optimizer.lr=log(0.01,1)",
            "optimizer=sgd,adamw",
            "+a.b=range(0.1,0.5,0.1)",
            "c=int(interval(1,9))",
            "seed=1",
        ]
    )
    rate, kind, stepped, whole = found.spaces
    assert found.rewritten == {
        "optimizer.lr=log(0.01,1)": "optimizer.lr=tag(log, interval(0.01,1))"
    }
    assert (rate.low, rate.high, rate.log) == (0.01, 1.0, True)
    assert kind.choices == ("sgd", "adamw")
    assert whole.whole
    assert whole.first == 1
    values = {"optimizer.lr": 0.5, "optimizer": "sgd", "a.b": stepped.listed[2], "c": 3}
    # 0.1 + 2 * 0.1 is not 0.3, and a run must not be named by that.
    assert found.overrides(values) == [
        "seed=1",
        "optimizer.lr=0.5",
        "optimizer=sgd",
        "+a.b=0.3",
        "c=3",
    ]
    assert len([*found.corners()]) == 5


def test_spaces_in_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf/tune").mkdir(parents=True)
    lines = {
        "optimizer.lr": "tag(log, interval(0.01, 1))",
        "data": {"scale": [[0.1, 1.0], [0.5, 1]]},
    }
    (tmp_path / "conf/tune/mine.yaml").write_text(
        yaml.safe_dump({**lines, "seed": [1, 2]}, sort_keys=False)
    )
    words = files.expanded(["tune=mine", "seed=3,4"])
    assert words == [
        "optimizer.lr=tag(log, interval(0.01, 1))",
        "data.scale=choice([0.1, 1.0],[0.5, 1])",
        "seed=3,4",
    ]
    assert spaces.parsed(words).spaces[1].choices == ("[0.1,1.0]", "[0.5,1]")
    with pytest.raises(UserError, match="did you mean tune=mine"):
        files.expanded(["tune=mien"])


# Words, and what is said of them before anything is written or imported.
WRONG = {
    "checkpoint.keep_lst=1,2": "checkpoint.keep_lst: unknown key",
    "optimizer=interval(0,1)": "optimizer: is a group of options",
    "optimizer.lr=interval(1,0)": "holds no values",
    "optimizer.lr=log(1,0.01)": "'optimizer.lr=log(0.01,1)'",
    "optimizer.lr=tag(log,interval(0,1))": "no logarithm",
    "optimizer.lr=log(0.1,fast)": "is no space: ",
    "optimizer.lr=log(0,0.00001)": "'optimizer.lr=log(1e-08,1e-05)'",
    "optimizer.lr=loguniform(0.01,1)": "'optimizer.lr=log(0.01,1)'",
    "optimizer.lr=choice()": "optimizer.lr=a,b, choice(a,b)",
    "tags=run(1)": "quote a text with special characters",
    "data.batch_size=range(9,1)": "'data.batch_size=range(1,9)'",
    "seed=choice(1)": "has one value",
    "checkpoint.keep_last=interval(1,9)": "checkpoint.keep_last=int(interval(1,9))",
    "seed=1": "nothing to search",
    "seed=3,3": "twice",
    "model=glob(*)": "a pattern is no space",
    "name=a,b": "names the study",
    "trainer.devices=1,2": "says where a run runs",
    "checkpoint.mode=min,max": "judges the trials",
    "seed=1,2 --trials 0": "--trials: must be 1 or more",
    "seed=1,2 --budget 0h": "--budget: '0h' is no time",
    "seed=1,2 --budget soon": "--budget: 'soon' is no time",
    "seed=1,2 --trial-budget 0.1s": "--trial-budget: '0.1s' is no time",
    "trainer.max_time={hours:1} seed=1,2 --trial-budget 9m": "--trial-budget: is trainer.max_time",
    "seed=1,2 --metric val/acc1:maximize": "--metric val/acc1:max or --metric val/acc1:min",
    "seed=1,2 --metric val/loss:min --metric val/loss:min": "twice",
    "seed=1,2 --metric a:max --metric b:min --pruner asha": "several objectives",
    "optimizer.lr=interval(-1,1)": "in the trial optimizer.lr=-1.0",
    "seed=1,2 --parallel 0": "--parallel: must be 1 or more",
    "seed=1,2 --pruned-checkpoints remove": "no trial is pruned without --pruner",
    "optimizer.lr=log(0.1,1) --sampler grid": "an interval has no step",
    "optimizer=sgd,adamw --sampler cmaes": "optimizer is a choice",
    "optimizer.lr=log(0.1,1) --sampler cmaes": "needs the package cmaes",
}


@pytest.mark.parametrize("words", WRONG)
def test_what_is_refused_before_anything_starts(words, command, no_child, tmp_path):
    if "package" in WRONG[words] and importlib.util.find_spec("cmaes"):
        pytest.skip("the package is installed")
    said = command("tune", *TINY, *words.split())
    assert said.code == 2, said
    assert WRONG[words] in said.err
    assert [*tmp_path.iterdir()] == []


SAGEMAKER = "launcher=sagemaker trainer.devices=1 launcher.instance_type=ml.g5.xlarge"
# Those for which the model's class must be known.
LATER = {
    "--metric val/acc2:max": "val/acc2 is never logged",
    "--metric vall/loss:min": "vall/loss is never logged",
    "--metric trian/loss:min": "trian/loss is never logged",
    "--metric val/loss": "does not say whether more",
    "--storage sqlite:////nonexistent/dir/a.db": "cannot be used",
    "--storage foo://x": "cannot be used",
    "checkpoint.monitor=val/loss": "checkpoint.mode: is missing",
    "checkpoint.monitor=null": "no metric judges",
    "--metric train/loss:min --pruner asha": "no result of one",
    "trainer.max_epochs=1 --pruner halving": "nothing to end early",
    "trainer.max_epochs=1 --pruner median": "nothing to end early",
    f"{SAGEMAKER} launcher.network_isolation=true --pruner asha": (
        "launcher.network_isolation=false, or no --pruner"
    ),
    f"{SAGEMAKER} --pruner halving": "a verdict in a platform's store comes later",
    f"{SAGEMAKER} --pruner asha --pruned-checkpoints remove": "--pruned-checkpoints keep",
    "launcher=azureml launcher.identity=user trainer.devices=1 --pruner halving": (
        "launcher.identity=managed, or no --pruner"
    ),
    "trainer.max_steps=5 --pruner halving": "must know how many validations",
    "--trial-budget 5m --pruner halving": "must know how many validations",
    "launcher=mpi trainer.devices=1 --parallel 2": "has no queue",
}


@pytest.fixture
def known_metrics(without_stage_2, monkeypatch):
    facts = {"problems": [], "notes": [], "facts": {"metrics": LOGGED}}
    monkeypatch.setattr("distdl.validation.validate._check_in_child", lambda request: facts)


@pytest.mark.parametrize("words", LATER)
def test_what_is_refused_once_the_metrics_are_known(words, command, known_metrics, tmp_path):
    said = command("tune", *TINY, "optimizer.lr=0.1,0.2", *words.split())
    assert said.code == 2, said
    assert LATER[words] in said.err
    assert [*tmp_path.iterdir()] == []


def test_a_callback_of_ones_own_may_log_anything():
    own = {"mine": {"_target_": "mine.Logs"}, "progress": {"_target_": "distdl.callbacks.Progress"}}
    plan = SimpleNamespace(config={"callbacks": own}, metrics=LOGGED)
    assert objectives.chosen(["val/f1:max"], plan, ()) == [Objective("val/f1", "max")]
    del own["mine"]
    with pytest.raises(UserError, match="val/f1 is never logged"):
        objectives.chosen(["val/f1:max"], plan, ())


# ------------------------------------------------------------------------------------- slots


def test_each_trial_has_devices_of_its_own(monkeypatch):
    def plan(devices, ids=None):
        size = Resources(1, devices, "gpu", ids)
        return SimpleNamespace(resources=size, launch=SimpleNamespace(is_local=True, in_turn=True))

    monkeypatch.setattr(resources, "visible", lambda: ["4", "5", "6", "7", "8"])
    assert [slot.gpus for slot in slots.slots_of(plan(2), None)] == [("4", "5"), ("6", "7")]
    assert [slot.gpus for slot in slots.slots_of(plan(1), 3)] == [("4",), ("5",), ("6",)]
    with pytest.raises(UserError, match="--parallel 2"):
        slots.slots_of(plan(2), 3)
    with pytest.raises(UserError, match="would share them"):
        slots.slots_of(plan(2, ("4", "5")), 2)


def test_cores_are_shared_equally(monkeypatch):
    plan = SimpleNamespace(resources=Resources(), launch=SimpleNamespace(is_local=True))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3, 6})
    assert [slot.cores for slot in slots.slots_of(plan, 2)] == [(0, 1), (2, 3)]
    assert [slot.cores for slot in slots.slots_of(plan, 7)][4:] == [(6,), (0,), (1,)]
    assert [slot.cores for slot in slots.slots_of(plan, None)] == [()]


# ------------------------------------------------------------------------------------ engine


def searched(*words):
    return spaces.parsed(words or ("optimizer.lr=log(0.01,1)", "optimizer=sgd,adamw"))


@pytest.mark.parametrize(
    ("words", "judge", "said"),
    [
        (("seed=range(1,9)", "trainer.max_epochs=3"), ACCURACY, "has another space of seed$"),
        (
            ("seed=range(1,5)", "trainer.max_epochs=4"),
            ACCURACY,
            r"other settings \(trainer.max_epochs=3 then, trainer.max_epochs=4 now\)$",
        ),
        (
            ("seed=range(1,5)", "trainer.max_epochs=3"),
            Objective("val/acc1", "min"),
            r"other objectives \(val/acc1:max then, val/acc1:min now\)$",
        ),
    ],
)
def test_another_search_of_a_study_is_told_what_differs(words, judge, said, tmp_path):
    SearchEngine(searched("seed=range(1,5)", "trainer.max_epochs=3"), tmp_path, "s", [ACCURACY])
    with pytest.raises(UserError) as caught:
        SearchEngine(searched(*words), tmp_path, "s", [judge])
    assert re.search(said, caught.value.problems[0].what)


def test_a_study_goes_on_behind_a_line_that_was_cut(tmp_path):
    engine = SearchEngine(searched(), tmp_path, "s", [ACCURACY], seed=0)
    first = engine.propose()
    engine.tell(first.number, TrialEnd.COMPLETE, [0.5])
    second = engine.propose()
    with (tmp_path / JOURNAL).open("ab") as file:
        file.write(b'{"op_code": 5, "tri')
    engine = SearchEngine(searched(), tmp_path, "s", [ACCURACY], seed=0)
    third = engine.propose()
    again = SearchEngine(searched(), tmp_path, "s", [ACCURACY], seed=0).known()
    assert [(each.number, each.end) for each in again] == [
        (0, TrialEnd.COMPLETE),
        (1, None),
        (2, None),
    ]
    assert again[1].values == second.values
    assert len({each.values["optimizer.lr"] for each in (first, second, third)}) == 3
    with pytest.raises(UserError, match="another space of optimizer, "):
        SearchEngine(searched("seed=1,2"), tmp_path, "s", [ACCURACY])


@pytest.mark.parametrize("sampler", ["tpe", "grid"])
def test_a_proposal_that_was_cut_short_is_finished(sampler, tmp_path):
    """The command was killed, or its storage failed, between two values."""
    space = searched("seed=range(1,5)", "optimizer=sgd,adamw")
    engine = SearchEngine(space, tmp_path, "s", [ACCURACY], sampler=sampler, seed=0)
    done = engine.propose()
    if sampler == "grid":
        engine._enqueue_next()
    half = engine.study.ask()
    kept = half._suggest("seed", engine.spaces["seed"])
    engine = SearchEngine(space, tmp_path, "s", [ACCURACY], sampler=sampler, seed=0)
    assert [each.number for each in engine.known()] == [done.number]
    proposal = engine.propose()
    assert proposal.number == half.number
    assert proposal.values["seed"] == kept
    assert proposal.values.keys() == engine.spaces.keys()
    assert sampler == "tpe" or proposal.values != done.values
    assert engine.propose().number == half.number + 1


def test_a_full_disk_loses_no_trial(tmp_path, monkeypatch):
    from optuna.storages.journal import JournalFileBackend

    engine = SearchEngine(searched(), tmp_path, "s", [ACCURACY], seed=0)
    number = engine.propose().number
    write = JournalFileBackend.append_logs
    failures = iter([True, True])

    def append_logs(self, logs):
        if next(failures, False):
            with (tmp_path / JOURNAL).open("ab") as file:
                file.write(b'{"half')
            raise OSError(28, "No space left on device")
        write(self, logs)

    monkeypatch.setattr(JournalFileBackend, "append_logs", append_logs)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    engine.tell(number, TrialEnd.COMPLETE, [0.5])
    (known,) = SearchEngine(searched(), tmp_path, "s", [ACCURACY]).known()
    assert known.results == [0.5]


def test_a_grid_is_seen_once_and_in_an_order_of_the_seed(tmp_path):
    grid = searched("seed=range(1,5)", "optimizer=sgd,adamw")
    orders = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        engine = SearchEngine(grid, tmp_path, name, [ACCURACY], sampler="grid", seed=seed)
        points = [tuple(engine.propose().values.values()) for _ in range(engine.count)]
        assert len({*points}) == 8
        orders.append(points)
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]


def test_of_several_validations_at_once_each_counts(tmp_path):
    """The trial did not wait for its verdict: a rung that it has lost is not forgotten."""
    engine = SearchEngine(
        searched(), tmp_path, "s", [ACCURACY], pruner=pruning.of_engine("asha", 9)
    )
    decides = pruning.EnginePruning(engine)

    def word(values):
        trial = SimpleNamespace(number=engine.propose().number, reported=0)
        trial.curve = SimpleNamespace(values=values)
        return decides.word(trial)

    assert word([0.9]) is Word.GO_ON
    assert word([0.1, 0.2]) is Word.PRUNE


def test_median_ends_a_trial_that_is_worse_than_most(tmp_path):
    """Once some trials have ended; its answer is a bool of NumPy's, which no storage takes."""
    made = pruning.of_engine("median", 9)
    engine = SearchEngine(searched(), tmp_path, "s", [ACCURACY], pruner=made)
    decides = pruning.EnginePruning(engine)

    def word(number, *values):
        curve = SimpleNamespace(values=[*values])
        return decides.word(SimpleNamespace(number=number, reported=0, curve=curve))

    for value in range(pruning.STARTUP_TRIALS):
        number = engine.propose().number
        assert word(number, 0.1 * value) is Word.GO_ON
        engine.tell(number, TrialEnd.COMPLETE, [0.1 * value])
    assert word(engine.propose().number, 0.9) is Word.GO_ON
    worse = engine.propose().number
    assert word(worse, 0.05) is Word.PRUNE
    assert word(worse, 0.05, 0.9) is Word.PRUNE


class Killed(BaseException):
    pass


def decides_early(study, number):
    """Of hyperband's brackets only the first decides after one validation."""
    pruner = study.pruner
    if not hasattr(pruner, "_get_bracket_id"):
        return True
    if not pruner._pruners:
        pruner._try_initialization(study)
    return pruner._get_bracket_id(study, study.trials[number]) == 0


def killed(*_, **__):
    raise Killed


@pytest.mark.parametrize("pruner", ["asha", "hyperband"])
@pytest.mark.parametrize("moment", ["set_user_attr", "set_trial_system_attr", "the end"])
def test_a_killed_search_says_the_same_again(pruner, moment, tmp_path, monkeypatch):
    """Killed before the answer is kept, before Optuna's own notes are, and before the run hears:
    Optuna asks what is left of a rung, and forgets what it has answered."""
    from optuna import Trial
    from optuna.storages import JournalStorage

    def opened():
        made = pruning.of_engine(pruner, 9)
        return pruning.EnginePruning(
            SearchEngine(searched(), tmp_path, "s", [ACCURACY], pruner=made)
        )

    def trial(number, *values):
        curve = SimpleNamespace(values=[*values])
        return SimpleNamespace(number=number, reported=0, curve=curve)

    first = opened()
    numbers = [first.engine.propose().number for _ in range(9)]
    good, worse = [n for n in numbers if decides_early(first.engine.study, n)][:2]
    assert first.word(trial(good, 0.9)) is Word.GO_ON
    with monkeypatch.context() as patch:
        if moment != "the end":
            patch.setattr({"set_user_attr": Trial}.get(moment, JournalStorage), moment, killed)
            with pytest.raises(Killed):
                first.word(trial(worse, 0.1))
        else:
            assert first.word(trial(worse, 0.1)) is Word.PRUNE
    again = opened()
    assert again.word(trial(good, 0.9)) is Word.GO_ON
    late = trial(worse, 0.1)
    assert again.word(late) is Word.PRUNE
    late.curve.values.append(0.95)  # it has trained on meanwhile
    assert again.word(late) is Word.PRUNE
    assert again.word(late) is Word.PRUNE, "it is told once more"
    assert opened().word(trial(worse, 0.1, 0.95)) is Word.PRUNE
    known = again.engine.study.trials[worse]
    assert known.system_attrs["completed_rung_0"] == 0.1
    assert known.intermediate_values == {1: 0.1, 2: 0.95}


# ----------------------------------------------------------------------------------- halving


def decided(values, *, complete=True, validations=9):
    bracket = {number: Standing(each) for number, each in enumerate(values)}
    return halving.decide(bracket, Rungs.of(validations), ACCURACY, complete=complete)


def test_a_rung_is_decided_when_it_is_full():
    first = [[n / 10] for n in range(9)]
    assert decided(first) == {**dict.fromkeys(range(6), 0), 6: 3, 7: 3, 8: 3}
    assert decided(first, complete=False) == dict.fromkeys(range(9), 1)
    assert decided([*first[:8], []]) == dict.fromkeys(range(9), 1)
    # The same decision again, after some have gone on.
    second = [*first[:6], [0.6, 0, 0.9], [0.7, 0, 0.1], [0.8, 0, 0.2]]
    assert decided(second) == {**dict.fromkeys((*range(6), 7, 8), 0), 6: 9}
    assert decided([*second[:8], [0.8]])[6] == 3, "one has not reached the second rung"


def test_what_fails_or_has_no_value_is_behind_all_others():
    bracket = {n: Standing([n / 10]) for n in range(8)} | {8: Standing([], is_out=True)}
    allowed = halving.decide(bracket, Rungs.of(9), ACCURACY, complete=True)
    assert [number for number, until in allowed.items() if until == 3] == [5, 6, 7]
    assert decided([[math.nan], [0.1], [0.2]], validations=2) == {0: 0, 1: 0, 2: 2}


# ---------------------------------------------------------------------------------- verdicts


def test_a_rank_waits_for_its_verdict_but_not_for_ever(tmp_path, monkeypatch):
    slept = []
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: (slept.append(seconds), sleep(seconds)))

    def waited(step):
        slept.clear()
        began = time.monotonic()
        assert waits.after(step) is Word.GO_ON
        if slept:
            assert time.monotonic() - began > 0.4
            assert sum(slept) <= 0.5 + verdicts.LOOK_S, "the patience"
        return bool(slept)

    waits = Verdicts(tmp_path, patience=0.5)
    verdicts.write(tmp_path, SearchVerdict(Word.GO_ON, 4))
    assert not waited(4)
    assert waited(9), "nobody has answered to step 9"
    assert not waited(14), "a search that is gone is not waited for again"
    verdicts.write(tmp_path, SearchVerdict(Word.GO_ON, 14))
    assert waited(19), "it was late, but is there"
    verdicts.write(tmp_path, SearchVerdict(Word.PRUNE, 14))
    assert waits.after(24) is Word.PRUNE
    (tmp_path / verdicts.FILE).write_text("{")
    assert Verdicts(tmp_path, patience=0.0).after(1) is Word.GO_ON


def test_a_verdict_in_a_store_is_not_waited_for_and_counts_when_it_comes(
    tmp_path, monkeypatch, caplog
):
    """The search sees a validation once the platform has copied the journal."""
    monkeypatch.setenv("DISTDL_VERDICTS", f"file://{tmp_path}/there")
    verdicts.write(tmp_path, SearchVerdict(Word.PRUNE, 1))  # not there
    waits = Verdicts.of(tmp_path)
    began = time.monotonic()
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it waits"))
    assert waits.after(4) is Word.GO_ON
    (tmp_path / "there").mkdir()
    verdicts.write(tmp_path / "there", SearchVerdict(Word.GO_ON, 4))
    assert waits.after(9) is Word.GO_ON
    verdicts.write(tmp_path / "there", SearchVerdict(Word.PRUNE, 4))
    assert waits.after(14) is Word.PRUNE
    assert time.monotonic() - began < 1
    monkeypatch.setenv("DISTDL_VERDICTS", "s3://")
    deaf = Verdicts.of(tmp_path)
    assert {deaf.after(4), deaf.after(9)} == {Word.GO_ON}
    said = [record.message for record in caplog.records if "names no bucket" in record.message]
    assert len(said) == 1
    assert "is not heard, and the run trains on" in said[0]


def test_what_was_read_too_late_is_read_again(tmp_path, monkeypatch):
    """As the first look, for which rank 0 imports the client of the store."""
    answers = iter([b"", verdicts.encoded(SearchVerdict(Word.PRUNE, 4))])
    waits = Verdicts(f"file://{tmp_path}", patience=0.05)

    def content():
        answer = next(answers)
        time.sleep(0 if answer else 0.2)
        return answer

    monkeypatch.setattr(waits, "_content", content)
    assert waits.after(4) is Word.GO_ON
    waits._thread.join()
    assert waits.after(9) is Word.PRUNE


class ElsewhereJob(JobBase):
    """Of a platform that keeps the run's files elsewhere; `away`: why it does not answer."""

    def __init__(self, folder):
        self.store = FileStore(folder)
        self.away = ""

    def read_on(self, name, start):
        self._answer()
        return read_on(self.store, name, start)

    def leave(self, name, content):
        self._answer()
        leave(self.store, name, content)

    def _answer(self):
        if self.away:
            raise UserError.at("elsewhere", self.away, code="unreachable")


def test_a_journal_is_read_on_where_its_platform_keeps_it(tmp_path):
    job = ElsewhereJob(tmp_path / "there")
    curve = trials.TrialCurve(tmp_path / "run", "val/acc1")
    (tmp_path / "run").mkdir()
    there = tmp_path / "there/logs/metrics.jsonl"

    def brought():
        curve.bring(job)
        return curve.read()

    assert not brought()
    there.parent.mkdir(parents=True)
    lines = [encode(0.0, step, 1, {"val/acc1": step / 100}) for step in (4, 9, 14)]
    there.write_bytes(lines[0] + lines[1][:10])
    assert brought()
    assert curve.values == [0.04]
    there.write_bytes(b"".join(lines))
    assert brought()
    assert curve.values == [0.04, 0.09, 0.14]
    assert not brought()
    assert (tmp_path / "run/logs/metrics.jsonl").read_bytes() == there.read_bytes()
    there.write_bytes(lines[2])  # the run was started anew
    assert brought() is False
    assert curve.values == [0.14]


def test_a_trial_is_told_again_until_it_hears(tmp_path, monkeypatch, capsys):
    """Its platform is away for a while: that is said once, and ends nothing."""
    engine = SearchEngine(searched(), tmp_path, "s", [ACCURACY])
    curve = trials.TrialCurve(tmp_path / "run", "val/acc1")
    run = RunDirectory(tmp_path / "run")
    trial = trials.SearchTrial(engine.propose(), "x", run, curve, {})
    job = ElsewhereJob(tmp_path / "there")
    monkeypatch.setattr(trials.SearchTrial, "job", job)
    (tmp_path / "there/logs").mkdir(parents=True)
    (tmp_path / "run").mkdir()
    line = encode(0.0, 4, 1, {"val/acc1": 0.1})
    (tmp_path / "there/logs/metrics.jsonl").write_bytes(line)
    trial.slot = Slot(0)
    words = iter([Word.PRUNE] * 9)
    search = SimpleNamespace(
        under_way=[trial],
        is_local=False,
        _asked_at=-math.inf,
        pruning=SimpleNamespace(word=lambda trial: next(words)),
    )
    search._judge = lambda *given: Search._judge(search, *given)
    monkeypatch.setattr(following, "states", lambda trials: [JobState.RUNNING for _ in trials])

    def look():
        search._asked_at = -math.inf
        Search._look(search)
        return verdicts.read((tmp_path / "there" / verdicts.FILE).read_bytes())

    def away(why):
        job.away = why
        with suppress(FileNotFoundError):
            look()
        with suppress(FileNotFoundError):
            look()
        job.away = ""
        return capsys.readouterr().out

    said = away("no route")
    assert said.count("trial 0 cannot be followed (no route)") == 1
    assert "told" not in said
    trial.curve.bring(job)
    said = away("no route")
    assert said.count("trial 0 cannot be told (no route)") == 1
    assert look() == SearchVerdict(Word.PRUNE, 4)
    assert len([*words]) == 9 - 3
    assert look() == SearchVerdict(Word.PRUNE, 4), "nobody has asked again"


# ---------------------------------------------------------------------------------- the loop


@pytest.fixture
def trained(known_metrics, monkeypatch):
    """Trials train at once, in this process: the n-th validation of a rate has 1 - rate + n / 100.
    What was trained: (rate, epoch)."""
    epochs = []

    def start(trial, plan, slot, *, key, judged):
        trial.plan, trial.slot, trial.began = plan, slot, time.monotonic()
        rate = plan.config.optimizer.lr
        if not trial.run.exists:
            trial.run.create(configs.to_yaml(plan.recipe), {})
        record = {"run_id": plan.run_id, "where": {"task": {"_target_": "t"}, "launcher": {}}}
        attempt = trial.run.begin_attempt(record)
        state = outcome.pop(rate, JobState.SUCCEEDED)
        trial.curve.path.parent.mkdir(exist_ok=True)
        for epoch in range(len(trial.curve.values), plan.config.trainer.max_epochs):
            epochs.append((rate, epoch))
            value = 1 - rate + epoch / 100
            line = encode(0.0, 10 * epoch + 9, attempt.number, {"val/acc1": value})
            with trial.curve.path.open("ab") as journal:
                journal.write(line)
            trial.curve.read()
            if judged and state is JobState.SUCCEEDED:
                search = seen["search"]
                if search.pruning.word(trial) is not Word.GO_ON:
                    state = JobState.PRUNED
            if state is not JobState.SUCCEEDED:
                break
        values = trial.curve.values or [math.nan]
        error = None if state is JobState.SUCCEEDED else f"it ended {state}"
        if "checkpoint" in seen:
            store = CheckpointStore(trial.run.checkpoints)
            store.temporary("last-epoch.ckpt").write_bytes(seen["checkpoint"])
            store.alias("last.ckpt", store.publish("last-epoch.ckpt", step=1))
            (store.folder / "notes.txt").write_text("a user's")
        attempt.end(state, metrics={"val/acc1": values[-1]}, error=error)

    seen = {}
    outcome = {}
    made = tune.search_of

    def search_of(*arguments):
        seen["search"] = made(*arguments)
        return seen["search"]

    monkeypatch.setattr(trials.SearchTrial, "start", start)
    monkeypatch.setattr(tune, "search_of", search_of)
    monkeypatch.setattr("distdl.tools.search.search.POLL_S", 0.0)
    monkeypatch.setattr("distdl.tools.search.study_page.write", lambda search: "page.html")
    return SimpleNamespace(epochs=epochs, outcome=outcome, seen=seen)


def answer(said, code=0):
    assert said.code == code, said
    return json.loads(said.out.splitlines()[-1])["answer"]


def tuned(command, *words, code=0):
    base = ("tune", *TINY, "name=s", "trainer.max_epochs=9", "--json")
    return answer(command(*base, *words), code)


def test_a_search_and_the_same_command_again(command, trained, tmp_path):
    words = ("optimizer.lr=0.1,0.2,0.3", "--sampler", "grid")
    found = tuned(command, *words)
    assert [each["end"] for each in found["trials"]] == ["COMPLETE"] * 3
    best = found["trials"][found["best"]]
    assert best["overrides"] == "optimizer.lr=0.1"
    assert best["values"] == [pytest.approx(0.98)]
    assert "optimizer.lr=0.1" in found["next"]
    assert "trainer.max_epochs=18" in found["next"]
    assert len(trained.epochs) == 27
    assert len({trial["run"] for trial in found["trials"]}) == 3
    assert tuned(command, *words)["best"] == found["best"]
    assert len(trained.epochs) == 27, "nothing was left to do"


def test_what_is_proposed_twice_is_trained_once(command, trained):
    found = tuned(command, "optimizer.lr=0.1,0.2", "--trials", "8", "--sampler", "random")
    assert len(found["trials"]) == 8
    assert len(trained.epochs) == 18
    repeated = [each for each in found["trials"] if each["repeats"] is not None]
    assert len(repeated) == 6
    for each in repeated:
        assert each["values"] == found["trials"][each["repeats"]]["values"]


def test_failed_and_preempted_trials(command, trained):
    trained.outcome |= {0.1: JobState.FAILED, 0.2: JobState.PREEMPTED}
    found = tuned(command, "optimizer.lr=0.1,0.2,0.3", "--sampler", "grid")
    ends = {each["overrides"]: (each["end"], each["why"]) for each in found["trials"]}
    assert ends == {
        "optimizer.lr=0.1": ("FAIL", "it ended FAILED"),
        "optimizer.lr=0.2": ("COMPLETE", ""),
        "optimizer.lr=0.3": ("COMPLETE", ""),
    }
    assert len(trained.epochs) == len({*trained.epochs}), "the resumed one goes on"


def test_a_trial_that_fails_while_nothing_can_be_written_goes_on(command, trained, monkeypatch):
    trained.outcome[0.1] = JobState.FAILED
    calls = itertools.count()

    def try_store(folder):
        if (0.1, 0) in trained.epochs and next(calls) < 3:
            raise OSError(28, "No space left on device")

    for place in ("patience", "search"):
        monkeypatch.setattr(f"distdl.tools.search.{place}.try_store", try_store)
    monkeypatch.setattr("distdl.tools.search.patience.LONGEST_S", 0.0)
    found = tuned(command, "optimizer.lr=0.1,0.2,0.3", "--sampler", "grid")
    assert {each["end"] for each in found["trials"]} == {"COMPLETE"}
    assert len(trained.epochs) == len({*trained.epochs}) == 27
    assert next(calls) > 3


def test_what_cannot_be_written_for_minutes_ends_the_search(monkeypatch, capsys):
    patience = Patience()
    error = unwritable(Path("study"), OSError(28, "No space left on device"))
    patience.wait(error)
    patience.wait(error)
    assert capsys.readouterr().out.count("No space left on device") == 1
    assert patience.is_early
    monkeypatch.setattr("distdl.tools.search.patience.PATIENCE_S", -1.0)
    with pytest.raises(UserError, match="study: cannot be written"):
        patience.wait(error)
    patience.end()
    assert not patience.is_early


def test_a_metric_that_is_not_logged_ends_the_search_after_one_trial(command, trained, monkeypatch):
    monkeypatch.setitem(LOGGED, "logged", None)  # a module of somebody else's
    words = ("optimizer.lr=0.1,0.2", "--sampler", "grid", "--metric", "vall/acc1:max")
    said = command("tune", *TINY, "name=s", "trainer.max_epochs=9", *words)
    assert said.code == 2, said
    assert "--metric: vall/acc1 is not logged; trial 0 has logged val/acc1" in said.err
    assert "--metric val/acc1:max name=STUDY" in said.err
    assert len({rate for rate, _ in trained.epochs}) == 1


def test_what_a_job_has_written_is_fetched_as_soon_as_its_platform_answers(monkeypatch, capsys):
    def fetch(to):
        if code := codes.pop(0):
            raise UserError.at("s3://b", "no answer", code=code)

    job = SimpleNamespace(is_remote=True, fetch=fetch)
    monkeypatch.setattr("distdl.launch.jobs.job_of", lambda attempt: job)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    attempt = SimpleNamespace(job=lambda: {"handle": "x"})
    trial = SimpleNamespace(number=3, last_attempt=attempt, run=SimpleNamespace(path=None))
    codes = ["unreachable", "unreachable", ""]
    assert following.fetch(trial)
    assert "trial 3 is not fetched: no answer: trying again" in capsys.readouterr().out
    codes = ["platform-refuses"]
    assert not following.fetch(trial)
    assert "It stays open: the same command fetches it" in capsys.readouterr().out


@pytest.mark.parametrize("pauses", [False, True])
@pytest.mark.parametrize("moment", ["it ends", "the command was killed then"])
def test_a_job_that_was_pruned_has_not_succeeded(pauses, moment, monkeypatch):
    """Its platform sees exit code 0 alone; what the run has recorded comes with its files."""

    def fetch(trial):
        trial.recorded = JobState.PRUNED
        return True

    told = []
    trial = SimpleNamespace(
        recorded=JobState.SUCCEEDED,
        failed_with_store=False,
        refused=False,
        curve=SimpleNamespace(read=bool),
        free=lambda: Slot(0),
        note_refusal=bool,
    )
    search = SimpleNamespace(
        free=[],
        pruning=SimpleNamespace(pauses=pauses, word=bool),
        _end=lambda trial, end: told.append(end),
        _conclude=lambda *_: pytest.fail("it is not complete"),
    )
    monkeypatch.setattr(following, "fetch", fetch)
    if moment == "it ends":
        Search._ended(search, trial, JobState.SUCCEEDED)
    else:
        assert Search._settled(search, trial)
    assert told == ([] if pauses else [TrialEnd.PRUNED])


def test_halving_trains_no_epoch_twice(command, trained):
    words = ("optimizer.lr=range(0.05,0.475,0.05)", "--sampler", "grid", "--pruner", "halving")
    found = tuned(command, *words)
    assert len(trained.epochs) == len({*trained.epochs})
    assert len(trained.epochs) == 9 * 1 + 3 * 2 + 1 * 6
    ends = [each["end"] for each in found["trials"]]
    assert (ends.count("COMPLETE"), ends.count("PRUNED")) == (1, 8)
    assert found["trials"][found["best"]]["overrides"] == "optimizer.lr=0.05"


@matrix_only
def test_asha_ends_trials_for_good(command, trained):
    words = ("optimizer.lr=range(0.05,0.475,0.05)", "--sampler", "grid", "--pruner", "asha")
    found = tuned(command, *words)
    ends = [each["end"] for each in found["trials"]]
    assert ends.count("PRUNED") >= 4
    assert found["trials"][found["best"]]["overrides"] == "optimizer.lr=0.05"
    assert len(trained.epochs) == len({*trained.epochs}) < 50


@matrix_only
def test_checkpoints_of_pruned_trials_are_removed_if_that_is_said(command, trained):
    trained.seen["checkpoint"] = b"x" * 1000
    rates = ("optimizer.lr=range(0.05,0.475,0.05)", "--sampler", "grid", "--pruner", "halving")
    kept = tuned(command, *rates)
    pruned = [each for each in kept["trials"] if each["end"] == "PRUNED"]
    assert len(pruned) >= 4
    assert {each["freed"] for each in kept["trials"]} == {0}
    resumed, linked, *others = (RunDirectory.open(each["run"]) for each in pruned)
    record = {"run_id": "r", "where": {"task": {"_target_": "t"}, "launcher": {}}}
    resumed.begin_attempt(record).end(JobState.SUCCEEDED, metrics={}, error=None)
    os.link(linked.checkpoints / "last.ckpt", "elsewhere.ckpt")
    said = command(
        "tune", *TINY, "name=s", "trainer.max_epochs=9", *rates, "--pruned-checkpoints", "remove"
    )
    assert said.code == 0, said
    assert f"the checkpoints of {len(pruned) - 1} pruned trials" in said.out
    for run in [linked, *others]:
        assert [path.name for path in run.checkpoints.iterdir()] == ["notes.txt"]
    assert (resumed.checkpoints / "last.ckpt").exists(), "somebody has trained it since"
    for each in kept["trials"]:
        if each["end"] == "COMPLETE":
            assert (RunDirectory.open(each["run"]).checkpoints / "last.ckpt").exists()


@matrix_only
def test_a_budget_that_is_used_up_leaves_the_best_open(command, trained, monkeypatch):
    trained.seen["checkpoint"] = b"x"
    words = ("optimizer.lr=0.1,0.2,0.3", "--sampler", "grid", "--pruner", "halving")
    words += ("--pruned-checkpoints", "remove")
    monkeypatch.setattr("distdl.tools.search.search.Search.is_over", property(over := _After(3)))
    found = tuned(command, *words, "--budget", "1h")
    ends = [each["end"] for each in found["trials"]]
    assert (ends.count("PRUNED"), ends.count(None)) == (2, 1), "the best of the rung is paused"
    over.calls = 0
    assert tuned(command, *words, "--budget", "1h")["best"] is None
    (paused,) = (each for each in found["trials"] if each["end"] is None)
    assert (RunDirectory.open(paused["run"]).checkpoints / "last.ckpt").exists()
    over.calls = -1000
    found = tuned(command, *words, "--budget", "1h")
    assert {each["end"] for each in found["trials"]} == {"COMPLETE", "PRUNED"}
    assert len(trained.epochs) == len({*trained.epochs})


def test_each_trial_has_the_same_time_and_the_next_training_has_more(command, trained):
    found = tuned(command, "optimizer.lr=0.1,0.2", "--sampler", "grid", "--trial-budget", "90min")
    for each in found["trials"]:
        recipe = RunDirectory(Path(each["run"])).recipe()
        assert recipe.trainer.max_time == "00:01:30:00"
    assert "trainer.max_time=00:03:00:00" in found["next"]


class _After:
    """True from some call on."""

    def __init__(self, calls):
        self.calls = -calls

    def __call__(self, search):
        self.calls += 1
        return self.calls > 0
