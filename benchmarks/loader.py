"""Files on disk to uint8 batches: distdl's loader against others, in CPU time per image.

    python -m benchmarks.run loader

One process trains nothing and takes batches of 100 as fast as one worker makes them. Every arm does
the same: a random crop to 224 pixels (torchvision's RandomResizedCrop), a flip, a batch of uint8.
After two epochs to warm up the arms take turns, three times each. CPU time, user and system, is
that of the process and its workers, so that other programs on the machine change it little.

Two kinds of photographs, in the page cache: a hundred of $DISTDL_PHOTOGRAPHS (without it, generated
JPEGs of ImageNet's median size), copied to 1,600 files, and the same cut to squares of 224
pixels. FFCV and DALI are measured where they are installed (Debian: apt-get install libopencv-dev
libturbojpeg0-dev pkg-config; pip install numba opencv-python-headless nvidia-dali-cuda120, then
ffcv without build isolation and dependencies).
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import random
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks import photographs
from benchmarks.table import Goal, Result, row
from distdl.util.wording import plural

FILES, BATCH, SIZE, REPEATS = 1600, 100, 224, 3
# Goals: distdl's CPU time as a share of the other's, on photographs as they are and on small ones.
OF_FFCV, OF_FFCV_SMALL, OF_DALI, OF_TORCHVISION = 0.70, 0.65, 0.65, 0.35

KINDS = {"full": "photographs", "small": "photographs of 224 x 224 pixels"}

Arm = Callable[[Path, int], Any]


def create_data(folder: Path) -> None:
    """Creates jpeg/{train,val} and shards/ in folder/full and folder/small."""
    originals = sorted(photographs.folder(folder / "generated").rglob("*.jpg"))
    for split, count in (("train", FILES), ("val", len(originals))):
        for number in range(count):
            photograph = originals[number % len(originals)]
            name = f"jpeg/{split}/{photograph.parent.name}/{number:04d}.jpg"
            for kind in KINDS:
                (folder / kind / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(photograph, folder / "full" / name)
            (folder / "small" / name).write_bytes(small(photograph))
    for kind in KINDS:
        prepare(folder / kind / "jpeg", folder / kind / "shards")


def small(photograph: Path) -> bytes:
    """Its centre, as a JPEG of 224 x 224 pixels."""
    from PIL import Image, ImageOps

    file = io.BytesIO()
    with Image.open(photograph) as image:
        ImageOps.fit(image.convert("RGB"), (SIZE, SIZE)).save(file, "JPEG", quality=90)
    return file.getvalue()


def prepare(source: Path, to: Path, *options: str) -> None:
    from distdl.cli import prepare

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        code = prepare.main(
            ["folder", "--source", str(source), "--to", str(to), *options]
        ).exit_code
    assert code == 0, f"prepare {' '.join(options)} ended with {code}"


# The arms: each returns a loader of (almost) all images.


def image_folder(floats: bool) -> Arm:
    """torchvision's reference (references/classification/presets.py, backend PIL) in a DataLoader.

    Args:
        floats: Normalise on the CPU, as the reference does. False: uint8, which is faster.
    """

    def arm(folder: Path, workers: int) -> Any:
        from torchvision.datasets import ImageFolder
        from torchvision.transforms import v2

        ops = [v2.RandomResizedCrop(SIZE), v2.RandomHorizontalFlip(), v2.PILToTensor()]
        if floats:
            normalize = v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
            ops += [v2.ToDtype(torch.float, scale=True), normalize, v2.ToPureTensor()]
        dataset = ImageFolder(str(folder / "jpeg" / "train"), v2.Compose(ops))
        return torch.utils.data.DataLoader(
            dataset, BATCH, shuffle=True, num_workers=workers, persistent_workers=True
        )

    return arm


def tensors(folder: Path, workers: int) -> Any:
    """torchvision's transforms on tensors, from torchvision's own decoder; uint8."""
    from torchvision.datasets import ImageFolder
    from torchvision.io import ImageReadMode, decode_image, read_file
    from torchvision.transforms import v2

    ops = [v2.RandomResizedCrop(SIZE, antialias=True), v2.RandomHorizontalFlip()]
    dataset = ImageFolder(
        str(folder / "jpeg" / "train"),
        v2.Compose(ops),
        loader=lambda path: decode_image(read_file(path), ImageReadMode.RGB),
    )
    return torch.utils.data.DataLoader(
        dataset, BATCH, shuffle=True, num_workers=workers, persistent_workers=True
    )


def dali(folder: Path, workers: int) -> Any:
    """NVIDIA's DALI on the CPU: decodes the crop alone; uint8."""
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.pytorch import DALIClassificationIterator

    @pipeline_def(batch_size=BATCH, num_threads=workers, device_id=None)
    def pipeline() -> Any:
        files, labels = fn.readers.file(
            file_root=str(folder / "jpeg" / "train"), random_shuffle=True, name="files"
        )
        images = fn.decoders.image_random_crop(
            files, device="cpu", output_type=types.RGB, jpeg_fancy_upsampling=True
        )
        images = fn.resize(images, size=(SIZE, SIZE), antialias=True)
        return fn.flip(images, horizontal=fn.random.coin_flip()), labels

    made = DALIClassificationIterator(pipeline(), reader_name="files", auto_reset=True)
    return _Counted(made, lambda batch: len(batch[0]["label"]))


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
    "torchvision, tensors, uint8": tensors,
    "DALI, CPU": dali,
    "FFCV": ffcv,
}
FLOORS: dict[str, Arm] = {"floor: full decode": full_decode, "floor: crops alone": crops}
PACKAGES = {"DALI, CPU": "nvidia.dali", "FFCV": "ffcv"}


def installed(arm: str) -> bool:
    try:
        importlib.import_module(PACKAGES.get(arm, "torch"))
    except ImportError:
        return False
    return True


def epoch(loader: Any) -> tuple[float, float]:
    """Images per second and CPU milliseconds per image, of one pass."""
    cpu = cpu_seconds()
    start = time.perf_counter()
    images = 0
    for batch in loader:
        images += len(batch["label"] if isinstance(batch, dict) else batch[1])
    seconds = time.perf_counter() - start
    used = cpu_seconds() - cpu
    return images / seconds, 1000 * used / images


def cpu_seconds() -> float:
    """CPU time of this process and its living children."""
    parent = psutil.Process()
    times = [process.cpu_times() for process in (parent, *parent.children(recursive=True))]
    return sum(t.user + t.system for t in times)


def measured(folder: Path, workers: int) -> dict[str, list[tuple[float, float]]]:
    loaders = {name: arm(folder, workers) for name, arm in ARMS.items() if installed(name)}
    values: dict[str, list[tuple[float, float]]] = {}
    for turn in range(2 + REPEATS):  # the first start workers, and find what is intact
        floors = {name: arm(folder, workers) for name, arm in FLOORS.items()}
        for name, loader in {**loaders, **floors}.items():
            value = epoch(loader)
            if turn > 1:
                values.setdefault(name, []).append(value)
    return values


def differences(folder: Path) -> str:
    """Text on how much the pixels differ from those that PIL decodes and resizes."""
    from PIL import Image
    from torchvision.transforms.v2 import functional as v2

    from distdl.images.views import EvalView, TrainView

    def mean(left: torch.Tensor, right: torch.Tensor) -> float:
        return float((left.float() - right.float()).abs().mean())

    train = TrainView(SIZE)
    ours = EvalView(SIZE)
    crops = []
    centres = []
    for path in sorted((folder / "jpeg" / "val").rglob("*.jpg")):
        data = path.read_bytes()
        image = Image.open(path).convert("RGB")
        random.seed(0)
        seen = train(data)["image"]
        random.seed(0)
        drawn = train.crop(image.height, image.width, 0)
        box = (drawn.top, drawn.left, drawn.height, drawn.width)
        crop = v2.pil_to_tensor(v2.resized_crop(image, *box, [SIZE, SIZE]))
        crops.append(mean(seen, crop.flip(-1) if drawn.flip else crop))
        centre = v2.center_crop(v2.resize(image, [256]), [SIZE])
        reference = v2.pil_to_tensor(centre)
        centres.append(mean(ours(data)["image"], reference))
    return (
        "Mean absolute difference from PIL's pixels (0 to 255), on average (in brackets: of the "
        f"worst of {len(crops)} images): training crops {statistics.mean(crops):.3f} "
        f"({max(crops):.3f}), validation {statistics.mean(centres):.3f} ({max(centres):.3f})."
    )


def main() -> Result:
    warnings.filterwarnings("ignore")
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        create_data(folder)
        results = {
            (kind, workers): measured(folder / kind, workers)
            for kind in KINDS
            for workers in (1, 2)
        }
        pixels = differences(folder / "full")
    rows = []
    for (kind, workers), arms in results.items():
        for arm, values in arms.items():
            label = f"{arm}; {KINDS[kind]}, {workers} {plural('worker', workers)}"
            rows.append(row(label, [v[1] for v in values], "CPU ms/img"))
            rows.append(row(label, [v[0] for v in values], "img/s"))

    def share(kind: str, other: str) -> float | None:
        """distdl's CPU time of the other's, with one worker: the median of the turns' ratios."""
        arms = results[kind, 1]
        if other not in arms:
            return None
        turns = zip(arms[OURS], arms[other], strict=True)
        return statistics.median(ours[1] / its[1] for ours, its in turns)

    goals = [
        Goal(f"loader, CPU time of {other}'s, {KINDS[kind]}", f"at most {goal}", share(kind, other))
        for kind, other, goal in (
            ("full", "FFCV", OF_FFCV),
            ("small", "FFCV", OF_FFCV_SMALL),
            ("full", "DALI, CPU", OF_DALI),
            ("small", "DALI, CPU", OF_DALI),
            ("small", TORCHVISION, OF_TORCHVISION),
        )
    ]
    of = "photographs" if "DISTDL_PHOTOGRAPHS" in os.environ else "generated JPEGs, 110 kB each"
    absent = [arm for arm in ARMS if not installed(arm)]
    missing = f" Not installed: {', '.join(absent)}." if absent else ""
    ratio = share("full", TORCHVISION)
    assert ratio is not None
    return Result(
        "Loader: photographs to batches",
        f"{TORCHVISION}: its reference in a DataLoader; CPU time, 1 worker",
        f"at most {OF_TORCHVISION}",
        ratio,
        rows,
        "python -m benchmarks.run loader",
        what=f"loader, CPU time of {TORCHVISION}'s, photographs",
        more=goals,
        notes=f"{pixels}\n\nThe images: {of}.{missing} litdata and SPDL were not measured.",
    )
