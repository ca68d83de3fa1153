"""Whether the statistics of a checkpoint's batch norms fit its weights: of averages of the weights
(`optimizer=schedulefree`) that were saved between two steps they do not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distdl.util.errors import UserError

KEY = "distdl_averages"  # in a checkpoint


def refuse_unsettled(checkpoint: Mapping[str, Any], file: str) -> None:
    """For whoever uses the weights, and does not go on with the training.

    Raises:
        UserError: The statistics are of other weights.
    """
    if (checkpoint.get(KEY) or {}).get("settled", True):
        return
    raise UserError.at(
        file,
        what=(
            "its weights are averages, and its batch norms have the statistics of other weights: "
            "it "
            "was saved between two steps, to go on from"
        ),
        remedy="best.ckpt, or a checkpoint of an epoch's end: distdl resume RUN makes one",
        code="incomplete",
    )
