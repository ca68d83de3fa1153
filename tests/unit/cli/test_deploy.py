"""`distdl deploy`: what is refused before anything is created; SageMaker with the real boto3, over
http to moto, where the uploaded model answers (Azure: tests/cluster/test_azureml.py).

Not seen here: AWS itself, its images and its load balancer.
"""

import io
import json
import sys
import tarfile
from pathlib import Path

import pytest

from distdl.launchers.deploying import check
from distdl.util.errors import NotDeployed
from tests.aws import REGION, aws, moto
from tests.served import detector_folder, model_folder

__all__ = ["aws", "moto"]
MODEL = "MODEL --name flowers"
ROLE = "launcher.role=arn:aws:iam::123456789012:role/serve"
BUCKET = "launcher.bucket=my-bucket"
IMAGE = "--image 123456789012.dkr.ecr.eu-west-1.amazonaws.com/s:1"
AWS = f"sagemaker {MODEL} {ROLE} {BUCKET} {IMAGE}"

# Words behind `deploy`, and a part of the message. MODEL is a model folder.
REFUSED = [
    (f"azureml MODEL --name {'a' * 24}", "is not a name for an endpoint"),
    (f"azureml {MODEL} --instances 0", "--instances: 0 is less than 1"),
    ("azureml --name flowers", "RUN: missing"),
    ("azureml lr=1 --name flowers", "lr=1: is not a run"),  # of a sweep
    (f"azureml {MODEL} dryrun=true", "did you mean dry_run?"),
    (f"azureml {MODEL} launcher.worspace=x", "launcher.worspace"),
    ("azureml --name flowers --rollback dry_run=true", "is not a setting of deploy"),
    (f"azureml {MODEL} --instance-type big", "--instance-type: big is not a VM size"),
    (f"azureml {MODEL} --batch", "launcher.compute=NAME"),
    (f"azureml {MODEL}", "launcher.workspace: missing"),
    (f"sagemaker {MODEL} {BUCKET} --image x", "launcher.role=arn:aws:iam::ACCOUNT"),
    (f"sagemaker {MODEL} {ROLE} {BUCKET}", "endpoint/Dockerfile builds one"),
    (f"{AWS} --instance-type ml.m5.larg", "did you mean ml.m5.large?"),
    (f"{AWS}{'x' * 255}", " characters; SageMaker allows at most 255"),
    (f"{AWS} launcher.subnets=[a_b] launcher.security_groups=[sg-1]", "launcher.subnets: "),
    (f"{AWS} --batch --output s3://b/o", "--input: must be in S3"),
    (f"{AWS} --batch --delete".replace("MODEL ", ""), "ends by itself"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("folders")
    (root / "lr=1").mkdir()
    model_folder(root / "MODEL")
    return root


@pytest.mark.parametrize(("words", "expected"), REFUSED)
def test_refused_before_anything_is_created(words, expected, folders, command, monkeypatch):
    monkeypatch.chdir(folders)
    output = command("deploy", *words.split())
    assert output.code == 2, output
    assert expected in output.err, output
    assert "Traceback" not in output.err, output


@pytest.mark.parametrize(
    ("words", "paths"),
    [
        (f"sagemaker {MODEL}", ["launcher.role", "launcher.bucket", "--image"]),
        (
            f"sagemaker {MODEL} {ROLE} --batch --instance-type big",
            ["launcher.bucket", "--image", "--instance-type", "--input", "--output"],
        ),
        ("azureml --name a --instances 0", ["--name", "--instances", "RUN"]),
    ],
)
def test_all_that_is_missing_is_named_at_once(words, paths, folders, command, monkeypatch):
    monkeypatch.chdir(folders)
    said = command("deploy", *words.split(), "--json")
    problems = json.loads(said.out)["problems"]
    assert [each["path"] for each in problems] == paths


def test_an_answer_is_compared():
    good = {"class": "red", "probability": 0.9}
    check(json.dumps({"predictions": [{**good, "probability": 0.9005}]}), good)
    for other in ({"probability": 0.902}, {"probability": float("nan")}, {"class": "green"}, None):
        predictions = [] if other is None else [{**good, **other}]
        with pytest.raises(NotDeployed):
            check(json.dumps({"predictions": predictions}), good)


# On AWS

SETTINGS = (*IMAGE.split(), ROLE, BUCKET)
AZURE = (
    "launcher.subscription=11111111-1111-1111-1111-111111111111",
    "launcher.resource_group=group",
    "launcher.workspace=space",
)
TRANSFORM = ("--batch", "--input", "s3://my-bucket/images", "--output", "s3://my-bucket/answers")


class Service:
    """What moto lacks: UpdateEndpoint, and endpoints that answer by their model in S3."""

    def __init__(self, folder):
        self.folder = folder
        self.starts = True  # whether new instances start
        self.asked = []  # the endpoint, and whose traffic was where then

    def update_endpoint(self, response):
        from moto.core.responses import ActionResult

        endpoint = response.sagemaker_backend.endpoints[response._get_param("EndpointName")]
        if self.starts:
            endpoint.endpoint_config_name = response._get_param("EndpointConfigName")
        else:  # SageMaker goes back to the former config
            endpoint.failure_reason = "did not pass the ping health check"
        return ActionResult({"EndpointArn": endpoint.arn})

    def invoke(self, response):
        from moto.s3.models import s3_backends
        from moto.sagemaker.models import sagemaker_backends

        from distdl.tools.serving.requests import parse
        from distdl.tools.serving.scorer import Scorer

        name = response.path.split("/")[2]
        backend = sagemaker_backends[response.current_account][REGION]
        serving = backend.endpoints.get("flowers")
        self.asked.append((name, serving.endpoint_config_name if serving else ""))
        model = backend._models[backend.endpoints[name].endpoint_config_name]
        bucket, _, key = model.primary_container["ModelDataUrl"][5:].partition("/")
        stored = s3_backends[response.current_account]["aws"].get_object(bucket, key).value
        with tarfile.open(fileobj=io.BytesIO(stored)) as tar:
            tar.extractall(self.folder / name)  # our own; Python 3.11.2 knows no filter
        body = response.body if isinstance(response.body, bytes) else response.body.encode()
        answers = Scorer(self.folder / name).score(*parse(body, "application/json"))
        return 200, {"Content-Type": "application/json"}, json.dumps({"predictions": answers})


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return [model_folder(folder / card, card) for card in ("first", "second", "third")]


@pytest.fixture
def service(monkeypatch, tmp_path):
    from moto.sagemaker.responses import SageMakerResponse
    from moto.sagemakerruntime.responses import SageMakerRuntimeResponse

    service = Service(tmp_path / "opt")
    update = lambda response: service.update_endpoint(response)  # noqa: E731
    invoke = lambda response: service.invoke(response)  # noqa: E731
    monkeypatch.setattr(SageMakerResponse, "update_endpoint", update, raising=False)
    monkeypatch.setattr(SageMakerRuntimeResponse, "invoke_endpoint", invoke)
    return service


@pytest.fixture
def deploy(command, service, aws):
    def run(*words, code=0):
        settings = (*(SETTINGS if isinstance(words[0], Path) else ()), f"launcher.region={REGION}")
        output = command("deploy", "sagemaker", *map(str, words), "--name", "flowers", *settings)
        assert output.code == code, output
        return output

    return run


def serving(aws):
    return aws("sagemaker").describe_endpoint(EndpointName="flowers")["EndpointConfigName"]


def left(aws):
    """How many endpoints, configs and models there are."""
    client = aws("sagemaker")
    configs = client.list_endpoint_configs()["EndpointConfigs"]
    listed = client.list_endpoints()["Endpoints"], configs, client.list_models()["Models"]
    return [*map(len, listed)]


def test_the_order_of_models(aws, models, service, deploy):
    names = [""]
    for model in models:
        output = deploy(model)
        assert service.asked[-1] == (f"{serving(aws)}-test", names[-1]), "tested without traffic"
        names.append(serving(aws))
        assert output.out == f"{names[-1]} answers\n"
    assert left(aws) == [1, 2, 2]
    assert len(service.asked) == 3
    assert deploy(models[2]).out == f"{names[3]} answers\n"
    assert len(service.asked) == 3
    assert deploy("--rollback").out == f"{names[2]} answers\n"
    assert serving(aws) == names[2]
    assert deploy("--delete").out == "flowers was deleted\n"
    assert left(aws) == [0, 0, 0]
    assert "flowers has no other models" in deploy("--rollback", code=2).err


def test_what_is_left_alone(aws, models, service, deploy):
    """The traffic if new instances fail; what others have, also by a similar name."""
    deploy(models[0])
    before = serving(aws)
    service.starts = False
    failed = deploy(models[1], code=1).err
    assert "did not pass the ping" in failed
    assert "1 problem, traffic stays where it was" in failed
    assert serving(aws) == before
    assert left(aws) == [1, 2, 2]
    service.starts = True
    client = aws("sagemaker")
    variants = client.describe_endpoint_config(EndpointConfigName=before)["ProductionVariants"]
    for name in ("flowers-v2", "theirs"):
        client.create_endpoint_config(EndpointConfigName=name, ProductionVariants=variants)
    deploy(models[1])  # and flowers-v2 is not in the way
    client.update_endpoint(EndpointName="flowers", EndpointConfigName="theirs")
    for words in ([models[1]], ["--delete"], ["--rollback"]):
        assert "theirs, which distdl did not create" in deploy(*words, code=2).err
    assert serving(aws) == "theirs"


def test_a_transform_job_and_one_that_is_refused(aws, models, deploy, monkeypatch):
    from moto.sagemaker.exceptions import ValidationError
    from moto.sagemaker.responses import SageMakerResponse

    def refuse(_):
        raise ValidationError("the quota is used up")

    with monkeypatch.context() as patch:
        patch.setattr(SageMakerResponse, "create_transform_job", refuse)
        assert "the quota is used up" in deploy(models[0], *TRANSFORM, code=1).err
    assert left(aws) == [0, 0, 0]
    assert "has started, and writes to --output" in deploy(models[0], *TRANSFORM).out
    deploy(models[0], *TRANSFORM)  # SageMaker never frees the name of a job
    one, _ = aws("sagemaker").list_transform_jobs()["TransformJobSummaries"]
    job = aws("sagemaker").describe_transform_job(TransformJobName=one["TransformJobName"])
    source = job["TransformInput"]["DataSource"]["S3DataSource"]["S3Uri"]
    assert source == "s3://my-bucket/images"


@pytest.mark.parametrize("words", [(), TRANSFORM])
def test_a_dry_run_contacts_nothing(words, models, command):
    words = ("--name", "flowers", "dry_run=true", *SETTINGS, *words)
    shown = command("deploy", "sagemaker", str(models[0]), *words)
    assert shown.code == 0, shown
    for part in ("# create_model\n", "  model.pt2\n", "not known to distdl", "nothing was sent"):
        assert part in shown.out


# Of a detector: weights and code, which run here and there.


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package, and a process that forgets its code behind the test."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield detector_folder(tmp_path / "package")
    for name in [name for name in sys.modules if name.partition(".")[0] == "distdl_scoring"]:
        del sys.modules[name]


@pytest.mark.parametrize("platform", ["azureml", "sagemaker"])
def test_a_dry_run_of_a_detector(platform, package, command):
    settings = {"azureml": AZURE, "sagemaker": SETTINGS}[platform]
    words = ("deploy", platform, str(package), "--name", "flowers", "dry_run=true", *settings)
    refused = command(*words)
    assert refused.code == 2
    assert "--trust, if you would run code of whoever wrote it" in refused.err
    shown = command(*words, "--trust")
    assert shown.code == 0, shown
    for part in ("  model.safetensors\n", "  distdl_scoring/detection_network.py\n"):
        assert part in shown.out
    if platform == "azureml":
        assert "faster-coco-eval==" in shown.out
    assert "nothing was sent" in shown.out
