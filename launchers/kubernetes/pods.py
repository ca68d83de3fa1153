"""The template of a job's pods: the container's command, variables, volumes and rights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distdl.job import VERDICTS, variables
from distdl.launchers.common import PYTHON_CHECK
from distdl.launchers.kubernetes.names import CONTAINER, RUN, JobNames
from distdl.util.exit_codes import EXIT_NOT_STARTED as NO_PYTHON

Manifest = dict[str, Any]

# Folders in the pod.
SENT = "/distdl/sent"  # the parts of the archive, from ConfigMaps
WORK = "/distdl/node"  # an empty disk
CLAIM = "/distdl/store"  # the store, if it is a volume
ARCHIVE = "code.tar.gz"
MOST_PARTS = 8
# The message is the pod's last word. NO_PYTHON, as a shell says it.
CHECK = f'python -c "{PYTHON_CHECK}" || exit {NO_PYTHON}; '
# `exec` makes the entry point the container's first process.
UNPACK = (
    f"cat {SENT}/* > {WORK}/{ARCHIVE} && "
    f"python -m tarfile --filter data -e {WORK}/{ARCHIVE} {WORK}/bundle && "
)
ENTRY = 'PYTHONPATH="$1/code" exec python -m distdl.launchers.kubernetes.entry "$@"'
# Without these, libraries look for the home of a user whom the image does not know.
HOME = {"HOME": f"{WORK}/home", "USER": "distdl", "LOGNAME": "distdl"}


@dataclass(frozen=True)
class PodTemplate:
    """The template of the pods of a job."""

    job: JobNames

    def command(self) -> list[str]:
        """The code is what was sent, or what the image has in the folder `launcher.code`."""
        link = f'ln -s "$0" {WORK}/bundle/code && ' if self.job.settings.code else ""
        return ["sh", "-c", f"{CHECK}mkdir -p {WORK}/home && {UNPACK}{link}{ENTRY}"]

    def arguments(self) -> list[str]:
        settings = self.job.settings
        size = self.job.spec.resources
        store = self.job.key
        if claim := self.job.claim:
            store = f"{CLAIM}{(claim[2] or '').rstrip('/')}/{self.job.spec.name}"
        options = {
            "store": store,
            "nodes": size.num_nodes,
            "devices": size.devices,
            "attempt": self.job.spec.attempt,
            "first": self.job.first_pod,
            "port": settings.port,
            "grace": settings.grace_seconds,
            "wait": settings.wait,
            "sync": settings.sync,
            "job": self.job.name,
        }
        named = [f"--{name}={value}" for name, value in options.items()]
        return [settings.code or CONTAINER, f"{WORK}/bundle", *named]

    def environment(self) -> list[Manifest]:
        """The container's variables. Everybody who may read the job sees them."""
        settings = self.job.settings
        # Also of an input that is the address of a store: the recipe then names it by ${input:...}.
        inputs = {f"DISTDL_INPUT_{n.upper()}": str(e["path"]) for n, e in settings.inputs.items()}
        plain_values = {
            **HOME,
            **variables(settings.env, self.job.spec.env),
            **inputs,
            "DISTDL_LAUNCHER": "kubernetes",
            **({VERDICTS: self.job.key} if self.job.spec.judged else {}),
        }
        references = {
            **{name: (each["secret"], each["key"]) for name, each in settings.secrets.items()},
            **{name: (self.job.secret, name) for name in self.job.spec.forward_env},
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
        settings = self.job.settings
        size = self.job.spec.resources
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
        settings = self.job.settings
        # The first part has to be there; how many others there are, is known when it is packed.
        parts = [
            {"configMap": {"name": self.job.part_name(n), **({"optional": True} if n else {})}}
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
            *([{"name": "distdl-shm", "mountPath": "/dev/shm"}] if self.job.settings.shm else []),
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
        if claim := self.job.claim:
            own = {"claim": claim[1], "path": CLAIM, "read_only": False}
            return {"distdl-store": own, **self.job.settings.volumes}
        return self.job.settings.volumes

    def pod_security(self) -> Manifest:
        """https://kubernetes.io/docs/concepts/security/pod-security-standards/"""
        user = self.job.settings.run_as
        fields: Manifest = {}
        if self.job.settings.pod_security == "restricted":
            fields["runAsNonRoot"] = True
        if user:
            fields |= {"runAsUser": user, "runAsGroup": user, "fsGroup": user}
            fields["fsGroupChangePolicy"] = "OnRootMismatch"
        return {**fields, "seccompProfile": {"type": "RuntimeDefault"}}

    def container_security(self) -> Manifest:
        settings = self.job.settings
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
        settings = self.job.settings
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
        annotations = {**settings.annotations, RUN: self.job.spec.name}
        return {
            "metadata": {"labels": self.job.labels, "annotations": annotations},
            "spec": {
                "restartPolicy": "Never",
                "subdomain": self.job.name,
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
        settings = self.job.settings
        pull = [{"name": name} for name in settings.pull_secrets]
        fields = {
            "nodeSelector": settings.node_selector,
            "tolerations": settings.tolerations,
            "serviceAccountName": settings.service_account,
            "imagePullSecrets": pull,
        }
        return {key: value for key, value in fields.items() if value}


def literal(text: str) -> str:
    """Text for a command, an argument or a variable, in which the kubelet would replace `$(NAME)`:
    it makes one $ of two."""
    return text.replace("$", "$$") if "$(" in text or "$$" in text else text
