"""The collectives of this rank, as torch's Flight Recorder has recorded them.

Source: https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html
"""

from __future__ import annotations

import json
import linecache
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

GLOO, NCCL = "_dump_fr_trace_json", "_dump_nccl_trace_json"  # torch's recorder of each
CAPACITY = "512"  # collectives; the newest ones are kept, and reading them takes 10 ms


class Collective(NamedTuple):
    """A collective that this rank has started, on its host's clock (`created`: nanoseconds since
    1970). `sizes` are the shapes of its inputs."""

    created: int
    number: int
    name: str
    sizes: list[list[int]]
    completed: bool

    def describe(self) -> dict[str, Any]:
        """As a sight has it."""
        state = "completed" if self.completed else "started"
        return {"op": self.name, "sizes": self.sizes, "seq": self.number, "state": state}


def enable() -> None:
    """Chooses how much is recorded, before the process group is made."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", CAPACITY)


def waits_in(file: str, line: int) -> bool:
    """Whether a thread whose innermost frame is this line may wait in a collective. `Work.wait` has
    no frame of its own."""
    return "/torch/" in file or ".wait(" in linecache.getline(file, line)


def collectives(*recorders: str) -> list[Collective]:
    """Those recorded, the oldest first; empty without a process group. Safe in any thread."""
    return sorted(_recorded(recorders or (GLOO, NCCL)))


def _recorded(recorders: tuple[str, ...]) -> Iterator[Collective]:
    from torch._C import _distributed_c10d as c10d

    for name in recorders:
        with suppress(AttributeError, RuntimeError, ValueError):  # of another version or backend
            for each in json.loads(getattr(c10d, name)()).get("entries") or ():
                yield Collective(
                    created=int(each["time_created_ns"]),
                    number=int(each["record_id"]),
                    name=str(each["profiling_name"]).rpartition(":")[2],
                    sizes=[list(size) for size in each.get("input_sizes") or ()],
                    completed=bool(each["retired"]) or each["state"] == "completed",
                )
