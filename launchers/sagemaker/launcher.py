"""A training job of Amazon SageMaker: `create_training_job`, and nothing of the sagemaker SDK."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from distdl.errors import Problem, UserError
from distdl.job import JobSpec
from distdl.launchers.sagemaker import checks, instances
from distdl.launchers.sagemaker.aws import Aws, explained
from distdl.launchers.sagemaker.job import SageMakerJob
from distdl.launchers.sagemaker.request import SageMakerRequest, Settings

SCHEME = "sagemaker://"


class SageMakerLauncher:
    """Trains on instances that SageMaker starts for the job and takes away after it.

    Args:
        role: ARN of the role that the job acts as.
        image: The container, in ECR.
        instance_type: Of every host, e.g. ml.p4d.24xlarge.
        bucket, prefix: Where in S3 code, checkpoints and logs of all runs go.
        region, profile: Of AWS; None leaves it to AWS's own variables and files.
        volume_gb: Disk of each host, in GB; sizes with NVMe disks ignore it.
        walltime: Until the job is stopped; `distdl.walltime` says what it means.
        spot: Spare capacity, which may be taken away; the run goes on when there is some again.
        max_wait: What waiting and running may take together; None: twice the walltime.
        keep_alive: Seconds that the hosts stay, and cost, for a next job.
        retries: How often SageMaker starts it again after an error of its own.
        subnets, security_groups: Of the VPC that the hosts are in.
        encrypt_traffic: Between the hosts; slower.
        kms_key: Encrypts disks and output.
        tags: Further tags of the job.
        env: Further variables for every rank, none of them secret.
        inputs: Name -> URI, or {path, mode}; see `distdl.launchers.sagemaker.inputs`.
        forward_env: Names of variables; their values go to AWS Secrets Manager.
    """

    def __init__(
        self,
        role: str | None = None,
        image: str | None = None,
        instance_type: str | None = None,
        bucket: str | None = None,
        prefix: str = "distdl",
        region: str | None = None,
        profile: str | None = None,
        volume_gb: int = 100,
        walltime: str | float = 24,
        spot: bool = False,
        max_wait: str | float | None = None,
        keep_alive: int = 0,
        retries: int = 0,
        subnets: list[str] | None = None,
        security_groups: list[str] | None = None,
        encrypt_traffic: bool = False,
        kms_key: str | None = None,
        tags: dict[str, str] | None = None,
        env: dict[str, str] | None = None,
        inputs: dict[str, Any] | None = None,
        forward_env: list[str] | None = None,
    ) -> None:
        self.settings = Settings(
            role=role or "",
            image=image or "",
            instance_type=instance_type or "",
            bucket=bucket or "",
            prefix=prefix,
            region=region,
            volume_gb=volume_gb,
            walltime=walltime,
            spot=spot,
            max_wait=max_wait,
            keep_alive=keep_alive,
            retries=retries,
            subnets=subnets or [],
            security_groups=security_groups or [],
            encrypt_traffic=encrypt_traffic,
            kms_key=kms_key,
            tags=tags or {},
            env=env or {},
            inputs=inputs or {},
        )
        self.forward_env = forward_env or []
        self.aws = Aws(region, profile)

    @staticmethod
    def check(node: Mapping[str, Any], context: Mapping[str, Any]) -> Iterable[Problem]:
        return checks.check(node, context)

    @staticmethod
    def devices(node: Mapping[str, Any]) -> tuple[int, str] | None:
        """What one host of the type has; None for a type that is not in our file."""
        instance = instances.known().get(str(node.get("instance_type")))
        if instance is None:
            return None
        return (instance.gpus, "gpu") if instance.gpus else (1, "cpu")

    def request(self, spec: JobSpec) -> SageMakerRequest:
        """Raises UserError where a variable is longer than SageMaker takes."""
        request = SageMakerRequest(spec, self.settings)
        for name, value in request.environment(self.settings.region).items():
            if len(value) > 512:
                raise UserError(Problem(name, f"{len(value)} characters; SageMaker takes 512"))
        return request

    def reach(self, request: SageMakerRequest) -> None:
        """Who we are needs no permission: what fails is the region, the network or the sign-in."""
        self.aws.found_region()
        with explained():
            self.aws("sts").get_caller_identity()

    def submit(self, request: SageMakerRequest) -> SageMakerJob:
        from distdl.launchers.sagemaker import uploads

        region = self.aws.found_region()
        # A run that was removed here and starts anew has the name of the old one, which SageMaker
        # never gives again.
        while SageMakerJob(request.name, self.aws).describe():
            request = dataclasses.replace(request, again=request.again + 1)
        uploads.upload(request, self.aws)
        with explained():
            self.aws("sagemaker").create_training_job(**request.body(region))
        return SageMakerJob(request.name, self.aws)

    def attach(self, handle: str) -> SageMakerJob:
        found = re.fullmatch(rf"{SCHEME}([a-z0-9-]+)/([A-Za-z0-9-]+)", handle)
        if found is None:
            raise UserError(Problem(handle, "is no SageMaker job", f"{SCHEME}<region>/<job name>"))
        return SageMakerJob(found[2], Aws(found[1], self.aws.profile))
