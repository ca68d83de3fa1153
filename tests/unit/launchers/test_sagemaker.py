"""launcher=sagemaker: what is sent, what is refused before, jobs on AWS (moto).

What happens in the containers for real, and between hosts: tests/cluster/test_sagemaker.py.
"""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time

import pytest
import yaml

from distdl.job import VERDICTS, JobSpec, JobState, Resources
from distdl.launch import asking
from distdl.launchers.heartbeat import Heartbeat, HostEnd
from distdl.launchers.sagemaker import SageMakerLauncher, entry, limits, sagemaker_job, uploads
from distdl.launchers.sagemaker.aws import Aws
from distdl.launchers.sagemaker.entry import Hosts
from distdl.launchers.sagemaker.instances import instances
from distdl.launchers.sagemaker.sagemaker_job import SageMakerJob
from distdl.launchers.sagemaker.sagemaker_request import LONGEST_VALUE, SageMakerRequest
from distdl.launchers.sagemaker.sagemaker_settings import MOST_INPUTS
from distdl.stores import open_store
from distdl.util.errors import UserError
from tests import older_python
from tests.aws import REGION, aws, moto
from tests.conftest import ROOT, check_golden, free_port
from tests.waiting import until
from tests.written import write

SERVICE = pytest.importorskip("botocore.session").Session().get_service_model("sagemaker")
__all__ = ["aws", "moto"]
NODE = yaml.safe_load("""
{role: "arn:aws:iam::123456789012:role/train", bucket: my-bucket, region: eu-west-1,
 image: "123456789012.dkr.ecr.eu-west-1.amazonaws.com/distdl:1", instance_type: ml.g5.12xlarge}
""")
EVERYTHING = NODE | yaml.safe_load("""
{instance_type: ml.p4d.24xlarge, prefix: team/vision, volume_gb: 500, walltime: "2-00:00:00",
 spot: true, max_wait: "4-00:00:00", retries: 3, subnets: [subnet-0123, subnet-4567],
 security_groups: [sg-0123], encrypt_traffic: true,
 kms_key: "arn:aws:kms:eu-west-1:123456789012:key/1234", tags: {team: vision},
 env: {NCCL_DEBUG: INFO}, forward_env: [WANDB_API_KEY],
 metrics: {train/loss: "step .* loss ([0-9.e+-]+)"}, inputs: {
   imagenet: {path: "s3://data/imagenet", mode: FastFile}, labels: "s3://data/labels",
   scratch: {path: "fsx://fs-0123456789abcdef0/abcdefgh/scratch", mode: rw},
   shared: "efs://fs-0123456789abcdef0/shared"}}
""")
GROUPS = NODE | yaml.safe_load("""
{instance_type: null, network_isolation: true, walltime: 1,
 training_plan: "arn:aws:sagemaker:eu-west-1:123456789012:training-plan/reserved",
 instance_groups: {big: {instance_type: ml.g5.48xlarge}, small: {instance_type: ml.g5.12xlarge,
   count: 1}}, inputs: {parts: {path: "s3://data/parts", sharded: true, groups: [big, small]}}}
""")
NODES = {"sagemaker": NODE, "sagemaker_everything": EVERYTHING, "sagemaker_groups": GROUPS}
STORE = "distdl/resnet50_ddp/x/store"


def spec(run="RUN", *size, **fields):
    values = {"name": "resnet50_ddp/x", "bundle": f"{run}/attempts/001/bundle", "store": str(run)}
    size = size or (2, 4, "gpu")
    return JobSpec(**{**values, "attempt": 1, "resources": Resources(*size), **fields})


@pytest.fixture
def run(tmp_path):
    """A run's folder with the bundle of its first attempt."""
    bundle = {"config.yaml": "seed: 0\n", "code/distdl/__init__.py": ""}
    write(tmp_path / "run/attempts/001/bundle", bundle)
    return tmp_path / "run"


@pytest.fixture
def submit(aws, run):
    """Submits the run, and returns the job."""

    def submit(attempt=1, names=(), **changes):
        launcher = SageMakerLauncher(**{**NODE, **changes})
        vars(launcher)["aws"] = aws
        return launcher.submit(launcher.request(spec(run, attempt=attempt, forward_env=names)))

    return submit


def keys(aws):
    return {key for key, _ in uploads.objects(aws("s3"), "my-bucket", "")}


def put(aws, key, body):
    aws("s3").put_object(Bucket="my-bucket", Key=key, Body=body)


def stored(aws, key):
    return aws("s3").get_object(Bucket="my-bucket", Key=key)["Body"].read()


@pytest.mark.parametrize("name", NODES)
def test_the_request(name, submit, monkeypatch, pytestconfig):
    """As printed, and as the service takes it: boto3 checks names and types before it sends."""
    node = NODES[name]
    names = tuple(node.get("forward_env", ()))
    monkeypatch.setenv("WANDB_API_KEY", "canary-7c1")
    request = SageMakerLauncher(**node).request(spec(forward_env=names))
    check_golden(pytestconfig, ROOT / f"tests/golden/launchers/{name}.txt", request.render() + "\n")
    submitted = submit(names=names, **node)
    assert submitted.handle == f"sagemaker://{REGION}/{request.name}"
    assert submitted.url.endswith(f"?region={REGION}#/jobs/{request.name}")
    assert "canary" not in json.dumps(request.body()) + request.render()


@pytest.mark.parametrize("run_id", ["x" * 80 + "/" + "y" * 80, "default/2026-11-21_1--2.3"])
def test_job_names_obey_the_rules_and_differ(run_id):
    launcher = SageMakerLauncher(**NODE)
    other = SageMakerLauncher(**{**NODE, "bucket": "other"})
    tries = [(launcher, 1, 0), (launcher, 2, 0), (launcher, 1, 1), (other, 1, 0)]
    names = {SageMakerRequest(spec(name=run_id, attempt=n), it, m).name for it, n, m in tries}
    assert len(names) == 4
    assert all(re.fullmatch("[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}", name) for name in names), names


def refusals(devices=1, accelerator="gpu", **changes):
    nodes = 2 if changes.get("instance_groups") else 1
    context = {"num_nodes": nodes, "devices": devices, "accelerator": accelerator}
    problems = SageMakerLauncher.check({**NODE, **changes}, context)
    return {problem.path: f"{problem.what} | {problem.remedy}" for problem in problems}


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ((3, 11, 3), "python is 3.11.3, and distdl needs 3.11.4 or later"),
        ((2, 7, 18), "python is 2.7.18, and distdl needs 3.11.4 or later"),
        (None, "python: not found"),
    ],
)
def test_an_image_whose_python_cannot_run_it_says_so(version, said, tmp_path):
    request = SageMakerLauncher(**NODE).request(spec()).body()["AlgorithmSpecification"]
    command = [*request["ContainerEntrypoint"], *request["ContainerArguments"]]
    env = older_python.put(tmp_path, version)
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode
    assert done.stderr.strip().endswith(said)


def test_types_of_instances_and_valid_settings():
    assert refusals() == refusals(**EVERYTHING) == refusals(2, **GROUPS) == {}
    assert refusals(instance_type="ml.m5.large", accelerator="cpu") == {}
    new = "ml.trn1.32xlarge"  # boto3 knows it
    assert new not in instances()
    assert refusals(instance_type=new) == {}
    assert set(instances()) <= set(SERVICE.shape_for("TrainingInstanceType").enum)
    assert SageMakerLauncher.devices({"instance_type": "ml.p4d.24xlarge"}) == (8, "gpu")
    assert SageMakerLauncher.devices(GROUPS) == (4, "gpu")
    small = SageMakerLauncher(**{**NODE, "instance_type": "ml.g5.xlarge"})
    (note,) = small.request(spec("", 4, 1, "gpu")).notes()
    assert "no EFA" in note
    assert "one host is enough: ml.g5.12xlarge (4 GPUs)" in note


VPC = {"subnets": ["subnet-1"], "security_groups": ["sg-1"]}


def group(**fields):
    return {"instance_type": None, "instance_groups": {"a": fields}}


REFUSED = [
    *(({k: None}, k, "missing | launcher.") for k in ("image", "instance_type", "role", "bucket")),
    ({"role": "train"}, "role", "not the ARN"),
    ({"bucket": "s3://my-bucket/x"}, "bucket", "launcher.bucket=my-bucket"),
    *(({"prefix": prefix}, "prefix", "") for prefix in ("../x", "a//b", "a b", "a\nb", "é")),
    ({"instance_type": "ml.g5.12xlarg"}, "instance_type", "did you mean ml.g5.12xlarge?"),
    ({"instance_type": "ml.m5.large"}, "instance_type", "has no GPU"),
    ({"devices": 8}, "instance_type", "but trainer.devices=8 | trainer.devices=4 "),
    ({"walltime": 700}, "walltime", "28 days"),
    ({"max_wait": 48}, "max_wait", "applies only to spot jobs"),
    ({"spot": True, "walltime": 24, "max_wait": 2}, "max_wait", "walltime alone is 86400 s"),
    ({"spot": True, "keep_alive": 600}, "keep_alive", "cannot be kept warm"),
    ({"subnets": ["subnet-1"]}, "security_groups", "launcher.subnets is set"),
    ({"inputs": {"a": "/data/x"}}, "inputs.a", "aws s3 sync /data/x s3://"),
    ({"inputs": {"bundle": "s3://b/x"}}, "inputs.bundle", "reserved for the code"),
    ({"inputs": {"a-b": "s3://b/x"}}, "inputs.a-b", "not a valid input name"),
    ({"inputs": {"a": "efs://x/y"}}, "inputs.a", "names no file system"),
    ({"inputs": {"a": "efs://fs-01234567/y"}}, "inputs.a", "launcher.subnets=[subnet-...]"),
    ({"inputs": {"a": {"path": "s3://b/x", "mode": "FastFil"}}}, "inputs.a.mode", "FastFile?"),
    ({"inputs": {"a": {"path": "s3://b", "mod": 1}}}, "inputs.a.mod", "did you mean mode?"),
    ({"inputs": {"a": "fsx://fs-01234567/"}, **VPC}, "inputs.a", "fsx://fs-01234567/MOUNT/folder"),
    (
        {"inputs": {"a": {"path": "efs://fs-01234567", "sharded": True}}, **VPC},
        "inputs.a.sharded",
        "",
    ),
    ({"inputs": {"a": {"path": "s3://b", "sharded": "yes"}}}, "inputs.a.sharded", "true or false"),
    (
        {"inputs": {"a": {"path": "s3://b", "groups": ["x"]}}},
        "inputs.a.groups",
        "no instance group x",
    ),
    ({"metrics": {"loss": "loss [0-9.]+"}}, "metrics.loss", "has 0 groups"),
    ({"metrics": {"loss": "loss ([0-9.]+"}}, "metrics.loss", "is not a regular expression"),
    ({"network_isolation": True, "forward_env": ["X"]}, "network_isolation", "Secrets Manager"),
    (
        {"instance_groups": {"a": {"instance_type": "ml.g5.xlarge", "count": 2}}},
        "instance_type",
        "null",
    ),
    (group(instance_type="ml.g5.xlarge", count=3), "instance_groups", "trainer.num_nodes=3"),
    (group(instance_type="ml.m5.large", count=2), "instance_groups.a.instance_type", "has no GPU"),
    (group(count=2), "instance_groups.a.instance_type", "missing"),
    (group(instance_type="ml.g5.xlarge", count=0), "instance_groups.a.count", "1 or more"),
    (group(instance_type="ml.g5.xlarge", count=2, cont=1), "instance_groups.a.cont", "mean count?"),
    ({"inputs": {f"i{n}": "s3://b/x" for n in range(20)}}, "inputs", "allows 19"),
]


@pytest.mark.parametrize(("changes", "path", "text"), REFUSED)
def test_refusals(changes, path, text):
    problems = refusals(**changes)
    assert list(problems) == [path]
    assert text in problems[path]


def many(count, value="x"):
    return {f"k{number}": value for number in range(count)}


# What only the model of the API forbids: the key that the user has written, and what is wrong.
FORBIDDEN = [
    ({"tags": many(51)}, "launcher.tags", "has 52 entries.* at most 50 .distdl adds 1 of its own"),
    ({"tags": {"team": "x" * 257}}, "launcher.tags.team", "has 257 characters; .* at most 256"),
    ({"tags": {"a;b": "x"}}, "launcher.tags.a;b", "SageMaker refuses 'a;b'"),
    ({"tags": {"": "x"}}, "launcher.tags.", "needs at least 1"),
    ({**VPC, "subnets": [*many(17)]}, "launcher.subnets", "has 17 entries; .* at most 16"),
    ({**VPC, "subnets": ["subnet 1"]}, "launcher.subnets", "'subnet 1'"),
    ({**VPC, "security_groups": [*many(6)]}, "launcher.security_groups", "at most 5"),
    ({"env": many(102)}, "launcher.env", "at most 100 .distdl adds 2 of its own"),
    ({"env": {"LONG": "x" * 513}}, "launcher.env.LONG", "513 characters; .* at most 512"),
    ({"image": "x" * 256}, "launcher.image", "at most 255"),
    ({"kms_key": "a key"}, "launcher.kms_key", "'a key'"),
    ({"role": NODE["role"] + " x"}, "launcher.role", "to match arn:aws"),
    ({"volume_gb": 0}, "launcher.volume_gb", "0"),
    ({"training_plan": "plan"}, "launcher.training_plan", "needs at least 50"),
    ({"training_plan": "x" * 60}, "launcher.training_plan", "training-plan"),
    ({"metrics": many(41, "(x)")}, "launcher.metrics", "at most 40"),
    ({"metrics": {"loss": f"(x{'y' * 500})"}}, "launcher.metrics.loss", "at most 500"),
    ({"inputs": {"a": "s3://b/" + "x" * 1024}}, "launcher.inputs.a", "at most 1024"),
    ({"inputs": {"a": "efs://fs-0123456789abcdef012/x"}, **VPC}, "launcher.inputs.a", "at most 21"),
    ({"instance_type": "ml.g5.12xlarg"}, "launcher.instance_type", "mean ml.g5.12xlarge?"),
    (
        {"instance_groups": many(6, {"instance_type": "ml.g5.xlarge"})},
        "launcher.instance_groups",
        "5",
    ),
    ({"prefix": "x" * 1000}, "launcher.prefix", "at most 1024"),
]


@pytest.mark.parametrize(("changes", "path", "text"), FORBIDDEN)
def test_the_dry_run_refuses_what_the_api_forbids(changes, path, text):
    """boto3 checks none of it, so the service would have been the first to say so."""
    with pytest.raises(UserError) as error:
        SageMakerLauncher(**{**NODE, **changes}).request(spec())
    shown = {each.path: f"{each.what} {each.remedy}" for each in error.value.problems}
    assert path in shown, shown
    assert re.search(text, shown[path]), shown


def test_every_pattern_of_the_model_is_read():
    def patterns(shape, seen):
        yield shape.metadata.get("pattern", "")
        inner = [getattr(shape, name, None) for name in ("member", "key", "value")]
        for each in [*inner, *getattr(shape, "members", {}).values()]:
            if each is not None and each.name not in seen:
                yield from patterns(each, {*seen, each.name})

    found = {*patterns(limits.input_shape(), set())}
    assert len(found) > 20
    assert all(map(limits.in_python, found))
    tag = limits.input_shape().members["Tags"].member.members["Value"]
    assert not [*limits.violations(tag, "Größe 10 cm/東京")]
    members = limits.input_shape().members
    assert members["Environment"].value.metadata["max"] == LONGEST_VALUE
    assert members["InputDataConfig"].metadata["max"] == MOST_INPUTS + 1


def test_without_botocore_a_dry_run_says_what_it_did_not_check(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "botocore.session", None)
        patch.setattr(limits, "input_shape", limits.input_shape.__wrapped__)
        SageMakerLauncher(**{**NODE, "tags": many(51)}).request(spec())
        assert "limits were not checked" in " ".join(SageMakerLauncher.notes(NODE))
    assert list(SageMakerLauncher.notes(NODE)) == []
    notes = "\n".join(SageMakerLauncher.notes(GROUPS))
    assert "nothing else" in notes
    assert "inputs.parts: each host has only its part" in notes


def test_many_secrets_reach_the_container(submit, aws, monkeypatch):
    """In as many variables as they need, also if the run's name is none for a secret or a tag."""
    values = {f"SERVICE_{n}_API_KEY_OF_OURS": f"canary-{n}" for n in range(12)}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    named = spec(name="résumé, a/b;c", forward_env=tuple(values))
    request = SageMakerLauncher(**NODE).request(named)
    env = request.environment(REGION)
    assert {"DISTDL_SECRETS", "DISTDL_SECRETS_2"} <= set(env)
    for name, secret in request.secrets.items():
        uploads.put_secret(aws("secretsmanager"), secret, values[name], request.tag)
    assert entry.secrets({**env, "DISTDL_SECRETS_OF_MINE": "no JSON"}) == values


# What fails, the Problem's path, and its text.
AWAY = [
    ({}, "launcher", r"no AWS credentials: .*\n.*AWS_PROFILE"),
    ({"region": None}, "launcher.region", "specify a region"),
    ({"profile": "nobody"}, "launcher.profile", "nobody"),
]


def test_without_credentials_and_without_boto3(monkeypatch, tmp_path):
    def refused(**changes):
        launcher = SageMakerLauncher(**{**NODE, **changes})
        with pytest.raises(UserError) as error:
            launcher.submit(launcher.request(spec()))
        return error.value.problems[0].path, str(error.value)

    for name in [n for n in os.environ if n.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for changes, path, text in AWAY:
        at, message = refused(**changes)
        assert at == path
        assert re.search(text, message)
    monkeypatch.setitem(sys.modules, "boto3", None)
    assert "pip install 'distdl[sagemaker]'" in refused()[1]


def test_a_bucket_that_does_not_exist_and_a_run_of_another_config(aws, submit):
    with pytest.raises(UserError, match="NoSuchBucket"):
        submit(bucket="other-bucket")
    put(aws, f"{STORE}/config.yaml", b"seed: 1\n")
    with pytest.raises(UserError, match="has a run of the same name with another config"):
        submit()
    put(aws, f"{STORE}/config.yaml", b"seed: 0\n")
    submit()


def test_submit_uploads_the_bundle_and_hides_secrets(submit, aws, run, monkeypatch):
    """The next attempt is a job of its own with the same store and the newest value."""
    handles, stores = set(), set()
    uploads.pack(run / "attempts/001/bundle", run / "packed")
    for attempt in (1, 2):
        monkeypatch.setenv("SAMPLE_KEY", f"canary-{attempt}")
        job = submit(attempt, ("SAMPLE_KEY",))
        bundle = stored(aws, f"distdl/resnet50_ddp/x/bundles/{job.name}/bundle.tar.gz")
        assert bundle == (run / "packed").read_bytes()
        secret = aws("secretsmanager").get_secret_value(SecretId="distdl/resnet50_ddp/x/SAMPLE_KEY")
        assert secret["SecretString"] == f"canary-{attempt}"
        described = job.describe()
        assert "canary" not in json.dumps(described, default=str)
        handles.add(job.handle)
        stores.add(described["CheckpointConfig"]["S3Uri"])
    assert len(keys(aws)) == len(handles) == 2
    assert stores == {f"s3://my-bucket/{STORE}"}


def test_a_run_that_began_elsewhere_uploads_its_history(submit, aws, run):
    names = {"checkpoints/a.ckpt", "checkpoints/a.ckpt.manifest.json", "logs/metrics.jsonl"}
    write(run, dict.fromkeys(names, "old"))
    (run / "checkpoints/last.ckpt").symlink_to("a.ckpt")
    submit()
    assert {k.removeprefix(f"{STORE}/") for k in keys(aws) if k.startswith(STORE)} == names
    # What is there already is the job's own and newer: left alone.
    (run / "logs/metrics.jsonl").write_text("older")
    submit(2)
    assert stored(aws, f"{STORE}/logs/metrics.jsonl") == b"old"


def test_states_from_a_later_shell_one_by_one_and_at_once(submit, monkeypatch):
    submitted = [submit() for _ in range(3)]
    assert submitted[1].name == f"{submitted[0].name}-1", "a name is never taken twice"
    later = SageMakerLauncher()
    handles = [*(job.handle for job in submitted), f"sagemaker://{REGION}/never-was"]
    attached = [later.attach(handle) for handle in handles]
    assert attached[0].wait() is JobState.SUCCEEDED  # moto: completed at once
    described = []
    describe = SageMakerJob.describe

    def recorded(job):
        described.append(job.name)
        return describe(job)

    monkeypatch.setattr(SageMakerJob, "describe", recorded)
    reported = [report.state for report in asking.ask_all(attached)]
    assert reported == [*[JobState.SUCCEEDED] * 3, JobState.UNKNOWN]
    assert described == ["never-was"], "the others are in the list"
    with pytest.raises(UserError, match="unknown to SageMaker"):
        attached[3].wait()
    # AWS cannot be reached.
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    assert SageMakerLauncher().attach(handles[0]).state() is JobState.UNKNOWN


def put_log(aws, name, host, *lines):
    client = aws("logs")
    group = {"logGroupName": sagemaker_job.LOG_GROUP}
    stream = {**group, "logStreamName": f"{name}/{host}-1700"}
    for create, names in ((client.create_log_group, group), (client.create_log_stream, stream)):
        with contextlib.suppress(client.exceptions.ResourceAlreadyExistsException):
            create(**names)
    now = int(time.time() * 1000)
    client.put_log_events(**stream, logEvents=[{"timestamp": now, "message": m} for m in lines])


def test_logs_of_all_hosts_and_until_the_end(submit, aws, monkeypatch):
    submitted = submit()
    assert list(submitted.logs()) == []
    put_log(aws, submitted.name, "algo-1", "one", "two")
    put_log(aws, submitted.name, "algo-2", "three")
    put_log(aws, "somebody-else", "algo-1", "four")
    assert list(submitted.logs()) == ["one", "two", "[algo-2] three"]

    states = iter([JobState.PENDING, JobState.RUNNING, JobState.FAILED])

    def state(_):
        state = next(states)
        if state is not JobState.PENDING:
            put_log(aws, submitted.name, "algo-1", f"while {state}")
        return state

    submitted.poll_seconds = 0.01
    monkeypatch.setattr(SageMakerJob, "state", state)
    monkeypatch.setattr(SageMakerJob, "failure", lambda _: "rank 1: ValueError")
    lines = list(submitted.logs(follow=True))
    assert lines[3:] == ["while RUNNING", "while FAILED", "SageMaker: rank 1: ValueError"]


def test_cancel_asks_the_service(aws, monkeypatch):
    from botocore.stub import Stubber

    job = SageMakerJob("a-job", aws)
    stop = "stop_training_job"
    with Stubber(aws("sagemaker")) as stub:
        stub.add_response(stop, {}, {"TrainingJobName": "a-job"})
        job.cancel()
        stub.assert_no_pending_responses()
        stub.add_client_error(stop, "AccessDeniedException", "no")
        with pytest.raises(UserError, match="AccessDeniedException"):
            job.cancel()
        stub.add_client_error(stop, "ValidationException", "is not InProgress")
        monkeypatch.setattr(SageMakerJob, "state", lambda _: JobState.CANCELLED)
        job.cancel()  # twice, or too late


def test_fetch_copies_the_store(submit, aws, tmp_path):
    job = submit()
    good = {"config.yaml", "attempts/001/status.json"}
    to = tmp_path / "to"
    for key in (*(f"{STORE}/{name}" for name in (*good, "../outside")), f"{STORE}-of-another/x"):
        put(aws, key, b"x")
    job.fetch(to)
    assert {p.relative_to(to).as_posix() for p in to.rglob("*") if p.is_file()} == good


def test_a_search_follows_a_job_and_answers_beside_its_store(submit, aws, monkeypatch):
    """What SageMaker has copied to a disk it may copy back: so the answer is not in the store."""
    judged = SageMakerRequest(spec(judged=True), SageMakerLauncher(**NODE)).environment(REGION)
    assert VERDICTS not in SageMakerRequest(spec(), SageMakerLauncher(**NODE)).environment(REGION)
    job = submit()
    assert job.read_on("logs/metrics.jsonl", 0) == b""
    put(aws, f"{STORE}/logs/metrics.jsonl", b"0123456789")
    assert job.read_on("logs/metrics.jsonl", 0) == b"0123456789"
    assert job.read_on("logs/metrics.jsonl", 7) == b"789"
    assert job.read_on("logs/metrics.jsonl", 10) == b""
    assert job.read_on("logs/metrics.jsonl", 11) is None
    job.leave("verdict.json", b"old")
    job.leave("verdict.json", b"new")
    assert open_store(judged[VERDICTS]).read("verdict.json") == b"new"
    assert not [key for key in keys(aws) if key.startswith(f"{STORE}/verdict")]
    cut = SageMakerJob(job.name, Aws(REGION))
    monkeypatch.setattr(cut, "_store", job._store, raising=False)
    monkeypatch.setattr("distdl.launchers.sagemaker.aws.TRIES", 1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    for action in (lambda: cut.read_on("x", 0), lambda: cut.leave("x", b"")):
        with pytest.raises(UserError, match="Could not connect") as error:
            action()
        assert error.value.problems[0].code == "unreachable"


def test_a_stranger_at_the_port_of_the_hosts_is_sent_away():
    port = free_port()
    second = Heartbeat(("localhost", "other"), "other", port)  # before the primary host's
    first = Heartbeat(("localhost", "other"), "localhost", port)
    until(lambda: first.links and second.links, 30)
    with socket.create_connection(("localhost", port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert stranger.recv(10) == b""
    failed = HostEnd(1, "rank 0: it's \u00e4rgerlich\nvery", 1.5)
    first.report_end(failed)
    until(lambda: second.ends() == {"localhost": failed}, 30)
    assert first.ends() == {}


STATES = """
InProgress Interrupted PENDING; InProgress Training RUNNING; Stopping Stopping RUNNING;
Completed Completed SUCCEEDED; Failed Failed FAILED; Stopped Stopped CANCELLED;
Stopped MaxRuntimeExceeded PREEMPTED; Deleting Completed UNKNOWN; InProgress SomethingNew UNKNOWN
"""


def test_each_status_has_a_state():
    for status, further, state in map(str.split, STATES.split(";")):
        described = {"TrainingJobStatus": status, "SecondaryStatus": further}
        assert sagemaker_job.state_of(described) is JobState(state), (status, further)


def test_hosts_are_counted_the_same_everywhere(tmp_path):
    config = {
        "current_host": "algo-2",
        "hosts": ["algo-10", "algo-2", "algo-1"],
        "current_instance_type": "ml.p4d.24xlarge",
        "network_interface_name": "eth0",
    }
    write(tmp_path, {"input/config/resourceconfig.json": json.dumps(config)})
    hosts = Hosts.read(tmp_path)
    mixed = [{"instance_type": name} for name in ("ml.p4d.24xlarge", "ml.g5.xlarge")]
    write(
        tmp_path,
        {"mixed/input/config/resourceconfig.json": json.dumps(config | {"instance_groups": mixed})},
    )
    assert "FI_PROVIDER" not in Hosts.read(tmp_path / "mixed").environment()
    assert (hosts.names, hosts.number) == (("algo-1", "algo-2", "algo-10"), 1)
    interfaces = dict.fromkeys(("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"), "eth0")
    assert hosts.environment() == {**interfaces, "FI_PROVIDER": "efa"}
