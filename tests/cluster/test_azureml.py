"""launcher=azureml with the real SDK: what it sends arrives in a stand-in for Azure with a real
Azurite behind it, and from what arrived there the job's own command trains, in empty folders.

Not seen here: Azure itself, its images, mounts and GPUs.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distdl.launchers.azureml.client import Connection, Workspace
from tests.cluster.arm import Azure, Job, azure, why_not
from tests.cluster.azurite import CONTAINER
from tests.cluster.nodes import HELD
from tests.conftest import ROOT, TINY, Said, losses, status

__all__ = ["azure"]
pytestmark = [
    pytest.mark.xdist_group("azureml"),
    pytest.mark.filterwarnings("ignore"),  # the SDK's own, hundreds of them
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

CANARY = "canary-forwarded-by-name-3f1c"
# The user's own code: says what it was given, and takes its time, so that a node can be taken away.
WITNESS = """
import hashlib, json, os, time
from pathlib import Path
import distdl
from lightning.pytorch import Callback

class Witness(Callback):
    def __init__(self, data: str, pause: float = 0.0) -> None:
        self.data, self.pause = data, pause

    def on_train_start(self, trainer, module):
        secret = os.environ.get("WITNESS_TOKEN", "")
        seen = {"distdl": distdl.__file__, "code": __file__, "data": self.data}
        seen["secret"] = hashlib.sha256(secret.encode()).hexdigest()
        Path(f"witness-{trainer.global_rank}.json").write_text(json.dumps(seen))

    def on_train_batch_end(self, trainer, *_):
        time.sleep(self.pause)
"""
WORKSPACE = {
    "subscription_id": "11111111-2222-3333-4444-555555555555",
    "resource_group": "group",
    "workspace_name": "space",
}
SMALL = (
    *TINY,
    "data.train_samples=64",
    "data.val_samples=8",
    "launcher=azureml",
    "launcher.env={OMP_NUM_THREADS: 1}",
    "+callbacks.witness._target_=witness.Witness",
    "+callbacks.witness.data='${input:pictures}'",
    "+launcher.inputs.pictures=https://data.example.org/pictures",
)
TWO_NODES = ("launcher.compute=gpu", "trainer.num_nodes=2", "trainer.devices=1")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    (folder / "witness.py").write_text(WITNESS)
    (folder / "config.json").write_text(json.dumps(WORKSPACE))
    (folder / ".env").write_text("not for you")
    (folder / ".gitignore").write_text("outputs/\n")
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    return folder


Command = Callable[..., Said]


@pytest.fixture
def here(
    azure: Azure,
    project: Path,
    without_stage_2: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Command:
    """The command line in this process, which has the slow SDK in memory after the first time."""
    from distdl.__main__ import main

    for name in set(os.environ) - set(azure.environment()):
        monkeypatch.delenv(name)
    for name, value in azure.environment(AZUREML_CURRENT_CLOUD="StandIn").items():
        monkeypatch.setenv(name, value)
    find = socket.getaddrinfo

    def getaddrinfo(host: str, *rest: Any, **more: Any) -> Any:
        return find("127.0.0.1" if str(host).endswith(".localhost") else host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.chdir(project)

    def run(*arguments: str) -> Said:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["distdl", *arguments])
        code = main(arguments)
        return Said(code, *capsys.readouterr())

    return run


def wait_for(process: subprocess.Popen[str], pattern: str) -> str:
    """Reads a command's output up to the line that matches."""
    seen = []
    assert process.stdout is not None
    for line in process.stdout:
        seen.append(line)
        if re.search(pattern, line):
            return "".join(seen)
    raise AssertionError(f"no {pattern} in:\n{''.join(seen)}")


def only(found: list) -> object:
    assert len(found) == 1, found
    return found[0]


@pytest.fixture(scope="module")
def trained(azure: Azure, project: Path) -> str:
    """A run on two low-priority nodes that are taken away in the middle; what the command said."""
    process = azure.popen(
        *SMALL,
        *TWO_NODES,
        "launcher.tier=low_priority",
        "launcher.forward_env=[WITNESS_TOKEN]",
        f"launcher.key_vault={azure.vault_url}",
        "+callbacks.witness.pause=0.2",
        "name=x",
        cwd=project,
        WITNESS_TOKEN=CANARY,
    )
    said = wait_for(process, r"epoch 2  step 5 ")
    job = only(list(azure.jobs.values()))
    job.nodes.evicted.set()
    # Not communicate(): it reads past what this stream has read ahead of the last line.
    assert process.stdout is not None
    said += process.stdout.read()
    assert process.wait(60) == 0, said
    return said


def job_of(azure: Azure, said: str) -> Job:
    match = re.search(r"submitted  azureml://\S+/jobs/(\S+)", said)
    assert match is not None, said
    return azure.jobs[match[1]]


def test_the_log_is_streamed(azure: Azure, trained: str) -> None:
    for text in ("azureml: preparing", "azureml: running", "azureml: completed"):
        assert text in trained
    assert re.search(r"^0 +0 +0 .*\n1 +1 +0 ", trained, re.MULTILINE), "the table of the ranks"
    assert re.search(r"https://ml.azure.com/runs/default-x-001-\w+\?wsid=", trained)
    steps = [int(n) for n in re.findall(r"^epoch \d+  step (\d+) ", trained, re.MULTILINE)]
    assert sorted(set(steps)) == list(range(1, 13))


def test_a_run_whose_nodes_are_taken_away_goes_on(
    azure: Azure, project: Path, trained: str, here: Command
) -> None:
    assert "preempted:" in trained
    run = project / "outputs/default/x"
    fetched = here("jobs", "fetch", "outputs/default/x")
    assert fetched.code == 0, fetched
    assert status(run)["restarts"] == 1 and status(run)["state"] == "SUCCEEDED"
    assert set(losses(run)) == set(range(1, 13)), "every step, over both starts"
    assert list((run / "checkpoints").glob("*.ckpt"))
    shown = here("jobs", "status", "outputs/default/x")
    assert "state   SUCCEEDED, restarted 1 times" in shown.out


def test_the_cluster_is_created(azure: Azure, trained: str) -> None:
    body = json.loads(only(azure.asked("PUT", "^/computes/gpu$")))
    settings = body["properties"]["properties"]
    assert settings["vmSize"] == "Standard_NC24ads_A100_v4"
    assert settings["vmPriority"] == "LowPriority"
    assert settings["scaleSettings"] == {
        "minNodeCount": 0,
        "maxNodeCount": 2,
        "nodeIdleTimeBeforeScaleDown": "PT5M",
    }
    assert body["identity"]["type"].lower() == "systemassigned"


def test_the_environment_is_built_from_its_folder_alone(azure: Azure, trained: str) -> None:
    body = json.loads(only(azure.asked("PUT", "^/environments/distdl/versions/")))
    folder = body["properties"]["build"]["contextUri"].partition(f"{azure.azurite.port}/")[2]
    image = ROOT / "launchers/azureml/image"
    sent = {f"{folder}{path.name}": path.read_bytes() for path in image.iterdir()}
    assert azure.azurite.contents(folder) == sent


def test_the_snapshot_is_the_run(azure: Azure, project: Path, trained: str) -> None:
    run, job = project / "outputs/default/x", job_of(azure, trained)
    bundle = run / "attempts/001/bundle"
    files = [path for path in bundle.rglob("*") if path.is_file()]
    code = azure.resources[job.body["properties"]["codeId"]]["properties"]["codeUri"]
    folder = code.partition(f"{azure.azurite.port}/")[2]
    found = azure.azurite.contents(f"{folder}/")
    there = {name.removeprefix(f"{folder}/"): content for name, content in found.items()}
    assert there == {str(path.relative_to(bundle)): path.read_bytes() for path in files}
    assert there["config.yaml"] == (run / "config.yaml").read_bytes()
    assert "code/project/witness.py" in there and "code/project/.env" not in there


def test_what_a_rank_finds(azure: Azure, trained: str) -> None:
    """It ran the uploaded code on both nodes, with the input's place and the secret's value."""
    job = job_of(azure, trained)
    assert job.body["properties"]["distribution"] == {
        "distributionType": "PyTorch",
        "processCountPerInstance": 1,
    }
    for rank in (0, 1):
        node = azure.folder / "nodes" / job.name / f"node{rank}"
        seen = json.loads((node / f"witness-{rank}.json").read_text())
        assert seen["distdl"] == str(node / "code/distdl/__init__.py")
        assert seen["code"] == str(node / "code/project/witness.py")
        assert seen["data"] == "https://data.example.org/pictures"
        assert seen["secret"] == hashlib.sha256(CANARY.encode()).hexdigest()


def test_a_forwarded_secret_stands_nowhere_but_in_the_key_vault(
    azure: Azure, project: Path, trained: str
) -> None:
    assert list(azure.vault.values()) == [CANARY]
    assert CANARY not in trained
    told = [path for _, path, body in azure.requests if CANARY in body]
    assert told == [f"/secrets/{name}" for name in azure.vault], "only the Key Vault was told"
    # The run, the nodes' folders, and in Azurite's the snapshot and the store.
    files = [p for folder in (project, azure.folder) for p in folder.rglob("*") if p.is_file()]
    contents = {path: path.read_bytes() for path in files}
    assert [path for path, content in contents.items() if CANARY.encode() in content] == []
    seen = [path for path, content in contents.items() if b"class Witness" in content]
    assert any(path.is_relative_to(azure.folder / "azurite") for path in seen), "it would be seen"


def test_a_job_in_the_queue(azure: Azure, trained: str, here: Command) -> None:
    """The same cluster and environment are used as they are; the job is seen, and cancelled."""
    queued = (*SMALL, *TWO_NODES, "name=queued", "follow=false", f"launcher.tags={{{HELD}: 1}}")
    sent = here(*queued)
    assert sent.code == 0, sent
    assert "note: cluster gpu stays as it is: launcher.tier is low_priority there" in sent.err
    for path in ("^/computes/gpu$", "^/environments/distdl/versions/"):
        assert len(azure.asked("PUT", path)) == 1, "nothing was created again"
    job = job_of(azure, sent.out)
    assert "state   PENDING" in here("jobs", "status", "outputs/default/queued").out
    again = here(*queued)
    assert again.code == 2 and "attempt 1 is pending" in again.err
    azure.jobs["ended"] = Job("ended", job.body, status="Canceled")
    copy = shutil.copytree("outputs/default/queued", "outputs/default/ended")
    handle = copy + "/attempts/001/job.json"
    Path(handle).write_text(Path(handle).read_text().replace(f"jobs/{job.name}", "jobs/ended"))
    asked = len(azure.asked("GET", "/details$"))
    listed = {line.split("\t")[0]: line for line in here("jobs", "list").out.splitlines()}
    assert "PENDING" in listed["outputs/default/queued"]
    assert "CANCELLED" in listed["outputs/default/ended"]
    assert len(azure.asked("GET", "^/jobs$")) == 1 and len(azure.asked("GET", "/details$")) == asked
    shutil.rmtree(copy)
    del azure.jobs["ended"]
    ended = here("jobs", "cancel", "outputs/default/queued")
    assert ended.code == 0 and job.cancelled, ended
    handle = re.search(r"azureml://\S+", sent.out)[0]
    waited = here("jobs", "wait", handle)
    assert waited.code == 130 and waited.out == f"CANCELLED  {handle}\n"


def test_a_sweep_job_trains_each_frozen_member(
    azure: Azure, project: Path, trained: str, here: Command
) -> None:
    sent = here(
        "-m",
        *SMALL,
        "launcher.sweep=azureml",
        "trainer.devices=1",
        "trainer.limit_train_batches=1",
        "trainer.limit_val_batches=1",
        "trainer.max_epochs=1",
        "seed=3,4",
        "name=s",
    )
    assert sent.code == 0, sent
    handles = re.findall(r"submitted  (azureml://\S+)", sent.out)
    assert len(handles) == 2
    for handle in handles:
        waited = here("jobs", "wait", handle)
        assert waited.out == f"SUCCEEDED  {handle}\n", here("jobs", "logs", handle).out
    assert len(azure.asked("PUT", "^/jobs/default-s-")) == 1
    assert here("jobs", "status", "outputs/default/s").out.count("state   SUCCEEDED") == 2
    assert here("jobs", "fetch", "outputs/default/s").code == 0
    seeds = set()
    for handle in handles:
        run = project / "outputs/default/s" / handle.rpartition("/")[2]
        assert status(run)["state"] == "SUCCEEDED"
        seeds.add(re.search(r"^seed: (\d+)", (run / "config.yaml").read_text(), re.MULTILINE)[1])
    assert seeds == {"3", "4"}


def test_the_files_of_a_dry_run_are_a_job(
    azure: Azure, project: Path, trained: str, here: Command
) -> None:
    """Submitted by the SDK alone, as `az ml job create --file` does; it is held in the queue."""
    from azure.ai.ml import load_job

    where = ("launcher.compute=gpu", "trainer.devices=1", "launcher.files=outputs/files")
    said = here(*SMALL, *where, "name=by_az", "dry_run=true", f"launcher.tags={{{HELD}: 1}}")
    assert said.code == 0, said
    file = project / "outputs/files/default/by_az/job.yml"
    client = Connection(Workspace(*WORKSPACE.values()), None).client
    sent = azure.jobs[client.jobs.create_or_update(load_job(file)).name].body["properties"]
    assert sent["command"] in said.out and sent["computeId"].endswith("/computes/gpu")
    code = azure.resources[sent["codeId"]]["properties"]["codeUri"]
    folder = code.partition(f"{azure.azurite.port}/")[2]
    there = {name.removeprefix(f"{folder}/") for name in azure.azurite.contents(f"{folder}/")}
    bundle = file.parent / "bundle"
    assert there == {str(f.relative_to(bundle)) for f in bundle.rglob("*") if f.is_file()}
    assert {"config.yaml", "code/project/witness.py", "code/distdl/worker.py"} <= there


def test_a_run_that_began_here_goes_on_there(
    azure: Azure, project: Path, trained: str, here: Command
) -> None:
    """Its newest checkpoint is sent along, with its manifest after it."""
    run = project / "outputs/default/moved"
    queued = (*SMALL, *TWO_NODES, "name=moved", "follow=false", f"launcher.tags={{{HELD}: 1}}")
    assert here(*queued).code == 0
    assert here("jobs", "cancel", "outputs/default/moved").code == 0
    assert here("jobs", "fetch", "outputs/default/x").code == 0
    shutil.copytree(project / "outputs/default/x/checkpoints", run / "checkpoints")
    sent = here("jobs", "resubmit", "outputs/default/moved", "follow=false")
    assert sent.code == 0 and "sent the checkpoint epoch_002.ckpt" in sent.err, sent
    folder = f"{CONTAINER}/distdl/default/moved/"
    names = [name.removeprefix(folder) for name in azure.azurite.contents(folder)]
    assert names == ["checkpoints/epoch_002.ckpt", "checkpoints/epoch_002.ckpt.manifest.json"]


def test_without_a_credential_there_is_one_sentence(
    here: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MSI_SECRET", "wrong")
    sent = here(*SMALL, *TWO_NODES, "name=nobody")
    assert sent.code == 2 and "Traceback" not in sent.err
    assert "Azure knows nobody here who may do this" in sent.err
    assert "az login" in sent.err
