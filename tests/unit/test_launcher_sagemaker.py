"""launcher=sagemaker: what is sent, and what is refused before.

Request bodies are checked by botocore's Stubber against the service's own model. What happens to
them at the place: test_sagemaker_jobs.py; on the hosts: test_sagemaker_hosts.py, and for real in
tests/cluster/test_sagemaker.py.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

import pytest

from distdl.errors import UserError
from distdl.job import Resources
from distdl.launchers.sagemaker import SageMakerLauncher
from distdl.launchers.sagemaker.sagemaker_request import SageMakerRequest
from distdl.launchers.sagemaker.sagemaker_settings import instances
from tests.conftest import ROOT, check_golden
from tests.unit import sagemaker_account as account
from tests.unit.sagemaker_account import EVERYTHING, NODE, REGION, spec

aws, moto, run = account.aws, account.moto, account.run  # fixtures

GOLDEN = ROOT / "tests/golden/launchers"
ONE_GPU = {"num_nodes": 1, "devices": 1, "world_size": 1, "accelerator": "gpu", "local": False}


@pytest.mark.parametrize(
    ("name", "node"), [("sagemaker", NODE), ("sagemaker_everything", EVERYTHING)]
)
def test_golden(name, node, pytestconfig: pytest.Config) -> None:
    launcher = SageMakerLauncher(**node)
    text = launcher.request(spec(forward_env=tuple(node.get("forward_env", ())))).render() + "\n"
    file = GOLDEN / f"{name}.txt"
    check_golden(pytestconfig, file, text)


@pytest.mark.parametrize("node", [NODE, EVERYTHING], ids=["plain", "everything"])
def test_the_services_own_model_takes_the_request(node, run, aws, monkeypatch) -> None:
    """Stubber checks names and types of all members; patterns are checked here."""
    import boto3
    from botocore.stub import Stubber

    monkeypatch.setenv("WANDB_API_KEY", "canary-7c1")
    launcher = SageMakerLauncher(**node)
    vars(launcher)["aws"] = aws
    request = launcher.request(spec(run, forward_env=tuple(node.get("forward_env", ()))))
    aws.clients["sagemaker"] = client = boto3.client("sagemaker", region_name=REGION)
    with Stubber(client) as stub:
        absent = ("describe_training_job", "ValidationException", "Requested resource not found.")
        stub.add_client_error(*absent)
        arn = f"arn:aws:sagemaker:{REGION}:123456789012:training-job/{request.name}"
        stub.add_response("create_training_job", {"TrainingJobArn": arn}, request.body())
        submitted = launcher.submit(request)
        stub.assert_no_pending_responses()
    assert submitted.handle == f"sagemaker://{REGION}/{request.name}"
    assert submitted.url.endswith(f"?region={REGION}#/jobs/{request.name}")
    assert "canary" not in json.dumps(request.body()) + request.render()
    matches_the_model(client.meta.service_model, request.body())


def matches_the_model(model: Any, body: dict[str, Any]) -> None:
    """Every string against the pattern and length that the model states."""
    checked = 0

    def walk(shape: Any, value: Any) -> None:
        nonlocal checked
        if shape.type_name == "structure":
            for key, item in value.items():
                walk(shape.members[key], item)
        elif shape.type_name == "list":
            for item in value:
                walk(shape.member, item)
        elif shape.type_name == "map":
            for key, item in value.items():
                walk(shape.key, key)
                walk(shape.value, item)
        elif shape.type_name == "string":
            limit, pattern = shape.metadata.get("max"), shape.metadata.get("pattern")
            assert limit is None or len(value) <= limit, (shape.name, value)
            if pattern and r"\p" not in pattern:  # Python knows no \p{L}
                assert re.fullmatch(pattern, value), (shape.name, value)
                checked += 1
            assert not shape.enum or value in shape.enum, (shape.name, value)

    walk(model.operation_model("CreateTrainingJob").input_shape, body)
    assert checked > 10


def test_the_same_spec_gives_the_same_request() -> None:
    launcher = SageMakerLauncher(**NODE)
    assert launcher.request(spec()) == launcher.request(spec())
    assert launcher.request(spec()).render() == launcher.request(spec()).render()


@pytest.mark.parametrize("run_id", ["a/b", "x" * 80 + "/" + "y" * 80, "default/2026-11-21_1--2.3"])
def test_job_names_obey_the_rules(run_id) -> None:
    rule = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}")
    settings = SageMakerLauncher(**NODE)
    requests = [SageMakerRequest(spec(name=run_id, attempt=n), settings, m) for n, m in
                ((1, 0), (2, 0), (1, 1))]  # fmt: skip
    names = [request.name for request in requests]
    assert all(rule.fullmatch(name) for name in names), names
    assert len(set(names)) == 3
    elsewhere = SageMakerLauncher(**{**NODE, "bucket": "other"}).request(spec(name=run_id))
    assert elsewhere.name not in names


def test_a_variable_that_is_too_long_is_refused() -> None:
    launcher = SageMakerLauncher(**NODE, env={"LONG": "x" * 513})
    with pytest.raises(UserError, match="LONG: 513 characters"):
        launcher.request(spec())


def refusals(**changes: Any) -> dict[str, str]:
    context = {**ONE_GPU, **changes.pop("context", {})}
    found = list(SageMakerLauncher.check({**NODE, **changes}, context))
    return {problem.path: f"{problem.what} | {problem.remedy}" for problem in found}


def test_a_right_node_is_not_refused() -> None:
    assert refusals() == {}
    assert refusals(**EVERYTHING) == {}
    assert refusals(instance_type="ml.m5.large", context={"accelerator": "cpu"}) == {}


def test_what_is_required_is_said_at_once() -> None:
    found = refusals(role=None, image=None, instance_type=None, bucket=None)
    assert set(found) == {"role", "image", "instance_type", "bucket"}
    assert all(text.startswith("missing | launcher.") for text in found.values())


@pytest.mark.parametrize(
    ("changes", "path", "text"),
    [
        ({"role": "train"}, "role", "not the ARN"),
        ({"bucket": "s3://my-bucket/x"}, "bucket", "launcher.bucket=my-bucket"),
        ({"instance_type": "ml.g5.12xlarg"}, "instance_type", "did you mean ml.g5.12xlarge?"),
        ({"instance_type": "p4d.24xlarge"}, "instance_type", "did you mean ml.p4d.24xlarge?"),
        ({"instance_type": "ml.m5.large"}, "instance_type", "has no GPU"),
        (
            {"context": {"devices": 8}},
            "instance_type",
            "ml.g5.12xlarge has 4 A10G, and trainer.devices=8 | trainer.devices=4",
        ),
        ({"context": {"devices": 8}}, "instance_type", "launcher.instance_type=ml.g5.48xlarge"),
        ({"walltime": "1 day"}, "walltime", "'1 day' is no time"),
        ({"walltime": 700}, "walltime", "28 days"),
        ({"walltime": 0}, "walltime", "0 is no time at all"),
        ({"walltime": None}, "walltime", "None is no time"),
        ({"max_wait": 48}, "max_wait", "only spot jobs wait"),
        ({"spot": True, "walltime": 24, "max_wait": 2}, "max_wait", "walltime is 86400 s already"),
        ({"spot": True, "max_wait": 24 * 31}, "max_wait", "more than 30 days"),
        ({"spot": True, "keep_alive": 600}, "keep_alive", "cannot be kept warm"),
        ({"keep_alive": 30000}, "keep_alive", "less than or equal to 21600"),
        ({"retries": 31}, "retries", "less than or equal to 30"),
        ({"volume_gb": 0}, "volume_gb", "greater than"),
        ({"subnets": ["subnet-1"]}, "security_groups", "launcher.subnets is set"),
        ({"security_groups": ["sg-1"]}, "subnets", "launcher.security_groups is set"),
        ({"inputs": {"a": "/data/x"}}, "inputs.a", "aws s3 sync /data/x s3://"),
        ({"inputs": {"a": {"mode": "File"}}}, "inputs.a", "nothing is not where"),
        ({"inputs": {"bundle": "s3://b/x"}}, "inputs.bundle", "channel of the code"),
        ({"inputs": {"a-b": "s3://b/x"}}, "inputs.a-b", "no name of an input"),
        ({"inputs": {"a": "efs://x/y"}}, "inputs.a", "names no file system"),
        ({"inputs": {"a": "efs://fs-01234567/y"}}, "inputs.a", "launcher.subnets=[subnet-...]"),
        (
            {"inputs": {"a": {"path": "s3://b/x", "mode": "FastFil"}}},
            "inputs.a.mode",
            "no mode 'FastFil' | did you mean FastFile? one of File, FastFile, Pipe",
        ),
        ({"inputs": {"a": {"path": "s3://b/x", "mode": "ro"}}}, "inputs.a.mode", "one of File"),
        ({"inputs": {"a": {"path": "s3://b", "mod": 1}}}, "inputs.a.mod", "did you mean mode?"),
        ({"inputs": {f"i{n}": "s3://b/x" for n in range(20)}}, "inputs", "takes 19"),
    ],
)  # fmt: skip
def test_refusals(changes, path, text) -> None:
    assert text in refusals(**changes).get(path, "nothing was refused"), refusals(**changes)


def test_a_type_that_only_boto3_knows_is_let_through() -> None:
    assert "ml.trn1.32xlarge" not in instances()
    assert refusals(instance_type="ml.trn1.32xlarge") == {}


def test_the_file_of_instance_types_holds_names_that_exist() -> None:
    from botocore.session import Session

    enum = Session().get_service_model("sagemaker").shape_for("TrainingInstanceType").enum
    assert set(instances()) <= set(enum)
    families = {"ml.p3.", "ml.p4d.", "ml.p5.", "ml.g4dn.", "ml.g5.", "ml.g6."}
    missing = {n for n in enum if any(n.startswith(f) for f in families)} - set(instances())
    assert missing == set()


def test_devices_are_counted_by_the_type() -> None:
    assert SageMakerLauncher.devices({"instance_type": "ml.p4d.24xlarge"}) == (8, "gpu")
    assert SageMakerLauncher.devices({"instance_type": "ml.m5.large"}) == (1, "cpu")
    assert SageMakerLauncher.devices({"instance_type": "ml.trn1.32xlarge"}) is None


def test_what_is_allowed_and_hardly_meant_is_noted() -> None:
    few = SageMakerLauncher(**NODE).request(spec(resources=Resources(1, 2, "gpu")))
    assert [*few.notes()] == ["ml.g5.12xlarge has 4 GPUs, and 2 of them are used"]
    slow = SageMakerLauncher(**{**NODE, "instance_type": "ml.g5.xlarge"})
    (note,) = slow.request(spec(resources=Resources(4, 1, "gpu"))).notes()
    assert "no EFA" in note and "one host would do: ml.g5.12xlarge (4 GPUs)" in note
    assert not [*SageMakerLauncher(**NODE).request(spec()).notes()]


def test_the_command_line_refuses(command, tmp_path) -> None:
    said = command("launcher=sagemaker", "launcher.instance_type=ml.g5.12xlarg")
    assert said.code == 2
    for text in ("launcher.role: missing", "did you mean ml.g5.12xlarge?"):
        assert text in said.err
    assert os.listdir(tmp_path) == []


def test_the_command_line_shows(command, without_stage_2, tmp_path) -> None:
    given = [f"launcher.{key}={value}" for key, value in NODE.items()]
    said = command("launcher=sagemaker", *given, "dry_run=true", "trainer.num_nodes=2")
    assert said.code == 0, said
    assert "resources  2 x 4 gpu" in said.out  # trainer.devices=auto
    assert "TrainingJobName: default-" in said.out
    assert os.listdir(tmp_path) == []
