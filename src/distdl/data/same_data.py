"""Whether all ranks see the same data, and decode it in the same way."""

from __future__ import annotations

import logging
import socket

from distdl.distributed import process_group
from distdl.util.errors import UserError
from distdl.util.wording import first_few

log = logging.getLogger(__name__)


def refuse_different_data(key: str) -> None:
    """Raises UserError on all ranks if their data sets, each identified by its `key`, differ: the
    data at the URI was replaced during the start, or nodes have different local folders."""
    (first, host), *others = process_group.gather((key, socket.gethostname()))
    for rank, (other, its_host) in enumerate(others, 1):
        if other != first:
            raise UserError.at(
                "data.root",
                what=(
                    f"the ranks see different data sets: {first} is rank 0's, on {host}, "
                    f"and {other} is rank {rank}'s, on {its_host}"
                ),
                remedy="copy one of them to every node, or start again",
                code="mismatch",
            )


def name_different_decoders(decoder: str) -> None:
    """Warns on rank 0 if images are decoded in other ways on some nodes: all wait for the slowest.
    The pixels are the same."""
    of_nodes: dict[str, set[str]] = {}
    for each, host in process_group.gather((decoder, socket.gethostname())):
        of_nodes.setdefault(each, set()).add(host)
    if len(of_nodes) > 1:
        ways = [f"{each} on {first_few(sorted(hosts))}" for each, hosts in of_nodes.items()]
        text = "images: decoded by %s, so some nodes may be slower (docs/data/native.md)"
        log.warning(text, ", by ".join(ways))
