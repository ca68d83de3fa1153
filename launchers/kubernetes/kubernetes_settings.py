"""The settings under `launcher.*` with launcher=kubernetes.

The forms of names and values are those of the API:
https://kubernetes.io/docs/concepts/overview/working-with-objects/names/
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from distdl.job import variable_problems
from distdl.launchers.common import (
    Count,
    Inputs,
    LauncherSettings,
    ListOf,
    Values,
    Walltime,
    matching,
    unknown_keys,
)
from distdl.util.errors import Problem, Refused
from distdl.util.suggest import did_you_mean_word

REQUIRED = {
    "image": "launcher.image=REGISTRY/NAME:TAG; launchers/kubernetes/Dockerfile builds one",
    "store": "launcher.store=s3://BUCKET/FOLDER, azure://CONTAINER/FOLDER or pvc://CLAIM/FOLDER",
}
PVC = re.compile(r"pvc://([^/]+)(/.*)?")
LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
SUBDOMAIN = rf"(?=.{{1,253}}\Z){LABEL}(\.{LABEL})*"
VALUE = r"(?=.{0,63}\Z)([A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?)?"
KEY = rf"(?=.{{1,317}}\Z)({LABEL}(\.{LABEL})*/)?[A-Za-z0-9]([A-Za-z0-9_.-]{{0,61}}[A-Za-z0-9])?"
QUANTITY = r"[0-9]+(\.[0-9]+)?(m|k|[MGTPE]|[KMGTPE]i)?"
# Of a volume, a secret, a toleration: the keys that each may have.
VOLUME_KEYS = ("claim", "path", "read_only")
SECRET_KEYS = ("secret", "key")
TOLERATION_KEYS = ("key", "operator", "value", "effect", "tolerationSeconds")
OPERATORS = ("Exists", "Equal")
EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
OWN_FOLDER = "/distdl"  # where the pod's own volumes are mounted
_PART = r"(?!\.+(?:/|$))[A-Za-z0-9_.+=@-]+"
STORE = re.compile(
    rf"(s3|azure|az)://[A-Za-z0-9$][A-Za-z0-9.-]*(/{_PART})*/*"
    rf"|abfss?://[a-z0-9$-]+@[a-z0-9.-]+(/{_PART})*/*"
    rf"|pvc://{LABEL}(\.{LABEL})*(/{_PART})*/*"
)

NAME = matching(SUBDOMAIN, "a name of an object", "small letters, digits, - and .")
NAMESPACE = matching(LABEL, "a namespace", "small letters, digits and -; kubectl get namespaces")
LABEL_VALUE = matching(VALUE, "a value of a label", "at most 63 letters, digits, - _ and .")
RESOURCE = matching(KEY, "a name of a resource", "nvidia.com/gpu, amd.com/gpu, rdma/hca_a")
AMOUNT = matching(QUANTITY, "a quantity", '"4", "500m", "64Gi"')
IMAGE = matching(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*", "an image", REQUIRED["image"])
FOLDER = matching(r"/[^:,]*", "a folder in the pod", "an absolute path")


def _text(value: object) -> object:
    """A number as a quantity: `cpus: 4` is what everybody writes."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _entries(value: object) -> object:
    return {} if value is None else value


def _store(value: str) -> str:
    if not STORE.fullmatch(value):
        raise Refused(
            what=f"{value!r} is not an address of a store",
            remedy=REQUIRED["store"],
            code="wrong-kind",
        )
    return value


Amount = Annotated[str, AMOUNT, BeforeValidator(_text)]
Entries = Annotated[dict[str, dict[str, Any]], BeforeValidator(_entries)]


class KubernetesSettings(LauncherSettings):
    """The keys of `launcher.*` with launcher=kubernetes."""

    kind: Literal["job", "trainjob"] = "job"
    """job: an Indexed Job with a headless Service, which every cluster has. trainjob: a TrainJob of
    Kubeflow Trainer 2.2 or later, if it is installed."""

    runtime: Annotated[str, NAME] = "torch-distributed"
    """The ClusterTrainingRuntime of a TrainJob, whose job for the nodes is called `node`."""

    context: str | None = None
    """The context of the kubeconfig; null: the current one, or the cluster of the pod that runs
    this."""

    namespace: Annotated[str, NAMESPACE] | None = None
    """The namespace; null: that of the context."""

    image: Annotated[str, IMAGE] | None = None
    """The container image. Required.

    launchers/kubernetes/Dockerfile shows one."""

    pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """When a node fetches the image; null: always for the tag `latest`, else if it is not there."""

    pull_secrets: ListOf[Annotated[str, NAME]] = []
    """Secrets of the namespace with which nodes fetch the image."""

    store: Annotated[str, AfterValidator(_store)] | None = None
    """Where checkpoints, logs and status are kept: s3://BUCKET/FOLDER, azure://CONTAINER/FOLDER,
    abfss://..., or pvc://CLAIM/FOLDER, a volume that all nodes can write (ReadWriteMany). Required.

    Each run has the folder <experiment>/<name> in it."""

    code: Annotated[str, FOLDER] | None = None
    """A folder of the image that has the code, as the bundle has it (`distdl/`, `project/`); null:
    the code is sent with each job."""

    sync: Annotated[int, Field(ge=5, le=3600)] = 30
    """How often each pod copies what is new to a store on Blob or S3, in seconds. A last time when
    it ends."""

    service_account: Annotated[str, NAME] | None = None
    """The service account of the pods, for example one with a workload identity; null: the
    namespace's default one, without its token."""

    queue: Annotated[str, NAME] | None = None
    """The LocalQueue of Kueue that admits the job; null: none."""

    priority_class: Annotated[str, NAME] | None = None
    """The PriorityClass of the pods, also for Kueue."""

    node_selector: Annotated[
        dict[Annotated[str, matching(KEY, "a key of a label")], Annotated[str, LABEL_VALUE]],
        BeforeValidator(_entries),
    ] = {}
    """Labels that the nodes must have, e.g. {node.kubernetes.io/instance-type: p5.48xlarge}."""

    tolerations: ListOf[dict[str, Any]] = []
    """Taints that the pods tolerate, e.g. [{key: nvidia.com/gpu, operator: Exists}]."""

    gpu: Annotated[str, RESOURCE] = "nvidia.com/gpu"
    """The name of a GPU as a resource, e.g. amd.com/gpu. trainer.devices is the number per pod."""

    cpus: Amount | None = None
    """CPUs of each pod, e.g. 32; null: no request."""

    memory: Amount | None = None
    """Memory of each pod, e.g. 256Gi, also for /dev/shm; null: no request and no limit."""

    resources: Annotated[dict[Annotated[str, RESOURCE], Amount], BeforeValidator(_entries)] = {}
    """Other resources of each pod: name -> quantity, e.g. {ephemeral-storage: 200Gi}."""

    rdma: Annotated[str, RESOURCE] | None = None
    """The resource of an RDMA device, e.g. rdma/hca_shared_devices_a or vpc.amazonaws.com/efa, of
    which each pod gets one; null: none."""

    ipc_lock: bool = False
    """Whether the ranks may lock memory without a limit, which most RDMA devices need. Only with
    pod_security=privileged."""

    shm: Amount | None = "8Gi"
    """Size of /dev/shm, in memory, where data workers pass on batches; null: 64 MiB, as containers
    have it."""

    volumes: Entries = {}
    """Further volumes: name -> {claim: <PersistentVolumeClaim>, path: /data, read_only: true}."""

    inputs: Inputs = {}
    """The data of the job: name -> a path in the pod (below a volume's), or the address of a store.

    The recipe uses it as ${input:name}."""

    env: Values = {}
    """More environment variables of every rank, e.g. {NCCL_DEBUG: INFO}; never a secret."""

    secrets: Entries = {}
    """Variables of every rank from Secrets of the namespace: NAME -> {secret: ..., key: ...}."""

    forward_env: ListOf[str] = []
    """Names of environment variables whose values every rank gets, through a Secret that ends with
    the job."""

    pod_security: Literal["restricted", "baseline", "privileged"] = "restricted"
    """The Pod Security Standard that the pods obey: restricted (no root, no privileges), baseline
    or privileged."""

    run_as: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = 1000
    """The user and group number of the ranks; null: the image's user, or that of the cluster
    (OpenShift)."""

    grace_seconds: Annotated[int, Field(ge=10, le=86400)] = 120
    """Seconds from SIGTERM until a pod is killed. The ranks have three quarters of it to save, the
    rest is for copying to the store."""

    walltime: Walltime = 24
    """The time limit of the job from its start, with all its retries: hours (0.5), or in quotes
    "1:30:00", "2-12" (days-hours).

    The ranks then get SIGTERM."""

    retries: Count = 0
    """How often a failed pod is replaced by the Job controller before the job fails. Evictions,
    lost nodes and preemptions do not count."""

    wait: Walltime = 1
    """How long the first pods wait for the others, which may still be in a queue or pull their
    image; forms as for walltime."""

    ttl: Walltime = 168
    """How long the job is kept after its end, with its pods' logs; forms as for walltime."""

    port: Annotated[int, Field(ge=1025, le=65535)] = 29500
    """The port of the ranks' store in the first pod. The heartbeat's is the one below."""

    labels: Annotated[
        dict[Annotated[str, matching(KEY, "a key of a label")], Annotated[str, LABEL_VALUE]],
        BeforeValidator(_entries),
    ] = {}
    """Labels of the job and its pods, besides distdl's own."""

    annotations: Annotated[
        dict[Annotated[str, matching(KEY, "a key of an annotation")], str],
        BeforeValidator(_entries),
    ] = {}
    """Annotations of the pods, e.g. {k8s.v1.cni.cncf.io/networks: rdma-net}."""

    files: str | None = None
    """A folder into which a dry run writes the manifests and the bundle; only with dry_run=true."""

    def misfits(self, context: Mapping[str, Any]) -> Iterator[Problem]:
        for key, remedy in REQUIRED.items():
            if not getattr(self, key):
                yield Problem(key, what="missing", remedy=remedy, code="missing-key")
        if self.ipc_lock and self.pod_security != "privileged":
            yield Problem(
                "ipc_lock",
                what=f"the level {self.pod_security} forbids the capability IPC_LOCK",
                remedy="launcher.pod_security=privileged, if the namespace allows it",
                code="conflict",
            )
        if self.gpu in self.resources:
            at = f"resources.{self.gpu}"
            yield Problem(at, what="distdl sets it", remedy="trainer.devices=N", code="reserved")
        if context["accelerator"] == "mps":
            yield Problem(
                "_target_",
                what="no pod has an mps device",
                remedy="trainer.accelerator=gpu or cpu",
                code="unsupported",
            )
        yield from self._volumes()
        yield from self._secrets()
        yield from self._tolerations()
        yield from variable_problems({"env": self.env, "forward_env": self.forward_env})
        yield from unknown_keys(self.inputs, ("path",))
        for name, entry in self.inputs.items():
            at = f"inputs.{name}"
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                yield Problem(
                    at,
                    what="is not a valid name",
                    remedy="letters, digits and _",
                    code="wrong-type",
                )
            elif not re.fullmatch(r"/.*|[a-z0-9]{2,}://.+", str(entry.get("path") or "")):
                yield Problem(
                    at,
                    what=f"a pod cannot read {entry.get('path') or 'an empty path'}",
                    remedy="/data/..., on a volume; or s3://, azure://",
                    code="unsupported",
                )

    def _volumes(self) -> Iterator[Problem]:
        taken: dict[str, str] = {}
        for name, entry in self.volumes.items():
            at = f"volumes.{name}"
            yield from _unknown(at, entry, VOLUME_KEYS)
            if not re.fullmatch(LABEL, name):
                yield Problem(
                    at,
                    what="is not a valid name",
                    remedy="small letters, digits and -",
                    code="wrong-type",
                )
            if not re.fullmatch(SUBDOMAIN, str(entry.get("claim") or "")):
                yield Problem(
                    f"{at}.claim",
                    what=f"{entry.get('claim')!r} is not a PersistentVolumeClaim",
                    remedy="kubectl get pvc",
                    code="wrong-kind",
                )
            path = str(entry.get("path") or "")
            if not re.fullmatch(r"/[^:,\x00-\x1f\x7f]+", path) or ".." in path.split("/"):
                yield Problem(
                    f"{at}.path",
                    what=f"{path!r} is not a folder in the pod",
                    remedy="path: /data",
                    code="wrong-kind",
                )
            elif path.rstrip("/") in ("/dev/shm", *taken) or f"{path}/".startswith(
                f"{OWN_FOLDER}/"
            ):
                yield Problem(
                    f"{at}.path",
                    what=f"{path} is taken",
                    remedy="choose another folder",
                    code="conflict",
                )
            taken[path.rstrip("/")] = name
            if not isinstance(entry.get("read_only", True), bool):
                yield Problem(
                    f"{at}.read_only",
                    what=f"{entry['read_only']!r} is not true or false",
                    code="wrong-type",
                )

    def _secrets(self) -> Iterator[Problem]:
        for name, entry in self.secrets.items():
            at = f"secrets.{name}"
            yield from _unknown(at, entry, SECRET_KEYS)
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                yield Problem(
                    at,
                    what="is not a valid variable name",
                    remedy="letters, digits and _",
                    code="wrong-type",
                )
            if name in self.forward_env or name in self.env:
                yield Problem(
                    at,
                    what="is also in launcher.env or launcher.forward_env",
                    remedy="leave one out",
                    code="conflict",
                )
            if not re.fullmatch(SUBDOMAIN, str(entry.get("secret") or "")):
                yield Problem(
                    f"{at}.secret",
                    what=f"{entry.get('secret')!r} is not the name of a Secret",
                    remedy="kubectl get secrets",
                    code="wrong-kind",
                )
            if not re.fullmatch(r"[A-Za-z0-9._-]{1,253}", str(entry.get("key") or "")):
                yield Problem(
                    f"{at}.key",
                    what=f"{entry.get('key')!r} is not a key of a Secret",
                    remedy="kubectl describe secret NAME",
                    code="wrong-kind",
                )

    def _tolerations(self) -> Iterator[Problem]:
        for number, entry in enumerate(self.tolerations):
            at = f"tolerations.{number}"
            yield from _unknown(at, entry, TOLERATION_KEYS)
            operator = entry.get("operator", "Equal")
            key = entry.get("key", "")
            if key and not (isinstance(key, str) and re.fullmatch(KEY, key)):
                yield Problem(
                    f"{at}.key",
                    what=f"{key!r} is not a key of a taint",
                    remedy="nvidia.com/gpu",
                    code="wrong-kind",
                )
            yield from _one_of(f"{at}.operator", operator, OPERATORS)
            if operator == "Exists" and entry.get("value"):
                yield Problem(
                    f"{at}.value",
                    what="has no meaning with operator: Exists",
                    remedy="leave it out",
                    code="conflict",
                )
            if operator == "Equal" and not key:
                yield Problem(
                    f"{at}.key",
                    what="missing",
                    remedy="or operator: Exists, which tolerates all",
                    code="missing-key",
                )
            value = entry.get("value", "")
            if not (isinstance(value, str) and re.fullmatch(VALUE, value)):
                yield Problem(
                    f"{at}.value",
                    what=f"{value!r} is not a value of a taint",
                    remedy='value: "true"',
                    code="wrong-kind",
                )
            if "effect" in entry:
                yield from _one_of(f"{at}.effect", entry["effect"], EFFECTS)
            seconds = entry.get("tolerationSeconds")
            if seconds is not None and (
                type(seconds) is not int or entry.get("effect") != "NoExecute"
            ):
                yield Problem(
                    f"{at}.tolerationSeconds",
                    what="has a meaning only with effect: NoExecute, as a number",
                    remedy="leave it out",
                    code="conflict",
                )


def _unknown(at: str, entry: Mapping[str, Any], known: tuple[str, ...]) -> Iterator[Problem]:
    for key in sorted(set(map(str, entry)) - set(known)):
        yield Problem(
            f"{at}.{key}",
            what="not a setting here",
            remedy=did_you_mean_word(key, known) or f"it has {', '.join(known)}",
            code="unknown-key",
        )


def _one_of(at: str, value: object, known: tuple[str, ...]) -> Iterator[Problem]:
    if value not in known:
        yield Problem(
            at,
            what=f"{value!r} is not known",
            remedy=did_you_mean_word(str(value), known) or f"one of {', '.join(known)}",
            code="wrong-choice",
        )
