"""Views of an image for training and validation: decoded, cropped, resized, uint8."""

from __future__ import annotations

import copy
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from distdl.datasets.image_headers import MOST_PIXELS, examine
from distdl.images.augment import IMAGENET_MEAN, IMAGENET_STD, Augment
from distdl.images.crop import Crop, central_crop, random_crop
from distdl.images.decoding import DECODERS, Choose, CropDecoder, is_plain, without_exif, works
from distdl.images.draws import GLOBAL, KINDS, CounterDraws, Draws
from distdl.images.nvjpeg import END_OF_IMAGE
from distdl.images.resizing import Resizing
from distdl.util.errors import Problem

LONGEST_SIDE = 8192  # in pixels: more is probably a typo, and would fill any GPU


def check_views(config: Mapping[str, Any], local: bool = True) -> Iterable[Problem]:
    """Problems of the view's keys of a data node; paths are relative to the node.

    Args:
        local: Whether the run is on this machine: then the decoder must be installed here.
    """
    name = config.get("decoder", "auto")
    augment = config.get("augment")
    yield from check_decoder(name, local)
    yield from Augment.check(augment)
    ops = augment if isinstance(augment, Mapping) else {}
    on_cpu = next((k for k, v in ops.items() if v and k != "horizontal_flip"), None)
    if name == "nvjpeg" and on_cpu:
        yield Problem(
            f"augment.{on_cpu}",
            what="needs images that the workers have decoded, and nvjpeg decodes on the GPU",
            remedy=f"data.augment.{on_cpu}=null or data.decoder=auto",
            code="conflict",
        )
    draws = config.get("draws", "global")
    if draws not in KINDS:
        yield Problem(
            "draws", what=f"is {draws!r}", remedy=f"one of {', '.join(KINDS)}", code="wrong-choice"
        )
    yield from Resizing.check(config.get("resize"))
    yield from _wrong_ranges(config)


def check_decoder(name: object, local: bool = True) -> Iterable[Problem]:
    """Problems of `decoder` of a data node."""
    if name not in DECODERS:
        yield Problem(
            "decoder",
            what=f"is {name!r}",
            remedy=f"one of {', '.join(DECODERS)}",
            code="wrong-choice",
        )
    elif local and isinstance(name, str) and name not in ("auto", "pil"):
        package = "torchcodec" if name == "nvjpeg" else name
        if name == "native" and not works(name):
            yield Problem(
                "decoder",
                what=(
                    "native needs the package distdl-native, "
                    "which is not installed or does not work"
                ),
                remedy="pip install ./native in distdl's repository, or data.decoder=auto",
                code="not-installed",
            )
        elif not works(package):
            wanted = "'torchcodec>=0.16'" if package == "torchcodec" else package
            yield Problem(
                "decoder",
                what=f"{name} needs the package {package}, which is not installed or does not load",
                remedy=f"pip install {wanted}, or use an installed decoder: data.decoder=auto",
                code="not-installed",
            )


def _wrong_ranges(config: Mapping[str, Any]) -> Iterable[Problem]:
    """Problems of crop sizes and ranges; wrong types are reported elsewhere."""
    common = {"image_size": 224, "val_crop_size": 224, "val_resize_size": 256}
    sizes = {key: config[key] for key in common if type(config.get(key)) is int}
    for key, size in sizes.items():
        if not 1 <= size <= LONGEST_SIDE:
            yield Problem(
                key,
                what=f"is {size}, not a number of pixels from 1 to {LONGEST_SIDE:,}",
                remedy=f"data.{key}={common[key]}",
                code="out-of-range",
            )
    crop = sizes.get("val_crop_size", sizes.get("image_size", 224))
    if "val_resize_size" in sizes and 1 <= sizes["val_resize_size"] < crop:
        yield Problem(
            "val_resize_size",
            what=f"is {sizes['val_resize_size']}, less than the {crop} pixels of the crop",
            remedy=f"data.val_resize_size={round(crop * 256 / 224)}",
            code="out-of-range",
        )
    for key, most, limit, usual in (
        ("scale", 1.0, ", at most 1", "[0.08, 1.0]"),
        ("ratio", sys.float_info.max, "", "[0.75, 1.3333333333333333]"),
    ):
        pair = config.get(key, (1.0, 1.0))
        numbers = isinstance(pair, Sequence) and all(type(end) in (int, float) for end in pair)
        if not (numbers and len(pair) == 2 and 0 < pair[0] <= pair[1] <= most):
            yield Problem(
                key,
                what=f"is {pair!r}, not two numbers above 0{limit}, the smaller one first",
                remedy=f"'data.{key}={usual}'",
                code="wrong-type",
            )


def views_of(node: Mapping[str, Any]) -> tuple[TrainView, EvalView]:
    """The views of training and of evaluation, by the keys of a data node that `check_views`
    checks. A key that is absent has the default of the view.

    Raises:
        UserError: If `augment` is invalid.
    """
    size = node.get("image_size", 224)
    decoder = node.get("decoder", "auto")
    most = node.get("max_pixels", MOST_PIXELS)
    mean = node.get("mean", IMAGENET_MEAN)
    std = node.get("std", IMAGENET_STD)
    train = TrainView(
        size,
        node.get("scale", (0.08, 1.0)),
        node.get("ratio", (3 / 4, 4 / 3)),
        decoder,
        Augment(node.get("augment"), mean, std),
        node.get("resize"),
        most,
        node.get("draws", "global"),
    )
    crop = node.get("val_crop_size") or size
    return train, EvalView(crop, node.get("val_resize_size"), decoder, most)


class View(ABC):
    """Turns bytes into the fields of a sample: {"image": uint8 [3, S, S]}, channels_last.

    Random choices are drawn from `draws`: the generators that `distdl.data.keyed.KeyedDataset`
    seeds, or those of one sample (`of_sample`).

    Args:
        decoder: As `distdl.images.decoding.CropDecoder` takes it, or "nvjpeg": samples then have
            the form that `distdl.images.nvjpeg.EncodedBatch` takes.
        max_pixels: An image with more is refused, as a damaged one.
    """

    draws: Draws = GLOBAL

    def __init__(self, decoder: str, max_pixels: int = MOST_PIXELS) -> None:
        self.on_gpu = decoder == "nvjpeg"
        self.max_pixels = max_pixels
        self.decode = CropDecoder("pil" if self.on_gpu else decoder, max_pixels)

    @property
    def decoded_by(self) -> str:
        """What decodes images of the usual kinds here."""
        return "nvjpeg" if self.on_gpu else self.decode.name

    def of_sample(self, key: int) -> View:
        """The view with which one sample is seen: what it draws depends on `key` alone, if the
        view draws apart."""
        return self

    @property
    def draws_apart(self) -> bool:
        """Whether `of_sample` takes nothing from the process's generators, and `side` says S. A
        subclass of a view may do anything, so it must say so itself."""
        return False

    def side(self, epoch: int) -> int:
        """S in that epoch, in pixels."""
        raise NotImplementedError

    @abstractmethod
    def crop(self, height: int, width: int, epoch: int) -> Crop:
        """The crop of an image of that size."""

    def __call__(self, data: bytes, epoch: int = 0) -> dict[str, Any]:
        """Raises DamagedImage if the bytes are not a complete image, or are refused."""
        if not self.on_gpu:
            return {"image": self.pixels(data, epoch)}
        header = examine(data, self.max_pixels)
        # PIL decodes files that nvJPEG reads differently, and truncated ones, which it may accept.
        if not is_plain(header) or not data.endswith(END_OF_IMAGE):
            return {"image": self.pixels(data, epoch), "crop": torch.zeros(8, dtype=torch.int64)}
        crop = self.crop(header.height, header.width, epoch)
        encoded = torch.frombuffer(without_exif(data), dtype=torch.uint8)
        return {"image": encoded, "crop": torch.tensor(crop)}

    def pixels(self, data: bytes, epoch: int) -> torch.Tensor:
        """Decodes on the CPU, also with "nvjpeg": uint8 [3, S, S]."""
        return self.changed(self.decode(data, self.choose(epoch), self.draws))

    def choose(self, epoch: int) -> Choose:
        """From a size to the crop in that epoch."""
        return lambda height, width: self.crop(height, width, epoch)

    def changed(self, square: torch.Tensor) -> torch.Tensor:
        """What the view does to the square that was cropped, uint8 [3, S, S]: another tensor, or
        the same if it does nothing."""
        return square


class TrainView(View):
    """A random crop, resized, perhaps flipped and augmented.

    The crop is torchvision's RandomResizedCrop (Szegedy et al. 2015), bilinear with antialias.

    Args:
        image_size: S, in pixels.
        scale: Smallest and largest share of the area that a crop takes.
        ratio: Smallest and largest aspect ratio (width / height) of a crop.
        decoder: See `View`.
        augment: `data.augment`; None: a flip.
        resize: `data.resize`, already checked: S depends on the epoch, and `image_size` is unused.
        max_pixels: See `View`.
        draws: "counter": each sample has draws of its own, but for torchvision's augmentations;
            "global": it draws from the process's generators, as all samples did at first.

    Raises:
        UserError: If `augment` is invalid.
    """

    def __init__(
        self,
        image_size: int,
        scale: Sequence[float] = (0.08, 1.0),
        ratio: Sequence[float] = (3 / 4, 4 / 3),
        decoder: str = "auto",
        augment: Augment | Mapping[str, Any] | None = None,
        resize: Mapping[str, Any] | None = None,
        max_pixels: int = MOST_PIXELS,
        draws: str = "global",
    ) -> None:
        super().__init__(decoder, max_pixels)
        self.image_size = image_size
        self.scale = tuple(scale)
        self.ratio = tuple(ratio)
        self.augment = augment if isinstance(augment, Augment) else Augment(augment)
        self.resizing = Resizing.from_config(resize)
        self._counts = draws == "counter"

    @property
    def draws_apart(self) -> bool:
        own = type(self) is TrainView and type(self.augment) is Augment
        return own and self._counts and not self.augment.ops

    def of_sample(self, key: int) -> TrainView:
        if not self._counts:
            return self
        view = copy.copy(self)
        view.draws = CounterDraws(key)
        return view

    def side(self, epoch: int) -> int:
        return self.resizing.size(epoch) if self.resizing else self.image_size

    def crop(self, height: int, width: int, epoch: int) -> Crop:
        """Draws the crop and the flip."""
        size = self.side(epoch)
        box = random_crop(height, width, self.scale, self.ratio, self.draws)
        return Crop(*box, size, size, size, self.draws.random() < self.augment.flip)

    def changed(self, square: torch.Tensor) -> torch.Tensor:
        return self.augment(square, self.draws)


class EvalView(View):
    """Resizes the short side, then crops the centre.

    Pixels equal those of torchvision's reference, ClassificationPresetEval with `backend="tensor"`
    (https://github.com/pytorch/vision/blob/main/references/classification/presets.py): bilinear
    with antialias.

    Args:
        image_size: S, in pixels.
        short_side: Its length before the crop, S or more; None: 256/224 of S.
        decoder, max_pixels: See `View`.
    """

    def __init__(
        self,
        image_size: int,
        short_side: int | None = None,
        decoder: str = "auto",
        max_pixels: int = MOST_PIXELS,
    ) -> None:
        super().__init__(decoder, max_pixels)
        self.image_size = image_size
        self.short_side = short_side or round(image_size * 256 / 224)

    @property
    def draws_apart(self) -> bool:
        return type(self) is EvalView  # it draws nothing

    def side(self, epoch: int) -> int:
        return self.image_size

    def crop(self, height: int, width: int, epoch: int) -> Crop:
        """The same in every epoch."""
        return central_crop(height, width, self.short_side, self.image_size)
