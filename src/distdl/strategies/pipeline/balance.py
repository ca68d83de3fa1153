"""Where to cut the chain of blocks, and the resulting idle time of the devices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from distdl.util.errors import UserError
from distdl.util.suggest import closest

# Idle time per schedule with one piece per device, as a share of the time that one micro-batch
# takes to fill the pipeline. Interleaving v pieces divides it by v (Narayanan et al. 2021,
# "Efficient Large-Scale Language Model Training", arXiv 2104.04473, section 2.2). Zero bubble: the
# schedule H1 of Qi et al. 2023, "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241, section 2.2),
# if forward, input gradient and weight gradient take equally long.
FILLING = {"gpipe": 1.0, "1f1b": 1.0, "interleaved": 1.0, "zero_bubble": 1 / 3}
SEVERAL_PIECES = ("interleaved", "zero_bubble")  # several pieces of the model per device


def partition(costs: Sequence[float], pieces: int) -> list[int]:
    """Cuts a chain of blocks so that the cost of the most expensive piece is minimal.

    Piece i has the blocks, at least one, from bounds[i] to bounds[i + 1] of the returned bounds.
    """
    total = list(itertools.accumulate(costs, initial=0.0))
    count = len(costs)
    assert 1 <= pieces <= count
    # best[j]: the largest piece's cost in the best cut of the first j blocks into k pieces.
    best = [0.0, *[math.inf] * count]
    cuts: list[list[int]] = []
    for k in range(1, pieces + 1):
        row = [math.inf] * (count + 1)
        chosen = [0] * (count + 1)
        for j in range(k, count + 1):
            options = ((max(best[i], total[j] - total[i]), i) for i in range(k - 1, j))
            row[j], chosen[j] = min(options)
        best = row
        cuts.append(chosen)
    bounds = [count]
    for chosen in reversed(cuts):
        bounds.append(chosen[bounds[-1]])
    return bounds[::-1]


def even_out(costs: Sequence[float], bounds: Sequence[int], devices: int) -> list[int]:
    """Moves the cuts, one block at a time, as long as this makes the slowest devices faster.

    With several pieces per device, the bounds from `partition` are only a start. The time of a
    device i is the sum of its pieces i, i + devices, i + 2 * devices and so on.
    """

    def loads(cuts: Sequence[int]) -> list[float]:
        pieces = [sum(costs[start:end]) for start, end in itertools.pairwise(cuts)]
        return sorted((sum(pieces[d::devices]) for d in range(devices)), reverse=True)

    best = list(bounds)
    while True:
        # Move one cut or two at once: shifting a piece between two others needs both.
        moved = [list(best)]
        for first in range(1, len(best) - 1):
            for second in range(first, len(best) - 1):
                for a, b in itertools.product((-1, 0, 1), repeat=2):
                    cuts = list(best)
                    cuts[first] += a
                    cuts[second] += b if second != first else 0
                    if all(low < high for low, high in itertools.pairwise(cuts)):
                        moved.append(cuts)
        best_move = min(moved, key=loads)
        if loads(best_move) >= loads(best):
            return best
        best = best_move


def cut_at(names: Sequence[str], starts: Sequence[str], pieces: int) -> list[int]:
    """Bounds from the names of all blocks, in order, and of those at which a new piece starts.

    Raises:
        UserError: A name is unknown, they are out of order, or their number is wrong.
    """
    path = "strategy.balance"
    for name in starts:
        if name not in names:
            near = closest(str(name), list(names))
            raise UserError.at(
                path,
                what=f"the model has no block {name!r}",
                remedy=f"did you mean {near}?" if near else f"one of {', '.join(names)}",
                code="incomplete",
            )
    bounds = [0, *(names.index(name) for name in starts), len(names)]
    if sorted(set(bounds)) != bounds:
        raise UserError.at(
            path,
            what="the blocks are not in the model's order, or include its first block",
            code="mismatch",
        )
    if len(starts) != pieces - 1:
        raise UserError.at(
            path,
            what=f"names {len(starts)} blocks, and {pieces} pieces need {pieces - 1}",
            remedy="name the first block of each piece except the first piece",
            code="mismatch",
        )
    return bounds


def bubble(schedule: str, stages: Sequence[float], pieces: int, micro_batches: int) -> float:
    """The predicted share of the time (0 to 1) in which a device waits for another.

    `stages` are the costs of one micro-batch on each device, in any unit.
    """
    slowest = max(stages)
    work = sum(stages)
    duration = micro_batches * slowest + FILLING[schedule] / pieces * (work - slowest)
    return 1 - micro_batches * work / (len(stages) * duration)
