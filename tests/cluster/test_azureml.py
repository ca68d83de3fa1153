"""launcher=azureml with the real SDK: what it sends arrives in a stand-in for Azure with a real
Azurite behind it, and from what arrived there the job's own command trains, in empty folders.

Not seen here: Azure itself, its images, mounts and GPUs.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distdl.launchers.azureml.client import Connection, Workspace
from tests.cluster.arm import Azure, Job, azure, why_not, work_with
from tests.cluster.azurite import CONTAINER
from tests.cluster.nodes import HELD
from tests.conftest import ROOT, TINY, losses, status

__all__ = ["azure"]
pytestmark = [
    pytest.mark.xdist_group("azureml"),
    pytest.mark.filterwarnings("ignore"),  # the SDK's own, hundreds of them
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

CANARY = "canary-forwarded-by-name-3f1c"
# The user's own code: writes what it was given, and takes its time, so that a node can be lost.
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
    *(*TINY, "data.train_samples=64", "data.val_samples=8"),
    *("launcher=azureml", "launcher.env={OMP_NUM_THREADS: 1}"),
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


@pytest.fixture
def distdl(
    azure: Azure, project: Path, without_stage_2, command, monkeypatch
) -> Callable[..., Any]:
    """The command line in this process, which has the slow SDK in memory after the first time."""
    work_with(azure, monkeypatch)
    monkeypatch.chdir(project)

    def run(*arguments: str, code: int = 0) -> Any:
        output = command(*arguments)
        assert output.code == code, output
        return output

    return run


@pytest.fixture(scope="module")
def trained(azure: Azure, project: Path) -> str:
    """A run on two low-priority nodes that are taken away in the middle; the command's output."""
    process = azure.popen(
        *(*SMALL, *TWO_NODES, "launcher.tier=low_priority", "name=x"),
        *("launcher.forward_env=[WITNESS_TOKEN]", f"launcher.key_vault={azure.vault_url}"),
        "+callbacks.witness.pause=0.2",
        cwd=project,
        WITNESS_TOKEN=CANARY,
    )
    assert process.stdout is not None
    output = ""
    while "epoch 2  step 5 " not in output:
        line = process.stdout.readline()
        assert line, output
        output += line
    (job,) = azure.jobs.values()
    job.nodes.evicted.set()
    # Not communicate(): it reads past what this stream has read ahead of the last line.
    output += process.stdout.read()
    assert process.wait(60) == 0, output
    return output


def job_of(azure: Azure, output: str) -> Job:
    return azure.jobs[re.findall(r"submitted  azureml://\S+/jobs/(\S+)", output)[0]]


def uploaded(azure: Azure, address: str) -> dict[str, bytes]:
    """The files in a folder of a blob store: name -> content."""
    folder = address.partition(f"{azure.azurite.port}/")[2].rstrip("/") + "/"
    return {k.removeprefix(folder): v for k, v in azure.azurite.contents(folder).items()}


def snapshot_of(azure: Azure, job: dict[str, Any]) -> dict[str, bytes]:
    """What was uploaded as a job's code."""
    return uploaded(azure, azure.resources[job["codeId"]]["properties"]["codeUri"])


def files_of(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_a_run_whose_nodes_are_taken_away_resumes(azure, project, trained: str, distdl) -> None:
    for text in ("azureml: preparing", "azureml: running", "azureml: completed", "preempted:"):
        assert text in trained
    assert re.search(r"^0 +0 +0 .*\n1 +1 +0 ", trained, re.MULTILINE), "the table of the ranks"
    assert re.search(r"https://ml.azure.com/runs/default-x-001-\w+\?wsid=", trained)
    steps = [int(n) for n in re.findall(r"^epoch \d+  step (\d+) ", trained, re.MULTILINE)]
    run = project / "outputs/default/x"
    distdl("jobs", "fetch", "outputs/default/x")
    assert status(run)["restarts"] == 1 and status(run)["state"] == "SUCCEEDED"
    assert set(steps) == set(losses(run)) == set(range(1, 13)), "every step, over both starts"
    assert list((run / "checkpoints").glob("*.ckpt"))
    assert "state   SUCCEEDED, restarted 1 times" in distdl("jobs", "status", str(run)).out


def test_what_is_created(azure: Azure, project: Path, trained: str) -> None:
    """The cluster; the environment, from its folder alone; the snapshot, which is the run."""
    (body,) = map(json.loads, azure.asked("PUT", "^/computes/gpu$"))
    settings = body["properties"]["properties"]
    kind = (settings["vmSize"], settings["vmPriority"], body["identity"]["type"].lower())
    assert kind == ("Standard_NC24ads_A100_v4", "LowPriority", "systemassigned")
    scale = {"minNodeCount": 0, "maxNodeCount": 2, "nodeIdleTimeBeforeScaleDown": "PT5M"}
    assert settings["scaleSettings"] == scale

    (body,) = map(json.loads, azure.asked("PUT", "^/environments/distdl/versions/"))
    image = uploaded(azure, body["properties"]["build"]["contextUri"])
    assert image == files_of(ROOT / "launchers/azureml/image")

    run, job = project / "outputs/default/x", job_of(azure, trained).body["properties"]
    snapshot = snapshot_of(azure, job)
    assert snapshot == files_of(run / "attempts/001/bundle")
    assert snapshot["config.yaml"] == (run / "config.yaml").read_bytes()
    assert "code/project/witness.py" in snapshot and "code/project/.env" not in snapshot


def test_a_rank_gets_code_input_and_secret_which_is_nowhere_else(azure, project, trained) -> None:
    job = job_of(azure, trained)
    distribution = {"distributionType": "PyTorch", "processCountPerInstance": 1}
    assert job.body["properties"]["distribution"] == distribution
    for rank in (0, 1):
        node = azure.folder / "nodes" / job.name / f"node{rank}"
        assert json.loads((node / f"witness-{rank}.json").read_text()) == {
            "distdl": str(node / "code/distdl/__init__.py"),
            "code": str(node / "code/project/witness.py"),
            "data": "https://data.example.org/pictures",
            "secret": hashlib.sha256(CANARY.encode()).hexdigest(),
        }
    assert list(azure.vault.values()) == [CANARY] and CANARY not in trained
    receivers = [path for _, path, body in azure.requests if CANARY in body]
    assert receivers == [f"/secrets/{name}" for name in azure.vault], "only the Key Vault"
    # The run, the nodes' folders, and in Azurite's the snapshot and the store.
    files = [p for folder in (project, azure.folder) for p in folder.rglob("*") if p.is_file()]
    assert [path for path in files if CANARY.encode() in path.read_bytes()] == []
    stored = [p for p in (azure.folder / "azurite").rglob("*") if p.is_file()]
    assert any(b"class Witness" in p.read_bytes() for p in stored), "it would be seen"


def test_a_job_in_the_queue(azure: Azure, project: Path, trained: str, distdl) -> None:
    """The same cluster and environment are used as they are; the job is listed, and cancelled. A
    run with a checkpoint from elsewhere takes it along, with its manifest after it.
    """
    name, run = "outputs/default/queued", project / "outputs/default/queued"
    queued = (*SMALL, *TWO_NODES, "name=queued", "follow=false", f"launcher.tags={{{HELD}: 1}}")
    sent = distdl(*queued)
    assert "note: cluster gpu stays as it is: launcher.tier is low_priority there" in sent.err
    for path in ("^/computes/gpu$", "^/environments/distdl/versions/"):
        assert len(azure.asked("PUT", path)) == 1, "nothing was created again"
    job = job_of(azure, sent.out)
    assert "state   PENDING" in distdl("jobs", "status", name).out
    assert "attempt 1 is pending" in distdl(*queued, code=2).err
    azure.jobs["ended"] = Job("ended", job.body, status="Canceled")
    copy = shutil.copytree(run, run.with_name("ended"))
    handle = copy / "attempts/001/job.json"
    handle.write_text(handle.read_text().replace(f"jobs/{job.name}", "jobs/ended"))
    asked = len(azure.asked("GET", "/details$"))
    listed = {line.split("\t")[0]: line for line in distdl("jobs", "list").out.splitlines()}
    assert "PENDING" in listed[name] and "CANCELLED" in listed["outputs/default/ended"]
    assert len(azure.asked("GET", "^/jobs$")) == 1 and len(azure.asked("GET", "/details$")) == asked
    shutil.rmtree(copy)
    del azure.jobs["ended"]
    distdl("jobs", "cancel", name)
    assert job.cancelled
    text = re.search(r"azureml://\S+", sent.out)[0]
    assert distdl("jobs", "wait", text, code=130).out == f"CANCELLED  {text}\n"

    distdl("jobs", "fetch", "outputs/default/x")
    shutil.copytree(project / "outputs/default/x/checkpoints", run / "checkpoints")
    again = distdl("jobs", "resubmit", name, "follow=false")
    assert "uploaded the checkpoint epoch_002.ckpt" in again.err
    folder = f"{CONTAINER}/distdl/default/queued/checkpoints/"
    names = [name.removeprefix(folder) for name in azure.azurite.contents(folder)]
    assert names == ["epoch_002.ckpt", "epoch_002.ckpt.manifest.json"]


def test_a_sweep_job_trains_each_frozen_member(azure: Azure, project: Path, distdl) -> None:
    short = ("trainer.limit_train_batches=1", "trainer.limit_val_batches=1", "trainer.max_epochs=1")
    sweep = ("launcher.sweep=azureml", "trainer.devices=1", "seed=3,4", "name=s")
    handles = re.findall(r"submitted  (azureml://\S+)", distdl("-m", *SMALL, *short, *sweep).out)
    for handle in handles:
        waited = distdl("jobs", "wait", handle)
        assert waited.out == f"SUCCEEDED  {handle}\n", distdl("jobs", "logs", handle).out
    assert len(azure.asked("PUT", "^/jobs/default-s-")) == 1
    assert distdl("jobs", "status", "outputs/default/s").out.count("state   SUCCEEDED") == 2
    distdl("jobs", "fetch", "outputs/default/s")
    runs = [project / "outputs/default/s" / handle.rpartition("/")[2] for handle in handles]
    assert [status(run)["state"] for run in runs] == ["SUCCEEDED"] * 2
    seeds = [re.findall(r"^seed: (\d+)", (r / "config.yaml").read_text(), re.M) for r in runs]
    assert sorted(seeds) == [["3"], ["4"]]


def test_the_files_of_a_dry_run_are_a_job(azure: Azure, project: Path, distdl) -> None:
    """Submitted by the SDK alone, as `az ml ... create --file` does; it is held in the queue."""
    from azure.ai.ml import load_compute, load_environment, load_job

    settings = ("launcher.compute=gpu", "launcher.tier=spot", "trainer.devices=1", "name=by_az")
    files = (*SMALL, *settings, "launcher.files=outputs/files", f"launcher.tags={{{HELD}: 1}}")
    shown = distdl(*files, "dry_run=true").out
    folder = project / "outputs/files/default/by_az"
    names = ["environment.yml", "compute.yml", "job.yml"]
    assert re.findall(r"^file +\S+/(\S+)$", shown, re.M) == names
    assert {path.name for path in folder.iterdir()} == {*names, "bundle"}
    assert not (project / "outputs/default/by_az").exists()
    client = Connection(Workspace(*WORKSPACE.values()), None).client
    load_environment(folder / "environment.yml")
    assert load_compute(folder / "compute.yml").tier == "low_priority"
    job = client.jobs.create_or_update(load_job(folder / "job.yml"))
    sent = azure.jobs[job.name].body["properties"]
    assert sent["command"] in shown and sent["computeId"].endswith("/computes/gpu")
    snapshot = snapshot_of(azure, sent)
    assert snapshot == files_of(folder / "bundle")
    assert {"code/project/witness.py", "code/distdl/worker/main.py"} <= set(snapshot)
    assert str(project).encode() not in snapshot["config.yaml"]
    assert "exists already" in distdl(*files, "dry_run=true", code=2).err
    assert "launcher.files: is only for a dry run" in distdl(*files, code=2).err


def test_without_a_credential_there_is_one_sentence(distdl, monkeypatch) -> None:
    monkeypatch.setenv("MSI_SECRET", "wrong")
    sent = distdl(*SMALL, *TWO_NODES, "name=nobody", code=2)
    assert "Traceback" not in sent.err and "az login" in sent.err
