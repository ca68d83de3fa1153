"""The fast path on a GPU: nvJPEG, settings that train alike without a step that waits, and a copy
of a GPU's values for a checkpoint: of its moment, pinned, and without a wait."""

import random
import time

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torchvision.models import resnet18

from distdl.callbacks import EMAWeightAveraging, StepMetrics
from distdl.checkpoint import host_copy
from distdl.checkpoint.host_copy import HostCopy
from distdl.data import SyntheticImages
from distdl.data.synthetic_jpeg import jpegs
from distdl.images.decoding import works
from distdl.images.nvjpeg import EncodedBatch
from distdl.images.views import EvalView, TrainView
from distdl.models import ImageClassifier
from distdl.optim import optimizers
from tests.unit.sample_data import share

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]
with_torchcodec = pytest.mark.skipif(not works("torchcodec"), reason="no torchcodec")
STEPS, LOG_EVERY = 12, 6
WEIGHTS = 50_000_000  # 200 MB


def losses(tmp_path, *more, side_stream=True, fused=None, **model):
    """float32, per step, of resnet18 at 64 px, trained in float64: in float32 the rounding of one
    step grows to some 1e-2 within 12, in whatever way it trains."""
    seen = []

    class Watch(Callback):
        """Between two log steps every synchronising call raises."""

        def on_train_batch_start(self, *args):
            # The first steps compile and tune; a step that logs reads the loss.
            quiet = not model.get("compile") and len(seen) > 2 and (len(seen) + 1) % LOG_EVERY
            torch.cuda.set_sync_debug_mode("error" if quiet else "default")

        def on_train_batch_end(self, trainer, module, outputs, *_):
            seen.append(outputs["loss"].detach().clone())

        def teardown(self, *args, **kwargs):
            torch.cuda.set_sync_debug_mode("default")

    torch.manual_seed(0)
    module = ImageClassifier(resnet18(num_classes=10), num_classes=10, **model)
    node = {"_target_": "torch.optim.SGD", "lr": 0.05, "momentum": 0.9, "fused": fused}
    build = optimizers.build_optimizer
    module.configure_optimizers = lambda: build(module, node, global_batch=32)
    sizes = {"image_size": 64, "pool_size": 64, "train_samples": 32 * STEPS, "val_samples": 32}
    data = share(SyntheticImages(32, num_classes=10, **sizes))
    data.side_stream = side_stream
    quiet = ("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "logger")
    options = dict.fromkeys((*quiet, "use_distributed_sampler"), False)
    options |= {"accelerator": "gpu", "devices": 1, "max_epochs": 1, "limit_val_batches": 0}
    options |= {"log_every_n_steps": LOG_EVERY, "deterministic": "warn", "precision": "64-true"}
    callbacks = [Watch(), StepMetrics(32), *more]
    Trainer(**options, default_root_dir=tmp_path, callbacks=callbacks).fit(module, data)
    assert len(seen) == STEPS
    return torch.stack(seen).cpu()


@pytest.fixture
def plain(tmp_path):
    return losses(tmp_path, side_stream=False, fused=False, channels_last=False)


def test_the_side_stream_changes_no_bit_and_an_average_waits_for_nothing(tmp_path):
    ema = EMAWeightAveraging(decay=0.5)
    beside = losses(tmp_path, ema)
    one = losses(tmp_path, side_stream=False)
    assert torch.equal(beside, one)
    average = ema._average_model
    assert average is not None
    assert average.updates == int(average.n_averaged) == STEPS


@pytest.mark.parametrize(
    "setting",
    [
        {"channels_last": True},
        {"fused": True, "channels_last": False},
        {"compile": "default"},
        {"compile": "reduce-overhead"},
        {"compile": "max-autotune"},
    ],
    ids=str,
)
def test_every_setting_trains_as_without_it(tmp_path, plain, setting):
    torch.testing.assert_close(losses(tmp_path, **setting), plain, rtol=0, atol=1e-5)


@with_torchcodec
@pytest.mark.parametrize("kind", [EvalView, TrainView])
def test_the_gpu_sees_what_the_cpu_sees(kind):
    files = jpegs(16, 4, 500, 375, 60_000, seed=0)
    random.seed(0)
    expected = torch.stack([kind(224)(file)["image"] for file in files])
    random.seed(0)
    batch = EncodedBatch([kind(224, decoder="nvjpeg")(file) for file in files])
    images = batch.decoded(torch.device("cuda"))
    assert images.device.type == "cuda"
    assert images.dtype == torch.uint8
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert (images.cpu().float() - expected.float()).abs().mean() < 1.0


def test_a_copy_is_of_its_moment_and_keeps_sharing(tmp_path, monkeypatch):
    weights = torch.zeros(WEIGHTS, device="cuda")
    made = {}
    new = host_copy.host_memory

    def spy(size, *, pinned):
        made[size] = new(size, pinned=pinned)
        return made[size]

    monkeypatch.setattr(host_copy, "host_memory", spy)
    copy = HostCopy()
    for step in range(3):
        copy.take({"weights": weights, "half": weights[: WEIGHTS // 2], "on host": torch.ones(3)})
        weights.add_(1)  # the next step, queued at once
        copy.write(tmp_path / "copy")
        kept = torch.load(tmp_path / "copy", weights_only=True)
        assert kept["weights"].unique().tolist() == [step]
        assert kept["half"].data_ptr() == kept["weights"].data_ptr()
    assert len(made) == 2
    assert made[4 * WEIGHTS].is_pinned()


def test_the_training_thread_does_not_wait_for_the_copy():
    state = {"weights": torch.zeros(WEIGHTS, device="cuda")}
    copy = HostCopy()
    seconds = []
    for _ in range(6):  # the first one makes and pins the memory
        started = time.perf_counter()
        copy.take(state)
        seconds.append(time.perf_counter() - started)
        torch.cuda.synchronize()
    assert sorted(seconds)[2] < 0.004  # at 25 GB/s the copy itself takes 8 ms
