"""A fit that is left, so that all is built again for weights that are trained from then on."""

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers.logger import DummyLogger
from torch.utils.data import DataLoader

from distdl.loops.fit import Rebuilt
from distdl.models import ImageClassifier
from distdl.runs.checkpoints import CheckpointStore
from tests.strategies.small import Wide
from tests.unit import checkpointing

IMAGES = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(5))
FROZEN = ["stem", "body"]


class Learns(ImageClassifier):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.05)


class Notes(Callback):
    """Which hooks were called."""

    def __init__(self):
        self.called = []

    def note(self, name):
        return lambda *_, **__: self.called.append(name)

    def __getattribute__(self, name):
        noted = name.startswith("on_") or name in ("setup", "teardown")
        return self.note(name) if noted and "state" not in name else super().__getattribute__(name)


class Sees(Callback):
    """Whether what was frozen is trained, once the checkpoint is restored."""

    def on_train_start(self, trainer, module):
        self.trained = module.network.stem[0].weight.requires_grad


class Told(DummyLogger):
    def __init__(self):
        super().__init__()
        self.statuses = []

    def finalize(self, status):
        self.statuses.append(status)


def fit(folder, *, rebuild_at=None, resume=None, laid_out=False, callbacks=(), after=(), **more):
    torch.manual_seed(0)
    options = {"freeze": FROZEN, "unfreeze_at": 1, "channels_last": False}
    module = Learns(Wide(10, False), num_classes=10, **options)
    ours = checkpointing.checkpointer(folder, monitor=None)
    ours.rebuild_at = rebuild_at
    if laid_out:
        module.lay_out_all()
    rows = [{"image": image, "label": n} for n, image in enumerate(IMAGES)] * 2
    options = {"max_epochs": 3, "default_root_dir": folder, "resume": resume, **more}
    checkpointing.fit(module, [*callbacks, ours, *after], DataLoader(rows, 3), **options)


def test_a_fit_that_is_left_goes_on_as_one_that_is_not(tmp_path):
    fit(tmp_path / "whole")
    notes, told = Notes(), Told()
    with pytest.raises(Rebuilt):
        fit(tmp_path / "left", rebuild_at=1, callbacks=[notes], logger=told)
    # Torn down, and neither failed nor at the end of its training.
    assert notes.called[-1] == "teardown"
    assert not {"on_train_end", "on_fit_end", "on_exception"} & {*notes.called}
    assert told.statuses == ["success"]
    newest = CheckpointStore(tmp_path / "left").newest()
    assert newest.name == "epoch_000.ckpt"
    # A resume that was built before its checkpoint was read is left before its first batch.
    again = Notes()
    with pytest.raises(Rebuilt):
        fit(tmp_path / "left", rebuild_at=1, resume=newest, callbacks=[again])
    assert "on_train_batch_start" not in again.called
    sees = Sees()
    fit(tmp_path / "left", resume=newest, laid_out=True, after=[sees])
    assert sees.trained, "the checkpoint, in which it was frozen, does not freeze it again"
    both = (
        torch.load(tmp_path / f"{name}/last.ckpt", weights_only=True) for name in ("whole", "left")
    )
    one, other = both
    for key in ("state_dict", "optimizer_states"):
        torch.testing.assert_close(other[key], one[key], rtol=0, atol=0)
    first = torch.load(newest, weights_only=True)["state_dict"]
    assert not torch.equal(
        first["network.stem.0.weight"], one["state_dict"]["network.stem.0.weight"]
    )


def test_a_training_that_ends_before_is_not_left(tmp_path):
    fit(tmp_path, rebuild_at=1, max_epochs=1)
    fit(tmp_path, rebuild_at=3)
