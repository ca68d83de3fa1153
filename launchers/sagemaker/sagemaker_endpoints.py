"""`distdl deploy sagemaker`: a model on a SageMaker endpoint, or on a batch transform job.

A deployment is a model and an endpoint config of the same name. It is tested on an endpoint of its
own; then `update_endpoint` moves the traffic (blue/green), and back if the new instances fail.
"""

from __future__ import annotations

import secrets
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from distdl.launchers.common import did_you_mean
from distdl.launchers.deploying import NotDeployed, Platform, is_ours, report
from distdl.launchers.sagemaker.aws import aws_errors
from distdl.launchers.sagemaker.uploads import pack
from distdl.util.errors import Problem, UserError

INSTANCE_TYPE = "ml.m5.large"
PRICES = "aws.amazon.com/sagemaker/ai/pricing"


class HostedEndpoint(Platform):
    """A real-time endpoint in the account and region that the launcher's settings name."""

    kind = "ProductionVariant"  # of the instance types, in the description of SageMaker's API

    errors = staticmethod(aws_errors)

    @property
    def client(self) -> Any:
        return self.launcher.aws("sagemaker")

    def documents(self, name: str, folder: Path) -> dict[str, dict[str, Any]]:
        from botocore.session import Session
        from botocore.validate import validate_parameters

        s, image = self.launcher, self.options.image
        needed = {"launcher.role": s.role, "launcher.bucket": s.bucket, "--image": image}
        if absent := [key for key, value in needed.items() if not value]:
            raise UserError(*(Problem(key, "missing", "see docs/deploy.md") for key in absent))
        service = Session().get_service_model("sagemaker")
        kind, known = self.size()["InstanceType"], f"{self.kind}InstanceType"
        if kind not in (types := service.shape_for(known).enum):
            what = f"{kind} is not an instance type for this"
            raise UserError.at("--instance-type", what, did_you_mean(kind, types))
        s = self.launcher
        container = {
            "Image": self.options.image,
            "ModelDataUrl": f"s3://{s.bucket}/{self.key(name)}",
        }
        model = {"ModelName": name, "PrimaryContainer": container, "ExecutionRoleArn": s.role}
        if s.subnets:
            model["VpcConfig"] = {"Subnets": s.subnets, "SecurityGroupIds": s.security_groups}
        documents = {"create_model": model, **self.use(name)}
        for operation, body in documents.items():
            shape = service.operation_model(operation.title().replace("_", "")).input_shape
            validate_parameters(body, shape)
        return documents

    def key(self, name: str) -> str:
        return f"{self.launcher.prefix.strip('/')}/models/{name}.tar.gz".lstrip("/")

    def size(self) -> dict[str, Any]:
        kind = self.options.instance_type or INSTANCE_TYPE
        return {"InstanceType": kind, "InitialInstanceCount": self.options.instances}

    def use(self, name: str) -> dict[str, dict[str, Any]]:
        """What uses the model."""
        variants = [{"VariantName": "model", "ModelName": name, **self.size()}]
        config = {"EndpointConfigName": name, "ProductionVariants": variants}
        return {"create_endpoint_config": config}

    def price(self) -> str:
        kind, count = self.size().values()
        return f"{count} x {kind}, not known to distdl: {PRICES}"

    def current(self) -> str:
        """The config of the endpoint; empty if there is no endpoint."""
        name = self.options.name
        listed = self.client.list_endpoints(NameContains=name, MaxResults=100)["Endpoints"]
        if name not in [each["EndpointName"] for each in listed]:
            return ""
        return str(self.client.describe_endpoint(EndpointName=name)["EndpointConfigName"])

    def deployments(self) -> dict[str, bool]:
        name, current = self.options.name, self.current()
        configs = self.client.list_endpoint_configs(NameContains=f"{name}-", MaxResults=100)
        names = [each["EndpointConfigName"] for each in configs["EndpointConfigs"]]
        ours = {each: False for each in names if is_ours(each, name)}
        return {**ours, current: True} if current else ours

    def create(self, name: str, folder: Path) -> None:
        documents, bucket, key = self.documents(name, folder), self.launcher.bucket, self.key(name)
        report(f"uploading s3://{bucket}/{key}")
        with tempfile.TemporaryDirectory() as temporary:
            pack(folder, archive := Path(temporary) / "model.tar.gz")
            self.launcher.aws("s3").upload_file(str(archive), bucket, key)
        for operation, body in documents.items():
            getattr(self.client, operation)(**body)

    def ask(self, name: str, body: str) -> str | None:
        test = f"{name}-test"
        report(f"creating {test} for a test request, which takes some minutes")
        self.client.create_endpoint(EndpointName=test, EndpointConfigName=name)
        try:
            self.wait(test, name)
            invoke = self.launcher.aws("sagemaker-runtime").invoke_endpoint
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
            logs = f"aws logs tail /aws/sagemaker/Endpoints/{endpoint}"
            raise NotDeployed.at(endpoint, now.get("FailureReason", now["EndpointStatus"]), logs)

    def move(self, name: str) -> None:
        change = self.client.update_endpoint if self.current() else self.client.create_endpoint
        report(f"moving the traffic of {self.options.name}, which takes some minutes")
        change(EndpointName=self.options.name, EndpointConfigName=name)
        self.wait(self.options.name, name)

    def remove(self, name: str) -> None:
        with suppress(self.client.exceptions.ClientError):  # the config may not exist
            self.client.delete_endpoint_config(EndpointConfigName=name)
        with suppress(self.client.exceptions.ClientError):
            self.client.delete_model(ModelName=name)

    def delete(self) -> None:
        names = self.deployments()
        self.client.delete_endpoint(EndpointName=self.options.name)
        for name in names:
            self.remove(name)


class Transform(HostedEndpoint):
    """A batch transform job: a request per image below an address in S3."""

    kind = "Transform"

    def use(self, name: str) -> dict[str, dict[str, Any]]:
        for key in ("input", "output"):
            if not str(getattr(self.options, key)).startswith("s3://"):
                what = f"{getattr(self.options, key)} is not in S3"
                raise UserError.at(f"--{key}", what, f"--{key} s3://BUCKET/FOLDER")
        source = {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": self.options.input}}
        kind, count = self.size().values()
        job = {
            "TransformJobName": name,  # which can be used only once
            "ModelName": name,
            "TransformInput": {"DataSource": source, "ContentType": "application/x-image"},
            "TransformOutput": {"S3OutputPath": self.options.output},
            "TransformResources": {"InstanceType": kind, "InstanceCount": count},
            "MaxPayloadInMB": 32,
        }
        return {"create_transform_job": job}

    def create(self, name: str, folder: Path) -> None:
        super().create(f"{name}-{secrets.token_hex(4)}", folder)

    def deployments(self) -> dict[str, bool]:
        return {}

    def ask(self, name: str, body: str) -> str | None:
        return None

    def move(self, name: str) -> None:
        print(f"started a transform job, which writes to {self.options.output}")

    def delete(self) -> None:
        raise UserError.at("--delete", "a transform job ends by itself")
