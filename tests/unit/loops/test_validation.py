"""A signal in a validation: the state of before it is saved, and a resume ends as a training that
was never disturbed, in every value of its last checkpoint."""

from __future__ import annotations

import itertools
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distdl.callbacks import Progress
from distdl.data.loading import distribute
from distdl.job import JobState
from distdl.ranks.stopping import Stopped
from distdl.runs.checkpoints import CheckpointStore, manifest_at
from tests.unit import checkpointing

BATCHES, VAL_BATCHES = 6, 4


class Net(checkpointing.OneWeight):
    """Draws random numbers everywhere; counts its validation batches, in the checkpoint and in a
    buffer; at the end of a validation it needs all of its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.register_buffer("validated", torch.zeros((), dtype=torch.int64))
        self.count = 0
        self.outputs = [[], []]

    def training_step(self, batch, batch_idx):
        return (self.layers(batch[0] + torch.rand(())) ** 2).mean() + self.weight.square().sum()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.count += 1
        self.validated += 1
        loss = self.layers(batch[0] + torch.rand(())).mean() ** 2
        self.outputs[dataloader_idx].append(loss.reshape(1))
        self.log("val_loss", loss, add_dataloader_idx=dataloader_idx > 0)

    def on_validation_epoch_end(self):
        seen = self.outputs
        self.outputs = [[], []]
        loaders = self.trainer.val_dataloaders
        for each in range(len(loaders) if isinstance(loaders, list) else 1):
            torch.cat(seen[each])
        assert self.trainer.sanity_checking or len(seen[0]) == VAL_BATCHES, "all are needed"

    def on_save_checkpoint(self, checkpoint):
        checkpoint["count"] = self.count

    def on_load_checkpoint(self, checkpoint):
        self.count = checkpoint["count"]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01, momentum=0.9)


class Plateau(Net):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": plateau, "monitor": "val_loss"}


class OnTraining(Net):
    """What it logs over an epoch of training decides the rate and the end."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss.detach(), on_step=True, on_epoch=True)
        self.log("lowest", loss.detach(), on_step=False, on_epoch=True, reduce_fx="min")
        return loss

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": plateau, "monitor": "loss_epoch"}


class ByHand(Plateau):
    """Steps its optimizer, and its schedule at the end of each validation."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            self.lr_schedulers().step(float(torch.cat(self.outputs[0]).mean()))
        super().on_validation_epoch_end()


class ScheduleFree(torch.optim.SGD):
    """Exchanges weights by arithmetic, which rounds."""

    def eval(self):
        self._move(1 - 1 / 0.9, False)

    def train(self):
        self._move(1 - 0.9, True)

    def step(self, closure=None):
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("z", torch.zeros_like(p)).add_(p.detach(), alpha=0.3)

    @torch.no_grad()
    def _move(self, weight, trains):
        for group in self.param_groups:
            if group.setdefault("train_mode", True) != trains:
                group["train_mode"] = trains
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], weight)


class WithoutSchedule(Net):
    def configure_optimizers(self):
        return ScheduleFree(self.parameters(), 0.01)

    def on_validation_model_eval(self):
        super().on_validation_model_eval()
        self.optimizers().optimizer.eval()

    def on_validation_model_train(self):
        super().on_validation_model_train()
        self.train()
        self.optimizers().optimizer.train()


class Swaps(Callback):
    """A user's moving average, with a generator and a count of its own."""

    def __init__(self, start="on_validation_start", end="on_validation_end"):
        self.mean = None
        self.count = 0
        self.generator = torch.Generator().manual_seed(1)
        setattr(self, start, self.exchange)
        setattr(self, end, self.exchange)

    def on_train_batch_end(self, trainer, module, *_):
        weights = [p.detach() for p in module.parameters()]
        self.mean = self.mean or [torch.zeros_like(p) for p in weights]
        torch._foreach_lerp_(self.mean, weights, 0.1)

    def exchange(self, trainer, module):
        if trainer.sanity_checking:
            return
        for mean, weight in zip(self.mean, module.parameters(), strict=True):
            kept = weight.detach().clone()
            weight.data.copy_(mean)
            mean.copy_(kept)

    def on_validation_batch_end(self, trainer, *_):
        self.count += 1
        torch.rand((), generator=self.generator)

    def state_dict(self):
        return {"mean": self.mean, "count": self.count, "generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.mean = state["mean"]
        self.count = state["count"]
        self.generator.set_state(state["generator"])


class Late(Swaps):
    """Puts the weights back only in the next epoch: after a validation cut short, never."""

    def __init__(self):
        super().__init__(end="on_train_epoch_start")

    def exchange(self, trainer, module):
        if self.mean:
            super().exchange(trainer, module)


class Signal(Callback):
    """Asks to end in batch `at` of the validations, over all of them."""

    def __init__(self, ours, at):
        self.ours = ours
        self.at = at
        self.batches = itertools.count()

    def on_validation_batch_start(self, trainer, *_):
        if next(self.batches) == self.at:
            self.ours.stop.state = JobState.PREEMPTED
            self.ours.stop.signal = "SIGTERM"


class Loaders(LightningDataModule):
    def __init__(self, train, val):
        super().__init__()
        self.train = train
        self.val = val

    def train_dataloader(self):
        return self.train

    def val_dataloader(self):
        return self.val


def stops(name):
    return EarlyStopping(name, patience=2, check_on_train_epoch_end=True)


INSIDE = {"val_check_interval": 2}
EMA, SWA = EMAWeightAveraging, StochasticWeightAveraging
# Module, callbacks, arguments of the Trainer, and the reason (and step) of the last checkpoint that
# the first attempt leaves.
CASES: dict[str, Any] = {
    "nothing": (Net, list, {}, "signal"),
    "ema": (Net, lambda: [EMA(decay=0.5)], {}, "signal"),
    "ema inside": (Net, lambda: [EMA(decay=0.5)], INSIDE, "signal"),
    "swa": (Net, lambda: [SWA(0.01, swa_epoch_start=1)], {}, "signal"),
    "own average": (Net, lambda: [Swaps()], {}, "signal"),
    "own average inside": (Net, lambda: [Swaps()], INSIDE, "signal"),
    "plateau": (Plateau, lambda: [EarlyStopping("val_loss", patience=1)], {}, "signal"),
    "training metrics": (OnTraining, lambda: [stops("lowest")], {}, "signal"),
    "training metrics inside": (OnTraining, lambda: [stops("lowest")], INSIDE, "signal"),
    "by hand": (ByHand, list, INSIDE, "signal"),
    "two loaders": (Net, lambda: [EMA(decay=0.5)], {"loaders": 2}, "signal"),
    # What cannot be cut short ends first; of what is not as it was, nothing is saved.
    "accumulated": (
        Net,
        list,
        {"accumulate_grad_batches": 2, "val_check_interval": 3},
        "signal",
    ),
    "schedule-free": (WithoutSchedule, list, {}, "epoch 12"),
    "not put back": (Net, lambda: [Late()], {}, "epoch 6"),
}


def fit(folder: Path, case: str, signal: int | None = None, resume=None):
    module, callbacks, arguments, _ = CASES[case]
    options = {"max_epochs": 3, "num_sanity_val_steps": 1, **arguments}
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(BATCHES * 2, 3, generator=torch.Generator().manual_seed(0)))
    val = [DataLoader(data, 3, shuffle=True) for _ in range(options.pop("loaders", 1))]
    ours = checkpointing.checkpointer(folder / "checkpoints", monitor="val_loss", mode="min")
    others = [*callbacks(), Signal(ours, signal), ours]
    loaders = Loaders(DataLoader(data, 2, shuffle=True), val if len(val) > 1 else val[0])
    distribute(loaders, rank=0, world_size=1, seed=0, position=ours.position)
    checkpointing.fit(module(), others, loaders, resume=resume, default_root_dir=folder, **options)


def newest(folder: Path) -> Path:
    path = CheckpointStore(folder / "checkpoints").newest()
    assert path is not None
    return path


def differing(one: Any, other: Any, where: str = "") -> list[str]:
    """The places at which two checkpoints differ."""
    if isinstance(one, dict) and one.keys() == other.keys():
        return [name for key in one for name in differing(one[key], other[key], f"{where}.{key}")]
    if isinstance(one, list | tuple) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [name for n, (a, b) in pairs for name in differing(a, b, f"{where}.{n}")]
    same = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    return [] if same else [where]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """case -> the last checkpoint of an undisturbed training."""
    folder = tmp_path_factory.mktemp("whole")

    def of(case):
        if not (folder / case).exists():
            fit(folder / case, case)
        return torch.load(newest(folder / case), weights_only=False)

    return of


@pytest.mark.parametrize("case", CASES)
def test_a_resume_ends_as_if_undisturbed(case, whole, tmp_path):
    # In the second batch of the second validation; batch 0 is that of the sanity check. Where
    # batches are accumulated: of the first one, between two steps.
    loaders = CASES[case][2].get("loaders", 1)
    signal = 2 if case == "accumulated" else loaders * (1 + VAL_BATCHES) + 1
    with pytest.raises(Stopped):
        fit(tmp_path, case, signal)
    saved = manifest_at(newest(tmp_path))
    assert f"{saved['reason']} {saved['step']}".startswith(CASES[case][3])
    fit(tmp_path, case, resume=newest(tmp_path))
    assert not differing(whole(case), torch.load(newest(tmp_path), weights_only=False))


def test_it_leaves_no_file_and_no_line_of_its_own(tmp_path, caplog, monkeypatch):
    """The user's ModelCheckpoint saves nothing, as its metric was not measured, and the progress
    shows no result."""
    more = {"enable_checkpointing": True}
    files = ModelCheckpoint(tmp_path / "own", monitor="val_loss", save_top_k=-1)
    monkeypatch.setitem(CASES, "own files", (Net, lambda: [files, Progress(bar=False)], more, ""))
    with pytest.raises(Stopped), caplog.at_level("INFO", "distdl"):
        fit(tmp_path, "own files", signal=1 + VAL_BATCHES + 1)
    assert len([*(tmp_path / "own").iterdir()]) == 1, "of the first validation"
    assert caplog.text.count("val_loss") == 1
    assert "Net.on_validation_epoch_end failed in a validation that was cut short" in caplog.text


def test_one_that_is_due_by_time_is_repeated(tmp_path, monkeypatch):
    """Also if it would not be due in the resumed run."""
    for interval in (timedelta(0), timedelta(hours=1)):
        more = {"val_check_interval": interval, "num_sanity_val_steps": 0}
        monkeypatch.setitem(CASES, str(interval), (Net, list, more, ""))
    with pytest.raises(Stopped):
        fit(tmp_path, "0:00:00", signal=1)
    fit(tmp_path, "1:00:00", resume=newest(tmp_path))
    assert torch.load(newest(tmp_path), weights_only=False)["count"] == VAL_BATCHES


def test_a_sanity_check_ends_at_once(tmp_path):
    """A resumed run has none: "not put back" above, which resumes from an epoch's end."""
    with pytest.raises(Stopped):
        fit(tmp_path, "nothing", signal=0)
    assert CheckpointStore(tmp_path / "checkpoints").newest() is None
