"""Examines the ranks that would train, and trains nothing."""

from __future__ import annotations

from omegaconf import DictConfig

from distdl.tools.doctor import examination
from distdl.util.ranges import AboveZero
from distdl.worker.rank_context import RankContext


def doctor(
    context: RankContext, config: DictConfig, expect: AboveZero | None = None
) -> dict[str, float]:
    """Prints a table of checks and writes ATTEMPT/doctor.json (docs/doctor.md).

    Args:
        expect: GB/s of a link between two hosts (on one host: of two ranks); None: by the VM size,
            where that is known.

    Returns:
        How many checks pass and warn, as `doctor/...`.

    Raises:
        Unfit: A check fails.
    """
    return examination.examine(config, context, expect)


doctor.before_build = True  # type: ignore[attr-defined]  # the worker builds nothing for it
