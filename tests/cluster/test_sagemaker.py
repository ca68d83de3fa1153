"""launcher=sagemaker, the container's side for real: two hosts, each with an /opt/ml of its own.

The job is submitted by the command line to moto. Then this test does what SageMaker does around a
container, and no more: it writes resourceconfig.json, fills /opt/ml/input/data and, after an
interruption, /opt/ml/checkpoints, and runs the very entry point, arguments and variables of the
request. What is uploaded and fetched: tests/unit/test_launcher_sagemaker.py.
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
import yaml

from distdl.launchers.sagemaker import uploads
from tests.cluster.hosts import Hosts, why_not
from tests.conftest import TINY, UNCHECKED, environment, last_step, losses

pytestmark = pytest.mark.xdist_group("sagemaker")

NAMES = ("algo-1", "algo-2")
CANARY = "canary-by-secrets-manager-5d"
BUCKET, REGION = "my-bucket", "eu-west-1"
JOB = (
    *(*TINY, "trainer.num_nodes=2", "trainer.devices=auto", "checkpoint.every_n_epochs=1"),
    "+callbacks.witness._target_=mine.Witness",
    "+callbacks.witness.token=${oc.env:SAMPLE_API_KEY}",
    "launcher.role=arn:aws:iam::123456789012:role/train",
    "launcher.image=123456789012.dkr.ecr.eu-west-1.amazonaws.com/distdl:1",
    *("launcher=sagemaker", "launcher.instance_type=ml.m5.large", f"launcher.bucket={BUCKET}"),
    *(f"launcher.region={REGION}", "launcher.forward_env=[SAMPLE_API_KEY]", "name=x"),
)
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


def until(condition: Callable[[], Any], state: Callable[[], str], timeout: float = 90) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, state()
        time.sleep(0.02)


class Cloud:
    """AWS (moto, on a host of its own) and the two hosts of a training job."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts, self.folder, log = hosts, folder, folder / "moto.log"
        self.idle = {host: set(hosts.pids(host)) for host in NAMES}
        self.variables = {
            "AWS_ENDPOINT_URL": f"http://{hosts.address('aws')}:5000",  # an address: no DNS here
            **dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "test"),
            "AWS_CONFIG_FILE": str(folder / "none"),
        }
        command = [sys.executable, "-m", "moto.server", "-H", "0.0.0.0", "-p", "5000"]
        pipes = {"stdout": log.open("w"), "stderr": subprocess.STDOUT}
        hosts.popen("aws", command, env=environment(), **pipes)
        until(lambda: "Running on" in log.read_text(), log.read_text)
        bucket = f"'{BUCKET}', CreateBucketConfiguration={{'LocationConstraint': '{REGION}'}}"
        self.on_aws("-c", f"import boto3; boto3.client('s3').create_bucket(Bucket={bucket})")

    def running(self, host: str) -> set[int]:
        """Processes that the test has started on a host."""
        return set(self.hosts.pids(host)) - self.idle[host]

    def on_aws(self, *argv: str) -> str:
        env = environment(**self.variables, AWS_DEFAULT_REGION=REGION, SAMPLE_API_KEY=CANARY)
        command, cwd = [sys.executable, *argv], self.folder / "project"
        done = self.hosts.run("aws", command, cwd=cwd, env=env, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


class Containers:
    """One start of the job's containers: what SageMaker does for every host. The run resumes from
    the stores of an `earlier` start."""

    def __init__(self, cloud: Cloud, run: Path, request: dict[str, Any], name: str, **more: Any):
        earlier: Containers | None = more.pop("earlier", None)
        self.cloud, self.opt_ml = cloud, {host: cloud.folder / name / host for host in NAMES}
        (channel,) = request["InputDataConfig"]
        for host, folder in self.opt_ml.items():
            data = folder / "input/data" / channel["ChannelName"]
            for part in (data, folder / "input/config", folder / "output"):
                part.mkdir(parents=True)
            config = {"current_host": host, "hosts": NAMES, "network_interface_name": "eth0"}
            config["current_instance_type"] = request["ResourceConfig"]["InstanceType"]
            (folder / "input/config/resourceconfig.json").write_text(json.dumps(config))
            uploads.pack(run / "attempts/001/bundle", data / "bundle.tar.gz")
            if earlier:
                # The primary host's last: only it writes what several hosts have.
                for other in reversed(NAMES):
                    shutil.copytree(earlier.store(other), self.store(host), dirs_exist_ok=True)
        self.mounted = list(NAMES)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        env = {"PATH": path, "OMP_NUM_THREADS": "1", **cloud.variables, **request["Environment"]}
        algorithm = request["AlgorithmSpecification"]
        command = [*algorithm["ContainerEntrypoint"], *algorithm["ContainerArguments"]]
        self.processes: dict[str, subprocess.Popen[str]] = {}
        for host, folder in self.opt_ml.items():
            cloud.hosts.bind(host, folder, "/opt/ml")
            pipes = {"stdout": (folder / "log").open("w"), "stderr": subprocess.STDOUT}
            self.processes[host] = cloud.hosts.popen(host, command, env={**env, **more}, **pipes)

    def log(self, *names: str) -> str:
        return "".join((self.opt_ml[host] / "log").read_text() for host in names or NAMES)

    def store(self, host: str = "algo-1") -> Path:
        return self.opt_ml[host] / "checkpoints"

    def status(self) -> dict[str, Any]:
        return json.loads((self.store() / "attempts/001/status.json").read_text())

    def failures(self) -> list[str]:
        return [(self.opt_ml[host] / "output/failure").read_text() for host in NAMES]

    def until_step(self, step: int) -> None:
        def reached() -> bool:
            ended = [h for h, p in self.processes.items() if p.poll() is not None]
            assert not ended, f"{ended} ended before:\n{self.log()}"
            return last_step(self.store()) >= step

        until(reached, self.log)

    def wait(self, timeout: float = 90) -> list[int]:
        return [process.wait(timeout) for process in self.processes.values()]

    def close(self) -> None:
        """Nothing of a container outlives it, and /opt/ml is empty again; safe to call twice."""
        for host in self.mounted:
            for pid in self.cloud.running(host):
                os.kill(pid, signal.SIGKILL)
            self.processes[host].wait()
            self.cloud.hosts.unmount(host, "/opt/ml")
        self.mounted = []


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
def request_(cloud: Cloud) -> dict[str, Any]:
    """What will be sent: moto forgets some of it."""
    return yaml.safe_load(
        cloud.on_aws(*UNCHECKED, *JOB, "dry_run=true").partition("training_job:\n")[2]
    )


@pytest.fixture(scope="module")
def run(cloud: Cloud, request_: dict[str, Any]) -> Path:
    """Submitted by the command line; nobody runs it yet."""
    output = cloud.on_aws(*UNCHECKED, *JOB, "follow=false")
    assert f"submitted  sagemaker://{REGION}/{request_['TrainingJobName']}" in output
    return cloud.folder / "project/outputs/default/x"


@pytest.fixture
def containers(
    cloud: Cloud, run: Path, request_: dict[str, Any]
) -> Iterator[Callable[..., Containers]]:
    started: list[Containers] = []

    def start(name: str, **more: Any) -> Containers:
        started.append(Containers(cloud, run, request_, name, **more))
        return started[-1]

    yield start
    for each in started:
        each.close()
        shutil.rmtree(each.opt_ml["algo-1"].parent, ignore_errors=True)


def test_an_interrupted_job_resumes(cloud, run, containers) -> None:
    first = containers("first")
    first.until_step(2)
    for process in first.processes.values():
        process.send_signal(signal.SIGTERM)  # spot capacity is taken away, or the time is up
    assert (first.wait(), first.status()["state"]) == ([75, 75], "PREEMPTED"), first.log()
    saved = last_step(first.store())
    assert saved < 30
    first.close()

    second = containers("second", earlier=first)  # SageMaker's own new start of the same job
    assert second.wait() == [0, 0], second.log()
    store = second.store()
    assert (second.status()["state"], second.status()["restarts"]) == ("SUCCEEDED", 1)
    steps = losses(store)
    assert len(steps) == max(steps) - min(steps) + 1 == 30, "a step is missing"
    lines = [x for x in (store / "logs/samples-rank0.csv").read_text().splitlines() if x]
    assert len(lines) < 30 + saved, "it began anew"
    assert not (second.opt_ml["algo-1"] / "output/failure").exists()

    # The table of ranks, on the network that SageMaker named.
    log = second.log("algo-1")
    assert "distdl: host algo-1, 1 of 2, primary algo-1, interface eth0, 1 ranks" in log
    rows = ("0     0     0      algo-1", "1     1     0      algo-2", "GLOO_SOCKET_IFNAME=eth0")
    assert all(row in log for row in rows)

    # Code and recipe are those that were submitted, and nothing else of this machine.
    code, digest = "/opt/ml/distdl/code", hashlib.sha256(CANARY.encode()).hexdigest()
    for host in NAMES:
        recipe = (second.store(host) / "config.yaml").read_bytes()
        assert recipe == (run / "config.yaml").read_bytes()
        witness = (second.opt_ml[host] / "output/witness").read_text().splitlines()
        assert witness == [digest, f"{code}/distdl/__init__.py", f"{code}/project/mine.py"]

    files = [p for p in cloud.folder.rglob("*") if p.is_file() and not p.is_symlink()]
    assert len(files) > 500 and any(p.name == "bundle.tar.gz" for p in files)
    assert [p for p in files if CANARY.encode() in p.read_bytes()] == []


def test_hosts_that_lose_each_other_end(cloud, containers) -> None:
    """The network is gone without a word: ranks would wait for each other for half an hour."""
    both = containers("lost")
    both.until_step(1)
    cloud.hosts.cut("algo-1")
    try:
        assert both.wait(240) == [1, 1]
    finally:
        cloud.hosts.mend("algo-1")
    assert both.failures() == ["algo-2 vanished", "algo-1 vanished"]
    # Killed with their container: not in the same instant.
    until(lambda: not cloud.running("algo-2"), both.log, 120)


def test_a_rank_that_fails_ends_every_host_and_is_named(cloud, containers) -> None:
    both = containers("failing", FAIL_RANK="1")
    assert both.wait() == [1, 1]
    assert both.failures() == ["rank 1 on algo-2: ValueError: as the test wishes"] * 2
    assert [cloud.running(host) for host in NAMES] == [set(), set()]
