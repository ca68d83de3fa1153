"""How the objects of a job are called, and what tells them to belong to it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from distdl.job import JobSpec
from distdl.launchers.common import digest, slug
from distdl.launchers.kubernetes.kubernetes_settings import PVC, KubernetesSettings

CONTAINER = "distdl"  # and in a TrainJob the one that its runtime calls so:
NODE = "node"
# The longest part of a pod's name and host name that comes behind the job's.
LONGEST_NAME = 63 - len("-node-0-99999")
LABELS = {"app.kubernetes.io/name": "distdl", "app.kubernetes.io/managed-by": "distdl"}
INSTANCE = "app.kubernetes.io/instance"  # a label: the job's name
RUN, ATTEMPT, STORE = "distdl/run", "distdl/attempt", "distdl/store"  # annotations
ENDED = "distdl/ended"  # an annotation: why distdl has ended the job (`cancelled`, or a reason)
QUEUE = "kueue.x-k8s.io/queue-name"


@dataclass(frozen=True)
class JobNames:
    """The names of one job. `namespace` is empty if the context decides."""

    spec: JobSpec
    settings: KubernetesSettings
    namespace: str = ""
    names_taken: int = 0  # how many earlier jobs of this name are still kept

    @property
    def name(self) -> str:
        """The run, the attempt, and a hash that tells apart runs of the same name in other stores.
        Small letters, digits and hyphens, and the first a letter, as a Service needs it."""
        full = f"{self.settings.store}/{self.spec.name}"
        suffix = f"-{self.spec.attempt:03d}-{digest(full, 6)}"
        suffix += f"-{self.names_taken}" if self.names_taken else ""
        start = slug(self.spec.name).lower()
        start = start if re.match("[a-z]", start) else f"run-{start}".rstrip("-")
        return start[: LONGEST_NAME - len(suffix)].rstrip("-") + suffix

    @property
    def is_trainjob(self) -> bool:
        return self.settings.kind == "trainjob"

    @property
    def claim(self) -> re.Match[str] | None:
        """The claim and the folder, if the store is a volume."""
        return PVC.fullmatch(str(self.settings.store))

    @property
    def key(self) -> str:
        """The folder of this run in the store."""
        return f"{str(self.settings.store).rstrip('/')}/{self.spec.name}"

    @property
    def first_pod(self) -> str:
        """The host name by which the pods reach the first one."""
        node = f"-{NODE}-0" if self.is_trainjob else ""
        return f"{self.name}{node}-0.{self.name}"

    @property
    def secret(self) -> str:
        """The name of the Secret with the forwarded variables."""
        return f"{self.name}-env"

    def part_name(self, number: int) -> str:
        """Of a ConfigMap with a part of the code."""
        return f"{self.name}-code-{number}"

    @property
    def bundle_uri(self) -> str:
        """Where the user's code is in a store on Blob or S3."""
        return f"{self.key}/bundles/{self.name}.tar.gz"

    @property
    def labels(self) -> dict[str, str]:
        """Of every object of the job, and of its pods."""
        return {**self.settings.labels, **LABELS, INSTANCE: self.name}
