"""Which card a run takes, and on which stream its work goes.

Needs an NVIDIA GPU; skipped elsewhere. Not run where distdl was written.
"""

import subprocess
import warnings

import pytest
import torch
import yaml

from tests.conftest import distdl

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(600),
]
SHORT = [
    *("model=resnet18", "data=synthetic", "data.image_size=32", "data.batch_size=8"),
    *("data.train_samples=64", "data.val_samples=8", "schedule.warmup_epochs=0"),
    *("trainer.accelerator=gpu", "trainer.max_epochs=1", "tracking=none", "name=run"),
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
    assert refused.returncode == 2 and "ids count the 1 GPUs visible" in refused.stderr


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
    from distdl.data.decoding import works
    from distdl.data.images import ImageData
    from distdl.data.nvjpeg import EncodedBatch
    from distdl.data.synthetic_jpeg import jpegs
    from distdl.data.views import EvalView

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
