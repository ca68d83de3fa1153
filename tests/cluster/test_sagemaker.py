"""launcher=sagemaker, the container's side for real: two hosts, each with an /opt/ml of its own.

The job is submitted by the command line to moto. Then this test does what SageMaker does around a
container, and no more: it writes resourceconfig.json, fills /opt/ml/input/data and, after an
interruption, /opt/ml/checkpoints, and runs the very entry point, arguments and variables of the
request. What is uploaded and fetched: tests/unit/launchers/test_sagemaker.py.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from distdl.launchers.sagemaker import uploads
from tests.cluster import witness
from tests.cluster.hosts import Hosts, why_not
from tests.conftest import (
    ROOT,
    TINY,
    UNCHECKED,
    environment,
    last_step,
    losses,
    matrix_only,
    status,
)
from tests.waiting import until

pytestmark = pytest.mark.xdist_group("sagemaker")

NAMES = ("algo-1", "algo-2")
SECRET = "canary-by-secrets-manager-5d"
BUCKET, REGION = "my-bucket", "eu-west-1"
JOB = (
    *TINY,
    "trainer.num_nodes=2",
    "trainer.devices=auto",
    "data.train_samples=80",
    "+callbacks.witness._target_=witness.Witness",
    "+callbacks.witness.token=${oc.env:CANARY}",
    "launcher.role=arn:aws:iam::123456789012:role/train",
    "launcher.image=123456789012.dkr.ecr.eu-west-1.amazonaws.com/distdl:1",
    "launcher=sagemaker",
    "launcher.instance_type=ml.m5.large",
    f"launcher.bucket={BUCKET}",
    f"launcher.region={REGION}",
    "launcher.forward_env=[CANARY]",
    "name=x",
    """launcher.metrics={train/loss: "step .* loss ([0-9.e+-]+)","""
    """ val/acc1: "val/acc1 ([0-9.e+-]+)"}""",
)


class Cloud:
    """AWS (moto, on a host of its own), a job that was submitted there, and the job's two hosts."""

    def __init__(self, hosts, folder):
        self.hosts = hosts
        self.folder = folder
        log = folder / "moto.log"
        (folder / "project").mkdir()
        shutil.copy(witness.__file__, folder / "project")
        self.run = folder / "project/outputs/default/x"
        address = hosts.address("aws")
        keys = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "test")
        self.variables = {"AWS_ENDPOINT_URL": f"http://{address}:5000", **keys}
        self.variables["AWS_CONFIG_FILE"] = str(folder / "none")
        command = [sys.executable, "-m", "moto.server", "-H", address, "-p", "5000"]
        pipes = {"stdout": log.open("w"), "stderr": subprocess.STDOUT}
        hosts.popen("aws", command, env=environment(), **pipes)
        until(lambda: "Running on" in log.read_text(), 90, log.read_text)
        bucket = f"'{BUCKET}', CreateBucketConfiguration={{'LocationConstraint': '{REGION}'}}"
        self.on_aws("-c", f"import boto3; boto3.client('s3').create_bucket(Bucket={bucket})")
        self.submit(JOB)

    def submit(self, words, command=()):
        """Sends a job; a program's `command` comes last."""
        # What will be sent: moto forgets some of it.
        shown = self.on_aws(*UNCHECKED, *words, "dry_run=true", *command)
        self.request = yaml.safe_load(shown.partition("training_job:\n")[2])
        output = self.on_aws(*UNCHECKED, *words, "follow=false", *command)
        assert f"submitted  sagemaker://{REGION}/{self.request['TrainingJobName']}" in output
        return shown

    def running(self, host):
        """Processes that the test has started on a host."""
        return set(self.hosts.pids(host)) - {self.hosts.sshd[host].pid}

    def on_aws(self, *argv):
        env = environment(**self.variables, AWS_DEFAULT_REGION=REGION, CANARY=SECRET)
        command = [sys.executable, *argv]
        cwd = self.folder / "project"
        done = self.hosts.run("aws", command, cwd=cwd, env=env, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


class Containers:
    """One start of the job's containers: what SageMaker does for every host. The run resumes from
    the stores of an `earlier` start."""

    def __init__(self, cloud, name, earlier=None, **more):
        self.cloud = cloud
        self.opt_ml = {host: cloud.folder / name / host for host in NAMES}
        self.store = self.opt_ml["algo-1"] / "checkpoints"
        request = cloud.request
        (channel,) = request["InputDataConfig"]
        instance = {"current_instance_type": request["ResourceConfig"]["InstanceType"]}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        env = {"PATH": path, "OMP_NUM_THREADS": "1", **cloud.variables, **request["Environment"]}
        algorithm = request["AlgorithmSpecification"]
        command = [*algorithm["ContainerEntrypoint"], *algorithm["ContainerArguments"]]
        self.processes = {}
        for host, folder in self.opt_ml.items():
            data = folder / "input/data" / channel["ChannelName"]
            for part in (data, folder / "input/config", folder / "output"):
                part.mkdir(parents=True)
            config = {"current_host": host, "hosts": NAMES, "network_interface_name": "eth0"}
            (folder / "input/config/resourceconfig.json").write_text(json.dumps(config | instance))
            uploads.pack(cloud.run / "attempts/001/bundle", data / "bundle.tar.gz")
            # The primary host's last: only it writes what several hosts have.
            for other in reversed(NAMES if earlier else ()):
                stored = earlier.opt_ml[other] / "checkpoints"
                shutil.copytree(stored, folder / "checkpoints", dirs_exist_ok=True)
            cloud.hosts.bind(host, folder, "/opt/ml")
            pipes = {"stdout": (folder / "log").open("w"), "stderr": subprocess.STDOUT}
            self.processes[host] = cloud.hosts.popen(host, command, env={**env, **more}, **pipes)

    def log(self):
        return "".join((self.opt_ml[host] / "log").read_text() for host in NAMES)

    def failures(self):
        return [(self.opt_ml[host] / "output/failure").read_text() for host in NAMES]

    def until_step(self, step):
        def reached():
            assert all(p.poll() is None for p in self.processes.values()), self.log()
            return last_step(self.store) >= step

        until(reached, 90, self.log)

    def wait(self, timeout=90):
        return [process.wait(timeout) for process in self.processes.values()]

    def close(self):
        """Nothing of a container outlives it, and /opt/ml is empty again; safe to call twice."""
        while self.processes:
            host, process = self.processes.popitem()
            for pid in self.cloud.running(host):
                os.kill(pid, signal.SIGKILL)
            process.wait()
            self.cloud.hosts.unmount(host, "/opt/ml")


@pytest.fixture(scope="module")
def cloud(tmp_path_factory):
    pytest.importorskip("moto.server", reason="not installed: pip install 'distdl[dev]'")
    if reason := why_not():
        pytest.skip(reason)
    with Hosts(*NAMES, "aws") as hosts:
        yield Cloud(hosts, tmp_path_factory.mktemp("sagemaker"))


@pytest.fixture
def containers(cloud):
    started = []

    def start(name, **more):
        started.append(Containers(cloud, name, **more))
        return started[-1]

    yield start
    for each in started:
        each.close()
        shutil.rmtree(each.store.parents[1], ignore_errors=True)


@pytest.mark.skipif("DISTDL_MATRIX" not in os.environ, reason="make matrix")
def test_an_interrupted_job_resumes(cloud, containers):
    first = containers("first")
    first.until_step(2)
    for process in first.processes.values():
        process.send_signal(signal.SIGTERM)  # spot capacity is taken away, or the time is up
    assert (first.wait(), status(first.store)["state"]) == ([75, 75], "PREEMPTED"), first.log()
    saved = last_step(first.store)
    assert saved < 15
    first.close()

    second = containers("second", earlier=first)  # SageMaker's own new start of the same job
    assert second.wait() == [0, 0], second.log()
    store = second.store
    log = second.log()
    end = status(second.store)
    assert (end["state"], end["restarts"]) == ("SUCCEEDED", 1)
    assert sorted(losses(store)) == [*range(1, 16)], "a step is missing"
    lines = (store / "logs/samples-rank0.csv").read_text().split("\n")
    assert len([*filter(None, lines)]) < 15 + saved, "it began anew"
    assert not (second.opt_ml["algo-1"] / "output/failure").exists()

    # CloudWatch reads metrics from the log, by the expressions that the documents show.
    found = {}
    for metric in cloud.request["AlgorithmSpecification"]["MetricDefinitions"]:
        assert metric["Regex"] in (ROOT / "docs/launchers/sagemaker.md").read_text()
        found[metric["Name"]] = float(re.findall(metric["Regex"], log)[-1])
    assert found["train/loss"] > 0
    assert 0 <= found["val/acc1"] <= 1

    # The table of ranks, on the network that SageMaker named.
    assert "distdl: host algo-1, 1 of 2, primary algo-1, interface eth0, 1 ranks" in log
    rows = ("0     0     0      algo-1", "1     1     0      algo-2", "GLOO_SOCKET_IFNAME=eth0")
    assert all(row in log for row in rows)

    # Code and recipe are those that were submitted, and nothing else of this machine.
    code = "/opt/ml/distdl/code"
    shown = witness.seen(log)
    for rank, folder in enumerate(second.opt_ml.values()):
        recipe = (folder / "checkpoints/config.yaml").read_bytes()
        assert recipe == (cloud.run / "config.yaml").read_bytes()
        assert shown[rank]["secret"] == witness.digest(SECRET)
        assert shown[rank]["distdl"] == f"{code}/distdl/__init__.py"
        assert shown[rank]["code"] == f"{code}/project/witness.py"

    files = [p for p in cloud.folder.rglob("*") if p.is_file() and not p.is_symlink()]
    assert len(files) > 500
    assert any(p.name == "bundle.tar.gz" for p in files)
    assert [p for p in files if SECRET.encode() in p.read_bytes()] == []


@matrix_only
def test_hosts_that_lose_each_other_end(cloud, containers):
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
    until(lambda: not cloud.running("algo-2"), 120, both.log)


@matrix_only
def test_a_rank_that_fails_ends_every_host_and_is_named(cloud, containers):
    both = containers("failing", FAILING_RANK="1")
    assert both.wait() == [1, 1]
    assert both.failures() == ["rank 1 on algo-2: ValueError: as the test wishes"] * 2
    assert [cloud.running(host) for host in NAMES] == [set(), set()]
