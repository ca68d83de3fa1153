"""`data.batch_size=auto`: what is searched for, what the ranks agree on, and where it is refused.

On simulated GPUs with little memory: tests/gpu_rehearsal.
"""

from __future__ import annotations

import json
import math
import signal

import pytest

from distdl.config import batches, compose
from distdl.config.heaviest import heaviest
from distdl.job import JobState, Resources
from distdl.launch import planning, resuming, submitting
from distdl.ranks.stopping import Stopped, StopRequest
from distdl.tools.measure import largest_batch
from distdl.tools.measure.estimate import Machine, by_strategy, estimates
from distdl.tools.measure.step_profile import measure
from distdl.worker import batch_size, performing
from distdl.worker.batch_trial import TrialOutcome
from distdl.worker.rank_context import RankContext
from tests.conftest import TINY
from tests.prepared import refusal

AUTO = (*TINY, "data.batch_size=auto")
LACKS = {"why": "out of memory", "no_memory": True}


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 100, 163, 1000, 5003])
@pytest.mark.parametrize("fragmented", [False, True])
def test_the_largest_batch_that_trains(limit, fragmented):
    """A tenth more does not. In a process that has tried others, less may fit."""
    processes = []

    def attempted(sizes):
        processes.append(sizes)
        outcomes = []
        for number, batch in enumerate(sizes):
            room = 0.6 * limit if fragmented and number else limit
            outcomes.append(TrialOutcome(batch, **({} if batch <= room else LACKS)))
            if outcomes[-1].why:
                break
        return outcomes

    chosen = batch_size.largest(attempted)
    assert chosen <= limit < math.ceil(1.1 * chosen + 1e-9)
    assert chosen < 160 or chosen % 8 == 0 or chosen.bit_count() == 1
    assert len(processes) <= 10


def test_nothing_trains():
    why = {"why": "the loss is no tensor"}
    problem = refusal(batch_size.largest, lambda sizes: [TrialOutcome(sizes[0], **why)])
    assert problem.path == "data.batch_size"
    assert "no batch trains on these devices: the loss is no tensor" in problem.what


def test_all_ranks_know_why_one_could_not():
    good = TrialOutcome(2, memory=7)
    lost = TrialOutcome(4, why="Connection closed by peer")
    lacks = TrialOutcome(4, **LACKS)
    more = TrialOutcome(2, memory=9)
    sizes = (2, 4, 8)
    together = batch_size._on_all_ranks(sizes, [([good, lost], 1), ([more, lacks], 1)])
    assert together == [more, lacks]
    # One that waited was ended; one was killed by the kernel.
    assert batch_size._on_all_ranks(sizes, [([good], None), ([more, lacks], 1)]) == [more, lacks]
    killed = batch_size._on_all_ranks(sizes, [([good], None), ([good], -signal.SIGKILL)])
    assert killed[-1].batch == 4
    assert killed[-1].why == "its process was killed by signal 9"
    problem = refusal(batch_size._on_all_ranks, sizes, [([], 3), ([], None)])
    assert "ended with exit codes [3, None]" in problem.what


SCRIPT = """
import json, pathlib, pickle, sys, time
sys.path[:] = json.loads(sys.stdin.buffer.readline())
request = pickle.load(sys.stdin.buffer)
if request.batches[0] == 99:
    time.sleep(60)
with request.outcomes.open("a") as file:
    for batch in request.batches:
        outcome = {"batch": batch, "memory": 5} if batch < 8 else {"batch": batch, "why": "none"}
        file.write(json.dumps(outcome) + "\\n")
        if batch >= 8:
            sys.exit(1)
"""


def test_a_process_of_its_own_tries(context, tmp_path, monkeypatch):
    script = tmp_path / "trial.py"
    script.write_text(SCRIPT)
    monkeypatch.setattr(batch_size.batch_trial, "__file__", str(script))
    outcomes = batch_size.tried({}, context, [2, 4, 8, 16])
    assert [each.batch for each in outcomes] == [2, 4, 8]
    assert [each.why for each in outcomes] == ["", "", "none"]
    # A signal for the run ends both.
    context.stop.state = JobState.PREEMPTED
    context.stop.signal = "SIGTERM"
    with pytest.raises(Stopped, match="SIGTERM before training began"):
        batch_size.tried({}, context, [99])


def test_elsewhere_it_is_planned_and_frozen(context, monkeypatch, caplog):
    """For the memory that is free; and by `plan` for that of a device."""
    caplog.set_level("INFO")
    config = compose.compose([*AUTO, "data.train_samples=100000", "seed=1"])
    memory = 2**28
    monkeypatch.setattr(batch_size, "free_memory", lambda accelerator: memory)
    tuned = performing.tune(config, context)
    chosen = tuned.data.batch_size
    launch = context.attempt.launch()
    assert launch["changes"] == {"data.batch_size": chosen}
    assert launch["chosen"] == {"batch_size": launch["changes"]}
    assert launch["global_batch_size"] == chosen
    assert "single takes" in launch["batch_size"][0]
    assert f"train with data.batch_size={chosen}" in caplog.text

    def taken(batch):
        sized = compose.compose([*TINY, f"data.batch_size={batch}"])
        return by_strategy(estimates(measure(sized, batch), machine))["single"]

    machine = Machine(1, memory, 1.0, 1.0)
    assert taken(chosen).fits(machine)
    assert not taken(math.ceil(1.1 * chosen)).fits(machine)
    # No more than an epoch has.
    few = compose.compose([*AUTO, "data.train_samples=24"])
    assert batch_size.planned_for(few, context)[0] == 24
    problem = refusal(largest_batch.largest_batch, config, 1, 2**16)
    assert "not one sample fits: single takes" in problem.what


@pytest.mark.parametrize(
    ("limits", "free"),
    [({}, 2**25), ({"used": 2**21, "limit": 2**22}, 2**21), ({"used": 0, "limit": 2**30}, 2**25)],
)
def test_a_container_may_have_less_memory_than_its_machine(limits, free, monkeypatch):
    known = {"available": 2**25, **limits}
    monkeypatch.setattr("distdl.health.machine.memory", lambda pid: known)
    assert batch_size.free_memory("cpu") == free


def test_other_attempts_keep_the_global_batch(context):
    """Though they have other devices, and the submitting side does not know the choice."""
    chosen = {"data.batch_size": 24}
    launch = {**context.launch, "chosen": {"batch_size": chosen}, "global_batch_size": 24}
    context.attempt.write_launch(launch)
    context.attempt.end(JobState.PREEMPTED)
    config = compose.compose([*AUTO, "trainer.devices=2", "strategy=ddp"])
    for size, batch in ((2, 12), (1, 24), (5, None)):
        attempt = context.run.begin_attempt({**launch, "chosen": {}, "changes": {}})
        ranks = Resources(1, size, "cpu")
        now = RankContext(attempt, attempt.launch(), ranks, context.environment, StopRequest())
        if batch is None:
            assert refusal(performing.tune, config, now).code == "indivisible"
        else:
            assert performing.tune(config, now).data.batch_size == batch
            assert attempt.launch()["global_batch_size"] == 24
        attempt.end(JobState.PREEMPTED)


def test_what_comes_later_in_the_run_counts():
    """Weights that are trained from an epoch on, and images that grow."""
    words = ("model.freeze=[backbone]", "model.unfreeze_at=3", "data=synthetic_jpeg")
    words += ("data.resize={from: 160, to: 192, from_epoch: 65, until_epoch: 76}",)
    config = heaviest(compose.compose([*TINY, *words]))
    assert config.model.freeze == []
    assert config.model.unfreeze_at is None
    assert (config.data.resize["from"], config.data.resize.to) == (192, 192)
    assert heaviest(compose.compose([*TINY])) == compose.compose([*TINY])


REFUSED = {
    "strategy=pipeline trainer.devices=2": "each device has a batch of its own",
    "task=validate": "this task does not train",
}


@pytest.mark.parametrize("words", REFUSED)
def test_where_it_is_refused(words, tmp_path, monkeypatch, no_child):
    monkeypatch.chdir(tmp_path)
    problem = refusal(planning.plan, compose.compose([*AUTO, *words.split()]))
    assert problem.path == "data.batch_size"
    assert REFUSED[words] in problem.what
    assert "data.batch_size=32" in problem.remedy


def test_a_run_that_asks_for_it(tmp_path, monkeypatch, without_stage_2):
    monkeypatch.chdir(tmp_path)
    planned = planning.plan(compose.compose([*AUTO, "name=r", "trainer.devices=2"]))
    said = batches.describe(planned.config, planned.resources)
    assert said == "auto x 2 devices: chosen before the training starts"
    attempt = submitting.create_attempt(planned, ["distdl"], None)
    record = attempt.launch()
    assert record["global_batch_size"] is None
    # What a worker has chosen, a resume has, on other devices as well.
    chosen = {"data.batch_size": 24}
    attempt.write_launch(
        {**record, "changes": chosen, "chosen": {"batch_size": chosen}, "global_batch_size": 48}
    )
    attempt.end(JobState.PREEMPTED)
    for devices, batch in ((2, 24), (1, 48)):
        resumed = resuming.plan(planned.run, [f"trainer.devices={devices}"])
        assert resumed.config.data.batch_size == batch
        assert resumed.recipe.data.batch_size == "auto"
    # Typed again it changes nothing, and a run that has a number does not get another.
    assert resuming.plan(planned.run, ["data.batch_size=auto"]).config.data.batch_size == 24
    other = planning.plan(compose.compose([*TINY, "name=other"]))
    submitting.create_attempt(other, ["distdl"], None).end(JobState.PREEMPTED)
    problem = refusal(resuming.plan, other.run, ["data.batch_size=auto"])
    assert "keeps the batch that it was started with" in problem.what
    # Fewer hosts in the next attempt of the same command: the global batch stays.
    kept = planning.with_choices(planned, attempt)
    assert kept.config.data.batch_size == 24
    attempt.write_launch({**attempt.launch(), "global_batch_size": 47})
    assert refusal(planning.with_choices, planned, attempt).code == "indivisible"
    assert json.dumps(kept.changes) == '{"data.batch_size": 24}'
