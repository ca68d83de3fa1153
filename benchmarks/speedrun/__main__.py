"""The record against the first row of the leaderboard: three seeds, in turn, in one CPU time.

    python -m benchmarks.speedrun --photographs DIR...
    python -m benchmarks.speedrun small_float32 --photographs DIR...  # another row
    python -m benchmarks.speedrun                                     # the leaderboard

The photographs of the lists in photographs/ are looked for below the folders, by class and name:
1,800 to train on, and 2,000 that the trainings are measured on. They are those of fast.ai's
imagenette. Each training's result is a file of its own, so the same command goes on after the
last one that ended. It takes about 25 minutes on two idle cores.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from benchmarks.speedrun import folds, table
from benchmarks.speedrun.bare_loop import longest_by_shortest
from benchmarks.speedrun.training import Trained, add_seeds, one_message, run_folder, trained
from benchmarks.table import turned
from distdl.util.suggest import did_you_mean_word

FIRST = "first"
OTHERS = (
    "these are not the photographs of the leaderboard (others with their names, of another size?): "
    "compare the two recipes, not their figures with the rows'"
)
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


def best(records: Sequence[Row]) -> Row:
    """The record: the row with the highest mean."""
    measured = [record for record in records if record.accuracy]
    return max(measured, key=lambda record: statistics.mean(record.accuracy))


def verdict(row: Row, arms: Mapping[str, Sequence[Trained]]) -> tuple[str, bool]:
    """Whether the row holds by what was measured now: accuracy as it states, but for chance, and
    CPU time within the budget. A row without figures holds if the time does. More CPU time decides
    nothing if equal trainings differ by as much, or if there is one of each: other work on the host
    may double it.

    Chance is twice the standard error of the difference of two means, of n and of m seeds: the
    row's standard deviation times the square root of 1 / n + 1 / m. That of the seeds trained now
    does not count, so that a noisy repetition has no lower limit.
    """
    ours = arms[row.experiment]
    ratio, apart = _times(row, arms)
    lines = list[str]()
    accurate = True
    if row.accuracy:
        stated = statistics.mean(row.accuracy)
        error = table.spread(row.accuracy) * (1 / len(row.accuracy) + 1 / len(ours)) ** 0.5
        least = stated - 2 * error
        reached = statistics.mean(each.accuracy for each in ours)
        accurate = reached >= least
        lines.append(
            f"{100 * reached:.1f} % measured; the row says {100 * stated:.1f} %, so at least "
            f"{100 * least:.1f} % is needed (two standard errors less)"
        )
    else:
        lines.append(f"records.yaml has no figures of {row.experiment} yet")
    holds = accurate and ratio <= BUDGET
    undecided = accurate and not holds and (len(ours) == 1 or apart >= ratio / BUDGET)
    if holds:
        end = "holds"
    elif undecided:
        end = "is undecided: its CPU time needs more seeds, or a host without other work"
    else:
        end = "does not hold"
    lines.append(f"the row {row.experiment} {end}")
    return "\n".join(lines), holds


def measured(row: Row, arms: Mapping[str, Sequence[Trained]]) -> str:
    """The accuracies and the CPU times, as they are."""
    ratio, apart = _times(row, arms)
    time_of = f"CPU time of {row.experiment} / {FIRST}: {ratio:.3f} (at most {BUDGET:.2f})"
    if len(arms[row.experiment]) > 1:
        time_of += f"; equal trainings differ by a factor of up to {apart:.2f}"
    return "\n".join([*(_line(name, results) for name, results in arms.items()), time_of])


def _times(row: Row, arms: Mapping[str, Sequence[Trained]]) -> tuple[float, float]:
    """The row's CPU time as a share of the first row's, and the ratio of the longest and the
    shortest of equal trainings."""
    ours, first = arms[row.experiment], arms[FIRST]
    ratio = sum(each.cpu for each in ours) / sum(each.cpu for each in first)
    return ratio, max(longest_by_shortest(ours), longest_by_shortest(first))


def _line(name: str, results: Sequence[Trained]) -> str:
    accuracies = [100 * each.accuracy for each in results]
    spread = f" ± {statistics.stdev(accuracies):.1f}" if len(accuracies) > 1 else ""
    each = ", ".join(f"{accuracy:.1f}" for accuracy in accuracies)
    cpu = statistics.mean(result.cpu for result in results)
    mean = f"{statistics.mean(accuracies):.1f}{spread} %"
    return f"{name}: {mean} of {results[0].samples} ({each}), {cpu:.0f} CPU s"


def _row(records: Mapping[str, Row], name: str | None) -> Row:
    if name is None:
        return best([*records.values()])
    if name not in records:
        near = did_you_mean_word(name, records) or f"there are: {', '.join(records)}"
        raise ValueError(f"{name} is no row of {RECORDS.name}; {near}")
    return records[name]


def _day(file: Path) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(file.stat().st_mtime))


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(typed: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speedrun", description=__doc__.splitlines()[0]
    )
    parser.add_argument("row", nargs="?", help="default: the record, the most accurate one")
    folds.add_photographs(parser)
    add_seeds(parser)
    words = sys.argv[1:] if typed is None else typed
    args = parser.parse_args(words)
    records = {row.experiment: row for row in rows()}
    if not words:
        print(markdown([*records.values()]))
        return 0
    with one_message(parser):
        folds.require_photographs(args)
        row = _row(records, args.row)
        splits = folds.measured(args.lists, args.photographs)
        digests = folds.digests(splits)
        photographs = folds.together(digests)
        root = folds.link((args.results / "photographs").resolve(), splits)
        if not (same := folds.of_the_records(digests)):
            say(OTHERS)
        names = list(dict.fromkeys([FIRST, row.experiment]))
        arms: dict[str, list[Trained]] = {name: [] for name in names}
        number = 0
        for seed in range(args.seeds):
            for name in turned(names, seed):
                number += 1
                of = f"training {number} of {args.seeds * len(names)}"
                at = args.results / f"{name}-seed{seed}.json"
                how = f"3 to 4 minutes on idle cores; its output: {run_folder(at)}/output.txt"
                if at.is_file():
                    how = f"known from {_day(at)}"
                say(f"{of}: {name}, seed {seed} ({how})")
                said = [f"+experiment={name}"]
                result = trained(at, root, said, seed, photographs=photographs)
                arms[name].append(result)
                say(_line(name, [result]))
    print(measured(row, arms))
    text, holds = verdict(row, arms)
    print(text if same else OTHERS)
    print(
        f"{args.results} keeps the results and the runs, for `distdl report`; a training whose "
        "file is removed is done again"
    )
    return 0 if holds and same else 1


if __name__ == "__main__":
    sys.exit(main())
