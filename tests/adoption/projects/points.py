"""What the projects share: points, each with its number, and loaders as people write them.

The idioms are told apart in modules.py and in tests/adoption/table.py.
"""

import torch
from lightning.pytorch import LightningDataModule
from torch.utils import data

COUNT, WIDTH = 32, 8


class Points(data.Dataset):
    def __init__(self, count=COUNT, seed=1):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, WIDTH, generator=generator)
        self.y = self.x.sum(1, keepdim=True).tanh()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "y": self.y[index], "id": torch.tensor(index)}


class Stream(data.IterableDataset):
    """States that it knows nothing of ranks, so that each takes its turn."""

    shards_itself = False

    def __iter__(self):
        return map(Points().__getitem__, range(COUNT))


class Counting(data.Sampler):
    """Another order in each epoch, by a count of its own."""

    epoch = 0

    def __len__(self):
        return COUNT

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        self.epoch += 1
        return iter(torch.randperm(COUNT, generator=generator).tolist())


class Neighbours(data.Sampler):
    """A batch sampler: what lies together stays together."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return COUNT // self.size

    def __iter__(self):
        starts = torch.randperm(len(self)) * self.size
        return iter([list(range(start, start + self.size)) for start in starts.tolist()])


class Named(data.DataLoader):
    """A subclass with an argument of its own."""

    def __init__(self, name, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.name = name


def weighted():
    return data.WeightedRandomSampler(torch.arange(1.0, COUNT + 1), COUNT)


def in_batches(size):
    return data.BatchSampler(Counting(), size, False)


LOADERS = {
    "plain": lambda size: data.DataLoader(Points(), size),
    "two sets": lambda size: data.DataLoader(Points(), size),
    "stream": lambda size: data.DataLoader(Stream(), size),
    "weighted": lambda size: data.DataLoader(Points(), size, sampler=weighted()),
    "torchs batches": lambda size: data.DataLoader(Points(), batch_sampler=in_batches(size)),
    "unbatched": lambda size: data.DataLoader(Points(), sampler=in_batches(size), batch_size=None),
    "batches": lambda size: data.DataLoader(Points(), batch_sampler=Neighbours(size)),
    "subclass": lambda size: Named("mine", Points(), size, shuffle=True, num_workers=1),
}


class PointsData(LightningDataModule):
    """`kind="two sets"`: validation and test have two, of different length. "new points": in each
    epoch, for a Trainer that asks for loaders again. "more points": and another number of them."""

    def __init__(self, kind, batch_size=4):
        super().__init__()
        self.kind = kind
        self.batch_size = batch_size

    def train_dataloader(self):
        if self.kind in LOADERS:
            return LOADERS[self.kind](self.batch_size)
        return data.DataLoader(self.points(), self.batch_size, shuffle=True, num_workers=1)

    def points(self):
        """What is trained on in this epoch."""
        if self.kind in LOADERS:
            return Points()
        epoch = self.trainer.current_epoch
        count = COUNT + (8, 12, 0, 4)[epoch] if self.kind == "more points" else COUNT
        return Points(count, seed=10 + epoch)

    def val_dataloader(self):
        one = data.DataLoader(Points(10, seed=2), 4)
        other = data.DataLoader(Points(6, seed=3), 4)
        return [one, other] if self.kind == "two sets" else one

    test_dataloader = val_dataloader
