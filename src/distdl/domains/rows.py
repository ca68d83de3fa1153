"""Part 5 of a domain: what `task=predict` stores of a sample."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np
import torch

from distdl.util.errors import UserError

HALVES = (torch.float16, torch.bfloat16)  # which NumPy or JSON lack
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
NUMBERS = (torch.bool, torch.float32, torch.float64, torch.uint16, torch.uint32, *INTEGERS)
# By name: for each sample a value or an array, [samples, ...]. Rows of several lengths, such as the
# boxes of an image, are NumPy arrays of objects, [samples].
Columns = dict[str, torch.Tensor | np.ndarray]

# A stored row: of a column's name, its value; None or "": it has none.
Row = Mapping[str, object]


@dataclass
class Predicted:
    """The samples of one part of the rows, in their order."""

    indices: np.ndarray  # int64 [N], in the order of the loader
    names: np.ndarray | None = None  # texts [N]; None: the data set names no samples
    known: dict[str, np.ndarray] = field(default_factory=dict)  # `EncodedData.known`, by column
    errors: np.ndarray | None = None  # texts [N], "" for an intact sample; None as above
    classes: Sequence[str] = ()  # names by label, of the checkpoint or the data; may be unknown


class RowTable(NamedTuple):
    """Rows of a part. `missing` says for some columns which rows have no value, bool [rows].
    `counts` are added up over the parts; "samples" among them, if there is not a row per sample."""

    columns: dict[str, np.ndarray]
    missing: dict[str, np.ndarray]
    counts: dict[str, int]


class PredictedRows:
    """What a row holds. Made once for each prediction (`Domain.rows`).

    These are the rows of a module without a domain: the tensors that `predict_step` returned.

    Args:
        named: Whether the data set names its samples: the rows then have "name", what is known of
            the sample, and "error", otherwise its "index".
    """

    # Whether all batches must give equal columns: the type and the shape of a sample's value.
    uniform = True

    def __init__(self, named: bool) -> None:
        self.named = named

    def of_batch(self, outputs: object, size: int) -> Columns:
        """What is kept of what `predict_step` returned for a batch of `size` samples, fillers
        included. Called on each rank, which need not wait for a device: a later call may do that.

        Raises:
            UserError: The outputs are no table of `size` rows, or have a column of a reserved name.
        """
        reserved = ("name", "label", "error") if self.named else ("index",)
        return dict(on_host(outputs, size, reserved))

    def table(self, columns: dict[str, np.ndarray], samples: Predicted) -> RowTable:
        """The rows of a part, of `Columns` as NumPy arrays. Called on rank 0."""
        if samples.names is None or samples.errors is None:
            return RowTable({"index": samples.indices, **columns}, {}, {})
        intact = samples.errors == ""
        missing = {**dict.fromkeys(columns, ~intact), "error": intact}
        before = {"name": samples.names, **samples.known}
        rows = {**before, **columns, "error": samples.errors}
        return RowTable(rows, missing, {"damaged": int((~intact).sum())})

    def metrics(self, counts: Mapping[str, int], samples: int) -> dict[str, float]:
        """What is said at the end of a prediction of `samples` samples, by name. `counts` is the
        sum of the parts'. Called on each rank."""
        return {"predict/damaged": float(counts["damaged"])} if "damaged" in counts else {}

    def finish(
        self, folder: Path, rows: Callable[[], Iterable[Row]], columns: Sequence[str]
    ) -> list[str]:
        """Writes further files of all rows into their folder, and returns the names. Called on rank
        0 when all rows are stored. By default there are none.

        Args:
            rows: Reads the stored rows, in their order, each time it is called.
            columns: The names of their columns, also if there is no row.
        """
        return []


def on_host(outputs: object, size: int, reserved: Sequence[str] = ()) -> dict[str, torch.Tensor]:
    """What `predict_step` returned for a batch, each [size, ...]. Raises UserError if it is no
    table of `size` rows, or has a column of a `reserved` name."""
    tensors = outputs if isinstance(outputs, Mapping) else {"prediction": outputs}
    if not tensors:
        refuse_output("predict_step returned an empty dict")
    names = [*map(str, tensors)]
    for name, value in zip(names, tensors.values(), strict=True):
        if name in reserved or names.count(name) > 1:
            whose = "a column of distdl" if name in reserved else "another key"
            raise UserError.at(
                "model",
                what=f"predict_step returned {name!r}, which is also the name of {whose}",
                remedy="return it under another name",
                code="conflict",
            )
        if why := unfit(value, size):
            refuse_output(
                f"predict_step returned {why}" + (f" as {name!r}" if outputs is tensors else "")
            )
    return {
        name: (value.float() if value.dtype in HALVES else value).detach().cpu()
        for name, value in zip(names, tensors.values(), strict=True)
    }


def unfit(value: object, size: int) -> str:
    """Why a value cannot be a column of `size` rows; "" if it can."""
    if not isinstance(value, torch.Tensor):
        return f"a value of type {type(value).__name__}"
    if value.is_nested:
        return "a nested tensor, whose rows differ in length"
    if value.layout is not torch.strided or value.is_quantized:
        return "a sparse or quantized tensor"
    if value.is_complex() or (value.dtype not in NUMBERS and value.dtype not in HALVES):
        return f"a tensor of {value.dtype}, which a table cannot hold"
    if value.shape[:1] != (size,):
        return f"a tensor of shape {[*value.shape]} for {size} samples"
    if 0 in value.shape:
        return f"a tensor of shape {[*value.shape]}, which has no values"
    return ""


def refuse_output(what: str) -> NoReturn:
    raise UserError.at(
        "model",
        what=what,
        remedy=(
            "return a tensor of numbers, or a dict of such tensors, whose first dimension is the "
            "batch: complex numbers by torch.view_as_real, rows of other lengths padded"
        ),
        code="wrong-type",
    )
