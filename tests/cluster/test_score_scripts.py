"""A model folder on the platforms' side, where no distdl is installed: its scoring scripts under
Microsoft's own inference server and as Azure's batch jobs call them, and what the image of `distdl
deploy sagemaker` starts."""

import base64
import json
import re
import signal
import subprocess
import sys
import sysconfig
from contextlib import contextmanager, suppress

import pytest

from distdl.tools.serving.scorer import Scorer
from tests.conftest import ROOT, environment, free_port
from tests.served import model_folder
from tests.serving.colours import Server, photo
from tests.waiting import until

AZURE = ROOT / ".servers/azmlinfsrv/bin"
READY = ROOT / ".servers/azmlinfsrv/.ready"
needs_azure = pytest.mark.skipif(not READY.exists(), reason="make .servers/azmlinfsrv")
pytestmark = pytest.mark.xdist_group("score_scripts")
DOCKERFILE = (ROOT / "launchers/sagemaker/endpoint/Dockerfile").read_text()
TEXTS = [base64.b64encode(photo(colour)).decode() for colour in ("red", "blue")]
TWO = json.dumps({"images": TEXTS, "top_k": 2})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model folder as a platform mounts it: AZUREML_MODEL_DIR/pt2, /opt/ml/model."""
    return model_folder(tmp_path_factory.mktemp("mounted") / "model")


def clean(model):
    env = {k: v for k, v in environment().items() if k != "PYTHONPATH"}
    return {**env, "AZUREML_MODEL_DIR": str(model.parent)}


@contextmanager
def running(command, folder, env, port):
    """A server, once it listens; it ends with the block."""
    with (folder / "log").open("w") as log:
        pipes = {"stdout": log, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, cwd=folder, env=env, **pipes)
    server = Server(process, port)

    def listens():
        with suppress(OSError), server.connect():
            return True
        return process.poll() is not None

    try:
        until(listens, 60)
        assert process.poll() is None, (folder / "log").read_text()
        yield server
    finally:
        process.terminate()
        process.wait(30)


# In the words of distdl serve, whose tests have more of them.
REFUSED = [
    (b"not an image", "image/jpeg", 400, "image 0: is not an image"),
    (photo("red"), "text/html", 415, "content type is text/html"),
    (b"{}", "application/json", 400, "'images': Field required"),
]


@needs_azure
def test_under_azures_inference_server(model, tmp_path):
    (tmp_path / "score.py").write_bytes((model / "azureml/score.py").read_bytes())  # sent alone
    port = free_port()
    scorer = Scorer(model)
    command = [AZURE / "azmlinfsrv", "--entry_script", "score.py", "--port", str(port)]
    with running(command, tmp_path, clean(model), port) as server:
        for colour in scorer.classes:
            expected = {"predictions": scorer.score([photo(colour)])}
            assert server.score(photo(colour)) == (200, expected)
        expected = {"predictions": scorer.score([photo("red"), photo("blue")], top_k=2)}
        assert server.ask("POST", "/score", TWO, "application/json") == (200, expected)
        for body, kind, status, said in REFUSED:
            got, answer = server.ask("POST", "/score", body, kind)
            assert got == status, (got, answer)
            assert said in answer["error"], (got, answer)
            assert server.score()[0] == 200
        with suppress(ConnectionError):  # it refuses before a client that sends all has read it
            assert server.score(bytes(200_000_000))[0] == 413
        assert server.score()[0] == 200


@needs_azure
def test_batch_rows_name_damaged_images(model, tmp_path):
    (tmp_path / "a, b.jpg").write_bytes(photo("blue"))
    (tmp_path / "bad.jpg").write_bytes(photo("red")[:-100])
    names = [str(tmp_path / name) for name in ("a, b.jpg", "bad.jpg", "absent.jpg")]
    (tmp_path / "code").mkdir()
    (tmp_path / "code/batch_score.py").write_bytes((model / "azureml/batch_score.py").read_bytes())
    code = "import batch_score as s, sys; s.init(); print(*s.run(sys.argv[1:]), sep='\\n')"
    pipes = {"env": clean(model), "capture_output": True, "text": True}
    done = subprocess.run([AZURE / "python", "-c", code, *names], cwd=tmp_path / "code", **pipes)
    assert done.returncode == 0, done.stderr
    good, bad, absent = map(json.loads, done.stdout.splitlines())
    assert good == {"file": names[0], **Scorer(model).score([photo("blue")], top_k=1)[0]}
    assert bad.keys() == {"file", "error"}
    assert bad["file"] == names[1]
    assert absent["file"] == names[2]
    assert "No such file" in absent["error"]


def test_what_sagemakers_image_starts(model, tmp_path):
    """On another port and with another folder; its contract: GET /ping, POST /invocations."""
    (tmp_path / "python").symlink_to(f"{sys.base_prefix}/bin/python3.{sys.version_info.minor}")
    port = free_port()
    script = re.search(r"printf '(.*)' > /usr/local/bin/serve", DOCKERFILE)[1]
    assert "PYTHONPATH=/opt/ml/model " in DOCKERFILE
    script = script.replace(" /opt/ml/model ", f" {model} ").replace("=8080 ", f"={port} ")
    # In the image, pip has installed the packages: here they are the tests' own, without distdl.
    env = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{model}:{sysconfig.get_path('purelib')}",
    }
    absent = subprocess.run(["python", "-c", "import distdl"], env=env, capture_output=True)
    assert b"No module named 'distdl'" in absent.stderr
    command = ["sh", "-c", script.replace("\\n", "\n")]
    with running(command, tmp_path, env, port) as server:
        until(lambda: server.ask("GET", "/ping") == (200, {"ready": True}))
        expected = {"predictions": Scorer(model).score([photo()])}
        assert server.ask("POST", "/invocations", photo(), "image/jpeg") == (200, expected)
    assert server.process.returncode in (0, -signal.SIGTERM)
