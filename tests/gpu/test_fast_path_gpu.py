"""The fast path on a GPU: every setting trains as without it, and no step waits for the device.

Needs an NVIDIA GPU; skipped elsewhere. Not run where distdl was written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]

STEPS = 12
LOG_EVERY = 6


def losses(
    tmp_path: Path,
    *more: Any,
    side_stream: bool = True,
    fused: bool | None = None,
    **model: Any,
) -> torch.Tensor:
    """float32, per step, of resnet18 at 64 px; float32 throughout, so that ways can be compared."""
    from lightning.pytorch import Callback, Trainer
    from torchvision.models import resnet18

    from distdl.callbacks import StepMetrics
    from distdl.data import SyntheticImages
    from distdl.data.loading import distribute
    from distdl.data.sampling import TrainPosition
    from distdl.models import ImageClassifier
    from distdl.optim import optimizers

    seen: list[torch.Tensor] = []

    class Watch(Callback):
        """Between two log steps every synchronising call raises."""

        def on_train_batch_start(self, *args: Any) -> None:
            # The first steps compile and tune; a step that logs reads the loss.
            quiet = not model.get("compile") and len(seen) > 2 and (len(seen) + 1) % LOG_EVERY
            torch.cuda.set_sync_debug_mode("error" if quiet else "default")

        def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, *_: Any) -> None:
            seen.append(outputs["loss"].detach().clone())

        def teardown(self, *args: Any, **kwargs: Any) -> None:
            torch.cuda.set_sync_debug_mode("default")

    torch.manual_seed(0)
    module = ImageClassifier(resnet18(num_classes=10), num_classes=10, **model)
    node = {"_target_": "torch.optim.SGD", "lr": 0.05, "momentum": 0.9, "fused": fused}
    module.configure_optimizers = lambda: optimizers.build_optimizer(  # type: ignore[method-assign]
        module, node, global_batch=32
    )
    data = SyntheticImages(
        32, num_classes=10, image_size=64, pool_size=64, train_samples=32 * STEPS, val_samples=32
    )
    data.side_stream = side_stream
    distribute(data, rank=0, world_size=1, seed=0, position=TrainPosition())
    Trainer(
        accelerator="gpu",
        devices=1,
        max_epochs=1,
        limit_val_batches=0,
        log_every_n_steps=LOG_EVERY,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        deterministic="warn",
        default_root_dir=tmp_path,
        callbacks=[Watch(), StepMetrics(32), *more],
    ).fit(module, data)
    assert len(seen) == STEPS
    return torch.stack(seen).cpu()


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    # Convolutions too: TF32 would differ between the algorithms that each way chooses.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    return losses(tmp_path, side_stream=False, fused=False, channels_last=False)


def test_the_side_stream_changes_no_bit(tmp_path: Path) -> None:
    beside, one = (losses(tmp_path, side_stream=way) for way in (True, False))
    assert torch.equal(beside, one)


def test_the_average_of_the_weights_waits_for_nothing(tmp_path: Path) -> None:
    from distdl.callbacks import EMAWeightAveraging

    ema = EMAWeightAveraging(decay=0.5)
    losses(tmp_path, ema)
    average = ema._average_model
    assert average is not None and average.updates == int(average.n_averaged) == STEPS


@pytest.mark.parametrize(
    "given",
    [
        {"channels_last": True},
        {"fused": True, "channels_last": False},
        {"compile": "default"},
        {"compile": "reduce-overhead"},
        {"compile": "max-autotune"},
    ],
    ids=str,
)
def test_every_setting_trains_as_without_it(
    tmp_path: Path, plain: torch.Tensor, given: dict[str, Any]
) -> None:
    # 12 steps of float32 with batch norm: rounding grows from 1e-6 to some 1e-3.
    torch.testing.assert_close(losses(tmp_path, **given), plain, rtol=0, atol=1e-2)


def test_a_step_that_reads_the_device_is_caught(tmp_path: Path) -> None:
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            torch.ones((), device="cuda").item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
