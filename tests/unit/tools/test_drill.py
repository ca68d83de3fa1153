"""The parts of a drill: its account of samples and weights, whom it kills, and what it refuses."""

from __future__ import annotations

import math
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from distdl.config import compose, programs
from distdl.runs.checkpoints import CheckpointStore
from distdl.tools.drill import processes, samples, table, weights
from distdl.tools.drill.subjects import OwnProgram, Training
from distdl.tools.drill.trial import FaultRow
from distdl.util.processes import start_time


def recorded(run: Path, *ranks: str) -> Path:
    """A run whose ranks have recorded these lines."""
    (run / "logs").mkdir(parents=True)
    for rank, lines in enumerate(ranks):
        text = "\n".join(lines.split(";"))
        (run / f"logs/samples-rank{rank}.csv").write_text(text + "\n")
    return run


# The lines of two ranks: attempt,epoch,step,ids.
TWIN = ("1,0,1,0 1;1,0,2,2 3;1,0,3,4 5", "1,0,1,6 7;1,0,2,8 9;1,0,3,10 11")
HISTORIES = {
    "from the start": ([f"1,0,1,0 1;{lines.replace('1,0,', '2,0,')}" for lines in TWIN], (0, 0)),
    "a step too far": (("1,0,1,0 1;2,0,3,4 5", "1,0,1,6 7;2,0,3,10 11"), (4, 0)),
    "from the first sample again": (
        ("1,0,1,0 1;2,0,2,0 1;2,0,3,2 3", "1,0,1,6 7;2,0,2,6 7;2,0,3,8 9"),
        (4, 4),
    ),
    "from step 1, and a line that the kill has cut": (
        ("1,0,1,0 1;1,0,2,2 3;1,0;2,0,2,2 3;2,0,3,4 5", "1,0,1,6 7;2,0,2,8 9;2,0,3,10 11"),
        (0, 0),
    ),
}


@pytest.mark.parametrize("case", HISTORIES)
def test_samples_count_as_the_last_weights_have_them(case, tmp_path) -> None:
    lines, expected = HISTORIES[case]
    run, twin = recorded(tmp_path / "run", *lines), recorded(tmp_path / "twin", *TWIN)
    assert samples.lost_and_repeated(run, twin) == expected
    unknown = recorded(tmp_path / "unknown", "1,0,1,")
    assert samples.lost_and_repeated(unknown, unknown) is None


@pytest.mark.parametrize(
    ("values", "expected"), [([1.0, 2.5], 0.5), ([1.0, math.nan], math.inf), ([1.0], math.inf)]
)
def test_weights_are_compared_bit_by_bit(values, expected, tmp_path) -> None:
    for name, weight in (("twin", [1.0, 2.0]), ("run", values)):
        store = CheckpointStore(tmp_path / name / "checkpoints")
        state = {"weight": torch.tensor(weight)}
        torch.save({"state_dict": state}, store.temporary("epoch_000.ckpt"))
        store.publish("epoch_000.ckpt", step=1)
    assert weights.largest_difference(tmp_path / "run", tmp_path / "twin") == expected


def test_only_the_process_that_was_recorded_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        host = socket.gethostname()
        birth = start_time(child.pid)
        processes.act("SIGKILL", [(host, f"{child.pid}:{birth}0")], {}, "")
        processes.act("SIGKILL", [(host, f"{child.pid}:")], {}, "")
        assert child.poll() is None
        processes.act("SIGKILL", [(host, f"{child.pid}:{birth}")], {}, "")
        assert child.wait() == -signal.SIGKILL
        processes.act("SIGKILL", [(host, f"{child.pid}:{birth}")], {}, "")  # gone already


def test_a_row_says_what_went_wrong() -> None:
    rows = [
        FaultRow("cut_link", "needs root"),
        FaultRow("kill_rank", "see x.log", False, 0.41, "stopped", False, 5.0, 0, 8, 0.25),
        FaultRow("sigstop", "", True, 5.0, "stopped", True, 9.0, None, None, 0.0),
    ]
    _, _, first, second, third = table.text(rows, Training.columns).splitlines()
    assert first.split("|")[-2].strip() == "not run here: needs root"
    assert [c.strip() for c in second.split("|")[2:-1]] == [
        "0.4 s",
        "WRONGLY: stopped",
        "5.0 s",
        "0 / 8",
        "differ by 0.25",
        "NO: see x.log",
    ]
    assert [c.strip() for c in third.split("|")[5:-1]] == ["not recorded", "bit-equal", "yes"]


REFUSED = {
    "seed=1 --faults kill_rnk": "did you mean kill_rank?",
    "seed=1 --steps 3": "--steps: must be 20 or more",
    "task=benchmark": "task: only a training can be drilled",
    "launcher=slurm": "launcher: its hosts cannot be reached",
    "checkpoint=none": "checkpoint: must be a mapping",
    "dry_run=true": "there is no dry run of it",
    "outputs/none": "there is no such folder",
    "": "missing: RUN|OVERRIDES",
    "--steps 30 -- true": "--steps: is for trainings",
    "--tolerance 0.1 -- true": "--tolerance: is for trainings",
    "model.lr=1 -- true": "model: a program has none",
    "-- ./no.sh": "there is no file ./no.sh",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_what_cannot_be_drilled_is_refused(command, without_stage_2, tmp_path, arguments) -> None:
    result = command("drill", *arguments.split())
    message = REFUSED[arguments]
    assert result.code == 2, result.err
    assert message in result.err, result.err
    assert not (tmp_path / "outputs").exists()


def test_a_drill_needs_no_max_attempts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = compose.compose(["trainer.accelerator=cpu"])
    for attempts, expected in ((None, 1), (3, 3)):
        config.launcher.max_attempts = attempts
        assert Training(20).shortened(config).launcher.max_attempts == expected
    del config.launcher.max_attempts
    assert "max_attempts" not in Training(20).shortened(config).launcher


def test_a_copy_of_a_program_writes_nowhere_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for place, expected in (("/data/mine", None), ("s3://bucket/mine", "s3://bucket/mine")):
        words = [f"program.checkpoints={place}", programs.command_override(["true"])]
        short = OwnProgram().shortened(compose.compose(words))
        assert short.program.checkpoints == expected
        assert short.tracking == {}


def test_a_program_is_hit_and_not_its_rank(tmp_path):
    """A rank is a process that waits for its program; it must be there to say how that ended."""
    words = "from pathlib import Path; from distdl.program.process import Process; import os;"
    words += "program = Process(['sleep', '60'], os.environ, Path('.'), 1); print(program.pid);"
    words += "import sys; sys.stdout.flush(); print(program._popen.wait())"
    command = [sys.executable, "-c", words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        rank.stdout.readline()
        name = f"{rank.pid}:{start_time(rank.pid)}"
        processes.act("program:SIGKILL", [(socket.gethostname(), name)], {}, "")
        assert rank.stdout.readline().strip() == str(-signal.SIGKILL)
        assert rank.wait() == 0
