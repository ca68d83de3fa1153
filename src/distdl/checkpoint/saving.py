"""Saves checkpoints in the background of the training.

The training waits only until rank 0 has copied the checkpoint (`host_copy`). A thread then writes,
syncs, hashes and publishes it. The slow parts (torch's writer, sha256, fsync) release the GIL, and
steps were no slower than with a process, which would need shared memory and seconds to start
(docs/training.md).
"""

from __future__ import annotations

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
from distdl.runs.checkpoints import BETWEEN_STEPS, CheckpointStore, remove
from distdl.util.errors import Problem, SaveError, UserError
from distdl.util.wording import first_few

log = logging.getLogger(__name__)

REMEDY = (
    "keep tensors, numbers, strings and containers of them; or, if only you can write into the "
    "run: checkpoint.trust_pickle=true"
)
PATIENCE = 1.0  # seconds; a shorter wait for the previous write is not reported


def refuse_pickles(trainer: Trainer) -> None:
    """Raises a UserError before the first step if some state needs a pickle: a resume would refuse
    it. State that hooks add to a checkpoint is checked when the first one is saved. Collective."""
    states: dict[str, Any] = {
        "callbacks": {c.state_key: c.state_dict() for c in trainer.callbacks},  # type: ignore[attr-defined]
        "lr_schedulers": [entry.scheduler.state_dict() for entry in trainer.lr_scheduler_configs],
        "optimizer_states": [
            [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            for optimizer in trainer.optimizers
        ],
    }
    if (data := trainer.datamodule) is not None:  # type: ignore[attr-defined]
        states[type(data).__qualname__] = data.state_dict()
    try:
        what = "cannot be resumed without running code of the checkpoint"
        problems = [
            Problem(path, what=what, remedy=REMEDY, code="not-trusted")
            for path in formats.plain(states)[1]
        ]
    except UserError as error:
        problems = list(error.problems)
    if problems := process_group.broadcast(problems):
        raise UserError(*problems)


class Saver:
    """Writes the checkpoints of one training into its store, one at a time.

    Args:
        store: Where they are written.
        keep_last: How many are kept.
        background: Write while the training continues. A sharded folder is always written in the
            foreground by all ranks; only hashing and publishing run in the background.
    """

    def __init__(self, store: CheckpointStore, *, keep_last: int, background: bool = True) -> None:
        self.store = store
        self.keep_last = keep_last
        self.background = background
        self.error = ""  # why the newest could not be saved
        self._copy = HostCopy()
        self._thread: threading.Thread | None = None
        self._has_warned = self._warned = False

    def save(
        self,
        trainer: Trainer,
        state: Callable[[], dict[str, Any]],
        name: str,
        *,
        best: bool,
        **facts: object,
    ) -> None:
        """Waits for the previous save, then starts to save the state between two steps. Collective.
        Raises a SaveError if the previous save failed, or without `background` this one.

        Args:
            state: Gives the complete checkpoint.
            best: Link best.ckpt to it.
            facts: For the manifest. With BETWEEN_STEPS it becomes best.ckpt, and nothing else.
        """
        started = time.monotonic()
        self.settle()  # then the memory of the previous copy can be reused
        waited = time.monotonic() - started
        may_warn = self.background and not self._has_warned and trainer.is_global_zero
        if may_warn and waited > PATIENCE:
            self._has_warned = True
            log.warning(
                "the training waited %.1f s until the checkpoint before %s was written: save less "
                "often (checkpoint.every_n_steps, every_minutes, every_n_epochs)",
                waited,
                name,
            )
        with self._copying(trainer):
            # trainer.save_checkpoint does the same, but refuses our store: it is for users.
            checkpoint, pickles = formats.plain(state())
            if pickles and not self._warned and trainer.is_global_zero:
                self._warned = True
                log.warning(
                    "the checkpoint holds %s, kept as a pickle: "
                    "a resume needs checkpoint.trust_pickle=true",
                    first_few(pickles),
                )
            trainer.strategy.save_checkpoint(checkpoint, self.store.temporary(name))
            trainer.strategy.barrier("distdl.checkpoint.saving")
        if trainer.is_global_zero:
            stall = time.monotonic() - started if self._copy.held else None
            work = (name, best, facts, started, stall)
            # Not a daemon: the interpreter waits for it before a normal exit.
            self._thread = threading.Thread(target=self._run, args=work, name=name)
            self._thread.start()
        if not self.background:
            self.settle()

    def settle(self) -> None:
        """Waits until the save under way is published; if it failed, raises a SaveError on all
        ranks. Collective."""
        self.wait()
        ours = self.error
        self.error = ""
        if error := process_group.broadcast(ours):
            raise SaveError(error, of_peer=not ours)

    def wait(self) -> None:
        """As `settle`, but on this rank only, and without raising: see `error`."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def free(self) -> None:
        """Waits for the write under way and frees the copy's memory."""
        self.wait()
        self._copy = HostCopy()

    @contextmanager
    def _copying(self, trainer: Trainer) -> Iterator[None]:
        """Inside, rank 0 copies a checkpoint instead of writing it to a file."""
        plugin = trainer.strategy.checkpoint_io
        if not self.background or not isinstance(plugin, AnyCheckpoint):
            yield
            return
        plugin.intercept = self._take
        try:
            yield
        finally:
            plugin.intercept = None

    def _take(self, checkpoint: dict[str, Any]) -> bool:
        """Copies a checkpoint; False: it could not be copied, and must be written at once."""
        try:
            self._copy.take(checkpoint)
        except Exception as error:  # out of memory, or an object that cannot be copied
            self._copy.release()
            if not self._has_warned:
                self._has_warned = True
                log.warning(
                    "checkpoints are not written in the background (checkpoint.background): no "
                    "copy could be made: %s: %s",
                    type(error).__name__,
                    error,
                )
            return False
        return True

    def _run(
        self, name: str, best: bool, facts: dict[str, Any], started: float, stall: float | None
    ) -> None:
        try:
            self._publish(name, best, facts, started, stall)
        except BaseException as error:  # else it would be lost with the thread
            self.error = f"{name} could not be saved: {type(error).__name__}: {error}"
            log.error("%s; earlier checkpoints are unchanged", self.error)
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
        if not facts.get(BETWEEN_STEPS):
            self.store.alias("last.ckpt", path)
            if best:
                self.store.alias("best.ckpt", path)
        self.store.prune(self.keep_last)
        seconds = f"{time.monotonic() - started:.1f} s"
        if stall is not None:
            seconds += f", of which the training waited {stall:.2f} s"
        log.info("checkpoint %s (%s, %s)", name, facts.get("reason", "saved"), seconds)
