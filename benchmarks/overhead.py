"""The time that logging adds to a step: distdl against Lightning's `self.log` + CSVLogger.

"Added" is the time per step minus that of `Trainer(barebones=True)`, in the same round. All arms
train the same tiny module, data and optimizer, without a progress bar, in processes of one thread
that take turns (benchmarks.turns).

The time that distdl adds is then divided into parts, in separate runs: the clock is read before and
after every hook of every callback, `log_metrics` of every logger, and Lightning's call of all
callbacks. The cost of reading the clock is measured and subtracted. The last part is the
remainder, so the parts sum to the total.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import statistics
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import runs, turns
from benchmarks.table import Result, row
from benchmarks.tiny import Tiny, TinyData

# Blocks of 300 steps: about a quarter of a second, and six log lines.
WARM_UP, STEPS, REPEATS = 200, 300, 24
# Steps and runs in which the parts are timed.
PARTS_STEPS = 900
PARTS_REPEATS = 5
# The hooks that Lightning (2.6) calls in every training step.
HOOKS = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)
DISPATCH, LOGGERS = "Lightning's call of the callbacks", "the loggers: the journal"
REST = "everything else in the Trainer"


def barebones(folder: Path, total: int, first: int = 0, steps: int = 0) -> None:
    from lightning.pytorch import Trainer

    module = Tiny(first=first, steps=steps)
    Trainer(accelerator="cpu", max_epochs=1, barebones=True).fit(module, TinyData(steps=total))


def lightning(folder: Path, total: int, first: int = 0, steps: int = 0) -> None:
    from lightning.pytorch import Trainer
    from lightning.pytorch.loggers import CSVLogger

    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=CSVLogger(folder),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Tiny(self_log=True, first=first, steps=steps), TinyData(steps=total))


def distdl(folder: Path, total: int, first: int = 0, steps: int = 0) -> None:
    """The real worker, with its journal, metrics, log lines and checkpoints."""
    runs.work(
        runs.create_run(
            folder,
            "model=tiny",
            f"model.first={first}",
            f"model.steps={steps}",
            "data=tiny",
            f"data.steps={total}",
            "optimizer=none",
            "schedule=none",
            "trainer.accelerator=cpu",
            "trainer.max_epochs=1",
            "tracking=none",
        )
    )


ARMS = {"barebones": barebones, "lightning": lightning, "distdl": distdl}


@contextlib.contextmanager
def alone_and_silent() -> Iterator[None]:
    """Uses one thread and silences the messages of libraries."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
        torch.set_num_threads(threads)


def arm_main(name: str, folder: str, total: str) -> None:
    """A process that takes turns."""
    Path(folder).mkdir()
    with alone_and_silent():
        ARMS[name](Path(folder), int(total), WARM_UP, STEPS)


def measured(repeats: int) -> dict[str, list[float]]:
    """Microseconds per step of each arm and round."""
    total = str(turns.steps_in_all(WARM_UP, STEPS, repeats))
    with tempfile.TemporaryDirectory() as name:
        logs = Path(name, "logs")
        logs.mkdir()
        arms = {arm: turns.Arm(arm_main, [arm, str(Path(name, arm)), total]) for arm in ARMS}
        blocks, _ = turns.take(arms, repeats, logs)
    return {arm: [1e6 * s / STEPS for s in seconds] for arm, seconds in blocks.items()}


class Parts:
    """Seconds spent in each part, without those in parts that it calls."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        self.inner: dict[str, int] = defaultdict(int)  # calls of other parts
        self._open: list[str] = []

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kw: Any) -> Any:
            self._open.append(name)
            started = time.perf_counter()
            try:
                return function(*args, **kw)
            finally:
                passed = time.perf_counter() - started
                self._open.pop()
                self.seconds[name] += passed
                self.calls[name] += 1
                if self._open:
                    self.seconds[self._open[-1]] -= passed
                    self.inner[self._open[-1]] += 1

        return wrapper

    def per_step(self, steps: int) -> dict[str, float]:
        """Microseconds per step, without the cost of reading the clock."""
        seen, unseen = clock_reads()
        return {
            name: 1e6 / steps * (s - seen * self.calls[name] - unseen * self.inner[name])
            for name, s in self.seconds.items()
        }


@functools.cache
def clock_reads() -> tuple[float, float]:
    """Seconds that timing adds to the time of a call itself, and to that of its caller."""
    parts = Parts()
    calls = 20_000
    nothing = parts.timed("nothing", lambda: None)
    started = time.perf_counter()
    for _ in range(calls):
        nothing()
    whole = (time.perf_counter() - started) / calls
    seen = parts.seconds["nothing"] / calls
    return seen, whole - seen


@contextlib.contextmanager
def parts_timed(parts: Parts) -> Iterator[None]:
    """Times each callback and logger that Lightning calls in a training step."""
    from lightning.pytorch.trainer import call

    dispatch = call._call_callback_hooks
    timed = parts.timed(DISPATCH, dispatch)

    def in_a_step(trainer: Any, hook_name: str, *args: Any, **kw: Any) -> None:
        if hook_name == HOOKS[0] and trainer.global_step == 0:
            for callback in trainer.callbacks:
                for hook in HOOKS:
                    function = getattr(callback, hook)
                    if callable(function):  # distdl takes those away that do nothing
                        setattr(callback, hook, parts.timed(type(callback).__name__, function))
            for logger in trainer.loggers:
                logger.log_metrics = parts.timed(LOGGERS, logger.log_metrics)
        (timed if hook_name in HOOKS else dispatch)(trainer, hook_name, *args, **kw)

    call._call_callback_hooks = in_a_step  # type: ignore[assignment]
    try:
        yield
    finally:
        call._call_callback_hooks = dispatch


def parts_of(arm: Callable[[Path, int], None], folder: Path) -> dict[str, float]:
    """Microseconds per step of each part, in one run."""
    parts = Parts()
    with parts_timed(parts):
        arm(folder, PARTS_STEPS)
    return parts.per_step(PARTS_STEPS)


def all_parts(repeats: int) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """`parts_of` distdl and a Trainer without callbacks, several times."""
    ours, bare = [], []
    with tempfile.TemporaryDirectory() as name, alone_and_silent():
        parts_of(distdl, Path(name))  # imports and caches
        for _ in range(repeats):
            ours.append(parts_of(distdl, Path(name)))
            bare.append(parts_of(barebones, Path(name)))
    return ours, bare


def part_rows(
    ours: list[dict[str, float]], bare: list[dict[str, float]], whole: float
) -> list[str]:
    """A row for each part of distdl's time, and one for the remainder.

    Args:
        ours: The parts of distdl in each run, in microseconds.
        bare: The same of a Trainer without callbacks; its time in `DISPATCH` is subtracted.
        whole: The time that distdl adds, in microseconds.
    """
    nothing = statistics.median(run[DISPATCH] for run in bare)
    values = {name: [run[name] for run in ours] for name in sorted(ours[0])}
    values[DISPATCH] = [value - nothing for value in values[DISPATCH]]
    left = whole - sum(map(statistics.median, values.values()))
    rows = [row(f"- {name}", times, "us") for name, times in values.items()]
    return [*rows, f"| - {REST} (remainder) | {left:.4g} | | | us | |"]


def main(repeats: int = REPEATS) -> Result:
    times = measured(repeats)
    added = {
        arm: [time - bare for time, bare in zip(times[arm], times["barebones"], strict=True)]
        for arm in ("distdl", "lightning")
    }
    ours, theirs = (statistics.median(added[arm]) for arm in ("distdl", "lightning"))
    return Result(
        title="Added time per training step (us), tiny MLP on one CPU thread",
        what="added time per step, logging on, against lightning.Trainer + self.log + CSVLogger",
        competitor="lightning.Trainer + self.log + CSVLogger, no progress bar",
        goal="at most 0.25",
        ratio=ours / theirs,
        rows=[
            row("Trainer(barebones=True), per step", times["barebones"], "us"),
            row("lightning, added", added["lightning"], "us"),
            row("distdl, added", added["distdl"], "us"),
            *part_rows(*all_parts(PARTS_REPEATS), ours),
        ],
        notes=f"In turn, {STEPS} steps each; added time is the difference within a round. The "
        "parts of distdl's added time come from separate runs with a clock around every hook of a "
        "callback and around the loggers; the last row is the remainder.",
        command="python -m benchmarks.run overhead",
    )
