"""`task=benchmark` as people start it: under every strategy, on real ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TINY, UNCHECKED, distdl, status

SHORT = ("task=benchmark", "task.warmup=2", "task.windows=1", "task.steps=3", "task.trace=2")
STRATEGIES = ("ddp", "pipeline", "fsdp", "deepspeed_zero2")
RUN = "outputs/default/b"
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
            time.sleep(0.3)
            yield batch
"""


def run(cwd: Path, *words: str, **options: Any) -> str:
    done = distdl(*words, cwd=cwd, **{"module": UNCHECKED, **options})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def measured(cwd: Path, *overrides: str) -> dict[str, Any]:
    out = run(cwd, *TINY, "name=b", *SHORT, *overrides)
    result = json.loads((cwd / RUN / "benchmark.json").read_text())
    assert result["verdict"]["bound"] in out
    for side in (result["real"], result["held"]):
        step = side["step_seconds"]
        assert step["count"] == 3 and 0 < step["median"] <= step["p95"]
        # The parts are the step: of each rank's mean, while the step is the slowest rank's.
        assert sum(side["split"].values()) == pytest.approx(step["mean"], rel=0.4)
        assert min(side["split"][phase] for phase in ("forward", "backward", "optimizer")) > 0
    assert result["model"]["flops_per_sample"] > 1e8  # resnet18 at 32 pixels: 0.217 GFLOP
    assert 0 < result["model"]["mfu"] < 1
    return result


@pytest.mark.parametrize("strategy", STRATEGIES[: None if "DISTDL_MATRIX" in os.environ else 2])
def test_under_every_strategy_communication_is_seen(tmp_path: Path, strategy: str) -> None:
    if strategy.startswith("deepspeed"):
        pytest.importorskip("deepspeed")
    result = measured(tmp_path, f"strategy={strategy}", "trainer.devices=2")
    setting = result["setting"]
    assert setting["strategy"] == strategy and len(result["ranks"]) == 2
    assert result["held"]["split"]["communication"] > 0
    assert result["link"]["ranks"] == 2 and result["link"]["bandwidth"] > 0
    assert setting["global_batch"] == 8 * (1 if strategy == "pipeline" else 2)
    rate = setting["global_batch"] * 3 / result["ranks"][0]["windows"][0]["seconds"]
    assert result["real"]["images_per_second"] == pytest.approx(rate, rel=0.25)


def test_a_slow_loader_is_data_bound(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SLOW)
    result = measured(tmp_path, "data._target_=mine.Slow", "project.allow=[mine]")
    assert result["verdict"]["bound"] == "data-bound"
    assert result["real"]["split"]["data"] == pytest.approx(0.3, rel=0.4)
    assert result["held"]["split"]["data"] < 0.05
    assert result["communication"] is None and result["link"] is None


def test_a_run_is_measured_and_stays_what_it_was(tmp_path: Path) -> None:
    path = tmp_path / RUN
    run(tmp_path, *TINY, "data.train_samples=40", "name=b", "trainer.max_epochs=1")

    def state() -> tuple[list[Any], list[str]]:
        lines = (path / "logs/metrics.jsonl").read_text().splitlines()
        history = [m for m in map(json.loads, lines) if "train/loss" in m["metrics"]]
        return history, sorted(p.name for p in (path / "checkpoints").rglob("*"))

    before = state()
    run(tmp_path, "resume", RUN, *SHORT)
    assert state() == before
    assert status(path, 2)["metrics"]["benchmark/images_per_second"] > 0
    assert json.loads((path / "benchmark.json").read_text())["attempt"] == 2
    run(tmp_path, "report", RUN)
    assert "Where a step" in (path / "report.html").read_text()


def test_scale_measures_one_and_two_ranks_once(tmp_path: Path) -> None:
    words = ("scale", *TINY[:-2], "tracking=none", *SHORT[1:], "--devices", "1,2", "--mode", "weak")
    run(tmp_path, *words)
    assert run(tmp_path, *words).count("measured before") == 2
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
