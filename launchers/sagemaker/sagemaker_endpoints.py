"""`distdl deploy sagemaker`: a model on a SageMaker endpoint, or on a batch transform job.

A deployment is a model and an endpoint config of the same name. It is tested on an endpoint of its
own; then `update_endpoint` moves the traffic (blue/green), and back if the new instances fail.
"""

from __future__ import annotations

import secrets
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distdl.launchers.deploying import Platform, is_ours
from distdl.launchers.sagemaker import limits
from distdl.launchers.sagemaker.aws import aws_errors
from distdl.launchers.sagemaker.sagemaker_launcher import SageMakerLauncher
from distdl.launchers.sagemaker.sagemaker_settings import REQUIRED
from distdl.launchers.sagemaker.uploads import send
from distdl.util.errors import NotDeployed, Problem, UserError
from distdl.util.suggest import did_you_mean_word

if TYPE_CHECKING:
    from botocore.client import BaseClient

# Field of a request -> the option or key that it comes from.
WRITTEN_AS = {
    "Image": "--image",
    "InitialInstanceCount": "--instances",
    "InstanceCount": "--instances",
    "S3Uri": "--input",
    "S3OutputPath": "--output",
    "ExecutionRoleArn": "launcher.role",
    "ModelDataUrl": "launcher.prefix",
    "Subnets": "launcher.subnets",
    "SecurityGroupIds": "launcher.security_groups",
}


class HostedEndpoint(Platform[SageMakerLauncher]):
    """A real-time endpoint in the account and region that the launcher's settings name."""

    types = "ProductionVariantInstanceType"  # in the description of SageMaker's API
    default_type = "ml.m5.large"
    errors = staticmethod(aws_errors)

    @property
    def client(self) -> BaseClient:
        return self.launcher.aws("sagemaker")

    def documents(self, name: str, folder: Path) -> dict[str, dict[str, Any]]:
        from botocore.session import Session
        from botocore.validate import validate_parameters

        launcher = self.launcher
        options = self.options
        service = Session().get_service_model("sagemaker")
        if problems := [*self.problems(service.shape_for(self.types).enum)]:
            raise UserError(*problems)
        container = {
            "Image": options.image,
            "ModelDataUrl": f"s3://{launcher.bucket}/{self.key(name)}",
        }
        model = {
            "ModelName": name,
            "PrimaryContainer": container,
            "ExecutionRoleArn": launcher.role,
        }
        if launcher.subnets:
            model["VpcConfig"] = {
                "Subnets": launcher.subnets,
                "SecurityGroupIds": launcher.security_groups,
            }
        documents = {"create_model": model, **self.use(name)}
        for operation, body in documents.items():
            shape = service.operation_model(operation.title().replace("_", "")).input_shape
            validate_parameters(body, shape)
            refuse_forbidden(limits.violations(shape, body))
        return documents

    def problems(self, types: Sequence[str]) -> Iterator[Problem]:
        """All that is wrong with the settings and options. `types`: those of instances."""
        for key in ("role", "bucket"):
            if not getattr(self.launcher, key):
                yield Problem(
                    f"launcher.{key}", what="missing", remedy=REQUIRED[key], code="missing-key"
                )
        if not self.options.image:
            yield Problem(
                "--image",
                what="missing",
                remedy="--image ADDRESS; launchers/sagemaker/endpoint/Dockerfile builds one",
                code="missing-key",
            )
        chosen = self.options.instance_type
        if chosen not in types:
            yield Problem(
                "--instance-type",
                what=f"there is no {chosen}",
                remedy=did_you_mean_word(chosen, types),
                code="wrong-choice",
            )

    def key(self, name: str) -> str:
        """Of the model in the bucket."""
        return f"{self.launcher.prefix.strip('/')}/models/{name}.tar.gz"

    def use(self, name: str) -> dict[str, dict[str, Any]]:
        """What uses the model."""
        options = self.options
        size = {"InstanceType": options.instance_type, "InitialInstanceCount": options.instances}
        variants = [{"VariantName": "model", "ModelName": name, **size}]
        return {
            "create_endpoint_config": {"EndpointConfigName": name, "ProductionVariants": variants}
        }

    def price(self) -> str:
        return "not known to distdl: aws.amazon.com/sagemaker/ai/pricing"

    def deployments(self) -> dict[str, bool]:
        name = self.options.name
        listed = self.client.get_paginator("list_endpoint_configs")
        configs = listed.paginate(NameContains=f"{name}-")
        names = configs.search("EndpointConfigs[].EndpointConfigName")
        states = {each: False for each in names if is_ours(each, name)}
        endpoints = self.client.get_paginator("list_endpoints").paginate(NameContains=name)
        if name in endpoints.search("Endpoints[].EndpointName"):
            endpoint = self.client.describe_endpoint(EndpointName=name)
            states[endpoint["EndpointConfigName"]] = endpoint["EndpointStatus"] != "Failed"
        return states

    def create(self, name: str, folder: Path) -> None:
        send(folder, self.launcher.aws("s3"), str(self.launcher.bucket), self.key(name))
        for operation, body in self.documents(name, folder).items():
            getattr(self.client, operation)(**body)

    def ask(self, name: str, request: Path) -> str:
        test = f"{name}-test"
        self.client.create_endpoint(EndpointName=test, EndpointConfigName=name)
        try:
            self.wait(test, name)
            invoke = self.launcher.aws("sagemaker-runtime").invoke_endpoint
            body = request.read_bytes()
            answer = invoke(EndpointName=test, ContentType="application/json", Body=body)
            return str(answer["Body"].read(), "utf-8")
        finally:
            with suppress(NotDeployed):  # SageMaker refuses to delete what it still creates
                self.wait(test, name)
            self.client.delete_endpoint(EndpointName=test)

    def wait(self, endpoint: str, config: str) -> None:
        """Raises NotDeployed unless the endpoint gets this config: SageMaker keeps the former."""
        from botocore.exceptions import WaiterError

        with suppress(WaiterError):
            self.client.get_waiter("endpoint_in_service").wait(EndpointName=endpoint)
        now = self.client.describe_endpoint(EndpointName=endpoint)
        if now["EndpointStatus"] != "InService" or now["EndpointConfigName"] != config:
            raise NotDeployed.at(
                endpoint,
                what=now.get("FailureReason", now["EndpointStatus"]),
                remedy=f"aws logs tail /aws/sagemaker/Endpoints/{endpoint}",
                code="failed",
            )

    def move(self, name: str) -> None:
        exists = any(self.deployments().values())
        change = self.client.update_endpoint if exists else self.client.create_endpoint
        change(EndpointName=self.options.name, EndpointConfigName=name)
        self.wait(self.options.name, name)

    def remove(self, name: str) -> None:
        with suppress(self.client.exceptions.ClientError):  # the config may not exist
            self.client.delete_endpoint_config(EndpointConfigName=name)
        with suppress(self.client.exceptions.ClientError):
            self.client.delete_model(ModelName=name)

    def delete(self, names: Iterable[str]) -> None:
        self.client.delete_endpoint(EndpointName=self.options.name)
        for name in names:
            self.remove(name)


def refuse_forbidden(violations: Iterable[limits.Violation]) -> None:
    """Refuses what the service would refuse, by the option or key that it comes from."""
    for each in violations:
        fields = [step for step in each.where if step in WRITTEN_AS]
        at = WRITTEN_AS[fields[-1]] if fields else "--name"
        raise UserError.at(at, what=each.what, remedy=each.remedy, code=each.code)


class Transform(HostedEndpoint):
    """A batch transform job: a request per image below an address in S3."""

    types = "TransformInstanceType"
    done = "has started, and writes to --output"

    def __init__(self, launcher: SageMakerLauncher, options: Namespace) -> None:
        super().__init__(launcher, options)
        self.options.job = secrets.token_hex(4)  # a job's name can be used only once

    def problems(self, types: Sequence[str]) -> Iterator[Problem]:
        yield from super().problems(types)
        for flag in ("--input", "--output"):
            if not str(getattr(self.options, flag.strip("-"))).startswith("s3://"):
                yield Problem(
                    flag,
                    what="must be in S3",
                    remedy=f"{flag} s3://BUCKET/FOLDER",
                    code="wrong-type",
                )

    def use(self, name: str) -> dict[str, dict[str, Any]]:
        options = self.options
        source = {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": options.input}}
        job = {
            "TransformJobName": name,
            "ModelName": name,
            "TransformInput": {"DataSource": source, "ContentType": "application/x-image"},
            "TransformOutput": {"S3OutputPath": options.output},
            "TransformResources": {
                "InstanceType": options.instance_type,
                "InstanceCount": options.instances,
            },
            "MaxPayloadInMB": 32,
        }
        return {"create_transform_job": job}

    def deployments(self) -> dict[str, bool]:
        return {}

    def move(self, name: str) -> None:
        """The job has started."""

    def delete(self, names: Iterable[str]) -> None:
        raise UserError.at("--delete", what="a transform job ends by itself", code="unsupported")


KINDS = (HostedEndpoint, Transform)
