"""The scoring scripts of a model folder: under Microsoft's own inference server, and as Azure's
batch jobs call them, in a Python that has no distdl."""

from __future__ import annotations

import base64
import http.client
import io
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distdl.serving.scorer import Scorer
from tests.cluster.azurite import free_port
from tests.conftest import ROOT, environment
from tests.served import model_folder
from tests.serving.colours import Server as DistdlServer
from tests.serving.colours import photo, without_distdl
from tests.waiting import until

SERVER = ROOT / ".servers/azmlinfsrv/bin"
pytestmark = [
    pytest.mark.xdist_group("azmlinfsrv"),
    pytest.mark.skipif(not SERVER.exists(), reason="no azmlinfsrv: make .servers/azmlinfsrv"),
]
JPEG = {"Content-Type": "image/jpeg"}
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder as Azure mounts it: inside AZUREML_MODEL_DIR."""
    return model_folder(tmp_path_factory.mktemp("azureml") / "pt2")


def clean(model: Path) -> dict[str, str]:
    env = {k: v for k, v in environment().items() if k != "PYTHONPATH"}
    return {**env, "AZUREML_MODEL_DIR": str(model.parent), "OMP_NUM_THREADS": "1"}


class Server:
    def __init__(self, port: int) -> None:
        self.port = port

    def ask(self, body: Any, headers: dict[str, str], method: str = "POST") -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, "/score", body, headers)
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        return answer.status, json.loads(text)

    def lives(self) -> bool:
        try:
            return self.ask(b"", JPEG)[0] == 400
        except OSError:
            return False


@pytest.fixture(scope="module")
def serve(model: Path) -> Iterator[DistdlServer]:
    """`distdl serve` of the same model."""
    with without_distdl(model) as server:
        yield server


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder, port = tmp_path_factory.mktemp("code"), free_port()
    (folder / "score.py").write_bytes((model / "azureml/score.py").read_bytes())  # it is sent alone
    command = [SERVER / "azmlinfsrv", "--entry_script", "score.py", "--port", str(port)]
    with (folder / "log").open("w") as log:
        pipes = {"stdout": log, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, cwd=folder, env=clean(model), **pipes)
    started = Server(port)
    try:
        until(lambda: started.lives() or process.poll() is not None, 60)
        assert process.poll() is None, (folder / "log").read_text()
        yield started
    finally:
        process.terminate()
        process.wait(30)


def test_it_answers_as_the_scorer_does(server: Server, model: Path) -> None:
    scorer = Scorer(model)
    for color in scorer.classes:
        image = photo(color)
        assert server.ask(image, JPEG) == (200, {"predictions": scorer.score([image])})
    images = [photo("red"), photo("blue", size=(300, 300))]
    texts = [base64.b64encode(image).decode() for image in images]
    asked = server.ask(json.dumps({"images": texts, "top_k": 2}), JSON)
    assert asked == (200, {"predictions": scorer.score(images, top_k=2)})


def bomb() -> bytes:
    """A PNG of 100 megapixels in some kilobytes."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("1", (10_000, 10_000)).save(file, "PNG")
    return file.getvalue()


REFUSED = {
    "text": (b"not an image", JPEG, 400, "image 0: is not an image"),
    "truncated": (photo("red", size=(200, 200))[:-300], JPEG, 400, "image 0: "),
    "bomb": (bomb(), {"Content-Type": "image/png"}, 413, "100 megapixels"),
    "empty": (b"", JPEG, 400, "the body is empty"),
    "wrong type": (photo("red"), {"Content-Type": "text/html"}, 415, "content type is text/html"),
    "no type": (photo("red"), {}, 415, "content type is missing"),
    "no JSON": (b"{", JSON, 400, "Invalid JSON"),
    "no images": (b"{}", JSON, 400, "'images': Field required"),
    "no base64": (b'{"images": ["a"]}', JSON, 400, "'images.0': Base64"),
    "second": (
        json.dumps({"images": [base64.b64encode(photo("red")).decode(), "aGVsbG8="]}),
        *(JSON, 400, "image 1: is not an image"),
    ),
    "large": (bytes(200_000_000), JPEG, 413, "larger than 32 MiB"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_as_by_distdl_serve(name: str, server: Server, serve) -> None:
    body, headers, status, said = REFUSED[name]
    try:
        got, answer = server.ask(body, headers)
        assert got == status and said in answer["error"], (got, answer)
        assert serve.ask("POST", "/score", body, headers.get("Content-Type", "")) == (got, answer)
    except ConnectionError:  # the server refuses before a client that sends all first has read it
        assert name == "large"
    assert server.ask(photo("green"), JPEG)[1]["predictions"][0]["class"] == "green"


def test_batch_rows_name_damaged_images(model: Path, tmp_path: Path) -> None:
    (tmp_path / "a, b.jpg").write_bytes(photo("blue"))
    (tmp_path / "bad.jpg").write_bytes(photo("red")[:-100])
    names = [str(tmp_path / name) for name in ("a, b.jpg", "bad.jpg", "absent.jpg")]
    code = "import batch_score as s, sys; s.init(); print(*s.run(sys.argv[1:]), sep='\\n')"
    command = [SERVER / "python", "-c", code, *names]
    (tmp_path / "code").mkdir()
    (tmp_path / "code/batch_score.py").write_bytes((model / "azureml/batch_score.py").read_bytes())
    done = subprocess.run(
        command, cwd=tmp_path / "code", env=clean(model), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    good, bad, absent = map(json.loads, done.stdout.splitlines())
    assert good == {"file": names[0], **Scorer(model).score([photo("blue")], top_k=1)[0]}
    assert bad.keys() == {"file", "error"} and bad["file"] == names[1]
    assert absent["file"] == names[2] and "No such file" in absent["error"]
