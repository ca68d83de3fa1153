"""The objects of a job, as the API takes them, and as `kubectl apply -f` does.

Fields, rules and limits are from
https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/job-v1/ and
https://kubernetes.io/docs/concepts/workloads/controllers/job/.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from distdl.launchers.kubernetes.names import (
    ATTEMPT,
    CONTAINER,
    INSTANCE,
    NODE,
    QUEUE,
    RUN,
    STORE,
    JobNames,
)
from distdl.launchers.kubernetes.pods import Manifest, PodTemplate
from distdl.util.exit_codes import (
    EXIT_NOT_EXECUTABLE,
    EXIT_NOT_STARTED,
    EXIT_PREEMPTED,
    EXIT_REFUSED,
)
from distdl.util.tail import plain

# A ConfigMap holds 1 MiB: https://kubernetes.io/docs/concepts/configuration/configmap/
PART = 900_000
TRAINER = "trainer.kubeflow.org"
PATCHES = f"{TRAINER}/v1alpha1"


@dataclass(frozen=True)
class KubernetesRequest(JobNames):
    """One job and what it needs."""

    def metadata(self, name: str, **more: object) -> Manifest:
        namespace = {"namespace": self.namespace} if self.namespace else {}
        return {"name": name, **namespace, "labels": self.labels, **more}

    # ---- the objects ----------------------------------------------------------------------------

    def annotations(self) -> dict[str, str]:
        return {RUN: self.spec.name, ATTEMPT: str(self.spec.attempt), STORE: self.key}

    def queued(self) -> dict[str, str]:
        return {QUEUE: self.settings.queue} if self.settings.queue else {}

    def job(self) -> Manifest:
        """The Job: each node is an index. It retries pods by their exit codes:

        - 2: the run was refused; 126, 127: the image has no Python that can run it. The job fails.
        - a disruption (eviction, lost node, preemption): replaced, as often as it comes.
        - 75: this pod has ended because of that, or because another one is gone: replaced.
        - anything else: replaced `retries` times.
        """
        settings = self.settings
        nodes = self.spec.resources.num_nodes

        def exits(action: str, *values: int) -> Manifest:
            codes = {"containerName": CONTAINER, "operator": "In", "values": [*values]}
            return {"action": action, "onExitCodes": codes}

        disrupted = {"type": "DisruptionTarget", "status": "True"}
        rules = [
            exits("FailJob", EXIT_REFUSED, EXIT_NOT_EXECUTABLE, EXIT_NOT_STARTED),
            {"action": "Ignore", "onPodConditions": [disrupted]},
            exits("Ignore", EXIT_PREEMPTED),
        ]
        metadata = self.metadata(self.name, annotations=self.annotations())
        metadata["labels"] |= self.queued()
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": metadata,
            "spec": {
                "completionMode": "Indexed",
                "completions": nodes,
                "parallelism": nodes,
                "backoffLimit": settings.retries,
                "podFailurePolicy": {"rules": rules},
                # A pod's successor is started once the pod is gone, not while it still saves.
                "podReplacementPolicy": "Failed",
                "activeDeadlineSeconds": settings.walltime,
                "ttlSecondsAfterFinished": settings.ttl,
                **({"suspend": True} if settings.queue else {}),
                "template": PodTemplate(self).pod(),
            },
        }

    def service(self) -> Manifest:
        """Gives each pod a name: `<job>-0.<job>`. Also before it is ready: ranks find each other
        while they start."""
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": self.metadata(self.name),
            "spec": {
                "clusterIP": "None",
                "selector": {INSTANCE: self.name},
                "publishNotReadyAddresses": True,
                "ports": [{"name": "store", "port": self.settings.port}],
            },
        }

    def trainjob(self) -> Manifest:
        """The TrainJob: its runtime has the template, whose container `node` gets our command. The
        runtime decides on retries, image pulls and priority."""
        settings = self.settings
        template = PodTemplate(self)
        pod = template.pod()
        (container,) = pod["spec"]["containers"]
        patch = {
            "metadata": {"labels": pod["metadata"]["labels"]},
            "spec": {
                **template.placement(),
                "terminationGracePeriodSeconds": settings.grace_seconds,
                "securityContext": pod["spec"]["securityContext"],
                "containers": [
                    {
                        "name": NODE,
                        "volumeMounts": container["volumeMounts"],
                        "securityContext": container["securityContext"],
                    }
                ],
                "volumes": pod["spec"]["volumes"],
            },
        }
        nodes = {"name": NODE, "template": {"spec": {"template": patch}}}
        runtime = {"template": {"spec": {"replicatedJobs": [nodes]}}}
        metadata = self.metadata(self.name, annotations=self.annotations())
        metadata["labels"] |= self.queued()
        return {
            "apiVersion": PATCHES,
            "kind": "TrainJob",
            "metadata": metadata,
            "spec": {
                "runtimeRef": {
                    "apiGroup": TRAINER,
                    "kind": "ClusterTrainingRuntime",
                    "name": settings.runtime,
                },
                "trainer": {
                    "image": settings.image,
                    "command": container["command"],
                    "args": container["args"],
                    "env": container["env"],
                    "numNodes": self.spec.resources.num_nodes,
                    "resourcesPerNode": container["resources"],
                },
                "runtimePatches": [{"manager": "distdl/launcher", "trainingRuntimeSpec": runtime}],
                "activeDeadlineSeconds": settings.walltime,
                **({"suspend": True} if settings.queue else {}),
            },
        }

    def main(self) -> Manifest:
        """The object that is the job; the others end with it."""
        return self.trainjob() if self.is_trainjob else self.job()

    def parts(self, archive: bytes) -> list[Manifest]:
        """The archive as ConfigMaps."""
        pieces = [archive[start : start + PART] for start in range(0, len(archive), PART)]
        return [
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": self.metadata(self.part_name(number)),
                # The shell joins the files in the order of their names.
                "binaryData": {f"part-{number}": base64.b64encode(piece).decode()},
            }
            for number, piece in enumerate(pieces)
        ]

    def secret_of(self, values: Mapping[str, str]) -> Manifest:
        """The Secret with the forwarded values. It is sent, and never printed or written."""
        encoded = {
            n: base64.b64encode(v.encode("utf-8", "surrogateescape")).decode()
            for n, v in values.items()
        }
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": self.metadata(self.secret),
            "type": "Opaque",
            "data": encoded,
        }

    def documents(self) -> list[Manifest]:
        """What a dry run prints: everything but code and secrets."""
        return [self.main()] if self.is_trainjob else [self.service(), self.job()]

    # ---- as text --------------------------------------------------------------------------------

    def render(self) -> str:
        return self._text([*self.notes()])

    def files(self) -> dict[str, str]:
        """The manifests for kubectl. The bundle is beside them."""
        return {"manifests.yaml": self._text([*self.notes()]) + "\n"}

    def _text(self, notes: Sequence[str]) -> str:
        lines = [f"# {one_line(note)}" for note in notes]
        return "\n".join([*lines, to_yaml(self.documents()).rstrip()])

    def notes(self) -> Iterator[str]:
        """What goes with the manifests, as comments."""
        from distdl.launchers.kubernetes import cluster

        yield f"context    {cluster.described(self.settings.context, self.settings.namespace)}"
        sent = "the config" if self.settings.code else "config and code"
        yield f"sent       {self.spec.bundle}: {sent}, as ConfigMaps {self.part_name(0)}, ..."
        if not self.claim and not self.settings.code:
            yield f"upload     {self.spec.bundle}/code/project -> {self.bundle_uri}"
        for name in self.spec.forward_env:
            yield f"secret     ${name} -> Secret {self.secret}, which ends with the job"
        if self.settings.queue:
            yield f"queue      suspended until Kueue's queue {self.settings.queue} admits it"

    def again(self, names_taken: int) -> KubernetesRequest:
        return replace(self, names_taken=names_taken)


def one_line(text: str) -> str:
    return " ".join(plain(text).split())


def to_yaml(documents: Sequence[Manifest]) -> str:
    """YAML of JSON's types alone: no text can become anything else than the text it is."""
    import yaml

    class Plain(yaml.SafeDumper):
        def ignore_aliases(self, data: object) -> bool:
            return True

    clean = json.loads(json.dumps(list(documents)))
    return str(yaml.dump_all(clean, Dumper=Plain, sort_keys=False, width=1000, explicit_start=True))
