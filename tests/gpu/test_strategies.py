"""Trainings on an NVIDIA GPU: each strategy alone, which card and stream a run takes, its speed.

Skipped without one. The peak memory of resnet50 at 224 px in bf16 is compared with what `python -m
distdl plan` estimates, its speed with less than the goals of `python -m benchmarks.run gpu`, which
are for a machine that does nothing else. benchmarks/RESULTS_GPU.md has what was seen.
"""

import importlib.util
import json
import subprocess
import warnings

import pytest
import torch
import yaml

from tests.conftest import distdl, losses

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(900),
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
EVERY = (
    "trainer.max_steps=20",
    "checkpoint.every_n_steps=10",
    "checkpoint.keep_last=9",
    "trainer.deterministic=warn",
)
MIDDLE = "outputs/default/whole/checkpoints/epoch_000_step_00000010.ckpt"
SAME_TO = 0.1  # strategies round differently in bf16


ALONE = ["ddp", "fsdp", "fsdp strategy.offload=true", *(f"deepspeed_zero{n}" for n in "123")]


@pytest.fixture(params=[*ALONE, "deepspeed_offload"])
def strategy(request):
    """With further overrides, if any."""
    if request.param.startswith("deepspeed") and not importlib.util.find_spec("deepspeed"):
        pytest.skip("needs deepspeed")
    return request.param


def train(folder, name, *overrides):
    done = distdl(*BASE, *overrides, f"name={name}", cwd=folder, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "outputs/default" / name


def test_trains_and_resumes(strategy, tmp_path):
    """From its own checkpoint bit for bit, and DDP from it within rounding. A strategy may have
    options behind its name."""
    expected = losses(train(tmp_path, "whole", *EVERY, *f"strategy={strategy}".split()))
    assert list(expected) == list(range(1, 21))
    assert expected[20] < expected[1]
    rest = {step: expected[step] for step in range(11, 21)}
    for after in {strategy, "ddp"}:
        resume = (*f"strategy={after}".split(), f"checkpoint.resume_from={MIDDLE}")
        result = losses(train(tmp_path, after.split()[0], *EVERY, *resume))
        print(f"{strategy} -> {after}: {[result[s] - rest[s] for s in result]}")
        tolerance = 0 if after == strategy else SAME_TO
        assert result == pytest.approx(rest, rel=0, abs=tolerance)


@pytest.fixture(scope="module")
def planned():
    """Bytes on the device, by strategy, as `plan` prints them."""
    from distdl.config import compose
    from distdl.tools.measure import estimate, step_profile

    config = compose.compose(BASE)
    config.pop("hydra", None)
    machine = estimate.Machine(1, 80 * 2**30, 1e11, 1e14)
    rows = estimate.estimates(step_profile.measure(config, 64), machine)
    return {row.name: row.total for row in rows}


@pytest.mark.parametrize("strategy", ["single", "deepspeed_offload"], indirect=True)
def test_peak_memory_is_what_plan_says(strategy, planned, tmp_path):
    """Of the strategies that `plan` offers for one device."""
    short = ["trainer.max_steps=5", "trainer.limit_val_batches=0", f"strategy={strategy}"]
    lines = (train(tmp_path, "peak", *short) / "logs/metrics.jsonl").read_text().splitlines()
    peak = max(json.loads(line)["metrics"].get("perf/memory_gib", 0.0) for line in lines)
    print(f"{strategy}: peak {peak:.2f} GiB, planned {planned[strategy] / 2**30:.2f} GiB")
    assert peak * 2**30 == pytest.approx(planned[strategy], rel=0.1)


SHORT = [
    "model=resnet18",
    "data=synthetic",
    "data.image_size=32",
    "data.batch_size=8",
    "data.train_samples=64",
    "data.val_samples=8",
    "schedule.warmup_epochs=0",
    "trainer.accelerator=gpu",
    "trainer.max_epochs=1",
    "tracking=none",
    "name=run",
]
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "distdl")


@pytest.fixture
def cards():
    """UUIDs."""
    query = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()


def test_an_id_counts_what_is_visible_by_uuid(cards, tmp_path):
    options = {"cwd": tmp_path, "env": {"CUDA_VISIBLE_DEVICES": cards[-1]}}
    done = distdl(*SHORT, "trainer.devices=[0]", **options)
    assert done.returncode == 0, done.stdout + done.stderr
    launch = (tmp_path / "outputs/default/run/attempts/001/launch.yaml").read_text()
    assert yaml.safe_load(launch)["resources"]["device_ids"] == cards[-1:]
    refused = distdl(*SHORT, "trainer.devices=[1]", **options)
    assert refused.returncode == 2
    assert "ids count the 1 GPUs visible" in refused.stderr


def test_two_ranks_with_one_gpu_are_refused_by_what_nccl_reports(cards, tmp_path):
    env = {"CUDA_VISIBLE_DEVICES": cards[0]}
    done = distdl(*SHORT, "strategy=ddp", cwd=tmp_path, env=env, module=TORCHRUN, timeout=500)
    assert done.returncode != 0
    assert "has the same GPU as another rank: Duplicate GPU detected" in done.stdout + done.stderr


def test_gradients_are_accumulated_on_the_stream_of_the_step():
    """torch warns where they are not."""
    import torch.distributed as dist
    from lightning.pytorch.plugins.environments import LightningEnvironment

    from distdl.strategies import DDPStrategy

    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    try:
        environment = LightningEnvironment()
        strategy = DDPStrategy(parallel_devices=[device], cluster_environment=environment)
        model = strategy._setup_model(torch.nn.Linear(4, 4).to(device))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(3):
                model(torch.randn(2, 4, device=device)).sum().backward()
        torch.cuda.synchronize()
    finally:
        dist.destroy_process_group()


def test_nvjpeg_does_not_wait_for_the_step(monkeypatch):
    from distdl.data.images import ImageData
    from distdl.data.synthetic_jpeg import jpegs
    from distdl.images.decoding import works
    from distdl.images.nvjpeg import EncodedBatch
    from distdl.images.views import EvalView

    if not works("torchcodec"):
        pytest.skip("no torchcodec")
    files = jpegs(8, 4, 500, 375, 60_000, seed=0)
    encoded = EncodedBatch([EvalView(224, decoder="nvjpeg")(file) for file in files])
    monkeypatch.setattr(ImageData, "_device", torch.device("cuda", 0))
    data = ImageData(8, 0)
    expected = data.on_before_batch_transfer({"image": encoded}, 0)["image"].clone()
    torch.cuda.synchronize()
    end = torch.cuda.Event()
    torch.cuda._sleep(4_000_000_000)  # cycles: a second or two of a long step
    end.record()
    image = data.on_before_batch_transfer({"image": encoded}, 0)["image"]
    assert not end.query(), "the host waited for the step"
    assert torch.equal(image, expected)


def test_faster_than_a_hand_written_loop():
    from benchmarks import gpu

    result = gpu.main(repeats=3)
    print(result.markdown())
    ratios = {goal.what: goal.measured or 0.0 for goal in result.goals}
    assert ratios[gpu.AGAINST_LOOP] >= 0.99
    assert ratios[gpu.DDP_ALONE] >= 0.95
    assert 0 < ratios[gpu.OF_MEMORY] < 1, "faster than memory: the bytes of an image are wrong"


# At 8 images kernels are so short that the device waits for the next one on any machine.
@pytest.mark.parametrize("batch, bound", [(8, "host-bound"), (256, "compute-bound")])
def test_the_devices_clock_and_the_wall_agree(batch, bound, tmp_path):
    done = distdl(
        "model=resnet50",
        "data=synthetic",
        f"data.batch_size={batch}",
        "trainer.devices=1",
        "trainer.precision=bf16-mixed",
        "task=benchmark",
        "task.steps=20",
        "task.windows=3",
        "name=b",
        "tracking=none",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    result = json.loads((tmp_path / "outputs/default/b/benchmark.json").read_text())
    for side in (result["real"], result["held"]):
        # Events on the device, and the clock of the host around the whole window.
        wall = pytest.approx(batch / side["images_per_second"], rel=0.05)
        assert side["step_seconds"]["mean"] == wall
        assert sum(side["split"].values()) == wall
    # 4.09 G multiply-adds forward (torchvision's page), three times that with the backward.
    assert result["model"]["flops_per_sample"] == pytest.approx(3 * 2 * 4.09e9, rel=0.05)
    assert 0 < result["model"]["mfu"] < 1
    assert result["limits"]["dtype"] == "bfloat16"
    assert result["verdict"]["bound"] == bound
