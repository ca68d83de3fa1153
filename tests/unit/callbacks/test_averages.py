"""Validations and checkpoints of a schedule-free optimizer: averages, with statistics that fit."""

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from schedulefree import SGDScheduleFree
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distdl.callbacks.averages import AveragedWeights
from distdl.checkpoint.settled import KEY, refuse_unsettled
from distdl.data.loading import distribute
from distdl.models.weights import read_weights
from distdl.util.errors import UserError
from tests.unit import checkpointing

ROWS, BATCH = 320, 16


def samples(seed):
    """Two classes that lie apart in one of eight directions."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(ROWS, 8, generator=generator)
    labels = torch.arange(ROWS) % 2
    rows[:, 0] += labels * 3.0
    return TensorDataset(rows, labels)


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        first = nn.Linear(8, 32), nn.BatchNorm1d(32, momentum=0.01), nn.ReLU(), nn.Dropout(0.2)
        self.layers = nn.Sequential(*first, nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 2))
        self.accuracy = []
        self.validated = []
        self.losses = []
        self.seen = 0

    def training_step(self, batch, batch_idx):
        self.seen += 1
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.losses.append(loss.detach())
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_validation_epoch_start(self):
        self.validated.append({k: v.clone() for k, v in self.state_dict().items()})
        self.right = 0

    def validation_step(self, batch, batch_idx):
        self.right += int((self.layers(batch[0]).argmax(1) == batch[1]).sum())

    def on_validation_epoch_end(self):
        self.accuracy.append(self.right / ROWS)
        self.log("val_acc", self.right / ROWS)

    def configure_optimizers(self):
        optimizer = SGDScheduleFree(self.parameters(), lr=1.0)
        optimizer.train()
        return optimizer


class Data(LightningDataModule):
    def train_dataloader(self):
        return DataLoader(samples(0), BATCH, shuffle=True)

    def val_dataloader(self):
        # Else torch would draw a seed for its workers where dropout draws.
        return DataLoader(samples(1), 64, generator=torch.Generator())


class Saves(Callback):
    """A user's own checkpoint between two steps."""

    def __init__(self, path, at):
        self.path = path
        self.at = at

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.at:
            trainer.save_checkpoint(self.path)


def fit(folder, *callbacks, resume=None, every_n_steps=None, **arguments):
    module = Net()
    monitor = None if arguments.get("limit_val_batches") == 0 else "val_acc"
    settings = {"monitor": monitor, "mode": "max", "every_n_steps": every_n_steps}
    ours = checkpointing.checkpointer(folder, **settings)
    data = Data()
    distribute(data, rank=0, world_size=1, seed=0, position=ours.position)
    options = {"max_epochs": 2, "num_sanity_val_steps": 0, "val_check_interval": 5, **arguments}
    torch.manual_seed(1)
    trainer = checkpointing.fit(
        module,
        [AveragedWeights(), *callbacks, ours],
        data,
        resume=resume,
        default_root_dir=folder,
        **options,
    )
    return module, trainer


def test_a_validation_changes_no_bit_of_the_training_and_sees_the_averages(tmp_path):
    module, trainer = fit(tmp_path / "validated")
    without, _ = fit(tmp_path / "not", limit_val_batches=0)
    assert len(module.accuracy) == 8
    assert len(module.losses) == module.seen == 40, "what computes statistics is no step"
    assert torch.equal(torch.stack(module.losses), torch.stack(without.losses))
    mean = float(torch.stack(module.losses[20:]).mean())
    assert trainer.callback_metrics["train_loss_epoch"].item() == pytest.approx(mean)
    for name, value in module.state_dict().items():  # after the training both have the average
        if "running" not in name:
            assert torch.equal(value, without.state_dict()[name])
    last = torch.load(tmp_path / "validated/last.ckpt", weights_only=True)
    assert last[KEY]["settled"]
    for name, value in module.validated[-1].items():
        assert torch.equal(value, last["state_dict"][name]), name
    state = last["optimizer_states"][0]["state"]
    assert not torch.equal(state[0]["y"], last["state_dict"]["layers.0.weight"])


def test_without_the_statistics_computed_again_the_accuracy_is_wrong(tmp_path, monkeypatch):
    right, _ = fit(tmp_path / "right", max_epochs=1)
    monkeypatch.setattr("distdl.callbacks.averages.measured", lambda trainer, norms: {})
    wrong, _ = fit(tmp_path / "wrong", max_epochs=1)
    assert right.accuracy[0] > wrong.accuracy[0] + 0.1
    assert min(right.accuracy) > 0.85


@pytest.mark.parametrize(
    ("every", "file", "validations"),
    [(5, "epoch_000_step_00000005", 7), (7, "epoch_000_step_00000014", 6), (7, "epoch_000", 4)],
)
def test_a_resume_is_exact(every, file, validations, tmp_path):
    whole, _ = fit(tmp_path / "whole", every_n_steps=every)
    again, _ = fit(tmp_path / "again", resume=tmp_path / f"whole/{file}.ckpt")
    assert len(again.accuracy) == validations
    assert again.accuracy == whole.accuracy[-validations:]
    resumed = torch.load(tmp_path / "again/last.ckpt", weights_only=True)
    wanted = torch.load(tmp_path / "whole/last.ckpt", weights_only=True)
    assert_same(wanted["state_dict"], resumed["state_dict"])
    assert_same(wanted["optimizer_states"][0]["state"], resumed["optimizer_states"][0]["state"])
    assert_same(wanted[KEY]["statistics"], resumed[KEY]["statistics"])


def assert_same(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_what_was_saved_between_two_steps_is_to_go_on_from_alone(tmp_path):
    fit(tmp_path / "ours", Saves(tmp_path / "between.ckpt", 7), max_epochs=1)
    saved = torch.load(tmp_path / "between.ckpt", weights_only=True)
    assert not saved[KEY]["settled"]
    with pytest.raises(UserError, match=r"between.ckpt: its weights are averages"):
        refuse_unsettled(saved, "between.ckpt")
    with pytest.raises(UserError, match="was saved between two steps"):
        read_weights(tmp_path / "between.ckpt")
    assert read_weights(tmp_path / "ours/best.ckpt")


def test_a_loader_that_does_not_give_its_batches_again_is_refused(tmp_path):
    class Streamed(Data):
        def train_dataloader(self):
            return list(DataLoader(samples(0), BATCH))

    module = Net()
    ours = checkpointing.checkpointer(tmp_path, monitor=None)
    with pytest.raises(UserError, match="does not give batches again"):
        checkpointing.fit(
            module, [AveragedWeights(), ours], Streamed(), max_epochs=1, default_root_dir=tmp_path
        )
    assert module.seen == 0
