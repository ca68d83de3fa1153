"""Which samples a run has trained on, by its own record (`callbacks.record_samples`)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import NamedTuple


class Batch(NamedTuple):
    attempt: int
    epoch: int
    step: int
    ids: list[str]


def read(run: Path) -> list[Batch]:
    """All batches of all ranks. A line that a kill has cut is left out."""
    batches = []
    for path in sorted((run / "logs").glob("samples-rank*.csv")):
        for line in path.read_text().splitlines():
            if line.count(",") == 3:
                attempt, epoch, step, ids = line.split(",")
                batches.append(Batch(int(attempt), int(epoch), int(step), ids.split()))
    return batches


def in_final_state(batches: list[Batch]) -> Counter[tuple[int, str]]:
    """How often each sample counts in the last weights, by (epoch, sample): what an attempt did
    after the checkpoint that the next one started from is lost with it."""
    kept: list[Batch] = []
    for attempt in sorted({batch.attempt for batch in batches}):
        new = [batch for batch in batches if batch.attempt == attempt]
        first = min(batch.step for batch in new)
        kept = [batch for batch in kept if batch.step < first] + new
    return Counter((batch.epoch, sample) for batch in kept for sample in batch.ids)


def lost_and_repeated(run: Path, twin: Path) -> tuple[int, int] | None:
    """Samples that count less often, and more often, than in the twin; None if none is known."""
    drilled, undisturbed = in_final_state(read(run)), in_final_state(read(twin))
    if not undisturbed:
        return None
    return (undisturbed - drilled).total(), (drilled - undisturbed).total()
