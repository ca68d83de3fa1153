"""A stand-in for Kubernetes over real HTTP, whose pods really run their command on this machine.

    with Kube(folder) as kube:
        kube.kubeconfig             # for the real client
        kube.nodes["node-1"].lose() # and evict, kill: see the methods

It has what distdl relies on: of the API server the objects, merge patches, dry runs, selectors,
logs, and its refusals; the Job controller; a kubelet for each node. Each rule that is taken from a
document has its address.

A pod is a process with its own mounts and process numbers (its command is number 1) on a loopback
address of its own; names of pods lead to these addresses.
"""

import base64
import contextlib
import copy
import fcntl
import http.server
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import uuid
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import yaml

from tests import kubernetes_objects

TOKEN = "token-of-somebody"
BARE = "bare:1"  # an image without Python
PATH = re.compile(
    r"/(api/v1|apis/batch/v1|apis/trainer\.kubeflow\.org/v1alpha1)/namespaces/([^/]+)/"
    r"(jobs|pods|services|configmaps|secrets|events|trainjobs)(?:/([^/]+))?(?:/(log|eviction))?"
)
KINDS = {"jobs": "Job", "trainjobs": "TrainJob"}
ADDRESSES = itertools.count(1)
# In the pod's mounts: its volumes (source, target), then its own command as process number 1.
ENTER = """
mount --make-rprivate /
mount -t tmpfs none /distdl
mount --bind "$1" /etc/hosts
shift
while [ "$1" != -- ]; do mkdir -p "$2"; mount --bind "$1" "$2"; shift 2; done
shift
exec "$@"
"""


def why_not() -> str:
    """Why there can be no pods here; empty if there can."""
    if sys.version_info < (3, 11, 4):
        return "a pod needs Python 3.11.4, and has this one"
    done = subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"], capture_output=True)
    return "" if done.returncode == 0 else "namespaces need root"


@contextlib.contextmanager
def folder_of_pods():
    """/distdl, on which each pod mounts volumes of its own. The last user on this machine removes
    it: the kernel would also take away what the pods of another one have mounted there."""
    folder = Path("/distdl")
    # Not in gettempdir(): each session of pytest has another one (tests/conftest.py).
    with Path("/tmp/distdl-pods.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        folder.mkdir(exist_ok=True)
        yield
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            folder.rmdir()


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Refused(Exception):
    def __init__(self, status, message):
        super().__init__(message)
        self.status = status


class Kube:
    """The cluster. `nodes`: names; `light`: what runs instead of `python -m distdl.agent`."""

    def __init__(self, folder: Path, nodes=("node-1", "node-2"), light: str = "") -> None:
        self.folder = folder
        self.lock = threading.RLock()
        self.objects = {}  # (resource, namespace, name) -> object
        self.namespaces = {"default", "train"}
        self.images = {"distdl:1", BARE}
        self.forbidden = set()  # (verb, resource)
        self.broken = ""  # why the controllers have ended
        self.used_up = set()  # resources whose quota is used up
        self.pods_quota = 100
        self.light = light
        self.requests = []
        self.nodes = {name: Node(self, name) for name in nodes}
        self.over = threading.Event()

    def __enter__(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        self.mounted = contextlib.ExitStack()
        self.mounted.enter_context(folder_of_pods())
        handler = type("Handler", (Handler,), {"kube": self})
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.kubeconfig = self.write_kubeconfig("config", TOKEN)
        threading.Thread(target=self.control, daemon=True).start()
        return self

    def __exit__(self, *error):
        self.over.set()
        self.server.shutdown()
        for node in self.nodes.values():
            node.kill_all()
        self.mounted.close()

    def write_kubeconfig(self, name, token):
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "stand-in",
            "clusters": [{"name": "c", "cluster": {"server": self.url}}],
            "users": [{"name": "u", "user": {"token": token}}],
            "contexts": [
                {"name": "stand-in", "context": {"cluster": "c", "user": "u", "namespace": "train"}}
            ],
        }
        path = self.folder / name
        path.write_text(yaml.safe_dump(config))
        return path

    # ---- objects --------------------------------------------------------------------------------

    def all(self, resource, namespace="train"):
        with self.lock:
            chosen = [k for k in self.objects if k[:2] == (resource, namespace)]
            return [self.objects[key] for key in chosen]

    def get(self, resource, name, namespace="train"):
        try:
            return self.objects[resource, namespace, name]
        except KeyError:
            group = {"jobs": ".batch", "trainjobs": ".trainer.kubeflow.org"}.get(resource, "")
            raise Refused(404, f'{resource}{group} "{name}" not found') from None

    def create(self, resource, namespace, body, dry_run=False):
        """https://kubernetes.io/docs/reference/using-api/api-concepts/#dry-run"""
        with self.lock:
            if namespace not in self.namespaces:
                raise Refused(404, f'namespaces "{namespace}" not found')
            if resource in self.used_up:
                raise Refused(403, f"{resource} is forbidden: exceeded quota: count/{resource}=1")
            name = body["metadata"]["name"]
            if (resource, namespace, name) in self.objects:
                raise Refused(409, f'{resource} "{name}" already exists')
            if resource != "pods":
                try:
                    kubernetes_objects.check(body, ("1.33",))
                except Exception as error:  # the library has no class of its own for it
                    raise Refused(422, f"is invalid: {str(error).splitlines()[0]}") from None
            made = copy.deepcopy(body)
            made["metadata"] |= {"uid": str(uuid.uuid4()), "namespace": namespace}
            made["metadata"]["creationTimestamp"] = now()
            if not dry_run:
                self.objects[resource, namespace, name] = made
            return made

    def delete(self, resource, namespace, name):
        """Removes an object and, in the background, what it owns; pods get their grace period.
        https://kubernetes.io/docs/concepts/architecture/garbage-collection/"""
        with self.lock:
            thing = self.get(resource, name, namespace)
            if resource == "pods":
                self.end_pod(thing)
                return thing
            del self.objects[resource, namespace, name]
            for key, other in [*self.objects.items()]:
                owners = other["metadata"].get("ownerReferences", ())
                if any(owner["uid"] == thing["metadata"]["uid"] for owner in owners):
                    self.delete(key[0], key[1], key[2])
            return thing

    def end_pod(self, pod):
        """SIGTERM, and SIGKILL after the grace period; the pod is gone once it has ended."""
        if "deletionTimestamp" not in pod["metadata"]:
            pod["metadata"]["deletionTimestamp"] = now()
            pod["_asked"] = True

    def event(self, kind, name, namespace, reason, message):
        event = {
            "metadata": {"name": f"{name}.{uuid.uuid4().hex[:8]}"},
            "involvedObject": {"kind": kind, "name": name},
            "reason": reason,
            "message": message,
            "lastTimestamp": now(),
        }
        key = ("events", namespace, event["metadata"]["name"])
        self.objects[key] = event

    # ---- what tests do to it --------------------------------------------------------------------

    def pods(self, index=None, running=False):
        """The pods, the newest last."""
        found = sorted(self.all("pods"), key=lambda pod: pod["_number"])
        if index is not None:
            found = [pod for pod in found if index_of(pod) == index]
        return [pod for pod in found if pod["status"]["phase"] == "Running"] if running else found

    def kill(self, pod):
        """As the kernel ends a container that has too little memory."""
        pod["_run"].kill()

    def disrupt(self, pod, reason):
        """https://kubernetes.io/docs/concepts/workloads/pods/disruptions/#pod-disruption-conditions"""
        with self.lock:
            target = {"type": "DisruptionTarget", "status": "True", "reason": reason}
            pod["status"]["conditions"].append({**target, "message": "by the test"})
            self.end_pod(pod)

    # ---- controllers ----------------------------------------------------------------------------

    def control(self):
        try:
            while not self.over.wait(0.1):
                with self.lock:
                    for job in self.all("jobs"):
                        control_job(self, job)
                    for node in self.nodes.values():
                        node.control()
                    for pod in self.all("pods"):
                        bind(self, pod)
        except Exception:  # nothing would move any more, and every test would wait in silence
            self.broken = traceback.format_exc()


def index_of(pod):
    return int(pod["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"])


def set_condition(job, kind, reason="", message=""):
    conditions = job["status"].setdefault("conditions", [])
    if not has(job, kind):
        stamp = {"lastTransitionTime": now(), "reason": reason, "message": message}
        conditions.append({"type": kind, "status": "True", **stamp})


def has(job, kind):
    return any(c["type"] == kind for c in job.get("status", {}).get("conditions", ()))


def control_job(kube, job):
    """https://kubernetes.io/docs/concepts/workloads/controllers/job/, section by section."""
    spec, meta = job["spec"], job["metadata"]
    namespace, name = meta["namespace"], meta["name"]
    status = job.setdefault("status", {})
    own = [p for p in kube.all("pods", namespace) if p["_job"] == meta["uid"]]
    ended = ("Succeeded", "Failed")
    active = [p for p in own if p["status"]["phase"] not in ended]
    if has(job, "Complete") or has(job, "Failed"):
        # "TTL mechanism for finished Jobs": also removes what depends on the job
        ttl = spec.get("ttlSecondsAfterFinished")
        if ttl is not None and time.time() - status["_finished"] >= ttl:
            kube.delete("jobs", namespace, name)
        return
    if has(job, "FailureTarget"):  # the Failed condition comes once all pods have ended
        for pod in active:
            kube.end_pod(pod)
        if not active:
            why = next(c for c in status["conditions"] if c["type"] == "FailureTarget")
            set_condition(job, "Failed", why["reason"], why["message"])
            status["_finished"] = time.time()
        return
    if spec.get("suspend"):
        # "Suspending a Job": active pods get SIGTERM; the time starts again when it is resumed
        for pod in active:
            kube.end_pod(pod)
        status.pop("startTime", None)
        return
    if "startTime" not in status:
        status |= {"startTime": now(), "_start": time.time()}
    # "Job termination and cleanup": the deadline takes precedence over backoffLimit
    if time.time() - status["_start"] >= spec.get("activeDeadlineSeconds", 1e9):
        message = "Job was active longer than specified deadline"
        set_condition(job, "FailureTarget", "DeadlineExceeded", message)
        return
    # "Pod failure policy": the first rule that matches decides; without one the failure counts
    counted = 0
    for pod in own:
        if pod["status"]["phase"] != "Failed":
            continue
        action, rule = action_for(pod, spec.get("podFailurePolicy", {}).get("rules", ()))
        if action == "FailJob":
            message = f"Container for pod {namespace}/{pod['metadata']['name']} matched rule {rule}"
            set_condition(job, "FailureTarget", "PodFailurePolicy", message)
            return
        counted += action == "Count"
    if counted > spec.get("backoffLimit", 6):
        message = "Job has reached the specified backoff limit"
        set_condition(job, "FailureTarget", "BackoffLimitExceeded", message)
        return
    # "Indexed": done once there is one succeeded pod for each index
    done = {index_of(p) for p in own if p["status"]["phase"] == "Succeeded"}
    if len(done) == spec["completions"]:
        set_condition(job, "Complete")
        status["_finished"] = time.time()
        return
    # "Pod replacement policy": with Failed, a pod's successor comes once it has ended
    for index in range(spec["completions"]):
        if index in done or index in {index_of(p) for p in active}:
            continue
        if len(active) >= spec["parallelism"]:
            break
        if len(kube.all("pods", namespace)) >= kube.pods_quota:
            refused = f"pods is forbidden: exceeded quota: pods={kube.pods_quota}"
            kube.event("Job", name, namespace, "FailedCreate", f"Error creating: {refused}")
            break
        active.append(create_pod(kube, job, index))


def action_for(pod, rules):
    (container,) = pod["status"]["containerStatuses"]
    code = container["state"].get("terminated", {}).get("exitCode")
    held = {(c["type"], c["status"]) for c in pod["status"]["conditions"]}
    for number, rule in enumerate(rules):
        if codes := rule.get("onExitCodes"):
            matches = code in codes["values"] and codes["operator"] == "In" and code != 0
        else:
            matches = any((c["type"], c["status"]) in held for c in rule["onPodConditions"])
        if matches:
            return rule["action"], number
    return "Count", None


def create_pod(kube, job, index):
    """ "Completion mode": the index is in an annotation, a label, a variable and the host name."""
    name = job["metadata"]["name"]
    template = copy.deepcopy(job["spec"]["template"])
    key = "batch.kubernetes.io/job-completion-index"
    meta = template["metadata"]
    meta["name"] = f"{name}-{index}-{uuid.uuid4().hex[:5]}"
    meta["annotations"] = {**meta.get("annotations", {}), key: str(index)}
    meta["labels"] = {**meta["labels"], "batch.kubernetes.io/job-name": name, key: str(index)}
    meta["ownerReferences"] = [{"kind": "Job", "name": name, "uid": job["metadata"]["uid"]}]
    (container,) = template["spec"]["containers"]
    container["env"].append({"name": "JOB_COMPLETION_INDEX", "value": str(index)})
    template["spec"]["hostname"] = f"{name}-{index}"
    template["status"] = {"phase": "Pending", "conditions": [], "containerStatuses": []}
    template |= {"_job": job["metadata"]["uid"], "_number": next(ADDRESSES)}
    return kube.create("pods", job["metadata"]["namespace"], template)


def bind(kube, pod):
    """The scheduler: the node with the fewest pods that suits."""
    if pod["spec"].get("nodeName"):
        return
    if pod["metadata"].get("deletionTimestamp"):
        kube.objects.pop(("pods", pod["metadata"]["namespace"], pod["metadata"]["name"]))
        return
    free = [node for node in kube.nodes.values() if node.takes(pod)]
    pod["status"]["conditions"] = [
        c for c in pod["status"]["conditions"] if c["type"] != "PodScheduled"
    ]
    if not free:
        what = f"0/{len(kube.nodes)} nodes are available: node(s) didn't match Pod's node selector."
        refusal = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
        pod["status"]["conditions"].append({**refusal, "message": what})
        return
    pod["spec"]["nodeName"] = min(free, key=lambda node: len(node.live())).name


class Node:
    """A kubelet."""

    def __init__(self, kube, name):
        self.kube = kube
        self.name = name
        self.labels = {"kubernetes.io/hostname": name}
        self.lost = False

    def live(self):
        pods = [p for p in self.kube.all("pods") if p["spec"].get("nodeName") == self.name]
        return [p for p in pods if p["status"]["phase"] in ("Pending", "Running")]

    def takes(self, pod):
        wanted = pod["spec"].get("nodeSelector", {})
        return not self.lost and wanted.items() <= self.labels.items()

    def control(self):
        if self.lost:
            return
        for pod in self.kube.all("pods"):
            if pod["spec"].get("nodeName") != self.name:
                continue
            if "_run" not in pod and pod["status"]["phase"] == "Pending":
                self.start(pod)
            elif "_run" in pod:
                self.look(pod)
            if pod["metadata"].get("deletionTimestamp"):
                self.end(pod)

    def start(self, pod):
        if pod["metadata"].get("deletionTimestamp"):
            return
        (container,) = pod["spec"]["containers"]
        if container["image"] not in self.kube.images:
            reason, message = "ErrImagePull", f'failed to resolve "{container["image"]}": not found'
        elif missing := missing_objects(self.kube, pod):
            reason, message = "CreateContainerConfigError", missing
        else:
            pod["_run"] = Run(self.kube, pod)
            pod["status"] |= {"phase": "Running", "podIP": pod["_run"].address}
            report(pod, {"running": {"startedAt": now()}})
            return
        report(pod, {"waiting": {"reason": reason, "message": message}})

    def look(self, pod):
        code = pod["_run"].process.poll()
        if code is None or pod["status"]["phase"] in ("Succeeded", "Failed"):
            return
        code = code if code >= 0 else 128 - code
        pod["status"]["phase"] = "Failed" if code else "Succeeded"
        reason = "Error" if code else "Completed"
        message = pod["_run"].message()
        ended = {"exitCode": code, "reason": reason, "message": message, "finishedAt": now()}
        report(pod, {"terminated": ended})

    def end(self, pod):
        """The pod's grace period, then its end; the object goes once it has ended."""
        run = pod.get("_run")
        if run and run.process.poll() is None:
            grace = pod["spec"].get("terminationGracePeriodSeconds", 30)
            run.terminate(grace)
        elif run and pod["status"]["phase"] == "Running":
            self.look(pod)
        else:
            if pod["status"]["phase"] == "Pending":
                pod["status"]["phase"] = "Failed"
                report(pod, {"terminated": {"exitCode": 137, "reason": "ContainerStatusUnknown"}})
            owned = any(p["metadata"]["uid"] == pod["_job"] for p in self.kube.all("jobs"))
            if not owned or not pod.get("_asked"):
                key = ("pods", pod["metadata"]["namespace"], pod["metadata"]["name"])
                self.kube.objects.pop(key, None)

    def lose(self):
        """The machine is cut off: its processes stand still, and nobody hears of it. The control
        plane gives it up (tests do not wait for the 5 minutes of a toleration)."""
        with self.kube.lock:
            self.lost = True
            for pod in self.live():
                pod["_run"].freeze()
                reason = {"type": "DisruptionTarget", "status": "True"}
                reason |= {"reason": "DeletionByTaintManager", "message": "node is lost"}
                pod["status"]["conditions"].append(reason)
                pod["metadata"]["deletionTimestamp"] = now()
                # Out of service (a taint): the pod counts as ended.
                pod["status"]["phase"] = "Failed"
                report(pod, {})

    def kill_all(self):
        for pod in self.kube.all("pods"):
            if pod["spec"].get("nodeName") == self.name and "_run" in pod:
                pod["_run"].kill()


def report(pod, state):
    pod["status"]["containerStatuses"] = [
        {"name": c["name"], "image": c["image"], "restartCount": 0, "state": state}
        for c in pod["spec"]["containers"]
    ]


def missing_objects(kube, pod):
    namespace = pod["metadata"]["namespace"]
    for each in references(pod["spec"]):
        if (*each[:1], namespace, each[1]) not in kube.objects and not each[2]:
            return f'{each[0].rstrip("s")} "{each[1]}" not found'
    return ""


def references(spec):
    """Resource, name, and whether it may be missing."""
    for volume in spec.get("volumes", ()):
        for source in volume.get("projected", {}).get("sources", ()):
            yield "configmaps", source["configMap"]["name"], source["configMap"].get("optional")
    for container in spec["containers"]:
        for entry in container["env"]:
            if reference := entry.get("valueFrom", {}).get("secretKeyRef"):
                yield "secrets", reference["name"], False


class Run:
    """A pod's processes."""

    def __init__(self, kube, pod):
        self.kube = kube
        number = pod["_number"]
        self.address = f"127.1.{os.getpid() % 250}.{number % 250 + 1}"
        self.folder = kube.folder / "pods" / pod["metadata"]["name"]
        self.folder.mkdir(parents=True)
        self.log = self.folder / "log"
        (self.folder / "termination-log").touch()
        self.hosts(pod)
        (container,) = pod["spec"]["containers"]
        sources = {v["name"]: self.volume(v) for v in pod["spec"]["volumes"]}
        mounts = []
        for mount in container["volumeMounts"]:
            mounts += [str(sources[mount["name"]]), mount["mountPath"]]
        command = [expand(word) for word in (*container["command"], *container["args"])]
        space = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
        inside = ["sh", "-ec", ENTER, "sh", str(kube.hosts_file), *mounts, "--", *command]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*space, *inside],
                env=self.environment(pod, container),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,
            )
        self.deadline = None

    def hosts(self, pod):
        """Headless Services give pods names: https://kubernetes.io/docs/concepts/services-networking/
        dns-pod-service/#pod-s-hostname-and-subdomain-fields"""
        if not hasattr(self.kube, "names"):
            self.kube.names = {}
            self.kube.hosts_file = self.kube.folder / "hosts"
        service = pod["spec"]["subdomain"]
        if ("services", pod["metadata"]["namespace"], service) in self.kube.objects:
            # Before Indexed Jobs only one pod has the name that an index has.
            host = pod["spec"].get("hostname", f"{service}-0")
            self.kube.names[f"{host}.{service}"] = self.address
        lines = [f"{address} {name}" for name, address in self.kube.names.items()]
        self.kube.hosts_file.write_text(
            "\n".join([f"127.0.0.1 localhost {socket.gethostname()}", *lines, ""])
        )

    def volume(self, volume):
        """A folder with what is in the volume."""
        folder = self.folder / volume["name"]
        if claim := volume.get("persistentVolumeClaim"):
            folder = self.kube.folder / "claims" / claim["claimName"]
        folder.mkdir(parents=True, exist_ok=True)
        for source in volume.get("projected", {}).get("sources", ()):
            key = ("configmaps", "train", source["configMap"]["name"])
            for name, text in self.kube.objects.get(key, {}).get("binaryData", {}).items():
                (folder / name).write_bytes(base64.b64decode(text))
        return folder

    def environment(self, pod, container):
        env = {"PATH": f"{self.tools()}:{Path(sys.executable).parent}:/usr/bin:/bin"}
        if container["image"] == BARE:
            env["PATH"] = f"{self.bare()}"
        env |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        env |= {"DISTDL_TERMINATION_LOG": str(self.folder / "termination-log")}
        env |= {k: v for k, v in os.environ.items() if k.startswith("AWS_")}
        for entry in container["env"]:
            source = entry.get("valueFrom", {})
            if reference := source.get("secretKeyRef"):
                secret = self.kube.get("secrets", reference["name"])
                env[entry["name"]] = base64.b64decode(secret["data"][reference["key"]]).decode()
            elif source:
                env[entry["name"]] = self.address
            else:
                env[entry["name"]] = expand(entry["value"])
        return env

    def tools(self):
        """A folder for $PATH: with `light`, a python whose agent is that script."""
        folder = self.folder / "bin"
        folder.mkdir()
        if self.kube.light:
            (folder / "light.py").write_text(self.kube.light)
            start = (
                "import sys; from distdl.launchers.kubernetes import entry; "
                "entry.PodRanks.command = lambda self, c=entry.PodRanks.command: "
                f"[sys.executable, {str(folder / 'light.py')!r}, *c(self)[3:]]; "
                "sys.exit(entry.main())"
            )
            script = (
                '#!/bin/sh\n[ "$2" = distdl.launchers.kubernetes.entry ] || '
                f'exec {sys.executable} "$@"\nshift 2\nexec {sys.executable} -c "$START" "$@"\n'
            )
            (folder / "python").write_text(script.replace('"$START"', f'"{start}"'))
            (folder / "python").chmod(0o755)
        return folder

    def bare(self):
        """A folder for $PATH that has what the start in the container needs, but no Python."""
        folder = self.folder / "bare"
        folder.mkdir()
        for name in ("unshare", "sh", "mkdir", "cat", "mount"):
            (folder / name).symlink_to(shutil.which(name))
        return folder

    def first(self):
        """Its process number 1, as this machine counts."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text("utf-8").split()
        return int(children[0])

    def terminate(self, grace):
        if self.deadline is None:
            self.deadline = time.monotonic() + grace
            with contextlib.suppress(OSError, IndexError):
                os.kill(self.first(), signal.SIGTERM)
        elif time.monotonic() > self.deadline:
            self.kill()

    def kill(self):
        self.signal_all(signal.SIGKILL)

    def freeze(self):
        self.signal_all(signal.SIGSTOP)

    def signal_all(self, number):
        """Also what has put it into namespaces, whose exit code is that of the command."""
        if self.process.poll() is None:
            for pid in below(self.process.pid):
                with contextlib.suppress(OSError):
                    os.kill(pid, number)

    def message(self):
        text = (self.folder / "termination-log").read_text(errors="replace")
        return text or self.log.read_text(errors="replace")[-2048:]


def below(pid):
    """A process and all that it has started."""
    found = [pid]
    for each in found:
        with contextlib.suppress(OSError):
            found += map(int, Path(f"/proc/{each}/task/{each}/children").read_text("utf-8").split())
    return found


def expand(text):
    """What a kubelet makes of a text; it knows no other variable here."""
    return text.replace("$$", "$")


class Handler(http.server.BaseHTTPRequestHandler):
    kube: Kube
    protocol_version = "HTTP/1.1"
    VERBS = {"POST": "create", "PATCH": "patch", "DELETE": "delete"}

    def do_GET(self):
        try:
            self.answer(*self.handle_one())
        except Refused as refused:
            status = {"kind": "Status", "status": "Failure", "message": str(refused)}
            self.answer(refused.status, {**status, "code": refused.status})

    do_POST = do_PATCH = do_DELETE = do_GET

    def handle_one(self):
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length) or "null")
        parts = urlsplit(self.path)
        query = dict(parse_qsl(parts.query))
        self.kube.requests.append((self.command, parts.path, query))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise Refused(401, "Unauthorized")
        if self.kube.broken:
            raise Refused(500, f"the stand-in is broken: {self.kube.broken}")
        match = PATH.fullmatch(parts.path)
        if match is None:
            raise Refused(404, "the server could not find the requested resource")
        _, namespace, resource, name, sub = match.groups()
        verb = self.VERBS.get(self.command, "get" if name else "list")
        if (verb, resource) in self.kube.forbidden:
            what = f'{resource} is forbidden: User "somebody" cannot {verb} resource "{resource}"'
            raise Refused(403, f'{what} in API group "" in the namespace "{namespace}"')
        with self.kube.lock:
            if sub == "log":
                return self.log(self.kube.get(resource, name, namespace), query)
            if verb == "create":
                return 201, self.kube.create(
                    resource, namespace, body, query.get("dryRun") == "All"
                )
            if verb == "delete":
                return 200, self.kube.delete(resource, namespace, name)
            if verb == "patch":
                assert self.headers["Content-Type"] == "application/merge-patch+json"
                return 200, merge(self.kube.get(resource, name, namespace), body)
            if verb == "get":
                return 200, self.kube.get(resource, name, namespace)
            found = [o for o in self.kube.all(resource, namespace) if selected(o, query)]
            return 200, {"kind": "List", "items": found}

    def log(self, pod, query):
        if "_run" not in pod:
            raise Refused(400, f'container "distdl" in pod "{pod["metadata"]["name"]}" is waiting')
        return 200, (pod["_run"], query.get("follow") == "true")

    def answer(self, status, content):
        if isinstance(content, tuple):
            return self.answer_log(*content)
        with self.kube.lock:
            data = json.dumps(public(content)).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        return None

    def answer_log(self, run, follow):
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        with run.log.open("rb") as file, contextlib.suppress(OSError):
            while True:
                ended = run.process.poll() is not None
                self.wfile.write(file.read())
                if ended or not follow:
                    break
                time.sleep(0.1)
        self.close_connection = True

    def log_message(self, *arguments):
        pass


def public(thing):
    """Without what is only the stand-in's own."""
    if isinstance(thing, dict):
        return {k: public(v) for k, v in thing.items() if not k.startswith("_")}
    return [public(each) for each in thing] if isinstance(thing, list) else thing


def selected(thing, query):
    labels = thing["metadata"].get("labels", {})
    wanted = dict(pair.split("=") for pair in query.get("labelSelector", "").split(",") if pair)
    name = query.get("fieldSelector", "").removeprefix("involvedObject.name=")
    about = thing.get("involvedObject", {}).get("name", "")
    return wanted.items() <= labels.items() and (not name or name == about)


def merge(thing, patch):
    """RFC 7396."""
    for key, value in patch.items():
        if value is None:
            thing.pop(key, None)
        elif isinstance(value, dict):
            merge(thing.setdefault(key, {}), value)
        else:
            thing[key] = value
    return thing
