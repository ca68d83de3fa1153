"""`task=benchmark` as people start it: under every strategy, on real ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TINY, UNCHECKED, distdl, status

SHORT = ("task=benchmark", "task.warmup=2", "task.windows=1", "task.steps=3", "task.trace=2")
# A batch takes longer than a step: no benchmark may overlook that.
SLOW = """
import time
from distdl.data import SyntheticImages

class Slow(SyntheticImages):
    def train_dataloader(self):
        return Sleepy(super().train_dataloader())

class Sleepy:
    def __init__(self, loader):
        self.loader = loader
    def __len__(self):
        return len(self.loader)
    def __iter__(self):
        for batch in self.loader:
            time.sleep(0.6)
            yield batch
"""


def measured(cwd: Path, *overrides: str) -> dict[str, Any]:
    done = distdl(*TINY, "name=b", *SHORT, *overrides, cwd=cwd, module=UNCHECKED)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((cwd / "outputs/default/b/benchmark.json").read_text())
    assert found["verdict"]["bound"] in done.stdout
    return found


def check(found: dict[str, Any]) -> None:
    for side in (found["real"], found["held"]):
        step = side["step_seconds"]
        assert step["count"] == 3 and 0 < step["median"] <= step["p95"]
        # The parts are the step: of each rank's mean, while the step is the slowest rank's.
        assert sum(side["split"].values()) == pytest.approx(step["mean"], rel=0.4)
        assert side["split"]["forward"] > 0 and side["split"]["backward"] > 0
        assert side["split"]["optimizer"] > 0
    assert found["model"]["flops_per_sample"] > 1e8  # resnet18 at 32 pixels: 0.217 GFLOP
    assert 0 < found["model"]["mfu"] < 1


STRATEGIES = ("ddp", "pipeline", "fsdp", "deepspeed_zero2")


@pytest.mark.parametrize("strategy", STRATEGIES[: None if "DISTDL_MATRIX" in os.environ else 2])
def test_under_every_strategy_communication_is_seen(tmp_path: Path, strategy: str) -> None:
    if strategy.startswith("deepspeed"):
        pytest.importorskip("deepspeed")
    found = measured(tmp_path, f"strategy={strategy}", "trainer.devices=2")
    check(found)
    assert found["setting"]["strategy"] == strategy
    assert found["held"]["split"]["communication"] > 0
    assert found["link"]["ranks"] == 2 and found["link"]["bandwidth"] > 0
    assert len(found["ranks"]) == 2
    shares = 1 if strategy == "pipeline" else 2
    assert found["setting"]["global_batch"] == 8 * shares
    rate = found["setting"]["global_batch"] * 3 / found["ranks"][0]["windows"][0]["seconds"]
    assert found["real"]["images_per_second"] == pytest.approx(rate, rel=0.25)


def test_a_slow_loader_is_data_bound(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SLOW)
    found = measured(tmp_path, "data._target_=mine.Slow", "project.allow=[mine]")
    check(found)
    assert found["verdict"]["bound"] == "data-bound"
    assert found["real"]["split"]["data"] == pytest.approx(0.6, rel=0.4)
    assert found["held"]["split"]["data"] < 0.05
    assert found["communication"] is None and found["link"] is None


def test_a_run_is_measured_and_stays_what_it_was(tmp_path: Path) -> None:
    run = tmp_path / "outputs/default/b"
    short = (*TINY, "data.train_samples=40", "name=b", "trainer.max_epochs=1")
    trained = distdl(*short, cwd=tmp_path, module=UNCHECKED)
    assert trained.returncode == 0, trained.stdout + trained.stderr

    def history() -> list[dict[str, Any]]:
        lines = (run / "logs/metrics.jsonl").read_text().splitlines()
        return [m for m in map(json.loads, lines) if "train/loss" in m["metrics"]]

    before = history(), sorted(p.name for p in (run / "checkpoints").rglob("*"))
    done = distdl("resume", "outputs/default/b", *SHORT, cwd=tmp_path, module=UNCHECKED)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (history(), sorted(p.name for p in (run / "checkpoints").rglob("*"))) == before
    assert status(run, 2)["metrics"]["benchmark/images_per_second"] > 0
    assert json.loads((run / "benchmark.json").read_text())["attempt"] == 2
    page = distdl("report", "outputs/default/b", cwd=tmp_path)
    assert page.returncode == 0, page.stderr
    assert "Where a step" in (run / "report.html").read_text()


def test_scale_measures_one_and_two_ranks_once(tmp_path: Path) -> None:
    given = ("scale", *TINY[:-2], "tracking=none", *SHORT[1:], "--devices", "1,2", "--mode", "weak")
    done = distdl(*given, cwd=tmp_path, module=UNCHECKED)
    assert done.returncode == 0, done.stdout + done.stderr
    again = distdl(*given, cwd=tmp_path)
    assert again.returncode == 0 and again.stdout.count("measured before") == 2
    (folder,) = (tmp_path / "outputs/default").glob("scale-*")
    assert (folder / "scale.png").read_bytes().startswith(b"\x89PNG")
    one, two = json.loads((folder / "scale.json").read_text())["rows"]
    assert (one["efficiency"], one["devices"]) == (1, 1)
    assert two["devices"] == 2 and two["global_batch"] == 16
    assert two["efficiency"] == pytest.approx(two["rate"] / 2 / one["rate"])
    assert 0 < two["predicted"]["efficiency"] < 1


def test_a_task_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    done = distdl(*TINY, "task=benchmark", "task.steps=1", "task.windows=0", cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "task.steps" in done.stderr and "task.windows" in done.stderr
    assert not (tmp_path / "outputs").exists()
