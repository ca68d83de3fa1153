"""Each strategy alone on one GPU: resnet50 at 224 px in bf16 trains, is saved, and goes on.

Needs an NVIDIA GPU; skipped elsewhere. The peak memory of the training is compared with what
`python -m distdl plan` estimates: within 10 %.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from tests.conftest import distdl, losses

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(900),
]

STRATEGIES = [
    *("ddp", "fsdp", "deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3", "deepspeed_offload"),
]
BASE = [
    "model=resnet50",
    "data=synthetic",
    "data.batch_size=64",
    "data.train_samples=1280",
    "data.val_samples=100",
    "schedule.warmup_epochs=0",
    "trainer.accelerator=gpu",
    "trainer.devices=1",
    "trainer.precision=bf16-mixed",
    "trainer.max_epochs=1",
    "trainer.log_every_n_steps=1",
    "tracking=none",
]


def has(strategy: str) -> bool:
    needs = strategy.startswith("deepspeed")
    return not needs or importlib.util.find_spec("deepspeed") is not None


EVERY = ("trainer.max_steps=20", "checkpoint.every_n_steps=10", "checkpoint.keep_last=9")
MIDDLE = "checkpoints/epoch_000_step_00000010.ckpt"
# cuDNN sums in another order each time; in bf16 that shows.
SAME_TO = 0.1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_trains_and_goes_on(strategy: str, tmp_path: Path) -> None:
    """From its own checkpoint, and DDP from it."""
    if not has(strategy):
        pytest.skip("needs deepspeed")
    whole = distdl(*BASE, *EVERY, f"strategy={strategy}", "name=whole", cwd=tmp_path, timeout=600)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    wanted = losses(tmp_path / "outputs/default/whole")
    assert list(wanted) == list(range(1, 21)) and wanted[20] < wanted[1]
    for after in {strategy, "ddp"}:
        middle = f"checkpoint.resume_from=outputs/default/whole/{MIDDLE}"
        rest = distdl(
            *(*BASE, *EVERY, f"strategy={after}", middle, f"name={after}"),
            cwd=tmp_path,
            timeout=600,
        )
        assert rest.returncode == 0, rest.stdout + rest.stderr
        got = losses(tmp_path / f"outputs/default/{after}")
        assert list(got) == list(range(11, 21))
        assert max(abs(got[s] - wanted[s]) for s in got) < SAME_TO


@pytest.fixture(scope="module")
def planned() -> dict[str, float]:
    """Bytes on the device, by strategy, as `plan` prints them."""
    from distdl.benchmark import step_profile
    from distdl.config import compose
    from distdl.planner import estimate

    config = compose.compose(BASE)
    config.pop("hydra", None)
    machine = estimate.Machine(1, 80 * 2**30, 1e11, 1e14)
    rows = estimate.estimates(step_profile.measure(config, 64), machine)
    return {row.name: row.total for row in rows}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_peak_memory_is_what_plan_says(
    strategy: str, planned: dict[str, float], tmp_path: Path
) -> None:
    if not has(strategy):
        pytest.skip("needs deepspeed")
    short = ["trainer.max_steps=5", "trainer.limit_val_batches=0", f"strategy={strategy}"]
    done = distdl(*BASE, *short, "name=peak", cwd=tmp_path, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "outputs/default/peak/logs/metrics.jsonl").read_text().splitlines()
    logged = [json.loads(line)["metrics"].get("perf/memory_gib", 0.0) for line in lines]
    print(f"{strategy}: peak {max(logged):.2f} GiB, planned {planned[strategy] / 2**30:.2f} GiB")
    assert max(logged) * 2**30 == pytest.approx(planned[strategy], rel=0.1)
