"""`launcher=kubernetes`: builds the objects of a job and submits them."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote

from distdl.job import JobSpec, LauncherBase
from distdl.launchers.common import newest_checkpoint
from distdl.launchers.kubernetes import submission
from distdl.launchers.kubernetes.cluster import Cluster
from distdl.launchers.kubernetes.kubernetes_job import KINDS, KubernetesJob, Name
from distdl.launchers.kubernetes.kubernetes_settings import PVC, KubernetesSettings
from distdl.launchers.kubernetes.manifests import KubernetesRequest
from distdl.util.errors import UserError
from distdl.util.tail import plain

HANDLE = re.compile(
    r"kubernetes://([^/#]+)/([^/#]+)/(job|trainjob)/([a-z0-9-]+)(?:#(.+)/(\d+))?", re.ASCII
)


class KubernetesLauncher(KubernetesSettings, LauncherBase[KubernetesRequest]):
    """Runs a job in the pods of a cluster."""

    instead: ClassVar = {
        "max_attempts": "the Job controller replaces pods itself: launcher.retries=N; after the "
        "job's end: distdl jobs resubmit RUN"
    }

    @functools.cached_property
    def clusters(self) -> dict[str | None, Cluster]:
        """By the context's name; a connection is made once."""
        return {}

    def cluster(self, context: str | None) -> Cluster:
        return self.clusters.setdefault(context, Cluster(context))

    @staticmethod
    def notes(node: Mapping[str, Any]) -> Iterator[str]:
        """Notes on what could not be checked, and on what the platform decides."""
        if node.get("kind") == "trainjob":
            decided = ("retries", "ttl", "priority_class", "pull_policy")
            keys = ", ".join(f"launcher.{key}" for key in decided)
            yield f"a TrainJob's runtime decides: {keys} have no effect"
        security = node.get("pod_security")
        if security in ("baseline", "privileged"):
            yield f"the pods obey only the level {security} of the Pod Security Standards"

    @staticmethod
    def keeps_files_elsewhere(node: Mapping[str, Any]) -> bool:
        return True

    @classmethod
    def hides_trials(cls, node: Mapping[str, Any]) -> str:
        return cls.hides_files(node)

    @staticmethod
    def hides_files(node: Mapping[str, Any]) -> str:
        is_volume = PVC.fullmatch(str(node.get("store")))
        return "launcher.store=s3://BUCKET/FOLDER, or azure://..." if is_volume else ""

    @staticmethod
    def splits_store(node: Mapping[str, Any]) -> str:
        return "" if PVC.fullmatch(str(node.get("store"))) else "launcher.store=pvc://..."

    def request(self, spec: JobSpec) -> KubernetesRequest:
        request = KubernetesRequest(spec, self, self.namespace or "")
        if request.claim and spec.attempt > 1 and newest_checkpoint(Path(spec.store)):
            raise UserError.at(
                "launcher.store",
                what="this run has checkpoints here, which cannot be copied into a volume",
                remedy="launcher.store=s3://... or azure://..., or start a new run",
                code="unsupported",
            )
        return request

    def reach(self, request: KubernetesRequest) -> None:
        """Reads the kubeconfig, and says where the job will go. The cluster itself answers to the
        submission."""
        if self.files:
            raise UserError.at(
                "launcher.files",
                what="is only for a dry run, but this command would send the job",
                remedy="add dry_run=true, or leave it out",
                code="unsupported",
            )
        cluster = self.cluster(self.context)
        server = cluster.server
        namespace = self.namespace or cluster.namespace
        said = f"context {plain(cluster.name)}, namespace {plain(namespace)}, {plain(server)}"
        print(f"cluster    {said}", file=sys.stderr, flush=True)

    def submit(self, request: KubernetesRequest) -> KubernetesJob:
        cluster = self.cluster(self.context)
        request = replace(request, namespace=self.namespace or cluster.namespace)
        request = submission.submit(request, cluster)
        spec = request.spec
        name = Name(self.kind, request.namespace, request.name, spec.name, spec.attempt)
        return KubernetesJob(cluster, name, self.store)

    def attach(self, handle: str) -> KubernetesJob:
        match = HANDLE.fullmatch(handle)
        if match is None or match[3] not in KINDS:
            raise UserError.at(
                handle,
                what="is not a job on Kubernetes",
                remedy="kubernetes://<context>/<namespace>/job/<name>",
                code="wrong-kind",
            )
        context, namespace, kind, name, run, attempt = match.groups()
        known = None if context == "in-cluster" else unquote(context)
        named = Name(kind, unquote(namespace), name, unquote(run or ""), int(attempt or 0))
        return KubernetesJob(self.cluster(known), named, self.store)
