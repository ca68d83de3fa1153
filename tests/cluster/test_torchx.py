"""torchx's own command line through distdl's launchers: `make programs` installs it.

What an app becomes: tests/unit/tools/test_torchx.py.
"""

import json
import re
import subprocess

import pytest

from tests.aws import REGION, moto
from tests.cluster import hosts as network
from tests.cluster import kube as kubernetes
from tests.conftest import ROOT, environment, free_port, matrix_only
from tests.waiting import until
from tests.written import write

__all__ = ["moto"]
TORCHX = ROOT / ".servers/torchx/bin/torchx"
READY = ROOT / ".servers/torchx/.ready"
PYTHON = ROOT / ".venv/bin/python"
pytestmark = [
    pytest.mark.xdist_group("torchx"),
    pytest.mark.skipif(not READY.exists(), reason="make .servers/torchx"),
    matrix_only,
    pytest.mark.timeout(900),
]
# What a script of torchrun's is.
SUM = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor(float(dist.get_rank()))
dist.all_reduce(total)
print("sum", total.item(), "of", dist.get_world_size(), sys.argv[1:], flush=True)
dist.destroy_process_group()
"""
FAILING = "import sys; raise ValueError('as the test wishes')"
HANDLE = re.compile(r"distdl_\w+://torchx/\S+")


class Shell:
    """torchx's command line, in a folder of the user's, here or on a host."""

    def __init__(self, folder, hosts=None, **env):
        self.folder = folder
        self.hosts = hosts
        self.env = environment(**env)
        write(folder, {"train.py": SUM, "failing.py": FAILING, ".gitignore": "outputs\n"})

    def __call__(self, *words, code=0):
        command = [str(TORCHX), *words]
        options = {"cwd": self.folder, "env": self.env, "timeout": 500}
        if self.hosts is not None:
            done = self.hosts.run("node1", command, **options)
        else:
            done = subprocess.run(command, capture_output=True, text=True, **options)
        self.err = done.stderr
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    def state(self, handle):
        return json.loads(self("status", "--json", handle))["state"]


@pytest.fixture(scope="module")
def hosts():
    if reason := network.why_not():
        pytest.skip(reason)
    with network.Hosts("node1", "node2") as both:
        yield both


@pytest.fixture
def on_hosts(hosts, tmp_path):
    return Shell(tmp_path, hosts)


def mpi(hosts, names="node1,node2"):
    return ("-s", "distdl_mpi", "-cfg", f"hosts=[{names}],python={PYTHON},ssh={hosts.ssh}")


def test_torchrun_on_two_hosts(hosts, on_hosts):
    started = on_hosts(
        "run",
        *mpi(hosts),
        "--wait",
        "--log",
        "dist.torchrun",
        "-j",
        "2x2",
        "--script",
        "train.py",
        "--",
        "--lr",
        "0.1",
    )
    (handle,) = HANDLE.findall(started)
    assert on_hosts.err.count("sum 6.0 of 4 ['--lr', '0.1']") == 4
    status = json.loads(on_hosts("status", "--json", handle))
    assert status["state"] == "SUCCEEDED"
    (role,) = status["roles"]
    assert role["role"] == "train"
    assert [each["hostname"] for each in role["replicas"]] == ["node1", "node2"]
    for node in (0, 1):
        lines = on_hosts("log", f"{handle}/train/{node}").splitlines()
        assert len([line for line in lines if "sum 6.0" in line]) == 2
    assert on_hosts("log", "--regex", "no such line", handle) == ""
    assert re.search(rf"{handle}\s+train\s+SUCCEEDED", on_hosts("list", "-s", "distdl_mpi"))
    assert handle not in on_hosts("list", "-s", "distdl_kubernetes")
    described = on_hosts("describe", handle)
    assert "'num_replicas': 2" in described
    name = handle.rpartition("/")[2]
    assert (on_hosts.folder / f"outputs/torchx/{name}/config.yaml").exists()


def test_cancel_and_failure(hosts, on_hosts):
    started = on_hosts("run", *mpi(hosts, "node1"), "utils.sh", "sleep", "300")
    (handle,) = HANDLE.findall(started)
    until(lambda: on_hosts.state(handle) == "RUNNING", 60)
    on_hosts("cancel", handle)
    until(lambda: on_hosts.state(handle) == "CANCELLED", 60)
    words = ("dist.torchrun", "-j", "1x1", "--script", "failing.py")
    (handle,) = HANDLE.findall(on_hosts("run", *mpi(hosts, "node1"), "--wait", *words, code=1))
    status = json.loads(on_hosts("status", "--json", handle))
    assert status["state"] == "FAILED"
    assert "exit code 1" in status["msg"]
    assert "ValueError: as the test wishes" in on_hosts("log", handle)
    on_hosts("status", f"{handle}x", code=1)
    assert "Traceback" not in on_hosts.err


REFUSED = {
    "a typo": (("-cfg", "host=[a]"), (), "host is no setting: did you mean hosts?"),
    "a value": (("-cfg", "port=1"), (), "launcher.port"),
    "elastic": ((), ("-j", "1:2x1"), "distdl starts all nodes, or none"),
    "no hosts": ((), ("-j", "2x1"), "launcher.hosts: missing, but trainer.num_nodes is 2"),
    "retries": ((), ("--max_retries", "2"), "launcher=mpi starts nothing again by itself"),
    "a folder": (("--workspace", "/usr"), (), "the project of the current folder, and no other"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("dryrun", [(), ("--dryrun",)])
def test_refused_at_once(tmp_path, case, dryrun):
    options, arguments, said = REFUSED[case]
    here = Shell(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    words = ("dist.torchrun", "--script", "train.py", *arguments)
    here("run", "-s", "distdl_mpi", *dryrun, *options, *words, code=1)
    assert said in here.err
    assert "Traceback" not in here.err
    assert sorted(tmp_path.rglob("*")) == before


def test_every_option_is_a_setting(tmp_path):
    said = Shell(tmp_path)("runopts", "distdl_sagemaker")
    assert "instance_type=INSTANCE_TYPE (str, None)" in said
    assert "keep_alive" in said


DRY_RUNS = {
    "mpi": ("hosts=[a,b],flavour=openmpi4", "mpirun"),
    "kubernetes": ("image=r/x:1,store=s3://b/x", "kind: Job"),
    "azureml": ("vm_size=Standard_D4s_v3", "Standard_D4s_v3"),
    "sagemaker": (
        "role=arn:aws:iam::123456789012:role/x,image=r/x:1,instance_type=ml.m5.xlarge,bucket=my-bucket,"
        "region=eu-west-1",
        "ml.m5.xlarge",
    ),
}


@pytest.mark.parametrize("launcher", DRY_RUNS)
def test_dry_runs(launcher, tmp_path):
    settings, said = DRY_RUNS[launcher]
    here = Shell(tmp_path)
    words = ("-cfg", settings, "--dryrun", "dist.torchrun", "-j", "2x1", "--script", "train.py")
    shown = here("run", "-s", f"distdl_{launcher}", *words)
    request = shown.partition("=== SCHEDULER REQUEST ===")[2]
    assert "resources  2 x 1 cpu" in request
    assert "torchrun --rdzv_backend c10d" in request
    assert "${TORCHX_RANK0_HOST:=localhost}:29500" in request
    assert said in request
    assert not (tmp_path / "outputs").exists()


def test_torchrun_in_two_pods(moto, tmp_path, monkeypatch):
    if reason := kubernetes.why_not():
        pytest.skip(reason)
    pytest.importorskip("kubernetes")
    with kubernetes.Kube(tmp_path / "kube") as kube:
        keys = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "test")
        env = {**keys, "AWS_ENDPOINT_URL": moto, "AWS_DEFAULT_REGION": REGION}
        for name, value in env.items():
            monkeypatch.setenv(name, value)  # for the pods
        import boto3

        place = {"LocationConstraint": REGION}
        boto3.client("s3").create_bucket(Bucket="torchx", CreateBucketConfiguration=place)
        here = Shell(tmp_path / "project", KUBECONFIG=str(kube.kubeconfig), **env)
        ports = f"port={free_port() + 1}"
        cfg = ("-s", "distdl_kubernetes", "-cfg", f"store=s3://torchx/runs,sync=5,shm=null,{ports}")
        words = ("dist.torchrun", "--image", "distdl:1", "-j", "2x1", "--script", "train.py")
        rendezvous = ("--rdzv_port", str(free_port()))
        started = here("run", *cfg, "--wait", "--log", *words, *rendezvous)
        (handle,) = HANDLE.findall(started)
        assert here.err.count("sum 1.0 of 2") == 2
        assert here.state(handle) == "SUCCEEDED"
        lines = [here("log", f"{handle}/train/{node}") for node in (0, 1)]
        assert [each.count("sum 1.0 of 2") for each in lines] == [1, 1]
        assert handle in here("list", "-s", "distdl_kubernetes")
