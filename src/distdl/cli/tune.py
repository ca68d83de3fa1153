"""`python -m distdl tune [overrides] KEY=SPACE ...`: an engine searches for the best values."""

from __future__ import annotations

import argparse
import fcntl
import importlib.util
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from distdl.cli.arguments import Parser
from distdl.util.answers import Answer
from distdl.util.errors import Problem, UserError
from distdl.util.exit_codes import EXIT_FAILURE
from distdl.util.extras import install
from distdl.util.screen import say

if TYPE_CHECKING:
    from distdl.tools.search.preparing import PreparedSearch
    from distdl.tools.search.search import Search
    from distdl.tools.search.storage import Address

EPILOG = """\
A space is written as Hydra writes it: KEY=a,b  KEY=choice(a,b)  KEY=range(1,9)  KEY=interval(0,1)
KEY=int(interval(1,9))  KEY=tag(log, interval(0.01,1)), or for short KEY=log(0.01,1).
tune=NAME stands for the lines of conf/tune/NAME.yaml. The same command goes on with a study.

  python -m distdl tune +experiment=resnet50_ddp 'optimizer.lr=log(0.01,1)' --trials 30 --budget 2h
  python -m distdl tune model=resnet18 tune=sgd --pruner halving --parallel 2
"""
BUDGET = re.compile(r"(\d+\.?\d*)\s*(s|min|m|h|d)", re.ASCII)
SECONDS = {"s": 1, "min": 60, "m": 60, "h": 3600, "d": 86400}
SAMPLERS = ("tpe", "random", "grid", "qmc", "cmaes")
PRUNERS = ("asha", "hyperband", "median", "halving")
CHECKPOINTS = ("keep", "remove")
TRIALS = 20


def main(argv: Sequence[str]) -> Answer:
    """Runs the trials that are missing; the exit code is 1 if none has a value."""
    options = parsed(argv)
    seconds, trial_seconds = checked(options)
    if importlib.util.find_spec("optuna") is None:
        raise UserError.at(
            "tune", what="needs Optuna", remedy=install("optuna"), code="not-installed"
        )

    from distdl.launch import dry_run
    from distdl.tools.search import preparing, screen
    from distdl.tools.search.storage import Address

    address = None if options.storage is None else Address.of(options.storage)
    if address is not None:  # what is recorded of this command has no password
        sys.argv = [word.replace(address.typed, address.shown) for word in sys.argv]
    prepared = preparing.prepare(
        options.overrides,
        sampler=options.sampler,
        pruner=options.pruner,
        metrics=options.metric,
        parallel=options.parallel,
        trial_seconds=trial_seconds,
        discards=options.pruned_checkpoints == "remove",
    )
    screen.spaces(prepared.searched)
    if prepared.first.config.dry_run:
        flags = ("trials", "budget", "sampler", "pruner", "storage")
        screen.dry(prepared, {f"--{flag}": getattr(options, flag) for flag in flags})
        return dry_run.answer(prepared.first)
    folder = prepared.first.run.path.parent
    with alone(folder):
        search = search_of(prepared, options, seconds, address)
        screen.begin(search, options.sampler)
        code = run(search)
    page, following = screen.end(search, prepared)
    from distdl.tools.search.answer import answer_of

    nothing = not search.complete and not search.paused
    answer = answer_of(search, page, screen.again(), following)
    return Answer(answer, code or (EXIT_FAILURE if nothing else 0))


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        "python -m distdl tune",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", default=[], help="as for a run, and spaces")
    about = f"of the study in all, earlier commands included ({TRIALS}; --sampler grid: all points)"
    parser.add_argument("--trials", type=int, metavar="N", help=about)
    parser.add_argument("--budget", metavar="TIME", help="no trial starts after it: 90min, 2h")
    about = "of each trial's training, whose schedule ends with it: 10min (trainer.max_time)"
    parser.add_argument("--trial-budget", metavar="TIME", help=about)
    about = "trials at once (as many as groups of GPUs here, else 1)"
    parser.add_argument("--parallel", type=int, metavar="N", help=about)
    parser.add_argument("--sampler", choices=SAMPLERS, default="tpe", help="who proposes (tpe)")
    about = "ends trials that are worse than others after some of their validations (none)"
    parser.add_argument("--pruner", choices=PRUNERS, help=about)
    about = "what becomes of those that are pruned for good (keep)"
    parser.add_argument("--pruned-checkpoints", choices=CHECKPOINTS, default="keep", help=about)
    about = "val/loss:min; may be repeated (default: the metric that chooses best.ckpt)"
    parser.add_argument("--metric", action="append", default=[], metavar="NAME:MODE", help=about)
    about = "of the study, for Optuna: sqlite:///study.db (a file in its folder)"
    parser.add_argument("--storage", metavar="URL", help=about)
    return parser.parse_intermixed_args(list(argv))


def checked(options: argparse.Namespace) -> tuple[float | None, int | None]:
    """The budget and that of a trial, in seconds; None: there is none."""
    problems = []
    for flag in ("trials", "parallel"):
        value = getattr(options, flag)
        if value is not None and value < 1:
            problems.append(
                Problem(
                    f"--{flag}",
                    what=f"must be 1 or more, not {value}",
                    remedy=f"--{flag} 1",
                    code="out-of-range",
                )
            )
    if options.pruned_checkpoints == "remove" and options.pruner is None:
        flag = "--pruned-checkpoints remove"
        problems.append(
            Problem(
                flag,
                what="no trial is pruned without --pruner",
                remedy=f"{flag} --pruner halving",
                code="conflict",
            )
        )
    whole = _seconds(options.budget)
    if options.budget is not None and not whole:
        problems.append(
            Problem(
                "--budget",
                what=f"{options.budget!r} is no time in which a trial can start",
                remedy="--budget 90min or 2h",
                code="wrong-kind",
            )
        )
    each = _seconds(options.trial_budget)
    if options.trial_budget is not None and each < 1:
        problems.append(
            Problem(
                "--trial-budget",
                what=(
                    f"{options.trial_budget!r} is no time in which a trial can train, "
                    "a second or more"
                ),
                remedy="--trial-budget 10min or 1h",
                code="wrong-kind",
            )
        )
    if problems:
        raise UserError(*problems)
    return whole or None, round(each) or None


def _seconds(text: str | None) -> float:
    """Of a time as it is typed; 0 if it is none."""
    found = BUDGET.fullmatch(text) if text is not None else None
    return float(found[1]) * SECONDS[found[2]] if found else 0.0


def search_of(
    prepared: PreparedSearch,
    options: argparse.Namespace,
    seconds: float | None,
    address: Address | None,
) -> Search:
    from distdl.tools.search import halving, pruning, screen
    from distdl.tools.search.engine import SearchEngine
    from distdl.tools.search.search import Search

    first = prepared.first
    folder = first.run.path.parent
    length = halving.validations_of(first.config)
    engine = SearchEngine(
        prepared.searched,
        folder,
        folder.name,
        prepared.objectives,
        sampler=options.sampler,
        seed=int(first.config.get("seed") or 0),
        address=address,
        pruner=pruning.of_engine(options.pruner, length),
    )
    return Search(
        prepared.searched,
        engine,
        first,
        prepared.slots,
        trials=options.trials or engine.count or TRIALS,
        seconds=seconds,
        pruning=pruning.chosen(options.pruner, engine, length),
        discards=options.pruned_checkpoints == "remove",
        told=screen.told,
    )


def run(search: Search) -> int:
    """Runs the search, and returns the exit code of a command that was asked to end, else 0."""
    from distdl.ranks import stopping

    try:
        search.run()
    except KeyboardInterrupt as interrupt:
        state = stopping.state_after_exit(-stopping.signal_number(interrupt))
        say(f"{state.lower()}: trials on this machine save and end")
        search.stop()
        search.finish()
        return state.exit_code
    return 0


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Refuses a second search of one study at the same time on this machine. A search that is
    refused leaves no folder behind that was not there before it."""
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder / ".tune.lock"
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError.at(
                str(folder),
                what="another search of this study is at work",
                remedy="wait for it",
                code="under-way",
            ) from None
        try:
            yield
        except UserError:
            if made and [*folder.iterdir()] == [lock]:
                _remove(lock, made)
            raise


def _remove(lock: Path, made: Sequence[Path]) -> None:
    """Removes what a refused search has made. `made`: its folders, the innermost first."""
    lock.unlink()
    with suppress(OSError):  # another command may have written into one of them meanwhile
        for folder in made:
            folder.rmdir()
