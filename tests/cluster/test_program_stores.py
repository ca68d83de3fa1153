"""The checkpoints of a program on nodes without a place that lasts: Azurite, and S3 by moto."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from distdl.stores import open_store
from tests.aws import moto, s3  # noqa: F401 - fixtures
from tests.cluster.azurite import MISSING, Azurite, connection
from tests.conftest import matrix_only

pytestmark = [matrix_only, pytest.mark.timeout(600), pytest.mark.xdist_group("programs")]
PROGRAMS = Path(__file__).parent / "programs"
SECONDS = 120


@pytest.fixture
def azure(tmp_path, monkeypatch):
    if MISSING:
        pytest.skip("npm install -g azurite")
    server = Azurite(tmp_path / "azurite")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(server.certificate))
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection(server.port))
    yield f"azure://{server.new_container()}/kept"
    server.close()


@pytest.fixture
def place(request):
    if request.param == "azure":
        return request.getfixturevalue("azure")
    request.getfixturevalue("s3")
    return "s3://box/kept"


def lists_of(place):
    return sorted(name for name in open_store(place).names() if "/list-" in name)


def kept(place):
    """The step of each rank in the newest complete copy."""
    store = open_store(place)
    files = json.loads(store.read(lists_of(place)[-1]))["files"]
    assert {"0", "1"} <= files.keys()  # and what is being written at the copy's moment
    below = "default/a/nodes/0/files"
    return [int(store.read(f"{below}/{files[rank]['sha256']}")) for rank in ("0", "1")]


def steps_of(attempt, says):
    """What each rank has printed last behind these words; none before all have."""
    logs = [attempt / f"logs/rank_{rank}.log" for rank in (0, 1)]
    texts = [log.read_text() if log.exists() else "" for log in logs]
    found = [re.findall(rf"{says} step (\d+)", text) for text in texts]
    return [int(each[-1]) for each in found] if all(found) else []


def begun(attempt):
    return steps_of(attempt, "from")


def ended(attempt):
    return steps_of(attempt, "ends at")


@pytest.mark.parametrize("place", ["azure", "s3"], indirect=True)
def test_copied_while_it_runs_and_at_its_end_and_restored(place, tmp_path, background):
    """Asked to end, and killed with everything that belongs to it."""
    project = tmp_path / "project"
    project.mkdir()
    shutil.copy(PROGRAMS / "counting.sh", project)
    env = {name: value for name, value in os.environ.items() if name.startswith(("AWS_", "AZURE_"))}
    env |= {"REQUESTS_CA_BUNDLE": os.environ.get("REQUESTS_CA_BUNDLE", "")}
    env = {name: value for name, value in env.items() if value}
    options = {"cwd": project, "env": env}
    settings = (f"program.checkpoints={place}", "program.sync=1", "trainer.devices=2")
    words = ("name=a", "tracking=none", "trainer.accelerator=cpu", *settings)
    run = project / "outputs/default/a"
    attempts = [run / f"attempts/{number:03d}" for number in (1, 2, 3)]

    first = background("run", *words, "--", "./counting.sh", "100000", **options)
    first.until(lambda: len(lists_of(place)) >= 2, SECONDS)  # while it runs
    first.process.terminate()
    assert first.wait(SECONDS) == 75, first.output()
    assert kept(place) == ended(attempts[0])  # and once more
    assert not [*(run / "checkpoints").glob("*")]

    second = background("resume", str(run), **options)
    second.until(lambda: begun(attempts[1]), SECONDS)
    assert begun(attempts[1]) == ended(attempts[0]), second.output()
    count = len(lists_of(place))
    second.until(lambda: len(lists_of(place)) > count, SECONDS)
    second.kill_all()  # as a node that is taken away
    reached = kept(place)
    # What an upload that was cut off leaves: files, and no list of them.
    store = open_store(place)
    (tmp_path / "half").write_text("999999\n")
    store.upload(tmp_path / "half", f"default/a/nodes/0/files/{'0' * 64}")

    third = background("resume", str(run), **options)
    third.until(lambda: begun(attempts[2]), SECONDS)
    assert begun(attempts[2]) == reached, third.output()
    third.process.terminate()
    assert third.wait(SECONDS) == 75, third.output()
    assert kept(place) == ended(attempts[2])
