"""`task=benchmark` as people start it: under every strategy, on real ranks."""

import json
import os

import pytest

from tests.conftest import TINY, UNCHECKED, distdl, matrix_only, status

MATRIX = bool(os.environ.get("DISTDL_MATRIX"))
SHORT = ("task=benchmark", "task.warmup=2", "task.windows=1", "task.steps=3", "task.trace=2")
STRATEGIES = ("ddp", "pipeline", "fsdp", "deepspeed_zero2")
RUN = "outputs/default/b"
# A batch takes longer than a step: no benchmark may overlook that.
SLOW = """
import time
from distdl.data import SyntheticImages

class Slow(SyntheticImages):
    def train_dataloader(self):
        loader = super().train_dataloader()
        collate = loader.collate_fn
        loader.collate_fn = lambda samples: time.sleep(0.3) or collate(samples)
        return loader
"""


def run(cwd, *words):
    done = distdl(*words, cwd=cwd, module=UNCHECKED)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def measured(cwd, *words):
    out = run(cwd, *words, *SHORT)
    result = json.loads((cwd / RUN / "benchmark.json").read_text())
    assert result["verdict"]["bound"] in out
    for side in (result["real"], result["held"]):
        step = side["step_seconds"]
        assert step["count"] == 3
        assert 0 < step["median"] <= step["p95"]
        # The parts are the step: of each rank's mean, while the step is the slowest rank's.
        assert sum(side["split"].values()) == pytest.approx(step["mean"], rel=0.4)
        assert min(side["split"][phase] for phase in ("forward", "backward", "optimizer")) > 0
    # A narrow resnet10t: 24.5 MFLOP forward, and twice that backward but for the first layer.
    assert result["model"]["flops_per_sample"] == pytest.approx(73.3e6, rel=0.05)
    assert 0 < result["model"]["mfu"] < 1
    return result


@pytest.mark.parametrize("strategy", STRATEGIES if MATRIX else [])
def test_under_every_strategy_communication_is_seen(tmp_path, strategy):
    if strategy.startswith("deepspeed"):
        pytest.importorskip("deepspeed")
    result = measured(tmp_path, *TINY, "name=b", f"strategy={strategy}", "trainer.devices=2")
    setting = result["setting"]
    assert setting["strategy"] == strategy
    assert len(result["ranks"]) == 2
    assert result["held"]["split"]["communication"] > 0
    assert result["link"]["ranks"] == 2
    assert result["link"]["bandwidth"] > 0
    assert setting["global_batch"] == 8 * (1 if strategy == "pipeline" else 2)
    rate = setting["global_batch"] * 3 / result["ranks"][0]["windows"][0]["seconds"]
    assert result["real"]["images_per_second"] == pytest.approx(rate, rel=0.25)


@matrix_only
def test_a_run_with_a_slow_loader_is_measured_and_stays_what_it_was(tmp_path):
    (tmp_path / "mine.py").write_text(SLOW)
    slow = ("data._target_=mine.Slow", "project.allow=[mine]", "data.train_samples=40")
    run(tmp_path, *TINY, *slow, "name=b", "trainer.max_epochs=1")
    path = tmp_path / RUN

    def state():
        lines = (path / "logs/metrics.jsonl").read_text().splitlines()
        history = [m for m in map(json.loads, lines) if "train/loss" in m["metrics"]]
        return history, sorted(p.name for p in (path / "checkpoints").rglob("*"))

    before = state()
    result = measured(tmp_path, "resume", RUN)
    assert state() == before
    assert result["attempt"] == 2
    assert result["verdict"]["bound"] == "data-bound"
    assert result["real"]["split"]["data"] == pytest.approx(0.3, rel=0.4)
    assert result["held"]["split"]["data"] < 0.05
    assert result["communication"] is None
    assert result["link"] is None
    assert status(path, 2)["metrics"]["benchmark/images_per_second"] > 0
    run(tmp_path, "report", RUN)
    assert "Where a step" in (path / "report.html").read_text()


@pytest.mark.skipif("DISTDL_MATRIX" not in os.environ, reason="make matrix")
def test_scale_measures_one_and_two_ranks_once(tmp_path):
    words = ("scale", *TINY[:-2], "tracking=none", *SHORT[1:], "--devices", "1,2", "--mode", "weak")
    run(tmp_path, *words)
    assert run(tmp_path, *words).count("measured before") == 2
    (folder,) = (tmp_path / "outputs/default").glob("scale-*")
    assert (folder / "scale.png").read_bytes().startswith(b"\x89PNG")
    one, two = json.loads((folder / "scale.json").read_text())["rows"]
    assert (one["efficiency"], one["devices"]) == (1, 1)
    assert two["devices"] == 2
    assert two["global_batch"] == 16
    assert two["efficiency"] == pytest.approx(two["rate"] / 2 / one["rate"])
    assert 0 < two["predicted"]["efficiency"] < 1
