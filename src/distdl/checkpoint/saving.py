"""Saves checkpoints in the background of the training.

The training waits until rank 0 has copied what is to be written (`host_copy`); a thread then
writes, syncs, hashes and publishes it. A thread and not a process: what takes long in it (torch's
writer, sha256, fsync) runs without the interpreter's lock, and steps beside it were not slower than
beside a process, which would need shared memory and seconds to start (docs/training.md).
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from lightning.pytorch import Trainer

from distdl.checkpoint import formats
from distdl.checkpoint.formats import AnyCheckpoint
from distdl.checkpoint.host_copy import HostCopy
from distdl.distributed import process_group
from distdl.runs.checkpoints import CheckpointStore, remove
from distdl.util.errors import Problem, UserError

log = logging.getLogger(__name__)

REMEDY = (
    "keep tensors, numbers, strings and containers of them; or, if only you can write into the "
    "run: checkpoint.trust_pickle=true"
)
PATIENCE = 1.0  # seconds; a shorter wait for the write before is not reported


class SaveError(RuntimeError):
    """A checkpoint could not be saved; those before it are as they were."""


def refuse_pickles(trainer: Trainer) -> None:
    """Before the first step: state that only pickle can keep could not be resumed. Collective.

    What hooks add to a checkpoint is seen when the first one is saved.

    Raises:
        UserError: Names the state, and the key that allows it.
    """
    states: dict[str, Any] = {
        "callbacks": {c.state_key: c.state_dict() for c in trainer.callbacks},  # type: ignore[attr-defined]
        "lr_schedulers": [entry.scheduler.state_dict() for entry in trainer.lr_scheduler_configs],
        "optimizer_states": [
            [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            for optimizer in trainer.optimizers
        ],
    }
    data = trainer.datamodule  # type: ignore[attr-defined]
    if data is not None:
        states[type(data).__qualname__] = data.state_dict()
    try:
        _, pickles = formats.plain(states)
        what = "cannot be resumed without running code of the checkpoint"
        problems = [Problem(place, what, REMEDY) for place in pickles]
    except UserError as error:
        problems = list(error.problems)
    if problems := process_group.tell_all(problems):
        raise UserError(*problems)


class Saver:
    """Writes one training's checkpoints into its store, one at a time and each of one step.

    Args:
        store: Where they go.
        keep_last: How many are kept.
        background: Do not stop the training for it. A folder of slices is written by all ranks
            while they wait, and only hashed and published behind them.
    """

    def __init__(self, store: CheckpointStore, *, keep_last: int, background: bool = True) -> None:
        self.store, self.keep_last, self.background = store, keep_last, background
        self.error = ""  # why the newest could not be saved
        self._copy = HostCopy()
        self._thread: threading.Thread | None = None
        self._has_warned = self._warned = False

    def save(self, trainer: Trainer, name: str, *, best: bool, **facts: Any) -> None:
        """Begins to save the training as it is now, after the save before has ended. Collective.

        Args:
            trainer: Between two steps.
            name: Of the file.
            best: It is best.ckpt from now on.
            facts: For the manifest.

        Raises:
            SaveError: The one before failed; without `background`, this one.
        """
        started = time.monotonic()
        self.settle()  # its memory is ours then
        waited = time.monotonic() - started
        report = self.background and not self._has_warned and trainer.is_global_zero
        if report and waited > PATIENCE:
            self._has_warned = True
            log.warning(
                "the training waited %.1f s for the checkpoint before %s to be written: save less "
                "often (checkpoint.every_n_steps, every_minutes, every_n_epochs)",
                waited,
                name,
            )
        with self._copying(trainer):
            # As trainer.save_checkpoint, which is for users and refuses our store.
            checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
            checkpoint, pickles = formats.plain(checkpoint)
            self._warn_of(pickles, trainer)
            trainer.strategy.save_checkpoint(checkpoint, self.store.temporary(name))
            trainer.strategy.barrier("distdl.checkpoint.saving")
        if trainer.is_global_zero:
            stall = time.monotonic() - started if self._copy.held else None
            work = functools.partial(self._publish, name, best, facts, started, stall)
            # No daemon: an interpreter that ends in the ordinary way waits for it as well.
            self._thread = threading.Thread(target=self._run, args=(name, work), name=name)
            self._thread.start()
        if not self.background:
            self.settle()

    def settle(self) -> None:
        """Waits until what was begun is published. Collective.

        Raises:
            SaveError: It failed; on all ranks.
        """
        self.wait()
        error, self.error = process_group.tell_all(self.error), ""
        if error:
            raise SaveError(error)

    def wait(self) -> None:
        """The same on this rank alone; what went wrong has been logged, and is in `error`."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def free(self) -> None:
        """Gives the memory of the copies back."""
        self.wait()
        self._copy = HostCopy()

    def _warn_of(self, pickles: list[str], trainer: Trainer) -> None:
        if pickles and not self._warned and trainer.is_global_zero:
            self._warned = True
            log.warning(
                "the checkpoint holds %s, kept as a pickle: a resume needs "
                "checkpoint.trust_pickle=true",
                ", ".join(pickles[:3]) + (", ..." if len(pickles) > 3 else ""),
            )

    @contextmanager
    def _copying(self, trainer: Trainer) -> Iterator[None]:
        """Inside, what rank 0 would write into a file is copied instead."""
        plugin = trainer.strategy.checkpoint_io
        if not self.background or not isinstance(plugin, AnyCheckpoint):
            yield
            return
        plugin.taker = self._take
        try:
            yield
        finally:
            plugin.taker = None

    def _take(self, checkpoint: dict[str, Any]) -> bool:
        try:
            self._copy.take(checkpoint)
        except Exception as error:  # no memory, or something that pickles and cannot be copied
            self._copy.release()
            if not self._has_warned:
                self._has_warned = True
                log.warning(
                    "the training waits for its checkpoints (checkpoint.background): no copy could "
                    "be made: %s: %s",
                    type(error).__name__,
                    error,
                )
            return False
        return True

    def _run(self, name: str, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # it would be lost with the thread
            self.error = f"{name} could not be saved: {type(error).__name__}: {error}"
            log.error("%s; the checkpoints before it are as they were", self.error)
            with suppress(OSError):
                remove(self.store.temporary(name))
        finally:
            self._copy.release()

    def _publish(
        self, name: str, best: bool, facts: dict[str, Any], started: float, stall: float | None
    ) -> None:
        if self._copy.held:
            self._copy.write(self.store.temporary(name))
        path = self.store.publish(name, **facts)
        self.store.alias("last.ckpt", path)
        if best:
            self.store.alias("best.ckpt", path)
        self.store.prune(self.keep_last)
        seconds = f"{time.monotonic() - started:.1f} s"
        if stall is not None:
            seconds += f", of which the training waited {stall:.2f} s"
        log.info("checkpoint %s (%s, %s)", name, facts.get("reason", "saved"), seconds)
