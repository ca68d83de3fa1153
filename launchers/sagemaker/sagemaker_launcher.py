"""A training job on Amazon SageMaker: `create_training_job`, without the sagemaker SDK."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from distdl.job import JobSpec, LauncherBase
from distdl.launchers.common import with_paths
from distdl.launchers.sagemaker import limits
from distdl.launchers.sagemaker.aws import Aws, aws_errors
from distdl.launchers.sagemaker.instances import instances
from distdl.launchers.sagemaker.sagemaker_job import SageMakerJob
from distdl.launchers.sagemaker.sagemaker_request import SageMakerRequest
from distdl.launchers.sagemaker.sagemaker_settings import SageMakerSettings
from distdl.util.errors import UserError

SCHEME = "sagemaker://"
SHARDED = "distdl's own data modules need all of it on every host"


class SageMakerLauncher(SageMakerSettings, LauncherBase[SageMakerRequest]):
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
        """The devices and accelerator of a host, of the smallest if there are instance groups; None
        if a type is not in instance_types.yaml."""
        groups = node.get("instance_groups") or {}
        kinds = [group.get("instance_type") for group in groups.values()]
        found = [instances().get(str(kind)) for kind in kinds or [node.get("instance_type")]]
        gpus = [instance.gpus for instance in found if instance]
        if len(gpus) < len(found):
            return None
        return (min(gpus), "gpu") if min(gpus) else (1, "cpu")

    @staticmethod
    def notes(node: Mapping[str, Any]) -> Iterator[str]:
        """Notes on what could not be checked, and on what the ranks do without."""
        if limits.input_shape() is None:
            yield "SageMaker's limits were not checked: pip install 'distdl[sagemaker]'"
        if node.get("network_isolation"):
            what = "launcher.network_isolation: the ranks reach each other and nothing else: "
            yield f"{what}no tracking server, no store, no model hub"
        inputs = with_paths(node.get("inputs"))
        for name, entry in inputs.items() if isinstance(inputs, dict) else ():
            if entry.get("sharded"):
                yield f"launcher.inputs.{name}: each host has only its part; {SHARDED}"

    @staticmethod
    def keeps_files_elsewhere(node: Mapping[str, Any]) -> bool:
        return True

    @classmethod
    def hides_trials(cls, node: Mapping[str, Any]) -> str:
        """A container without a network does not hear what the search says."""
        return "launcher.network_isolation=false" if node.get("network_isolation") else ""

    @staticmethod
    def splits_store(node: Mapping[str, Any]) -> str:
        """Each host has /opt/ml/checkpoints of its own, which SageMaker copies to one place."""
        return "trainer.num_nodes=1"

    @staticmethod
    def without_mpi(node: Mapping[str, Any]) -> str:
        return "launcher=mpi, or launcher=azureml launcher.distribution=mpi"

    def request(self, spec: JobSpec) -> SageMakerRequest:
        request = SageMakerRequest(spec, self)
        if problems := limits.problems(request.body(), self):
            raise UserError(*problems)
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
            raise UserError.at(
                handle,
                what="is not a SageMaker job",
                remedy=f"{SCHEME}<region>/<job name>",
                code="wrong-kind",
            )
        aws = self._regions.setdefault(match[1], Aws(match[1], self.aws.profile))
        return SageMakerJob(match[2], aws)
