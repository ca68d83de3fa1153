"""launcher=azureml without an account: what would be sent, and what is refused before.

What is sent arrives for real, in a stand-in for Azure, in tests/cluster/test_azureml.py.
"""

from __future__ import annotations

import ast
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from distdl import __main__ as command_line
from distdl import compose, dry_run, planning
from distdl import config as configs
from distdl.errors import UserError
from distdl.job import JobSpec, JobState, Resources
from distdl.launchers.azureml import checks, entry, logs, needs, request, submit
from distdl.launchers.azureml.client import Connection, Workspace, parse, told
from distdl.launchers.azureml.job import STATES, AzureMLJob
from distdl.launchers.azureml.launcher import AzureMLLauncher
from distdl.launchers.azureml.store import ADDRESS
from tests.conftest import ROOT, check_golden

GOLDEN = ROOT / "tests/golden/launchers"
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
    node = configs.plain(compose.compose(["launcher=azureml"]).launcher)
    return {**node, **changes}


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
        text = text.replace(needs.version_of(Path(EVERYTHING["build_context"])), "VERSION")
    file = GOLDEN / f"azureml_{case}.txt"
    check_golden(pytestconfig, file, text)


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
        loaded = load[kind](io.StringIO(needs.to_yaml(document)))
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


def test_the_same_spec_gives_the_same_request() -> None:
    assert rendered("everything") == rendered("everything")


def test_every_setting_is_an_argument_and_the_other_way_round() -> None:
    node = defaults()
    node.pop("_target_")
    assert set(AzureMLLauncher().node) == set(node)


def test_an_unchanged_image_keeps_its_version(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM x\n")
    first = needs.version_of(tmp_path)
    assert needs.version_of(tmp_path) == first
    (tmp_path / "constraints.txt").write_text("a==1\n")
    assert needs.version_of(tmp_path) != first
    assert {p.name for p in needs.IMAGE.iterdir()} == {
        "Dockerfile",
        "constraints.txt",
        "requirements.txt",
    }


def test_the_image_has_the_mlflow_that_azure_ml_can_take() -> None:
    lines = (needs.IMAGE / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    assert pins["azureml-mlflow"] == "1.62.0.post6"
    assert tuple(map(int, pins["mlflow-skinny"].split("."))) <= (3, 15, 0)
    assert tuple(map(int, pins["azure-storage-blob"].split("."))) <= (12, 27, 1)
    wanted = (needs.IMAGE / "requirements.txt").read_text().splitlines()
    assert {name for name in wanted if name and name[0] != "#"} <= set(pins)


# What is refused, all of it at once and before anything is sent: setting -> value -> message.
REFUSED = [
    ({"vm_size": "NC24ads_A100"}, "vm_size", "no name of a VM size", "Standard_NC24ads_A100_v4"),
    ({"vm_size": None}, "vm_size", "missing", "Standard_"),
    ({"vm_size": "Standard_NC6s_v3"}, "vm_size", "no kernels for a V100", "launcher.image"),
    ({"vm_size": "Standard_DS3_v2"}, "vm_size", "has no GPU", "trainer.accelerator=cpu"),
    ({"tier": "lowpriority"}, "tier", "not one of dedicated, spot, low_priority", "low_priority?"),
    ({"distribution": "tensorflow"}, "distribution", "not one of pytorch, mpi", ""),
    ({"compute": "my cluster"}, "compute", "cannot be the name of a cluster", "3 to 32"),
    ({"compute": "gpu", "max_nodes": 1}, "max_nodes", "trainer.num_nodes=2", "max_nodes=2"),
    ({"compute": "gpu", "min_nodes": -1}, "min_nodes", "not a whole number from 0", ""),
    ({"min_nodes": 5, "max_nodes": 3}, "min_nodes", "more than max_nodes", ""),
    ({"vnet": "lab"}, "subnet", "missing", "name a subnet"),
    ({"subnet": "nodes"}, "subnet", "full ARM id", "launcher.vnet"),
    ({"public_ip": False}, "public_ip", "need a subnet", "launcher.vnet"),
    ({"compute_identity": "trainer"}, "compute_identity", "neither system nor none", ""),
    ({"image": "a", "environment": "azureml:b@latest"}, "environment", "both say", "keep one"),
    ({"environment": "pytorch"}, "environment", "names no environment", "azureml:NAME@latest"),
    ({"build_context": "/nowhere"}, "build_context", "no Dockerfile", ""),
    ({"inputs": {"a": "/data/a"}}, "inputs.a", "no address that Azure can read", "upload it"),
    ({"inputs": {"a b": "azureml:x:1"}}, "inputs.a b", "letters, digits and _", ""),
    ({"inputs": {"a": {}}}, "inputs.a.path", "missing", "azureml://datastores"),
    (
        {"inputs": {"a": {"path": "azureml:x:1", "mode": "rw_mount"}}},
        "inputs.a.mode",
        "'rw_mount' is not one of ro_mount, download",
        "ro_mount?",
    ),
    (
        {"inputs": {"a": {"path": "azureml:x:1", "mode": "eval_mount"}}},
        "inputs.a.mode",
        "is for type=mltable",
        "",
    ),
    ({"inputs": {"a": {"path": "azureml:x:1", "kind": 1}}}, "inputs.a.kind", "a path, a mode", ""),
    (
        {"inputs": {"images": "azureml:x:1"}, "env": {"LIST": "${{inputs.image}}/list"}},
        "env.LIST",
        "refers to ${{inputs.image}}, which is undefined",
        "images?",
    ),
    (
        {"services": {"b": {"type": "tensor_board", "log_dir": "${{outputs.logs}}"}}},
        "services.b.log_dir",
        "${{outputs.logs}}",
        "has store",
    ),
    ({"inputs": {"a": "https://x/o'neill"}}, "inputs.a", "ends a quotation", "%27"),
    ({"files": "f", "forward_env": ["HF_TOKEN"]}, "files", "go to the Key Vault", "forward_env=[]"),
    ({"files": "f", "sweep": "azureml"}, "files", "put together at submission", "sweep=jobs"),
    ({"services": {"x": {"type": "telnet"}}}, "services.x.type", "not one of ssh", ""),
    ({"services": {"x": {"type": "ssh"}}}, "services.x.ssh_public_keys", "nobody could log in", ""),
    ({"mount": {"block_cache": True}}, "mount.block_cache", "no such setting", "one of"),
    ({"walltime": "soon"}, "walltime", "'soon' is no time", "hours"),
    ({"walltime": 5400}, "walltime", "5400 would be 5400 hours", "hours"),
    ({"shm_size": "16gb"}, "shm_size", "is no size", "16g"),
    ({"datastore": "a/b"}, "datastore", "no name of a datastore", ""),
    ({"key_vault": "http://x"}, "key_vault", "neither a Key Vault's name", "https://"),
    ({"identity": "me"}, "identity", "not one of null, managed, user", ""),
    ({"sweep": "hyperdrive"}, "sweep", "not one of jobs, azureml", ""),
    (
        {"sweep_job": {"max_concurrent": 0, "goal": "max"}},
        "sweep_job.goal",
        "not one of",
        "",
    ),
]


@pytest.mark.parametrize("changes,path,what,remedy", REFUSED, ids=lambda v: str(v)[:40])
def test_refused(changes: Mapping[str, Any], path: str, what: str, remedy: str) -> None:
    context = {**GPUS, "num_nodes": 2}
    found = {problem.path: problem for problem in checks.check(defaults(**changes), context)}
    assert path in found, found
    assert what in found[path].what and remedy in found[path].remedy


def test_more_processes_than_gpus() -> None:
    (found,) = checks.check(defaults(vm_size="Standard_NC96ads_A100_v4"), {**GPUS, "devices": 8})
    assert found.path == "vm_size"
    assert found.what == (
        "8 processes per node (trainer.devices), and Standard_NC96ads_A100_v4 has 4 GPUs"
    )
    assert "trainer.devices=4" in found.remedy


def test_all_problems_at_once() -> None:
    node = defaults(tier="cheap", vm_size="large", walltime="soon", shm_size="much")
    assert len(list(checks.check(node, GPUS))) == 4


def test_what_is_shipped_and_what_is_documented_is_right() -> None:
    for node, context in (
        (defaults(), GPUS),
        (defaults(vm_size="Standard_DS3_v2"), {**GPUS, "accelerator": "cpu", "devices": 2}),
        (defaults(vm_size="Standard_NC6s_v3", image="me.azurecr.io/cuda12:1"), GPUS),
        (defaults(**EVERYTHING) | {"build_context": None}, {**GPUS, "num_nodes": 2, "devices": 8}),
        (defaults(**SERVERLESS), {**GPUS, "devices": 4}),
        (defaults(**SWEEP), GPUS),
    ):
        assert list(checks.check(node, context)) == []


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
    assert list(checks.check(defaults(vm_size=size), context)) == []
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
    """Folder by folder: the job with its code beside it, loaded as `az ml job create` loads it."""
    azure = pytest.importorskip("azure.ai.ml")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("ours = 1\n")
    plan = planned(
        "trainer.devices=1",
        "dry_run=true",
        "launcher.files=files",
        "launcher.compute=gpu",
        "launcher.tier=spot",
        "launcher.env={NCCL_DEBUG: INFO}",
        "+launcher.inputs.data=azureml://datastores/d/paths/x",
    )
    said = dry_run.render(plan)
    folder = tmp_path / "files/resnet50_ddp/x"
    names = ["environment.yml", "compute.yml", "job.yml"]
    assert re.findall(r"^file +(\S+)$", said, re.M) == [
        str((folder / name).relative_to(tmp_path)) for name in names
    ]
    assert sorted(path.name for path in folder.iterdir()) == sorted([*names, "bundle"])
    assert not (tmp_path / "outputs").exists()
    shown = next(yaml.safe_load_all(said.partition("# The job.")[2].partition("\n")[2]))
    loaded = azure.load_job(folder / "job.yml")
    assert Path(loaded._base_path, loaded.code) == folder / "bundle"
    job = loaded._to_job()
    assert job.command == shown["command"]
    assert job.environment_variables == shown["environment_variables"]
    assert job.inputs["data"].path == shown["inputs"]["data"]["path"]
    assert job.outputs["store"].path == shown["outputs"]["store"]["path"]
    assert job.distribution.process_count_per_instance == 1
    assert (job.compute, job.resources.instance_count) == ("gpu", 1)
    environment = azure.load_environment(folder / "environment.yml")
    assert job.environment == f"{environment.name}:{environment.version}"
    assert azure.load_compute(folder / "compute.yml").tier == "low_priority"
    assert (folder / "bundle/code/project/mine.py").is_file()
    assert (folder / "bundle/code/distdl/worker.py").is_file()
    config = (folder / "bundle/config.yaml").read_text()
    assert "resnet50" in config and str(tmp_path) not in config
    with pytest.raises(UserError, match="is there already"):
        dry_run.render(plan)
    with pytest.raises(UserError, match="is for a dry run"):
        launcher(files="files").reach(rendered("serverless"))


@pytest.mark.parametrize("value", ["/a b/$HOME", 'https://x/?a=1&b=`id`;c="', "\\$(id)*~#", "-x"])
@pytest.mark.parametrize("case", ["everything", "sweep"])
def test_what_azure_writes_over_a_reference_reaches_the_entry(
    case: str, value: str, tmp_path: Path
) -> None:
    """Azure replaces text, then a shell reads it."""
    job = rendered(case).job
    command = re.sub(
        r"\$\{\{.*?\}\}", lambda _: value, job.get("trial", job)["command"].removeprefix("python ")
    )
    program = "import sys; print(*sys.argv[1:], sep='\\n')"
    given = subprocess.run(
        ["sh", "-c", f"{sys.executable} -c {shlex.quote(program)} {command}"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    ).stdout.splitlines()
    if case == "sweep":
        assert given == ["-m", ENTRY, f"members/{value}", f"{value}/{value}"]
    else:
        assert given[:6] == ["-m", ENTRY, ".", value, "--attempt", "1"]
        assert given[6] == f"--input=imagenet={value}"


ENTRY = "distdl.launchers.azureml.entry"


def test_an_image_with_an_older_python_is_told_so_at_once() -> None:
    """Every rank begins with `import distdl`, whatever started it."""
    old = "import sys; sys.version_info = (3, 10, 12, 'final', 0); import distdl.worker"
    done = subprocess.run([sys.executable, "-c", old], capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "distdl: needs Python 3.11 or newer" in line and "is 3.10.12" in line


def test_what_a_rank_starts_with_can_be_read_by_an_older_python() -> None:
    for name in ("src/distdl/__init__.py", "launchers/mpi/rank.py", "launchers/__init__.py"):
        ast.parse((ROOT / name).read_text(), feature_version=(3, 8))


def test_the_one_cuda_of_the_image_is_torchs() -> None:
    """And the pages name the same one."""
    lines = (needs.IMAGE / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    cuda = ".".join(pins["cuda-toolkit"].split(".")[:2])
    wanted = [each for each in metadata.requires("torch") or () if each.startswith("cuda-toolkit[")]
    if metadata.version("torch").split("+")[0] == pins["torch"]:  # and none by a torch for the CPU
        assert all(f"=={pins['cuda-toolkit']};" in each for each in wanted)
    text = (needs.IMAGE / "Dockerfile").read_text()
    (base,) = re.findall(r"^FROM (.+)$", text, re.M)
    assert "cuda" not in base and f"the CUDA they need, {cuda}:" in text
    page = (ROOT / "docs/launchers/azureml.md").read_text()
    assert set(re.findall(r"CUDA (\d+\.\d+)", page)) == {cuda}


def test_every_variable_that_the_headers_name_is_read_somewhere() -> None:
    """Of those that are ours or Azure's: a name that nothing reads looks like any other."""
    named = re.compile(r"\b(?:AZURE|AZUREML|ARM|DISTDL)_[A-Z0-9_]*[A-Z0-9]\b")
    pages = [*(ROOT / "conf").rglob("*.yaml"), ROOT / "launchers/azureml/provision.yaml"]
    pages += [*(ROOT / "docs/launchers").glob("*.md"), *(ROOT / "docs").glob("azure_*.md")]
    code = [*(ROOT / "src").rglob("*.py"), *(ROOT / "launchers").rglob("*.py")]
    read = set(named.findall("\n".join(path.read_text() for path in code)))
    for page in pages:
        unread = set(named.findall(page.read_text())) - read
        assert not unread, f"{page.relative_to(ROOT)} names {unread}, which nothing reads"


def test_devices_of_a_size() -> None:
    assert AzureMLLauncher.devices({"vm_size": "Standard_ND96asr_v4"}) == (8, "gpu")
    assert AzureMLLauncher.devices({"vm_size": "Standard_DS3_v2"}) == (1, "cpu")
    assert AzureMLLauncher.devices({"vm_size": "Standard_X"}) is None


def test_names_of_secrets_are_what_a_key_vault_takes() -> None:
    names = request.secret_names(
        spec("an experiment/" + "x" * 200, forward_env=("HF_TOKEN", "A" * 200))
    )
    for name in names.values():
        assert len(name) <= 127 and name.replace("-", "").isalnum()
    assert names != request.secret_names(spec("an experiment/y", forward_env=("HF_TOKEN",)))


# Where the workspace is.


def test_the_workspace_comes_from_settings_variables_and_config_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("AZURE")]:
        monkeypatch.delenv(name)
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    with pytest.raises(UserError) as refused:
        Workspace.find("sub", None, None)
    assert [p.path for p in refused.value.problems] == [
        "launcher.resource_group",
        "launcher.workspace",
    ]
    assert "dry_run=true shows it" in str(refused.value)
    text = '{"subscription_id": "s", "resource_group": "g", "workspace_name": "w"}'
    (tmp_path / "config.json").write_text(text)
    assert Workspace.find(None, None, None) == Workspace("s", "g", "w")
    monkeypatch.setenv("AZURE_RESOURCE_GROUP", "other")
    assert Workspace.find(None, None, "mine") == Workspace("s", "other", "mine")
    for name in (
        "AZURE_WORKSPACE_NAME",
        "AZUREML_WORKSPACE_NAME",
    ):
        monkeypatch.setenv(name, name.lower())
        assert Workspace.find(None, None, None).name == name.lower()


def test_handles() -> None:
    workspace = Workspace("s", "g", "w")
    for member in (None, "1a2b"):
        handle = workspace.handle("job-1", member)
        assert parse(handle) == (workspace, "job-1", member)
        assert AzureMLLauncher().attach(handle).handle == handle
    for bad in ("slurm://12", "azureml://job-1", "azureml://subscriptions/s/jobs/j"):
        with pytest.raises(UserError, match="is no handle"):
            parse(bad)


def test_addresses_of_a_store() -> None:
    short = "azureml://datastores/results/paths/distdl/a/b"
    long = "azureml://subscriptions/s/resourcegroups/g/workspaces/w/datastores/results/paths/distdl/a/b/"
    for address in (short, long):
        match = ADDRESS.fullmatch(address)
        assert match is not None and match.groups() == ("results", "distdl/a/b")


def test_the_clouds_have_their_own_addresses() -> None:
    workspace = Workspace("s", "g", "w")
    assert Connection(workspace, "AzureChinaCloud").scope == (
        "https://management.chinacloudapi.cn/.default"
    )
    assert Connection(workspace, "AzureUSGovernment").page("j").startswith("https://ml.azure.us/")
    assert Connection(workspace, None).vault("https://v.vault.azure.net/") == (
        "https://v.vault.azure.net"
    )
    assert Connection(workspace, "AzureChinaCloud").vault("mine") == "https://mine.vault.azure.cn"


def test_the_workspaces_own_key_vault(monkeypatch: pytest.MonkeyPatch) -> None:
    own = SimpleNamespace(key_vault="/subscriptions/s/providers/Microsoft.KeyVault/vaults/space-kv")
    client = SimpleNamespace(workspaces=SimpleNamespace(get=lambda name: own))
    monkeypatch.setattr(Connection, "client", client)
    found = Connection(Workspace("s", "g", "w"), None).vault(None)
    assert found == "https://space-kv.vault.azure.net"


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "azure.core", None)
    with pytest.raises(UserError, match=r"pip install 'distdl\[azure\]'"), told():
        raise AssertionError


# A cluster that exists.


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
    wanted = needs.compute(launcher(**EVERYTHING).node, 2)
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


# The log of a job.


class History:
    """What Azure says, look by look; files grow, and begin again."""

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


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("distdl.launchers.azureml.job.SHORTEST", 0.0)
    monkeypatch.setattr("distdl.launchers.azureml.job.LONGEST", 0.0)

    def follow(*looks: dict[str, Any], follow: bool = True) -> list[str]:
        job = AzureMLJob(Connection(Workspace("s", "g", "w"), None), "job-1")
        job._history = History(*looks)  # type: ignore[assignment]
        return list(job.logs(follow=follow))

    return follow


ZERO, ONE = "user_logs/std_log_process_00.txt", "user_logs/std_log_process_01.txt"


def test_lines_come_whole_and_once(followed: Any) -> None:
    assert followed(
        {"status": "Queued"},
        {"status": "Running", ZERO: b"one\ntw"},
        {"status": "Running", ZERO: b"one\ntwo\r\n", ONE: b"of rank 1\n"},
        {"status": "Completed", ZERO: b"one\ntwo\r\nend"},
    ) == [
        "azureml: queued: waiting for nodes",
        "azureml: running",
        "one",
        "two",
        "azureml: completed",
        "end",
    ]


def test_a_job_that_azure_starts_again_is_read_from_its_beginning(followed: Any) -> None:
    lines = followed(
        {"status": "Running", ZERO: b"first\nsecond\n"},
        {"status": "Queued", ZERO: b"first\nsecond\n"},
        {"status": "Completed", ZERO: b"again\n"},
    )
    assert [line for line in lines if not line.startswith("azureml")] == [
        "first",
        "second",
        "again",
    ]


def test_a_failed_job_shows_every_rank_and_what_azure_says(followed: Any) -> None:
    lines = followed(
        {
            "status": "Failed",
            ZERO: b"zero\n",
            ONE: b"Traceback\nValueError: x\n",
            "error": {"error": {"message": "exit code 1"}},
        },
        follow=False,
    )
    assert lines == ["zero", "[rank 1] Traceback", "[rank 1] ValueError: x", "azureml: exit code 1"]


def test_a_network_that_is_gone_for_a_moment(followed: Any) -> None:
    lines = followed({"raises": "no route"}, {"status": "Completed", ZERO: b"one\n"})
    assert lines == ["azureml: no answer, trying again: no route", "azureml: completed", "one"]
    with pytest.raises(UserError, match="no route"):
        followed({"raises": "no route"}, follow=False)
    with pytest.raises(UserError, match="no route"):
        followed({"raises": "no route"})


def test_a_job_that_stays_queued_says_why(followed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distdl.launchers.azureml.job.QUEUED_LONG", -1)
    client = SimpleNamespace(
        jobs=SimpleNamespace(get=lambda name: SimpleNamespace(compute="/x/computes/gpu")),
        compute=SimpleNamespace(
            get=lambda name: cluster(provisioning_errors=None), list_nodes=lambda name: [1, 2]
        ),
    )
    monkeypatch.setattr(Connection, "client", client)
    lines = followed({"status": "Queued"}, {"status": "Queued"}, {"status": "Canceled"})
    told_why = [line for line in lines if "still queued" in line]
    assert len(told_why) == 1
    assert "cluster gpu has 2 of at most 4 nodes" in told_why[0] and "quota" in told_why[0]


def test_every_status_of_azure_has_a_state() -> None:
    models = pytest.importorskip("azure.ai.ml._restclient.arm_ml_service.models")
    assert {str(status.value) for status in models.JobStatus} <= set(STATES)
    assert {state for state in STATES.values() if state.ended} == {
        JobState.SUCCEEDED,
        JobState.FAILED,
        JobState.CANCELLED,
    }


def test_logs_of_ranks() -> None:
    files = {
        "system_logs/lifecycler.log": "a",
        "user_logs/std_log_process_10.txt": "b",
        "user_logs/std_log_process_00.txt": "c",
    }
    assert logs.by_rank(files) == {0: "c", 10: "b"}
    assert logs.by_rank({"user_logs/std_log.txt": "d"}) == {0: "d"}


# What a rank is started with.


def test_entry_becomes_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "code")
    monkeypatch.delenv("DISTDL_INPUT_IMAGENET", raising=False)
    (tmp_path / "code").mkdir()
    (tmp_path / "members/1a2b").mkdir(parents=True)
    (tmp_path / "members/1a2b/attempt").write_text("3\n")
    seen: dict[str, Any] = {}
    monkeypatch.setattr("os.execv", lambda program, words: seen.update(words=words[1:]))
    monkeypatch.setattr(entry, "secrets", lambda names, identity: dict.fromkeys(names, identity))
    words = ["members/1a2b", "/mnt/store/1a2b", "--input", "imagenet=/mnt/in"]
    entry.main([*words, "--secret", "TOKEN=distdl-x-TOKEN", "--identity", "user"])
    assert seen["words"] == [
        "-m", "distdl.worker", "members/1a2b", "/mnt/store/1a2b", "--attempt", "3",
    ]  # fmt: skip
    import os

    assert os.environ["DISTDL_INPUT_IMAGENET"] == "/mnt/in"
    assert os.environ["PYTHONPATH"] == str(tmp_path / "code")
    assert os.environ.pop("TOKEN") == "user"
    assert (tmp_path / "members/1a2b/code").resolve() == tmp_path / "code"


def test_entry_says_which_right_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "code")
    monkeypatch.setenv("DISTDL_KEY_VAULT", "https://v.vault.azure.net")

    def refuse(names: Any, identity: str) -> None:
        raise PermissionError("Forbidden by policy")

    monkeypatch.setattr(entry, "secrets", refuse)
    with pytest.raises(SystemExit) as ended:
        entry.main([".", "/mnt/store", "--attempt", "1", "--secret", "TOKEN=x"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "Forbidden by policy" in said and "Key Vault Secrets User" in said
