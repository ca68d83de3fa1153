"""`python -m distdl scale` without a worker: its members, and what is measured again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from distdl.job import JobState
from distdl.launch import jobs, start
from distdl.scaling import members as scaling_runs
from distdl.util.errors import UserError
from tests.unit.scale_results import bench

TINY = ("model=resnet18", "data.batch_size=12", "trainer.accelerator=cpu", "tracking=none")
ONE = ("scale", *TINY, "name=mine", "--devices", "1", "--mode", "weak")
Command = Callable[..., Any]
STRATEGIES = ("ddp", "ddp strategy.comm_hook=bf16")


def members(counts: list[tuple[int, int]], modes: tuple[str, ...] = ("weak", "strong")) -> Any:
    return scaling_runs.members(TINY, STRATEGIES, counts, modes)


def test_sizes_fill_a_node_before_the_next_one() -> None:
    assert scaling_runs.sizes([4, 1, 2], [2, 1]) == [(1, 1), (1, 2), (1, 4), (2, 4)]


def test_one_device_is_measured_once_and_batches_follow_the_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = members([(1, 1), (1, 2), (2, 2)])
    assert len(found) == 1 + 2 * 2 * 2
    assert [(m.strategy, m.modes) for m in found if m.world_size == 1] == [
        ("single", ["weak", "strong"])
    ]
    weak, strong = (
        {m.world_size: m.config.data.batch_size for m in found if m.modes == [mode]}
        for mode in ("weak", "strong")
    )
    assert (weak, strong) == ({2: 12, 4: 12}, {2: 6, 4: 3})
    hooked = [m for m in found if "bf16" in m.strategy]
    assert hooked and all(m.config.strategy.comm_hook == "bf16" for m in hooked)
    assert len({m.name for m in found}) == len(found)
    with pytest.raises(UserError, match="does not divide by 5"):
        members([(1, 5)])


def test_a_pipeline_takes_the_batch_of_all_its_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (found,) = scaling_runs.members(TINY, ("pipeline",), [(1, 4)], ("weak",))
    assert found.config.data.batch_size == 48
    strategies = ("pipeline strategy.stages=2",)
    (found,) = scaling_runs.members(TINY, strategies, [(1, 4)], ("weak",))
    assert found.config.data.batch_size == 24


@dataclass
class Started:
    """The runs that were started. Each of them ends at once, with a result if it succeeds."""

    names: list[str] = field(default_factory=list)
    fails: str = ""  # part of a name

    def run_one(self, plan: Any) -> JobState:
        self.names.append(plan.run.path.name)
        attempt = start.create_attempt(plan, ["x"], None)
        state = JobState.SUCCEEDED
        if self.fails and self.fails in self.names[-1]:
            state = JobState.FAILED
        else:
            world, batch = plan.resources.world_size, plan.config.data.batch_size
            result = bench(world, rate=45 * world if world > 1 else 100, batch=batch * world)
            result["attempt"] = attempt.number
            (plan.run.path / "benchmark.json").write_text(json.dumps(result))
        attempt.end(state)
        return state


@pytest.fixture
def started(without_stage_2: None, monkeypatch: pytest.MonkeyPatch) -> Started:
    started = Started()
    monkeypatch.setattr("distdl.launch.sweeps.run_one", started.run_one)
    return started


def test_only_what_is_missing_is_measured(command: Command, started: Started) -> None:
    given = ("scale", *TINY, "--devices", "1,2", "--mode", "weak")
    started.fails = "1x2"
    said = command(*given)
    assert said.code == 1 and "not measured: ddp-1x2-batch12" in said.out
    started.fails = ""
    said = command(*given, "--vm", "standard_nc6s_v3", "--predict", "64")
    # The one that had failed, and no other.
    assert said.code == 0
    assert started.names == ["single-1x1-batch12", "ddp-1x2-batch12", "ddp-1x2-batch12"]
    assert "45.0 %" in said.out and "$3.06 an hour" in said.out
    assert "most efficient of several: ddp on 1 x 2 (weak), 45 %" in said.out
    (folder,) = Path("outputs/default").glob("scale-*")
    assert (folder / "scale.png").stat().st_size > 10_000
    record = json.loads((folder / "scale.json").read_text())
    assert [r["efficiency"] for r in record["rows"]] == [1.0, pytest.approx(0.45)]
    assert record["rows"][1]["predicted"] and record["vm"] == "Standard_NC6s_v3"
    # The prediction does not know what made it so slow; a note reports the difference.
    (note,) = record["notes"]
    assert "measured 45.0 %, predicted " in note and f"note    {note}\n" in said.out
    # One device is measured in any case.
    said = command("scale", *TINY, "--devices", "2", "--mode", "weak")
    assert said.code == 0 and len(started.names) == 3
    assert "one device is measured as well" in said.out


@pytest.mark.parametrize("left", ["", "{", "[1]", '{"attempt": 1}'])
def test_a_result_that_is_gone_or_damaged_is_measured_again(
    command: Command, started: Started, left: str
) -> None:
    assert command(*ONE).code == 0
    result = Path("outputs/default/mine/single-1x1-batch12/benchmark.json")
    result.write_text(left) if left else result.unlink()
    said = command(*ONE)
    assert said.code == 0 and started.names == ["single-1x1-batch12"] * 2
    assert "jobs fetch" not in said.out and "once more" in said.out
    assert json.loads(result.read_text())["attempt"] == 2
    damaged = result.with_name("benchmark.json.damaged")
    assert ("could not be read" in said.out) == damaged.exists() == bool(left)
    assert not left or damaged.read_text() == left


def test_a_result_that_lies_elsewhere_is_not_measured_again(
    command: Command, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command(*ONE).code == 0
    run = Path("outputs/default/mine/single-1x1-batch12")
    (run / "benchmark.json").unlink()
    (run / "attempts/001/job.json").write_text('{"handle": "far://1"}')
    status = json.loads((run / "attempts/001/status.json").read_text())
    (run / "attempts/001/status.json").write_text(json.dumps({**status, "concluded": True}))

    class Far:
        def fetch(self, to: Path) -> None: ...

    monkeypatch.setattr(jobs, "of", lambda attempt: Far())
    said = command(*ONE)
    # Nothing is shown, and nothing of it will come by itself.
    assert said.code == 1 and len(started.names) == 1
    assert "jobs fetch outputs/default/mine/single-1x1-batch12\n" in said.out
    assert "not here: single-1x1-batch12; fetch them" in said.out
    assert "resumes with them" not in said.out
    # A store that is shared with us has nothing to fetch.
    monkeypatch.setattr(jobs, "of", lambda attempt: object())
    assert command(*ONE).code == 0 and len(started.names) == 2


def test_what_is_under_way_is_no_failure(command: Command, started: Started) -> None:
    assert command(*ONE).code == 0
    run = Path("outputs/default/mine/single-1x1-batch12")
    status = json.loads((run / "attempts/001/status.json").read_text())
    running = {**status, "state": "RUNNING", "host": "another"}
    (run / "attempts/001/status.json").write_text(json.dumps(running))
    said = command(*ONE)
    assert said.code == 0 and len(started.names) == 1
    assert "under way: single-1x1-batch12; once they have ended" in said.out
    assert "not measured" not in said.out


def test_what_was_measured_before_stays_in_the_table(command: Command, started: Started) -> None:
    given = ("scale", *TINY, "name=mine")
    assert command(*given, "--devices", "1,2,4").code == 0
    folder, count = Path("outputs/default/mine"), len(started.names)

    def rows() -> set[tuple[str, str, int]]:
        found = json.loads((folder / "scale.json").read_text())["rows"]
        return {(r["strategy"], r["mode"], r["devices"]) for r in found}

    whole = rows()
    assert len(whole) == 2 * (1 + 2)
    said = command(*given, "--devices", "1,2", "--mode", "weak")
    assert said.code == 0 and len(started.names) == count and rows() == whole
    assert "strong scaling" in said.out
    # What has no result any more is gone from both, with a word.
    (gone,) = folder.glob("ddp-1x4-batch12")
    (gone / "benchmark.json").unlink()
    said = command(*given, "--devices", "1,2")
    assert rows() == whole - {("ddp", "weak", 4)}
    assert "left out: ddp-1x4-batch12, there is no benchmark.json" in said.out
    # Other settings of the task: nothing of before can stand beside them, and no plot of it.
    said = command(*given, "task.steps=7", "--devices", "1", "--mode", "weak")
    assert rows() == {("single", "weak", 1)} | {("single", "strong", 1)}
    assert "it was measured with other settings" in said.out
    assert not (folder / "scale.png").exists()


def test_a_problem_is_said_once(command: Command) -> None:
    said = command("scale", *TINY, "--devices", "2,4", "--strategy", "dpp")
    assert said.code == 2 and said.err.count("did you mean") == 1


def test_other_settings_of_the_task_are_measured_again(command: Command, started: Started) -> None:
    given = (*ONE, "task.steps=5")
    assert command(*given).code == 0
    assert "single-1x1-batch12: measured before\n" in command(*given).out
    # A named folder keeps the sizes whatever the task's settings are.
    started.fails, other = "single", (*ONE, "task.steps=7")
    said = command(*other)
    assert "measured before, with task.steps=5: once more" in said.out
    assert said.code == 1 and "not measured: single" in said.out, "an older measurement was shown"
    started.fails = ""
    said = command(*other)
    assert said.code == 0 and "measured before" not in said.out and "100.0 %" in said.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--devices", "0,2"), "--devices"),
        (("--devices", "two"), "--devices"),
        (("--mode", "week"), "there is no 'week'"),
        (("--vm", "Standard_X"), "no VM size"),
        (("trainer.devices=2",), "--devices 1,2,4"),
        (("strategy.comm_hook=bf16",), "belongs to a strategy"),
        (("--strategy", "dpd"), "did you mean strategy=ddp"),
        (("--between", "-1"), "more than 0"),
        (("--between", "nan"), "more than 0"),
        (("--predict", "1"), "2 or more"),
        (("--low-priority",), "--vm Standard_ND40rs_v2"),
    ],
)
def test_what_makes_no_sense_is_refused(
    command: Command, started: Started, arguments: tuple[str, ...], words: str
) -> None:
    said = command("scale", *TINY, *arguments)
    assert (
        said.code == 2 and words in said.err and not started.names and not Path("outputs").exists()
    )
