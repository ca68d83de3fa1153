"""A server of MLflow for a drill, which can be killed and started again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

from distdl.util.errors import Unfinished


class TrackingServer:
    """Its database and files are in `folder`; it listens on this machine only."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        store = "--backend-store-uri sqlite:///mlflow.db --artifacts-destination artifacts"
        words = f"-m mlflow server --workers 1 --host 127.0.0.1 --port {port} {store}"
        self.folder = folder
        self.uri = f"http://127.0.0.1:{port}"
        self.command = [sys.executable, *words.split()]
        self.start()
        while not self.answers():
            if self.process.poll() is not None:
                raise Unfinished.at(
                    "tracking_down",
                    what=f"mlflow does not start: {folder}/server.log",
                    code="failed",
                )
            time.sleep(0.2)

    def start(self) -> None:
        env = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                self.command, cwd=self.folder, env=env, stdout=log, stderr=log, process_group=0
            )

    def answers(self) -> bool:
        with suppress(OSError):
            return bool(urllib.request.urlopen(f"{self.uri}/health", timeout=2).status == 200)
        return False

    def lacks(self, run: Path) -> bool:
        """Whether anything that a run has logged has not arrived."""
        from distdl.tracking.delivery import Delivery
        from distdl.tracking.outbox import Outbox

        return Delivery(Outbox(run), self.uri).is_behind()

    def stop(self) -> None:
        """SIGKILL, also to its workers."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
