"""What benchmarks/loader.py compares: each arm gives batches of (almost) all images of a folder,
each once: a random crop to 224 pixels, a flip, uint8; and RandAugment, if that is asked for.

`make .servers/loaders` installs all but distdl and torchvision.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

BATCH, SIZE = 100, 224
PACKAGES = {
    "DALI, CPU": "nvidia.dali",
    "FFCV": "ffcv",
    "litdata, tensors": "litdata",
    "SPDL": "spdl.io.lib._libspdl",
}

Arm = Callable[[Path, int], Any]


def installed(arm: str) -> bool:
    package, _, name = PACKAGES.get(arm, "torch").partition(".lib.")
    try:
        module = importlib.import_module(package)
        if name:  # SPDL needs the libraries of an FFmpeg
            getattr(importlib.import_module(f"{package}.lib"), name).ImagePackets  # noqa: B018
    except (ImportError, RuntimeError):
        return False
    return module is not None


def image_folder(floats: bool, augmented: bool = False) -> Arm:
    """torchvision's reference (references/classification/presets.py, backend PIL) in a DataLoader.

    Args:
        floats: Normalise on the CPU, as the reference does. False: uint8, which is faster.
        augmented: With RandAugment.
    """

    def arm(folder: Path, workers: int) -> Any:
        from torchvision.datasets import ImageFolder
        from torchvision.transforms import v2

        ops = [v2.RandomResizedCrop(SIZE), v2.RandomHorizontalFlip()]
        ops += [v2.RandAugment()] if augmented else []
        ops += [v2.PILToTensor()]
        if floats:
            normalize = v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
            ops += [v2.ToDtype(torch.float, scale=True), normalize, v2.ToPureTensor()]
        dataset = ImageFolder(str(folder / "jpeg" / "train"), v2.Compose(ops))
        return torch.utils.data.DataLoader(
            dataset, BATCH, shuffle=True, num_workers=workers, persistent_workers=True
        )

    return arm


def _on_tensors(augmented: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    from torchvision.transforms import v2

    ops = [v2.RandomResizedCrop(SIZE, antialias=True), v2.RandomHorizontalFlip()]
    return v2.Compose([*ops, v2.RandAugment()] if augmented else ops)


def tensors(augmented: bool = False) -> Arm:
    """torchvision's transforms on tensors, from torchvision's own decoder; uint8."""

    def arm(folder: Path, workers: int) -> Any:
        from torchvision.datasets import ImageFolder
        from torchvision.io import ImageReadMode, decode_image, read_file

        dataset = ImageFolder(
            str(folder / "jpeg" / "train"),
            _on_tensors(augmented),
            loader=lambda path: decode_image(read_file(path), ImageReadMode.RGB),
        )
        return torch.utils.data.DataLoader(
            dataset, BATCH, shuffle=True, num_workers=workers, persistent_workers=True
        )

    return arm


def dali(augmented: bool = False) -> Arm:
    """NVIDIA's DALI on the CPU: decodes the crop alone; uint8."""

    def arm(folder: Path, workers: int) -> Any:
        from nvidia.dali import fn, pipeline_def, types
        from nvidia.dali.auto_aug import rand_augment
        from nvidia.dali.plugin.pytorch import DALIClassificationIterator

        settings = {"batch_size": BATCH, "num_threads": workers, "device_id": None}

        @pipeline_def(**settings, enable_conditionals=augmented)
        def pipeline() -> Any:
            files, labels = fn.readers.file(
                file_root=str(folder / "jpeg" / "train"), random_shuffle=True, name="files"
            )
            images = fn.decoders.image_random_crop(
                files, device="cpu", output_type=types.RGB, jpeg_fancy_upsampling=True
            )
            images = fn.resize(images, size=(SIZE, SIZE), antialias=True)
            images = fn.flip(images, horizontal=fn.random.coin_flip())
            if augmented:
                images = rand_augment.rand_augment(images, n=2, m=9)
            return images, labels

        made = DALIClassificationIterator(pipeline(), reader_name="files", auto_reset=True)
        return _Counted(made, lambda batch: len(batch[0]["label"]))

    return arm


def ffcv(folder: Path, workers: int) -> Any:
    """FFCV, whose file holds the images as JPEGs of its own (quality 95); uint8."""
    from ffcv.fields import IntField, RGBImageField
    from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import RandomHorizontalFlip, ToTensor
    from ffcv.writer import DatasetWriter
    from torchvision.datasets import ImageFolder

    file = folder / "images.beton"
    if not file.exists():
        fields = {"image": RGBImageField(write_mode="jpg", jpeg_quality=95), "label": IntField()}
        images = ImageFolder(str(folder / "jpeg" / "train"))
        DatasetWriter(str(file), fields, num_workers=1).from_indexed_dataset(images)
    decode = RandomResizedCropRGBImageDecoder((SIZE, SIZE))
    pipelines = {
        "image": [decode, RandomHorizontalFlip(), ToTensor()],
        "label": [IntDecoder(), ToTensor()],
    }
    return Loader(
        str(file),
        batch_size=BATCH,
        num_workers=workers,
        order=OrderOption.RANDOM,
        os_cache=True,
        drop_last=True,
        pipelines=pipelines,
    )


def litdata(augmented: bool = False) -> Arm:
    """litdata's chunks of the unchanged files, which it decodes whole by torchvision's decoder;
    then torchvision's transforms on tensors. It has no crop of its own."""

    def arm(folder: Path, workers: int) -> Any:
        from litdata import StreamingDataLoader, StreamingDataset

        chunks = folder / "litdata"
        if not chunks.exists():
            write_chunks(folder / "jpeg" / "train", chunks)
        transform = _on_tensors(augmented)
        dataset = StreamingDataset(
            str(chunks),
            shuffle=True,
            transform=lambda sample: {**sample, "image": transform(sample["image"])},
        )
        return StreamingDataLoader(
            dataset, batch_size=BATCH, num_workers=workers, persistent_workers=True
        )

    return arm


def write_chunks(images: Path, to: Path) -> None:
    from litdata import optimize
    from torchvision.datasets import ImageFolder

    optimize(
        _opened,
        ImageFolder(str(images)).samples,
        str(to),
        chunk_bytes="64MB",
        num_workers=1,
        start_method="fork",
        verbose=False,
    )


def _opened(sample: tuple[str, int]) -> dict[str, Any]:
    from PIL import Image

    path, label = sample
    return {"image": Image.open(path), "label": label}


def spdl(folder: Path, workers: int) -> Any:
    """SPDL: FFmpeg decodes the whole image in threads; its filters crop, scale (bilinear) and flip.
    The box is drawn as distdl draws it, since SPDL has no RandomResizedCrop."""
    from torchvision.datasets import ImageFolder

    return _Spdl(ImageFolder(str(folder / "jpeg" / "train")).samples, workers)


class _Spdl:
    def __init__(self, samples: list[tuple[str, int]], workers: int) -> None:
        self.samples = samples
        self.workers = workers

    def __iter__(self) -> Iterator[Any]:
        from spdl.pipeline import PipelineBuilder

        builder = PipelineBuilder().add_source(random.sample(self.samples, len(self.samples)))
        builder = builder.pipe(_spdl_image, concurrency=self.workers)
        builder = builder.aggregate(BATCH, drop_last=True).pipe(_spdl_batch).add_sink(2)
        pipeline = builder.build(num_threads=self.workers)
        with pipeline.auto_stop():
            yield from pipeline


def _spdl_image(sample: tuple[str, int]) -> tuple[Any, int]:
    from spdl import io

    from distdl.images.crop import random_crop

    path, label = sample
    packets = io.demux_image(path)
    box = random_crop(packets.height, packets.width, (0.08, 1.0), (3 / 4, 4 / 3))
    top, left, height, width = box
    words = [f"crop={width}:{height}:{left}:{top}:exact=1", f"scale={SIZE}:{SIZE}:flags=bilinear"]
    words += ["hflip"] if random.random() < 0.5 else []
    return io.decode_packets(packets, ",".join([*words, "format=rgb24"])), label


def _spdl_batch(decoded: list[tuple[Any, int]]) -> dict[str, Any]:
    from spdl import io

    images = io.to_torch(io.convert_frames([frames for frames, _ in decoded]))
    return {"image": images, "label": torch.tensor([label for _, label in decoded])}


class _Counted:
    """A loader whose batches are only counted."""

    def __init__(self, loader: Any, size: Callable[[Any], int]) -> None:
        self.loader = loader
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            yield {"label": range(self.size(batch))}


def distdl(worker_kind: str, decoder: str = "auto", draws: str = "counter", **more: Any) -> Arm:
    """`data=imagenet` from shards, as a run builds it."""

    def arm(folder: Path, workers: int) -> Any:
        from distdl.data import StoredImages, TrainPosition
        from distdl.data.loading import distribute

        data = StoredImages(
            str(folder / "shards"),
            BATCH,
            num_classes=len([*(folder / "jpeg/train").iterdir()]),
            num_workers=workers,
            worker_kind=worker_kind,
            decoder=decoder,
            draws=draws,
            **more,
        )
        data.setup()
        distribute(data, rank=0, world_size=1, seed=0, position=TrainPosition())
        return data.train_dataloader()

    return arm


def full_decode(folder: Path, workers: int) -> Any:
    """A floor: each whole image is decoded, and nothing else."""
    import simplejpeg

    files = [path.read_bytes() for path in sorted((folder / "jpeg/train").rglob("*.jpg"))]
    return ({"label": [simplejpeg.decode_jpeg(data)]} for data in files)


def crops(folder: Path, workers: int) -> Any:
    """A floor: the library decodes and resizes crops, and nothing else."""
    from distdl.images.views import TrainView

    files = [path.read_bytes() for path in sorted((folder / "jpeg/train").rglob("*.jpg"))]
    view = TrainView(SIZE)
    out = torch.empty(BATCH, SIZE, SIZE, 3, dtype=torch.uint8)

    def batch(start: int) -> dict[str, Any]:
        some = files[start : start + BATCH]
        done = view.decode.squares(some, [view.choose(0)] * BATCH, [True] * BATCH, out)
        return {"label": done}

    return (batch(start) for start in range(0, len(files), BATCH))


OURS = "distdl, threads"
TORCHVISION = "torchvision, PIL, normalised"
ARMS: dict[str, Arm] = {
    OURS: distdl("threads"),
    "distdl, processes": distdl("processes"),
    "distdl without distdl-native, as before": distdl("processes", "simplejpeg", "global"),
    TORCHVISION: image_folder(floats=True),
    "torchvision, PIL, uint8": image_folder(floats=False),
    "torchvision, tensors, uint8": tensors(),
    "DALI, CPU": dali(),
    "FFCV": ffcv,
    "litdata, tensors": litdata(),
    "SPDL": spdl,
}
# FFCV and SPDL have no RandAugment.
AUGMENTED: dict[str, Arm] = {
    "distdl, processes": distdl("processes", augment={"rand_augment": {}}),
    "torchvision, PIL, uint8": image_folder(floats=False, augmented=True),
    "torchvision, tensors, uint8": tensors(augmented=True),
    "DALI, CPU": dali(augmented=True),
    "litdata, tensors": litdata(augmented=True),
}
FLOORS: dict[str, Arm] = {"floor: full decode": full_decode, "floor: crops alone": crops}
