"""`python -m distdl scale` without a worker: its members, and what is measured again."""

import json
from pathlib import Path

import pytest

from distdl.job import JobState
from distdl.launch import jobs, start
from distdl.scaling import members
from distdl.util.errors import UserError
from tests.unit.scale_results import bench

TINY = ("model=resnet18", "data.batch_size=12", "trainer.accelerator=cpu", "tracking=none")
ONE = ("scale", *TINY, "name=mine", "--devices", "1", "--mode", "weak")
NAME, RUN = "single-1x1-batch12", Path("outputs/default/mine/single-1x1-batch12")
HOOKED = ("ddp", "ddp strategy.comm_hook=bf16")


def test_sizes_and_batches_of_members(tmp_path, monkeypatch):
    """A node is filled before the next one, and one device is measured once."""
    monkeypatch.chdir(tmp_path)
    assert members.sizes([4, 1, 2], [2, 1]) == [(1, 1), (1, 2), (1, 4), (2, 4)]
    result = members.members(TINY, HOOKED, [(1, 1), (1, 2), (2, 2)], ("weak", "strong"))
    assert len({m.name for m in result}) == len(result) == 1 + 2 * 2 * 2
    alone = [(m.strategy, m.modes) for m in result if m.world_size == 1]
    assert alone == [("single", ["weak", "strong"])]
    for mode, batches in (("weak", {2: 12, 4: 12}), ("strong", {2: 6, 4: 3})):
        same = [m for m in result if m.modes == [mode]]
        assert {m.world_size: m.config.data.batch_size for m in same} == batches
    hooks = {m.config.strategy.comm_hook for m in result if "bf16" in m.strategy}
    assert hooks == {"bf16"}
    with pytest.raises(UserError, match="does not divide by 5"):
        members.members(TINY, HOOKED, [(1, 5)], ("strong",))
    # A pipeline takes the batch of all its devices.
    for strategy, batch in (("pipeline", 48), ("pipeline strategy.stages=2", 24)):
        (one,) = members.members(TINY, (strategy,), [(1, 4)], ("weak",))
        assert one.config.data.batch_size == batch


class Started:
    """The runs that were started. Each of them ends at once, with a result if it succeeds."""

    def __init__(self):
        self.names, self.fails = [], "nothing"  # part of a name

    def run_one(self, plan):
        self.names.append(plan.run.path.name)
        attempt = start.create_attempt(plan, ["x"], None)
        failed = self.fails in self.names[-1]
        if not failed:
            world, batch = plan.resources.world_size, plan.config.data.batch_size
            result = bench(world, rate=45 * world if world > 1 else 100, batch=batch * world)
            result["attempt"] = attempt.number
            (plan.run.path / "benchmark.json").write_text(json.dumps(result))
        state = JobState.FAILED if failed else JobState.SUCCEEDED
        attempt.end(state)
        return state


@pytest.fixture
def started(without_stage_2, monkeypatch):
    started = Started()
    monkeypatch.setattr("distdl.launch.sweeps.run_one", started.run_one)
    return started


def change_status(**fields):
    file = RUN / "attempts/001/status.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def test_only_what_is_missing_is_measured(command, started):
    typed = ("scale", *TINY, "--devices", "1,2", "--mode", "weak")
    started.fails = "1x2"
    result = command(*typed)
    assert result.code == 1 and "not measured: ddp-1x2-batch12" in result.out
    started.fails = "nothing"
    result = command(*typed, "--vm", "standard_nc6s_v3", "--predict", "64")
    assert result.code == 0 and started.names == [NAME, "ddp-1x2-batch12", "ddp-1x2-batch12"]
    assert "45.0 %" in result.out and "$3.06 an hour" in result.out
    assert "most efficient of several: ddp on 1 x 2 (weak), 45 %" in result.out
    (folder,) = Path("outputs/default").glob("scale-*")
    assert (folder / "scale.png").stat().st_size > 10_000
    record = json.loads((folder / "scale.json").read_text())
    assert [r["efficiency"] for r in record["rows"]] == [1.0, pytest.approx(0.45)]
    assert record["rows"][1]["predicted"] and record["vm"] == "Standard_NC6s_v3"
    # The prediction does not know what made it so slow; a note reports the difference.
    (note,) = record["notes"]
    assert "measured 45.0 %, predicted " in note and f"note    {note}\n" in result.out
    result = command("scale", *TINY, "--devices", "2", "--mode", "weak")
    assert result.code == 0 and len(started.names) == 3
    assert "one device is measured as well" in result.out


@pytest.mark.parametrize("left", ["", "{", "[1]", '{"attempt": 1}'])
def test_a_missing_or_damaged_result_is_measured_again(command, started, left):
    assert command(*ONE).code == 0
    file, damaged = RUN / "benchmark.json", RUN / "benchmark.json.damaged"
    file.write_text(left) if left else file.unlink()
    result = command(*ONE)
    assert result.code == 0 and started.names == [NAME] * 2 and "once more" in result.out
    assert json.loads(file.read_text())["attempt"] == 2
    assert ("could not be read" in result.out) == damaged.exists() == bool(left)
    assert not left or damaged.read_text() == left


def test_a_run_under_way_or_with_a_remote_store_is_not_measured_again(
    command, started, monkeypatch
):
    assert command(*ONE).code == 0
    change_status(state="RUNNING", host="another")
    result = command(*ONE)
    assert result.code == 0 and len(started.names) == 1 and "not measured" not in result.out
    assert f"under way: {NAME}; once they have ended" in result.out
    (RUN / "benchmark.json").unlink()
    (RUN / "attempts/001/job.json").write_text('{"handle": "far://1"}')
    change_status(state="SUCCEEDED", concluded=True)
    remote = type("Remote", (), {"fetch": lambda self, to: None})
    monkeypatch.setattr(jobs, "of", lambda attempt: remote())
    result = command(*ONE)
    assert result.code == 1 and len(started.names) == 1
    assert f"jobs fetch {RUN}\n" in result.out and "resumes with them" not in result.out
    assert f"not here: {NAME}; fetch them" in result.out
    monkeypatch.setattr(jobs, "of", lambda attempt: object())  # shares our store: nothing to fetch
    assert command(*ONE).code == 0 and len(started.names) == 2


def test_what_was_measured_before_stays_in_the_table(command, started):
    typed = ("scale", *TINY, "name=mine")
    assert command(*typed, "--devices", "1,2,4").code == 0
    folder, count = Path("outputs/default/mine"), len(started.names)

    def rows():
        rows = json.loads((folder / "scale.json").read_text())["rows"]
        return {(r["strategy"], r["mode"], r["devices"]) for r in rows}

    complete = rows()
    assert len(complete) == 2 * (1 + 2)
    result = command(*typed, "--devices", "1,2", "--mode", "weak")
    assert result.code == 0 and len(started.names) == count and rows() == complete
    assert "strong scaling" in result.out
    # A row without a result is left out of both, and reported.
    (folder / "ddp-1x4-batch12/benchmark.json").unlink()
    result = command(*typed, "--devices", "1,2")
    assert rows() == complete - {("ddp", "weak", 4)}
    assert "left out: ddp-1x4-batch12, there is no benchmark.json" in result.out
    # With other settings of the task, nothing of before can stand beside them in table or plot.
    result = command(*typed, "task.steps=7", "--devices", "1", "--mode", "weak")
    assert rows() == {("single", "weak", 1), ("single", "strong", 1)}
    assert "it was measured with other settings" in result.out
    assert not (folder / "scale.png").exists()


def test_other_settings_of_the_task_are_measured_again(command, started):
    assert command(*ONE, "task.steps=5").code == 0
    assert f"{NAME}: measured before\n" in command(*ONE, "task.steps=5").out
    started.fails = "single"
    result = command(*ONE, "task.steps=7")
    assert "measured before, with task.steps=5: once more" in result.out
    assert result.code == 1 and "not measured: single" in result.out, "an older one was shown"
    started.fails = "nothing"
    result = command(*ONE, "task.steps=7")
    assert result.code == 0 and "measured before" not in result.out and "100.0 %" in result.out


REFUSED = {"--devices 0,2": "--devices", "--devices two": "--devices", "--between nan": "more than"}
REFUSED |= {"--mode week": "there is no 'week'", "--vm Standard_X": "no VM size"}
REFUSED |= {"trainer.devices=2": "--devices 1,2,4", "--predict 1": "2 or more"}
REFUSED |= {"strategy.comm_hook=bf16": "belongs to a strategy", "--between -1": "more than 0"}
REFUSED |= {"--devices 2,4 --strategy dpd": "did you mean strategy=ddp"}
REFUSED |= {"--low-priority": "--vm Standard_ND40rs_v2"}


@pytest.mark.parametrize("arguments, message", REFUSED.items())
def test_refused_arguments(command, started, arguments, message):
    result = command("scale", *TINY, *arguments.split())
    assert result.code == 2 and not started.names and not Path("outputs").exists()
    assert message in result.err and result.err.count("did you mean") < 2
