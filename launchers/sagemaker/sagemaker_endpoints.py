"""`distdl deploy sagemaker`: a model on a SageMaker endpoint, or on a batch transform job.

A deployment is a production variant with a model of the same name; a new one begins with weight 0.
https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_CreateEndpointConfig.html
"""

from __future__ import annotations

import json
import re
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator

from distdl.launchers.common import Refused, did_you_mean, digest, matching
from distdl.launchers.deploying import (
    TAG,
    DeploySettings,
    Endpoint,
    Example,
    ExportedModel,
    NotDeployed,
    report,
)
from distdl.launchers.sagemaker.aws import aws_errors
from distdl.launchers.sagemaker.sagemaker_settings import REQUIRED
from distdl.launchers.sagemaker.uploads import objects, pack
from distdl.util.errors import Problem, UserError

PRICES = "aws.amazon.com/sagemaker/ai/pricing"
LOG_LINES = 30
ADDRESS = matching(r"s3://[^/]+/?.*", "an address in S3", "s3://BUCKET/FOLDER")


def service() -> Any:
    """SageMaker's API as botocore describes it."""
    with aws_errors():
        from botocore.session import Session

        return Session().get_service_model("sagemaker")


def one_of(shape: str) -> AfterValidator:
    """Accepts the instance types of an enum of SageMaker's API."""

    def validate(name: str) -> str:
        if name not in (known := service().shape_for(shape).enum):
            raise Refused(f"{name} is not an instance type for this", did_you_mean(name, known))
        return name

    return AfterValidator(validate)


class HostedSettings(DeploySettings):
    instance_type: Annotated[str, one_of("ProductionVariantInstanceType")] = "ml.m5.large"
    image: str = ""


class TransformSettings(HostedSettings):
    instance_type: Annotated[str, one_of("TransformInstanceType")] = "ml.m5.large"
    input: Annotated[str, ADDRESS]
    output: Annotated[str, ADDRESS]


class HostedEndpoint(Endpoint):
    """A real-time endpoint in the account and region that the launcher's settings name."""

    settings_type: Any = HostedSettings

    def misfits(self) -> Iterator[Problem]:
        for key in ("role", "bucket"):
            if not getattr(self.launcher, key):
                yield Problem(f"launcher.{key}", "missing", REQUIRED[key])
        if not self.settings.image:
            remedy = "deploy.image=ACCOUNT.dkr.ecr.REGION.amazonaws.com/NAME:TAG; "
            yield Problem("deploy.image", "missing", f"{remedy}docs/deploy.md says how to build it")

    def call(self, operation: str, **arguments: Any) -> Any:
        with aws_errors():
            return getattr(self.launcher.aws("sagemaker"), operation)(**arguments)

    def find(self, operation: str, **arguments: Any) -> Any:
        """The answer of a `describe` operation, None if there is no such resource."""
        try:
            return self.call(operation, **arguments)
        except UserError as error:
            if re.search("not find|not found|not exist", str(error), re.IGNORECASE):
                return None
            raise

    @property
    def tags(self) -> dict[str, Any]:
        return {"Tags": [{"Key": TAG, "Value": self.settings.name}]}

    @property
    def named(self) -> dict[str, str]:
        return {"EndpointName": self.settings.name}

    def name_of(self, model: ExportedModel) -> str:
        s = self.settings
        facts = [model.version, s.image, s.instance_type, s.instances, self.launcher.role]
        return f"{s.name}-{digest(json.dumps(facts), 12)}"

    def key(self, model: ExportedModel) -> str:
        return f"{self.launcher.prefix.strip('/')}/models/{model.version}/model.tar.gz".lstrip("/")

    def model_body(self, model: ExportedModel) -> dict[str, Any]:
        s, uri = self.launcher, f"s3://{self.launcher.bucket}/{self.key(model)}"
        container = {"Image": self.settings.image, "ModelDataUrl": uri}
        vpc = {"Subnets": s.subnets, "SecurityGroupIds": s.security_groups}
        names = {"ModelName": self.name_of(model), "ExecutionRoleArn": s.role, **self.tags}
        return {**names, "PrimaryContainer": container, **({"VpcConfig": vpc} if s.subnets else {})}

    def variant(self, name: str, weight: float) -> dict[str, Any]:
        kind, count = self.settings.instance_type, self.settings.instances
        size = {"InstanceType": kind, "InitialInstanceCount": count}
        return {"VariantName": name, "ModelName": name, **size, "InitialVariantWeight": weight}

    def config(self, variants: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The arguments of `create_endpoint_config`; the same variants have the same name."""
        name = f"{self.settings.name}-{digest(json.dumps(variants, sort_keys=True), 10)}"
        return {"EndpointConfigName": name, "ProductionVariants": variants, **self.tags}

    def requests(self, model: ExportedModel) -> dict[str, dict[str, Any]]:
        """Operation -> its arguments, as for an endpoint that does not exist yet."""
        config = self.config([self.variant(self.name_of(model), 1.0)])
        endpoint = {**self.named, "EndpointConfigName": config["EndpointConfigName"], **self.tags}
        parts = {"create_model": self.model_body(model), "create_endpoint_config": config}
        return {**parts, "create_endpoint": endpoint}

    def render(self, model: ExportedModel) -> str:
        import yaml
        from botocore.validate import validate_parameters

        text = ""
        for operation, body in self.requests(model).items():
            with aws_errors():
                name = operation.title().replace("_", "")
                validate_parameters(body, service().operation_model(name).input_shape)
            text += f"# {operation}:\n{yaml.safe_dump(body, sort_keys=False)}\n"
        price = f"{self.settings.instances} x {self.settings.instance_type}, not known to distdl"
        return f"{text}{model.uploads}# price per hour: {price}: {PRICES}\n# AWS was not asked."

    def described(self) -> Any:
        """The endpoint, None if there is none; refuses one that distdl did not create."""
        if endpoint := self.find("describe_endpoint", **self.named):
            tags = self.call("list_tags", ResourceArn=endpoint["EndpointArn"])["Tags"]
            if TAG not in {tag["Key"] for tag in tags}:
                what = f"{self.settings.name} is an endpoint that distdl did not create"
                raise UserError.at("deploy.name", what, "choose another name")
        return endpoint

    def variants(self) -> list[dict[str, Any]]:
        """The endpoint's variants with their weights of now, which the config does not have."""
        if (endpoint := self.described()) is None:
            return []
        config = {"EndpointConfigName": endpoint["EndpointConfigName"]}
        variants = self.call("describe_endpoint_config", **config)["ProductionVariants"]
        now = endpoint.get("ProductionVariants", ())
        weights = {each["VariantName"]: float(each.get("CurrentWeight", 0)) for each in now}
        return [
            {**v, "InitialVariantWeight": weights.get(v["VariantName"], v["InitialVariantWeight"])}
            for v in variants
        ]

    def weights(self) -> dict[str, float]:
        return {each["VariantName"]: each["InitialVariantWeight"] for each in self.variants()}

    def create(self, name: str, model: ExportedModel) -> None:
        self.upload(model)
        variants = self.variants()
        self.apply([*variants, self.variant(name, 0.0 if variants else 1.0)])

    def upload(self, model: ExportedModel) -> None:
        """Uploads and registers the model, unless it is there already."""
        bucket, key = self.launcher.bucket, self.key(model)
        with aws_errors(), tempfile.TemporaryDirectory() as folder:
            s3 = self.launcher.aws("s3")
            if not objects(s3, bucket, key):
                report(f"uploading s3://{bucket}/{key}")
                pack(model.folder, archive := Path(folder) / "model.tar.gz")
                s3.upload_file(str(archive), bucket, key)
        if not self.find("describe_model", ModelName=self.name_of(model)):
            self.call("create_model", **self.model_body(model))

    def apply(self, variants: Sequence[dict[str, Any]]) -> None:
        """Gives the endpoint these variants, and waits. Raises NotDeployed if it has others."""
        config, before = self.config(variants), self.described()
        wanted = {"EndpointConfigName": config["EndpointConfigName"]}
        former = {"EndpointConfigName": before["EndpointConfigName"]} if before else None
        if wanted == former:
            return
        if not self.find("describe_endpoint_config", **wanted):
            self.call("create_endpoint_config", **config)
        report(f"changing the endpoint {self.settings.name}, which takes some minutes")
        if former:
            self.call("update_endpoint", **self.named, **wanted)
        else:
            self.call("create_endpoint", **self.named, **wanted, **self.tags)
        self.wait()
        # After a failed update, SageMaker goes back to the former config by itself.
        after = self.call("describe_endpoint", **self.named)
        if failed := after["EndpointConfigName"] != wanted["EndpointConfigName"]:
            former = wanted
        if former:
            self.call("delete_endpoint_config", **former)
        if failed:
            raise NotDeployed.at(self.settings.name, after.get("FailureReason", "was not updated"))

    def wait(self) -> None:
        with aws_errors():
            self.launcher.aws("sagemaker").get_waiter("endpoint_in_service").wait(**self.named)

    def ask(self, name: str, example: Example) -> str:
        request = {"ContentType": "application/json", "Body": example.body, "TargetVariant": name}
        with aws_errors():
            runtime = self.launcher.aws("sagemaker-runtime")
            return str(runtime.invoke_endpoint(**self.named, **request)["Body"].read(), "utf-8")

    def move(self, name: str) -> None:
        shares = {each: float(each == name) for each in self.weights()}
        weights = [{"VariantName": k, "DesiredWeight": share} for k, share in shares.items()]
        operation = "update_endpoint_weights_and_capacities"
        self.call(operation, **self.named, DesiredWeightsAndCapacities=weights)
        self.wait()

    def log(self, name: str) -> str:
        group = f"/aws/sagemaker/Endpoints/{self.settings.name}"
        with aws_errors():
            logs = self.launcher.aws("logs")
            page = logs.filter_log_events(logGroupName=group, logStreamNamePrefix=f"{name}/")
        return "\n".join(event["message"] for event in page["events"][-LOG_LINES:])

    def remove(self, name: str) -> None:
        with suppress(UserError):  # after an interruption, an update still continues
            self.wait()
        variants = self.variants()
        if left := [each for each in variants if each["VariantName"] != name]:
            if len(left) < len(variants):
                self.apply(left)
        elif variants:
            self.delete_endpoint()
        if self.find("describe_model", ModelName=name):
            self.call("delete_model", ModelName=name)

    def usage(self) -> str:
        request = "--content-type image/jpeg --body fileb://photo.jpg answer.json"
        name = f"--endpoint-name {self.settings.name}"
        return f"aws sagemaker-runtime invoke-endpoint {name} {request}"

    def delete_endpoint(self) -> None:
        config = self.described()["EndpointConfigName"]
        self.call("delete_endpoint", **self.named)
        self.call("delete_endpoint_config", EndpointConfigName=config)

    def delete(self) -> None:
        if not (names := self.weights()):
            raise UserError.at("deploy.name", f"there is no endpoint {self.settings.name}")
        self.delete_endpoint()
        for name in names:
            self.call("delete_model", ModelName=name)
        print(f"{self.settings.name} was deleted; its models stay in S3")


class Transform(HostedEndpoint):
    """A batch transform job: a request per image below an address in S3."""

    settings_type = TransformSettings

    def requests(self, model: ExportedModel) -> dict[str, dict[str, Any]]:
        s, name = self.settings, self.name_of(model)
        source = {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": s.input}}
        job = {
            "TransformJobName": f"{name}-{secrets.token_hex(4)}",
            "ModelName": name,
            "TransformInput": {"DataSource": source, "ContentType": "application/x-image"},
            "TransformOutput": {"S3OutputPath": s.output},
            "MaxPayloadInMB": 32,
            "TransformResources": {"InstanceType": s.instance_type, "InstanceCount": s.instances},
            **self.tags,
        }
        return {"create_model": self.model_body(model), "create_transform_job": job}

    def deploy(self, model: ExportedModel) -> None:
        self.upload(model)
        body = self.requests(model)["create_transform_job"]
        self.call("create_transform_job", **body)
        name = body["TransformJobName"]
        print(f"started {name}, which writes to {self.settings.output}")
        print(f"its state: aws sagemaker describe-transform-job --transform-job-name {name}")

    def delete(self) -> None:
        what = "a transform job ends by itself, and there is nothing to delete or to roll back"
        raise UserError.at("--batch", what)

    roll_back = delete
