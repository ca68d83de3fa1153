"""A training job on Amazon SageMaker: `create_training_job`, without the sagemaker SDK."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from distdl.job import JobSpec
from distdl.launchers.sagemaker.aws import Aws, aws_errors
from distdl.launchers.sagemaker.sagemaker_job import SageMakerJob
from distdl.launchers.sagemaker.sagemaker_request import SageMakerRequest
from distdl.launchers.sagemaker.sagemaker_settings import SageMakerSettings, instances
from distdl.util.errors import UserError

SCHEME = "sagemaker://"
LONGEST_VALUE = 512  # characters of a variable's value


class SageMakerLauncher(SageMakerSettings):
    """Trains on instances that SageMaker starts for the job and removes afterwards."""

    instead: ClassVar = {
        "max_attempts": "SageMaker restarts its jobs itself: launcher.spot=true, "
        "launcher.retries=N; after a failure: distdl jobs resubmit RUN"
    }

    @functools.cached_property
    def aws(self) -> Aws:
        return Aws(self.region, self.profile)

    @functools.cached_property
    def _regions(self) -> dict[str, Aws]:
        """AWS clients of attached jobs, by region; cached because creating them is slow."""
        return {}

    @staticmethod
    def devices(node: Mapping[str, Any]) -> tuple[int, str] | None:
        """The devices and accelerator of a host; None if its type is not in instance_types.yaml."""
        instance = instances().get(str(node.get("instance_type")))
        return instance and ((instance.gpus, "gpu") if instance.gpus else (1, "cpu"))

    def request(self, spec: JobSpec) -> SageMakerRequest:
        request = SageMakerRequest(spec, self)
        for name, value in request.environment(self.region).items():
            if (length := len(value)) > LONGEST_VALUE:
                raise UserError.at(name, f"has {length} characters; the limit is {LONGEST_VALUE}")
        return request

    def reach(self, request: SageMakerRequest) -> None:
        """Checks region, network and sign-in, by a call that needs no permission."""
        self.aws.resolved_region()
        with aws_errors():
            self.aws("sts").get_caller_identity()

    def submit(self, request: SageMakerRequest) -> SageMakerJob:
        from distdl.launchers.sagemaker import uploads

        region = self.aws.resolved_region()
        # A run that was deleted here and starts again has a job name that is taken: SageMaker never
        # frees a name.
        while SageMakerJob(request.name, self.aws).exists():
            request = dataclasses.replace(request, names_taken=request.names_taken + 1)
        uploads.upload(request, self.aws)
        with aws_errors():
            self.aws("sagemaker").create_training_job(**request.body(region))
        return SageMakerJob(request.name, self.aws)

    def attach(self, handle: str) -> SageMakerJob:
        if not (match := re.fullmatch(rf"{SCHEME}([a-z0-9-]+)/([A-Za-z0-9-]+)", handle)):
            raise UserError.at(handle, "is not a SageMaker job", f"{SCHEME}<region>/<job name>")
        aws = self._regions.setdefault(match[1], Aws(match[1], self.aws.profile))
        return SageMakerJob(match[2], aws)
