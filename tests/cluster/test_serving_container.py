"""SageMaker's container contract: what the image of `distdl deploy sagemaker` starts, on a host of
its own, with the model in /opt/ml/model and no distdl: GET /ping, POST /invocations, port 8080."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distdl.serving.scorer import Scorer
from tests.cluster.hosts import Hosts, why_not
from tests.conftest import ROOT
from tests.served import model_folder
from tests.serving.colours import photo
from tests.waiting import until

pytestmark = [
    pytest.mark.xdist_group("container"),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]
DOCKERFILE = ROOT / "launchers/sagemaker/endpoint/Dockerfile"
# Sends requests, which it reads as JSON, and prints status and body of each.
CLIENT = """
import base64, http.client, json, sys
for method, path, kind, body in json.load(sys.stdin):
    connection = http.client.HTTPConnection("127.0.0.1", 8080, timeout=60)
    connection.request(method, path, base64.b64decode(body), {"Content-Type": kind})
    answer = connection.getresponse()
    print(json.dumps([answer.status, json.loads(answer.read() or "null")]))
"""


class Container:
    """A host on which the image's `serve` runs."""

    def __init__(self, hosts: Hosts, process: subprocess.Popen[str], log: Path) -> None:
        self.hosts, self.process, self.log = hosts, process, log

    def ask(self, *requests: tuple[str, str, str, bytes]) -> list[Any]:
        lines = [
            (m, path, kind, base64.b64encode(body).decode()) for m, path, kind, body in requests
        ]
        command = [sys.executable, "-c", CLIENT]
        done = self.hosts.run("container", command, input=json.dumps(lines))
        return [json.loads(line) for line in done.stdout.splitlines()]

    def ready(self) -> bool:
        return bool(self.process.poll()) or self.ask(("GET", "/ping", "", b""))[:1] == [
            [200, {"ready": True}]
        ]


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    folder = tmp_path_factory.mktemp("container")
    model_folder(folder / "ml/model")
    (folder / "bin").mkdir()
    base = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
    (folder / "bin/python").symlink_to(base)
    script = re.search(r"printf '(.*)' > /usr/local/bin/serve", DOCKERFILE.read_text())
    assert script is not None
    (folder / "bin/serve").write_text(script[1].replace("\\n", "\n"))
    (folder / "bin/serve").chmod(0o755)
    # In the image, pip has installed the packages: here they are the tests' own, without distdl.
    packages = sysconfig.get_path("purelib")
    path = re.search(r"PYTHONPATH=(\S+)", DOCKERFILE.read_text())
    assert path is not None
    env = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    env |= {"PYTHONPATH": f"{path[1]}:{packages}"}
    with Hosts("container") as hosts, (folder / "log").open("w") as log:
        hosts.bind("container", folder / "ml", "/opt/ml")
        absent = hosts.run("container", ["python", "-c", "import distdl"], env=env)
        assert "No module named 'distdl'" in absent.stderr
        process = hosts.popen("container", ["serve"], env=env, stdout=log, stderr=log)
        started = Container(hosts, process, folder / "log")
        until(started.ready, 90, (folder / "log").read_text)
        assert process.poll() is None, (folder / "log").read_text()
        yield started
        process.kill()
        process.wait()


def test_it_answers_on_sagemakers_paths_and_ends_in_order(container: Container, tmp_path) -> None:
    scorer = Scorer(model_folder(tmp_path / "model"))
    image = photo("red")
    texts = [base64.b64encode(photo(color)).decode() for color in scorer.classes]
    body = json.dumps({"images": texts, "top_k": 1}).encode()
    answers = container.ask(
        ("POST", "/invocations", "image/jpeg", image),
        ("POST", "/invocations", "application/x-image", b"no image"),
        ("POST", "/invocations", "application/json", body),
    )
    assert answers[0] == [200, {"predictions": scorer.score([image])}]
    assert answers[1][0] == 400 and "is not an image" in answers[1][1]["error"]
    assert [each["class"] for each in answers[2][1]["predictions"]] == scorer.classes
    os.kill(container.process.pid, signal.SIGTERM)
    assert container.process.wait(30) in (0, -signal.SIGTERM)
