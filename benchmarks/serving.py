"""Answers over HTTP at 8 concurrent clients: `distdl serve`, a hand-written app, and MLflow.

    python -m benchmarks.run serving

A ResNet-18 at 64 pixels, with random weights, classifies JPEGs of 224 pixels. Each server is a
process of its own. A client process with 8 connections that stay open sends the next image on each
as soon as the last one is answered. The servers take turns of some seconds; the hand-written app
has two (A/A).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import photographs
from benchmarks.table import Goal, Result, against_itself, paired, row, turned

SIZE, SHORT, STORED, CLASSES = 64, 73, 224, 10
CLIENTS = 8
IMAGES = 50
SECONDS = 4.0
WARM_UP = 2.0
REPEATS = 8
HAND, AGAIN = "hand-written FastAPI app", "hand-written FastAPI app, again"
TUNED = "the same, OMP_NUM_THREADS=1"
OURS, MLFLOW = "distdl serve", "mlflow models serve"


# The hand-written app, as in FastAPI's and torchvision's documentation


def hand_written(weights: str, port: str) -> None:
    import io

    import torch
    import uvicorn
    from fastapi import Depends, FastAPI, Request
    from PIL import Image
    from torchvision import transforms
    from torchvision.models import resnet18

    model = resnet18(num_classes=CLASSES)
    model.load_state_dict(torch.load(weights, weights_only=True))
    model.eval()
    prepare = transforms.Compose(
        [
            transforms.Resize(SHORT),
            transforms.CenterCrop(SIZE),
            transforms.ToTensor(),
            transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        ]
    )
    app = FastAPI()

    async def body_of(request):  # type: ignore[no-untyped-def]
        return await request.body()

    body_of.__annotations__["request"] = Request

    def score(body=Depends(body_of)):  # type: ignore[no-untyped-def]  # noqa: B008
        image = prepare(Image.open(io.BytesIO(body)).convert("RGB"))
        with torch.inference_mode():
            probabilities = model(image.unsqueeze(0)).softmax(dim=1)[0]
        best = probabilities.topk(5)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return {"top": [{"class": f"class {i}", "probability": p} for i, p in pairs]}

    app.post("/score")(score)
    uvicorn.run(app, port=int(port), log_level="warning")


def write_models(folder: Path) -> None:
    """Writes weights.pt, and the same network in model/ and mlflow/ as `distdl export` does."""
    import torch
    from torchvision.models import resnet18

    from distdl.domains.classification.exports import of_classifier
    from distdl.images.views import EvalView
    from distdl.tools.serving import formats, model_folder

    torch.manual_seed(0)
    network = resnet18(num_classes=CLASSES).eval()
    torch.save(network.state_dict(), folder / "weights.pt")

    class Normalised(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network.to(memory_format=torch.channels_last)
            self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1) * 255)
            self.register_buffer("std", torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1) * 255)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            floats = (images.float() - self.mean) / self.std  # type: ignore[operator]
            floats = floats.contiguous(memory_format=torch.channels_last)
            return self.network(floats).softmax(dim=1)

    assert EvalView(SIZE).short_side == SHORT
    model = folder / "model"
    model_folder.write_package(model)
    formats.write_pt2(of_classifier(Normalised().eval(), SIZE), model / "model.pt2")
    description = {"kind": "pt2", "image_size": SIZE, "short_side": SHORT}
    description["classes"] = [f"class {i}" for i in range(CLASSES)]
    description["source"] = {"run": "random weights", "metrics": {}}
    description["verification"] = {"images": 1, "top1": 1, "difference": 0}
    model_folder.describe(model, description)
    image = (folder / "images" / "0.jpg").read_bytes()
    formats.write_mlflow(model, folder / "mlflow", [image])


def write_images(folder: Path) -> None:
    """Photographs whose short side and centre are `STORED` pixels, as small JPEGs are stored."""
    from PIL import Image, ImageOps

    folder.mkdir()
    originals = sorted(photographs.folder(folder.parent / "originals").rglob("*.jpg"))
    for number, path in enumerate(originals[:IMAGES]):
        image = ImageOps.fit(Image.open(path).convert("RGB"), (STORED, STORED))
        image.save(folder / f"{number}.jpg", quality=90)


# The client: a process of its own


def client(url: str, images: str, form: str, seconds: str) -> None:
    """Prints the latency of each request, in seconds, as JSON."""
    host, _, path = url.removeprefix("http://").partition("/")
    bodies = []
    kind = "image/jpeg" if form == "bytes" else "application/json"
    for file in sorted(Path(images).iterdir()):
        body = file.read_bytes()
        if form == "json":
            text = base64.b64encode(body).decode()
            split = {"columns": ["image"], "data": [[text]]}
            body = json.dumps({"dataframe_split": split}).encode()
        bodies.append(body)
    asyncio.run(_client(host, path, kind, bodies, float(seconds)))


async def _client(host: str, path: str, kind: str, bodies: list[bytes], seconds: float) -> None:
    taken: list[float] = []
    end = time.perf_counter() + seconds

    async def ask(number: int) -> None:
        reader, writer = await asyncio.open_connection(*host.split(":"))
        while (started := time.perf_counter()) < end:
            number += 1
            body = bodies[number % len(bodies)]
            head = f"POST /{path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: {kind}\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            answer = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = int(answer.partition(b"content-length:")[2].split(b"\r\n")[0])
            text = await reader.readexactly(length)
            assert answer.startswith(b"http/1.1 200"), text
            taken.append(time.perf_counter() - started)
        writer.close()

    await asyncio.gather(*(ask(17 * n) for n in range(CLIENTS)))
    print(json.dumps(taken))


def called(function: Callable[..., None], *arguments: object) -> list[str]:
    """The command of a process that calls a function of this module."""
    code = f"import sys; from {__name__} import {function.__name__} as f; f(*sys.argv[1:])"
    return [sys.executable, "-c", code, *map(str, arguments)]


def latencies(url: str, images: Path, seconds: float) -> list[float]:
    form = "json" if url.endswith("invocations") else "bytes"
    command = called(client, url, images, form, seconds)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or "Traceback" in done.stderr:
        raise RuntimeError(f"the client of {url} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextlib.contextmanager
def servers(folder: Path, names: list[str]) -> Iterator[dict[str, str]]:
    """Starts the servers; the URL of each."""
    # MLflow looks for uvicorn there.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    env = {**os.environ, "PATH": path, "MLFLOW_DISABLE_TELEMETRY": "true"}
    urls = {}
    started = []
    with contextlib.ExitStack() as stack:
        for name in names:
            port = free_port()
            command = called(hand_written, folder / "weights.pt", port)
            if name == OURS:
                command = [
                    sys.executable,
                    "-m",
                    "distdl",
                    "serve",
                    folder / "model",
                    f"serve.port={port}",
                ]
            elif name == MLFLOW:
                command = [
                    sys.executable,
                    "-m",
                    "mlflow",
                    "models",
                    "serve",
                    "-m",
                    folder / "mlflow",
                    "--env-manager",
                    "local",
                    "-p",
                    str(port),
                ]
            log = stack.enter_context(open(folder / f"{port}.log", "w", encoding="utf-8"))
            more = {"OMP_NUM_THREADS": "1"} if name == TUNED else {}
            process = subprocess.Popen(
                command, env=env | more, stdout=log, stderr=log, start_new_session=True
            )
            stack.callback(end, process)
            endpoint = "invocations" if name == MLFLOW else "score"
            urls[name] = f"http://127.0.0.1:{port}/{endpoint}"
            started.append((urls[name], process, Path(log.name)))
        for each in started:
            until_it_answers(*each, folder / "images")
        yield urls


def end(process: subprocess.Popen[Any]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.wait()


def until_it_answers(
    url: str, server: subprocess.Popen[Any], log: Path, images: Path, seconds: float = 180
) -> None:
    last = time.monotonic() + seconds
    while time.monotonic() < last and server.poll() is None:
        with contextlib.suppress(RuntimeError):
            latencies(url, images, 0.1)
            return
        time.sleep(0.5)
    raise RuntimeError(f"{url} does not answer: {log.read_text(encoding='utf-8')[-2000:]}")


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main(repeats: int = REPEATS, seconds: float = SECONDS, arms: str = "") -> Result:
    names = arms.split(",") if arms else [HAND, AGAIN, TUNED, OURS, MLFLOW]
    rates: dict[str, list[float]] = {name: [] for name in names}
    slow: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_images(folder / "images")
        write_models(folder)
        with servers(folder, names) as urls:
            for url in urls.values():
                latencies(url, folder / "images", WARM_UP)
            for repeat in range(repeats):
                for name in turned(names, repeat):
                    taken = latencies(urls[name], folder / "images", seconds)
                    rates[name].append(len(taken) / seconds)
                    slow[name].append(1000 * percentile(taken, 0.95))
    return Result(
        title=f"Answers over HTTP, ResNet-18 at {SIZE} px, {CLIENTS} clients",
        what="`distdl serve`, requests/s against a hand-written FastAPI app without batching",
        competitor="a sync endpoint of FastAPI: PIL, torchvision's transforms, the model, softmax",
        goal="at least 1.5",
        ratio=paired(rates[OURS], rates[HAND]),
        same=against_itself(rates[HAND], rates[AGAIN]),
        rows=[
            *(row(name, values, "requests/s") for name, values in rates.items()),
            *(row(f"{name}: p95", values, "ms") for name, values in slow.items()),
        ],
        more=[
            Goal(
                "the same against `mlflow models serve`",
                "at least 2",
                paired(rates[OURS], rates[MLFLOW]),
            ),
            Goal(
                "the same, p95 of the latency against the hand-written app",
                "at most 1.2",
                paired(slow[OURS], slow[HAND]),
            ),
        ],
        notes=f"In turn, {seconds:g} s each, client and server on the same cores. MLflow's model "
        "is the one that `distdl export --to mlflow` writes; it gets its image in JSON. Against "
        "the hand-written app with one OpenMP thread per request, the ratio of requests/s is "
        f"{paired(rates[OURS], rates[TUNED]):.2f} and that of p95 "
        f"{paired(slow[OURS], slow[TUNED]):.2f}: its threads do not wait for each other.",
        command="python -m benchmarks.run serving",
    )
