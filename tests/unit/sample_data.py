"""Images, data sets and loaders that the tests of data loading share."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import nn
from torch.utils.data import Dataset

from distdl.data import SyntheticImages
from distdl.data.encoded import EncodedImages
from distdl.data.loading import distribute
from distdl.data.sampling import TrainPosition
from distdl.images.views import EvalView
from distdl.models import ImageClassifier
from tests.miniature import encoded, photograph


def write_photographs(root: Path, classes, **counts) -> None:
    """`root/SPLIT/CLASS/0.jpg`, ...: for each split so many in each class."""
    for split, count in counts.items():
        for number, name in enumerate(classes):
            (root / split / name).mkdir(parents=True)
            for index in range(count):
                image = photograph(100 * number + index, 40 + index, 36)
                (root / split / name / f"{index}.jpg").write_bytes(encoded(image))


PICTURE = photograph(0, 125, 90)
PLAIN = encoded(PICTURE)
GREY = encoded(PICTURE.convert("L"))
BROKEN = PLAIN[:500]


class Listed(EncodedImages):
    """Files in a list; `repaired` replaces a broken one."""

    def __init__(self, files, view=None, repaired=None):
        super().__init__(view or EvalView(16))
        self.files = list(files)
        self.repaired = repaired

    def __len__(self):
        return len(self.files)

    def read(self, index):
        return self.files[index]

    def label(self, index):
        return index

    def name(self, index):
        return f"file {index}"

    def repair(self, index):
        self.files[index] = self.repaired or self.files[index]
        return self.repaired is not None


class Augmented(Dataset):
    """Draws from all three generators that a user's augmentation may use."""

    classes = ("cat", "dog")

    def __init__(self, length=10, as_dict=False):
        self.length = length
        self.as_dict = as_dict

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        draws = torch.tensor([index, *draw_all()])
        return {"x": draws} if self.as_dict else draws


class Loaders(LightningDataModule):
    """Gives what `make` makes."""

    def __init__(self, make, exact=False):
        super().__init__()
        self.exact_evaluation = exact
        self.train_dataloader = self.val_dataloader = lambda: make()


def share(source, rank=0, world_size=1, position=None, **kwargs):
    position = position or TrainPosition()
    distribute(source, rank=rank, world_size=world_size, seed=0, position=position, **kwargs)
    return source


def draw_all():
    """The next number of each of the three global generators."""
    return random.random(), np.random.rand(), torch.rand(()).item()


def synthetic(samples=11, classes=7, **options):
    """Unlearnt images of 8 x 8 pixels in batches of 4; `samples`: for validation."""
    sizes = {"image_size": 8, "pool_size": 16, "train_samples": 64, "val_samples": samples}
    return SyntheticImages(4, num_classes=classes, **{**sizes, **options})


def classifier(classes=7, **options):
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    network = nn.Sequential(*layers, nn.Linear(8, classes))
    return ImageClassifier(network, num_classes=classes, **options)
