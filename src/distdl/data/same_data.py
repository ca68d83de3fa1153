"""All ranks of a run train on one data set."""

from __future__ import annotations

import socket

from distdl.distributed import process_group
from distdl.util.errors import UserError


def refuse_others(key: str) -> None:
    """Ends the run where another rank sees another data set: of the same URI a moment later, or in
    a folder that each node has of its own. Called by all ranks.

    Args:
        key: Tells data sets apart.

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
