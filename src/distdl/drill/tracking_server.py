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

START_S = 120.0


class TrackingServer:
    """Its database and files are in `folder`; it listens on this machine only."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.folder, self.uri = folder, f"http://127.0.0.1:{port}"
        store = f"--backend-store-uri sqlite:///mlflow.db --artifacts-destination"
        words = f"-m mlflow server --workers 1 --host 127.0.0.1 --port {port} {store}"
        self.command = [sys.executable, *words.split(), str(folder / "artifacts")]
        self.start()
        deadline = time.monotonic() + START_S
        while not self.answers():
            if time.monotonic() > deadline or self.process.poll() is not None:
                self.stop()
                raise Unfinished.at("tracking_down", f"mlflow does not start: {folder}/server.log")
            time.sleep(0.2)

    def start(self) -> None:
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                cwd=self.folder,
                env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def answers(self) -> bool:
        with suppress(OSError):
            return bool(urllib.request.urlopen(f"{self.uri}/health", timeout=2).status == 200)
        return False

    def stop(self) -> None:
        """SIGKILL, also to its workers."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
