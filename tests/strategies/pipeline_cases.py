"""What test_pipeline trains, alone and on several ranks.

A case of one process writes OUT/<name>.ckpt as one of several does: rank 0, by Lightning.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn
from torchvision.models import resnet18

from distdl.checkpoint import portable
from distdl.data.loading import distribute
from distdl.data.sampling import TrainPosition
from distdl.data.synthetic import SyntheticImages, _Labels
from distdl.distributed import process_group
from distdl.models import ImageClassifier
from distdl.optim.optimizers import parameter_groups
from distdl.ranks import environment
from distdl.strategies import PipelineStrategy
from distdl.strategies.pipeline.reduction import GradientReducer
from distdl.worker import build

CLASSES, SIZE = 10, 16


@dataclass(frozen=True)
class Case:
    """Rows of a step, and how it is run: alone (`strategy` None) in batches of `rows / cut`.

    After two steps NAME-2.ckpt is written, and NAME.ckpt after all of them.
    """

    strategy: dict[str, Any] | None = None
    network: str = "conv"
    rows: int = 8
    cut: int = 1
    steps: int = 4
    settings: dict[str, Any] = field(default_factory=dict)
    validate: bool = False
    ema: bool = False
    resume: str | None = None


def alone(cut: int, **more: Any) -> Case:
    return Case(cut=cut, **more)


def staged(schedule: str, **more: Any) -> Case:
    own = {"schedule": schedule, "micro_batches": 4, "balance": "parameters", "stages": 2}
    return Case(strategy={**own, **more.pop("strategy", {})}, **more)


CLIPPED = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
BF16 = {"precision": "bf16-mixed"}
CASES = {
    "alone": alone(4, validate=True),
    "gpipe": staged("gpipe"),
    "1f1b": staged("1f1b", validate=True),
    "interleaved": staged("interleaved", validate=True),
    "zero_bubble": staged("zero_bubble"),
    # A real network; its batch norms see micro-batches, and so do those of the single process.
    "resnet-alone": alone(4, network="resnet18", steps=2, settings=BF16),
    "resnet": staged("1f1b", network="resnet18", steps=2, settings=BF16, validate=True),
    "resnet-measured": staged(
        "zero_bubble", network="resnet18", steps=2, settings=BF16, strategy={"balance": "measured"}
    ),
    # 8 rows in 4 micro-batches, and that twice before the optimizer steps.
    "clipped-alone": alone(8, rows=16, settings={"gradient_clip_val": 0.05}),
    "clipped": staged("1f1b", settings=CLIPPED),
    "ema-alone": alone(4, ema=True),
    "ema": staged("1f1b", ema=True, steps=2),
    "ema-resumed": staged("gpipe", ema=True, resume="ema"),
    "resumed": staged("zero_bubble", resume="1f1b-2"),
    # In one piece: Lightning counts batches, and only distdl's Checkpointer recounts them.
    "to-alone": alone(1, resume="1f1b-2"),
    "from-alone": staged("interleaved", resume="alone-2"),
    # Four ranks.
    "twice-alone": alone(8, rows=16, settings={"gradient_clip_val": 0.05}, validate=True),
    "twice": staged("1f1b", settings={"gradient_clip_val": 0.05}, validate=True),
    "twice-zero": staged(
        "zero_bubble", rows=8, settings={"gradient_clip_val": 0.05}, strategy={"across": "nodes"}
    ),
    "twice-accumulated": staged(
        "gpipe", rows=4, settings=CLIPPED, strategy={"bucket_cap_mb": 0.002}
    ),
}


class Network(nn.Module):
    """A chain with what a real one has: norms, an in-place ReLU, pooling, a flattening."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.GroupNorm(2, 8))
        self.act = nn.ReLU(inplace=True)
        self.body = nn.Sequential(*(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4)))
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.fc = nn.Linear(32, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(self.act(self.stem(x)))
        return self.fc(torch.flatten(self.pool(x), 1))


class Classifier(ImageClassifier):
    """Two parameter groups, momentum, a schedule per step."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(parameter_groups(self, 1e-2), lr=0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Data(SyntheticImages):
    """Counts how often this process asked the data set for a sample."""

    asked = 0

    def _labels(self, num_samples: int) -> Any:
        labels, get = super()._labels(num_samples), _Labels.__getitem__

        class Counted(_Labels):
            def __getitem__(self, index: int) -> dict[str, int]:
                Data.asked += 1
                return get(self, index)

        labels.__class__ = Counted
        return labels


class Overlap:
    """How many buckets of gradients were under way when the schedule had ended."""

    seen: tuple[int, int] = (0, 0)
    finish = GradientReducer.finish

    @staticmethod
    def watched(reducer: GradientReducer) -> None:
        if reducer._active:
            Overlap.seen = len(reducer._launched), len(reducer.buckets)
        Overlap.finish(reducer)


class Record(Callback):
    """What a callback sees on each rank."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.devices: set[str] = set()

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, _: Any
    ) -> None:
        self.losses.append(float(outputs["loss"]))
        self.devices.add(batch["image"].device.type)


class Save(Callback):
    """What distdl's Checkpointer does: saves after a step, and resumes there in the data."""

    def __init__(self, path: Path, steps: int, position: TrainPosition, rows: int) -> None:
        self.path, self.steps, self.position, self.rows = path, steps, position, rows
        self.halfway = False

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.position.consumed += self.rows
        if trainer.global_step == self.steps:
            trainer.save_checkpoint(self.path, weights_only=False)
        elif trainer.global_step == 2 and not self.halfway:  # once, whatever is accumulated
            self.halfway = True
            path = self.path.with_name(f"{self.path.stem}-2.ckpt")
            trainer.save_checkpoint(path, weights_only=False)

    def state_dict(self) -> dict[str, Any]:
        return {"consumed": self.position.consumed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position.consumed = state["consumed"]


def run(name: str, case: Case, here: environment.Environment, folder: Path) -> None:
    torch.manual_seed(7)
    network = Network() if case.network == "conv" else resnet18(num_classes=CLASSES)
    module = Classifier(network, num_classes=CLASSES)
    Data.asked = 0
    data = Data(case.rows // case.cut, CLASSES, SIZE, 160, 21, pool_size=32)
    strategy = PipelineStrategy(**case.strategy) if case.strategy else "auto"
    rank, world_size = build.data_share(strategy, here) if case.strategy else (0, 1)
    position = TrainPosition()
    share = {"rank": rank, "world_size": world_size, "seed": 3, "position": position}
    distribute(data, **share)  # type: ignore[arg-type]
    accumulate = case.settings.get("accumulate_grad_batches", 1) * case.cut
    record = Record()
    rows = case.rows // case.cut * world_size
    ema = [EMAWeightAveraging(decay=0.5)] if case.ema else []
    callbacks = [record, *ema, Save(folder / f"{name}.ckpt", case.steps, position, rows)]
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        devices=here.local_world_size,
        strategy=strategy,
        plugins=[process_group.LaunchedEnvironment(here)],
        callbacks=callbacks,
        max_steps=case.steps,
        limit_val_batches=None if case.validate else 0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
        default_root_dir=folder,
        **{**case.settings, "accumulate_grad_batches": accumulate},
    )
    portable.speak_names(trainer.strategy)
    path = folder / f"{case.resume}.ckpt" if case.resume else None
    trainer.fit(module, datamodule=data, ckpt_path=path, weights_only=True if path else None)
    if case.validate:
        trainer.validate(module, datamodule=data, verbose=False)
    metrics = {k: float(v) for k, v in trainer.callback_metrics.items()}
    devices = sorted(record.devices)
    seen = process_group.gather((record.losses, metrics, devices, Data.asked, Overlap.seen))
    if here.rank == 0:
        torch.save(seen, folder / f"{name}.seen")


def run_all(folder: Path, *names: str) -> Iterator[tuple[str, Any]]:
    """On each rank of a process group."""
    warnings.filterwarnings("ignore")
    folder.mkdir(exist_ok=True)
    with patch.object(GradientReducer, "finish", Overlap.watched):
        for name in names:
            run(name, CASES[name], environment.resolve(), folder)
            yield name, True
