"""What callbacks change on layers comes back with a resume, or is named."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BaseFinetuning, ModelPruning
from torch import nn
from torch.utils.data import DataLoader

from distdl.callbacks import ModuleState
from distdl.callbacks.module_state import apply, for_inference, settings_of
from distdl.loops.trainer import Trainer
from distdl.runs.checkpoints import CheckpointStore
from distdl.util.errors import UserError
from distdl.worker.initial_state import InitialState
from tests.unit import checkpointing


class Scale(nn.Module):
    """A class of the user's."""

    def __init__(self):
        super().__init__()
        self.factor = 1.0
        self.count = 0
        self.register = None

    def forward(self, x):
        self.register = 3  # not a number of the training
        return x * self.factor


class Net(checkpointing.OneWeight):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Dropout(0.1))
        self.head = nn.Sequential(nn.LeakyReLU(), Scale(), nn.LazyLinear(1))
        self.register_buffer("temperature", torch.ones(()))

    def training_step(self, batch, batch_idx):
        return self.head(self.backbone(batch[:, None])).square().mean() + self.weight.sum()

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.1)


class Phased(Net):
    def __init__(self):
        super().__init__()
        self.phase = 1
        self.cached = None

    def training_step(self, batch, batch_idx):
        # No number of the training either.
        self.cached = 4
        self.new = 5
        return super().training_step(batch, batch_idx)


class NotLazy(Net):
    def __init__(self):
        super().__init__()
        self.head = nn.Sequential(nn.LeakyReLU(), nn.Linear(4, 1))


class Freezes(BaseFinetuning):
    """As in the Lightning documentation: frozen at first, trained from the second epoch on."""

    def freeze_before_training(self, module):
        self.freeze(module.backbone, train_bn=False)

    def finetune_function(self, module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.backbone, optimizer, train_bn=False)


class At(Callback):
    """Does something to the module in a hook: in the second epoch, or always."""

    def __init__(self, do, hook="on_train_epoch_start", always=False):
        def run(trainer, module, *_: Any, **__: Any) -> None:
            if always or trainer.current_epoch == 1:
                do(module)

        setattr(self, hook, run)


def sets(path: str, **values: Any) -> Any:
    return lambda m: vars(m.get_submodule(path)).update(values)


RESTORED = {
    "freezes batch norm": Freezes,
    "track_running_stats": lambda: At(sets("backbone.1", track_running_stats=False)),
    "momentum": lambda: At(sets("backbone.1", momentum=None, eps=0.5)),
    "dropout": lambda: At(sets("backbone.2", p=np.float64(0.75)), "on_train_batch_end"),
    "slope": lambda: At(sets("head.0", negative_slope=0.3)),
    "eval": lambda: At(lambda m: m.backbone.eval()),
    "eval of one": lambda: At(lambda m: m.backbone[2].eval(), "on_train_batch_end"),
    "a buffer": lambda: At(lambda m: m.temperature.requires_grad_()),
}


def fit(folder: Path, module, *callbacks: Callback, resume: Path | None = None, epochs: int = 3):
    """Three batches an epoch; a checkpoint after each."""
    modules = ModuleState(module)
    ours = checkpointing.checkpointer(folder, modules=modules, every_n_steps=1)
    options = {"limit_val_batches": 0, "num_sanity_val_steps": 0, "max_epochs": epochs}
    data = DataLoader(torch.linspace(0, 2, 4).repeat(3), 4)  # the same batch each time
    checkpointing.fit(module, [modules, *callbacks, ours], data, resume=resume, **options)
    return module


def seen(module) -> Any:
    buffers = {name: b.requires_grad for name, b in module.named_buffers()}
    return settings_of(module), buffers, {k: v.tolist() for k, v in module.state_dict().items()}


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory):
    return seen(fit(tmp_path_factory.mktemp("unchanged"), Net()))


@pytest.mark.parametrize("name", RESTORED)
def test_a_resume_is_as_the_undisturbed_run(tmp_path, caplog, unchanged, name):
    """From inside the second epoch, and from its end."""
    whole = seen(fit(tmp_path / "whole", Net(), RESTORED[name]()))
    assert name == "freezes batch norm" or whole != unchanged
    for name_of_file in ("epoch_001_step_00000005", "epoch_001"):
        path = tmp_path / f"whole/{name_of_file}.ckpt"
        folder = tmp_path / name_of_file
        assert seen(fit(folder, Net(), RESTORED[name](), resume=path)) == whole
    assert not named(caplog)


def named(caplog) -> list[str]:
    records = [r for r in caplog.records if r.name == "distdl.callbacks.module_state"]
    return [record.getMessage() for record in records]


def nothing(*_: Any) -> None:
    pass


def adds_layers(module) -> None:
    module.aux = nn.Sequential(nn.Linear(1, 2), nn.ReLU())


def sets_layer(module, name: str, layer) -> None:
    module.head._modules[name] = layer


LOST = {
    "an attribute": (lambda m: sets("head.1", factor=0.5)(m), "the value of head.1.factor"),
    "of the module": (lambda m: setattr(m, "phase", 2), "the value of phase"),
    "a hook": (lambda m: m.backbone[0].register_forward_hook(nothing), "the hook nothing on back"),
    "a layer": (lambda m: m.head.append(nn.Identity()), "the layer head.3 (Identity)"),
    "another layer": (lambda m: sets_layer(m, "0", nn.ELU()), "the layer head.0 (ELU)"),
    "no layer": (lambda m: m.backbone.__delitem__(2), "the removal of backbone.2"),
}


@pytest.mark.parametrize("name", LOST)
def test_what_cannot_be_restored_is_named_once_and_by_a_resume(tmp_path, caplog, name):
    do, text = LOST[name]
    fit(tmp_path / "whole", Phased(), At(do))
    (line,) = named(caplog)
    assert line.startswith(f"no checkpoint holds, and a resume starts without: {text}"), line
    last = CheckpointStore(tmp_path / "whole").newest()
    caplog.clear()
    fit(tmp_path / "on", Phased(), resume=last, epochs=4)
    (line,) = named(caplog)
    assert line.startswith(f"the checkpoint does not hold, and this resume goes on without: {text}")
    caplog.clear()
    made_again = At(do, "on_train_start", always=True)
    fit(tmp_path / "again", Phased(), made_again, resume=last, epochs=4)
    assert not [line for line in named(caplog) if line.startswith("the checkpoint")]


def test_layers_that_come_late_are_named_by_the_first_checkpoint(tmp_path, caplog):
    """As the online head of Lightning's Barlow Twins tutorial."""
    folder = tmp_path / "late"
    fit(folder, Net(), At(adds_layers, "on_fit_start", always=True))
    (line,) = named(caplog)
    assert line.startswith("aux.0 came late: a resume will refuse this checkpoint. Create ")
    last = CheckpointStore(folder).newest()
    with pytest.raises(UserError) as error:
        resumed(Net(), last)
    assert "aux.0 came into the model" in str(error.value)
    assert "configure_model" in str(error.value)
    caplog.clear()
    # In time: in `setup`.
    fit(tmp_path / "early", Net(), At(adds_layers, "setup", always=True))
    assert not named(caplog)


def resumed(module, path: Path) -> None:
    """What loads the weights in a command."""
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.strategy.connect(module)
    run = SimpleNamespace(path=path.parent)
    start = InitialState(SimpleNamespace(trainer=trainer, module=module, run=run), str(path))
    start.weights(torch.load(path, weights_only=True), strict=True)


def test_weights_that_a_callback_hides_from_the_checkpoint_are_no_loss(tmp_path, caplog):
    pruning = ModelPruning("l1_unstructured", parameters_to_prune=None, amount=0.5)
    fit(tmp_path, NotLazy(), pruning)
    assert not named(caplog)


def test_an_evaluation_has_the_settings_and_no_training_mode(tmp_path):
    slope = At(lambda m: (sets("head.0", negative_slope=0.3)(m), m.backbone.eval()))
    fit(tmp_path, Net(), slope)
    module = Net()
    newest = CheckpointStore(tmp_path).newest()
    apply(module, for_inference(torch.load(newest, weights_only=True)))
    assert module.head[0].negative_slope == 0.3
    assert module.backbone.training
