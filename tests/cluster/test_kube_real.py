"""launcher=kubernetes on a real control plane, of the version that can be built here (1.20).

It has no Indexed Jobs: a job of two nodes is two plain Jobs here, with the very pod template,
Service and ConfigMaps of the request, and what a newer Job controller adds (index and host name).
"""

import json
import os
import re
import shutil
import subprocess
import time

import pytest
import yaml

from distdl.job import JobSpec, JobState, Resources
from distdl.launchers.kubernetes import KubernetesLauncher
from distdl.launchers.kubernetes.kubernetes_job import KubernetesJob
from distdl.launchers.kubernetes.manifests import TRAINER
from distdl.launchers.kubernetes.pods import PodTemplate
from distdl.launchers.kubernetes.submission import packed, path_of
from distdl.util.errors import NoRight, NotSignedIn, UserError
from tests.cluster import kube, kube_real
from tests.cluster.test_kubernetes import LIGHT, LONG, SHORT
from tests.conftest import ROOT, free_port, matrix_only
from tests.waiting import until
from tests.written import write

WHY_NOT = kube.why_not() or kube_real.why_not()
pytestmark = [
    pytest.mark.xdist_group("kubernetes"),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
    matrix_only,
]
INDEX = "JOB_COMPLETION_INDEX"


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    with kube_real.RealKube(tmp_path_factory.mktemp("real"), LIGHT) as real:
        for name in ("node-1", "node-2"):
            real.add_node(name)
        yield real


class Sender:
    """Requests of one run, and their submission as somebody."""

    def __init__(self, real, folder, name, monkeypatch):
        self.real = real
        self.name = name
        self.folder = folder
        self.monkeypatch = monkeypatch
        monkeypatch.setattr(KubernetesJob, "poll_seconds", 0.3)
        code = {"code/distdl/x": "", "code/project/mine.py": "", "provenance.json": "{}"}
        write(folder / "run/attempts/001/bundle", {"config.yaml": "seed: 0\n", **code})

    def launcher(self, first=(SHORT,), second=(SHORT,), **changes):
        node = {
            "image": "distdl:1",
            "store": f"pvc://runs/{self.name}",
            "port": free_port() + 1,
            "grace_seconds": 10,
            "env": {"LIGHT": json.dumps({"0": list(first), "1": list(second)}), INDEX: "0"},
        }
        return KubernetesLauncher(**{**node, **changes})

    def request(self, launcher, nodes=1, devices=1, accelerator="cpu"):
        spec = JobSpec(
            name=f"e/{self.name}",
            bundle=str(self.folder / "run/attempts/001/bundle"),
            store=str(self.folder / "run"),
            attempt=1,
            resources=Resources(nodes, devices, accelerator),
        )
        return launcher.request(spec)

    def submit(self, *actions, token=None, size=(1, 1, "cpu"), **changes):
        self.monkeypatch.setenv("KUBECONFIG", str(token or self.real.kubeconfig))
        launcher = self.launcher(*actions, **changes)
        return launcher.submit(self.request(launcher, *size))

    def plain_jobs(self, first, second, retries=6):
        """A job of two nodes as two Jobs."""
        self.monkeypatch.setenv("KUBECONFIG", str(self.real.kubeconfig))
        launcher = self.launcher(first, second, namespace="train")
        request = self.request(launcher, 2)
        cluster = launcher.cluster(None)
        for each in (request.service(), *request.parts(packed(request, True))):
            cluster.create(path_of(each["kind"], "train"), each)
        names = []
        for index in (0, 1):
            template = PodTemplate(request).pod()
            pod = template["spec"]
            pod["hostname"] = f"{request.name}-{index}"
            pod["containers"][0]["env"].append({"name": INDEX, "value": str(index)})
            key = "batch.kubernetes.io/job-completion-index"
            template["metadata"]["annotations"][key] = str(index)
            names.append(f"{request.name}-{index}")
            metadata = {"name": names[-1], "namespace": "train"}
            spec = {"backoffLimit": retries, "template": template}
            job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}
            cluster.create(path_of("Job", "train"), job)
        return request, names


@pytest.fixture
def sender(real, tmp_path, own_name, monkeypatch):
    yield Sender(real, tmp_path, own_name, monkeypatch)
    for job in real.all("jobs", "apis/batch/v1"):
        place = path_of("Job", "train", job["metadata"]["name"])
        real.call("DELETE", place, {"propagationPolicy": "Background"})
    until(lambda: not real.pods(), 150, lambda: str(real.pods())[:3000])
    for resource in ("services", "configmaps", "secrets"):
        for each in real.all(resource):
            name = each["metadata"]["name"]
            real.try_call("DELETE", f"/api/v1/namespaces/train/{resource}/{name}")


def ended(job, seconds=120):
    said = lambda: f"{job.state()} {job.why}"  # noqa: E731
    return until(lambda: (s := job.state()).ended and s, seconds, said)


def starts(real, sender, index):
    folder = real.folder / f"claims/runs/{sender.name}/e/{sender.name}"
    path = folder / f"attempts/001/starts-{index}"
    return len(path.read_text()) if path.exists() else 0


def under_way(real, count):
    """The running pods, once their ranks run."""

    def pods():
        found = real.pods(running=True)
        return found if len([p for p in found if ", secret" in real.log(p)]) == count else None

    return until(pods, 90, lambda: str([[p["status"], real.log(p)] for p in real.pods()])[:3000])


def test_a_job_is_scheduled_run_followed_and_removed(real, sender):
    job = sender.submit()
    lines = [*job.logs(follow=True)]
    assert "start 1, secret " in lines
    assert job.state() is JobState.SUCCEEDED
    owned = [real.all(resource) for resource in ("services", "configmaps")]
    assert [len(each) for each in owned] == [1, 1]
    job.cluster.delete(job.path)  # the real garbage collector removes the rest
    until(lambda: not real.all("services") and not real.all("configmaps"), 60)


def test_states_on_the_way(real, sender):
    job = sender.submit((LONG,))
    under_way(real, 1)
    assert job.state() is JobState.RUNNING
    (asked,) = type(job).ask_each([job])
    assert asked.state() is JobState.RUNNING
    job.cancel()
    assert ended(job) is JobState.CANCELLED


def test_cancel_lets_the_ranks_save(real, sender):
    job = sender.submit((LONG,))
    (pod,) = under_way(real, 1)
    job.cancel()
    assert ended(job) is JobState.CANCELLED
    until(lambda: "asked to end" in real.log(pod), 20)


def test_rights(real, sender):
    """Without a role, with every rule of the documented one, and without each of them."""
    with pytest.raises(UserError) as refused:
        sender.submit(token=real.alice)
    assert type(refused.value) is NoRight
    assert 'User "alice" cannot' in str(refused.value)
    page = (ROOT / "docs/launchers/kubernetes.md").read_text()
    (text,) = re.findall(r"```yaml role.yaml\n(.*?)```", page, re.DOTALL)
    role = yaml.safe_load(text)
    rbac = "/apis/rbac.authorization.k8s.io/v1/namespaces/train"
    real.call("POST", f"{rbac}/roles", role)
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "distdl"}
    subject = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "alice"}
    binding = {"metadata": {"name": "distdl"}, "roleRef": reference, "subjects": [subject]}
    real.call("POST", f"{rbac}/rolebindings", binding)
    try:
        until(lambda: allowed(real), 20)
        job = sender.submit((LONG,), token=real.alice)
        under_way(real, 1)
        assert job.state() is JobState.RUNNING
        assert any("start 1" in line for line in job.logs())
        job.cancel()
        assert ended(job) is JobState.CANCELLED
        job.cluster.delete(job.path)
    finally:
        real.call("DELETE", f"{rbac}/rolebindings/distdl")
        real.call("DELETE", f"{rbac}/roles/distdl")


def allowed(real):
    """Roles take effect a moment after they were made."""
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {
            "user": "alice",
            "resourceAttributes": {
                "namespace": "train",
                "verb": "create",
                "group": "batch",
                "resource": "jobs",
            },
        },
    }
    path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
    return real.call("POST", path, review)["status"]["allowed"]


def test_a_token_that_nobody_knows_and_a_namespace_that_is_not_there(real, sender):
    with pytest.raises(NotSignedIn, match="does not know you"):
        sender.submit(token=real.write_kubeconfig("nobody", "x"))
    with pytest.raises(UserError, match='namespaces "nowhere" not found'):
        sender.submit(namespace="nowhere")


def test_quotas(real, sender):
    """Of objects it is known at the submission, of pods by an event of the Job controller."""
    path = "/api/v1/namespaces/train/resourcequotas"
    for what in ("count/jobs.batch", "pods"):
        quota = {"metadata": {"name": "q"}, "spec": {"hard": {what: "0"}}}
        real.call("POST", path, quota)
        until(lambda what=what: real.call("GET", f"{path}/q")["status"].get("hard"), 30)
        try:
            if what == "pods":
                job = sender.submit()
                until(lambda job=job: job.state() and "exceeded quota" in job.why, 60)
                assert job.state() is JobState.PENDING
            else:
                with pytest.raises(UserError, match="the quota is used up"):
                    sender.submit()
                assert real.all("services") == []
                assert real.all("configmaps") == []
        finally:
            real.call("DELETE", f"{path}/q")


def test_gpus_are_scheduled(real, sender):
    too_many = sender.submit(size=(1, 9, "gpu"))
    until(lambda: too_many.state() is JobState.PENDING and "Insufficient" in too_many.why, 60)
    assert "nvidia.com/gpu" in too_many.why


def test_two_nodes_find_each_other_by_the_service(real, sender):
    request, names = sender.plain_jobs((LONG, SHORT), (LONG, SHORT))
    pods = under_way(real, 2)
    place = ("endpoints", request.name)
    addresses = {pod["status"]["podIP"] for pod in pods}
    until(lambda: published(real.get(*place)) == addresses, 30, lambda: str(real.get(*place)))
    assert len({pod["spec"]["nodeName"] for pod in pods}) == 2, "the scheduler spreads them"
    evicted = next(pod for pod in pods if pod["spec"]["hostname"].endswith("-1"))
    name = evicted["metadata"]["name"]
    eviction = {"apiVersion": "policy/v1beta1", "kind": "Eviction", "metadata": {"name": name}}
    real.call("POST", f"/api/v1/namespaces/train/pods/{name}/eviction", eviction)
    until(lambda: all(complete(real, each) for each in names), 150, lambda: str(real.pods())[:3000])
    assert [starts(real, sender, index) for index in (0, 1)] == [2, 2]


def published(endpoints):
    """Addresses to which the Service's names lead, of pods that are not ready."""
    subsets = endpoints.get("subsets") or []
    return {each["ip"] for subset in subsets for each in subset.get("addresses") or []}


def complete(real, name):
    job = real.call("GET", path_of("Job", "train", name))
    return any(c["type"] == "Complete" for c in job["status"].get("conditions", ()))


def test_a_lost_node(real, sender):
    real.add_node("node-3")
    _, names = sender.plain_jobs((LONG, SHORT), (LONG, SHORT))
    pods = under_way(real, 2)
    gone = next(pod for pod in pods if pod["spec"]["hostname"].endswith("-1"))["spec"]["nodeName"]
    real.nodes[gone].lose()

    def is_tainted():
        taints = real.call("GET", f"/api/v1/nodes/{gone}")["spec"].get("taints") or ()
        return any(t["key"] == "node.kubernetes.io/unreachable" for t in taints)

    until(is_tainted, 60)
    until(lambda: any("deletionTimestamp" in pod["metadata"] for pod in real.pods()), 60)
    time.sleep(1)
    real.call("DELETE", f"/api/v1/nodes/{gone}")  # as a cloud does with a machine that is gone
    until(lambda: all(complete(real, each) for each in names), 150, lambda: str(real.pods())[:3000])
    assert [starts(real, sender, index) for index in (0, 1)] == [2, 2]


@pytest.mark.skipif(not shutil.which("kubectl"), reason="no kubectl")
def test_kubectl_sends_what_a_dry_run_writes(real, sender):
    """The commands of docs/launchers/kubernetes.md, with this test's names."""
    request = sender.request(sender.launcher())
    folder = sender.folder / "run/attempts/001"  # its bundle is what `launcher.files` writes
    write(folder, {"manifests.yaml": request.render()})
    page = (ROOT / "docs/launchers/kubernetes.md").read_text()
    (commands,) = re.findall(r"```bash\ncd FOLDER\S+\n(.*?)```", page, re.DOTALL)
    # 1.20 does not know some of the fields.
    commands = commands.replace("NAME", request.name).replace("-f man", "--validate=false -f man")
    env = {**os.environ, "KUBECONFIG": str(real.kubeconfig)}
    done = subprocess.run(
        ["sh", "-ec", commands], cwd=folder, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3
    until(lambda: complete(real, request.name), 120, lambda: str(real.pods())[:3000])


def test_trainjobs(real, sender):
    """With a CRD made from the models of kubeflow-trainer-api: its schema refuses and prunes."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    schema = inlined(models.TrainerV1alpha1TrainJob.model_json_schema(by_alias=True))
    properties = {key: schema["properties"][key] for key in ("spec", "status")}
    crd = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"trainjobs.{TRAINER}"},
        "spec": {
            "group": TRAINER,
            "scope": "Namespaced",
            "names": {"plural": "trainjobs", "singular": "trainjob", "kind": "TrainJob"},
            "versions": [
                {
                    "name": "v1alpha1",
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": {"type": "object", "properties": properties}},
                }
            ],
        },
    }
    with pytest.raises(UserError, match="the cluster has no TrainJob"):
        sender.submit(kind="trainjob")
    real.call("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd)
    place = f"/apis/{TRAINER}/v1alpha1/namespaces/train/trainjobs"
    until(lambda: real.try_call("GET", place), 60)
    job = sender.submit(kind="trainjob", node_selector={"a": "b"}, size=(2, 8, "gpu"))
    (made,) = real.call("GET", place)["items"]
    sent = sender.request(sender.launcher(kind="trainjob"), 2, 8, "gpu").trainjob()
    assert made["spec"].keys() == sent["spec"].keys()
    assert made["spec"]["trainer"]["numNodes"] == 2
    (patch,) = made["spec"]["runtimePatches"]
    (nodes,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert nodes["template"]["spec"]["template"]["spec"]["nodeSelector"] == {"a": "b"}
    assert job.state() is JobState.PENDING
    assert job.handle.endswith("/1")
    assert len(real.all("configmaps")) == 1
    sent["spec"]["trainer"]["numNodes"] = "two"
    sent["metadata"]["name"] = "other"
    with pytest.raises(UserError, match="numNodes"):
        job.cluster.create(path_of("TrainJob", "train"), sent)
    job.cancel()
    assert real.call("GET", place)["items"] == []
    until(lambda: not real.all("configmaps"), 60)


def inlined(schema, definitions=None):
    """A structural schema: without references, alternatives and titles."""
    definitions = definitions or schema.get("$defs", {})
    if schema.get("$ref", "").endswith(("Quantity", "IntOrString")):
        return {"x-kubernetes-int-or-string": True}
    if "$ref" in schema:
        return inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    if "anyOf" in schema:
        kinds = [each for each in schema["anyOf"] if each.get("type") != "null"]
        if len(kinds) == 1:
            return inlined(kinds[0], definitions)
        return {"x-kubernetes-preserve-unknown-fields": True}
    kind = schema.get("type")
    if kind is None:
        return {"x-kubernetes-preserve-unknown-fields": True}
    made = {"type": kind}
    if kind == "array":
        made["items"] = inlined(schema.get("items") or {"type": "string"}, definitions)
    elif kind == "object" and "properties" in schema:
        made["properties"] = {k: inlined(v, definitions) for k, v in schema["properties"].items()}
    elif kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        made["additionalProperties"] = inlined(schema["additionalProperties"], definitions)
    elif kind == "object":
        made["x-kubernetes-preserve-unknown-fields"] = True
    return made
