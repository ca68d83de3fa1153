"""Generators that module, callbacks and data module hold: a checkpoint has their states, or the
start of the run says which it has not. With runs that are killed: multiprocess/test_own_data.py."""

import io
import logging
import random
from types import SimpleNamespace

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from distdl.data.held_generators import HeldGenerators

PERMUTED = np.random.Generator(np.random.MT19937(6))


class Noise(nn.Module):
    """A layer that draws, whose hook draws as well."""

    def __init__(self):
        super().__init__()
        self.rng = torch.Generator().manual_seed(1)
        in_hook = random.Random(2)
        self.register_forward_hook(lambda layer, inputs, out: out * in_hook.random())

    def forward(self, x):
        return x + torch.randn(x.shape, generator=self.rng)


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(0), Noise())

    def draw(self):
        return [float(self.layers(torch.ones(2)).detach().sum()), PERMUTED.random()]


class Mix(pl.Callback):
    def __init__(self, seed):
        self.rngs = [np.random.RandomState(seed), np.random.Generator(np.random.SFC64(seed))]

    def draw(self):
        return [rng.standard_normal() for rng in self.rngs]


class Data(pl.LightningDataModule):
    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng(3)
        self.rows = TensorDataset(torch.ones(2))
        self.rows.rng = random.Random(4)

    def draw(self):
        return [self.rng.random()]


def training(*more):
    callbacks = [Mix(1), Mix(2), *more]
    return SimpleNamespace(callbacks=callbacks, datamodule=Data(), lightning_module=Net())


def drawn(trainer):
    parts = [trainer.lightning_module, trainer.datamodule, *trainer.callbacks[:2]]
    return [number for part in parts for number in part.draw()]


def written(states):
    """As a checkpoint gives them back."""
    file = io.BytesIO()
    torch.save(states, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def test_what_they_draw_is_drawn_again():
    trainer = training()
    drawn(trainer)
    states = written(HeldGenerators(trainer).states())
    expected = drawn(trainer)
    resumed = training()
    assert drawn(resumed) != expected
    HeldGenerators(resumed).restore(states)
    assert drawn(resumed) == pytest.approx(expected)
    assert not [path for path in states if "rows" in path], "samples seed those of a data set"


def test_what_is_not_there_or_not_in_the_checkpoint_is_named(caplog):
    class Late(pl.Callback):
        rng = None

    late = Late()
    trainer = training(late)
    late.rng = np.random.default_rng(5)
    states = HeldGenerators(trainer).states()
    states["data.rng"] = {"bit_generator": "MT19937"}
    del states["module.layers.1.rng"]
    resumed = training(Late())
    HeldGenerators(resumed).restore(states)
    (line,) = caplog.messages
    assert line.startswith("what is drawn by ")
    for place in ("Late.0.rng", "data.rng", "module.layers.1.rng"):
        assert place in line
    assert "Mix" not in line


def test_at_another_number_of_ranks_none_draws_what_another_does():
    trainer = training()
    ranks = [HeldGenerators(trainer).states()]
    trainer.datamodule.draw()
    ranks += [HeldGenerators(trainer).states()]
    after = [training() for _ in range(3)]
    for rank, each in enumerate(after):
        HeldGenerators(each).restore_shared(ranks, seed=1, rank=rank)
    assert len({each.datamodule.draw()[0] for each in after}) == 3
    assert len({tuple(each.callbacks[0].draw()) for each in after}) == 1, "as on all ranks before"


def test_what_no_checkpoint_can_hold_is_named_at_the_start(caplog):
    class Closed:
        def set_random_state(self, seed):
            pass

    class Draws(pl.Callback):
        transform = None

        def on_train_batch_end(self, *_):
            return np.random.default_rng().random()

    caplog.set_level(logging.INFO)
    HeldGenerators(training()).name_unrepeatable()
    assert not caplog.messages
    draws = Draws()
    draws.transform = Closed()
    HeldGenerators(training(draws)).name_unrepeatable()
    (line,) = caplog.messages
    assert "Draws.0.transform (it has a set_random_state" in line
    assert "on_train_batch_end (default_rng() without a seed)" in line
