"""A rank that is killed: the run goes on by itself, with forks of a standby process (killed.py)."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from distdl.runs.checkpoints import CheckpointStore
from tests.conftest import UNCHECKED, distdl, status
from tests.multiprocess import killed
from tests.waiting import until

MATRIX = bool(os.environ.get("DISTDL_MATRIX"))
COMMON = (
    "model=net",
    "data=rows",
    "~optimizer",
    "~schedule",
    "trainer.accelerator=cpu",
    "trainer.max_epochs=1",
    "trainer.devices=2",
    "strategy=ddp",
    "tracking=none",
    "checkpoint.monitor=null",
    "checkpoint.every_n_steps=1",
    "experiment_name=e",
)
NODES = {"model/net": "_target_: mine.Net\nkill: rank", "data/rows": "_target_: mine.Data"}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    shutil.copy(killed.__file__, tmp_path / "mine.py")
    for path, text in NODES.items():
        (tmp_path / "conf" / path).parent.mkdir(parents=True)
        (tmp_path / "conf" / f"{path}.yaml").write_text(f"{text}\n")
    return tmp_path


def weights(run: Path) -> dict[str, Any]:
    newest = CheckpointStore(run / "checkpoints").newest()
    assert newest is not None
    return torch.load(newest, weights_only=True)["state_dict"]


def standbys(folder: Path) -> list[psutil.Process]:
    """The standby processes of the runs in a folder, and the ranks that they have forked."""
    processes = psutil.process_iter(["cmdline"])
    words = ("distdl.agent.standby", str(folder))
    return [p for p in processes if all(w in " ".join(p.info["cmdline"] or ()) for w in words)]


@pytest.mark.parametrize(
    ("kill", "ranks"), [("rank", 2), *([("both", 2), ("rank", 1)] if MATRIX else [])]
)
def test_a_killed_rank_costs_an_attempt_and_no_more(project: Path, kill: str, ranks: int) -> None:
    common = (*COMMON, f"trainer.devices={ranks}")
    whole = distdl(*common, "model.kill=''", "name=whole", cwd=project, module=UNCHECKED)
    more = ("launcher.max_attempts=1", f"model.kill={kill}", "name=healed")
    healed = distdl(*common, *more, cwd=project, module=UNCHECKED)
    assert (whole.returncode, healed.returncode) == (0, 0), healed.stdout + healed.stderr
    runs = [project / "outputs/e" / name for name in ("whole", "healed")]
    assert [status(runs[1], number)["state"] for number in (1, 2)] == ["FAILED", "SUCCEEDED"]
    expected, result = map(weights, runs)
    assert expected.keys() == result.keys()
    assert all(torch.equal(result[name], value) for name, value in expected.items())
    until(lambda: not standbys(project), 10)
    first = [*project.glob("started-0-*")]
    later = {*project.glob("started-*")} - {*first}
    assert len(first) == len(later) == ranks
    assert not any("standby" in path.read_text() for path in first)
    assert all(("standby" in path.read_text()) == (kill == "rank") for path in later)
    if kill == "rank":
        assert {path.read_text() for path in project.glob("threads-[!0]*")} == {"1"}


def test_the_standby_process_ends_with_its_command(project: Path, background) -> None:
    """Also if that is killed, and then the ranks end too, which the standby process has forked."""
    more = ("launcher.max_attempts=1", "trainer.max_epochs=1000", "name=long")
    job = background(*COMMON, *more, cwd=project, module=UNCHECKED)
    job.until(lambda: len(standbys(project)) == 1 + killed.RANKS)  # of the second attempt
    job.until(lambda: (project / "healed-1").exists())
    job.process.send_signal(signal.SIGKILL)
    until(lambda: not standbys(project), 10)
