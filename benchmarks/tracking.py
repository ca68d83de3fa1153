"""The cost of an MLflow server that takes 0.7 s for every request, in the time of a training step.

A real `mlflow server` runs behind a proxy that delays every request (benchmarks.delay), each in a
process of its own. These arms train the same model and data and take turns (benchmarks.turns):
distdl's worker with `tracking=none`, twice (A/A), and with `tracking=mlflow`; in some rounds also
distdl with a log at every step, and Lightning with its own MLFlowLogger. A block is 50 steps and
lasts longer than a request; its fifth step is logged. The wait at the end of a run is reported too.

Azure ML's tracking server answers as slowly: about 700 ms for a metric
(https://github.com/Azure/azure-sdk-for-python/issues/45403).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from benchmarks import delay, runs, stops, turns
from benchmarks.table import Result, against_itself, paired, row
from benchmarks.tiny import Tiny, TinyData

LATENCY = 0.7
# A step takes tens of milliseconds on one thread, and its activations fit the cache. With larger
# activations, the speed of a run depends on the memory pages that it happens to get.
WIDTH, DEPTH, BATCH = 512, 4, 256
WARM_UP, STEPS, EVERY = 45, 50, 50
REPEATS = 20  # rounds
SOMETIMES = 4  # the last two arms take part in every fourth round
SETTLED = 12  # so many requests may be open when an arm stops for the first time
BACKEND = ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "AZUREML_RUN_ID")
NONE, AGAIN = "distdl, tracking=none", "distdl, tracking=none, again"
OURS = f"distdl, tracking=mlflow, every {EVERY} steps"
ALWAYS = "distdl, tracking=mlflow, every step"
THEIRS = f"Lightning's MLFlowLogger, every {EVERY} steps"


def create_run(folder: Path, total: int, *overrides: str) -> Path:
    """A run of distdl, for its worker."""
    run = runs.create_run(
        folder,
        "model=tiny",
        f"model.width={WIDTH}",
        f"model.depth={DEPTH}",
        "data=tiny",
        f"data.steps={total}",
        f"data.batch_size={BATCH}",
        "optimizer=none",
        "schedule=none",
        "trainer.accelerator=cpu",
        "trainer.max_epochs=1",
        f"trainer.log_every_n_steps={EVERY}",
        *stops.overrides(WARM_UP, STEPS),
        *overrides,
    )
    return run.path


def lightning(folder: str, uri: str, total: str) -> None:
    """Lightning's Trainer and MLFlowLogger, used as in its documentation."""
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
        callbacks=[stops.Stops(WARM_UP, STEPS)],
    )
    module = Tiny(self_log=True, width=WIDTH, depth=DEPTH)
    trainer.fit(module, TinyData(BATCH, int(total)))


def arms(folder: Path, uri: str, repeats: int) -> dict[str, turns.Arm]:
    """The arms, each a process of its own."""
    total = turns.steps_in_all(WARM_UP, STEPS, repeats)
    fewer = turns.steps_in_all(WARM_UP, STEPS, repeats, SOMETIMES)
    mlflow = ("tracking=mlflow", f"tracking.mlflow.tracking_uri={uri}")
    always = create_run(folder, fewer, *mlflow, "trainer.log_every_n_steps=1")
    return {
        NONE: turns.Arm(runs.rank_main, [str(create_run(folder, total, "tracking=none"))]),
        AGAIN: turns.Arm(runs.rank_main, [str(create_run(folder, total, "tracking=none"))]),
        OURS: turns.Arm(runs.rank_main, [str(create_run(folder, total, *mlflow))]),
        ALWAYS: turns.Arm(runs.rank_main, [str(always)], every=SOMETIMES),
        THEIRS: turns.Arm(lightning, [str(folder), uri, str(fewer)], every=SOMETIMES),
    }


@contextlib.contextmanager
def slow_server(folder: Path, latency: float) -> Iterator[str]:
    """The address of an MLflow server that answers every request after `latency` seconds."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    behind = f"http://127.0.0.1:{port}"
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--host",
        "127.0.0.1",
        "--workers",
        "1",
        "--port",
        str(port),
        "--backend-store-uri",
        f"sqlite:///{folder}/server.db",
        "--artifacts-destination",
        str(folder / "artifacts"),
    ]
    started: list[subprocess.Popen[str]] = []
    with open(folder / "server.log", "w", encoding="utf-8") as log:
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
    raise RuntimeError(
        f"the MLflow server does not answer: {log.read_text(encoding='utf-8')[-2000:]}"
    )


def requests(uri: str) -> int:
    with urllib.request.urlopen(uri + delay.COUNT, timeout=10) as answer:
        return int(answer.read())


def main(repeats: int = REPEATS, latency: float = LATENCY) -> Result:
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    hidden = {name: os.environ.pop(name) for name in BACKEND if name in os.environ}
    try:
        with tempfile.TemporaryDirectory() as name:
            server, logs, folder = (Path(name) / part for part in ("server", "logs", "runs"))
            for each in (server, logs, folder):
                each.mkdir()
            with slow_server(server, latency) as uri:
                blocks, ends = turns.take(
                    arms(folder, uri, repeats),
                    repeats,
                    logs,
                    settled=lambda: time.sleep(SETTLED * latency),
                )
                sent = requests(uri)
    finally:
        os.environ.update(hidden)
    steps = {arm: [1000 * s / STEPS for s in seconds] for arm, seconds in blocks.items()}
    none, ours = steps[NONE], steps[OURS]
    # Compared in the rounds in which these arms took part.
    always, theirs = (paired(steps[arm], none[::SOMETIMES]) for arm in (ALWAYS, THEIRS))
    return Result(
        title=f"A step with an MLflow server that takes {latency:g} s for a request (ms)",
        what=f"step time with an MLflow backend of {latency:g} s latency against no logger",
        competitor="the same run with tracking=none",
        goal="at most 1.01",
        ratio=paired(ours, none),
        same=against_itself(none, steps[AGAIN]),
        rows=[
            *(row(f"{arm}: a step", steps[arm], "ms") for arm in ends),
            *(
                row(f"{arm}: from the last step to the process's end", [ends[arm]], "s")
                for arm in ends
            ),
        ],
        notes=f"In turn, {STEPS} steps each, with {sent} requests in total. With a log at every "
        f"step the ratio is {always:.3f}. Lightning's MLFlowLogger, which waits for the server in "
        f"the training thread, has {theirs:.2f} with a log every {EVERY} steps. Records that "
        "distdl has not sent by the last step are sent at the end, for at most "
        "`tracking.mlflow.flush_timeout` seconds (60).",
        command="python -m benchmarks.run tracking",
    )
