"""launcher=sagemaker: what is sent, and what is refused before.

Request bodies are checked by botocore's Stubber against the service's own model. What happens to
them on AWS and in the container: test_sagemaker_jobs.py, and for real tests/cluster.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

import pytest

from distdl.job import Resources
from distdl.launchers.sagemaker import SageMakerLauncher
from distdl.launchers.sagemaker.sagemaker_request import SageMakerRequest
from distdl.launchers.sagemaker.sagemaker_settings import instances
from distdl.util.errors import UserError
from tests.conftest import ROOT, check_golden
from tests.unit import sagemaker_account as account
from tests.unit.sagemaker_account import EVERYTHING, NODE, REGION, spec

aws, moto, run = account.aws, account.moto, account.run  # fixtures

ONE_GPU = {"num_nodes": 1, "devices": 1, "accelerator": "gpu"}


@pytest.mark.parametrize("name", ["sagemaker", "sagemaker_everything"])
def test_the_request_as_printed_and_as_the_services_own_model_takes_it(
    name: str, run, aws, monkeypatch, pytestconfig: pytest.Config
) -> None:
    """Stubber checks names and types of all members; patterns are checked here."""
    import boto3
    from botocore.stub import Stubber

    node = EVERYTHING if name.endswith("everything") else NODE
    names = tuple(node.get("forward_env", ()))
    monkeypatch.setenv("WANDB_API_KEY", "canary-7c1")
    launcher = SageMakerLauncher(**node)
    vars(launcher)["aws"] = aws
    text = launcher.request(spec(forward_env=names)).render() + "\n"
    check_golden(pytestconfig, ROOT / f"tests/golden/launchers/{name}.txt", text)
    assert text == launcher.request(spec(forward_env=names)).render() + "\n"

    request = launcher.request(spec(run, forward_env=names))
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
    shape = client.meta.service_model.operation_model("CreateTrainingJob").input_shape
    assert matched(shape, request.body()) > 10


def matched(shape: Any, value: Any) -> int:
    """Checks every string against what the model states; returns how many had a pattern."""
    if shape.type_name == "structure":
        return sum(matched(shape.members[key], item) for key, item in value.items())
    if shape.type_name == "list":
        return sum(matched(shape.member, item) for item in value)
    if shape.type_name == "map":
        return sum(matched(shape.key, k) + matched(shape.value, v) for k, v in value.items())
    if shape.type_name != "string":
        return 0
    limit, pattern = shape.metadata.get("max"), shape.metadata.get("pattern")
    assert limit is None or len(value) <= limit, (shape.name, value)
    assert not shape.enum or value in shape.enum, (shape.name, value)
    if not pattern or r"\p" in pattern:  # Python knows no \p{L}
        return 0
    assert re.fullmatch(pattern, value), (shape.name, value)
    return 1


@pytest.mark.parametrize("run_id", ["a/b", "x" * 80 + "/" + "y" * 80, "default/2026-11-21_1--2.3"])
def test_job_names_obey_the_rules_and_differ(run_id: str) -> None:
    launcher, other = SageMakerLauncher(**NODE), SageMakerLauncher(**{**NODE, "bucket": "other"})
    tries = [(launcher, 1, 0), (launcher, 2, 0), (launcher, 1, 1), (other, 1, 0)]
    names = [SageMakerRequest(spec(name=run_id, attempt=n), it, m).name for it, n, m in tries]
    assert all(re.fullmatch("[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}", name) for name in names), names
    assert len(set(names)) == 4


def test_a_variable_that_is_too_long_is_refused() -> None:
    with pytest.raises(UserError, match="LONG: 513 characters"):
        SageMakerLauncher(**NODE, env={"LONG": "x" * 513}).request(spec())


def refusals(**changes: Any) -> dict[str, str]:
    context = {**ONE_GPU, **changes.pop("context", {})}
    found = list(SageMakerLauncher.check({**NODE, **changes}, context))
    return {problem.path: f"{problem.what} | {problem.remedy}" for problem in found}


def test_what_is_right_is_not_refused() -> None:
    assert refusals() == refusals(**EVERYTHING) == {}
    assert refusals(instance_type="ml.m5.large", context={"accelerator": "cpu"}) == {}
    assert "ml.trn1.32xlarge" not in instances()
    assert refusals(instance_type="ml.trn1.32xlarge") == {}, "boto3 knows it"


@pytest.mark.parametrize(
    ("changes", "path", "text"),
    [
        *(({key: None}, key, "missing | launcher.") for key in ("image", "instance_type")),
        *(({key: None}, key, "missing | launcher.") for key in ("role", "bucket")),
        ({"role": "train"}, "role", "not the ARN"),
        ({"bucket": "s3://my-bucket/x"}, "bucket", "launcher.bucket=my-bucket"),
        ({"instance_type": "ml.g5.12xlarg"}, "instance_type", "did you mean ml.g5.12xlarge?"),
        ({"instance_type": "p4d.24xlarge"}, "instance_type", "did you mean ml.p4d.24xlarge?"),
        ({"instance_type": "ml.m5.large"}, "instance_type", "has no GPU"),
        ({"context": {"devices": 8}}, "instance_type", "has 4 A10G, and trainer.devices=8 | trai"),
        ({"context": {"devices": 8}}, "instance_type", "launcher.instance_type=ml.g5.48xlarge"),
        ({"walltime": 700}, "walltime", "28 days"),
        ({"walltime": None}, "walltime", "None is not a time"),
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
        ({"inputs": {"a-b": "s3://b/x"}}, "inputs.a-b", "not an input name"),
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
)
def test_refusals(changes, path, text) -> None:
    found = refusals(**changes)
    assert list(found) == [path] and text in found[path]


def test_the_file_of_instance_types_holds_names_that_exist() -> None:
    from botocore.session import Session

    enum = Session().get_service_model("sagemaker").shape_for("TrainingInstanceType").enum
    assert set(instances()) <= set(enum)
    families = ("ml.p3.", "ml.p4d.", "ml.p5.", "ml.g4dn.", "ml.g5.", "ml.g6.")
    assert {name for name in enum if name.startswith(families)} <= set(instances())


def test_devices_are_counted_by_the_type_and_waste_is_noted() -> None:
    assert SageMakerLauncher.devices({"instance_type": "ml.p4d.24xlarge"}) == (8, "gpu")
    assert SageMakerLauncher.devices({"instance_type": "ml.m5.large"}) == (1, "cpu")
    assert SageMakerLauncher.devices({"instance_type": "ml.trn1.32xlarge"}) is None
    few = SageMakerLauncher(**NODE).request(spec(resources=Resources(1, 2, "gpu")))
    assert [*few.notes()] == ["ml.g5.12xlarge has 4 GPUs, and 2 of them are used"]
    slow = SageMakerLauncher(**{**NODE, "instance_type": "ml.g5.xlarge"})
    (note,) = slow.request(spec(resources=Resources(4, 1, "gpu"))).notes()
    assert "no EFA" in note and "one host would do: ml.g5.12xlarge (4 GPUs)" in note
    assert not [*SageMakerLauncher(**NODE).request(spec()).notes()]


def test_the_command_line_shows(command, without_stage_2, tmp_path) -> None:
    arguments = [f"launcher.{key}={value}" for key, value in NODE.items()]
    said = command("launcher=sagemaker", *arguments, "dry_run=true", "trainer.num_nodes=2")
    assert said.code == 0, said
    assert "resources  2 x 4 gpu" in said.out  # trainer.devices=auto
    assert "TrainingJobName: default-" in said.out
    assert os.listdir(tmp_path) == []
