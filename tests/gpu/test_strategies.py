"""Each strategy alone on one GPU: resnet50 at 224 px in bf16 trains, is saved, and resumes.

Needs an NVIDIA GPU; skipped elsewhere. The peak memory of the training is compared with what
`python -m distdl plan` estimates: within 10 %.
"""

import importlib.util
import json

import pytest
import torch

from tests.conftest import distdl, losses

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(900),
]
BASE = [
    *("model=resnet50", "data=synthetic", "data.batch_size=64", "data.train_samples=1280"),
    *("data.val_samples=100", "schedule.warmup_epochs=0", "trainer.accelerator=gpu"),
    *("trainer.devices=1", "trainer.precision=bf16-mixed", "trainer.max_epochs=1"),
    *("trainer.log_every_n_steps=1", "tracking=none"),
]
EVERY = ("trainer.max_steps=20", "checkpoint.every_n_steps=10", "checkpoint.keep_last=9")
MIDDLE = "outputs/default/whole/checkpoints/epoch_000_step_00000010.ckpt"
# cuDNN sums in another order each time; in bf16 that shows.
SAME_TO = 0.1


@pytest.fixture(params=["ddp", "fsdp", *(f"deepspeed_zero{n}" for n in "123"), "deepspeed_offload"])
def strategy(request):
    if request.param.startswith("deepspeed") and not importlib.util.find_spec("deepspeed"):
        pytest.skip("needs deepspeed")
    return request.param


def train(folder, name, *overrides):
    done = distdl(*BASE, *overrides, f"name={name}", cwd=folder, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "outputs/default" / name


def test_trains_and_resumes(strategy, tmp_path):
    """From its own checkpoint, and DDP from it."""
    expected = losses(train(tmp_path, "whole", *EVERY, f"strategy={strategy}"))
    assert list(expected) == list(range(1, 21)) and expected[20] < expected[1]
    for after in {strategy, "ddp"}:
        resume = (f"strategy={after}", f"checkpoint.resume_from={MIDDLE}")
        result = losses(train(tmp_path, after, *EVERY, *resume))
        assert list(result) == list(range(11, 21))
        assert max(abs(result[s] - expected[s]) for s in result) < SAME_TO


@pytest.fixture(scope="module")
def planned():
    """Bytes on the device, by strategy, as `plan` prints them."""
    from distdl.benchmark import step_profile
    from distdl.config import compose
    from distdl.planner import estimate

    config = compose.compose(BASE)
    config.pop("hydra", None)
    machine = estimate.Machine(1, 80 * 2**30, 1e11, 1e14)
    rows = estimate.estimates(step_profile.measure(config, 64), machine)
    return {row.name: row.total for row in rows}


def test_peak_memory_is_what_plan_says(strategy, planned, tmp_path):
    short = ["trainer.max_steps=5", "trainer.limit_val_batches=0", f"strategy={strategy}"]
    lines = (train(tmp_path, "peak", *short) / "logs/metrics.jsonl").read_text().splitlines()
    peak = max(json.loads(line)["metrics"].get("perf/memory_gib", 0.0) for line in lines)
    print(f"{strategy}: peak {peak:.2f} GiB, planned {planned[strategy] / 2**30:.2f} GiB")
    assert peak * 2**30 == pytest.approx(planned[strategy], rel=0.1)
