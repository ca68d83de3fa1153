"""The time that the watchdog adds to a step: `watchdog.enabled=true` against `false`.

distdl's real worker trains the same tiny model, in one process and as two gloo ranks, each with one
thread: with the watchdog, without it, and without it again (A/A). These arms take turns
(benchmarks.turns). Two equal processes differ by 1 to 2 % for as long as they live, so each group
of arms consists of new processes, and what is added is the difference within a group. The arm that
starts first is slower by up to 3 %, so each arm is the first one in a third of the groups. The
threads and monitors of an arm that waits for its turn go on; so its use of the other cores is in
all arms.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from benchmarks import runs, turns
from benchmarks.pair import RANKS
from benchmarks.table import Result, added, row

# Blocks of about half a second: the watchdog acts twice a second.
WARM_UP, STEPS, ROUNDS, GROUPS = 200, 500, 5, 12
ON, OFF, AGAIN = "with it", "without it", "without it, again"
SIZES = {1: "one process", RANKS: f"{RANKS} gloo ranks"}
MOST_US = 20


def create_run(folder: Path, total: int, ranks: int, enabled: bool) -> Path:
    """A run of `total` steps, for its ranks to execute."""
    run = runs.create_run(
        folder,
        "model=tiny",
        f"model.first={WARM_UP}",
        f"model.steps={STEPS}",
        "data=tiny",
        f"data.steps={total * ranks}",
        "optimizer=none",
        "schedule=none",
        "trainer.accelerator=cpu",
        "trainer.max_epochs=1",
        f"trainer.devices={ranks}",
        "strategy=ddp",
        "tracking=none",
        f"watchdog.enabled={str(enabled).lower()}",
    )
    return run.path


def measured(ranks: int, groups: int) -> dict[str, list[float]]:
    """Microseconds per step of each arm and group."""
    total = turns.steps_in_all(WARM_UP, STEPS, ROUNDS)
    times: dict[str, list[float]] = {ON: [], OFF: [], AGAIN: []}
    for group in range(groups):
        first = group % len(times)
        order = [*times][first:] + [*times][:first]
        with tempfile.TemporaryDirectory() as name:
            logs, folder = Path(name) / "logs", Path(name) / "runs"
            logs.mkdir(), folder.mkdir()
            arms = {
                arm: turns.Arm(
                    runs.rank_main, [str(create_run(folder, total, ranks, arm == ON))], ranks
                )
                for arm in order
            }
            blocks, _ = turns.take(arms, ROUNDS, logs)
        for arm, seconds in blocks.items():
            times[arm].append(1e6 * statistics.median(seconds) / STEPS)
    return times


def main(groups: int = GROUPS) -> Result:
    rows, ratios = [], []
    for ranks, size in SIZES.items():
        times = measured(ranks, groups)
        middle, low, high = added(times[ON], times[OFF])
        _, least, most = added(times[AGAIN], times[OFF])
        rows += [row(f"{size}, {arm}: a step", times[arm], "us") for arm in times]
        rows.append(f"| {size}, added | {middle:.1f} | {low:.1f} | {high:.1f} | us | {groups} |")
        rows.append(f"| {size}, added, A/A | | {least:.1f} | {most:.1f} | us | {groups} |")
        ratios.append(middle)
    return Result(
        title="Added time per training step by the watchdog (us), tiny MLP",
        what="time that the watchdog adds to a tiny model's step (us)",
        competitor="the same run with watchdog.enabled=false",
        goal=f"at most {MOST_US}",
        ratio=ratios[0],
        rows=rows,
        notes=f"{GROUPS} groups of new processes, which take {ROUNDS} turns of {STEPS} steps each. "
        "What is added is the median of the groups' differences; its minimum and maximum are those "
        "of the interval that holds the median with 95 % confidence. A/A: the same of two arms "
        "without it. The goal is that of one process: the steps of two ranks, which wait for each "
        "other, differ by more than it.",
        command="python -m benchmarks.run watchdog",
    )
