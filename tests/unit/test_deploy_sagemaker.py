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

from distdl.launchers.sagemaker.sagemaker_endpoints import HostedEndpoint
from tests.aws import REGION, aws, moto
from tests.served import model_folder

__all__ = ["aws", "moto"]
pytest.importorskip("moto.server", reason="not installed: pip install 'distdl[dev]'")
SETTINGS = (
    *("deploy.name=flowers", "launcher.bucket=my-bucket", f"launcher.region={REGION}"),
    "launcher.role=arn:aws:iam::123456789012:role/serve",
    "deploy.image=123456789012.dkr.ecr.eu-west-1.amazonaws.com/serve:1",
)
TRANSFORM = (
    "--batch",
    "deploy.input=s3://my-bucket/images",
    "deploy.output=s3://my-bucket/answers",
)


class Service:
    """What moto lacks: UpdateEndpoint, and variants that answer by their model in S3."""

    def __init__(self) -> None:
        self.weights: dict[str, float] = {}  # of the variants, at the last request
        self.broken = ""  # "creation": new variants do not start; "answers": they answer wrongly

    def update_endpoint(self, response: Any) -> Any:
        from moto.core.responses import ActionResult

        backend, name = response.sagemaker_backend, response._get_param("EndpointName")
        endpoint = backend.endpoints[name]
        wanted = response._get_param("EndpointConfigName")
        config = backend.endpoint_configs[wanted]
        if self.broken == "creation":  # SageMaker returns to the former config
            endpoint.failure_reason = "the container did not pass the ping health check"
        else:
            endpoint.endpoint_config_name = wanted
            variants = endpoint._process_production_variants(config.production_variants)
            endpoint.production_variants = variants
        return ActionResult({"EndpointArn": endpoint.arn})

    def invoke(self, response: Any) -> tuple[int, dict[str, str], str]:
        from moto.s3.models import s3_backends
        from moto.sagemaker.models import sagemaker_backends

        from distdl.serving.requests import parse
        from distdl.serving.scorer import Scorer

        name = response.headers["X-Amzn-SageMaker-Target-Variant"]
        endpoint = sagemaker_backends[response.current_account][REGION].endpoints["flowers"]
        variants = endpoint.production_variants
        self.weights = {v["VariantName"]: v.get("CurrentWeight", 0) for v in variants}
        assert name in self.weights
        model = sagemaker_backends[response.current_account][REGION]._models[name]
        uri = model.primary_container["ModelDataUrl"]
        bucket, _, key = uri.removeprefix("s3://").partition("/")
        stored = s3_backends[response.current_account]["aws"].get_object(bucket, key).value
        body = response.body
        images, top_k = parse(
            body if isinstance(body, bytes) else body.encode(), "application/json"
        )
        folder = self.folder / name
        with tarfile.open(fileobj=io.BytesIO(stored)) as tar:
            tar.extractall(folder, filter="data")
        answers = Scorer(folder).score(images, top_k)
        if self.broken == "answers":
            answers = [{**each, "class": "blue"} for each in answers]
        return 200, {"Content-Type": "application/json"}, json.dumps({"predictions": answers})

    folder = Path()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [model_folder(folder / card, card) for card in ("first", "second", "third")]


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Service:
    from moto.sagemaker.responses import SageMakerResponse
    from moto.sagemakerruntime.responses import SageMakerRuntimeResponse

    service = Service()
    service.folder = tmp_path / "opt"
    update = lambda response: service.update_endpoint(response)  # noqa: E731
    invoke = lambda response: service.invoke(response)  # noqa: E731
    monkeypatch.setattr(SageMakerResponse, "update_endpoint", update, raising=False)
    monkeypatch.setattr(SageMakerRuntimeResponse, "invoke_endpoint", invoke)
    return service


@pytest.fixture
def deploy(command, service: Service, aws) -> Callable[..., Any]:
    def run(*words: Any, code: int = 0) -> Any:
        settings = SETTINGS if isinstance(words[0], Path) else SETTINGS[:1] + SETTINGS[2:3]
        output = command("deploy", "sagemaker", *map(str, words), *settings)
        assert output.code == code, output
        return output

    return run


def weights(aws: Any) -> dict[str, float]:
    described = aws("sagemaker").describe_endpoint(EndpointName="flowers")
    return {v["VariantName"]: v.get("CurrentWeight", 0) for v in described["ProductionVariants"]}


def left(aws: Any) -> tuple[int, int, int]:
    """How many endpoints, configs and models there are."""
    client = aws("sagemaker")
    configs = client.list_endpoint_configs()["EndpointConfigs"]
    return (
        len(client.list_endpoints()["Endpoints"]),
        len(configs),
        len(client.list_models()["Models"]),
    )


def test_the_order_of_models(aws, models, service, deploy) -> None:
    names: list[str] = []
    for model in models:
        output = deploy(model)
        (name,) = weights(aws).keys() - {*names}
        assert service.weights[name] == (0.0 if names else 1.0), "it has traffic when it is tested"
        names.append(name)
        assert output.out.startswith(f"flowers: {name} answers\n")
        assert weights(aws) == {**dict.fromkeys(names[-2:-1], 0.0), name: 1.0}
    _, second, third = names
    assert left(aws) == (1, 1, 2)
    assert deploy(models[2]).out.startswith(f"flowers: {third} answers already\n")
    output = deploy("deploy.rollback=true")
    assert output.out == f"flowers: {second} answers, and {third} no more\n"
    assert weights(aws) == {second: 1.0, third: 0.0}
    deploy(models[0], "deploy.keep=0")
    assert list(weights(aws).values()) == [1.0] and left(aws) == (1, 1, 1)
    assert "has no other models" in deploy("deploy.rollback=true", code=2).err
    assert "add --yes" in deploy("--delete", code=2).err
    assert deploy("--delete", "--yes").out.startswith("flowers was deleted")
    assert left(aws) == (0, 0, 0)
    assert "there is no endpoint flowers" in deploy("--delete", "--yes", code=2).err


@pytest.mark.parametrize(
    ("broken", "said"),
    [("answers", "the answer was blue"), ("creation", "did not pass the ping health check")],
)
def test_a_model_that_fails_is_removed_and_no_traffic_moves(
    broken, said, aws, models, service, deploy
) -> None:
    for model in models[:2]:
        deploy(model)
    before = weights(aws)
    service.broken = broken
    failed = deploy(models[2], code=1)
    assert said in failed.err and "1 problem, traffic stays where it was" in failed.err
    assert "was removed" in failed.err
    assert weights(aws) == before and left(aws) == (1, 1, 2)


def test_a_first_model_that_answers_wrongly_leaves_nothing(aws, models, service, deploy) -> None:
    service.broken = "answers"
    deploy(models[0], code=1)
    assert left(aws) == (0, 0, 0)


def test_an_interrupted_command_leaves_what_was(aws, models, deploy, monkeypatch) -> None:
    deploy(models[0])
    before = weights(aws)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(HostedEndpoint, "ask", interrupt)
    assert "was removed" in deploy(models[1], code=130).err
    assert weights(aws) == before and left(aws) == (1, 1, 1)


def test_an_endpoint_of_somebody_else_is_left_alone(aws, models, deploy) -> None:
    deploy(models[0])
    client = aws("sagemaker")
    arn = client.describe_endpoint(EndpointName="flowers")["EndpointArn"]
    client.delete_tags(ResourceArn=arn, TagKeys=["distdl"])
    for words in ([models[1]], ["--delete", "--yes"], ["deploy.rollback=true"]):
        assert "that distdl did not create" in deploy(*words, code=2).err
    assert left(aws) == (1, 1, 1)


def test_a_transform_job(aws, models, deploy) -> None:
    output = deploy(models[0], *TRANSFORM).out
    name = output.split()[1].rstrip(",")
    job = aws("sagemaker").describe_transform_job(TransformJobName=name)
    source = job["TransformInput"]["DataSource"]["S3DataSource"]["S3Uri"]
    assert source == "s3://my-bucket/images" and job["ModelName"] in name
    assert f"--transform-job-name {name}\n" in output


@pytest.mark.parametrize("words", [(), TRANSFORM])
def test_a_dry_run_contacts_nothing(words, models, command) -> None:
    shown = command("deploy", "sagemaker", str(models[0]), "dry_run=true", *SETTINGS, *words)
    assert shown.code == 0, shown
    for part in ("# create_model:", "model.pt2", "not known to distdl", "AWS was not asked"):
        assert part in shown.out
