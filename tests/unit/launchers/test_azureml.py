"""launcher=azureml without an account: what would be sent, and what is refused before.

What is sent arrives in a stand-in for Azure in tests/cluster/test_azureml.py.
"""

import ast
import functools
import io
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import yaml

from distdl.config import compose
from distdl.config import recipe as configs
from distdl.job import JobSpec, Resources
from distdl.launch import planning
from distdl.launchers.azureml import azure_job, entry, request, submit
from distdl.launchers.azureml.azure_job import AzureMLJob
from distdl.launchers.azureml.client import Connection, Workspace
from distdl.launchers.azureml.launcher import AzureMLLauncher
from distdl.util.errors import UserError
from tests.conftest import ROOT, check_golden
from tests.written import write

IDENTITY = "/subscriptions/s/resourceGroups/g/providers/x/userAssignedIdentities/trainer"
ACPT = "azureml://registries/azureml/environments/acpt-pytorch-2.8-cuda12.6/labels/latest"
NC96, MISTYPED = "Standard_NC96ads_A100_v4", "Standard_NC24ads_A100"
SETTINGS = f"""
everything: {{
  vm_size: Standard_ND96asr_v4, tier: spot, compute: gpu-a100, max_nodes: 4, idle_seconds: 600,
  vnet: lab, subnet: nodes, public_ip: false, compute_identity: [{IDENTITY}],
  walltime: "1-12:00:00", build_context: {ROOT}/tests/unit, distribution: mpi,
  docker_args: --ulimit memlock=-1, inputs: {{
    imagenet: {{path: "azureml://datastores/data/paths/imagenet", mode: download}},
    labels: {{path: "azureml:labels:3", type: uri_file}}, weights: "https://example.org/weights"}},
  mount: {{block_based_cache_enabled: true, cache_size: 200GB, read_threads: null,
    unmount_timeout_seconds: 60}},
  datastore: results, forward_env: [HF_TOKEN, WANDB_API_KEY], identity: managed,
  env: {{NCCL_DEBUG: INFO}}, experiment_name: image net, display_name: the first one,
  tags: {{team: vision, cost: 7}}, services: {{
    ssh: {{type: ssh, ssh_public_keys: ssh-rsa AAAA me, nodes: all}},
    board: {{type: tensor_board, log_dir: "${{{{outputs.store}}}}/logs"}}}}}}
serverless: {{vm_size: {NC96}, image: "me.azurecr.io/t:1", description: the first, priority: high}}
kubernetes: {{compute: aks, compute_type: kubernetes, instance_type: gpu-large,
  conda_file: environment.yml, image: "me.azurecr.io/base:1",
  inputs: {{start: {{path: "azureml:resnet:3", type: mlflow_model, mode: download}}}},
  outputs: {{best: {{type: custom_model, folder: checkpoints, name: resnet50, version: "7"}},
    scores: {{path: "azureml://datastores/results/paths/scores", mode: upload, name: scores}}}}}}
sweep: {{vm_size: Standard_NC24ads_A100_v4, tier: low_priority, compute: gpu, sweep: azureml,
  walltime: 2, environment: {ACPT},
  sweep_job: {{max_concurrent: 2, metric: val/acc1, goal: maximize}}}}
"""
EVERYTHING, SERVERLESS, ON_KUBERNETES, SWEEP = yaml.safe_load(SETTINGS).values()
WORKSPACE = Workspace("s", "g", "w")


def spec(name="resnet50_ddp/first", *size, **more):
    bundle = f"/runs/{name}/attempts/001/bundle"
    return JobSpec(name, bundle, f"/runs/{name}", 1, Resources(*size or (2, 8, "gpu")), **more)


@functools.cache
def shipped():
    return configs.plain(compose.compose(["launcher=azureml"]).launcher)


def launcher(**changes):
    return AzureMLLauncher(**{k: v for k, v in {**shipped(), **changes}.items() if k[0] != "_"})


def check(nodes=1, devices=1, accelerator="gpu", **changes):
    context = {"num_nodes": nodes, "devices": devices, "accelerator": accelerator}
    return list(AzureMLLauncher.check({**shipped(), **changes}, context))


def rendered(case):
    if case == "sweep":
        members = [spec(f"default/s/{name}", 1, 1, "gpu") for name in ("1a2b", "3c4d")]
        return launcher(**SWEEP).request_sweep(members)
    if case == "kubernetes":
        return launcher(**ON_KUBERNETES).request(spec())
    if case == "serverless":
        return launcher(**SERVERLESS).request(spec("resnet50_ddp/first", 1, 4, "gpu"))
    forwarded = tuple(EVERYTHING["forward_env"])
    return launcher(**EVERYTHING).request(spec(forward_env=forwarded, env={"FROM_SPEC": "1"}))


@pytest.mark.parametrize("case", ["everything", "serverless", "kubernetes", "sweep"])
@pytest.mark.filterwarnings("ignore")
def test_request(case, tmp_path, pytestconfig, monkeypatch):
    """As printed, and as the SDK's loader of each kind of document reads it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DISTDL_CACHE", str(tmp_path))  # no prices that were read on this machine
    write(tmp_path, {"environment.yml": "dependencies: [python=3.11, pip, {pip: [torch]}]\n"})
    text = rendered(case).render()
    assert text == rendered(case).render(), "the same spec, the same request"
    shown = text.replace(str(ROOT), "CHECKOUT")
    if case == "everything":
        # A hash of the folder. YAML puts one in quotes that could be read as a number: 12345678.
        version = request.version_of(Path(EVERYTHING["build_context"]))
        shown = shown.replace(f"'{version}'", version).replace(version, "VERSION")
    check_golden(pytestconfig, ROOT / f"tests/golden/launchers/azureml_{case}.txt", shown)
    azure = pytest.importorskip("azure.ai.ml")
    load = {"environment": azure.load_environment, "amlCompute": azure.load_compute}
    for document in filter(None, yaml.safe_load_all(text)):
        kind = document["$schema"].rpartition("/")[2].removesuffix(".schema.json")
        if "Job" in kind:  # the SDK looks for the folder
            document.get("trial", document)["code"] = str(tmp_path)
        load_kind = load.get(kind, azure.load_job)
        load_kind(io.StringIO(request.to_yaml(document)))


MODE = {"path": "azureml:x:1", "mode": "eval_mount"}
OLD_GPU = "Standard_NC6s_v3"
KUBERNETES = {"compute": "aks", "compute_type": "kubernetes"}
# Settings; the path of the Problem, and what its text says.
REFUSED = [
    ({"vm_size": "NC24ads_A100"}, "vm_size", "did you mean Standard_NC24ads_A100_v4"),
    ({"vm_size": OLD_GPU}, "vm_size", "no kernels for a V100"),
    ({"vm_size": "Standard_DS3_v2"}, "vm_size", "has no GPU"),
    ({"vm_size": "Standard_ND96isr_MI300X_v5"}, "vm_size", "it needs ROCm"),
    ({"vm_size": "Standard_ND128isr_NDR_GB200_v6"}, "vm_size", "Arm (aarch64)"),
    ({"vm_size": NC96, "devices": 8}, "vm_size", "v4 has 4 GPUs\n    write trainer.devices=4"),
    ({"compute": "gpu", "max_nodes": 1}, "max_nodes", "launcher.max_nodes=2"),
    ({"min_nodes": 5, "max_nodes": 3}, "min_nodes", "more than max_nodes"),
    ({"vnet": "lab"}, "subnet", "name a subnet"),
    ({"subnet": "nodes"}, "subnet", "full ARM id"),
    ({"public_ip": False}, "public_ip", "need a subnet"),
    ({"compute_identity": ["trainer"]}, "compute_identity", "not an ARM id"),
    ({"image": "a", "environment": "azureml:b@latest"}, "environment", "set only one"),
    ({"build_context": "/nowhere"}, "build_context", "no Dockerfile"),
    ({"inputs": {"a": "/data/a"}}, "inputs.a", "not an address that Azure can read"),
    ({"inputs": {"a b": "azureml:x:1"}}, "inputs.a b", "a name of letters, digits and _"),
    ({"inputs": {"a": {}}}, "inputs.a", "missing"),
    ({"inputs": {"a": MODE}}, "inputs.a.mode", "is only for type=mltable"),
    ({"inputs": {"a": {"path": "azureml:x:1", "kind": 1}}}, "inputs.a", "one of type, mode, path"),
    ({"inputs": {"a": "https://x/o'neill"}}, "inputs.a", "%27"),
    ({"inputs": {"ab": "azureml:x:1"}, "env": {"L": "${{inputs.a}}/l"}}, "env.L", "mean ab?"),
    ({"services": {"x": {"type": "ssh"}}}, "services.x.ssh_public_keys", "nobody could log in"),
    ({"services": {"x": {"type": "ssh", "ssh_public_key": "k"}}}, "services.x", "ssh_public_keys?"),
    (
        {"services": {"x": {"type": "vs_code", "log_dir": "l"}}},
        "services.x.log_dir",
        "tensor_board",
    ),
    ({"services": {"x": {"type": "jupyter"}}}, "services.x.type", "'jupyter_lab'"),
    ({"services": {"x": "ssh"}}, "services.x", "'ssh' is not"),
    ({"services": {"x": {"type": "vs_code"}}, "sweep": "azureml"}, "services", "sweep=jobs"),
    ({"sweep_job": {"gaol": "maximize"}}, "sweep_job", "did you mean goal?"),
    ({"inputs": {"m": {"path": "azureml:m:1", "type": "model"}}}, "inputs.m.type", "custom_model"),
    ({"outputs": {"m": {}}}, "outputs.m", "write {folder: m}"),
    ({"outputs": {"m": {"folder": "../x"}}}, "outputs.m.folder", "not a folder of the run"),
    ({"outputs": {"m": {"folder": "x", "nam": "m"}}}, "outputs.m", "did you mean name?"),
    ({"outputs": {"m": {"folder": "x", "version": "1"}}}, "outputs.m.version", "write the name"),
    ({"outputs": {"m": {"path": "/tmp"}}}, "outputs.m.path", "azureml://datastores/"),
    ({"outputs": {"store": {"folder": "x"}}}, "outputs.store", "but store"),
    ({"outputs": {"m": {"folder": "x"}}, "sweep": "azureml"}, "outputs", "sweep=jobs"),
    ({"conda_file": "/nowhere"}, "conda_file", "No such file"),
    ({"conda_file": f"{ROOT}/conf/launcher/mpi.yaml"}, "conda_file", "no list of dependencies"),
    ({"priority": "urgent"}, "priority", "'low', 'medium' or 'high'"),
    ({"compute_type": "kubernetes"}, "compute", "which Kubernetes compute"),
    ({**KUBERNETES, "tier": "spot"}, "tier", "has no tiers"),
    ({"instance_type": "gpu"}, "instance_type", "compute_type=kubernetes"),
    ({"sweep_job": {"goal": "max"}}, "sweep_job.goal", "not 'maximize' or 'minimize'"),
    ({"files": "f", "forward_env": ["HF_TOKEN"]}, "files", "forward_env=[]"),
    ({"files": "f", "sweep": "azureml"}, "files", "sweep=jobs"),
    ({"mount": {"block_cache": True}}, "mount.block_cache", "one of attribute_cache_ttl"),
    ({"key_vault": "http://x"}, "key_vault", "https://NAME.vault.azure.net"),
]


DOCKER = {  # a spelling -> what its problem says
    "--shm-size=1g": "launcher.shm_size",
    "--ulimit memlock=-1 --shm-size 1g": "launcher.shm_size",
    "-e X=1": "launcher.env",
    "-eX=1": "launcher.env",
    "-ite X=1": "launcher.env",
    "--env-file x": "launcher.env",
    "--gpus=1": "trainer.devices",
    "--rm -w /tmp": "folder of its code",
    "--entrypoint sh": "command is distdl's",
    "--net=bridge": "the nodes meet",
    "-itd": "before it has begun",
    "ubuntu": "'ubuntu' for the image",
    "-v /a:/b --rm ubuntu -e X=1": "'ubuntu' for the image",
    "-- ubuntu": "'--' for the image",
    '--label "a': "a quotation mark is missing",
    "--ipc=host --ulimit": "needs a value",
}
REFUSED += [({"docker_args": spelling}, "docker_args", said) for spelling, said in DOCKER.items()]
HARMLESS = (
    "--ulimit memlock=-1 --ulimit stack=67108864",
    "-v /a:/b --ipc=host --privileged",
    '--label "shm-size = --gpus"',
    "-l env -m 8g -it",
    "--cap-add IPC_LOCK --device=/dev/x",
)


@pytest.mark.parametrize("spelling", HARMLESS)
def test_what_no_other_setting_sets_is_left_to_docker(spelling):
    assert not check(docker_args=spelling)


@pytest.mark.parametrize(("changes", "path", "fact"), REFUSED, ids=lambda v: str(v)[:40])
def test_refused(changes, path, fact):
    (problem,) = check(**{"nodes": 2, **changes})
    assert problem.path == path
    assert fact in str(problem)


def test_what_is_shipped_and_documented_is_accepted():
    assert {*AzureMLLauncher.model_fields, "_target_"} == set(shipped())
    cpu = {"vm_size": "Standard_DS3_v2", "accelerator": "cpu", "devices": 2}
    large = {**EVERYTHING, "build_context": None, "nodes": 2, "devices": 8}
    own_image = {"vm_size": OLD_GPU, "image": "me.azurecr.io/cuda12:1"}
    empty = dict.fromkeys(("inputs", "mount", "env", "tags", "services"))
    for changes in ({}, cpu, own_image, large, {**SERVERLESS, "devices": 4}, SWEEP, empty):
        assert check(**changes) == []


def test_sizes_that_distdl_knows_and_does_not_know(without_stage_2, command):
    for size, devices in {"ND96asr_v4": (8, "gpu"), "DS3_v2": (1, "cpu"), "X": None}.items():
        assert AzureMLLauncher.devices({"vm_size": f"Standard_{size}"}) == devices
    words = ["+experiment=resnet50_ddp", "launcher=azureml", f"launcher.vm_size={MISTYPED}"]
    shown = command(*words, "trainer.devices=4", "trainer.accelerator=gpu", "dry_run=true").out
    (note,) = re.findall(r"^note +(.+)$", shown, re.M)
    assert f"{MISTYPED} (did you mean Standard_NC24ads_A100_v4?): its GPUs and price" in note
    assert f"instance_type: {MISTYPED}\n" in shown
    with pytest.raises(UserError, match="Standard_NC24ads_A100_v4"):
        planning.plan(compose.compose([*words, "trainer.devices=auto"]))


def test_what_azure_writes_over_a_reference_reaches_the_entry():
    """Azure replaces text, then a shell reads it."""
    value = 'https://x/a b/$HOME?a=1&b=`id`;c="\\$(id)*~#'
    one = [".", value, "--attempt", "1", f"--input=imagenet={value}"]
    for case, expected in {"everything": one, "sweep": [f"members/{value}"]}.items():
        job = rendered(case).job
        command = re.sub(r"\$\{\{.*?\}\}", lambda _: value, job.get("trial", job)["command"])
        shell = ["sh", "-c", f"printf '%s\\n' {command.removeprefix('python ')}"]
        words = subprocess.run(shell, capture_output=True, text=True).stdout.splitlines()
        assert words[: 2 + len(expected)] == ["-m", "distdl.launchers.azureml.entry", *expected]
    # Nor can a name of a run or of a variable leave the Key Vault's rules.
    long = request.secret_names(spec("an exp/" + "x" * 200, forward_env=("HF_TOKEN", "A" * 200)))
    assert all(len(name) <= 127 and name.replace("-", "").isalnum() for name in long.values())


def test_images(tmp_path):
    """Another content is another version. A Python that is too old is reported by the first
    import of every rank, whatever started it."""
    (tmp_path / "Dockerfile").write_text("FROM x\n")
    first = request.version_of(tmp_path)
    (tmp_path / "constraints.txt").write_text("a==1\n")
    assert request.version_of(tmp_path) != first
    old = "import sys; sys.version_info = (3, 10, 12, 'final', 0); import distdl.worker"
    done = subprocess.run([sys.executable, "-c", old], capture_output=True, text=True)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert "needs Python 3.11 or newer" in line
    assert "3.10.12" in line
    for name in ("src/distdl/__init__.py", "launchers/mpi/rank.py", "launchers/__init__.py"):
        ast.parse((ROOT / name).read_text(), feature_version=(3, 8))


def test_the_workspace_comes_from_settings_variables_and_config_json(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("AZURE")]:
        monkeypatch.delenv(name)
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    with pytest.raises(UserError, match="a job can be shown") as refused:
        Workspace.find("sub", None, None)
    paths = [problem.path for problem in refused.value.problems]
    assert paths == ["launcher.resource_group", "launcher.workspace"]
    with pytest.raises(UserError, match=r"subscription(.|\n)*resource_group(.|\n)*workspace"):
        Workspace.find("s/../t", "a group", "w?x")
    text = '{"subscription_id": "s", "resource_group": "g", "workspace_name": "w"}'
    (tmp_path / "config.json").write_text(text)
    for name in ("AZURE_WORKSPACE_NAME", "AZUREML_WORKSPACE_NAME"):
        monkeypatch.setenv(name, name.lower())
        assert Workspace.find(None, None, None) == Workspace("s", "g", name.lower())
    assert Workspace.find("other", None, "mine") == Workspace("other", "g", "mine")


def test_secrets_go_to_the_workspaces_own_vault(monkeypatch):
    own = SimpleNamespace(key_vault="/subscriptions/s/providers/Microsoft.KeyVault/vaults/space-kv")
    client = SimpleNamespace(workspaces=SimpleNamespace(get=lambda name: own))
    monkeypatch.setattr(Connection, "client", client)
    for cloud, domain in {None: "azure.net", "AzureChinaCloud": "azure.cn"}.items():
        assert Connection(WORKSPACE, cloud).vault(None) == f"https://space-kv.vault.{domain}"


def cluster(**changes):
    usual = {"type": "amlcompute", "size": "STANDARD_ND96ASR_V4", "max_instances": 4}
    return SimpleNamespace(**{**usual, **changes})


def test_a_cluster_on_which_the_job_could_not_start_is_refused():
    """Other differences are noted: tests/cluster/test_azureml.py."""
    for changes, path in (
        ({"max_instances": 1}, "trainer.num_nodes"),
        ({"size": OLD_GPU}, "launcher.vm_size"),
        ({"type": "kubernetes"}, "launcher.compute"),
    ):
        with pytest.raises(UserError) as error:
            submit.compare(cluster(**changes), rendered("everything").compute, 2)
        assert [problem.path for problem in error.value.problems] == [path]


# The log of a job: what Azure answers, poll by poll; files grow, and begin again

ZERO, ONE = "user_logs/std_log_process_00.txt", "user_logs/std_log_process_01.txt"
ALONE, OTHER = "user_logs/std_log.txt", "system_logs/lifecycler.log"
OUTAGE = UserError("no route")
CRASH = {"error": {"message": "exit code 1"}}
QUEUED, RUNNING, COMPLETED = ({"status": word} for word in ("Queued", "Running", "Completed"))
WAITS, ENDED = "azureml: queued: waiting for nodes", "azureml: completed"


def read_log(*polls, follow=True):
    """What is shown of a job whose files hold that, poll by poll; the last answer stays."""
    answers = [p if isinstance(p, Exception) else {**p, "logFiles": p} for p in polls]
    history = mock.Mock(read=lambda text, start: None if start > len(text) else text[start:])
    history.details.side_effect = itertools.chain(answers, itertools.repeat(answers[-1]))
    job = AzureMLJob(Connection(WORKSPACE, None), "job-1")
    job._history = history
    with mock.patch.multiple(azure_job, SHORTEST=0.0, LONGEST=0.0):
        return list(job.logs(follow=follow))


def test_lines_come_complete_and_once_from_every_start():
    polls = [
        QUEUED,
        OUTAGE,
        {**RUNNING, ZERO: b"one\ntw"},
        {**RUNNING, ZERO: b"one\ntwo\r\n", ONE: b"of rank 1\n"},
    ]
    lines = [WAITS, "azureml: no answer, trying again: no route", "azureml: running", "one", "two"]
    assert read_log(*polls, {**COMPLETED, ZERO: b"one\ntwo\r\nend"}) == [*lines, ENDED, "end"]
    again = [{**polls[-1], **QUEUED}, {**COMPLETED, ZERO: b"again\n"}]
    assert read_log(*polls, *again) == [*lines, WAITS, ENDED, "again"]
    # A single process; and a failure, after which every rank's output is shown.
    assert read_log({**COMPLETED, ALONE: b"1\n", OTHER: b"not ours\n"}) == [ENDED, "1"]
    failed = {"status": "Failed", ZERO: b"zero\n", ONE: b"Traceback\nValueError", "error": CRASH}
    lines = ["azureml: failed", "zero", "[rank 1] Traceback", "[rank 1] ValueError"]
    assert read_log(failed) == [*lines, "azureml: exit code 1"]


def test_an_outage_for_good_and_a_long_queue(monkeypatch):
    for follow in (True, False):
        with pytest.raises(UserError, match="no route"):
            read_log(OUTAGE, follow=follow)
    monkeypatch.setattr(azure_job, "QUEUED_LONG", -1)
    computes = SimpleNamespace(get=lambda _: cluster(), list_nodes=lambda _: [1, 2])
    jobs = SimpleNamespace(get=lambda name: SimpleNamespace(compute="/x/computes/gpu"))
    monkeypatch.setattr(Connection, "client", SimpleNamespace(jobs=jobs, compute=computes))
    _, reason, *_ = read_log(QUEUED, QUEUED, {"status": "Canceled"})
    assert "still queued" in reason
    assert "quota" in reason
    assert "cluster gpu has 2 of at most 4 nodes" in reason


def test_secrets_that_cannot_be_read_end_the_rank(monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(entry, "secrets", lambda *_: {}["Forbidden by policy"])
    with pytest.raises(SystemExit, match="2"):
        entry.main(["members/1a2b", "/mnt/1a2b", "--secret", "TOKEN=x"])
    message = capsys.readouterr().err
    assert "Forbidden by policy" in message
    assert "Key Vault Secrets User" in message
