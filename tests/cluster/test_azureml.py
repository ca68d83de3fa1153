"""launcher=azureml and `distdl deploy azureml` with the real SDK: what it sends arrives in a
stand-in for Azure with a real Azurite behind it. From what arrived a job's own command trains, in
empty folders. Not seen here: Azure itself, its images, mounts, GPUs and load balancer.
"""

import importlib.util
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
from urllib.parse import urlsplit

import pytest

from distdl.launchers.azureml import entry
from distdl.launchers.azureml.client import Connection, Workspace
from distdl.tools.serving.scorer import Scorer
from tests.cluster import witness
from tests.cluster.arm import NAMES, Azure, new_job, resource
from tests.cluster.azurite import CONTAINER, needs_azurite
from tests.cluster.nodes import EVICTED, KEPT
from tests.conftest import ROOT, TINY, losses, matrix_only, status
from tests.miniature import everything
from tests.served import model_folder, run_folder
from tests.written import write

SDK = all(importlib.util.find_spec(name) for name in ("azure", "azure.ai", "azure.ai.ml"))
pytestmark = [
    needs_azurite,
    pytest.mark.xdist_group("azureml"),
    pytest.mark.filterwarnings("ignore"),  # the SDK's own, hundreds of them
    pytest.mark.skipif(not SDK, reason="not installed: pip install 'distdl[azure]'"),
]
SECRET = "canary-forwarded-by-name-3f1c"
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
# Nodes that are taken away and come back start everything twice, which takes half a minute.
TAKEN_AWAY = int("DISTDL_MATRIX" in os.environ)
TWO_NODES = ("launcher.compute=gpu", "trainer.num_nodes=2", "trainer.devices=1")


@pytest.fixture(scope="module")
def shared_azure(tmp_path_factory):
    azure = Azure(tmp_path_factory.mktemp("azure"))
    yield azure
    azure.close()


@pytest.fixture
def azure(shared_azure, monkeypatch):
    """It, with the test's process as that of somebody who works with it."""
    drop = ("azure", "arm_", "msi_", "identity_", "obo_", "az_", "http_p", "https_p", "all_p")
    for name in [name for name in os.environ if name.lower().startswith(drop)]:
        monkeypatch.delenv(name)
    cloud = {
        "ARM_CLOUD_METADATA_URL": f"{shared_azure.url}/metadata/endpoints",
        "AZUREML_CURRENT_CLOUD": "StandIn",
        "AZURE_TOKEN_CREDENTIALS": "ManagedIdentityCredential",
    }
    for name, value in {**cloud, **shared_azure.identity()}.items():
        monkeypatch.setenv(name, value)
    find = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *more, **rest: find("127.0.0.1", *more))
    return shared_azure


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    shutil.copy(witness.__file__, folder)
    files = {"config.json": json.dumps(NAMES), ".env": "not for you", ".gitignore": "outputs/\n"}
    write(folder, files)
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    return folder


@pytest.fixture
def distdl(azure, project, without_stage_2, command, monkeypatch):
    """The command line in this process, which has the slow SDK in memory after the first time."""
    monkeypatch.chdir(project)
    monkeypatch.setattr("distdl.launchers.azureml.azure_job.SHORTEST", 0.1)
    monkeypatch.setattr("distdl.launchers.azureml.azure_job.LONGEST", 0.5)
    monkeypatch.setattr("distdl.launchers.queried_job.QueriedJob.poll_seconds", 0.2)

    def run(*arguments, code=0):
        output = command(*arguments)
        assert output.code == code, output
        return output

    return run


@pytest.fixture
def trained(azure, distdl, monkeypatch):
    """A run on two low-priority nodes, once for all tests; what its command printed. `make matrix`
    takes the nodes away in the middle."""
    if "x" not in azure.printed:
        monkeypatch.setenv("CANARY", SECRET)
        tag = f"{EVICTED}: 'epoch 2  step 5 '" if TAKEN_AWAY else f"{KEPT}: to the end"
        azure.printed["x"] = distdl(
            *SMALL,
            *TWO_NODES,
            "launcher.tier=low_priority",
            "name=x",
            "launcher.forward_env=[CANARY]",
            f"launcher.key_vault={azure.url}",
            f"+callbacks.witness.pause={0.1 * TAKEN_AWAY}",
            f"launcher.tags={{{tag}}}",
        )
    return azure.printed["x"]


def job_of(azure, text):
    return azure.jobs[re.findall(r"submitted  azureml://\S+/jobs/(\S+)", text)[0]]


def snapshot_of(azure, job):
    """What was uploaded as a job's code."""
    address = azure.find(job["codeId"])["codeUri"]
    return azure.azurite.contents(urlsplit(address).path)


def test_a_run_trains_every_step_once_also_if_its_nodes_are_taken_away(
    azure, project, trained, distdl
):
    for text in ("azureml: running", "azureml: completed"):
        assert text in trained.out
    assert trained.out.count("preempted:") == TAKEN_AWAY
    assert re.search(r"^0 +0 +0 .*\n1 +1 +0 ", trained.out, re.M), "the table of the ranks"
    assert re.search(r"https://ml.azure.com/runs/default-x-001-\w+\?wsid=", trained.out)
    steps = [int(n) for n in re.findall(r"^epoch \d+  step (\d+) ", trained.out, re.M)]
    run = project / "outputs/default/x"
    mark = {"hdi_isfolder": "true"}  # how a mount marks a folder
    azure.azurite.client(CONTAINER).upload_blob("distdl/default/x/logs", b"", metadata=mark)
    distdl("jobs", "fetch", "outputs/default/x")
    assert status(run).get("restarts", 0) == TAKEN_AWAY
    assert status(run)["state"] == "SUCCEEDED"
    assert set(steps) == set(losses(run)) == set(range(1, 13)), "every step, over both starts"
    assert list((run / "checkpoints").glob("*.ckpt"))
    state = "state   SUCCEEDED, restarted 1 times" if TAKEN_AWAY else "state   SUCCEEDED\n"
    assert state in distdl("jobs", "status", str(run)).out


def test_what_is_created(azure, project, trained):
    """The cluster; the environment, from its folder alone; the snapshot, which is the run."""
    (body,) = map(json.loads, azure.asked("PUT", "^/computes/gpu$"))
    settings = body["properties"]["properties"]
    kind = (settings["vmSize"], settings["vmPriority"], body["identity"]["type"].lower())
    assert kind == ("Standard_NC24ads_A100_v4", "LowPriority", "systemassigned")
    scale = {"minNodeCount": 0, "maxNodeCount": 2, "nodeIdleTimeBeforeScaleDown": "PT5M"}
    assert settings["scaleSettings"] == scale

    (body,) = map(json.loads, azure.asked("PUT", "^/environments/distdl/versions/"))
    image = azure.azurite.contents(urlsplit(body["properties"]["build"]["contextUri"]).path)
    assert image == everything(ROOT / "launchers/azureml/image")

    run = project / "outputs/default/x"
    job = job_of(azure, trained.out).body["properties"]
    snapshot = snapshot_of(azure, job)
    assert snapshot == everything(run / "attempts/001/bundle")
    assert snapshot["config.yaml"] == (run / "config.yaml").read_bytes()
    assert "code/project/witness.py" in snapshot
    assert "code/project/.env" not in snapshot


def test_a_rank_gets_code_input_and_secret_which_is_nowhere_else(azure, project, trained):
    nodes = azure.folder / "nodes" / job_of(azure, trained.out).name
    for rank in (0, 1):
        shown = witness.seen((nodes / f"rank_{rank}.txt").read_text())[rank]
        assert shown["distdl"] == str(nodes / f"node{rank}/code/distdl/__init__.py")
        assert shown["code"] == str(nodes / f"node{rank}/code/project/witness.py")
        assert shown["data"] == "https://data.example.org/pictures"
        assert shown["secret"] == witness.digest(SECRET)
    assert list(azure.vault.values()) == [SECRET]
    assert SECRET not in trained.out + trained.err
    receivers = [path for _, path, body in azure.requests if SECRET in body]
    assert receivers == [f"/secrets/{name}" for name in azure.vault], "only the Key Vault"
    # The run, the nodes' folders, and in Azurite's the snapshot and the store.
    files = [*everything(project).values(), *everything(azure.folder).values()]
    assert not [content for content in files if SECRET.encode() in content]
    stored = everything(azure.folder / "azurite").values()
    assert any(b"class Witness" in content for content in stored), "it would be seen"


@pytest.mark.skipif("DISTDL_MATRIX" not in os.environ, reason="make matrix")
def test_a_job_in_the_queue(azure, project, trained, distdl):
    """The same cluster and environment are used as they are; the job is listed, and cancelled. A
    run with a checkpoint from elsewhere takes it along, with its manifest after it.
    """
    name = "outputs/default/queued"
    run = project / "outputs/default/queued"
    distdl(*SMALL, *TWO_NODES, "follow=false", "name=other")
    queued = (*SMALL, *TWO_NODES, "follow=false", "name=queued")
    sent = distdl(*queued)
    assert "note: cluster gpu stays as it is: launcher.tier is low_priority there" in sent.err
    for path in ("^/computes/gpu$", "^/environments/distdl/versions/"):
        assert len(azure.asked("PUT", path)) == 1, "nothing was created again"
    assert "attempt 1 is pending" in distdl(*queued, code=2).err
    assert "there are no files in azureml://" in distdl("jobs", "fetch", name, code=2).err
    assert distdl("jobs", "list").out.count("\tPENDING\t") == 2
    distdl("jobs", "cancel", name)
    handle = re.search(r"azureml://\S+", sent.out)[0]
    assert distdl("jobs", "wait", handle, code=130).out == f"CANCELLED  {handle}\n"

    distdl("jobs", "fetch", "outputs/default/x")
    shutil.copytree(project / "outputs/default/x/checkpoints", run / "checkpoints")
    again = distdl("jobs", "resubmit", name, "follow=false")
    assert "uploaded the checkpoint epoch_002.ckpt" in again.err
    names = [*azure.azurite.contents(f"{CONTAINER}/distdl/default/queued/checkpoints")]
    assert names == ["epoch_002.ckpt", "epoch_002.ckpt.manifest.json"]


@matrix_only
def test_a_kubernetes_cluster_a_conda_file_a_model_and_what_is_registered(azure, project, distdl):
    """As the SDK sends them. A cluster of another kind is refused before anything is created."""
    write(project, {"environment.yml": "dependencies: [python=3.11, pip, {pip: [torch]}]\n"})
    settings = (
        "launcher.compute=aks",
        "launcher.compute_type=kubernetes",
        "trainer.devices=1",
        "launcher.instance_type=gpu-large",
        "launcher.conda_file=environment.yml",
        "launcher.description=on our own",
        "launcher.priority=high",
        "follow=false",
        "launcher.inputs={start: {path: 'azureml:resnet:3', type: mlflow_model}}",
    )
    registered = "{type: custom_model, folder: checkpoints, name: resnet, version: '7'}"
    settings += (f"launcher.outputs={{best: {registered}}}", "name=own")
    absent = distdl(*SMALL, *settings, code=2).err
    assert "no Kubernetes cluster aks is attached to the workspace" in absent
    cluster = {"properties": {"vmSize": "Standard_NC24ads_A100_v4"}, "computeType": "AmlCompute"}
    azure.resources["/computes/aks"] = resource("/computes/aks", **cluster)
    assert "write launcher.compute_type=amlcompute" in distdl(*SMALL, *settings, code=2).err
    assert not azure.asked("PUT", "^/environments/distdl-conda/"), "nothing was created"
    kubernetes = {"properties": {"namespace": "default"}, "computeType": "Kubernetes"}
    azure.resources["/computes/aks"] = resource("/computes/aks", **kubernetes)
    job = job_of(azure, distdl(*SMALL, *settings).out).body["properties"]

    (body,) = map(json.loads, azure.asked("PUT", "^/environments/distdl-conda/versions/"))
    assert "- python=3.11" in body["properties"]["condaFile"]
    assert (job["description"], job["queueSettings"]) == ("on our own", {"priority": 3})
    assert job["resources"]["instanceType"] == "gpu-large"
    assert job["computeId"].endswith("/computes/aks")
    start, best = job["inputs"]["start"], job["outputs"]["best"]
    assert start["jobInputType"] == "mlflow_model"
    assert start["uri"].endswith("/models/resnet/versions/3")
    assert best["jobOutputType"] == "custom_model"
    assert best["mode"] == "ReadWriteMount"
    assert (best["assetName"], best["assetVersion"]) == ("resnet", "7")
    assert best["uri"] == job["outputs"]["store"]["uri"] + "/checkpoints"
    assert "'--output=best=${{outputs.best}}'" in job["command"]


@matrix_only
def test_a_sweep_is_one_job(azure, project, distdl, tmp_path, monkeypatch):
    sweep = ("launcher.sweep=azureml", "trainer.devices=1", "seed=3,4", "name=s", "follow=false")
    handles = re.findall(r"submitted  (azureml://\S+)", distdl("-m", *SMALL, *sweep).out)
    members = [handle.rpartition("/")[2] for handle in handles]
    (job,) = [job for name, job in azure.jobs.items() if name.startswith("default-s-")]
    # The trials end; as with Azure, their numbers mean nothing.
    for number, member in enumerate(reversed(members)):
        name = f"{job.name}_{number}"
        ended = json.dumps({"state": "SUCCEEDED", "trial": number})
        azure.jobs[name] = new_job(name, {"properties": {}}, "Completed")
        job.trials[name] = member
        write(tmp_path / "stored", {f"{member}/attempts/001/status.json": ended})
    azure.azurite.upload(f"{CONTAINER}/distdl/default/s", tmp_path / "stored")
    for handle in handles:
        assert distdl("jobs", "wait", handle).out == f"SUCCEEDED  {handle}\n"
    distdl("jobs", "fetch", "outputs/default/s")
    runs = [project / "outputs/default/s" / member for member in members]
    assert [status(run)["trial"] for run in runs] == [1, 0]

    # What a trial starts: the worker, with the files of its member.
    trial = job.body["properties"]["trial"]
    node = tmp_path / "node"
    started = []
    azure.azurite.download(urlsplit(azure.find(trial["codeId"])["codeUri"]).path, node)
    configs = [(node / f"members/{member}/config.yaml").read_text() for member in members]
    assert sorted(re.findall(r"^seed: (\d+)", "".join(configs), re.M)) == ["3", "4"]
    for name in ("PYTHONPATH", "DISTDL_INPUT_PICTURES"):
        monkeypatch.setenv(name, "")
    monkeypatch.chdir(node)
    monkeypatch.setattr("os.execv", lambda program, words: started.extend(words))
    command = trial["command"].replace("${{search_space.member}}", members[0])
    entry.main(shlex.split(command.replace("${{outputs.store}}", "/store"))[3:])
    worker = ["distdl.worker", f"members/{members[0]}", f"/store/{members[0]}", "--attempt", "1"]
    assert started[1:] == ["-m", *worker]
    assert (node / f"members/{members[0]}/code").resolve() == node / "code"


def test_the_files_of_a_dry_run_are_a_job(azure, project, distdl):
    """Submitted by the SDK alone, as `az ml ... create --file` does."""
    from azure.ai.ml import load_job

    settings = ("launcher.compute=gpu", "trainer.devices=1", "name=by_az")
    files = (*SMALL, *settings, "launcher.files=outputs/files")
    shown = distdl(*files, "dry_run=true").out
    folder = project / "outputs/files/default/by_az"
    names = ["environment.yml", "compute.yml", "job.yml"]
    assert re.findall(r"^file +\S+/(\S+)$", shown, re.M) == names
    assert {path.name for path in folder.iterdir()} == {*names, "bundle"}
    assert not (project / "outputs/default/by_az").exists()
    client = Connection(Workspace(*NAMES.values()), None).client
    name = client.jobs.create_or_update(load_job(folder / "job.yml")).name
    sent = azure.jobs[name].body["properties"]
    assert sent["command"] in shown
    assert sent["computeId"].endswith("/computes/gpu")
    snapshot = snapshot_of(azure, sent)
    assert snapshot == everything(folder / "bundle")
    assert "code/project/witness.py" in snapshot
    assert str(project).encode() not in snapshot["config.yaml"] + snapshot["launch.yaml"]
    assert "exists already" in distdl(*files, "dry_run=true", code=2).err
    assert "launcher.files: is only for a dry run" in distdl(*files, code=2).err


def test_without_a_credential_there_is_one_sentence(distdl, monkeypatch):
    monkeypatch.setenv("MSI_SECRET", "wrong")
    sent = distdl(*SMALL, *TWO_NODES, "name=nobody", code=2)
    assert "Traceback" not in sent.err
    assert "az login" in sent.err


# Deploying

BATCH = ("--batch", "launcher.compute=cpu")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Three models: of a run, and two folders."""
    run = run_folder(tmp_path_factory.mktemp("run") / "r")
    folder = tmp_path_factory.mktemp("models")
    return [run, *(model_folder(folder / card, card) for card in ("second", "third"))]


@pytest.fixture
def deploy(azure, models, distdl):
    azure.resources.clear()
    azure.broken = ""
    azure.scorer = Scorer(models[1])

    def run(*words, code=0):
        azure.requests.clear()
        words = ("deploy", "azureml", *map(str, words), "--name", "flowers")
        return distdl(*words, code=code)

    return run


def traffic(azure):
    shares = azure.find("/onlineEndpoints/flowers")["traffic"]
    return {name: share for name, share in shares.items() if share}


def test_the_order_of_models(azure, models, deploy):
    """What is the same on every platform: tests/unit/cli/test_deploy.py."""
    shown = deploy(models[0], "dry_run=true").out
    assert azure.requests == []
    assert "  model.pt2\n" in shown
    assert "nothing was sent" in shown
    assert "price per hour: 0.29 USD (1 x Standard_DS3_v2; list price, East US" in shown
    names = []
    for model in models:
        output = deploy(model)
        names += {*azure.named("deployments")} - {*names}
        assert output.out == f"{names[-1]} answers\n"
        assert traffic(azure) == {names[-1]: 100}
        order = [path for method, path, _ in azure.requests if method in ("PUT", "POST")]
        (asked,) = [n for n, path in enumerate(order) if path.startswith("/score/")]
        moved = [n for n, path in enumerate(order) if path.endswith("/onlineEndpoints/flowers")]
        assert moved[-1] > asked > order.index(next(p for p in order if names[-1] in p))
    second, third = names[1:]
    assert {*azure.named("deployments")} == {second, third}
    body = azure.named("deployments")[third]
    assert body["sku"] == {"name": "Default", "capacity": 1}
    assert body["properties"]["codeConfiguration"]["scoringScript"] == "score.py"
    environments = [str(body) for key, body in azure.resources.items() if "/environments/" in key]
    assert "azureml-inference-server-http" in environments[0]
    assert "pydantic" not in environments[0]
    assert deploy("--rollback").out == f"{second} answers\n"
    assert traffic(azure) == {second: 100}
    assert deploy("--delete").out == "flowers was deleted\n"
    assert not azure.named("onlineEndpoints")
    assert not azure.named("deployments")


BROKEN = {"upload": "no right to write models", "creation": "the container has crashed"}
BROKEN["answers"] = 'the answer was {"predictions"'


def test_no_traffic_moves_to_a_model_that_fails(azure, models, deploy, monkeypatch):
    deploy(models[0])
    (name,) = azure.named("deployments")
    for azure.broken, expected in BROKEN.items():
        failed = deploy(models[1], code=1)
        assert expected in failed.err
        assert "1 problem, traffic stays where it was" in failed.err
        assert traffic(azure) == {name: 100}
        assert [*azure.named("deployments")] == [name]

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("distdl.launchers.deploying.check", interrupt)
    assert "interrupted" in deploy(models[1], code=130).err
    assert [*azure.named("deployments")] == [name]


def test_a_batch_endpoint_has_the_new_model_as_its_default(azure, models, deploy):
    shown = deploy(models[0], "dry_run=true", *BATCH).out
    assert "price per hour: nothing while no job runs" in shown
    names = []
    for model in models:
        deploy(model, *BATCH)
        names += {*azure.named("deployments")} - {*names}
        (endpoint,) = azure.named("batchEndpoints").values()
        assert endpoint["properties"]["defaults"] == {"deploymentName": names[-1]}
    assert {*azure.named("deployments")} == {*names[1:]}
    body = azure.named("deployments")[names[-1]]["properties"]
    assert body["codeConfiguration"]["scoringScript"] == "batch_score.py"
    assert body["compute"].endswith("/computes/cpu")
    assert body["outputFileName"].endswith("jsonl")
    assert deploy("--rollback", "--batch").out == f"{names[1]} answers\n"
    deploy("--delete", "--batch")
    assert not azure.named("batchEndpoints")
