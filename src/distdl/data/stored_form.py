"""What a domain's data module says of its samples, which `StoredData` checks and opens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from distdl.data.encoded import EncodedData
from distdl.data.listed import ListedImages
from distdl.datasets.format import MANIFEST
from distdl.datasets.left_out import LeftOut
from distdl.datasets.reading import DataSet
from distdl.domains.domain import Domain
from distdl.util.errors import Problem


class StoredForm:
    """How the samples of a domain lie in a folder, and what a prepared set of them must have."""

    domain: Domain
    # Whether `open_listed` can predict a folder of images alone.
    reads_listed = False

    @classmethod
    def check_folder(cls, root: Path, node: Mapping[str, Any]) -> Iterable[Problem]:
        """Problems of a folder that is not prepared; paths are relative to the data node."""
        yield Problem(
            "root",
            what=f"{root} has no {MANIFEST}",
            remedy="python -m distdl prepare ... makes a prepared data set",
            code="incomplete",
        )

    @classmethod
    def count_folder(cls, root: Path, node: Mapping[str, Any]) -> int:
        """How many training samples a folder has in which `check_folder` finds no problem."""
        raise NotImplementedError

    @classmethod
    def count_up_to(cls, root: Path, node: Mapping[str, Any], enough: int) -> int:
        """As `count_folder`, but it may end where there are `enough` samples."""
        return cls.count_folder(root, node)

    def open_folder(self, root: Path, left_out: LeftOut) -> Mapping[str, EncodedData]:
        """The splits "train" and "val" of such a folder; what is no sample is added to `left_out`.

        Raises:
            UserError: It holds no samples, or samples that are ambiguous.
            OSError: It cannot be read.
        """
        raise NotImplementedError

    def open_listed(self) -> ListedImages:
        """The images below `root`, to predict: neither prepared nor divided into splits."""
        raise NotImplementedError

    @classmethod
    def added(cls, node: Mapping[str, Any]) -> int:
        """How many training samples an epoch has beside those of `root`."""
        return 0

    @classmethod
    def required(cls, node: Mapping[str, Any]) -> Sequence[str]:
        """The splits that a prepared data set must have."""
        return ("train", "val")

    def wanted(self, splits: Mapping[str, object]) -> list[str]:
        """Those of a data set's splits that are opened; training and validation are among them."""
        return ["train", "val"]

    def opened_shards(self, data: DataSet) -> None:
        """Called when `splits` are those of a prepared data set."""

    @classmethod
    def misfits(cls, data: DataSet, node: Mapping[str, Any]) -> Iterable[Problem]:
        """How a prepared data set differs from the data node; paths are relative to the node."""
        splits = data.manifest.splits
        uri = data.store.uri
        if data.manifest.domain != cls.domain.name:
            yield Problem(
                "root",
                what=f"{uri} was prepared for {data.manifest.domain}, not for {cls.domain.name}",
                remedy="choose data and model of that domain, or another root",
                code="mismatch",
            )
            return
        for split in sorted({*cls.required(node)} - splits.keys()):
            yield Problem(
                "root",
                what=f"{uri} has no {split!r}",
                remedy=f"it has {[*splits]}",
                code="incomplete",
            )
        for name in [name for name in cls.required(node) if not splits[name].samples]:
            yield Problem(
                "root",
                what=f"{uri} has no sample in {name!r}",
                remedy="python -m distdl prepare ... makes both splits (docs/data/prepare.md)",
                code="incomplete",
            )
