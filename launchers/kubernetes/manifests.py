"""The objects of a job, as the API takes them, and as `kubectl apply -f` does.

Fields, rules and limits are from
https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/job-v1/ and
https://kubernetes.io/docs/concepts/workloads/controllers/job/.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from distdl.job import JobSpec, variables
from distdl.launchers.common import digest, slug
from distdl.launchers.kubernetes.kubernetes_settings import PVC, KubernetesSettings
from distdl.util.exit_codes import EXIT_PREEMPTED, EXIT_REFUSED
from distdl.util.tail import plain

Manifest = dict[str, Any]

CONTAINER = "distdl"  # and in a TrainJob the one that its runtime calls so:
NODE = "node"
# Folders in the pod.
SENT = "/distdl/sent"  # the parts of the archive, from ConfigMaps
WORK = "/distdl/node"  # an empty disk
CLAIM = "/distdl/store"  # the store, if it is a volume
ARCHIVE = "code.tar.gz"
# A ConfigMap holds 1 MiB: https://kubernetes.io/docs/concepts/configuration/configmap/
PART = 900_000
MOST_PARTS = 8
# The longest part of a pod's name and host name that comes behind the job's.
LONGEST_NAME = 63 - len("-node-0-99999")
LABELS = {"app.kubernetes.io/name": "distdl", "app.kubernetes.io/managed-by": "distdl"}
INSTANCE = "app.kubernetes.io/instance"  # a label: the job's name
RUN, ATTEMPT, STORE = "distdl/run", "distdl/attempt", "distdl/store"  # annotations
ENDED = "distdl/ended"  # an annotation: why distdl has ended the job (`cancelled`, or a reason)
QUEUE = "kueue.x-k8s.io/queue-name"
TRAINER = "trainer.kubeflow.org"
PATCHES = f"{TRAINER}/v1alpha1"
# The image has a shell and Python; `exec` makes the entry point the container's first process.
UNPACK = (
    f"cat {SENT}/* > {WORK}/{ARCHIVE} && "
    f"python -m tarfile --filter data -e {WORK}/{ARCHIVE} {WORK}/bundle && "
)
ENTRY = 'PYTHONPATH="$1/code" exec python -m distdl.launchers.kubernetes.entry "$@"'
# Without these, libraries look for the home of a user whom the image does not know.
HOME = {"HOME": f"{WORK}/home", "USER": "distdl", "LOGNAME": "distdl"}


@dataclass(frozen=True)
class KubernetesRequest:
    """One job and what it needs. `namespace` is empty if the context decides."""

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

    def metadata(self, name: str, **more: object) -> Manifest:
        labels = {**self.settings.labels, **LABELS, INSTANCE: self.name}
        namespace = {"namespace": self.namespace} if self.namespace else {}
        return {"name": name, **namespace, "labels": labels, **more}

    # ---- the pod --------------------------------------------------------------------------------

    def command(self) -> list[str]:
        """The code is what was sent, or what the image has in the folder `launcher.code`."""
        link = f'ln -s "$0" {WORK}/bundle/code && ' if self.settings.code else ""
        return ["sh", "-c", f"mkdir -p {WORK}/home && {UNPACK}{link}{ENTRY}"]

    def arguments(self) -> list[str]:
        settings = self.settings
        size = self.spec.resources
        claim = self.claim
        store = f"{CLAIM}{(claim[2] or '').rstrip('/')}/{self.spec.name}" if claim else self.key
        options = {
            "store": store,
            "nodes": size.num_nodes,
            "devices": size.devices,
            "attempt": self.spec.attempt,
            "first": self.first_pod,
            "port": settings.port,
            "grace": settings.grace_seconds,
            "wait": settings.wait,
            "sync": settings.sync,
            "job": self.name,
        }
        named = [f"--{name}={value}" for name, value in options.items()]
        return [settings.code or CONTAINER, f"{WORK}/bundle", *named]

    def environment(self) -> list[Manifest]:
        """The container's variables. Everybody who may read the job sees them."""
        settings = self.settings
        # Also of an input that is the address of a store: the recipe then names it by ${input:...}.
        inputs = {f"DISTDL_INPUT_{n.upper()}": str(e["path"]) for n, e in settings.inputs.items()}
        plain_values = {
            **HOME,
            **variables(settings.env, self.spec.env),
            **inputs,
            "DISTDL_LAUNCHER": "kubernetes",
        }
        references = {
            **{name: (each["secret"], each["key"]) for name, each in settings.secrets.items()},
            **{name: (self.secret, name) for name in self.spec.forward_env},
        }
        return [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            *({"name": name, "value": literal(text)} for name, text in plain_values.items()),
            *(
                {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
                for name, (secret, key) in references.items()
            ),
        ]

    def resources(self) -> Manifest:
        settings = self.settings
        size = self.spec.resources
        requests = dict(settings.resources)
        if settings.cpus:
            requests["cpu"] = settings.cpus
        if settings.memory:
            requests["memory"] = settings.memory
        # Extended resources (devices) are not overcommitted: request and limit are the same.
        limits = {name: amount for name, amount in requests.items() if name != "cpu"}
        if size.accelerator == "gpu":
            limits[settings.gpu] = str(size.devices)
        if settings.rdma:
            limits[settings.rdma] = "1"
        return {"requests": {**requests, **limits}, "limits": limits} if requests or limits else {}

    def volumes(self) -> list[Manifest]:
        settings = self.settings
        # The first part has to be there; how many others there are, is known when it is packed.
        parts = [
            {"configMap": {"name": self.part_name(n), **({"optional": True} if n else {})}}
            for n in range(MOST_PARTS)
        ]
        claims = {name: str(each["claim"]) for name, each in self._claims().items()}
        shm = {"medium": "Memory", "sizeLimit": settings.shm}
        return [
            {"name": "distdl-sent", "projected": {"sources": parts}},
            {"name": "distdl-work", "emptyDir": {}},
            *([{"name": "distdl-shm", "emptyDir": shm}] if settings.shm else []),
            *(
                {"name": name, "persistentVolumeClaim": {"claimName": claim}}
                for name, claim in claims.items()
            ),
        ]

    def mounts(self) -> list[Manifest]:
        return [
            {"name": "distdl-sent", "mountPath": SENT, "readOnly": True},
            {"name": "distdl-work", "mountPath": WORK},
            *([{"name": "distdl-shm", "mountPath": "/dev/shm"}] if self.settings.shm else []),
            *(
                {
                    "name": name,
                    "mountPath": str(each["path"]),
                    **({"readOnly": True} if each.get("read_only", True) else {}),
                }
                for name, each in self._claims().items()
            ),
        ]

    def _claims(self) -> Mapping[str, Mapping[str, Any]]:
        """The volumes of the settings, and that of the store."""
        if claim := self.claim:
            own = {"claim": claim[1], "path": CLAIM, "read_only": False}
            return {"distdl-store": own, **self.settings.volumes}
        return self.settings.volumes

    def pod_security(self) -> Manifest:
        """https://kubernetes.io/docs/concepts/security/pod-security-standards/"""
        user = self.settings.run_as
        fields: Manifest = {}
        if self.settings.pod_security == "restricted":
            fields["runAsNonRoot"] = True
        if user:
            fields |= {"runAsUser": user, "runAsGroup": user, "fsGroup": user}
            fields["fsGroupChangePolicy"] = "OnRootMismatch"
        return {**fields, "seccompProfile": {"type": "RuntimeDefault"}}

    def container_security(self) -> Manifest:
        settings = self.settings
        capabilities: Manifest = {}
        if settings.pod_security == "restricted":
            capabilities["drop"] = ["ALL"]
        if settings.ipc_lock:
            capabilities["add"] = ["IPC_LOCK"]
        return {
            "allowPrivilegeEscalation": False,
            **({"capabilities": capabilities} if capabilities else {}),
        }

    def pod(self) -> Manifest:
        """The template of the pods, the same for every node."""
        settings = self.settings
        container = {
            "name": CONTAINER,
            "image": settings.image,
            "command": [*map(literal, self.command())],
            "args": [*map(literal, self.arguments())],
            "env": self.environment(),
            "resources": self.resources(),
            "volumeMounts": self.mounts(),
            "securityContext": self.container_security(),
            "terminationMessagePolicy": "FallbackToLogsOnError",
        }
        if settings.pull_policy:
            container["imagePullPolicy"] = settings.pull_policy
        labels = {**settings.labels, **LABELS, INSTANCE: self.name}
        annotations = {**settings.annotations, RUN: self.spec.name}
        return {
            "metadata": {"labels": labels, "annotations": annotations},
            "spec": {
                "restartPolicy": "Never",
                "subdomain": self.name,
                "terminationGracePeriodSeconds": settings.grace_seconds,
                "enableServiceLinks": False,
                "securityContext": self.pod_security(),
                "containers": [container],
                "volumes": self.volumes(),
                **self.placement(),
                **(
                    {"priorityClassName": settings.priority_class}
                    if settings.priority_class
                    else {}
                ),
                **({} if settings.service_account else {"automountServiceAccountToken": False}),
            },
        }

    def placement(self) -> Manifest:
        """Where the pods may run, and as whom: what a TrainJob can be given, too."""
        settings = self.settings
        pull = [{"name": name} for name in settings.pull_secrets]
        fields = {
            "nodeSelector": settings.node_selector,
            "tolerations": settings.tolerations,
            "serviceAccountName": settings.service_account,
            "imagePullSecrets": pull,
        }
        return {key: value for key, value in fields.items() if value}

    # ---- the objects ----------------------------------------------------------------------------

    def annotations(self) -> dict[str, str]:
        return {RUN: self.spec.name, ATTEMPT: str(self.spec.attempt), STORE: self.key}

    def queued(self) -> dict[str, str]:
        return {QUEUE: self.settings.queue} if self.settings.queue else {}

    def job(self) -> Manifest:
        """The Job: each node is an index. It retries pods by their exit codes:

        - 2: the run was refused. The job fails.
        - a disruption (eviction, lost node, preemption): replaced, as often as it comes.
        - 75: this pod has ended because of that, or because another one is gone: replaced.
        - anything else: replaced `retries` times.
        """
        settings = self.settings
        nodes = self.spec.resources.num_nodes

        def exits(code: int, action: str) -> Manifest:
            codes = {"containerName": CONTAINER, "operator": "In", "values": [code]}
            return {"action": action, "onExitCodes": codes}

        disrupted = {"type": "DisruptionTarget", "status": "True"}
        rules = [
            exits(EXIT_REFUSED, "FailJob"),
            {"action": "Ignore", "onPodConditions": [disrupted]},
            exits(EXIT_PREEMPTED, "Ignore"),
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
                "template": self.pod(),
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
        pod = self.pod()
        (container,) = pod["spec"]["containers"]
        patch = {
            "metadata": {"labels": pod["metadata"]["labels"]},
            "spec": {
                **self.placement(),
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

    def part_name(self, number: int) -> str:
        return f"{self.name}-code-{number}"

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

    @property
    def bundle_uri(self) -> str:
        """Where the user's code is in a store on Blob or S3."""
        return f"{self.key}/bundles/{self.name}.tar.gz"

    def again(self, names_taken: int) -> KubernetesRequest:
        return replace(self, names_taken=names_taken)


def literal(text: str) -> str:
    """Text for a command, an argument or a variable, in which the kubelet would replace `$(NAME)`:
    it makes one $ of two."""
    return text.replace("$", "$$") if "$(" in text or "$$" in text else text


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
