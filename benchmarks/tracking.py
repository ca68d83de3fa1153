"""What an MLflow server that takes 0.7 s for every request costs a training step.

A real `mlflow server`, behind a proxy that lets every request wait (benchmarks.delay), both in
processes of their own. The same model, data and Trainer, interleaved: distdl's worker with
`tracking=none`, twice in every round (A/A), and with `tracking=mlflow`; in some rounds also with a
log at every step, and Lightning with its own MLFlowLogger. A step is the mean of all steps after
the warm-up; what a run waits for at its end is told beside it.

Azure ML's tracking server answers as slowly: about 700 ms for a metric
(https://github.com/Azure/azure-sdk-for-python/issues/45403).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import delay, runs
from benchmarks.table import Result, against_itself, row
from benchmarks.tiny import Tiny, TinyData

LATENCY = 0.7
# An MLP whose step takes tens of milliseconds on one thread.
WIDTH, BATCH, WARM_UP, STEPS = 16384, 128, 20, 130
REPEATS, EVERY = 5, 50
BACKEND = ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "AZUREML_RUN_ID")

Arm = Callable[[Path, str], None]


def distdl(*overrides: str) -> Arm:
    """The real worker."""

    def arm(folder: Path, uri: str) -> None:
        settings = [setting.replace("SERVER", uri) for setting in overrides]
        run = runs.lay_out(
            folder,
            *("model=tiny", f"model.width={WIDTH}", f"model.warm_up={WARM_UP}"),
            *("data=tiny", f"data.steps={WARM_UP + STEPS}", f"data.batch_size={BATCH}"),
            *("optimizer=none", "schedule=none"),
            *("trainer.accelerator=cpu", "trainer.max_epochs=1", *settings),
        )
        runs.work(run)

    return arm


def lightning(folder: Path, uri: str) -> None:
    """Trainer and MLFlowLogger of Lightning, as its documentation has it."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.loggers import MLFlowLogger

    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=MLFlowLogger("lightning", tracking_uri=uri),
        log_every_n_steps=EVERY,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Tiny(self_log=True, width=WIDTH, warm_up=WARM_UP)
    trainer.fit(module, TinyData(BATCH, WARM_UP + STEPS))


MLFLOW = ("tracking=mlflow", "tracking.mlflow.tracking_uri=SERVER")
ALWAYS: dict[str, Arm] = {
    "distdl, tracking=none": distdl("tracking=none"),
    "distdl, tracking=none, again": distdl("tracking=none"),
    f"distdl, tracking=mlflow, every {EVERY} steps": distdl(*MLFLOW),
}
SOMETIMES: dict[str, Arm] = {
    "distdl, tracking=mlflow, every step": distdl(*MLFLOW, "trainer.log_every_n_steps=1"),
    f"Lightning's MLFlowLogger, every {EVERY} steps": lightning,
}


@contextlib.contextmanager
def slow_server(folder: Path, latency: float) -> Iterator[str]:
    """The address of an MLflow server that lets every request wait."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    behind = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--workers", "1"]
    command += ["--port", str(port), "--backend-store-uri", f"sqlite:///{folder}/server.db"]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    started: list[subprocess.Popen[str]] = []
    with open(folder / "server.log", "w") as log:
        try:
            started.append(
                subprocess.Popen(
                    command,
                    env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
                    cwd=folder,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    text=True,
                )
            )
            until_it_answers(behind, folder / "server.log")
            proxy = [sys.executable, "-m", "benchmarks.delay", behind, str(latency)]
            started.append(
                subprocess.Popen(proxy, stdout=subprocess.PIPE, start_new_session=True, text=True)
            )
            assert started[1].stdout is not None
            yield started[1].stdout.readline().strip()
        finally:
            for process in started:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def until_it_answers(uri: str, log: Path, seconds: float = 180) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{uri}/health", timeout=2).close()
            return
        time.sleep(0.2)
    raise RuntimeError(f"mlflow server does not answer: {log.read_text()[-2000:]}")


def requests(uri: str) -> int:
    with urllib.request.urlopen(uri + delay.COUNT, timeout=10) as answer:
        return int(answer.read())


def measured(arm: Arm, folder: Path, uri: str) -> tuple[float, float, float]:
    """(milliseconds per step, seconds from the last step to the end, requests) of one run."""
    before = requests(uri)
    arm(folder, uri)
    ended = time.perf_counter()
    return 1000 * Tiny.seconds_per_step, ended - Tiny.ended, requests(uri) - before


def rounds(folder: Path, uri: str, repeats: int) -> dict[str, list[tuple[float, float, float]]]:
    found: dict[str, list[tuple[float, float, float]]] = {n: [] for n in (*ALWAYS, *SOMETIMES)}
    # Imports and caches; and mlflow's own import, which is no part of a step.
    for arm in ALWAYS.values():
        arm(folder, uri)
    for number in range(repeats):
        for name, arm in {**ALWAYS, **(SOMETIMES if number % 4 == 0 else {})}.items():
            found[name].append(measured(arm, folder, uri))
    return found


def main(repeats: int = REPEATS, latency: float = LATENCY) -> Result:
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    hidden = {name: os.environ.pop(name) for name in BACKEND if name in os.environ}
    logging.disable(logging.WARNING)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            server, folder = Path(name) / "server", Path(name) / "runs"
            server.mkdir(), folder.mkdir()
            with slow_server(server, latency) as uri:
                found = rounds(folder, uri, repeats)
    finally:
        logging.disable(logging.NOTSET)
        torch.set_num_threads(threads)
        os.environ.update(hidden)

    def column(name: str, place: int) -> list[float]:
        return [run[place] for run in found[name]]

    def middle(name: str, place: int) -> float:
        return statistics.median(column(name, place))

    none, again, ours = ALWAYS
    every, theirs = SOMETIMES
    rows: list[Any] = []
    for name in found:
        rows.append(row(f"{name}: a step", column(name, 0), "ms"))
    for name in (none, ours, every, theirs):
        rows.append(row(f"{name}: from the last step to the end", column(name, 1), "s"))
    for name in (ours, every, theirs):
        rows.append(row(f"{name}: requests", column(name, 2), ""))
    base = middle(none, 0)
    return Result(
        title=f"A step with an MLflow server that takes {latency:g} s for a request (ms)",
        what=f"step time with an MLflow backend of {latency:g} s latency against no logger",
        competitor="the same run with tracking=none",
        goal="at most 1.01",
        ratio=middle(ours, 0) / base,
        same=against_itself(column(none, 0), column(again, 0)),
        rows=rows,
        notes=f"With a log at every step the ratio is {middle(every, 0) / base:.3f}; Lightning's "
        f"MLFlowLogger, which waits for the server in the training thread, comes to "
        f"{middle(theirs, 0) / base:.2f} with a log every {EVERY} steps. What distdl has not sent "
        "by the last step it sends at the end, for at most `tracking.mlflow.flush_timeout` "
        "seconds (60); runs of a few seconds, as these, wait there for what connecting takes.",
        command="python -m benchmarks.run tracking",
    )
