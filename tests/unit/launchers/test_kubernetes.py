"""launcher=kubernetes: the manifests, what is refused before, and what the objects of a job mean.

What pods really do, and a stand-in of the API server: tests/cluster/test_kubernetes.py.
"""

import copy
import json
import os
import re
import signal
import socket
import subprocess
import sys

import kubernetes_validate
import pytest
import yaml

from distdl.incident import causes
from distdl.job import VERDICTS, JobSpec, JobState, Resources
from distdl.launchers.kubernetes import KubernetesLauncher, entry, first_process, pod_ranks, states
from distdl.launchers.kubernetes.cluster import refusal
from distdl.launchers.kubernetes.manifests import KubernetesRequest, to_yaml
from distdl.launchers.kubernetes.names import ENDED
from distdl.launchers.kubernetes.pods import PodTemplate
from distdl.launchers.kubernetes.states import JobObjects as Found
from distdl.launchers.kubernetes.states import verdict
from distdl.util.errors import Forgotten, NoRight, NotSignedIn, UserError
from tests import kubernetes_objects, older_python
from tests.conftest import ROOT, check_golden, free_port
from tests.written import write

NODE = {"image": "registry.example.com/distdl:1", "store": "s3://my-bucket/runs"}
EVERYTHING = NODE | yaml.safe_load("""
{store: "pvc://runs/team", namespace: train, context: prod, pull_policy: IfNotPresent,
 pull_secrets: [registry], service_account: trainer, queue: gpus, priority_class: high,
 node_selector: {node.kubernetes.io/instance-type: p5.48xlarge}, gpu: amd.com/gpu, cpus: 64,
 tolerations: [{key: amd.com/gpu, operator: Exists, effect: NoSchedule},
   {key: spot, value: "true", effect: NoExecute, tolerationSeconds: 60}],
 memory: 512Gi, resources: {ephemeral-storage: 200Gi}, rdma: rdma/hca_a, ipc_lock: true, shm: 64Gi,
 pod_security: privileged, run_as: 2000, grace_seconds: 300, walltime: "2-12", retries: 3, wait: 2,
 ttl: 24, port: 30000, labels: {team: vision}, annotations: {k8s.v1.cni.cncf.io/networks: rdma-net},
 volumes: {data: {claim: imagenet, path: /data}, scratch: {claim: s, path: /s, read_only: false}},
 inputs: {imagenet: /data/imagenet, labels: {path: "s3://labels/x"}}, env: {NCCL_DEBUG: INFO},
 secrets: {MLFLOW_TRACKING_TOKEN: {secret: mlflow, key: token}}, forward_env: [HF_TOKEN]}
""")
BAKED = NODE | {"store": "azure://runs/team", "code": "/opt/code", "run_as": None, "shm": None}
TRAINJOB = NODE | {"kind": "trainjob", "node_selector": {"gpu": "h100"}, "pull_secrets": ["r"]}
NODES = {
    "kubernetes": NODE,
    "kubernetes_everything": EVERYTHING,
    "kubernetes_baked": BAKED,
    "kubernetes_trainjob": TRAINJOB,
}


def spec(run="RUN", *size, **fields):
    values = {"name": "resnet50_ddp/x", "bundle": f"{run}/attempts/001/bundle", "store": str(run)}
    size = size or (2, 8, "gpu")
    return JobSpec(**{**values, "attempt": 1, "resources": Resources(*size), **fields})


def request(node=NODE, **fields):
    names = tuple(node.get("forward_env", ()))
    return KubernetesLauncher(**node).request(spec(forward_env=names, **fields))


def refusals(num_nodes=1, devices=1, accelerator="gpu", **changes):
    context = {"num_nodes": num_nodes, "devices": devices, "accelerator": accelerator}
    problems = KubernetesLauncher.check({**NODE, **changes}, context)
    return {problem.path: f"{problem.what} | {problem.remedy}" for problem in problems}


@pytest.mark.parametrize("name", NODES)
def test_the_manifests(name, monkeypatch, pytestconfig):
    """As printed, and as every version of the API takes them."""
    monkeypatch.setenv("HF_TOKEN", "canary-7c1")
    made = request(NODES[name])
    text = made.render() + "\n"
    check_golden(pytestconfig, ROOT / f"tests/golden/launchers/{name}.txt", text)
    documents = [*yaml.safe_load_all(text)]
    assert documents == made.documents()
    for each in (*documents, *made.parts(bytes(2_000_000))):
        kubernetes_objects.check(each)
    assert "canary" not in text
    kubernetes_objects.check(made.secret_of({"HF_TOKEN": "x"}))
    assert refusals(**NODES[name]) == {}


def test_the_ranks_of_a_trial_hear_its_search_in_the_store():
    def variables(**fields):
        (container,) = request(**fields).job()["spec"]["template"]["spec"]["containers"]
        return {each["name"]: each.get("value") for each in container["env"]}

    assert variables(judged=True)[VERDICTS] == f"{NODE['store']}/resnet50_ddp/x"
    assert VERDICTS not in variables()
    assert not KubernetesLauncher.hides_trials(NODE)
    assert "s3://" in KubernetesLauncher.hides_trials({**NODE, "store": "pvc://claim"})


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "completionModee"), "Indexed"),
        (("spec", "completionMode"), "indexed"),
        (("spec", "template", "spec", "restartPolicy"), "Sometimes"),
        (("spec", "backoffLimit"), "3"),
    ],
)
def test_the_checks_of_manifests_find_what_is_wrong(path, value):
    job = copy.deepcopy(request().job())
    place = job
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises((AssertionError, kubernetes_validate.ValidationError)):
        kubernetes_objects.check(job)


@pytest.mark.parametrize("run_id", ["x" * 80 + "/" + "y" * 80, "default/2026-11-21_1--2.3", "ä/ö"])
def test_names_obey_the_rules_and_differ(run_id):
    other = {**NODE, "store": "s3://other"}
    tries = [(NODE, 1, 0), (NODE, 2, 0), (NODE, 1, 1), (other, 1, 0)]
    names = {
        KubernetesRequest(spec(name=run_id, attempt=n), KubernetesLauncher(**it), "", m).name
        for it, n, m in tries
    }
    assert len(names) == 4
    for name in names:
        # A Service is a name in DNS, and so is a pod of an index with five digits.
        assert re.fullmatch("[a-z]([a-z0-9-]*[a-z0-9])?", name)
        assert len(f"{name}-node-0-99999") <= 63


KINDS = r"""
'~"~'; rm -rf / #~$(HOME)~$$(HOME)~${HOME}~`id`~a: b~- x~{a: b}~[1]~&a~*a~!!python/object:os.system
~%YAML 1.1~---~...~#~null~true~yes~0x1f~1e3~.inf~2026-11-28~1:30~\n~\~|~>~@~,~?~;~&&~-n~--~=~''~""
~<b>~%s~{{x}}~{% x %}~$0~$@~!~^~../x~/~//
""".replace("\n", "")


CONTROL = ("\n", "\x1b[31m", "\u2028", "\t")
TEXTS = [
    place.replace("@@", kind)
    for kind in (*re.split("~", KINDS), "\u00e4", "\u4e2d", "\U0001f600", "\u00a0", *CONTROL)
    for place in ("@@", "@@x", "a @@ b", "x@@")
]


def test_200_kinds_of_hostile_texts_change_no_structure():
    """Of a run's name, of values of variables and annotations, of a context and of folders: what
    YAML, shells, the kubelet and terminals give a meaning to, alone and at each end of a word."""
    tame = request(NODE | {"env": {"A": "x"}, "annotations": {"a/b": "x"}, "context": "x"})
    expected = [kubernetes_objects.shape(each) for each in tame.documents()]
    assert len({*TEXTS}) >= 200
    for text in TEXTS:
        node = NODE | {"env": {"A": text}, "annotations": {"a/b": text}, "context": text}
        name = text if text.isprintable() else "x"  # other names are refused
        made = request(node, name=f"e/{name}")
        documents = [*yaml.load_all(made.render(), yaml.CSafeLoader)]
        assert [kubernetes_objects.shape(each) for each in documents] == expected
        assert documents == made.documents()
        pod = documents[1]["spec"]["template"]
        (value,) = [e["value"] for e in pod["spec"]["containers"][0]["env"] if e["name"] == "A"]
        assert expanded(value) == text
        assert pod["metadata"]["annotations"]["a/b"] == text
        arguments = [*map(expanded, pod["spec"]["containers"][0]["args"])]
        assert f"--store=s3://my-bucket/runs/e/{name}" in arguments
    for each in documents:
        kubernetes_objects.check(each)


# Every setting that is a text, or has one in it; `@@` is the text.
SETTINGS = yaml.safe_load("""
[{namespace: "@@"}, {image: "@@"}, {store: "@@"}, {store: "s3://b/@@"}, {store: "pvc://c/@@"},
 {code: "@@"}, {code: "/@@"}, {runtime: "@@"}, {pull_policy: "@@"}, {pull_secrets: ["@@"]},
 {service_account: "@@"}, {queue: "@@"}, {priority_class: "@@"}, {node_selector: {a: "@@"}},
 {node_selector: {"@@": a}}, {gpu: "@@"}, {cpus: "@@"}, {memory: "@@"}, {rdma: "@@"}, {shm: "@@"},
 {resources: {"@@": 1}}, {resources: {a: "@@"}}, {labels: {a: "@@"}}, {labels: {"@@": a}},
 {annotations: {"@@": a}}, {pod_security: "@@"}, {walltime: "@@"}, {env: {"@@": a}},
 {tolerations: [{key: "@@", operator: Exists}]}, {tolerations: [{key: a, value: "@@"}]},
 {tolerations: [{key: a, effect: "@@"}]}, {volumes: {"@@": {claim: a, path: /a}}},
 {volumes: {a: {claim: "@@", path: /a}}}, {volumes: {a: {claim: a, path: "/@@"}}},
 {secrets: {"@@": {secret: a, key: a}}}, {secrets: {A: {secret: "@@", key: a}}},
 {secrets: {A: {secret: a, key: "@@"}}}, {inputs: {a: "/@@"}}, {inputs: {a: "s3://@@"}}]
""")


def put(setting, text):
    if isinstance(setting, dict):
        return {put(key, text): put(value, text) for key, value in setting.items()}
    if isinstance(setting, list):
        return [put(each, text) for each in setting]
    return setting.replace("@@", text) if isinstance(setting, str) else setting


def test_hostile_texts_are_refused_by_each_setting_or_are_what_they_were(monkeypatch):
    # Remedies, which are read from the source each time.
    monkeypatch.setattr(KubernetesLauncher, "about_settings", classmethod(lambda cls: {}))
    taken = 0
    for number, text in enumerate(TEXTS):
        # Each text meets a tenth of the settings, and each setting a tenth of the texts.
        for setting in SETTINGS[number % 10 :: 10]:
            node = put(setting, text)
            if refusals(**node):
                continue
            taken += 1
            made = request(NODE | node)
            documents = [*yaml.load_all(made.render(), yaml.CSafeLoader)]
            assert documents == made.documents()
            assert len(documents) == 2
    assert taken > 20


def test_the_shell_of_a_container_takes_every_text_for_one_word(tmp_path):
    """The very command, with a python that writes down what it gets, and folders of this test."""
    stub = tmp_path / "python"
    stub.write_text('#!/bin/sh\n[ "$2" = tarfile ] || printf "%s\\0" "$@" > "$OUT"\n')
    stub.chmod(0o755)
    folder = tmp_path / "folders"
    write(folder / "sent", {"part-0": "x"})
    (folder / "node").mkdir()
    for code in (None, "/opt/$(touch x) '\" `touch x` &;|"):
        shell = PodTemplate(request(NODE | {"code": code})).command()
        script = shell[2].replace("/distdl", str(folder))
        (folder / "node/bundle").mkdir(exist_ok=True)
        words = [str(folder / "node/bundle"), *TEXTS]
        env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "OUT": str(tmp_path / "got")}
        done = subprocess.run(
            [*shell[:2], script, code or "distdl", *words], cwd=folder, env=env, capture_output=True
        )
        assert done.returncode == 0, done.stderr
        got = (tmp_path / "got").read_text().split("\0")
        assert got == ["-m", "distdl.launchers.kubernetes.entry", *words, ""]
        assert sorted(each.name for each in folder.iterdir()) == ["node", "sent"]
    assert os.readlink(folder / "node/bundle/code") == code


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ((3, 9, 2), "python is 3.9.2, and distdl needs 3.11.4 or later"),
        ((2, 7, 18), "python is 2.7.18, and distdl needs 3.11.4 or later"),
        (None, "python: not found"),
    ],
)
def test_an_image_whose_python_cannot_run_it_ends_the_job(version, said, tmp_path):
    """By an exit code that is not tried again, and words that the incident knows."""
    command = [*PodTemplate(request()).command(), "distdl"]
    env = older_python.put(tmp_path, version)
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    (codes,) = (
        rule["onExitCodes"]["values"]
        for rule in request().job()["spec"]["podFailurePolicy"]["rules"]
        if rule["action"] == "FailJob"
    )
    assert done.returncode in codes
    assert done.stderr.strip().endswith(said)
    cause = next(c for c in causes.MESSAGES if re.search(c[1], f"PodFailed: pod x: {said}"))
    assert cause[0] == "no Python"


def expanded(text):
    """What the kubelet makes of a text: https://kubernetes.io/docs/tasks/inject-data-application/
    define-interdependent-environment-variables/; a variable that is not there stays."""
    return re.sub(r"\$\$|\$\((\w+)\)", lambda m: "$" if m[0] == "$$" else "EXPANDED", text)


@pytest.mark.parametrize("text", ["a\nb", "a\x00b", "a\x1b[31m", "a\u2028b"])
def test_names_that_are_no_line_are_refused(text):
    with pytest.raises(UserError, match="has the character"):
        request(name=f"e/{text}")


@pytest.mark.parametrize(
    ("changes", "path", "text"),
    [
        ({"image": None}, "image", "missing | launcher.image=REGISTRY"),
        ({"image": "a b"}, "image", "'a b' is not an image"),
        ({"store": None}, "store", "missing | launcher.store=s3"),
        ({"store": "gs://x"}, "store", "'gs://x' is not an address of a store"),
        ({"store": "https://a.blob.core.windows.net/c?sig=x"}, "store", "is not an address"),
        ({"store": "s3://b/../c"}, "store", "is not an address of a store"),
        ({"namespace": "Train"}, "namespace", "'Train' is not a namespace"),
        ({"kind": "pytorchjob"}, "kind", ""),
        ({"memory": "512 GB"}, "memory", "'512 GB' is not a quantity"),
        ({"gpu": "nvidia.com/gpu/x"}, "gpu", "is not a name of a resource"),
        ({"resources": {"nvidia.com/gpu": 1}}, "resources.nvidia.com/gpu", "distdl sets it"),
        ({"ipc_lock": True}, "ipc_lock", "the level restricted forbids the capability IPC_LOCK"),
        ({"labels": {"a": "x y"}}, "labels.a", "is not a value of a label"),
        ({"node_selector": {"a b": "x"}}, "node_selector", "is not a key of a label"),
        ({"volumes": {"d": {"claim": "c", "path": "/data", "readonly": 1}}}, "volumes.d.readonly",
         "not a setting here | did you mean"),
        ({"volumes": {"d": {"claim": "c"}}}, "volumes.d.path", "is not a folder in the pod"),
        ({"volumes": {"d": {"claim": "c", "path": "/distdl/node"}}}, "volumes.d.path", "is taken"),
        ({"volumes": {"d": {"claim": "c", "path": "/dev/shm"}}}, "volumes.d.path", "is taken"),
        ({"secrets": {"A-B": {"secret": "s", "key": "k"}}}, "secrets.A-B", "is not a valid"),
        ({"secrets": {"A": {"secret": "s"}}}, "secrets.A.key", "None is not a key of a Secret"),
        ({"tolerations": [{"key": "a", "operator": "exist"}]}, "tolerations.0.operator",
         "'exist' is not known | did you mean"),
        ({"tolerations": [{"key": "a", "effect": "No"}]}, "tolerations.0.effect", "not known"),
        ({"inputs": {"x": "data"}}, "inputs.x", "a pod cannot read data"),
        ({"env": {"A B": 1}}, "env.A B", "is not a valid variable name"),
        ({"grace_seconds": 1}, "grace_seconds", ""),
        ({"walltime": "forever"}, "walltime", ""),
        ({"accelerator": "mps"}, "_target_", "no pod has an mps device"),
    ],
)  # fmt: skip
def test_refusals(changes, path, text):
    found = refusals(**changes)
    key = next((key for key in found if key == path or key.startswith(path)), None)
    assert key, found
    assert text in found[key]


# ---- what objects mean --------------------------------------------------------------------------


def pod(phase="Running", index=0, uid="u", state=None, conditions=(), **status):
    states = {"Running": {"running": {}}, "Pending": {"waiting": {"reason": "ContainerCreating"}}}
    annotations = {"batch.kubernetes.io/job-completion-index": str(index)}
    container = {"name": "distdl", "state": state or states.get(phase, {})}
    return {
        "metadata": {
            "name": f"j-{index}-{uid}",
            "uid": f"{index}-{uid}",
            "annotations": annotations,
        },
        "status": {
            "phase": phase,
            "conditions": list(conditions),
            "containerStatuses": [container],
            **status,
        },
    }


def ended(code, index=0, message="", reason="Error", conditions=(), at="2026-11-28T10:00:00Z"):
    state = {"exitCode": code, "message": message, "reason": reason, "finishedAt": at}
    return pod("Failed", index, f"f{code}", {"terminated": state}, conditions)


def job(*conditions, suspend=False, annotations=None, labels=None, retries=0):
    held = [{"type": kind, "status": "True", "reason": reason} for kind, reason in conditions]
    return {
        "metadata": {"name": "j", "annotations": annotations or {}, "labels": labels or {}},
        "spec": {"completions": 2, "suspend": suspend, "backoffLimit": retries},
        "status": {"conditions": held},
    }


BOTH = (pod(index=0), pod(index=1))
DISRUPTED = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
LOST = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}
UNSCHEDULABLE = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
}
QUEUED = {"kueue.x-k8s.io/queue-name": "gpus"}


def waiting(reason, message=""):
    return pod("Pending", 1, state={"waiting": {"reason": reason, "message": message}})


TABLE = [
    ("complete", Found(job(("Complete", "")), BOTH), JobState.SUCCEEDED, "^$"),
    ("failed", Found(job(("Failed", "Backoff")), [ended(75), ended(1, 1, "rank 1: boom")]),
     JobState.FAILED, "^pod j-1-f1 ended with exit code 1: rank 1: boom$"),
    ("refused", Found(job(("Failed", "PodFailurePolicy")), [ended(2, 0, "data.root: missing")]),
     JobState.FAILED, "exit code 2: data.root: missing"),
    ("memory", Found(job(("Failed", "BackoffLimitExceeded")), [ended(137, 1, reason="OOMKilled")]),
     JobState.FAILED, "was killed for lack of memory"),
    ("no python", Found(job(("Failed", "B")), [ended(127, 0, "exec: not found", "StartError")]),
     JobState.FAILED, "exit code 127 .StartError.: exec: not found"),
    ("no pods", Found(job(("Failed", "BackoffLimitExceeded"))), JobState.FAILED, "^BackoffLimit"),
    ("deadline", Found(job(("Failed", "DeadlineExceeded"))), JobState.PREEMPTED, "time limit"),
    ("cancelled", Found(job(("Failed", "DeadlineExceeded"), annotations={ENDED: "cancelled"})),
     JobState.CANCELLED, "^$"),
    ("given up", Found(job(("Failed", "DeadlineExceeded"), annotations={ENDED: "image pull: x"})),
     JobState.FAILED, "^image pull: x$"),
    ("cancelling", Found(job(annotations={ENDED: "cancelled"}), BOTH), JobState.RUNNING, "ending"),
    ("suspended", Found(job(suspend=True)), JobState.PENDING, "suspended by somebody"),
    ("queued", Found(job(suspend=True, labels=QUEUED)), JobState.PENDING, "Kueue's queue gpus"),
    ("unschedulable", Found(job(), [pod(), pod("Pending", 1, conditions=[UNSCHEDULABLE])]),
     JobState.PENDING, "Unschedulable: 0/3 nodes are available"),
    ("image", Found(job(), [pod(), waiting("ErrImagePull", 'pull "x": not found')]),
     JobState.PENDING, 'pod j-1-u: image pull: ErrImagePull: pull "x": not found'),
    ("config", Found(job(), [waiting("CreateContainerConfigError", 'secret "x" not found')]),
     JobState.PENDING, 'CreateContainerConfigError: secret "x" not found'),
    ("quota", Found(job(), [], [{"reason": "FailedCreate", "message": "exceeded quota: q"}]),
     JobState.PENDING, "FailedCreate: exceeded quota: q"),
    ("evicted", Found(job(), [pod(), ended(75, 1, conditions=[DISRUPTED]), pod("Pending", 1)]),
     JobState.PENDING, "pod j-1-f75 was evicted .a drain.; it is started again"),
    ("lost node", Found(job(), [pod(), ended(137, 1, conditions=[LOST]), pod("Pending", 1)]),
     JobState.PENDING, "is on a node that is lost"),
    ("retried", Found(job(retries=3), [ended(75), ended(1, 1, "port 1 is taken"), pod("Pending")]),
     JobState.PENDING, "^pod j-1-f1 ended .*: port 1 is taken; launcher.retries=3 starts it again"),
    ("not retried", Found(job(), [pod(), ended(1, 1, "x")]), JobState.PENDING, "1 of 2 pods run"),
    ("some run", Found(job(), [pod(), pod("Pending", 1)]), JobState.PENDING, "1 of 2 pods run"),
    ("all run", Found(job(), BOTH), JobState.RUNNING, "^$"),
    ("again", Found(job(), [*BOTH, ended(137, 1, conditions=[LOST])]), JobState.RUNNING, "^$"),
    ("nothing yet", Found(job()), JobState.PENDING, "^$"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("found", "state", "why"), [row[1:] for row in TABLE], ids=[r[0] for r in TABLE]
)
def test_what_the_objects_of_a_job_mean(found, state, why):
    said = verdict(found)
    assert said.state is state
    assert re.search(why, said.why), said.why


@pytest.mark.parametrize(
    ("reason", "message", "stuck"),
    [
        ("ErrImagePull", "failed to resolve reference: registry/x:1: not found", True),
        ("ImagePullBackOff", "Back-off pulling image: pull access denied", True),
        ("ErrImageNeverPull", "", True),
        ("InvalidImageName", "", True),
        ("ImagePullBackOff", 'Back-off pulling image "x"', False),
        ("ErrImagePull", "dial tcp: i/o timeout", False),
        ("CreateContainerConfigError", 'secret "x" not found', False),
        (
            "CreateContainerConfigError",
            "container has runAsNonRoot and image will run as root",
            True,
        ),
    ],
)
def test_only_a_pod_that_cannot_start_later_is_given_up(reason, message, stuck):
    assert verdict(Found(job(), [waiting(reason, message)])).stuck is stuck


def test_an_event_says_why_an_image_does_not_come():
    event = {
        "reason": "Failed",
        "involvedObject": {"name": "j-1-u"},
        "message": "pull x: manifest unknown",
    }
    said = verdict(Found(job(), [waiting("ImagePullBackOff", "Back-off")], [event]))
    assert said.stuck
    assert said.why.endswith("Back-off pull x: manifest unknown")


def test_control_characters_of_the_cluster_are_not_shown():
    text = "evil\x1b[31m\nline"
    for found in (
        Found(job(), [waiting("ErrImagePull", text)]),
        Found(job(), [ended(1, 0, text)]),
    ):
        assert "\x1b" not in verdict(found).why
    assert "\n" not in states.short(text)


@pytest.mark.parametrize(
    ("status", "message", "kind", "text"),
    [
        (401, "Unauthorized", NotSignedIn, "does not know you"),
        (
            403,
            'jobs.batch is forbidden: User "x" cannot create resource',
            NoRight,
            "you have no right",
        ),
        (
            403,
            "pods is forbidden: exceeded quota: q, requested: x",
            UserError,
            "the quota is used up",
        ),
        (403, 'pods "x" is forbidden: violates PodSecurity "restricted"', UserError, "PodSecurity"),
        (404, 'namespaces "x" not found', UserError, 'namespaces "x" not found'),
        (404, 'jobs.batch "x" not found', Forgotten, "not found"),
        (422, "Job.batch is invalid: spec", UserError, "refuses it (422): Job.batch is invalid"),
    ],
)
def test_answers_of_the_server(status, message, kind, text):
    error = refusal(status, json.dumps({"kind": "Status", "message": message}), "/x", "")
    assert type(error) is kind
    assert text in str(error)


def test_yaml_says_what_was_meant():
    documents = [{"a": text} for text in ("yes", "1e3", "null", "2026-11-28", "- x", "\u2028")]
    assert [*yaml.safe_load_all(to_yaml(documents))] == documents


# ---- the first process of a pod -----------------------------------------------------------------


@pytest.fixture
def pod_of_two(tmp_path):
    """The first pod of two."""
    handlers = {number: signal.getsignal(number) for number in first_process.SIGNALS}
    bundle = tmp_path / "bundle"
    (bundle / "code/project").mkdir(parents=True)
    (bundle / "config.yaml").write_text("seed: 0\n")
    numbers = dict.fromkeys(("devices", "attempt", "wait", "sync"), 1)
    fields = {"nodes": 2, "first": "127.0.0.1", "port": 1, "grace": 10, "job": "j", **numbers}
    store = str(tmp_path / "store")

    def make(**changes):
        pod = pod_ranks.Pod(0, "127.0.0.1", bundle, store, **{**fields, **changes})
        return pod_ranks.PodRanks(pod, first_process.Stop())

    yield make
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_a_port_that_is_taken_is_named(pod_of_two):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        end = pod_of_two(port=port + 1).run()
    assert end.code == 1
    assert f"port {port} (launcher.port - 1) cannot be used" in end.why


def test_pods_that_do_not_come_are_named(pod_of_two):
    end = pod_of_two(port=free_port() + 1).run()
    assert end.code == 1
    assert end.why == "pod-1 did not come within 1 s (launcher.wait)"


def test_a_pod_that_comes_after_the_end_has_nothing_to_do(pod_of_two, tmp_path):
    write(tmp_path / "store/attempts/001", {"start.json": '{"number": 3, "done": true}'})
    assert pod_of_two().run().code == 0


@pytest.mark.parametrize("index", ["", "x", "2"])
def test_a_pod_without_a_valid_index_is_refused(index, monkeypatch, tmp_path, pod_of_two):
    pod_of_two()
    monkeypatch.setenv(entry.INDEX, index)
    monkeypatch.setenv(entry.MESSAGE, str(tmp_path / "message"))
    arguments = [
        word for word in PodTemplate(request()).arguments()[1:] if not word.startswith("--store")
    ]
    assert entry.main([*arguments, f"--store={tmp_path}/store"]) == 2
    assert entry.INDEX in (tmp_path / "message").read_text()


def test_orphans_are_reaped():
    """In a process of its own, which may wait for all."""
    code = """
import os, subprocess, time
from distdl.launchers.kubernetes.first_process import reap
agent = subprocess.Popen(["sleep", "60"])
others = [os.spawnlp(os.P_NOWAIT, "true", "true") for _ in range(3)]
time.sleep(0.5)
reap(agent.pid)
try:
    os.waitpid(others[0], 0)
except ChildProcessError:
    print("reaped", agent.poll())
agent.kill()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "reaped None\n", done.stderr
