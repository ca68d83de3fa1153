"""Does an idea help? Five folds of the 1,800 photographs, against the recipe that it changes.

    python -m benchmarks.speedrun.cross_validate larger_rate muon --photographs DIR
    python -m benchmarks.speedrun.cross_validate muon --photographs DIR --folds 0 1  # a look
    python -m benchmarks.speedrun.cross_validate  # the table of what was trained

The photographs of photographs/train.txt are looked for below DIR. Each training is started as a
user starts it, with two processes, and its result is a file of its own: the same command goes on
where it was cut off. An idea and what it builds on take turns, fold by fold. A training takes about
7 CPU minutes.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.speedrun import folds, ideas, table
from benchmarks.speedrun.training import (
    Trained,
    at_least,
    known,
    one_message,
    read,
    said_of,
    trained,
)
from benchmarks.table import turned

MEASURED = Path(__file__).with_name("measured")
LINKS = Path("outputs/speedrun/folds")
NICENESS = 19


def place_of(file: Path) -> tuple[str, table.Place] | None:
    """The idea, and its fold and seed, of a result's file; None: it is no result of a fold."""
    name, _, rest = file.stem.rpartition("-fold")
    fold, _, seed = rest.partition("-seed")
    return (name, (int(fold), int(seed))) if fold.isdigit() and seed.isdigit() else None


def results_of(measured: Path) -> dict[str, dict[table.Place, Trained]]:
    """The results of a folder, by idea, fold and seed."""
    found: dict[str, dict[table.Place, Trained]] = {}
    for file in sorted(measured.glob("*.json")):
        if of := place_of(file):
            name, place = of
            found.setdefault(name, {})[place] = read(file)
    return found


def markdown(all_ideas: Mapping[str, ideas.Idea], measured: Path) -> str:
    """The table of the ideas that were trained at all, in the order of the file."""
    results = results_of(measured)
    rows = []
    for name in all_ideas:
        if name in results:
            other = ideas.compared_with(all_ideas, name)
            compared = table.compared(results[name], results.get(other or name, {}))
            rows.append(table.row(name, other, compared))
    return "\n".join([table.HEADER, *rows])


def main(typed: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speedrun.cross_validate", description=__doc__.splitlines()[0]
    )
    parser.add_argument("idea", nargs="*", help="names in ideas.yaml; none: only the table")
    folds.add_photographs(parser)
    parser.add_argument("--folds", type=int, nargs="+", default=list(range(folds.FOLDS)))
    parser.add_argument("--seeds", type=at_least(0), nargs="+", default=[0])
    parser.add_argument("--measured", type=Path, default=MEASURED, help="where results are kept")
    parser.add_argument("--links", type=Path, default=LINKS, help="where the folds are linked")
    parser.add_argument("--alone", action="store_true", help="not what an idea is compared with")
    args = parser.parse_args(typed)
    with one_message(parser):
        all_ideas = ideas.read()
        arms = {name: ideas.arguments(all_ideas, name) for name in args.idea}
        if arms:
            folds.require_photographs(args)
            if not set(args.folds) <= set(range(folds.FOLDS)):
                parser.error(f"--folds are from 0 to {folds.FOLDS - 1}")
            if not args.alone:
                others = [ideas.compared_with(all_ideas, name) for name in args.idea]
                before = {each: ideas.arguments(all_ideas, each) for each in others if each}
                arms = {**before, **arms}
            _train(arms, args)
        print(markdown(all_ideas, args.measured))


def _train(arms: Mapping[str, list[str]], args: argparse.Namespace) -> None:
    listing = folds.found(args.lists / "train.txt", args.photographs)
    ours = args.measured.resolve() == MEASURED.resolve()
    if ours and not folds.of_the_records(folds.digests({"train": listing})):
        raise ValueError(
            f"these are not the photographs of the leaderboard, whose results {MEASURED} has: "
            "keep those of others elsewhere, with --measured DIR"
        )
    for seed in args.seeds:
        for fold in args.folds:
            train, held_out = folds.fold_of(listing, fold)
            splits = {"train": train, "val": held_out}
            photographs = folds.together(folds.digests(splits))
            root = folds.link(args.links.resolve() / str(fold), splits)
            for name in turned(list(arms), fold):
                at = args.measured / f"{name}-fold{fold}-seed{seed}.json"
                # Also with the defaults of its day; those of the leaderboard's day say nothing of
                # their photographs.
                if known(at, said_of(arms[name], seed), photographs="" if ours else photographs):
                    continue
                started = time.perf_counter()
                result = trained(at, root, arms[name], seed, photographs=photographs)
                print(
                    f"{name}, fold {fold}, seed {seed}: {100 * result.accuracy:.1f} %, "
                    f"{result.cpu:.0f} CPU s in {time.perf_counter() - started:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )


if __name__ == "__main__":
    os.nice(NICENESS)  # it takes what other work leaves
    main()
