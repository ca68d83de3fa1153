"""The record against the first row of the leaderboard: three seeds, in turn, in one CPU time.

    python -m benchmarks.speedrun --photographs DIR...
    python -m benchmarks.speedrun                          # the leaderboard

The photographs of the lists in photographs/ are looked for below the folders, by class and name:
1,800 to train on, and 2,000 that the trainings are measured on. They are those of fast.ai's
imagenette. Each training's result is a file of its own, so the same command goes on where it was
cut off. It takes about 25 minutes on two idle cores.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from benchmarks.speedrun import folds, table
from benchmarks.speedrun.training import Trained, add_seeds, one_message, trained
from benchmarks.table import turned

FIRST = "first"
BUDGET = 1.00  # of the CPU time of the first row
RECORDS = Path(__file__).with_name("records.yaml")
COLUMNS = ("date", "commit", "experiment", "accuracy", "CPU ratio", "what changed and why")


@dataclass(frozen=True)
class Row:
    """A row of records.yaml: what a recipe reached when it was measured.

    Args:
        experiment: A file in conf/experiment.
        accuracy: Top-1 of each seed, from 0 to 1.
        cpu: The CPU time of each seed as a share of the first row's in the same round.
        date: When it was measured, YYYY-MM-DD.
        commit: Of distdl, which measured it.
        why: What changed since the row before, and why.
    """

    experiment: str
    accuracy: list[float]
    cpu: list[float]
    date: str = ""
    commit: str = ""
    why: str = ""


def rows(file: Path = RECORDS) -> list[Row]:
    """The rows of records.yaml, oldest first."""
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    return [Row(**{**node, "date": str(node["date"])}) for node in content]  # YAML knows dates


def markdown(records: Sequence[Row]) -> str:
    """The leaderboard, as RECORDS.md has it."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for record in records:
        cells = (
            record.date,
            record.commit,
            f"[{record.experiment}](conf/experiment/{record.experiment}.yaml)",
            *_figures(record),
            record.why.strip(),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _figures(record: Row) -> tuple[str, str]:
    """The accuracy and the CPU ratio of a row."""
    if not record.accuracy:
        return "not measured yet", ""
    percent = [100 * each for each in record.accuracy]
    seeds = ", ".join(f"{each:.1f}" for each in percent)
    accuracy = f"{statistics.mean(percent):.1f} ± {table.deviation(percent):.1f} % ({seeds})"
    return accuracy, f"{statistics.mean(record.cpu):.2f}"


def verdict(record: Row, arms: Mapping[str, Sequence[Trained]]) -> tuple[str, bool]:
    """What was measured now, and whether the record holds: accuracy within the spread that its row
    states, and CPU time within the budget.

    The spread of a difference between two means of n seeds each is the seeds' standard deviation
    times the square root of 2 / n; twice that covers chance.

    Raises:
        ValueError: The row has no figures yet.
    """
    if not record.accuracy:
        raise ValueError(f"records.yaml has no figures of {record.experiment} yet")
    ours, first = arms[record.experiment], arms[FIRST]
    accuracies = [each.accuracy for each in ours]
    mean = statistics.mean(accuracies)
    ratio = sum(each.cpu for each in ours) / sum(each.cpu for each in first)
    stated = statistics.mean(record.accuracy)
    spread = max(table.spread(record.accuracy), table.spread(accuracies))
    least = stated - 2 * spread * (2 / len(accuracies)) ** 0.5
    holds = mean >= least and ratio <= BUDGET
    lines = [
        *(_line(name, results) for name, results in arms.items()),
        f"CPU time of {record.experiment} / {FIRST}: {ratio:.3f} (at most {BUDGET:.2f})",
        f"the row says {100 * stated:.1f} %; at least {100 * least:.1f} % is within its spread",
        f"the record {'holds' if holds else 'does not hold'}",
    ]
    return "\n".join(lines), holds


def _line(name: str, results: Sequence[Trained]) -> str:
    accuracies = [100 * each.accuracy for each in results]
    spread = f" ± {statistics.stdev(accuracies):.1f}" if len(accuracies) > 1 else ""
    each = ", ".join(f"{accuracy:.1f}" for accuracy in accuracies)
    cpu = statistics.mean(result.cpu for result in results)
    mean = f"{statistics.mean(accuracies):.1f}{spread} %"
    return f"{name}: {mean} of {results[0].samples} ({each}), {cpu:.0f} CPU s"


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(typed: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speedrun", description=__doc__.splitlines()[0]
    )
    folds.add_photographs(parser)
    add_seeds(parser)
    args = parser.parse_args(typed)
    record = rows()[-1]
    if not args.photographs:
        print(markdown(rows()))
        return 0
    with one_message(parser):
        splits = {
            "train": folds.found(args.lists / "train.txt", args.photographs),
            "val": folds.found(args.lists / "val.txt", args.photographs),
        }
        root = folds.link((args.results / "photographs").resolve(), splits)
        names = list(dict.fromkeys([FIRST, record.experiment]))
        arms: dict[str, list[Trained]] = {name: [] for name in names}
        number = 0
        for seed in range(args.seeds):
            for name in turned(names, seed):
                number += 1
                of = f"training {number} of {args.seeds * len(names)}"
                at = args.results / f"{name}-seed{seed}.json"
                how = f"known, {at}" if at.is_file() else "about 4 minutes on two idle cores"
                say(f"{of}: {name}, seed {seed} ({how})")
                result = trained(at, root, [f"+experiment={name}"], seed)
                arms[name].append(result)
                say(_line(name, [result]))
        text, holds = verdict(record, arms)
    print(text)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
