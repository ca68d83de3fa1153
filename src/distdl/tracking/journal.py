"""The record of a run's metrics: an append-only file that a background thread writes."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from argparse import Namespace
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsFloat

from lightning.pytorch.loggers.logger import DummyExperiment, Logger

from distdl.checkpoint.hyper_parameters import described
from distdl.runs.records import encode

log = logging.getLogger(__name__)

FLUSH_SECONDS = 0.5
UNWRITTEN_LIMIT = 64 << 20  # bytes kept in memory while the disk is full


class Journal(Logger):
    """A Lightning logger whose `log_metrics` takes a few microseconds of the training thread.

    `log_metrics` only appends to a deque, which the background thread writes every half second. (A
    queue that wakes its reader for each record would make the threads compete for the interpreter.)
    No method raises an error into the training. A full disk is reported once, and tried again.

    Args:
        path: The file; None on a rank that writes nothing but needs a logger, without which
            callbacks such as LearningRateMonitor raise an error.
        run_dir: The run directory, which is Lightning's `save_dir`.
        training: Whether to write what is logged; if False, only what `put` adds (system metrics).
    """

    name = version = run_id = experiment_id = ""
    save_dir = log_dir = root_dir = property(lambda self: str(self.run_dir))
    experiment = property(lambda self: DummyExperiment())  # ignores all calls

    def __init__(
        self, path: Path | None, run_dir: Path, attempt: int = 1, training: bool = True
    ) -> None:
        super().__init__()
        self.path = path
        self.run_dir = Path(run_dir)
        self.attempt = attempt
        self.last_step = 0
        self._training = training and path is not None
        self._records: deque[tuple[float, int, dict[str, Any]]] = deque()
        self._unwritten = b""
        self._file: int | None = None
        self._latest: tuple[list[Logger], str] = ([], "")
        self._warned: set[str] = set()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._pid = os.getpid()
        if path is not None:
            self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
            self._thread.start()
            atexit.register(self.close)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            if name.startswith(("log_", "watch", "unwatch")):  # methods that only some loggers have
                return self.experiment.nop
            raise AttributeError(name)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        self._queue(self, metrics, step)

    def record_from(self, logger: Logger) -> Logger:
        """Makes the journal record the logger's metrics too, and before the logger, whose error may
        end the training. The logger gets hyperparameters as plain data."""
        log_own = logger.log_metrics

        def log_metrics(
            metrics: Mapping[str, Any],
            step: int | None = None,
            *args: object,
            **more: object,
        ) -> None:
            if "hp_metric" not in metrics:  # TensorBoard's placeholder, at step 0
                self._queue(logger, metrics, step)
            log_own(metrics, step, *args, **more)  # type: ignore[arg-type]

        log_parameters = logger.log_hyperparams

        def log_hyperparams(
            params: dict[str, Any] | Namespace, *args: object, **more: object
        ) -> None:
            plain: Any = described(params)  # some may be Hydra's objects
            log_parameters(plain, *args, **more)

        logger.log_metrics = log_metrics  # type: ignore[method-assign]
        logger.log_hyperparams = log_hyperparams  # type: ignore[method-assign]
        return logger

    def _queue(self, logger: Logger, metrics: Mapping[str, Any], step: int | None) -> None:
        """Queues values once, although Lightning logs the same values to each logger."""
        if step is not None:
            self.last_step = step
        if not self._training:
            return
        values = self._numbers(metrics)
        by, text = self._latest
        if text == f"{step} {values}" and logger not in by:
            by.append(logger)
        else:
            self._latest = ([logger], f"{step} {values}")
            self._records.append((time.time(), int(self.last_step), values))

    def put(self, metrics: Mapping[str, Any], step: int, at: float | None = None) -> None:
        """Queues values for a step. Reads tensors now, as they may be changed in place."""
        self._records.append((time.time() if at is None else at, int(step), self._numbers(metrics)))

    def log_hyperparams(
        self, params: dict[str, Any] | Namespace, *args: object, **kw: object
    ) -> None:
        """Does nothing, since config.yaml has the parameters."""

    def finalize(self, status: str) -> None:
        """Writes what is queued. The journal stays open: another stage may follow."""
        self.flush()

    def flush(self) -> None:
        """Writes everything queued so far to the file."""
        if self.path is None or os.getpid() != self._pid:  # a forked child must not write
            return
        with self._lock:
            self._drain()
            try:
                self._write()
            except OSError as error:
                self.warn_once("disk", f"{self.path} cannot be written ({error}): trying again")
                if len(self._unwritten) > UNWRITTEN_LIMIT:
                    self._unwritten = b"\n"  # which ends a line that was written in part
                    self.warn_once("lost", f"{self.path} is not writable: metrics are lost")

    def close(self) -> None:
        """Writes what is queued and ends the thread. May be called again."""
        if self.path is None or self._stop.is_set():
            return
        self._stop.set()
        self.flush()
        if self._file is not None:
            os.close(self._file)
            self._file = None
        atexit.unregister(self.close)

    def _run(self) -> None:
        while not self._stop.wait(FLUSH_SECONDS):
            self.flush()

    def _drain(self) -> None:
        lines = []
        while self._records:
            at, step, values = self._records.popleft()
            if numbers := {str(k): v for k, v in values.items() if v is not None}:
                lines.append(encode(at, step, self.attempt, numbers))
        self._unwritten += b"".join(lines)

    def _write(self) -> None:
        if not self._unwritten:
            return
        assert self.path is not None
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            size = os.fstat(self._file).st_size
            # The last attempt may have been killed while it wrote a line.
            if size and os.pread(self._file, 1, size - 1) != b"\n":
                self._unwritten = b"\n" + self._unwritten
        while self._unwritten:
            self._unwritten = self._unwritten[os.write(self._file, self._unwritten) :]
        if "disk" in self._warned:
            self._warned -= {"disk", "lost"}
            log.warning("%s can be written again", self.path)

    def _numbers(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        return {k: v if v.__class__ is float else self._number(k, v) for k, v in metrics.items()}

    def _number(self, name: str, value: SupportsFloat) -> float | None:
        try:
            return float(value)
        except Exception:  # a user's object may raise anything
            self.warn_once(name, f"metric {name!r} is not a number and is left out: {type(value)}")
            return None

    def warn_once(self, topic: str, text: str) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            log.warning("%s", text)


def write_all(loggers: Iterable[Logger]) -> int:
    """Writes what the journals among some loggers have queued; the step of the last line, 0 without
    a journal."""
    step = 0
    for logger in loggers:
        if isinstance(logger, Journal):
            logger.flush()
            step = logger.last_step
    return step
