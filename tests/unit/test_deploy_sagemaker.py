"""`distdl deploy sagemaker` with the real boto3, over http to moto; the uploaded model answers.

Not seen here: AWS itself, its images and its load balancer.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.aws import REGION, aws, moto
from tests.served import model_folder

__all__ = ["aws", "moto"]
pytest.importorskip("moto.server", reason="not installed: pip install 'distdl[dev]'")
SETTINGS = (
    *("--image", "123456789012.dkr.ecr.eu-west-1.amazonaws.com/serve:1"),
    *("launcher.role=arn:aws:iam::123456789012:role/serve", "launcher.bucket=my-bucket"),
)
TRANSFORM = ("--batch", "--input", "s3://my-bucket/images", "--output", "s3://my-bucket/answers")


class Service:
    """What moto lacks: UpdateEndpoint, and endpoints that answer by their model in S3."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[tuple[str, str]] = []  # the endpoint, and whose traffic was where then
        self.broken = ""  # "answers": they are wrong; "update": new instances do not start

    def update_endpoint(self, response: Any) -> Any:
        from moto.core.responses import ActionResult

        endpoint = response.sagemaker_backend.endpoints[response._get_param("EndpointName")]
        if self.broken == "update":  # SageMaker goes back to the former config
            endpoint.failure_reason = "did not pass the ping health check"
        else:
            endpoint.endpoint_config_name = response._get_param("EndpointConfigName")
        return ActionResult({"EndpointArn": endpoint.arn})

    def invoke(self, response: Any) -> tuple[int, dict[str, str], str]:
        from moto.s3.models import s3_backends
        from moto.sagemaker.models import sagemaker_backends

        from distdl.serving.requests import parse
        from distdl.serving.scorer import Scorer

        name = response.path.split("/")[2]
        backend = sagemaker_backends[response.current_account][REGION]
        serving = backend.endpoints.get("flowers")
        self.asked.append((name, serving.endpoint_config_name if serving else ""))
        model = backend._models[backend.endpoints[name].endpoint_config_name]
        bucket, _, key = model.primary_container["ModelDataUrl"][5:].partition("/")
        stored = s3_backends[response.current_account]["aws"].get_object(bucket, key).value
        with tarfile.open(fileobj=io.BytesIO(stored)) as tar:
            tar.extractall(self.folder / name, filter="data")
        body = response.body if isinstance(response.body, bytes) else response.body.encode()
        answers = Scorer(self.folder / name).score(*parse(body, "application/json"))
        if self.broken == "answers":
            answers = [{**each, "class": "blue"} for each in answers]
        return 200, {"Content-Type": "application/json"}, json.dumps({"predictions": answers})


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [model_folder(folder / card, card) for card in ("first", "second", "third")]


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Service:
    from moto.sagemaker.responses import SageMakerResponse
    from moto.sagemakerruntime.responses import SageMakerRuntimeResponse

    service = Service(tmp_path / "opt")
    update = lambda response: service.update_endpoint(response)  # noqa: E731
    invoke = lambda response: service.invoke(response)  # noqa: E731
    monkeypatch.setattr(SageMakerResponse, "update_endpoint", update, raising=False)
    monkeypatch.setattr(SageMakerRuntimeResponse, "invoke_endpoint", invoke)
    return service


@pytest.fixture
def deploy(command, service: Service, aws) -> Callable[..., Any]:
    def run(*words: Any, code: int = 0) -> Any:
        settings = (*(SETTINGS if isinstance(words[0], Path) else ()), f"launcher.region={REGION}")
        output = command("deploy", "sagemaker", *map(str, words), "--name", "flowers", *settings)
        assert output.code == code, output
        return output

    return run


def serving(aws: Any) -> str:
    return str(aws("sagemaker").describe_endpoint(EndpointName="flowers")["EndpointConfigName"])


def left(aws: Any) -> list[int]:
    """How many endpoints, configs and models there are."""
    client = aws("sagemaker")
    configs = client.list_endpoint_configs()["EndpointConfigs"]
    listed = client.list_endpoints()["Endpoints"], configs, client.list_models()["Models"]
    return [*map(len, listed)]


def test_the_order_of_models(aws, models, service, deploy) -> None:
    names = [""]
    for model in models:
        output = deploy(model)
        assert service.asked[-1] == (f"{serving(aws)}-test", names[-1]), "tested without traffic"
        names.append(serving(aws))
        assert output.out == f"{names[-1]} answers\n"
    assert left(aws) == [1, 2, 2] and len(service.asked) == 3
    assert deploy(models[2]).out == f"{names[3]} answers\n" and len(service.asked) == 3
    assert deploy("--rollback").out == f"{names[2]} answers\n" and serving(aws) == names[2]
    assert deploy("--delete").out == "flowers was deleted\n" and left(aws) == [0, 0, 0]
    assert "flowers has no other models" in deploy("--rollback", code=2).err


@pytest.mark.parametrize(
    ("broken", "expected", "remain"),
    [
        ("answers", 'the answer was {"predictions": [{"class": "blue"', [1, 1, 1]),
        ("update", "did not pass the ping health check", [1, 2, 2]),
    ],
)
def test_no_traffic_moves_to_a_model_that_fails(
    broken, expected, remain, aws, models, service, deploy
) -> None:
    deploy(models[0])
    before, service.broken = serving(aws), broken
    failed = deploy(models[1], code=1)
    assert expected in failed.err and "1 problem, traffic stays where it was" in failed.err
    assert serving(aws) == before and left(aws) == remain


def test_an_interrupted_command_leaves_nothing(aws, models, deploy, monkeypatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("distdl.launchers.deploying.check", interrupt)
    deploy(models[0], code=130)
    assert left(aws) == [0, 0, 0]


def test_an_endpoint_of_somebody_else_is_left_alone(aws, models, deploy) -> None:
    deploy(models[0])
    client = aws("sagemaker")
    config = client.describe_endpoint_config(EndpointConfigName=serving(aws))
    for name in ("flowers-v2", "theirs"):
        variants = config["ProductionVariants"]
        client.create_endpoint_config(EndpointConfigName=name, ProductionVariants=variants)
    deploy(models[1])  # and flowers-v2, which only has a similar name, is not in the way
    client.update_endpoint(EndpointName="flowers", EndpointConfigName="theirs")
    for words in ([models[1]], ["--delete"], ["--rollback"]):
        assert "theirs, which distdl did not create" in deploy(*words, code=2).err
    assert serving(aws) == "theirs"


def test_a_transform_job(aws, models, deploy) -> None:
    assert "has started, and writes to --output" in deploy(models[0], *TRANSFORM).out
    deploy(models[0], *TRANSFORM)  # SageMaker never frees the name of a job
    assert len(aws("sagemaker").list_transform_jobs()["TransformJobSummaries"]) == 2
    job = aws("sagemaker").list_transform_jobs()["TransformJobSummaries"][0]
    job = aws("sagemaker").describe_transform_job(TransformJobName=job["TransformJobName"])
    source = job["TransformInput"]["DataSource"]["S3DataSource"]["S3Uri"]
    assert source == "s3://my-bucket/images"


def test_a_transform_job_that_is_refused_leaves_no_model(aws, models, deploy, monkeypatch) -> None:
    from moto.sagemaker.exceptions import ValidationError
    from moto.sagemaker.responses import SageMakerResponse

    def refuse(_: Any) -> None:
        raise ValidationError("the quota is used up")

    monkeypatch.setattr(SageMakerResponse, "create_transform_job", refuse)
    assert "the quota is used up" in deploy(models[0], *TRANSFORM, code=1).err
    assert left(aws) == [0, 0, 0]


@pytest.mark.parametrize("words", [(), TRANSFORM])
def test_a_dry_run_contacts_nothing(words, models, command) -> None:
    words = ("--name", "flowers", "dry_run=true", *SETTINGS, *words)
    shown = command("deploy", "sagemaker", str(models[0]), *words)
    assert shown.code == 0, shown
    for part in ("# create_model\n", "  model.pt2\n", "not known to distdl", "nothing was sent"):
        assert part in shown.out
