"""launcher=azureml without an account: what would be sent, and what is refused before.

What is sent arrives in a stand-in for Azure in tests/cluster/test_azureml.py.
"""

from __future__ import annotations

import ast
import functools
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from distdl.config import compose
from distdl.config import recipe as configs
from distdl.job import JobSpec, JobState, Resources
from distdl.launch import planning
from distdl.launchers.azureml import entry, request, submit
from distdl.launchers.azureml.azure_job import STATES, AzureMLJob
from distdl.launchers.azureml.client import Connection, Workspace, azure_errors, parse
from distdl.launchers.azureml.datastore import ADDRESS
from distdl.launchers.azureml.launcher import AzureMLLauncher
from distdl.launchers.azureml.run_history import RunHistory
from distdl.util.errors import Problem, UserError
from tests.conftest import ROOT, check_golden

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
serverless: {{vm_size: {NC96}, image: "me.azurecr.io/t:1"}}
sweep: {{vm_size: Standard_NC24ads_A100_v4, tier: low_priority, compute: gpu, sweep: azureml,
  walltime: 2, environment: {ACPT},
  sweep_job: {{max_concurrent: 2, metric: val/acc1, goal: maximize}}}}
"""
EVERYTHING, SERVERLESS, SWEEP = yaml.safe_load(SETTINGS).values()
GPUS = {"num_nodes": 1, "devices": 1, "accelerator": "gpu"}
WORKSPACE = Workspace("s", "g", "w")


def spec(name: str = "resnet50_ddp/first", *size: Any, **more: Any) -> JobSpec:
    bundle = f"/runs/{name}/attempts/001/bundle"
    return JobSpec(name, bundle, f"/runs/{name}", 1, Resources(*size or (2, 8, "gpu")), **more)


@functools.cache
def shipped() -> dict[str, Any]:
    return configs.plain(compose.compose(["launcher=azureml"]).launcher)


def launcher(**changes: Any) -> AzureMLLauncher:
    return AzureMLLauncher(**{k: v for k, v in {**shipped(), **changes}.items() if k[0] != "_"})


def check(**changes: Any) -> list[Problem]:
    context = {**GPUS, **changes.pop("context", {})}
    return list(AzureMLLauncher.check({**shipped(), **changes}, context))


def rendered(case: str) -> request.AzureMLRequest:
    if case == "sweep":
        members = [spec(f"default/s/{name}", 1, 1, "gpu") for name in ("1a2b", "3c4d")]
        result = launcher(**SWEEP).request_sweep(members)
        assert result is not None
        return result
    if case == "serverless":
        return launcher(**SERVERLESS).request(spec("resnet50_ddp/first", 1, 4, "gpu"))
    forwarded = tuple(EVERYTHING["forward_env"])
    return launcher(**EVERYTHING).request(spec(forward_env=forwarded, env={"FROM_SPEC": "1"}))


CASES = ["everything", "serverless", "sweep"]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore")
def test_request(case: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """As printed, and as the SDK's loader of each kind of document reads it."""
    shown = (text := rendered(case).render()).replace(str(ROOT), "CHECKOUT")
    if case == "everything":
        shown = shown.replace(request.version_of(Path(EVERYTHING["build_context"])), "VERSION")
    check_golden(pytestconfig, ROOT / f"tests/golden/launchers/azureml_{case}.txt", shown)

    azure = pytest.importorskip("azure.ai.ml")
    load = {"environment": azure.load_environment, "amlCompute": azure.load_compute}
    for document in filter(None, yaml.safe_load_all(text)):
        kind = document["$schema"].rpartition("/")[2].removesuffix(".schema.json")
        if "Job" in kind:  # the SDK looks for the folder
            document.get("trial", document)["code"] = str(tmp_path)
        loaded = load.get(kind, azure.load_job)(io.StringIO(request.to_yaml(document)))
        if kind == "commandJob":
            nodes, store = loaded.resources.instance_count, loaded.outputs["store"].path
            sent = (document["command"], document["outputs"]["store"]["path"])
            assert (loaded.command, store) == sent
            assert nodes == document["resources"]["instance_count"]


def test_every_setting_is_an_argument_and_vice_versa() -> None:
    assert {*AzureMLLauncher.model_fields, "_target_"} == set(shipped())
    assert rendered("everything") == rendered("everything"), "the same spec, the same request"


MODE = {"path": "azureml:x:1", "mode": "eval_mount"}
BOARD = {"type": "tensor_board", "log_dir": "${{outputs.logs}}"}
OLD_GPU = "Standard_NC6s_v3"
# Settings; the path of the Problem, and what its text says.
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"vm_size": "NC24ads_A100"}, "vm_size", "did you mean Standard_NC24ads_A100_v4"),
    ({"vm_size": None}, "vm_size", "missing"),
    ({"vm_size": OLD_GPU}, "vm_size", "no kernels for a V100"),
    ({"vm_size": "Standard_DS3_v2"}, "vm_size", "has no GPU"),
    ({"vm_size": NC96, "context": {"devices": 8}}, "vm_size", "v4 has 4 GPUs\n    write trainer.d"),
    ({"vm_size": OLD_GPU, "image": "i", "tier": "?"}, "tier", "not 'dedicated'"),
    ({"compute": "my cluster"}, "compute", "3 to 32"),
    ({"compute": "gpu", "max_nodes": 1}, "max_nodes", "launcher.max_nodes=2"),
    ({"min_nodes": 5, "max_nodes": 3}, "min_nodes", "more than max_nodes"),
    ({"vnet": "lab"}, "subnet", "name a subnet"),
    ({"subnet": "nodes"}, "subnet", "full ARM id"),
    ({"public_ip": False}, "public_ip", "need a subnet"),
    ({"compute_identity": ["trainer"]}, "compute_identity", "not an ARM id"),
    ({"image": "a", "environment": "azureml:b@latest"}, "environment", "set only one"),
    ({"environment": "pytorch"}, "environment", "azureml:NAME@latest"),
    ({"build_context": "/nowhere"}, "build_context", "no Dockerfile"),
    ({"inputs": {"a": "/data/a"}}, "inputs.a", "not an address that Azure can read"),
    ({"inputs": {"a b": "azureml:x:1"}}, "inputs.a b", "a name of letters, digits and _"),
    ({"inputs": {"a": {}}}, "inputs.a", "missing"),
    ({"inputs": {"a": MODE}}, "inputs.a.mode", "is only for type=mltable"),
    ({"inputs": {"a": {"path": "azureml:x:1", "kind": 1}}}, "inputs.a", "path, mode and type"),
    ({"inputs": {"a": "https://x/o'neill"}}, "inputs.a", "%27"),
    ({"inputs": {"ab": "azureml:x:1"}, "env": {"L": "${{inputs.a}}/l"}}, "env.L", "mean ab?"),
    ({"services": {"b": BOARD}}, "services.b.log_dir", "launcher.outputs has store"),
    ({"services": {"x": {"type": "ssh"}}}, "services.x.ssh_public_keys", "nobody could log in"),
    ({"files": "f", "forward_env": ["HF_TOKEN"]}, "files", "forward_env=[]"),
    ({"files": "f", "sweep": "azureml"}, "files", "sweep=jobs"),
    ({"mount": {"block_cache": True}}, "mount.block_cache", "one of attribute_cache_ttl"),
    ({"shm_size": "16gb"}, "shm_size", "16g"),
    ({"datastore": "a/b"}, "datastore", "not the name of a datastore"),
    ({"key_vault": "http://x"}, "key_vault", "https://NAME.vault.azure.net"),
]


@pytest.mark.parametrize(("changes", "path", "fact"), REFUSED, ids=lambda v: str(v)[:40])
def test_refused(changes: dict[str, Any], path: str, fact: str) -> None:
    (problem,) = check(**{"context": {"num_nodes": 2}, **changes})
    assert problem.path == path and fact in str(problem)


def test_every_wrong_word_and_number_is_named_at_once() -> None:
    wrong = {"tier": "cheap", "distribution": "tensorflow", "identity": "me", "walltime": 5400}
    wrong |= {"min_nodes": "2", "idle_seconds": -1, "compute_identity": "me", "sweep": "hyperdrive"}
    inner: dict[str, Any] = {"sweep_job": {"max_concurrent": 0, "goal": "max"}}
    inner |= {"services": {"x": {"type": "telnet"}}, "inputs": {"a": {**MODE, "mode": "rw_mount"}}}
    paths = {*wrong, "sweep_job.max_concurrent", "sweep_job.goal", "services.x.type"}
    assert sorted(p.path for p in check(**wrong, **inner)) == sorted({*paths, "inputs.a.mode"})


def test_what_is_shipped_and_documented_is_accepted() -> None:
    cpu = {"vm_size": "Standard_DS3_v2", "context": {"accelerator": "cpu", "devices": 2}}
    large = {**EVERYTHING, "build_context": None, "context": {"num_nodes": 2, "devices": 8}}
    own_image = {"vm_size": OLD_GPU, "image": "me.azurecr.io/cuda12:1"}
    empty = dict.fromkeys(("inputs", "mount", "env", "tags", "services"))
    several = {**SERVERLESS, "context": {"devices": 4}}
    for changes in ({}, cpu, own_image, large, several, SWEEP, empty):
        assert check(**changes) == []


@pytest.mark.parametrize("size", ["Standard_ND128isr_NDR_GB200_v6", "Standard_F64s_v2"])
def test_a_size_that_distdl_does_not_know_is_sent(size: str, without_stage_2, command) -> None:
    accelerator = "cpu" if "F64" in size else "gpu"
    words = ("launcher=azureml", f"launcher.vm_size={size}", f"trainer.accelerator={accelerator}")
    shown = command("+experiment=resnet50_ddp", *words, "trainer.devices=4", "dry_run=true").out
    (note,) = re.findall(r"^note +(.+)$", shown, re.M)
    assert size in note and "its GPUs and price cannot be checked" in note
    sent = next(yaml.safe_load_all(shown.partition("# The job.")[2].partition("\n")[2]))
    assert sent["resources"]["instance_type"] == size
    assert sent["distribution"]["process_count_per_instance"] == 4


def test_devices_of_a_size_and_a_mistyped_one() -> None:
    for size, devices in {"ND96asr_v4": (8, "gpu"), "DS3_v2": (1, "cpu"), "X": None}.items():
        assert AzureMLLauncher.devices({"vm_size": f"Standard_{size}"}) == devices
    (note,) = AzureMLLauncher.notes({"vm_size": MISTYPED})
    assert "(did you mean Standard_NC24ads_A100_v4?)" in note
    assert list(AzureMLLauncher.notes({"vm_size": "standard_nc24ads_a100_v4"})) == []
    words = ("launcher=azureml", f"launcher.vm_size={MISTYPED}", "trainer.devices=auto")
    with pytest.raises(UserError, match="Standard_NC24ads_A100_v4"):
        planning.plan(compose.compose(["+experiment=resnet50_ddp", *words]))


@pytest.mark.parametrize("value", ["/a b/$HOME", 'https://x/?a=1&b=`id`;c="', "\\$(id)*~#", "-x"])
def test_what_azure_writes_over_a_reference_reaches_the_entry(value: str) -> None:
    """Azure replaces text, then a shell reads it."""
    one = [".", value, "--attempt", "1", f"--input=imagenet={value}"]
    for case, expected in {"everything": one, "sweep": [f"members/{value}"]}.items():
        job = rendered(case).job
        command = re.sub(r"\$\{\{.*?\}\}", lambda _: value, job.get("trial", job)["command"])
        shell = ["sh", "-c", f"printf '%s\\n' {command.removeprefix('python ')}"]
        words = subprocess.run(shell, capture_output=True, text=True).stdout.splitlines()
        assert words[: 2 + len(expected)] == ["-m", "distdl.launchers.azureml.entry", *expected]


def test_names_of_secrets_are_what_a_key_vault_takes() -> None:
    long = request.secret_names(spec("an exp/" + "x" * 200, forward_env=("HF_TOKEN", "A" * 200)))
    assert all(len(name) <= 127 and name.replace("-", "").isalnum() for name in long.values())


# The image


def test_the_image_has_what_azure_ml_and_torch_can_take(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM x\n")
    first = request.version_of(tmp_path)
    assert request.version_of(tmp_path) == first, "an unchanged image keeps its version"
    (tmp_path / "constraints.txt").write_text("a==1\n")
    assert request.version_of(tmp_path) != first

    files = {path.name: path.read_text() for path in request.IMAGE.iterdir()}
    assert set(files) == {"Dockerfile", "constraints.txt", "requirements.txt"}
    pins = dict(re.findall(r"^(\S+)==(\S+)$", files["constraints.txt"], re.M))
    assert pins["azureml-mlflow"] == "1.62.0.post6"
    newest = {"mlflow-skinny": (3, 15, 0), "azure-storage-blob": (12, 27, 1)}
    assert all(tuple(map(int, pins[name].split("."))) <= newest[name] for name in newest)
    assert set(re.findall(r"^[^#\n].*$", files["requirements.txt"], re.M)) <= set(pins)
    # The one CUDA is that of torch's wheels, and the pages name the same one.
    cuda = ".".join(pins["cuda-toolkit"].split(".")[:2])
    if metadata.version("torch").split("+")[0] == pins["torch"]:  # a torch for the CPU needs none
        needs = [n for n in metadata.requires("torch") or () if n.startswith("cuda-toolkit[")]
        assert all(f"=={pins['cuda-toolkit']};" in need for need in needs)
    assert not re.search(r"^FROM.*cuda", files["Dockerfile"], re.M)
    assert f"wheels contain CUDA {cuda}," in files["Dockerfile"]
    page = (ROOT / "docs/launchers/azureml.md").read_text()
    assert set(re.findall(r"CUDA (\d+\.\d+)", page)) == {cuda}


def test_an_image_with_an_older_python_is_reported_at_once() -> None:
    """Every rank begins with `import distdl`, whatever started it."""
    old = "import sys; sys.version_info = (3, 10, 12, 'final', 0); import distdl.worker"
    done = subprocess.run([sys.executable, "-c", old], capture_output=True, text=True)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and "needs Python 3.11 or newer" in line and "3.10.12" in line
    for name in ("src/distdl/__init__.py", "launchers/mpi/rank.py", "launchers/__init__.py"):
        ast.parse((ROOT / name).read_text(), feature_version=(3, 8))


def test_every_variable_that_the_pages_name_is_read_somewhere() -> None:
    def named(*patterns: str) -> set[str]:
        text = "\n".join(path.read_text() for pattern in patterns for path in ROOT.glob(pattern))
        return set(re.findall(r"\b(?:AZURE|AZUREML|ARM|DISTDL)_[A-Z0-9_]*[A-Z0-9]\b", text))

    provision = "launchers/azureml/provision/provision.yaml"
    pages = named("conf/**/*.yaml", provision, "docs/launchers/*.md", "docs/azure_*.md")
    assert pages <= named("src/**/*.py", "launchers/**/*.py")


# The workspace


def test_the_workspace_comes_from_settings_variables_and_config_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("AZURE")]:
        monkeypatch.delenv(name)
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    with pytest.raises(UserError, match="a job can be shown") as refused:
        Workspace.find("sub", None, None)
    paths = [problem.path for problem in refused.value.problems]
    assert paths == ["launcher.resource_group", "launcher.workspace"]
    text = '{"subscription_id": "s", "resource_group": "g", "workspace_name": "w"}'
    (tmp_path / "config.json").write_text(text)
    assert Workspace.find(None, None, None) == WORKSPACE
    monkeypatch.setenv("AZURE_RESOURCE_GROUP", "other")
    assert Workspace.find(None, None, "mine") == Workspace("s", "other", "mine")
    for name in ("AZURE_WORKSPACE_NAME", "AZUREML_WORKSPACE_NAME"):
        monkeypatch.setenv(name, name.lower())
        assert Workspace.find(None, None, None).name == name.lower()


def test_handles_addresses_and_clouds(monkeypatch: pytest.MonkeyPatch) -> None:
    for member in (None, "1a2b"):
        handle = WORKSPACE.handle("job-1", member)
        assert parse(handle) == (WORKSPACE, "job-1", member)
        assert AzureMLLauncher().attach(handle).handle == handle
    with pytest.raises(UserError, match="is not a handle"):
        parse("azureml://subscriptions/s/jobs/j")
    for workspace in ("", "subscriptions/s/resourcegroups/g/workspaces/w/"):
        match = ADDRESS.fullmatch(f"azureml://{workspace}datastores/results/paths/distdl/a/b/")
        assert match is not None and match.groups() == ("results", "distdl/a/b")
    china, world = Connection(WORKSPACE, "AzureChinaCloud"), Connection(WORKSPACE, None)
    assert china.scope == "https://management.chinacloudapi.cn/.default"
    assert china.vault("mine") == "https://mine.vault.azure.cn"
    assert Connection(WORKSPACE, "AzureUSGovernment").page("j").startswith("https://ml.azure.us/")
    assert world.vault("https://v.vault.azure.net/") == "https://v.vault.azure.net"
    own = SimpleNamespace(key_vault="/subscriptions/s/providers/Microsoft.KeyVault/vaults/space-kv")
    client = SimpleNamespace(workspaces=SimpleNamespace(get=lambda name: own))
    monkeypatch.setattr(Connection, "client", client)
    assert world.vault(None) == "https://space-kv.vault.azure.net"


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "azure.core", None)
    with pytest.raises(UserError, match=r"pip install 'distdl\[azure\]'"), azure_errors():
        raise AssertionError


def cluster(**changes: Any) -> SimpleNamespace:
    usual = {"type": "amlcompute", "size": "STANDARD_ND96ASR_V4", "tier": "low_priority"}
    usual |= {"min_instances": 0, "max_instances": 4, "idle_time_before_scale_down": 600.0}
    return SimpleNamespace(**{**usual, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, []),
        ({"max_instances": 8}, ["note: cluster gpu-a100 stays as it is: launcher.max_nodes is 8"]),
        ({"idle_time_before_scale_down": 120.0}, ["launcher.idle_seconds is 120 there"]),
        ({"max_instances": 1, "size": OLD_GPU}, ["trainer.num_nodes: ", "launcher.vm_size: "]),
        ({"type": "kubernetes"}, ["launcher.compute: "]),
    ],
)
def test_an_existing_cluster_is_compared(changes, words: list[str], capsys) -> None:
    try:
        submit.compare(cluster(**changes), rendered("everything").compute or {}, 2)
        lines = capsys.readouterr().err.splitlines()
    except UserError as error:
        lines = [str(problem) for problem in error.problems]
    assert len(lines) == len(words) and all(w in x for w, x in zip(words, lines, strict=True))


# The log of a job: what Azure answers, poll by poll; files grow, and begin again

ZERO, ONE = "user_logs/std_log_process_00.txt", "user_logs/std_log_process_01.txt"
OUTAGE, CRASH = {"raises": "no route"}, {"error": {"message": "exit code 1"}}
COMPLETED, QUEUED = "azureml: completed", "azureml: queued: waiting for nodes"
FAILED = {"status": "Failed", ZERO: b"zero\n", ONE: b"Traceback\nValueError: x\n", "error": CRASH}
FIRST = {"status": "Running", ZERO: b"first\nsecond\n"}
ALONE = {"user_logs/std_log.txt": b"alone\n", "system_logs/lifecycler.log": b"not ours\n"}
LOGS: dict[str, tuple[list[dict[str, Any]], list[str]]] = {
    "lines come complete and once": (
        [
            {"status": "Queued"},
            {"status": "Running", ZERO: b"one\ntw"},
            {"status": "Running", ZERO: b"one\ntwo\r\n", ONE: b"of rank 1\n"},
            {"status": "Completed", ZERO: b"one\ntwo\r\nend"},
        ],
        [QUEUED, "azureml: running", "one", "two", COMPLETED, "end"],
    ),
    "Azure starts the job again": (
        [FIRST, {**FIRST, "status": "Queued"}, {"status": "Completed", ZERO: b"again\n"}],
        ["azureml: running", "first", "second", QUEUED, COMPLETED, "again"],
    ),
    "a failed job shows every rank and Azure's error": (
        [FAILED],
        [
            *("azureml: failed", "zero", "[rank 1] Traceback", "[rank 1] ValueError: x"),
            "azureml: exit code 1",
        ],
    ),
    "an outage for a moment": (
        [OUTAGE, {"status": "Completed", ZERO: b"one\n"}],
        ["azureml: no answer, trying again: no route", COMPLETED, "one"],
    ),
    "a single process": ([{"status": "Completed", **ALONE}], [COMPLETED, "alone"]),
}


@pytest.fixture
def read_log(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    for name in ("SHORTEST", "LONGEST"):
        monkeypatch.setattr(f"distdl.launchers.azureml.azure_job.{name}", 0.0)

    def read_log(*polls: dict[str, Any], follow: bool = True) -> list[str]:
        remaining, current = list(polls), {}

        def details(_: Any, job: str) -> dict[str, Any]:
            current.update({"files": remaining.pop(0)} if remaining else {})
            if "raises" in current["files"]:
                raise UserError(current["files"]["raises"])
            names = [name for name in current["files"] if "_logs/" in name]
            return {**current["files"], "logFiles": {name: name for name in names}}

        def read(_: Any, address: str, start: int) -> bytes | None:
            content = current["files"][address]
            return None if start > len(content) else content[start:]

        monkeypatch.setattr(RunHistory, "details", details)
        monkeypatch.setattr(RunHistory, "read", read)
        return list(AzureMLJob(Connection(WORKSPACE, None), "job-1").logs(follow=follow))

    return read_log


@pytest.mark.parametrize("case", LOGS)
def test_logs(case: str, read_log: Any) -> None:
    polls, lines = LOGS[case]
    assert read_log(*polls) == lines


def test_an_outage_for_good_and_a_long_queue(read_log: Any, monkeypatch) -> None:
    for follow in (True, False):
        with pytest.raises(UserError, match="no route"):
            read_log(OUTAGE, follow=follow)
    monkeypatch.setattr("distdl.launchers.azureml.azure_job.QUEUED_LONG", -1)
    computes = SimpleNamespace(get=lambda _: cluster(), list_nodes=lambda _: [1, 2])
    jobs = SimpleNamespace(get=lambda name: SimpleNamespace(compute="/x/computes/gpu"))
    monkeypatch.setattr(Connection, "client", SimpleNamespace(jobs=jobs, compute=computes))
    lines = read_log({"status": "Queued"}, {"status": "Queued"}, {"status": "Canceled"})
    (reason,) = [line for line in lines if "still queued" in line]
    assert "cluster gpu has 2 of at most 4 nodes" in reason and "quota" in reason


def test_every_status_of_azure_has_a_state() -> None:
    models = pytest.importorskip("azure.ai.ml._restclient.arm_ml_service.models")
    assert {str(status.value) for status in models.JobStatus} <= set(STATES)
    ended = {state for state in STATES.values() if state.ended}
    assert ended == {JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED}


def test_what_the_entry_starts(tmp_path: Path, monkeypatch, capsys) -> None:
    """The worker, in a folder that a sweep's command begins in."""
    monkeypatch.chdir(tmp_path)
    for name in ("PYTHONPATH", "DISTDL_INPUT_IMAGENET", "TOKEN"):
        monkeypatch.setenv(name, "")
    (tmp_path / "code").mkdir()
    (tmp_path / "members/1a2b").mkdir(parents=True)
    (tmp_path / "members/1a2b/attempt").write_text("3\n")
    started: list[str] = []
    monkeypatch.setattr("os.execv", lambda program, words: started.extend(words[1:]))
    monkeypatch.setattr(entry, "secrets", lambda names, identity: dict.fromkeys(names, identity))
    words = ["members/1a2b", "/mnt/1a2b", "--input", "imagenet=/mnt/in", "--secret", "TOKEN=x"]
    for _ in range(2):  # also where another rank of the node was first
        entry.main([*words, "--identity", "user"])
    worker = ["-m", "distdl.worker", "members/1a2b", "/mnt/1a2b", "--attempt", "3"]
    assert started == [*worker, *worker]
    assert os.environ["DISTDL_INPUT_IMAGENET"] == "/mnt/in" and os.environ["TOKEN"] == "user"
    assert os.environ["PYTHONPATH"] == str(tmp_path / "code")
    assert (tmp_path / "members/1a2b/code").resolve() == tmp_path / "code"

    def refuse(names: Any, identity: str) -> None:
        raise PermissionError("Forbidden by policy")

    monkeypatch.setattr(entry, "secrets", refuse)
    with pytest.raises(SystemExit, match="2"):
        entry.main(words)
    message = capsys.readouterr().err
    assert "Forbidden by policy" in message and "Key Vault Secrets User" in message
