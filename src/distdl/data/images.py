"""Base of the image data modules: copies uint8 to the device, and normalises there."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, TypeVarTuple

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset

from distdl.config.resources import cpu_cores, loader_workers
from distdl.data.encoded import Damage, EncodedData, OnDamaged
from distdl.data.side_stream import SideStream
from distdl.data.threads import ThreadLoader
from distdl.images.augment import IMAGENET_MEAN, IMAGENET_STD
from distdl.images.nvjpeg import EncodedBatch
from distdl.images.views import View
from distdl.util.wording import plural

log = logging.getLogger(__name__)

WorkerKind = Literal["auto", "processes", "threads"]
# More would wait for the interpreter's lock, which the training needs as well: it is held for 0.05
# ms of an image, whose decoding takes 0.24 ms (224 pixels) to 1 ms (500 x 375).
MOST_THREADS = 4

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")


def default_workers() -> int:
    """The number of workers for this rank's share of the cores (`resources.loader_workers`)."""
    return loader_workers(cpu_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


class ImageData(LightningDataModule):
    """Base of our image data modules.

    A batch on the host has "image" uint8 [B, 3, H, W] and "label" int64 [B].
    `distdl.data.loading.distribute` adds "index" int64 [B] and "weight" float32 [B]. On the device
    "image" becomes float, normalised, channels_last, in the precision of the run.

    Args:
        batch_size: Images per device.
        num_workers: Processes that load; None: this rank's share of the cores, less one or two.
        mean, std: The device normalises red, green and blue by these; for values from 0 to 1.
        on_damaged: For an image that cannot be decoded: "skip" reports it and replaces it with
            another one, "error" ends the run (in on_before_batch_transfer).
        worker_kind: "processes", or "threads" where all draws are a sample's own and the library of
            `distdl.images.native` decodes; "auto": threads up to MOST_THREADS workers.
    """

    exact_evaluation = True
    decodes = True  # images are decoded, in the workers or on the GPU
    crops = True  # and of them only what a crop needs
    seeds_apart = False  # nothing that a loader needs is drawn from the global generators
    side_stream = True  # batches are copied to a CUDA device while the previous step runs

    def __init__(
        self,
        batch_size: int,
        num_workers: int | None,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        on_damaged: OnDamaged = "skip",
        worker_kind: WorkerKind = "auto",
    ) -> None:
        super().__init__()
        self.worker_kind = worker_kind
        self.batch_size = batch_size
        self.num_workers = default_workers() if num_workers is None else num_workers
        self.damage = Damage(on_damaged)
        self._mean = tuple(mean)
        self._std = tuple(std)
        self._constants: dict[torch.device, tuple[torch.Tensor, ...]] = {}
        self._side: SideStream | None = None
        self._said: set[str] = set()

    def loader(self, dataset: Dataset[Any], *, shuffle: bool) -> DataLoader[Any]:
        """A loader of all of `dataset`; it uses `dataset.collate`, if that exists."""
        threads = self.num_workers > 0 and self._in_threads(dataset)
        self._name_way(dataset, threads, "training" if shuffle else "evaluation")
        loader: type[DataLoader[Any]] = ThreadLoader if threads else DataLoader
        return loader(
            dataset,
            batch_size=self.batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            pin_memory=self._device.type == "cuda",
            # Restarting workers in every epoch would leave the GPU idle for seconds.
            persistent_workers=self.num_workers > 0,
            collate_fn=getattr(dataset, "collate", None),
        )

    def _name_way(self, dataset: Dataset[Any], threads: bool, what: str) -> None:
        """Says once what decodes and loads in this rank. Rank 0 shows it on the screen."""
        decoder = getattr(getattr(dataset, "view", None), "decoded_by", "")
        if not decoder:  # a data set or a view of the user's
            return
        kind = "thread" if threads else "process"
        where = f"{self.num_workers} {plural(kind, self.num_workers)}"
        where = f"{where} of each rank" if self.num_workers else "the rank itself"
        text = f"images: {decoder} decodes, in {where}"
        if text not in self._said:
            log.info("%s (%s)", text, what)
        self._said.add(text)

    def _in_threads(self, dataset: Dataset[Any]) -> bool:
        """Whether `dataset` is loaded by threads; says why not, if they were asked for."""
        if self.worker_kind == "processes":
            return False
        view = dataset.view if isinstance(dataset, EncodedData) and dataset.draws_apart else None
        if not isinstance(view, View):
            why = "something draws from the process's random generators (docs/data/decoding.md)"
        elif view.decode.native is None:
            why = "distdl-native, which decodes beside other threads, is not used"
        else:
            return self.worker_kind == "threads" or self.num_workers <= MOST_THREADS
        if self.worker_kind == "threads" and (self.trainer is None or self.trainer.is_global_zero):
            log.warning("data.worker_kind=threads: processes load, since %s", why)
        return False

    def on_before_batch_transfer(
        self, batch: dict[str, Any], dataloader_idx: int
    ) -> dict[str, Any]:
        """Reports damaged images, and decodes on the device if that is chosen (nvjpeg)."""
        batch = dict(batch)
        if "damaged" in batch and not (self.trainer and self.trainer.predicting):
            self.damage.note(batch.pop("damaged"), self._damaged_file())
        if isinstance(batch.get("image"), EncodedBatch):
            batch["image"] = self._beside(self._device, batch["image"].decoded, self._device)
        return batch

    def transfer_batch_to_device(
        self, batch: dict[str, Any], device: torch.device, dataloader_idx: int
    ) -> dict[str, Any]:
        """The batch on `device`; to a CUDA device it is copied on the side stream."""
        copy = super().transfer_batch_to_device
        return self._beside(device, copy, batch, device, dataloader_idx)

    def _beside(
        self, device: torch.device, work: Callable[[*Arguments], Result], *args: *Arguments
    ) -> Result:
        """`work(*args)`; for a CUDA device on the side stream."""
        if device.type != "cuda" or not self.side_stream:
            return work(*args)
        if self._side is None or self._side.device != device:
            self._side = SideStream(device)
        return self._side(work, *args)

    @property
    def _device(self) -> torch.device:
        return self.trainer.strategy.root_device if self.trainer else torch.device("cpu")

    def _damaged_file(self) -> Path | None:
        if self.trainer is None:
            return None
        logs = Path(self.trainer.default_root_dir, "logs")
        return logs / f"damaged-rank{self.trainer.global_rank}.txt"

    def on_after_batch_transfer(
        self, batch: dict[str, torch.Tensor], dataloader_idx: int
    ) -> dict[str, torch.Tensor]:
        image = self.normalize(batch["image"])
        if self.trainer is not None:  # to 16 bits in a pure 16-bit run
            image = self.trainer.precision_plugin.convert_input(image)
        return {**batch, "image": image}

    def normalize(self, image: torch.Tensor) -> torch.Tensor:
        """uint8 [B, 3, H, W] to float32, channels_last: (x / 255 - mean) / std."""
        if image.device not in self._constants:
            std = torch.tensor(self._std).view(1, 3, 1, 1)
            mean = torch.tensor(self._mean).view(1, 3, 1, 1)
            constants = 1 / (255 * std), -mean / std
            self._constants[image.device] = tuple(c.to(image.device) for c in constants)
        scale, shift = self._constants[image.device]
        # One pass over the memory for cast and layout, a second for the arithmetic.
        floats = image.to(torch.float32, memory_format=torch.channels_last)
        return torch.addcmul(shift, floats, scale)
