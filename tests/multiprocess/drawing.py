"""What test_own_data trains; copied into a project's folder as mine.py. Each data set draws in its
own way, dropout draws in each stage of a pipeline, and module, callback and data module draw by
generators of their own.

`$KILL_AT="RANK BATCH"`: that rank is killed with -9 when that batch begins. `$STAGES`: the ranks
are stages of one pipeline, and share the data.
"""

import functools
import os
import random
import signal

import lightning.pytorch as pl
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
SHARE, SHARES = (0, 1) if "STAGES" in os.environ else (RANK, RANKS)  # of the data
COUNT, GLOBAL_BATCH = 64, 8
GLOBAL = np.random.default_rng()


class Kill(pl.Callback):
    """Also draws, by a generator of its own."""

    def __init__(self):
        self.rng = random.Random(2)

    def on_train_batch_start(self, trainer, module, received, *_):
        received["x"] *= 1 + self.rng.random()
        batch = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        if os.environ.get("KILL_AT") == f"{RANK} {batch}":
            os.kill(os.getpid(), signal.SIGKILL)


class Randomizable:
    """As MONAI's: one generator for all, until each is given its own."""

    R = np.random.RandomState()

    def set_random_state(self, seed=None, state=None):
        self.R = np.random.RandomState(seed)
        return self


class Noise(Randomizable):
    def __call__(self, row):
        return row + self.R.standard_normal(row.shape).astype("float32")


class Flip(Noise):
    def __call__(self, row):
        return -row if self.R.rand() < 0.5 else row


class Compose(Randomizable):
    def __init__(self, *transforms):
        self.transforms = transforms
        self.set_random_state(int(torch.randint(1 << 30, ())))

    def set_random_state(self, seed=None, state=None):
        super().set_random_state(seed)
        for each in self.transforms:
            each.set_random_state(self.R.randint(1 << 30))
        return self

    def __call__(self, row):
        return functools.reduce(lambda value, each: each(value), self.transforms, row)


class Lazy:
    """Makes its generator when it is first called, as one does who knows of workers."""

    rng = None

    def __call__(self, row):
        if self.rng is None:
            self.rng = np.random.default_rng()
        return row * self.rng.random(dtype="float32")


class Entropy:
    def __call__(self, row):
        return row * np.random.default_rng().random(dtype="float32")


def in_closure():
    generator = torch.Generator()
    generator.seed()
    return lambda row: row + torch.randn(row.shape, generator=generator).numpy()


TRANSFORMS = {
    "plain": lambda: lambda row: row,
    "torch": lambda: lambda row: row + torch.randn(row.shape).numpy(),
    "numpy": lambda: lambda row: row * np.random.rand(*row.shape).astype("float32"),
    "random": lambda: lambda row: row * random.random(),
    "own": lambda: Noise().set_random_state(random.randrange(1 << 30)),
    "class": Noise,
    "global": lambda: lambda row: row * GLOBAL.random(dtype="float32"),
    "monai": lambda: Compose(Noise(), Flip()),
    "lazy": Lazy,
    "closure": in_closure,
    "entropy": Entropy,
}


class Rows(TensorDataset):
    """A subclass that draws, of a class that does not."""

    def __init__(self, transform):
        super().__init__(torch.randn(COUNT, 8, generator=torch.Generator().manual_seed(0)))
        self.transform = transform

    def __getitem__(self, index):
        (row,) = super().__getitem__(index)
        x = torch.as_tensor(self.transform(row.numpy())).float()
        return {"x": x, "y": row.sum(0, keepdim=True)}


class Stream(IterableDataset):
    """Keeps its place, and its generator; each rank its own."""

    shards_itself = True

    def __init__(self, length=True):
        self.place = 0
        self.is_restored = False
        self.rng = np.random.default_rng(SHARE)
        self.rows = Rows(lambda row: row + self.rng.standard_normal(8).astype("float32"))
        if length:
            type(self).__len__ = lambda self: COUNT // SHARES
        elif hasattr(Stream, "__len__"):
            del Stream.__len__

    def __iter__(self):
        if not self.is_restored:
            self.place = 0
        self.is_restored = False
        while self.place < COUNT // SHARES:
            self.place += 1
            yield self.rows[SHARE + SHARES * (self.place - 1)]

    def state_dict(self):
        return {"place": self.place, "rng": dict(self.rng.bit_generator.state)}

    def load_state_dict(self, state):
        self.place = state["place"] % (COUNT // SHARES)
        self.is_restored = True
        self.rng.bit_generator.state = state["rng"]


class Mixing:
    """Mixes each batch, by a generator of its own and the global ones."""

    def __init__(self):
        self.rng = np.random.default_rng()

    def __call__(self, samples):
        x, y = (torch.stack([sample[key] for sample in samples]) for key in "xy")
        share = self.rng.random() * random.random() * np.random.rand() * float(torch.rand(()))
        return {"x": x + share * x.flip(0), "y": y}


class Data(pl.LightningDataModule):
    """`kind`: of TRANSFORMS, perhaps behind another word."""

    def __init__(self, kind="plain", workers=0, persistent=False):
        super().__init__()
        self.how, _, self.kind = f" {kind}".rpartition(" ")
        self.workers = {"num_workers": workers, "persistent_workers": persistent}
        self.size = GLOBAL_BATCH // SHARES
        self.rng = np.random.RandomState(3)

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return {**batch, "x": batch["x"] * (1 + self.rng.rand())}

    def train_dataloader(self):
        size = self.size
        how = self.how.strip()
        rows = Rows(TRANSFORMS[self.kind]()) if self.kind in TRANSFORMS else None
        if how == "stateful":
            from torchdata.stateful_dataloader import StatefulDataLoader

            if self.kind == "unsized":  # each worker would give it all
                self.workers["num_workers"] = min(1, self.workers["num_workers"])
            if self.kind in ("stream", "unsized"):
                return StatefulDataLoader(Stream(self.kind == "stream"), size, **self.workers)
            return StatefulDataLoader(rows, size, shuffle=True, **self.workers)
        more = {"collate_fn": Mixing()} if how == "mixed" else {}
        if how == "sharded":
            return DataLoader(rows, size, sampler=DistributedSampler(rows, SHARES, SHARE))
        if self.kind == "stream":
            return DataLoader(Stream(), size, **self.workers)
        return DataLoader(rows, size, shuffle=True, **self.workers, **more)

    def val_dataloader(self):
        """Its workers may stay as well, and draw nothing that the training would draw."""
        return DataLoader(Rows(TRANSFORMS["plain"]()), self.size, **self.workers)


class Positioned(Data):
    """Keeps its own place in the epoch."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.stream = Stream()

    def train_dataloader(self):
        return DataLoader(self.stream, self.size)

    def state_dict(self):
        return self.stream.state_dict()

    def load_state_dict(self, state):
        self.stream.load_state_dict(state)


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        first = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Tanh())
        self.rngs = {"torch": torch.Generator().manual_seed(4), "numpy": np.random.default_rng(5)}
        self.layers = nn.Sequential(first, nn.Sequential(nn.Dropout(0.3), nn.Linear(16, 1)))

    def forward(self, x):
        return self.layers(x)

    def pipeline_blocks(self):
        return [(f"layers.{number}", layer) for number, layer in enumerate(self.layers)]

    def pipeline_inputs(self, batch, batch_idx):
        noise = torch.randn(batch["x"].shape, generator=self.rngs["torch"]).to(batch["x"])
        return batch["x"] + noise * self.rngs["numpy"].random(), batch["y"]

    def pipeline_loss(self, outputs, targets):
        return nn.functional.mse_loss(outputs, targets)

    pipeline_key = "x"

    def training_step(self, batch, batch_idx):
        inputs, targets = self.pipeline_inputs(batch, batch_idx)
        return self.pipeline_loss(self(inputs), targets)

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.pipeline_loss(self(batch["x"]), batch["y"]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.01)


class Configured(Net):
    """Its optimizer is that of the config, which needs the loaders before they are restored."""

    configure_optimizers = pl.LightningModule.configure_optimizers
