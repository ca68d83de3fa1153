"""A real control plane of Kubernetes 1.20 (`make servers-kube`): etcd, kube-apiserver, the
controllers and the scheduler, with kubelets of this file, whose pods are those of kube.py.

1.20 is what Debian's source can build. It has no Indexed Jobs (1.21), no podFailurePolicy (1.26),
no `suspend` and, by default, no TTL: those are in the stand-in.
"""

import contextlib
import http.server
import json
import signal
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request

import yaml

from tests.cluster.kube import Run, folder_of_pods, now
from tests.conftest import ROOT, free_port
from tests.waiting import until

BIN = ROOT / ".servers/kube/bin"
ADMIN, ALICE = "token-of-the-admin", "token-of-alice"


def why_not():
    return "" if BIN.with_name(".ready").exists() else "not built: make servers-kube"


class RealKube:
    """The control plane in processes of this test. `light`: as for `Kube`."""

    def __init__(self, folder, light):
        self.folder = folder
        self.light = light
        self.processes = {}
        self.nodes = {}
        self.names = {}
        self.hosts_file = folder / "hosts"
        self.objects = Objects(self)

    def __enter__(self):
        self.mounted = contextlib.ExitStack()
        self.mounted.enter_context(folder_of_pods())
        etcd, peer = free_port(), free_port()
        self.port = free_port()
        folder = self.folder
        key = ["openssl", "genrsa", "-out", folder / "sa.key", "2048"]
        subprocess.run(key, capture_output=True, check=True)
        users = f'{ADMIN},admin,1,"system:masters"\n{ALICE},alice,2\n'
        (folder / "tokens.csv").write_text(users)
        self.kubeconfig = self.write_kubeconfig("admin", ADMIN)
        self.alice = self.write_kubeconfig("alice", ALICE)
        client = f"http://127.0.0.1:{etcd}"
        self.start(
            "etcd",
            f"--data-dir={folder}/data --listen-client-urls={client}"
            f" --advertise-client-urls={client} --listen-peer-urls=http://127.0.0.1:{peer}",
            "etcd",
        )
        self.start(
            "kube-apiserver",
            f"--etcd-servers={client} --bind-address=127.0.0.1 --advertise-address=127.0.0.1"
            f" --secure-port={self.port} --cert-dir={folder}/certs"
            f" --token-auth-file={folder}/tokens.csv"
            " --authorization-mode=RBAC --service-account-issuer=https://kubernetes.default.svc"
            f" --service-account-signing-key-file={folder}/sa.key"
            f" --service-account-key-file={folder}/sa.key --service-cluster-ip-range=10.96.0.0/24"
            " --disable-admission-plugins=ServiceAccount"
            " --feature-gates=APIPriorityAndFairness=false"
            " --default-not-ready-toleration-seconds=2 --default-unreachable-toleration-seconds=2",
        )
        until(self.ready, 120, self.log_of("kube-apiserver"))
        self.start(
            "kube-controller-manager",
            f"--kubeconfig={self.kubeconfig} --leader-elect=false --port=0 --secure-port=0"
            f" --service-account-private-key-file={folder}/sa.key --node-monitor-period=1s"
            " --node-monitor-grace-period=6s --pod-eviction-timeout=2s",
        )
        self.start(
            "kube-scheduler",
            f"--kubeconfig={self.kubeconfig} --leader-elect=false --port=0 --secure-port=0",
        )
        self.call("POST", "/api/v1/namespaces", {"metadata": {"name": "train"}})
        self.add_claim("runs")
        return self

    def __exit__(self, *error):
        for node in self.nodes.values():
            node.close()
        for process in reversed([*self.processes.values()]):
            process.kill()
            process.wait()
        self.mounted.close()

    def start(self, name, options, program=None):
        with (self.folder / f"{name}.log").open("wb") as log:
            command = [program or str(BIN / name), *options.split()]
            pipes = {"stdout": log, "stderr": log, "stdin": subprocess.DEVNULL}
            self.processes[name] = subprocess.Popen(command, start_new_session=True, **pipes)

    def log_of(self, name):
        return lambda: (self.folder / f"{name}.log").read_text()[-3000:]

    def ready(self):
        with contextlib.suppress(OSError):
            return self.call("GET", "/readyz", raw=True) == b"ok"

    def write_kubeconfig(self, name, token):
        cluster = {"server": f"https://127.0.0.1:{self.port}", "insecure-skip-tls-verify": True}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "real",
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": "u", "user": {"token": token}}],
            "contexts": [
                {"name": "real", "context": {"cluster": "c", "user": "u", "namespace": "train"}}
            ],
        }
        path = self.folder / name
        path.write_text(yaml.safe_dump(config))
        return path

    def call(self, method, path, body=None, kind="application/json", raw=False):
        """As the admin."""
        request = urllib.request.Request(f"https://127.0.0.1:{self.port}{path}", method=method)
        request.add_header("Authorization", f"Bearer {ADMIN}")
        request.add_header("Content-Type", kind)
        data = None if body is None else json.dumps(body).encode()
        trust = ssl._create_unverified_context()
        with urllib.request.urlopen(request, data, 20, context=trust) as answer:
            content = answer.read()
        return content if raw else json.loads(content)

    def try_call(self, *arguments, **more):
        """None if it is refused."""
        with contextlib.suppress(urllib.error.HTTPError):
            return self.call(*arguments, **more)

    def all(self, resource, group="api/v1"):
        """Without the cluster's own, which are in every namespace."""
        items = self.call("GET", f"/{group}/namespaces/train/{resource}")["items"]
        return [each for each in items if each["metadata"]["name"] != "kube-root-ca.crt"]

    def pods(self, running=False):
        found = sorted(self.all("pods"), key=lambda pod: pod["metadata"]["creationTimestamp"])
        return [p for p in found if p["status"].get("phase") == "Running"] if running else found

    def get(self, resource, name):
        return self.call("GET", f"/api/v1/namespaces/train/{resource}/{name}")

    def add_claim(self, name):
        """A volume that all pods can write, bound by the controller."""
        room = {"storage": "1Gi"}
        common = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
        volume = {
            **common,
            "capacity": room,
            "hostPath": {"path": str(self.folder / "claims" / name)},
        }
        claim = {**common, "resources": {"requests": room}, "volumeName": name}
        self.call("POST", "/api/v1/persistentvolumes", {"metadata": {"name": name}, "spec": volume})
        place = "/api/v1/namespaces/train/persistentvolumeclaims"
        self.call("POST", place, {"metadata": {"name": name}, "spec": claim})
        until(lambda: self.call("GET", f"{place}/{name}")["status"].get("phase") == "Bound", 60)

    def add_node(self, name):
        self.nodes[name] = RealNode(self, name)
        ready = lambda: self.call("GET", f"/api/v1/nodes/{name}")["spec"].get("taints") is None  # noqa: E731
        until(ready, 60)

    def log(self, pod):
        return self.nodes[pod["spec"]["nodeName"]].runs[pod["metadata"]["uid"]].log.read_text()


class Objects:
    """Reads as the dictionary of `Kube` does."""

    def __init__(self, kube):
        self.kube = kube

    def get(self, key, default=None):
        resource, namespace, name = key
        path = f"/api/v1/namespaces/{namespace}/{resource}/{name}"
        return self.kube.try_call("GET", path) or default

    def __contains__(self, key):
        return self.get(key) is not None


class RealNode:
    """A kubelet: a node with 8 GPUs that reports itself, starts and ends pods, and serves logs."""

    def __init__(self, kube, name):
        self.kube = kube
        self.name = name
        self.runs = {}
        self.numbers = iter(range(1, 250)) if not kube.nodes else iter(range(100, 250))
        self.silent = False
        self.over = False
        folder = kube.folder / name
        folder.mkdir()
        self.serve_logs(folder)
        kube.call("POST", "/api/v1/nodes", {"metadata": {"name": name}})
        threading.Thread(target=self.live, daemon=True).start()

    def serve_logs(self, folder):
        make = [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=127.0.0.1",
        ]
        files = ["-keyout", folder / "key.pem", "-out", folder / "cert.pem"]
        subprocess.run([*make, *files], capture_output=True, check=True)
        handler = type("Handler", (Logs,), {"node": self})
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def live(self):
        beat = 0.0
        while not self.over:
            with contextlib.suppress(OSError):
                if not self.silent and time.monotonic() > beat:
                    self.report_node()
                    beat = time.monotonic() + 2
                if not self.silent:
                    self.sync()
            time.sleep(0.2)

    def report_node(self):
        size = {"cpu": "8", "memory": "16Gi", "pods": "50", "nvidia.com/gpu": "8"}
        ready = {"type": "Ready", "status": "True", "reason": "Up", "lastHeartbeatTime": now()}
        status = {
            "capacity": size,
            "allocatable": size,
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self.server.server_address[1]}},
            "conditions": [{**ready, "message": "", "lastTransitionTime": now()}],
        }
        kind = "application/strategic-merge-patch+json"
        self.kube.call("PATCH", f"/api/v1/nodes/{self.name}/status", {"status": status}, kind)

    def sync(self):
        query = f"/api/v1/pods?fieldSelector=spec.nodeName={self.name}"
        for pod in self.kube.call("GET", query)["items"]:
            uid = pod["metadata"]["uid"]
            phase = pod["status"]["phase"]
            run = self.runs.get(uid)
            if run is None and phase == "Pending" and "deletionTimestamp" not in pod["metadata"]:
                pod["_number"] = next(self.numbers)
                run = self.runs[uid] = Run(self.kube, pod)
                self.report(pod, "Running", {"running": {"startedAt": now()}}, run)
            elif run and phase == "Running" and (code := run.process.poll()) is not None:
                code = code if code >= 0 else 128 - code
                end = {"exitCode": code, "finishedAt": now(), "message": run.message()}
                end["reason"] = "Error" if code else "Completed"
                phase = "Failed" if code else "Succeeded"
                self.report(pod, phase, {"terminated": end}, run)
            if "deletionTimestamp" in pod["metadata"]:
                self.end(pod, run)

    def end(self, pod, run):
        if run and run.process.poll() is None:
            run.terminate(pod["metadata"].get("deletionGracePeriodSeconds", 30))
            return
        place = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"
        self.kube.try_call("DELETE", place, {"gracePeriodSeconds": 0})

    def report(self, pod, phase, state, run):
        (container,) = pod["spec"]["containers"]
        # Endpoints take no loopback addresses: it reports others (of RFC 5737) in their place.
        address = f"192.0.2.{run.address.rpartition('.')[2]}"
        status = {
            "phase": phase,
            "hostIP": "127.0.0.1",
            "podIP": address,
            "podIPs": [{"ip": address}],
            "startTime": now(),
            # Not ready: the headless Service must publish it all the same.
            "conditions": [{"type": "Ready", "status": "False"}],
            "containerStatuses": [
                {
                    "name": container["name"],
                    "image": container["image"],
                    "imageID": "",
                    "restartCount": 0,
                    "ready": False,
                    "state": state,
                }
            ],
        }
        place = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"
        kind = "application/strategic-merge-patch+json"
        self.kube.try_call("PATCH", f"{place}/status", {"status": status}, kind)

    def lose(self):
        """It is cut off: nothing is heard of it, and its processes stand still."""
        self.silent = True
        for run in self.runs.values():
            run.signal_all(signal.SIGSTOP)

    def close(self):
        self.over = True
        self.server.shutdown()
        for run in self.runs.values():
            run.kill()


class Logs(http.server.BaseHTTPRequestHandler):
    """GET /containerLogs/NAMESPACE/POD/CONTAINER, which the API server asks for."""

    node: RealNode

    def do_GET(self):
        name = self.path.split("?")[0].split("/")[3]
        runs = [run for run in self.node.runs.values() if run.folder.name == name]
        self.send_response(200 if runs else 404)
        self.end_headers()
        if not runs:
            return
        with runs[0].log.open("rb") as file, contextlib.suppress(OSError):
            while True:
                ended = runs[0].process.poll() is not None
                self.wfile.write(file.read())
                self.wfile.flush()
                if ended or "follow=true" not in self.path:
                    return
                time.sleep(0.1)

    def log_message(self, *arguments):
        pass
