"""The run's own record, always on: an append-only file that a background thread writes."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from argparse import Namespace
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers.logger import DummyExperiment, Logger

from distdl.checkpoint.hyper_parameters import described
from distdl.runs.records import encode

log = logging.getLogger(__name__)

FLUSH_SECONDS = 0.5
UNWRITTEN_LIMIT = 64 << 20  # bytes kept in memory while the disk is full


class Journal(Logger):
    """A Lightning logger whose `log_metrics` costs the training thread a few microseconds.

    It only appends to a deque: a queue that wakes its reader for every record would make the two
    threads compete for the interpreter. The background thread writes every half second. Nothing
    here ever raises into training: a full disk is reported once and tried again.

    Args:
        path: The file; None for a rank that writes nothing. (Callbacks such as LearningRateMonitor
            refuse a rank without a logger.)
        run_dir: The run directory, which is Lightning's `save_dir`.
        training: False where only `put` writes (the system metrics of nodes other than 0).
    """

    name = version = run_id = experiment_id = ""
    save_dir = log_dir = root_dir = property(lambda self: str(self.run_dir))
    experiment = property(lambda self: DummyExperiment())  # ignores what a module logs to it

    def __init__(
        self, path: Path | None, run_dir: Path, attempt: int = 1, training: bool = True
    ) -> None:
        super().__init__()
        self.path, self.run_dir, self.attempt = path, Path(run_dir), attempt
        self.last_step = 0
        self._training = training and path is not None
        self._records: deque[tuple[float, int, dict[str, Any]]] = deque()
        self._unwritten = b""
        self._file: int | None = None
        self._latest: tuple[list[Logger], str] = ([], "")
        self._complained: set[str] = set()
        self._lock, self._stop, self._pid = threading.Lock(), threading.Event(), os.getpid()
        if path is not None:
            self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
            self._thread.start()
            atexit.register(self.close)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name.startswith(("log_", "watch", "unwatch")):  # methods that only some loggers have
                return self.experiment.nop
            raise AttributeError(name)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        self._queue(self, metrics, step)

    def listen_to(self, logger: Logger) -> Logger:
        """Queues its metrics before the logger gets them: if that raises, the training ends.
        Hyperparameters reach it as plain data."""
        log_own = logger.log_metrics

        def log_metrics(metrics: Mapping[str, Any], step: int | None = None, **more: Any) -> None:
            if "hp_metric" not in metrics:  # TensorBoard's placeholder, at step 0
                self._queue(logger, metrics, step)
            log_own(metrics, step, **more)  # type: ignore[arg-type]

        note = logger.log_hyperparams

        def log_hyperparams(params: Any, *args: Any, **more: Any) -> None:
            note(described(params), *args, **more)  # some are objects of Hydra's

        logger.log_metrics = log_metrics  # type: ignore[method-assign]
        logger.log_hyperparams = log_hyperparams  # type: ignore[method-assign]
        return logger

    def _queue(self, logger: Logger, metrics: Mapping[str, Any], step: int | None) -> None:
        """Queues values once: Lightning logs the same to each logger, a module maybe to one."""
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
        """Queues values under a step. Reads tensors now, as they may be changed in place."""
        self._records.append((time.time() if at is None else at, int(step), self._numbers(metrics)))

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kw: Any) -> None:
        """Does nothing: the run's config.yaml is the record."""

    def finalize(self, status: str) -> None:
        """Writes what is queued. The journal stays open, since another stage may follow."""
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
                self.complain("disk", f"{self.path} cannot be written ({error}): trying again")
                if len(self._unwritten) > UNWRITTEN_LIMIT:
                    self._unwritten = b"\n"
                    self.complain("lost", f"{self.path}: metrics are lost, the disk is still full")

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
            if kept := {str(k): v for k, v in values.items() if v is not None}:
                lines.append(encode(at, step, self.attempt, kept))
        self._unwritten += b"".join(lines)

    def _write(self) -> None:
        if not self._unwritten:
            return
        assert self.path is not None
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            size = os.fstat(self._file).st_size
            # The last attempt may have been killed in the middle of a line.
            if size and os.pread(self._file, 1, size - 1) != b"\n":
                self._unwritten = b"\n" + self._unwritten
        while self._unwritten:
            self._unwritten = self._unwritten[os.write(self._file, self._unwritten) :]
        if "disk" in self._complained:
            self._complained -= {"disk", "lost"}
            log.warning("%s can be written again", self.path)

    def _numbers(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        return {k: v if v.__class__ is float else self._number(k, v) for k, v in metrics.items()}

    def _number(self, name: str, value: Any) -> float | None:
        try:
            return float(value)
        except Exception:  # a user's object may raise anything
            self.complain(name, f"metric {name!r} is not a number and is left out: {type(value)}")
            return None

    def complain(self, topic: str, text: str) -> None:
        """Warns once per topic."""
        if topic not in self._complained:
            self._complained.add(topic)
            log.warning("%s", text)
