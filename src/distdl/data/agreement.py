"""All ranks of a run train on one data set."""

from __future__ import annotations

import socket

from distdl import cluster
from distdl.errors import Problem, UserError


def refuse_others(key: str) -> None:
    """Ends the run where another rank sees another data set: of the same URI a moment later, or in
    a folder that each node has of its own. Called by all ranks.

    Args:
        key: Tells data sets apart.

    Raises:
        UserError: On all ranks.
    """
    seen = cluster.gather((key, socket.gethostname()))
    other = next((rank for rank, (found, _) in enumerate(seen) if found != seen[0][0]), None)
    if other is not None:
        (first, here), (second, there) = seen[0], seen[other]
        what = (
            f"the ranks see different data sets: {first} is rank 0's, on {here}, "
            f"and {second} is rank {other}'s, on {there}"
        )
        remedy = "copy one of them to every node, or start again"
        raise UserError(Problem("data.root", what, remedy))
