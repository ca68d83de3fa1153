"""launcher=sagemaker on AWS (moto, by http), and its hosts in the container: who takes part."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distdl.job import JobState
from distdl.launch import jobs
from distdl.launchers.sagemaker import SageMakerLauncher, sagemaker_job, uploads
from distdl.launchers.sagemaker.aws import Aws
from distdl.launchers.sagemaker.entry import Hosts
from distdl.launchers.sagemaker.heartbeat import VANISHED, Heartbeat, HostEnd
from distdl.util.errors import UserError
from tests.unit import sagemaker_account as account
from tests.unit.sagemaker_account import NODE, REGION, keys, spec

aws, moto, run, launcher = account.aws, account.moto, account.run, account.launcher  # fixtures


def test_without_boto3(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(UserError, match=r"pip install 'distdl\[sagemaker\]'"):
        SageMakerLauncher(**NODE).submit(SageMakerLauncher(**NODE).request(spec()))


def test_without_credentials(monkeypatch, tmp_path, run) -> None:
    for name in [n for n in os.environ if n.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    launcher = SageMakerLauncher(**NODE)
    with pytest.raises(UserError, match=r"no AWS credentials: .*\n.*AWS_PROFILE"):
        launcher.submit(launcher.request(spec(run)))
    with pytest.raises(UserError, match=r"launcher.region: .*specify a region"):
        SageMakerLauncher(**{**NODE, "region": None}).submit(launcher.request(spec(run)))
    with pytest.raises(UserError, match=r"launcher.profile: .*nobody"):
        SageMakerLauncher(**NODE, profile="nobody").submit(launcher.request(spec(run)))


def test_a_handle_of_somebody_else() -> None:
    for handle in ("slurm://1", "sagemaker://eu-west-1", "sagemaker:///x"):
        with pytest.raises(UserError, match="is not a SageMaker job"):
            SageMakerLauncher().attach(handle)


def test_a_bucket_that_is_not_there(aws, run) -> None:
    launcher = SageMakerLauncher(**{**NODE, "bucket": "other-bucket"})
    vars(launcher)["aws"] = aws
    with pytest.raises(UserError, match="NoSuchBucket"):
        launcher.submit(launcher.request(spec(run)))


def test_the_archive_depends_on_nothing_but_the_files(run, tmp_path) -> None:
    digests = []
    for name in ("one", "two"):
        uploads.pack(run / "attempts/001/bundle", tmp_path / name)
        digests.append(hashlib.sha256((tmp_path / name).read_bytes()).hexdigest())
        for path in (run / "attempts/001/bundle").rglob("*"):
            os.utime(path, (1, 1))
    assert digests[0] == digests[1]
    with tarfile.open(tmp_path / "one") as tar:
        assert tar.getnames() == ["code/distdl/__init__.py", "config.yaml"]


def test_submit_uploads_creates_and_hides(launcher, aws, run, monkeypatch) -> None:
    monkeypatch.setenv("SAMPLE_KEY", "canary-51")
    request = launcher.request(spec(run, forward_env=("SAMPLE_KEY",)))
    submitted = launcher.submit(request)
    assert keys(aws) == {f"distdl/resnet50_ddp/x/bundles/{request.name}/bundle.tar.gz"}
    secret = aws("secretsmanager").get_secret_value(SecretId="distdl/resnet50_ddp/x/SAMPLE_KEY")
    assert secret["SecretString"] == "canary-51"
    described = submitted.describe()
    assert described["CheckpointConfig"]["S3Uri"] == "s3://my-bucket/distdl/resnet50_ddp/x/store"
    assert "canary" not in json.dumps(described, default=str)
    # The next attempt: a job of its own, the same store, the newest value.
    monkeypatch.setenv("SAMPLE_KEY", "canary-52")
    again = launcher.submit(launcher.request(spec(run, attempt=2, forward_env=("SAMPLE_KEY",))))
    assert again.handle != submitted.handle
    assert again.describe()["CheckpointConfig"] == described["CheckpointConfig"]
    secret = aws("secretsmanager").get_secret_value(SecretId="distdl/resnet50_ddp/x/SAMPLE_KEY")
    assert secret["SecretString"] == "canary-52"


def test_a_foreign_run_of_the_same_name_is_not_gone_on_with(launcher, aws, run) -> None:
    key = "distdl/resnet50_ddp/x/store/config.yaml"
    aws("s3").put_object(Bucket="my-bucket", Key=key, Body=b"seed: 1\n")
    with pytest.raises(UserError, match="holds a run of the same name and another config"):
        launcher.submit(launcher.request(spec(run)))
    aws("s3").put_object(Bucket="my-bucket", Key=key, Body=b"seed: 0\n")
    launcher.submit(launcher.request(spec(run)))


def test_a_run_that_began_elsewhere_takes_its_history_along(launcher, aws, run) -> None:
    checkpoints = run / "checkpoints"
    checkpoints.mkdir()
    for name in ("epoch_001.ckpt", "epoch_001.ckpt.manifest.json"):
        (checkpoints / name).write_text(name)
    (checkpoints / "last.ckpt").symlink_to("epoch_001.ckpt")
    (run / "logs").mkdir()
    (run / "logs/metrics.jsonl").write_text("old")
    launcher.submit(launcher.request(spec(run)))
    store = "distdl/resnet50_ddp/x/store"
    expected = {"checkpoints/epoch_001.ckpt", "checkpoints/epoch_001.ckpt.manifest.json"}
    stored = {k.removeprefix(f"{store}/") for k in keys(aws) if k.startswith(store)}
    assert stored == expected | {"logs/metrics.jsonl"}
    # What is there already is the job's own and newer: left alone.
    (run / "logs/metrics.jsonl").write_text("older")
    launcher.submit(launcher.request(spec(run, attempt=2)))
    there = aws("s3").get_object(Bucket="my-bucket", Key=f"{store}/logs/metrics.jsonl")
    assert there["Body"].read() == b"old"


def test_every_status_of_the_service_has_a_state() -> None:
    from botocore.session import Session

    members = (
        Session().get_service_model("sagemaker").shape_for("DescribeTrainingJobResponse").members
    )
    assert set(sagemaker_job.FURTHER) | {"Completed", "Failed", "Stopping"} == set(
        members["SecondaryStatus"].enum
    )
    statuses = set(members["TrainingJobStatus"].enum)
    assert statuses == {*sagemaker_job.STATES, "InProgress", "Stopped", "Deleting"}


@pytest.mark.parametrize(
    ("status", "further", "state"),
    [
        ("InProgress", "Pending", JobState.PENDING),
        ("InProgress", "Interrupted", JobState.PENDING),
        ("InProgress", "Training", JobState.RUNNING),
        ("Stopping", "Stopping", JobState.RUNNING),
        ("Completed", "Completed", JobState.SUCCEEDED),
        ("Failed", "Failed", JobState.FAILED),
        ("Stopped", "Stopped", JobState.CANCELLED),
        ("Stopped", "MaxRuntimeExceeded", JobState.PREEMPTED),
        ("Stopped", "MaxWaitTimeExceeded", JobState.PREEMPTED),
        ("Deleting", "Completed", JobState.UNKNOWN),
        ("InProgress", "SomethingNew", JobState.UNKNOWN),
    ],
)
def test_states(status, further, state) -> None:
    assert (
        sagemaker_job.state_of({"TrainingJobStatus": status, "SecondaryStatus": further}) is state
    )


def test_states_from_a_later_shell_one_by_one_and_at_once(launcher, run, monkeypatch) -> None:
    submitted = [launcher.submit(launcher.request(spec(run))) for _ in range(3)]
    assert submitted[1].name == f"{submitted[0].name}-1", "a name is never taken twice"
    later = SageMakerLauncher()
    handles = [*(job.handle for job in submitted), f"sagemaker://{REGION}/never-was"]
    found = [later.attach(handle) for handle in handles]
    assert found[0].wait() is JobState.SUCCEEDED  # moto: completed at once
    asked, really = [], sagemaker_job.SageMakerJob.describe
    monkeypatch.setattr(
        sagemaker_job.SageMakerJob,
        "describe",
        lambda one: (asked.append(one.name), really(one))[1],
    )
    jobs.ask(found)
    assert [one.state() for one in found] == [*[JobState.SUCCEEDED] * 3, JobState.UNKNOWN]
    assert asked == ["never-was"] and len({id(one.aws) for one in found}) == 1
    assert "knows no such job" in found[3].why
    with pytest.raises(UserError, match="knows no such job"):
        found[3].wait()


def test_a_place_that_cannot_be_reached_is_unknown(launcher, run, aws, monkeypatch) -> None:
    handle = launcher.submit(launcher.request(spec(run))).handle
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    assert SageMakerLauncher().attach(handle).state() is JobState.UNKNOWN


def put_log(aws: Aws, name: str, host: str, *lines: str) -> None:
    client, stream = aws("logs"), f"{name}/{host}"
    for make in (
        lambda: client.create_log_group(logGroupName=sagemaker_job.LOG_GROUP),
        lambda: client.create_log_stream(
            logGroupName=sagemaker_job.LOG_GROUP, logStreamName=stream
        ),
    ):
        with contextlib.suppress(client.exceptions.ResourceAlreadyExistsException):
            make()
    now = int(time.time() * 1000)
    events = [{"timestamp": now, "message": line} for line in lines]
    client.put_log_events(
        logGroupName=sagemaker_job.LOG_GROUP, logStreamName=stream, logEvents=events
    )


def test_logs_of_all_hosts(launcher, run, aws) -> None:
    submitted = launcher.submit(launcher.request(spec(run)))
    assert list(submitted.logs()) == []
    put_log(aws, submitted.name, "algo-1-1700", "one", "two")
    put_log(aws, submitted.name, "algo-2-1700", "three")
    put_log(aws, "somebody-else", "algo-1-1700", "four")
    assert list(submitted.logs()) == ["one", "two", "[algo-2] three"]


def test_logs_follow_until_the_end(launcher, run, aws, monkeypatch) -> None:
    submitted = launcher.submit(launcher.request(spec(run)))
    submitted.poll_seconds = 0.01
    states = iter([JobState.PENDING, JobState.RUNNING, JobState.FAILED])

    def state(_: Any) -> JobState:
        found = next(states)
        if found is not JobState.PENDING:
            put_log(aws, submitted.name, "algo-1-1700", f"said while {found}")
        return found

    monkeypatch.setattr(sagemaker_job.SageMakerJob, "state", state)
    monkeypatch.setattr(
        sagemaker_job.SageMakerJob, "failure", lambda _: "AlgorithmError: rank 1: ValueError"
    )
    assert list(submitted.logs(follow=True)) == [
        "said while RUNNING",
        "said while FAILED",
        "SageMaker: AlgorithmError: rank 1: ValueError",
    ]


def test_cancel_asks_the_service(aws) -> None:
    from botocore.stub import Stubber

    running = sagemaker_job.SageMakerJob("a-job", aws)
    with Stubber(aws("sagemaker")) as stub:
        stub.add_response("stop_training_job", {}, {"TrainingJobName": "a-job"})
        running.cancel()
        # Twice, or too late: no error.
        stub.add_client_error("stop_training_job", "ValidationException", "is not InProgress")
        ended = {"TrainingJobStatus": "Stopped", "SecondaryStatus": "Stopped"}
        required = {
            "TrainingJobName": "a-job",
            "TrainingJobArn": "arn:aws:sagemaker:eu-west-1:123456789012:training-job/a-job",
            "ModelArtifacts": {"S3ModelArtifacts": "s3://b/x"},
            "AlgorithmSpecification": {"TrainingInputMode": "File"},
            "StoppingCondition": {},
            "CreationTime": 0,
        }
        stub.add_response("describe_training_job", {**required, **ended})
        running.cancel()
        stub.assert_no_pending_responses()
        stub.add_client_error("stop_training_job", "AccessDeniedException", "no")
        with pytest.raises(UserError, match="AccessDeniedException"):
            running.cancel()


def test_fetch_copies_the_store(launcher, run, aws, tmp_path, capsys) -> None:
    submitted = launcher.submit(launcher.request(spec(run)))
    store = "distdl/resnet50_ddp/x/store"
    hostile = (
        "../outside",
        "a/../../outside",
        "/outside",
        "C:/outside",
        "a\\..\\outside",
        "elsewhere/x",
    )
    outside, elsewhere = tmp_path / "outside", tmp_path / "elsewhere"
    (tmp_path / "here").mkdir()
    elsewhere.mkdir()
    (tmp_path / "here" / "elsewhere").symlink_to(elsewhere)
    for key in ("config.yaml", "attempts/001/status.json", "checkpoints/a.ckpt", *hostile):
        aws("s3").put_object(Bucket="my-bucket", Key=f"{store}/{key}", Body=key.encode())
    aws("s3").put_object(Bucket="my-bucket", Key=f"{store}-of-another/x", Body=b"x")
    submitted.fetch(tmp_path / "here")
    here = tmp_path / "here"
    found = {p.relative_to(here).as_posix() for p in here.rglob("*") if p.is_file()}
    assert found == {"config.yaml", "attempts/001/status.json", "checkpoints/a.ckpt"}
    assert not outside.exists() and not [*elsewhere.iterdir()]
    said = capsys.readouterr().err
    assert all(f"left out   {name!a}: " in said for name in hostile)
    # Again: what has not changed stays, what has is copied.
    (tmp_path / "here/checkpoints/a.ckpt").chmod(0o400)
    before = (tmp_path / "here/checkpoints/a.ckpt").stat().st_ino
    key = f"{store}/attempts/001/status.json"
    aws("s3").put_object(Bucket="my-bucket", Key=key, Body=b"{}")
    submitted.fetch(tmp_path / "here")
    assert (tmp_path / "here/attempts/001/status.json").read_text() == "{}"
    assert (tmp_path / "here/checkpoints/a.ckpt").stat().st_ino == before


# ---- the hosts of a job, in their containers ----------------------------------------------------


def test_hosts_are_counted_the_same_everywhere(tmp_path: Path) -> None:
    config = {"current_host": "algo-2", "hosts": ["algo-10", "algo-2", "algo-1"]}
    (tmp_path / "input/config").mkdir(parents=True)

    def read(**fields: str) -> Hosts:
        file = tmp_path / "input/config/resourceconfig.json"
        file.write_text(json.dumps({**config, **fields}))
        return Hosts.read(tmp_path)

    found = read(network_interface_name="eth0")
    assert found.names == ("algo-1", "algo-2", "algo-10")
    assert (found.number, found.primary) == (1, "algo-1")
    assert found.environment() == {"NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth0"}
    efa = read(current_instance_type="ml.p4d.24xlarge")
    assert efa.environment() == {"FI_PROVIDER": "efa"}


def until(condition: Callable[[], Any], timeout: float = 240) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> tuple[Heartbeat, Heartbeat]:
    """Two hosts that hear each other."""
    monkeypatch.setattr("distdl.launchers.sagemaker.heartbeat.BEAT_SECONDS", 0.05)
    monkeypatch.setattr("distdl.launchers.sagemaker.heartbeat.PATIENCE_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    second = Heartbeat(("localhost", "other"), "other", port)  # before the primary one is there
    time.sleep(0.1)
    first = Heartbeat(("localhost", "other"), "localhost", port)
    until(lambda: first._links and second._links)
    return first, second


def test_hosts_hear_how_the_others_end_and_no_stranger(both) -> None:
    first, second = both
    with socket.create_connection(("localhost", first.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert stranger.recv(10) == b""
    time.sleep(0.7)  # longer than the patience: the heartbeat keeps it
    assert first.ends() == second.ends() == {}
    second.report_end(HostEnd(0))
    until(lambda: first.ends() == {"other": HostEnd(0)})
    failed = HostEnd(1, "rank 0: it's \u00e4rgerlich\nvery", 1.5)
    first.report_end(failed)
    until(lambda: second.ends() == {"localhost": failed})


def test_hosts_notice_silence(both, monkeypatch) -> None:
    first, second = both
    monkeypatch.setattr(first._over, "wait", lambda _: time.sleep(60))  # its beats stop
    until(lambda: second.ends() == {"localhost": HostEnd(VANISHED, "localhost vanished")})
