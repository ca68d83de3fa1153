"""A model that names the colour of an image, servers of it, and a client."""

import http.client
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import torch
from PIL import Image

from distdl.domains.classification.exports import of_classifier
from distdl.tools.serving import formats, model_folder
from tests.conftest import ROOT, environment
from tests.serving.conftest import WITHOUT_DISTDL
from tests.waiting import until

COLOURS = ("red", "green", "blue")


class Colours(torch.nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.float().mean((2, 3)).div(32).softmax(1)


def write_model(folder: Path) -> Path:
    """As `distdl export --to pt2` does."""
    model_folder.write_package(folder)
    formats.write_pt2(of_classifier(Colours(), 32), folder / "model.pt2")
    description = {"kind": "pt2", "classes": COLOURS, "image_size": 32, "short_side": 36}
    model_folder.describe(folder, description)
    return folder


def photo(colour="red", form="JPEG", mode="RGB", size=(48, 40)) -> bytes:
    memory = io.BytesIO()
    Image.new("RGB", size, colour).convert(mode).save(memory, form)
    return memory.getvalue()


class Server:
    """A process, and requests to it."""

    def __init__(self, process, port):
        self.process = process
        self.port = port

    def connect(self):
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def ask(self, method, path, body=None, kind="", **more):
        """The status and the JSON of an answer; `more`: headers, with _ for -."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            headers = {key.replace("_", "-"): value for key, value in more.items()}
            headers |= {"Content-Type": kind} if kind else {}
            chunked = "Transfer-Encoding" in headers
            connection.request(method, path, body, headers, encode_chunked=chunked)
            answer = connection.getresponse()
            assert answer.headers["Content-Type"] == "application/json"
            assert answer.status != 503 or path != "/score" or answer.headers["Retry-After"]
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def score(self, body=None, **more):
        return self.ask("POST", "/score", body or photo(), "image/jpeg", **more)

    def health(self):
        status, content = self.ask("GET", "/health")
        assert status == 200
        return content

    def memory(self):
        """The most memory that the process has had, in bytes."""
        text = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
        return int(re.search(r"VmHWM:\s+(\d+)", text)[1]) * 1024


@contextmanager
def without_distdl(model):
    """`python -m distdl_scoring.server` where distdl is not installed."""
    code = "import runpy; runpy.run_module('distdl_scoring.server', run_name='__main__')"
    options = {"cwd": model, "env": {**environment(), "PYTHONPATH": str(model)}, "text": True}
    command = [sys.executable, "-c", WITHOUT_DISTDL + code, str(model), "serve.port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, **options) as process:
        try:
            yield Server(process, int(process.stdout.readline().rpartition(":")[2]))
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()


class Gated(Server):
    """A server whose model is loaded when no file `loading` is in the folder, waits while the file
    `closed` is, and fails while `broken` is; decoding waits while `hung` is (see `main`)."""

    def __init__(self, background, model, folder, *settings):
        self.folder = folder
        self.set("loading")
        options = {"module": ("-m", "tests.serving.colours"), "cwd": ROOT}
        options["env"] = {"PYTHONPATH": str(ROOT)}
        self.started = background(str(model), str(folder), *settings, **options)
        self.started.until(lambda: "port " in self.started.output())
        port = int(self.started.output().split("port ")[1].split()[0])
        super().__init__(self.started.process, port)
        until(self.listens, 60, self.started.output)

    def listens(self):
        try:
            self.connect().close()
            return True
        except ConnectionRefusedError:
            return False

    def make_ready(self):
        self.set()
        until(lambda: self.ask("GET", "/ready")[0] == 200, 60, self.started.output)
        return self

    def set(self, *names):
        """These files are in the folder, and no others."""
        for name in ("loading", "closed", "broken", "hung"):
            if name in names:
                (self.folder / name).touch()
            else:
                (self.folder / name).unlink(missing_ok=True)


def main(model, folder, *settings):
    import time

    from distdl.tools.serving import scorer, server
    from distdl.tools.serving.settings import Settings, values_of
    from tests.conftest import free_port

    class GatedScorer(scorer.Scorer):
        def __init__(self, folder):
            wait("loading")
            super().__init__(folder)
            self.score_open = self.found
            self.found = self.score_gated

        def pixels(self, data):
            wait("hung")
            return super().pixels(data)

        def score_gated(self, images):
            wait("closed")
            if os.path.exists(f"{folder}/broken"):
                raise RuntimeError("broken")
            return self.score_open(images)

    def wait(name):
        while os.path.exists(f"{folder}/{name}"):
            time.sleep(0.002)

    port = free_port()
    print(f"port {port}", flush=True)
    options = Settings.model_validate(values_of([f"serve.port={port}", *settings]))
    counts = server.run(lambda: GatedScorer(model), options, lambda url, scorer: None)
    print(f"ended {counts['requests']}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
