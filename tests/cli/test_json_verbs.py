"""Each command answers a program when all goes well; tests/cli/test_json.py has the refusals."""

from __future__ import annotations

import json
import shutil
import signal
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distdl.datasets.format import MANIFEST
from tests.cli.test_json import answer_of
from tests.conftest import TINY, UNCHECKED, Said, distdl, matrix_only
from tests.prepared import jpeg, prepare
from tests.waiting import until

ONE = (*TINY[:-1], "callbacks=none", "trainer.devices=1", "trainer.max_epochs=1")
RUN = "outputs/default/x"
ON_PHOTOGRAPHS = (
    *(word for word in ONE if not word.startswith(("data=", "data.train", "data.val"))),
    "data=imagenet",
    "data.root=shards",
    "data.num_workers=0",
)


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> Path:
    """A folder with a prepared set, and a run that was trained on it."""
    folder = tmp_path_factory.mktemp("verbs")
    prepare(folder / "shards")
    done = distdl(*ON_PHOTOGRAPHS, "name=x", cwd=folder, module=UNCHECKED)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def answers(ended: Path, command, tmp_path) -> Callable[..., dict[str, Any]]:
    """The answer of a command, which has a copy of `ended` for itself."""
    shutil.copytree(ended, tmp_path, symlinks=True, dirs_exist_ok=True)

    def ask(name: str, *words: str) -> dict[str, Any]:
        said = command(*name.split(), *words, "--json")
        assert said.code == 0, said.err
        answer: dict[str, Any] = answer_of(said, name)["answer"]
        return answer

    return ask


def test_of_a_job_that_has_ended(answers):
    """Nothing is left to be done, which is an answer as well."""
    for verb in ("cancel", "ended", "fetch"):
        ((job, became),) = answers(f"jobs {verb}", RUN)["done"].items()
        assert job.startswith("local://")
        assert (
            became
            == {
                "cancel": "succeeded already",
                "ended": "SUCCEEDED",
                "fetch": RUN,
            }[verb]
        )
    again = answers("jobs resubmit", RUN)
    assert (again["run"], again["attempt"], again["state"]) == (RUN, 1, "SUCCEEDED")


def test_of_data(answers, tmp_path):
    for split in ("train", "val"):
        for label in ("cat", "dog"):
            (tmp_path / "source" / split / label).mkdir(parents=True)
            (tmp_path / "source" / split / label / "1.jpg").write_bytes(jpeg(len(label)))
    written = answers("prepare", "folder", "--source", "source", "--to", "pets")
    assert (written["folder"], written["written"]) == ("pets", True)
    assert (tmp_path / "pets" / MANIFEST).is_file()
    dry = answers("prepare", "folder", "--source", "source", "--to", "pets", "--dry-run")
    assert dry["written"] is False
    checked = answers("data check", "pets")
    assert checked["images"] == {"train": 2, "val": 2}
    assert (checked["inspected"], checked["damaged"]) == (4, [])
    assert checked["rates"]["read"] > 0
    assert dict(checked["lines"])["damaged"] == "none of 4"


def test_of_two_runs(answers, tmp_path):
    shutil.copytree(tmp_path / RUN, tmp_path / "outputs/default/y", symlinks=True)
    compared = answers("compare", RUN, "outputs/default/y")
    assert [run["run"] for run in compared["runs"]] == [RUN, "outputs/default/y"]
    first, second = (run["metrics"] for run in compared["runs"])
    assert first == second != {}


def test_of_a_code(answers):
    (code,) = answers("explain", "unknown-key")["codes"]
    assert code["example"].startswith("python -m distdl ")


# Those that start processes, import torch, or train.


def asked(folder: Path, name: str, *words: str) -> dict[str, Any]:
    """The answer of a command in a process of its own."""
    verb = name.split()
    options = [*words[: words.index("--")], "--json"] if "--" in words else [*words, "--json"]
    program = words[words.index("--") :] if "--" in words else ()
    done = distdl(*verb, *options, *program, cwd=folder, module=UNCHECKED)
    assert done.returncode == 0, done.stderr
    said = Said(done.returncode, done.stdout, done.stderr)
    answer: dict[str, Any] = answer_of(said, name)["answer"]
    return answer


@pytest.fixture
def copied(ended: Path, tmp_path) -> Path:
    return Path(shutil.copytree(ended, tmp_path / "mine", symlinks=True))


@matrix_only
def test_of_starts(copied):
    longer = asked(copied, "resume", RUN, "trainer.max_epochs=2")
    assert (longer["run"], longer["attempt"], longer["state"]) == (RUN, 2, "SUCCEEDED")
    program = asked(copied, "run", "name=p", "--", "python", "-c", "print(1)", "--json")
    assert (program["state"], program["metrics"]) == ("SUCCEEDED", {})


@matrix_only
def test_of_what_is_measured(copied):
    planned = asked(copied, "plan", *ONE, "--devices", "2")
    assert planned["devices"] == 2
    assert {each["strategy"] for each in planned["strategies"]} >= {"ddp", "fsdp"}
    examined = asked(copied, "doctor", "trainer.accelerator=cpu", "trainer.devices=1")
    assert examined["report"]["checks"]
    scaled = asked(copied, "scale", *ONE[:-2], "--devices", "1", "--mode", "weak")
    (row,) = scaled["rows"]
    assert scaled["missing"] == {}
    assert (row["strategy"], row["devices"]) == ("single", 1)
    drilled = asked(copied, "drill", *ONE, "--faults", "kill_rank", "--steps", "20")
    (row,) = drilled["rows"]
    assert row["fault"] == "kill_rank"


@matrix_only
def test_of_a_model(copied):
    exported = asked(copied, "export", RUN, "--to", "onnx")
    assert exported["format"] == "onnx"
    assert exported["verification"]["summary"]
    words = ("sagemaker", exported["folder"], "--name", "pets", "--image", "pets:1", "dry_run=true")
    settings = (
        "launcher.role=arn:aws:iam::111122223333:role/pets",
        "launcher.region=eu-west-1",
        "launcher.bucket=pets",
    )
    deployed = asked(copied, "deploy", *words, *settings)
    assert (deployed["name"], deployed["dry_run"]) == ("pets", True)
    assert "pets" in deployed["text"]


@matrix_only
def test_of_a_server(copied, background):
    server = background("serve", RUN, "serve.port=0", "--json", cwd=copied, module=UNCHECKED)

    def answered(line: str) -> bool:
        return line.startswith('{"schema"')

    def lines() -> list[dict[str, Any]]:
        return [json.loads(line) for line in server.output().splitlines() if answered(line)]

    until(lines)
    (ready,) = lines()
    assert ready["event"] == "ready"
    image = urllib.request.Request(f"{ready['url']}/score", jpeg(1), {"Content-Type": "image/jpeg"})
    with urllib.request.urlopen(image) as answer:
        assert answer.status == 200
    server.process.send_signal(signal.SIGINT)
    code = server.wait()
    *_, last = lines()
    served = answer_of(Said(code, json.dumps(last), ""), "serve")["answer"]
    assert (served["answered"], served["refused"]) == (1, 0)
