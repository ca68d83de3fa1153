"""Fine-tuning against training from scratch, on photographs.

    python -m benchmarks.fine_tuning --photographs DIR...        # about 40 CPU minutes

The photographs are those of `make speedrun`, ten classes. A ResNet-18 is trained on the first five
(`+experiment=first`, the first row there). Then the other five are learnt in 2, 5 and 10 epochs:
from its weights with a new head (`+experiment=finetune_cpu`), and from random weights. Each way has
the best of three rates, which are fixed here, by the first seed at 5 epochs; there are three seeds.

Each training is one command, as a user types it, and its result a file of its own below `--to`: the
same command goes on where it was cut off.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.speedrun import folds
from benchmarks.speedrun.training import Trained, one_message, trained
from benchmarks.table import Goal

CLASSES = 5
EPOCHS = (2, 5, 10)
CHOSEN_AT = 5
SEEDS = (0, 1, 2)
TUNED, SCRATCH = "fine-tuned", "from scratch"
# Per 256 images, as `optimizer.lr` is.
RATES = {TUNED: (0.2, 0.4, 0.8), SCRATCH: (0.2, 0.4, 0.8)}
GAINED = "points of top-1 that fine-tuning gains at 5 epochs"


@dataclass(frozen=True)
class Way:
    """One training: from which weights, at which rate, how long, and with which seed."""

    kind: str
    rate: float
    epochs: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.kind.replace(' ', '-')}-{self.rate:g}-{self.epochs}-seed{self.seed}"

    def arguments(self, weights: Path) -> list[str]:
        """Of `python -m distdl`, without those that `trained` adds.

        Args:
            weights: The run that has learnt the other classes.
        """
        changed = [
            f"trainer.max_epochs={self.epochs}",
            f"optimizer.lr={self.rate}",
            f"data.num_classes={CLASSES}",
        ]
        if self.kind == SCRATCH:
            # A ninth, as the experiment has it.
            warm_up = f"schedule.warmup_epochs={self.epochs / 9:.3f}"
            return ["+experiment=first", *changed, warm_up]
        # Few photographs have made these weights, so that early layers have much to learn as well:
        # with the experiment's layer_decay=0.75 a held-out fifth of the training photographs had
        # 49 to 54 % at these rates, and 57 % without. 1: also of two epochs.
        tuned = [f"model.weights={weights}", "model.unfreeze_at=1", "optimizer.layer_decay=null"]
        return ["+experiment=finetune_cpu", *changed, *tuned]


def divided(root: Path, lists: Path, photographs: Sequence[Path]) -> tuple[Path, Path]:
    """Folders of links to the first five classes, and to the others.

    Raises:
        ValueError: Photographs are missing, or `root` holds something else.
    """
    whole = {split: folds.found(lists / f"{split}.txt", photographs) for split in ("train", "val")}
    names = sorted(whole["train"])
    parts = []
    for part, kept in (("first", names[:CLASSES]), ("second", names[CLASSES:])):
        splits = {split: {name: listing[name] for name in kept} for split, listing in whole.items()}
        parts.append(folds.link(root / part, splits))
    return parts[0], parts[1]


def measured(to: Path, first: Path, second: Path) -> dict[Way, Trained]:
    """All trainings, of which those that have a result in `to` are not repeated."""
    base = to / "base.json"
    learnt = ["+experiment=first", f"data.num_classes={CLASSES}"]
    source = trained(base, first, learnt, SEEDS[0], keep=True)
    print(f"the first five classes: {100 * source.accuracy:.1f} %", flush=True)
    weights = base.with_suffix(".run") / "speedrun" / "run"
    done: dict[Way, Trained] = {}

    def learn(way: Way) -> None:
        if way in done:
            return
        each = trained(to / f"{way.name}.json", second, way.arguments(weights), way.seed)
        done[way] = each
        print(f"{way.name}: {100 * each.accuracy:.1f} %, {each.cpu:.0f} CPU s", flush=True)

    for kind, rates in RATES.items():
        for rate in rates:
            learn(Way(kind, rate, CHOSEN_AT, SEEDS[0]))
    best = best_rates(done)
    for epochs in (CHOSEN_AT, *EPOCHS):
        for seed in SEEDS:
            for kind in RATES:
                learn(Way(kind, best[kind], epochs, seed))
    return done


def best_rates(done: Mapping[Way, Trained]) -> dict[str, float]:
    """The most accurate rate of each kind, by the first seed at `CHOSEN_AT` epochs."""
    return {
        kind: max(rates, key=lambda rate: done[Way(kind, rate, CHOSEN_AT, SEEDS[0])].accuracy)
        for kind, rates in RATES.items()
    }


def accuracies(done: Mapping[Way, Trained], kind: str, epochs: int) -> list[float]:
    """In percent, by seed, at the best rate."""
    rate = best_rates(done)[kind]
    return [100 * done[Way(kind, rate, epochs, seed)].accuracy for seed in SEEDS]


def gained(done: Mapping[Way, Trained]) -> Goal:
    """In points, between the means of the seeds."""
    tuned = statistics.fmean(accuracies(done, TUNED, CHOSEN_AT))
    scratch = statistics.fmean(accuracies(done, SCRATCH, CHOSEN_AT))
    return Goal(GAINED, "at least 10", tuned - scratch)


def markdown(done: Mapping[Way, Trained]) -> str:
    best = best_rates(done)
    head = "".join(f" {epochs} epochs |" for epochs in EPOCHS)
    lines = [f"| | rate |{head}", "|---|---|" + "---|" * len(EPOCHS)]
    for kind, rates in RATES.items():
        tried = ", ".join(f"{rate:g}" for rate in rates)
        cells = "".join(f" {shown(accuracies(done, kind, epochs))} |" for epochs in EPOCHS)
        lines.append(f"| {kind} | {best[kind]:g} (of {tried}) |{cells}")
    samples = next(iter(done.values())).samples
    goal = gained(done)
    lines.append(
        f"\n{samples:,} photographs validated, {len(SEEDS)} seeds. {goal.what}: "
        f"**{goal.measured:.1f}** (goal: {goal.goal}: {goal.state})."
    )
    return "\n".join(lines)


def shown(values: Sequence[float]) -> str:
    """The mean, and the standard deviation of the seeds."""
    return f"{statistics.fmean(values):.1f} % (sd {statistics.stdev(values):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fine_tuning", description=(__doc__ or "").partition("\n")[0]
    )
    folds.add_photographs(parser)
    where = "the folder of the results"
    parser.add_argument("--to", type=Path, default=Path("build/fine-tuning"), help=where)
    args = parser.parse_args()
    to = args.to.resolve()
    with one_message(parser):
        folds.require_photographs(args)
        first, second = divided(to / "links", args.lists, args.photographs)
        print(markdown(measured(to, first, second)))


if __name__ == "__main__":
    main()
