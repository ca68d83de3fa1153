"""Progressive resizing: small images first, large ones at the end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from distdl.util.errors import Problem
from distdl.util.suggest import did_you_mean

MULTIPLE = 32  # by default: the total stride of most networks; other sizes waste work at the edges
KEYS = ("from", "to", "from_epoch", "until_epoch", "multiple")


@dataclass(frozen=True)
class Resizing:
    """`data.resize`: the size of training images as a function of the epoch alone.

    It is `start` until `from_epoch`, `stop` from `until_epoch` on, and interpolated linearly
    between them, rounded to multiples of `multiple`. This is ffcv-imagenet's get_resolution
    (https://github.com/libffcv/ffcv-imagenet/blob/main/train_imagenet.py; its ResNet-50 of 88
    epochs goes from 160 to 192 between epochs 65 and 76).
    """

    start: int
    stop: int
    from_epoch: int
    until_epoch: int
    multiple: int = MULTIPLE

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None) -> Resizing | None:
        """From {from, to, from_epoch (default 0), until_epoch, multiple (default 32)}; None if
        `config` is empty."""
        if not config:
            return None
        first = config.get("from_epoch", 0)
        multiple = config.get("multiple", MULTIPLE)
        return cls(config["from"], config["to"], first, config["until_epoch"], multiple)

    @staticmethod
    def check(config: Mapping[str, Any] | None) -> Iterable[Problem]:
        """Problems of `data.resize`; paths are relative to the data node."""
        example = "data.resize={from: 160, to: 192, until_epoch: 76}"
        if config is not None and not isinstance(config, Mapping):
            yield Problem(
                "resize",
                what=f"is {config!r}, not a mapping",
                remedy=f"'{example}'",
                code="wrong-type",
            )
            return
        if not config:
            return
        for key in config:
            if key not in KEYS:
                yield Problem(
                    f"resize.{key}",
                    what="unknown",
                    remedy=did_you_mean(key, KEYS) or f"known keys: {', '.join(KEYS)}",
                    code="unknown-key",
                )
        missing = [key for key in ("from", "to", "until_epoch") if key not in config]
        if missing:
            yield Problem(
                "resize", what=f"lacks {', '.join(missing)}", remedy=example, code="incomplete"
            )
            return
        wrong = [k for k in config if k in KEYS and (type(config[k]) is not int or config[k] < 0)]
        for key in wrong:
            yield Problem(
                f"resize.{key}",
                what=f"is {config[key]!r}, not a whole number",
                remedy=example,
                code="wrong-type",
            )
        if wrong:
            return
        multiple = config.get("multiple", MULTIPLE)
        if multiple < 1:
            yield Problem(
                "resize.multiple",
                what=f"is {multiple}, not a number of pixels",
                remedy=f"data.resize.multiple={MULTIPLE}",
                code="out-of-range",
            )
            return
        for key in ("from", "to"):
            if config[key] < multiple or config[key] % multiple:
                nearest = max(multiple, round(config[key] / multiple) * multiple)
                yield Problem(
                    f"resize.{key}",
                    what=f"is {config[key]}, not a multiple of {multiple}",
                    remedy=f"data.resize.{key}={nearest}",
                    code="out-of-range",
                )
        first = config.get("from_epoch", 0)
        last = config["until_epoch"]
        if last <= first:
            yield Problem(
                "resize.until_epoch",
                what=f"is {last}, not after from_epoch={first}",
                remedy=f"data.resize.until_epoch={first + 1}",
                code="out-of-range",
            )

    def size(self, epoch: int) -> int:
        """Height and width in pixels; epochs count from 0."""
        done = (epoch - self.from_epoch) / (self.until_epoch - self.from_epoch)
        size = self.start + min(max(done, 0.0), 1.0) * (self.stop - self.start)
        return round(size / self.multiple) * self.multiple
