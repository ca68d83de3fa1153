"""Generated JPEGs for the complete input path: measures the cost of decoding without files."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from torch.utils.data import DataLoader

from distdl.data.encoded import EncodedImages
from distdl.data.images import ImageData, WorkerKind
from distdl.domains.classification.domain import Classification
from distdl.domains.domain import View
from distdl.images.augment import IMAGENET_MEAN, IMAGENET_STD
from distdl.util.errors import Problem
from distdl.util.ranges import Count, Positive

QUALITY = 90  # of the generated JPEGs; the amount of noise sets their size


class SyntheticJpegs(ImageData):
    """Generated JPEGs, by default like ImageNet in number and size, decoded like real ones.

    Sample i is image `i % pool_size`, a pattern of its class under noise, and its label is
    `i % pool_size % num_classes`. The extra time over `data=synthetic` is the cost of the input
    path without the disk.

    Args:
        batch_size: Images per device.
        num_classes: Labels are below it.
        image_size: Height and width in pixels after cropping.
        train_samples, val_samples: Images in an epoch and in a validation (default: ImageNet's).
        width, height: Size of the JPEGs in pixels (default: ImageNet's median).
        kilobytes: Size of a JPEG in 1,000 bytes, to within a tenth if noise can reach it.
        pool_size: Number of different images; all are held in memory.
        seed: The images of the pool depend on it.
        scale, ratio, mean, std, augment, resize: As for `distdl.data.StoredImages`.
        val_crop_size, val_resize_size: As there.
        decoder, num_workers, worker_kind, draws: As there.
    """

    domain = Classification()

    def __init__(
        self,
        batch_size: int,
        num_classes: Positive = 1000,
        image_size: Positive = 224,
        train_samples: Positive = 1_281_167,
        val_samples: Count = 50_000,
        width: int = 500,
        height: int = 375,
        kilobytes: float = 110,
        pool_size: Positive = 64,
        num_workers: int | None = None,
        seed: int = 0,
        scale: Sequence[float] = (0.08, 1.0),
        ratio: Sequence[float] = (3 / 4, 4 / 3),
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        decoder: str = "auto",
        augment: Mapping[str, Any] | None = None,
        resize: Mapping[str, Any] | None = None,
        val_crop_size: int | None = None,
        val_resize_size: int | None = None,
        worker_kind: WorkerKind = "auto",
        draws: Literal["counter", "global"] = "global",
    ) -> None:
        super().__init__(batch_size, num_workers, mean, std, worker_kind=worker_kind)
        self.num_classes = num_classes
        self.seeds_apart = draws == "counter"
        views = {
            "image_size": image_size,
            "scale": scale,
            "ratio": ratio,
            "mean": mean,
            "std": std,
            "decoder": decoder,
            "augment": augment,
            "resize": resize,
            "val_crop_size": val_crop_size,
            "val_resize_size": val_resize_size,
            "draws": draws,
        }
        train_view, val_view = self.domain.views(views)
        self._train, self._val = (train_samples, train_view), (val_samples, val_view)
        self._pool_arguments = (pool_size, num_classes, width, height, 1000 * kilobytes, seed)
        self._pool: list[bytes] = []

    @classmethod
    def check(cls, config: Mapping[str, Any], context: Mapping[str, Any]) -> Iterable[Problem]:
        """Problems of the data node; paths are relative to it."""
        return cls.domain.check(config, local=context["local"])

    def setup(self, stage: str | None = None) -> None:
        self._pool = self._pool or jpegs(*self._pool_arguments)

    def train_dataloader(self) -> DataLoader[Any]:
        return self.loader(_Generated(self._pool, self.num_classes, *self._train), shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return self.loader(_Generated(self._pool, self.num_classes, *self._val), shuffle=False)


class _Generated(EncodedImages):
    def __init__(self, pool: list[bytes], num_classes: int, samples: int, view: View) -> None:
        super().__init__(view)
        self.pool = pool
        self.num_classes = num_classes
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def read(self, index: int) -> bytes:
        return self.pool[index % len(self.pool)]

    def label(self, index: int) -> int:
        return index % len(self.pool) % self.num_classes

    def known_whole(self, index: int) -> bool:
        return True

    def name(self, index: int) -> str:
        return f"generated image {index % len(self.pool)}"


def jpegs(
    count: int, num_classes: int, width: int, height: int, size: float, seed: int
) -> list[bytes]:
    """`count` JPEGs of about `size` bytes each: a coarse pattern of the class, plus noise."""
    rng = np.random.default_rng(seed)
    patterns = rng.integers(0, 256, (min(count, num_classes), 4, 4, 3), dtype=np.uint8)
    noise = rng.standard_normal((height, width, 1), dtype=np.float32)

    def encoded(index: int, amount: float) -> bytes:
        from PIL import Image

        coarse = Image.fromarray(patterns[index % len(patterns)])
        smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC))
        # Each image shifts the same noise, which is faster than drawing new noise.
        shifted = np.roll(noise, (37 * index, 59 * index), axis=(0, 1))
        pixels = (smooth + amount * shifted).clip(0, 255).astype(np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "JPEG", quality=QUALITY)
        return file.getvalue()

    least, most = 0.0, 128.0
    for _ in range(10):  # bisection: more noise gives more bytes
        middle = (least + most) / 2
        least, most = (middle, most) if len(encoded(0, middle)) < size else (least, middle)
    return [encoded(index, least) for index in range(count)]
