"""launcher=azureml without an account: what would be sent, and what is refused before.

What is sent arrives for real, in a stand-in for Azure, in tests/cluster/test_azureml.py.
"""

from __future__ import annotations

import ast
import functools
import io
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from distdl.cli import main as command_line
from distdl.config import compose
from distdl.config import recipe as configs
from distdl.job import JobSpec, JobState, Resources
from distdl.launch import dry_run, planning
from distdl.launchers.azureml import entry, request, run_history, submit
from distdl.launchers.azureml.azure_job import STATES, AzureMLJob
from distdl.launchers.azureml.client import Connection, Workspace, azure_errors, parse
from distdl.launchers.azureml.datastore import ADDRESS
from distdl.launchers.azureml.launcher import AzureMLLauncher
from distdl.util.errors import UserError
from tests.conftest import ROOT, check_golden

IDENTITY = "/subscriptions/s/resourceGroups/g/providers/x/userAssignedIdentities/trainer"
EVERYTHING: dict[str, Any] = {
    "vm_size": "Standard_ND96asr_v4",
    "tier": "spot",
    "compute": "gpu-a100",
    "max_nodes": 4,
    "idle_seconds": 600,
    "vnet": "lab",
    "subnet": "nodes",
    "public_ip": False,
    "compute_identity": [IDENTITY],
    "walltime": "1-12:00:00",
    "build_context": str(ROOT / "tests/unit"),  # replaced in the text: it has a version of its own
    "distribution": "mpi",
    "docker_args": "--ulimit memlock=-1",
    "inputs": {
        "imagenet": {"path": "azureml://datastores/data/paths/imagenet", "mode": "download"},
        "labels": {"path": "azureml:labels:3", "type": "uri_file"},
        "weights": "https://example.org/weights",
    },
    "mount": {
        "block_based_cache_enabled": True,
        "cache_size": "200GB",
        "read_threads": None,
        "unmount_timeout_seconds": 60,
    },
    "datastore": "results",
    "forward_env": ["HF_TOKEN", "WANDB_API_KEY"],
    "identity": "managed",
    "env": {"NCCL_DEBUG": "INFO"},
    "experiment_name": "image net",
    "display_name": "the first one",
    "tags": {"team": "vision", "cost": 7},
    "services": {
        "ssh": {"type": "ssh", "ssh_public_keys": "ssh-rsa AAAA me", "nodes": "all"},
        "board": {"type": "tensor_board", "log_dir": "${{outputs.store}}/logs"},
    },
}
SERVERLESS: dict[str, Any] = {"vm_size": "Standard_NC96ads_A100_v4", "image": "me.azurecr.io/t:1"}
SWEEP: dict[str, Any] = {
    "vm_size": "Standard_NC24ads_A100_v4",
    "tier": "low_priority",
    "compute": "gpu",
    "sweep": "azureml",
    "walltime": 2,
    "environment": "azureml://registries/azureml/environments/acpt-pytorch-2.8-cuda12.6/labels/latest",
    "sweep_job": {"max_concurrent": 2, "metric": "val/acc1", "goal": "maximize"},
}
GPUS = {"num_nodes": 1, "devices": 1, "accelerator": "gpu"}


def spec(name: str = "resnet50_ddp/first", size: Resources | None = None, **more: Any) -> JobSpec:
    return JobSpec(
        name,
        bundle=f"/runs/{name}/attempts/001/bundle",
        store=f"/runs/{name}",
        attempt=1,
        resources=size or Resources(2, 8, "gpu"),
        **more,
    )


def defaults(**changes: Any) -> dict[str, Any]:
    """The settings as shipped, with these changes."""
    return {**shipped(), **changes}


@functools.cache
def shipped() -> dict[str, Any]:
    return configs.plain(compose.compose(["launcher=azureml"]).launcher)


def launcher(**changes: Any) -> AzureMLLauncher:
    node = defaults(**changes)
    node.pop("_target_")
    return AzureMLLauncher(**node)


def rendered(case: str) -> request.AzureMLRequest:
    if case == "sweep":
        members = [spec(f"default/s/{name}", Resources(1, 1, "gpu")) for name in ("1a2b", "3c4d")]
        found = launcher(**SWEEP).request_sweep(members)
        assert found is not None
        return found
    if case == "serverless":
        return launcher(**SERVERLESS).request(spec(size=Resources(1, 4, "gpu")))
    forwarded = tuple(EVERYTHING["forward_env"])
    return launcher(**EVERYTHING).request(spec(forward_env=forwarded, env={"FROM_SPEC": "1"}))


CASES = ["everything", "serverless", "sweep"]


@pytest.mark.parametrize("case", CASES)
def test_request(case: str, pytestconfig: pytest.Config) -> None:
    text = rendered(case).render().replace(str(ROOT), "CHECKOUT")
    if case == "everything":
        text = text.replace(request.version_of(Path(EVERYTHING["build_context"])), "VERSION")
    check_golden(pytestconfig, ROOT / f"tests/golden/launchers/azureml_{case}.txt", text)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore")
def test_the_sdk_reads_what_is_printed(case: str, tmp_path: Path) -> None:
    """Each document of the rendered text, by the loader of its kind, and the whole job survives."""
    azure = pytest.importorskip("azure.ai.ml")
    documents = [d for d in yaml.safe_load_all(rendered(case).render()) if d]
    load = {
        "commandJob": azure.load_job,
        "sweepJob": azure.load_job,
        "environment": azure.load_environment,
        "amlCompute": azure.load_compute,
    }
    kinds = []
    for document in documents:
        kind = document["$schema"].rpartition("/")[2].removesuffix(".schema.json")
        kinds.append(kind)
        if "Job" in kind:  # the SDK looks for the folder
            document.get("trial", document)["code"] = str(tmp_path)
        loaded = load[kind](io.StringIO(request.to_yaml(document)))
        if kind == "commandJob":
            job = loaded._to_job()
            assert job.command == document["command"]
            assert job.outputs["store"].path == document["outputs"]["store"]["path"]
            assert job.resources.instance_count == document["resources"]["instance_count"]
            again = job._to_dict()
            assert set(document) - {"$schema"} <= set(again)
    assert (
        kinds
        == {
            "everything": ["commandJob", "environment", "amlCompute"],
            "serverless": ["commandJob"],
            "sweep": ["sweepJob", "amlCompute"],
        }[case]
    )


def test_every_setting_is_an_argument_and_the_other_way_round() -> None:
    assert {*AzureMLLauncher.model_fields, "_target_"} == set(shipped())
    assert rendered("everything") == rendered("everything"), "the same spec, the same request"


MODE = {"path": "azureml:x:1", "mode": "eval_mount"}
BOARD = {"type": "tensor_board", "log_dir": "${{outputs.logs}}"}
LIST = "${{inputs.image}}/list"
# Settings; the path of the Problem, and what its text says.
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"vm_size": "NC24ads_A100"}, "vm_size", "not a name of a VM size"),
    ({"vm_size": "NC24ads_A100"}, "vm_size", "did you mean Standard_NC24ads_A100_v4?"),
    ({"vm_size": None}, "vm_size", "missing"),
    ({"vm_size": "Standard_NC6s_v3"}, "vm_size", "no kernels for a V100"),
    ({"vm_size": "Standard_DS3_v2"}, "vm_size", "has no GPU"),
    ({"vm_size": "Standard_NC6s_v3", "image": "i", "tier": "?"}, "tier", "not 'dedicated'"),
    ({"tier": "lowpriority"}, "tier", "did you mean low_priority?"),
    ({"distribution": "tensorflow"}, "distribution", "not 'pytorch' or 'mpi'"),
    ({"compute": "my cluster"}, "compute", "3 to 32"),
    ({"compute": "gpu", "max_nodes": 1}, "max_nodes", "launcher.max_nodes=2"),
    ({"min_nodes": -1}, "min_nodes", "not greater than or equal to 0"),
    ({"min_nodes": "2"}, "min_nodes", "not an integer"),
    ({"min_nodes": 5, "max_nodes": 3}, "min_nodes", "more than max_nodes"),
    ({"vnet": "lab"}, "subnet", "name a subnet"),
    ({"subnet": "nodes"}, "subnet", "full ARM id"),
    ({"public_ip": False}, "public_ip", "need a subnet"),
    ({"compute_identity": "trainer"}, "compute_identity", "not 'system' or 'none' or a list"),
    ({"compute_identity": ["trainer"]}, "compute_identity", "not an ARM id"),
    ({"image": "a", "environment": "azureml:b@latest"}, "environment", "keep one"),
    ({"environment": "pytorch"}, "environment", "azureml:NAME@latest"),
    ({"build_context": "/nowhere"}, "build_context", "no Dockerfile"),
    ({"inputs": {"a": "/data/a"}}, "inputs.a", "not an address that Azure can read"),
    ({"inputs": {"a b": "azureml:x:1"}}, "inputs.a b", "a name of letters, digits and _"),
    ({"inputs": {"a": {}}}, "inputs.a", "missing"),
    ({"inputs": {"a": {**MODE, "mode": "rw_mount"}}}, "inputs.a.mode", "did you mean ro_mount?"),
    ({"inputs": {"a": MODE}}, "inputs.a.mode", "is for type=mltable"),
    ({"inputs": {"a": {"path": "azureml:x:1", "kind": 1}}}, "inputs.a", "path, mode and type"),
    ({"inputs": {"a": "https://x/o'neill"}}, "inputs.a", "%27"),
    ({"inputs": {"images": "azureml:x:1"}, "env": {"LIST": LIST}}, "env.LIST", "images?"),
    ({"services": {"b": BOARD}}, "services.b.log_dir", "launcher.outputs has store"),
    ({"services": {"x": {"type": "telnet"}}}, "services.x.type", "not 'ssh'"),
    ({"services": {"x": {"type": "ssh"}}}, "services.x.ssh_public_keys", "nobody could log in"),
    ({"files": "f", "forward_env": ["HF_TOKEN"]}, "files", "forward_env=[]"),
    ({"files": "f", "sweep": "azureml"}, "files", "sweep=jobs"),
    ({"mount": {"block_cache": True}}, "mount.block_cache", "one of attribute_cache_ttl"),
    ({"walltime": "soon"}, "walltime", "'soon' is not a time"),
    ({"walltime": 5400}, "walltime", "5400 would be 5400 hours"),
    ({"shm_size": "16gb"}, "shm_size", "16g"),
    ({"datastore": "a/b"}, "datastore", "not the name of a datastore"),
    ({"key_vault": "http://x"}, "key_vault", "https://NAME.vault.azure.net"),
    ({"identity": "me"}, "identity", "not 'managed' or 'user'"),
    ({"sweep": "hyperdrive"}, "sweep", "not 'jobs' or 'azureml'"),
    ({"sweep_job": {"max_concurrent": 0}}, "sweep_job.max_concurrent", "not greater than or"),
    ({"sweep_job": {"goal": "max"}}, "sweep_job.goal", "not 'maximize' or 'minimize'"),
]


@pytest.mark.parametrize(("changes", "path", "fact"), REFUSED, ids=lambda v: str(v)[:40])
def test_refused(changes: Mapping[str, Any], path: str, fact: str) -> None:
    (problem,) = AzureMLLauncher.check(defaults(**changes), {**GPUS, "num_nodes": 2})
    assert problem.path == path and fact in str(problem)


def test_more_processes_than_gpus() -> None:
    node = defaults(vm_size="Standard_NC96ads_A100_v4")
    (found,) = AzureMLLauncher.check(node, {**GPUS, "devices": 8})
    assert found.path == "vm_size" and "trainer.devices=4" in found.remedy
    assert found.what.endswith("Standard_NC96ads_A100_v4 has 4 GPUs")


def test_all_problems_at_once() -> None:
    node = defaults(tier="cheap", vm_size="large", walltime="soon", shm_size="much", vnet="lab")
    assert len(list(AzureMLLauncher.check(node, GPUS))) == 5


def test_what_is_shipped_and_what_is_documented_is_right() -> None:
    for node, context in (
        (defaults(), GPUS),
        (defaults(vm_size="Standard_DS3_v2"), {**GPUS, "accelerator": "cpu", "devices": 2}),
        (defaults(vm_size="Standard_NC6s_v3", image="me.azurecr.io/cuda12:1"), GPUS),
        (defaults(**EVERYTHING) | {"build_context": None}, {**GPUS, "num_nodes": 2, "devices": 8}),
        (defaults(**SERVERLESS), {**GPUS, "devices": 4}),
        (defaults(**SWEEP), GPUS),
        (defaults(inputs=None, mount=None, env=None, tags=None, services=None), GPUS),
    ):
        assert list(AzureMLLauncher.check(node, context)) == []


@pytest.mark.parametrize(
    "size", ["Standard_ND96isr_MI300X_v5", "Standard_ND128isr_NDR_GB200_v6", "Standard_F64s_v2"]
)
def test_a_size_that_distdl_does_not_know(
    size: str,
    without_stage_2: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What the user says is sent; what could not be checked is said."""
    accelerator = "cpu" if "F64" in size else "gpu"
    context = {**GPUS, "devices": 4, "accelerator": accelerator}
    assert list(AzureMLLauncher.check(defaults(vm_size=size), context)) == []
    monkeypatch.chdir(tmp_path)
    settings = ("launcher=azureml", f"launcher.vm_size={size}", "trainer.devices=4")
    command = ("+experiment=resnet50_ddp", *settings, f"trainer.accelerator={accelerator}")
    assert command_line.main([*command, "dry_run=true"]) == 0
    said = capsys.readouterr().out
    (note,) = re.findall(r"^note +(.+)$", said, re.M)
    assert note.startswith(f"distdl does not know the VM size {size}")
    assert "its GPUs and price cannot be checked" in note
    sent = next(yaml.safe_load_all(said.partition("# The job.")[2].partition("\n")[2]))
    assert sent["resources"]["instance_type"] == size
    assert sent["distribution"]["process_count_per_instance"] == 4
    assert "price and quota: unknown here" in said


def test_a_size_that_was_mistyped() -> None:
    (note,) = AzureMLLauncher.notes({"vm_size": "Standard_NC24ads_A100"})
    assert "(did you mean Standard_NC24ads_A100_v4?)" in note
    assert list(AzureMLLauncher.notes({"vm_size": "standard_nc24ads_a100_v4"})) == []
    with pytest.raises(UserError) as refused:
        planned("launcher.vm_size=Standard_NC24ads_A100", "trainer.devices=auto")
    assert "cannot be counted from here: distdl does not know the VM size" in str(refused.value)
    assert "did you mean Standard_NC24ads_A100_v4?" in str(refused.value)


def planned(*overrides: str) -> Any:
    """A run as the command line plans it, up to what needs torch."""
    command = ("+experiment=resnet50_ddp", "launcher=azureml", "name=x", *overrides)
    return planning.plan(compose.compose(list(command)))


@pytest.mark.filterwarnings("ignore")
def test_a_dry_run_writes_what_az_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job with its code beside it, loaded as `az ml job create` loads it. All of it is sent in
    tests/cluster/test_azureml.py.
    """
    azure = pytest.importorskip("azure.ai.ml")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("ours = 1\n")
    settings = ("launcher.files=files", "launcher.compute=gpu", "launcher.tier=spot")
    plan = planned("trainer.devices=1", "dry_run=true", *settings)
    shown, folder = dry_run.render(plan), tmp_path / "files/resnet50_ddp/x"
    names = ["environment.yml", "compute.yml", "job.yml"]
    assert re.findall(r"^file +(\S+)$", shown, re.M) == [
        str((folder / name).relative_to(tmp_path)) for name in names
    ]
    assert {path.name for path in folder.iterdir()} == {*names, "bundle"}
    assert not (tmp_path / "outputs").exists()
    loaded = azure.load_job(folder / "job.yml")
    assert Path(loaded._base_path, loaded.code) == folder / "bundle"
    environment = azure.load_environment(folder / "environment.yml")
    assert loaded._to_job().environment == f"{environment.name}:{environment.version}"
    assert azure.load_compute(folder / "compute.yml").tier == "low_priority"
    assert (folder / "bundle/code/project/mine.py").is_file()
    config = (folder / "bundle/config.yaml").read_text()
    assert "resnet50" in config and str(tmp_path) not in config
    with pytest.raises(UserError, match="is there already"):
        dry_run.render(plan)
    with pytest.raises(UserError, match="is for a dry run"):
        launcher(files="files").reach(rendered("serverless"))


ENTRY = "distdl.launchers.azureml.entry"


@pytest.mark.parametrize("value", ["/a b/$HOME", 'https://x/?a=1&b=`id`;c="', "\\$(id)*~#", "-x"])
@pytest.mark.parametrize("case", ["everything", "sweep"])
def test_what_azure_writes_over_a_reference_reaches_the_entry(
    case: str, value: str, tmp_path: Path
) -> None:
    """Azure replaces text, then a shell reads it."""
    job = rendered(case).job
    command = re.sub(r"\$\{\{.*?\}\}", lambda _: value, job.get("trial", job)["command"])
    shell = ["sh", "-c", f"printf '%s\\n' {command.removeprefix('python ')}"]
    done = subprocess.run(shell, capture_output=True, text=True, cwd=tmp_path)
    sweep = ["-m", ENTRY, f"members/{value}", f"{value}/{value}"]
    one = ["-m", ENTRY, ".", value, "--attempt", "1", f"--input=imagenet={value}"]
    assert done.stdout.splitlines()[:7] == (sweep if case == "sweep" else one)


def test_devices_of_a_size() -> None:
    assert AzureMLLauncher.devices({"vm_size": "Standard_ND96asr_v4"}) == (8, "gpu")
    assert AzureMLLauncher.devices({"vm_size": "Standard_DS3_v2"}) == (1, "cpu")
    assert AzureMLLauncher.devices({"vm_size": "Standard_X"}) is None


def test_names_of_secrets_are_what_a_key_vault_takes() -> None:
    long = spec("an experiment/" + "x" * 200, forward_env=("HF_TOKEN", "A" * 200))
    names = request.secret_names(long)
    for name in names.values():
        assert len(name) <= 127 and name.replace("-", "").isalnum()
    assert names != request.secret_names(spec("an experiment/y", forward_env=("HF_TOKEN",)))


# The image


def test_an_unchanged_image_keeps_its_version(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM x\n")
    first = request.version_of(tmp_path)
    assert request.version_of(tmp_path) == first
    (tmp_path / "constraints.txt").write_text("a==1\n")
    assert request.version_of(tmp_path) != first
    names = {"Dockerfile", "constraints.txt", "requirements.txt"}
    assert {p.name for p in request.IMAGE.iterdir()} == names


def test_the_image_has_what_azure_ml_and_torch_can_take() -> None:
    lines = (request.IMAGE / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    assert pins["azureml-mlflow"] == "1.62.0.post6"
    assert tuple(map(int, pins["mlflow-skinny"].split("."))) <= (3, 15, 0)
    assert tuple(map(int, pins["azure-storage-blob"].split("."))) <= (12, 27, 1)
    wanted = (request.IMAGE / "requirements.txt").read_text().splitlines()
    assert {name for name in wanted if name and name[0] != "#"} <= set(pins)
    # The one CUDA is that of torch's wheels, and the pages name the same one.
    cuda = ".".join(pins["cuda-toolkit"].split(".")[:2])
    wanted = [each for each in metadata.requires("torch") or () if each.startswith("cuda-toolkit[")]
    if metadata.version("torch").split("+")[0] == pins["torch"]:  # and none by a torch for the CPU
        assert all(f"=={pins['cuda-toolkit']};" in each for each in wanted)
    text = (request.IMAGE / "Dockerfile").read_text()
    (base,) = re.findall(r"^FROM (.+)$", text, re.M)
    assert "cuda" not in base and f"the CUDA they need, {cuda}:" in text
    page = (ROOT / "docs/launchers/azureml.md").read_text()
    assert set(re.findall(r"CUDA (\d+\.\d+)", page)) == {cuda}


def test_an_image_with_an_older_python_is_reported_at_once() -> None:
    """Every rank begins with `import distdl`, whatever started it."""
    old = "import sys; sys.version_info = (3, 10, 12, 'final', 0); import distdl.worker"
    done = subprocess.run([sys.executable, "-c", old], capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "distdl: needs Python 3.11 or newer" in line and "is 3.10.12" in line
    for name in ("src/distdl/__init__.py", "launchers/mpi/rank.py", "launchers/__init__.py"):
        ast.parse((ROOT / name).read_text(), feature_version=(3, 8))


def test_every_variable_that_the_headers_name_is_read_somewhere() -> None:
    """Of those that are ours or Azure's: a name that nothing reads looks like any other."""
    named = re.compile(r"\b(?:AZURE|AZUREML|ARM|DISTDL)_[A-Z0-9_]*[A-Z0-9]\b")
    pages = [*(ROOT / "conf").rglob("*.yaml"), ROOT / "launchers/azureml/provision/provision.yaml"]
    pages += [*(ROOT / "docs/launchers").glob("*.md"), *(ROOT / "docs").glob("azure_*.md")]
    code = [*(ROOT / "src").rglob("*.py"), *(ROOT / "launchers").rglob("*.py")]
    read = set(named.findall("\n".join(path.read_text() for path in code)))
    for page in pages:
        unread = set(named.findall(page.read_text())) - read
        assert not unread, f"{page.relative_to(ROOT)} names {unread}, which nothing reads"


# The workspace


def test_the_workspace_comes_from_settings_variables_and_config_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("AZURE")]:
        monkeypatch.delenv(name)
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    with pytest.raises(UserError, match="dry_run=true shows it") as refused:
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


WORKSPACE = Workspace("s", "g", "w")


def test_handles() -> None:
    for member in (None, "1a2b"):
        handle = WORKSPACE.handle("job-1", member)
        assert parse(handle) == (WORKSPACE, "job-1", member)
        assert AzureMLLauncher().attach(handle).handle == handle
    for bad in ("slurm://12", "azureml://job-1", "azureml://subscriptions/s/jobs/j"):
        with pytest.raises(UserError, match="is not a handle"):
            parse(bad)


@pytest.mark.parametrize("before", ["", "subscriptions/s/resourcegroups/g/workspaces/w/"])
def test_addresses_of_a_store(before: str) -> None:
    match = ADDRESS.fullmatch(f"azureml://{before}datastores/results/paths/distdl/a/b/")
    assert match is not None and match.groups() == ("results", "distdl/a/b")


def test_the_clouds_have_their_own_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
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
    found = {
        "type": "amlcompute",
        "size": "STANDARD_ND96ASR_V4",
        "tier": "low_priority",
        "min_instances": 0,
        "max_instances": 4,
        "idle_time_before_scale_down": 600.0,
    }
    return SimpleNamespace(**{**found, **changes})


def test_an_existing_cluster_is_compared(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = request.compute(launcher(**EVERYTHING), 2)
    assert wanted is not None
    submit.compare(cluster(), wanted, 2)
    assert capsys.readouterr().err == ""
    submit.compare(cluster(max_instances=8, idle_time_before_scale_down=120.0), wanted, 2)
    assert capsys.readouterr().err.splitlines() == [
        "note: cluster gpu-a100 stays as it is: launcher.max_nodes is 8 there",
        "note: cluster gpu-a100 stays as it is: launcher.idle_seconds is 120 there",
    ]
    with pytest.raises(UserError) as refused:
        submit.compare(cluster(max_instances=1, size="Standard_NC6s_v3"), wanted, 2)
    assert "has 1 nodes at most, and the job needs 2" in str(refused.value)
    assert "launcher.vm_size=Standard_NC6s_v3" in str(refused.value)
    with pytest.raises(UserError, match="no AmlCompute cluster"):
        submit.compare(cluster(type="kubernetes"), wanted, 2)


# The log of a job


class History:
    """What Azure answers, look by look; files grow, and begin again."""

    def __init__(self, *looks: dict[str, Any]) -> None:
        self.looks, self.last = list(looks), {}

    def details(self, job: str) -> dict[str, Any]:
        self.last = self.looks.pop(0) if self.looks else self.last
        if "raises" in self.last:
            raise UserError(self.last["raises"])
        names = [name for name in self.last if name.startswith("user_logs/")]
        return {**self.last, "logFiles": {name: name for name in names}}

    def read(self, address: str, start: int) -> bytes | None:
        content = self.last[address]
        return None if start > len(content) else content[start:]


ZERO, ONE = "user_logs/std_log_process_00.txt", "user_logs/std_log_process_01.txt"
OUTAGE, CRASH = {"raises": "no route"}, {"error": {"message": "exit code 1"}}
COMPLETED = "azureml: completed"
FAILED = {"status": "Failed", ZERO: b"zero\n", ONE: b"Traceback\nValueError: x\n", "error": CRASH}
FIRST = {"status": "Running", ZERO: b"first\nsecond\n"}
QUEUED = "azureml: queued: waiting for nodes"
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
    "a network that is gone for a moment": (
        [OUTAGE, {"status": "Completed", ZERO: b"one\n"}],
        ["azureml: no answer, trying again: no route", COMPLETED, "one"],
    ),
}


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("distdl.launchers.azureml.azure_job.SHORTEST", 0.0)
    monkeypatch.setattr("distdl.launchers.azureml.azure_job.LONGEST", 0.0)

    def follow(*looks: dict[str, Any], follow: bool = True) -> list[str]:
        job = AzureMLJob(Connection(WORKSPACE, None), "job-1")
        job._history = History(*looks)  # type: ignore[assignment]
        return list(job.logs(follow=follow))

    return follow


@pytest.mark.parametrize("case", LOGS)
def test_logs(case: str, followed: Any) -> None:
    looks, lines = LOGS[case]
    assert followed(*looks) == lines


@pytest.mark.parametrize("follow", [True, False])
def test_a_network_that_is_gone_for_good(follow: bool, followed: Any) -> None:
    with pytest.raises(UserError, match="no route"):
        followed(OUTAGE, follow=follow)


def test_a_job_that_stays_queued_says_why(followed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distdl.launchers.azureml.azure_job.QUEUED_LONG", -1)
    job = SimpleNamespace(compute="/x/computes/gpu")
    computes = SimpleNamespace(
        get=lambda name: cluster(provisioning_errors=None), list_nodes=lambda name: [1, 2]
    )
    client = SimpleNamespace(jobs=SimpleNamespace(get=lambda name: job), compute=computes)
    monkeypatch.setattr(Connection, "client", client)
    lines = followed({"status": "Queued"}, {"status": "Queued"}, {"status": "Canceled"})
    (reason,) = [line for line in lines if "still queued" in line]
    assert "cluster gpu has 2 of at most 4 nodes" in reason and "quota" in reason


def test_every_status_of_azure_has_a_state() -> None:
    models = pytest.importorskip("azure.ai.ml._restclient.arm_ml_service.models")
    assert {str(status.value) for status in models.JobStatus} <= set(STATES)
    ended = {state for state in STATES.values() if state.ended}
    assert ended == {JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED}


def test_logs_of_ranks() -> None:
    names = ("system_logs/lifecycler.log", "user_logs/std_log_process_10.txt", ZERO)
    assert list(run_history.by_rank({name: name for name in names}).items()) == [
        (0, ZERO),
        (10, "user_logs/std_log_process_10.txt"),
    ]
    assert run_history.by_rank({"user_logs/std_log.txt": "d"}) == {0: "d"}


# What a rank is started with


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that a job's command begins in, of a sweep."""
    monkeypatch.chdir(tmp_path)
    for name in ("PYTHONPATH", "DISTDL_INPUT_IMAGENET", "TOKEN"):
        monkeypatch.setenv(name, "")
    (tmp_path / "code").mkdir()
    (tmp_path / "members/1a2b").mkdir(parents=True)
    (tmp_path / "members/1a2b/attempt").write_text("3\n")
    return tmp_path


def test_entry_becomes_the_worker(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    monkeypatch.setattr("os.execv", lambda program, words: started.extend(words[1:]))
    monkeypatch.setattr(entry, "secrets", lambda names, identity: dict.fromkeys(names, identity))
    words = ["members/1a2b", "/mnt/store/1a2b", "--input", "imagenet=/mnt/in"]
    for _ in range(2):  # also where another rank of the node was first
        entry.main([*words, "--secret", "TOKEN=distdl-x-TOKEN", "--identity", "user"])
    worker = ["-m", "distdl.worker", "members/1a2b", "/mnt/store/1a2b", "--attempt", "3"]
    assert started == [*worker, *worker]
    assert os.environ["DISTDL_INPUT_IMAGENET"] == "/mnt/in" and os.environ["TOKEN"] == "user"
    assert os.environ["PYTHONPATH"] == str(node / "code")
    assert (node / "members/1a2b/code").resolve() == node / "code"


def test_entry_says_which_right_is_missing(
    node: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DISTDL_KEY_VAULT", "https://v.vault.azure.net")

    def refuse(names: Any, identity: str) -> None:
        raise PermissionError("Forbidden by policy")

    monkeypatch.setattr(entry, "secrets", refuse)
    with pytest.raises(SystemExit) as ended:
        entry.main([".", "/mnt/store", "--attempt", "1", "--secret", "TOKEN=x"])
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert "Forbidden by policy" in message and "Key Vault Secrets User" in message
