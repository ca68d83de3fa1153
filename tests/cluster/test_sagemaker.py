"""launcher=sagemaker, the container's side for real: two hosts, each with an /opt/ml of its own.

The job is submitted by the command line to moto. Then this test does what SageMaker does around a
container, and no more: it writes resourceconfig.json, copies the channels from S3 to
/opt/ml/input/data, fills /opt/ml/checkpoints from S3 and keeps it there afterwards, and runs the
very entry point, arguments and variables of the request.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.hosts import Hosts, why_not
from tests.conftest import TINY, UNCHECKED, environment, last_step, losses

pytestmark = pytest.mark.xdist_group("sagemaker")

NAMES = ("algo-1", "algo-2")
CANARY = "canary-by-secrets-manager-5d"
BUCKET, REGION = "my-bucket", "eu-west-1"
LAUNCHER = {
    "role": "arn:aws:iam::123456789012:role/train",
    "image": "123456789012.dkr.ecr.eu-west-1.amazonaws.com/distdl:1",
    "instance_type": "ml.m5.large",
    "bucket": BUCKET,
    "region": REGION,
    "forward_env": ["SAMPLE_API_KEY"],
}
# The user's own code, which travels with the job.
PROJECT = """
import hashlib, os, pathlib
import distdl
from lightning.pytorch import Callback

class Witness(Callback):
    def __init__(self, token: str) -> None:
        self.token = token

    def on_train_start(self, trainer, module):
        seen = [hashlib.sha256(self.token.encode()).hexdigest(), distdl.__file__, __file__]
        pathlib.Path("/opt/ml/output/witness").write_text("\\n".join(seen))

    def on_train_batch_end(self, trainer, *arguments):
        if os.environ.get("FAIL_RANK") == str(trainer.global_rank):
            raise ValueError("as the test wishes")
"""
# Run on the host "aws", where moto is: this process is on another network.
COPY = """
import json, pathlib, sys, boto3
s3 = boto3.client("s3")
for way, uri, folder in json.loads(sys.argv[1]):
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    if way == "make":
        s3.create_bucket(Bucket=bucket, CreateBucketConfiguration={"LocationConstraint": folder})
    elif way == "up":
        for path in (p for p in pathlib.Path(folder).rglob("*") if p.is_file()):
            s3.upload_file(str(path), bucket, f"{prefix}/{path.relative_to(folder).as_posix()}")
    else:
        pages = s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        for key in [o["Key"] for page in pages for o in page.get("Contents", ())]:
            path = pathlib.Path(folder) / key.removeprefix(prefix).lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            s3.download_file(bucket, key, str(path))
"""


class Cloud:
    """AWS (moto, on a host of its own) and the two hosts of a training job."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts, self.folder = hosts, folder
        self.variables = {
            "AWS_ENDPOINT_URL": f"http://{hosts.address('aws')}:5000",  # an address: no DNS here
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": REGION,
            "AWS_CONFIG_FILE": str(folder / "none"),
        }
        command = [sys.executable, "-m", "moto.server", "-H", "0.0.0.0", "-p", "5000"]
        log = (folder / "moto.log").open("w")
        hosts.popen("aws", command, env=environment(), stdout=log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 60
        while "Running on" not in (folder / "moto.log").read_text():
            assert time.monotonic() < deadline, (folder / "moto.log").read_text()
            time.sleep(0.1)
        self.copy(("make", f"s3://{BUCKET}", REGION))

    def on_aws(self, *argv: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
        env = environment(**self.variables, **more)
        return self.hosts.run("aws", [sys.executable, *argv], cwd=cwd, env=env, timeout=240)

    def distdl(self, *arguments: str) -> str:
        done = self.on_aws(
            *UNCHECKED, *arguments, cwd=self.folder / "project", SAMPLE_API_KEY=CANARY
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def copy(self, *orders: tuple[str, str, str]) -> None:
        done = self.on_aws("-c", COPY, json.dumps(orders), cwd=self.folder)
        assert done.returncode == 0, done.stderr


class Containers:
    """One start of the job's containers: what SageMaker does for every host."""

    def __init__(
        self, cloud: Cloud, request: dict[str, Any], name: str, anew: bool = False, **more: str
    ) -> None:
        self.cloud, self.request = cloud, request
        self.opt_ml = {host: cloud.folder / name / host for host in NAMES}
        orders = []
        for host, folder in self.opt_ml.items():
            for part in ("input/config", "input/data", "checkpoints", "output"):
                (folder / part).mkdir(parents=True)
            told = {"current_host": host, "hosts": NAMES, "network_interface_name": "eth0"}
            told["current_instance_type"] = request["ResourceConfig"]["InstanceType"]
            (folder / "input/config/resourceconfig.json").write_text(json.dumps(told))
            for channel in request["InputDataConfig"]:
                uri = channel["DataSource"]["S3DataSource"]["S3Uri"]
                orders.append(("down", uri, f"{folder}/input/data/{channel['ChannelName']}"))
            if not anew:  # a test may wish for a run that has no history
                store = request["CheckpointConfig"]["S3Uri"]
                orders.append(("down", store, f"{folder}/checkpoints"))
        cloud.copy(*orders)
        self.mounted = list(NAMES)
        self.processes = {host: self.start(host, more) for host in NAMES}

    def start(self, host: str, more: dict[str, str]) -> subprocess.Popen[str]:
        hosts, algorithm = self.cloud.hosts, self.request["AlgorithmSpecification"]
        hosts.bind(host, self.opt_ml[host], "/opt/ml")
        env = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            **{k: v for k, v in self.cloud.variables.items() if k != "AWS_DEFAULT_REGION"},
            **self.request["Environment"],
            **more,
        }
        log = (self.opt_ml[host] / "log").open("w")
        command = [*algorithm["ContainerEntrypoint"], *algorithm["ContainerArguments"]]
        return hosts.popen(host, command, env=env, stdout=log, stderr=subprocess.STDOUT)

    def log(self, host: str) -> str:
        return (self.opt_ml[host] / "log").read_text()

    def store(self, host: str = "algo-1") -> Path:
        return self.opt_ml[host] / "checkpoints"

    def failure(self, host: str) -> str:
        return (self.opt_ml[host] / "output/failure").read_text()

    def until(self, condition: Callable[[], bool], timeout: float = 90) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            ended = [h for h, p in self.processes.items() if p.poll() is not None]
            assert not ended, f"{ended} ended before:\n{self.log('algo-1')}{self.log('algo-2')}"
            assert time.monotonic() < deadline, self.log("algo-1") + self.log("algo-2")
            time.sleep(0.02)

    def wait(self, timeout: float = 90) -> list[int]:
        return [process.wait(timeout) for process in self.processes.values()]

    def close(self) -> None:
        """Nothing of a container outlives it, and /opt/ml is empty again; safe to call twice."""
        for host in self.mounted:
            self.kill(host)
            self.cloud.hosts.unmount(host, "/opt/ml")
        self.mounted = []

    def kill(self, host: str) -> None:
        for pid in rank_pids(self.cloud.hosts, host):
            os.kill(pid, signal.SIGKILL)
        self.processes[host].wait()

    def synchronise(self) -> None:
        """As SageMaker does all the time."""
        to = self.request["CheckpointConfig"]["S3Uri"]
        # The primary host's last: only it writes what several hosts have, such as status.json.
        self.cloud.copy(*(("up", to, str(self.store(host))) for host in reversed(NAMES)))


def rank_pids(hosts: Hosts, host: str) -> list[int]:
    """What runs on a host beside its sshd."""
    found = []
    for pid in hosts.pids(host):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if b"sshd" not in command:
            found.append(pid)
    return found


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    pytest.importorskip("moto.server", reason="not installed: pip install 'distdl[dev]'")
    if reason := why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("sagemaker")
    (folder / "project").mkdir()
    (folder / "project/mine.py").write_text(PROJECT)
    with Hosts(*NAMES, "aws") as hosts:
        yield Cloud(hosts, folder)


@pytest.fixture(scope="module")
def run(cloud: Cloud) -> Path:
    """Submitted by the command line; nobody runs it yet."""
    node = [
        f"launcher.{k}={json.dumps(v) if isinstance(v, list) else v}" for k, v in LAUNCHER.items()
    ]
    said = cloud.distdl(
        *TINY,
        "trainer.num_nodes=2",
        "trainer.devices=auto",
        "checkpoint.every_n_epochs=1",
        "+callbacks.witness._target_=mine.Witness",
        "+callbacks.witness.token=${oc.env:SAMPLE_API_KEY}",
        "launcher=sagemaker",
        *node,
        "follow=false",
        "name=x",
    )
    assert f"submitted  sagemaker://{REGION}/default-x-001-" in said
    return cloud.folder / "project/outputs/default/x"


@pytest.fixture(scope="module")
def request_(run: Path) -> dict[str, Any]:
    """What was sent. moto forgets some of it, so it is made again, from the run's launch.yaml."""
    from distdl.job import JobSpec, Resources
    from distdl.launchers.sagemaker import SageMakerLauncher
    from distdl.runs.directory import Attempt

    attempt = Attempt(run / "attempts/001")
    node = {k: v for k, v in attempt.launch()["where"]["launcher"].items() if k != "_target_"}
    size = Resources(num_nodes=2, devices=1, accelerator="cpu")
    names = tuple(node["forward_env"])
    spec = JobSpec("default/x", f"{attempt.path}/bundle", str(run), 1, size, forward_env=names)
    body = SageMakerLauncher(**node).request(spec).body(REGION)
    job = json.loads((attempt.path / "job.json").read_text())
    assert job["handle"] == f"sagemaker://{REGION}/{body['TrainingJobName']}"
    return body


@pytest.fixture
def containers(cloud: Cloud, request_: dict[str, Any]) -> Iterator[Callable[..., Containers]]:
    started: list[Containers] = []

    def start(name: str, anew: bool = False, **more: str) -> Containers:
        started.append(Containers(cloud, request_, name, anew, **more))
        return started[-1]

    yield start
    for each in started:
        each.close()
        shutil.rmtree(each.opt_ml["algo-1"].parent, ignore_errors=True)


def test_an_interrupted_job_goes_on(cloud, run, containers) -> None:
    first = containers("first")
    first.until(lambda: last_step(first.store()) >= 2)
    for process in first.processes.values():
        process.send_signal(signal.SIGTERM)  # spot capacity is taken away, or the time is up
    codes = first.wait()
    status = json.loads((first.store() / "attempts/001/status.json").read_text())
    assert (status["state"], codes) == ("PREEMPTED", [75, 75]), first.log("algo-1")
    saved = last_step(first.store())
    assert saved < 30
    first.synchronise()
    first.close()

    second = containers("second")  # SageMaker's own new start of the same job
    assert second.wait() == [0, 0], second.log("algo-1") + second.log("algo-2")
    store = second.store()
    status = json.loads((store / "attempts/001/status.json").read_text())
    assert (status["state"], status["restarts"]) == ("SUCCEEDED", 1)
    found = losses(store)
    assert len(found) == max(found) - min(found) + 1 == 30, "a step is missing"
    lines = [x for x in (store / "logs/samples-rank0.csv").read_text().splitlines() if x]
    assert len(lines) < 30 + saved, "it began anew"
    assert not (second.opt_ml["algo-1"] / "output/failure").exists()

    # The table of ranks, on the network that SageMaker named.
    log = second.log("algo-1")
    assert "distdl: host algo-1, 1 of 2, primary algo-1, interface eth0, 1 ranks" in log
    for row in (
        "0     0     0      algo-1",
        "1     1     0      algo-2",
        "GLOO_SOCKET_IFNAME=eth0",
    ):
        assert row in log

    # Code and recipe are those that were submitted, and nothing else of this machine.
    for host in NAMES:
        recipe = (second.store(host) / "config.yaml").read_bytes()
        assert recipe == (run / "config.yaml").read_bytes()
        digest, ours, mine = (second.opt_ml[host] / "output/witness").read_text().splitlines()
        assert ours.startswith("/opt/ml/distdl/code/distdl/")
        assert mine == "/opt/ml/distdl/code/project/mine.py"
        assert digest == hashlib.sha256(CANARY.encode()).hexdigest()

    # And back here.
    second.synchronise()
    cloud.distdl("jobs", "fetch", "outputs/default/x")
    assert losses(run) == found
    assert (run / "checkpoints/last.ckpt").exists()
    shown = cloud.distdl("jobs", "list")
    assert "SUCCEEDED" in shown and "val/acc1" in shown
    everything = cloud.folder / "everything"
    cloud.copy(("down", f"s3://{BUCKET}", str(everything)))
    refuse_canary(cloud.folder)


def refuse_canary(folder: Path) -> None:
    files = [p for p in folder.rglob("*") if p.is_file() and not p.is_symlink()]
    assert len(files) > 500 and any(p.name == "bundle.tar.gz" for p in files)
    assert [p for p in files if CANARY.encode() in p.read_bytes()] == []


def test_hosts_that_lose_each_other_end(cloud, containers) -> None:
    """The network is gone without a word: ranks would wait for each other for half an hour."""
    both = containers("lost", anew=True)
    both.until(lambda: last_step(both.store()) >= 1)
    cloud.hosts.cut("algo-1")
    try:
        assert both.wait(240) == [1, 1]
    finally:
        cloud.hosts.mend("algo-1")
    assert both.failure("algo-1") == "algo-2 vanished"
    assert both.failure("algo-2") == "algo-1 vanished"
    deadline = time.monotonic() + 120  # killed with their container: not in the same instant
    while left := rank_pids(cloud.hosts, "algo-2"):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_a_rank_that_fails_ends_every_host_and_is_named(cloud, containers) -> None:
    both = containers("failing", anew=True, FAIL_RANK="1")
    assert both.wait() == [1, 1]
    for host in NAMES:
        assert both.failure(host) == "rank 1 on algo-2: ValueError: as the test wishes"
        assert rank_pids(cloud.hosts, host) == []
