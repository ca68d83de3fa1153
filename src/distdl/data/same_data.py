"""Checks that all ranks of a run see the same data set."""

from __future__ import annotations

import socket

from distdl.distributed import process_group
from distdl.util.errors import UserError


def refuse_others(key: str) -> None:
    """Ends the run if the ranks see different data sets. Must be called by all ranks.

    That happens if the data set at a URI is replaced during the start, or if nodes have different
    local folders.

    Args:
        key: Identifies the data set.

    Raises:
        UserError: On all ranks.
    """
    first, *others = process_group.gather((key, socket.gethostname()))
    for rank, other in enumerate(others, 1):
        if other[0] != first[0]:
            what = (
                f"the ranks see different data sets: {first[0]} is rank 0's, on {first[1]}, "
                f"and {other[0]} is rank {rank}'s, on {other[1]}"
            )
            remedy = "copy one of them to every node, or start again"
            raise UserError.at("data.root", what, remedy)
