"""launcher=kubernetes on a stand-in of the API server, whose pods run their command for real.

Most of these pods run a small script instead of the agent: what is proved is the submission, the
entry point, and how job and pods come back. Real training is in the tests of `make matrix`.
"""

import contextlib
import json
import re
import shutil
import socket
import time
from pathlib import Path

import pytest

from distdl.job import JobSpec, JobState, Resources
from distdl.launchers.kubernetes import KubernetesLauncher, submission
from distdl.launchers.kubernetes.kubernetes_job import KubernetesJob
from distdl.launchers.kubernetes.names import ENDED
from distdl.util.errors import Forgotten, NoRight, NotSignedIn, UserError
from tests.aws import REGION, moto
from tests.cluster import witness
from tests.cluster.kube import BARE, Kube, has, index_of, why_not
from tests.cluster.witness import seen
from tests.conftest import (
    TINY,
    UNCHECKED,
    distdl,
    free_port,
    last_step,
    matrix_only,
    samples,
)
from tests.waiting import until
from tests.written import write

__all__ = ["moto"]
pytest.importorskip("kubernetes")
pytestmark = [
    pytest.mark.xdist_group("kubernetes"),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]
# Instead of the agent. $LIGHT has what each pod does at each of its starts: "exit N", or "train",
# which ends well unless a signal or the end of the other pod comes first.
LIGHT = """
import json, os, pathlib, signal, socket, sys, time
options = dict(a[2:].split("=") for a in sys.argv if a.startswith("--") and "=" in a)
index, nodes = int(options["node-rank"]), int(options["nodes"])
bundle, store = map(pathlib.Path, sys.argv[sys.argv.index("--") + 1 :][:2])
for weights in bundle.glob("inputs/*"):
    print(f"weights {weights.read_text()}", flush=True)
folder = store / "attempts/001"
(folder / "logs").mkdir(parents=True, exist_ok=True)
starts = folder / f"starts-{index}"
starts.write_text((starts.read_text() if starts.exists() else "") + "x")
number = len(starts.read_text())
signal.signal(signal.SIGTERM, lambda *_: (print("asked to end", flush=True), os._exit(1)))
print(f"start {number}, secret {os.environ.get('CANARY', '')[:3]}", flush=True)
action = json.loads(os.environ["LIGHT"])[str(index)][number - 1]
if action.startswith("exit"):
    os._exit(int(action.split()[1]))
time.sleep(float(action.split()[1]))
if index == 0:
    ended = {"state": "SUCCEEDED", "exit_code": 0, "ended": time.time()}
    (folder / "status.json").write_text(json.dumps(ended))
(folder / f"logs/rank_{index}.log").write_text(f"log of rank {index}\\n")
"""
SHORT, LONG = "train 0.3", "train 300"


@pytest.fixture(scope="module")
def kube(tmp_path_factory):
    with Kube(tmp_path_factory.mktemp("kube"), light=LIGHT) as kube:
        yield kube


@pytest.fixture
def tmp_path(tmp_path, own_name):
    """Its name is the run's place in the volumes, which tests share."""
    folder = tmp_path / own_name
    folder.mkdir()
    return folder


@pytest.fixture
def submit(kube, moto, tmp_path, monkeypatch):
    """Submits a job whose pods do what is written, and returns it."""
    values = {"ACCESS_KEY_ID": "test", "SECRET_ACCESS_KEY": "test", "ENDPOINT_URL": moto}
    for name, value in {**values, "DEFAULT_REGION": REGION}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("KUBECONFIG", str(kube.kubeconfig))
    monkeypatch.setenv("CANARY", "canary-of-kubernetes")
    import boto3

    place = {"LocationConstraint": REGION}
    monkeypatch.setattr(KubernetesJob, "poll_seconds", 0.2)
    s3 = boto3.client("s3")
    if "runs" not in [bucket["Name"] for bucket in s3.list_buckets()["Buckets"]]:
        s3.create_bucket(Bucket="runs", CreateBucketConfiguration=place)
    submitted = []

    def submit(first=(SHORT,), second=(SHORT,), volume=True, **changes):
        code = {"code/distdl/x": "", "code/project/mine.py": "", "provenance.json": "{}"}
        if not volume:  # too large for ConfigMaps, if there are some
            code["provenance.json"] = '{"inputs": {"model.weights": {"file": "w.pth"}}}'
            code["inputs/w.pth"] = "are here"
        write(tmp_path / "run/attempts/001/bundle", {"config.yaml": "seed: 0\n", **code})
        node = {
            "image": "distdl:1",
            "store": f"pvc://runs/{tmp_path.name}" if volume else f"s3://runs/{tmp_path.name}",
            "port": free_port() + 1,
            "grace_seconds": 10,
            "env": {"LIGHT": json.dumps({"0": list(first), "1": list(second)})},
        }
        launcher = KubernetesLauncher(**{**node, **changes})
        spec = JobSpec(
            name="e/x",
            bundle=str(tmp_path / "run/attempts/001/bundle"),
            store=str(tmp_path / "run"),
            attempt=1,
            resources=Resources(2, 1, "cpu"),
            forward_env=("CANARY",),
        )
        job = launcher.submit(launcher.request(spec))
        submitted.append(job)
        return job

    yield submit
    for job in submitted:
        job.cluster.delete(job.path)
    until(lambda: not kube.pods(), 30)


def state_of(kube):
    """For messages."""
    return lambda: json.dumps(
        [[p["metadata"]["name"], p["status"], log(p)] for p in kube.pods()], default=str
    )


def log(pod):
    return pod["_run"].log.read_text() if "_run" in pod else ""


def ended(job, kube, seconds=90):
    return until(lambda: (s := job.state()).ended and s, seconds, state_of(kube))


def read(kube, tmp_path, name):
    """A file of the run in the volume."""
    return (kube.folder / "claims/runs" / tmp_path.name / "e/x/attempts/001" / name).read_text()


def starts(kube, tmp_path):
    """How often each pod's ranks were started."""
    return [len(read(kube, tmp_path, f"starts-{index}")) for index in (0, 1)]


def running(kube, count=2):
    """Both pods, once their ranks run."""
    until(
        lambda: len([p for p in kube.pods(running=True) if ", secret" in log(p)]) == count,
        60,
        state_of(kube),
    )
    return {index_of(pod): pod for pod in kube.pods(running=True)}


def test_a_job_from_the_submission_to_its_expiry(kube, submit, tmp_path):
    job = submit(ttl=0.002, volume=False)  # 7 s
    name = job.name.name
    assert job.handle == f"kubernetes://stand-in/train/job/{name}#e/x/1"
    later = KubernetesLauncher(image="x", store=f"s3://runs/{tmp_path.name}").attach(job.handle)
    owned = [kube.all(each)[0] for each in ("services", "configmaps", "secrets")]
    uid = kube.get("jobs", name)["metadata"]["uid"]
    assert {o["uid"] for each in owned for o in each["metadata"]["ownerReferences"]} == {uid}
    lines = [*job.logs(follow=True)]
    assert later.state() is JobState.SUCCEEDED, state_of(kube)()
    assert "start 1, secret can" in lines
    assert "[1] start 1, secret can" in lines
    assert {"weights are here", "[1] weights are here"} <= {*lines}
    assert job.store().read("attempts/001/starts-1") == b"x"
    assert json.loads(job.store().read("attempts/001/start.json")) == {"number": 1, "done": True}
    until(lambda: not kube.all("jobs") and not kube.pods(), 60, state_of(kube))
    assert [kube.all(each) for each in ("services", "configmaps", "secrets")] == [[], [], []]
    assert later.state() is JobState.SUCCEEDED, "the store still says so"
    assert [*later.logs()] == ["log of rank 0", "[rank 1] log of rank 1"]
    later.fetch(tmp_path / "fetched")
    assert (tmp_path / "fetched/attempts/001/logs/rank_1.log").exists()


@matrix_only
@pytest.mark.parametrize("killed", [1, 0])
def test_a_killed_pod_lets_all_pods_join_the_next_start(kube, submit, tmp_path, killed):
    job = submit((LONG, SHORT), (LONG, SHORT), retries=1)
    pods = running(kube)
    kube.kill(pods[killed])
    assert ended(job, kube) is JobState.SUCCEEDED, state_of(kube)()
    assert starts(kube, tmp_path) == [2, 2]
    codes = {index_of(p): exit_code(p) for p in kube.pods() if p["status"]["phase"] == "Failed"}
    assert codes == {killed: 137, 1 - killed: 75}
    assert json.loads(read(kube, tmp_path, "start.json")) == {"number": 2, "done": True}


def exit_code(pod):
    return pod["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"]


@matrix_only
def test_a_failure_without_retries_fails_the_job(kube, submit):
    job = submit((LONG,), ("exit 7",))
    assert ended(job, kube) is JobState.FAILED
    assert job.exit_code == 7
    assert "-1-" in job.killed
    assert "ended with exit code 7" in job.killed


@matrix_only
def test_a_refused_run_is_not_tried_again(kube, submit):
    job = submit((LONG, LONG), ("exit 2", LONG), retries=5)
    assert ended(job, kube) is JobState.FAILED
    assert job.exit_code == 2
    assert len(kube.pods()) == 2


@matrix_only
def test_an_eviction_does_not_count(kube, submit, tmp_path):
    job = submit((LONG, SHORT), (LONG, SHORT))
    kube.disrupt(running(kube)[1], "EvictionByEvictionAPI")
    assert ended(job, kube) is JobState.SUCCEEDED, state_of(kube)()
    assert starts(kube, tmp_path) == [2, 2]


@matrix_only
def test_a_lost_node_does_not_count(kube, submit, tmp_path):
    job = submit((LONG, SHORT), (LONG, SHORT))
    node = kube.nodes[running(kube)[1]["spec"]["nodeName"]]
    node.lose()
    try:
        seen = until(lambda: job.state() is JobState.PENDING and "node" in job.why and job.why, 60)
        assert "is on a node that is lost" in seen
        assert ended(job, kube) is JobState.SUCCEEDED, state_of(kube)()
    finally:
        node.kill_all()
        node.lost = False
    assert starts(kube, tmp_path) == [2, 2]


@matrix_only
def test_cancel_gives_the_grace_period(kube, submit):
    job = submit((LONG,), (LONG,))
    pods = running(kube)
    job.cancel()
    assert ended(job, kube) is JobState.CANCELLED
    assert all("asked to end" in log(pod) for pod in pods.values())
    assert kube.get("jobs", job.name.name)["metadata"]["annotations"][ENDED] == "cancelled"


def test_a_job_in_a_queue_is_cancelled_before_it_has_pods(kube, submit):
    job = submit(queue="gpus")
    assert job.state() is JobState.PENDING
    assert job.why == "suspended: it waits in Kueue's queue gpus"
    time.sleep(0.5)
    assert kube.pods() == []
    job.cancel()
    assert ended(job, kube, 20) is JobState.CANCELLED
    assert not any(pod.get("_run") for pod in kube.pods())


@matrix_only
def test_a_queue_starts_the_job_and_takes_its_place_back(kube, submit, tmp_path):
    """What Kueue does: it sets `suspend`."""
    job = submit((LONG, SHORT), (LONG, SHORT), queue="gpus")
    kube.get("jobs", job.name.name)["spec"]["suspend"] = False
    pods = running(kube)
    kube.get("jobs", job.name.name)["spec"]["suspend"] = True
    until(lambda: all("asked to end" in log(pod) for pod in pods.values()), 30, state_of(kube))
    kube.get("jobs", job.name.name)["spec"]["suspend"] = False
    assert ended(job, kube) is JobState.SUCCEEDED, state_of(kube)()
    assert starts(kube, tmp_path) == [2, 2]


@matrix_only
def test_the_time_limit_preempts(kube, submit):
    job = submit((LONG,), (LONG,), walltime=0.003)  # 11 s
    assert ended(job, kube) is JobState.PREEMPTED
    assert "time limit" in job.why


def test_an_image_that_is_not_there_ends_the_job_at_once(kube, submit):
    job = submit(image="distdl:2")
    began = time.monotonic()
    assert ended(job, kube, 60) is JobState.FAILED
    assert 'image pull: ErrImagePull: failed to resolve "distdl:2": not found' in job.killed
    assert time.monotonic() - began < 60
    until(lambda: not kube.pods() or has_failed(kube, job), 20)
    assert job.state() is JobState.FAILED


def has_failed(kube, job):
    conditions = kube.get("jobs", job.name.name)["status"].get("conditions", ())
    return "Failed" in {each["type"] for each in conditions}


def test_pods_that_wait_say_for_what(kube, submit):
    job = submit(node_selector={"gpu": "h100"})
    until(lambda: job.state() is JobState.PENDING and "Unschedulable" in job.why, 20)
    assert "0/2 nodes are available" in job.why
    kube.pods_quota = 1
    try:
        other = submit()
        until(lambda: other.state() is JobState.PENDING and "exceeded quota" in other.why, 20)
    finally:
        kube.pods_quota = 100


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ("token", NotSignedIn, "does not know you"),
        ("namespace", UserError, 'namespaces "nowhere" not found'),
        ("jobs", NoRight, 'cannot create resource "jobs"'),
        ("secrets", NoRight, 'cannot create resource "secrets"'),
    ],
)
def test_what_the_server_refuses_leaves_nothing_there(kube, submit, monkeypatch, what, kind, text):
    changes = {"namespace": "nowhere"} if what == "namespace" else {}
    if what == "token":
        monkeypatch.setenv("KUBECONFIG", str(kube.write_kubeconfig("other", "wrong")))
    kube.forbidden = {("create", what)}
    try:
        with pytest.raises(UserError) as refused:
            submit(**changes)
    finally:
        kube.forbidden = set()
    assert type(refused.value) is kind
    assert text in str(refused.value)
    assert len(refused.value.problems) == 1
    left = ("jobs", "services", "configmaps", "secrets")
    assert [kube.all(each) for each in left] == [[]] * 4


def test_an_error_in_the_middle_is_undone(kube, submit, monkeypatch):
    """A dry run of the server cannot know it: another object takes the quota in between."""
    real = kube.create

    def create(resource, namespace, body, dry_run=False):
        if resource == "jobs" and not dry_run:
            from tests.cluster.kube import Refused

            raise Refused(403, "jobs.batch is forbidden: exceeded quota: count/jobs.batch=1")
        return real(resource, namespace, body, dry_run)

    monkeypatch.setattr(kube, "create", create)
    with pytest.raises(UserError, match="the quota is used up"):
        submit()
    monkeypatch.undo()
    assert [kube.all(e) for e in ("jobs", "services", "configmaps", "secrets")] == [[]] * 4


def test_a_store_that_does_not_answer_is_named_soon(kube, submit, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setattr(submission, "PATIENCE", 0.5)
    began = time.monotonic()
    with pytest.raises(UserError, match=r"launcher\.store: s3://runs/"):
        submit(volume=False)
    assert time.monotonic() - began < 20
    assert [kube.all(e) for e in ("jobs", "services", "configmaps", "secrets")] == [[]] * 4


def test_a_name_that_is_taken_is_not_taken_twice(kube, submit):
    one = submit(queue="q")
    two = submit(queue="q")
    assert two.name.name == f"{one.name.name}-1"


def test_a_job_that_nobody_knows(kube, submit):
    job = submit(queue="q")
    job.cluster.delete(job.path)
    assert job.state() is JobState.UNKNOWN
    assert "it was deleted, or has expired" in job.why
    with pytest.raises(Forgotten):
        job.wait()


def test_without_a_kubeconfig(monkeypatch, tmp_path):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    launcher = KubernetesLauncher(image="x", store="s3://b/x")
    spec = JobSpec("e/x", str(tmp_path), str(tmp_path), 1, Resources(1, 1, "cpu"))
    with pytest.raises(UserError, match="no kubeconfig"):
        launcher.reach(launcher.request(spec))
    assert [*Path(tmp_path).iterdir()] == []


# ---- real training ------------------------------------------------------------------------------

TRAINING = (
    *TINY,
    "launcher=kubernetes",
    "launcher.image=distdl:1",
    "launcher.sync=5",
    "launcher.shm=null",
    "launcher.forward_env=[CANARY]",
    "trainer.num_nodes=2",
    "trainer.devices=1",
    "data.train_samples=80",
    "+callbacks.witness._target_=witness.Witness",
    "+callbacks.witness.pause=1",
    "name=x",
)


class Project:
    """A folder of the user's, and the command line in it."""

    def __init__(self, folder, kube, moto):
        self.folder = folder
        self.run = folder / "outputs/default/x"
        shutil.copy(witness.__file__, folder)
        keys = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "test")
        self.env = {**keys, "AWS_ENDPOINT_URL": moto, "AWS_DEFAULT_REGION": REGION}
        self.env |= {"KUBECONFIG": str(kube.kubeconfig), "CANARY": "canary-of-kubernetes"}

    def __call__(self, *words, code=0):
        done = distdl(*words, cwd=self.folder, module=UNCHECKED, env=self.env)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def start(self, store, *more):
        port = f"launcher.port={free_port() + 1}"
        return self(*TRAINING, f"launcher.store={store}", port, "follow=false", *more)


@pytest.fixture(scope="module")
def training_kube(tmp_path_factory):
    with Kube(tmp_path_factory.mktemp("training")) as kube:
        yield kube


@pytest.fixture
def project(training_kube, moto, tmp_path, monkeypatch):
    project = Project(tmp_path, training_kube, moto)
    for name, value in project.env.items():
        monkeypatch.setenv(name, value)
    import boto3

    s3 = boto3.client("s3")
    if "runs" not in [bucket["Name"] for bucket in s3.list_buckets()["Buckets"]]:
        place = {"LocationConstraint": REGION}
        s3.create_bucket(Bucket="runs", CreateBucketConfiguration=place)
    yield project
    with training_kube.lock:
        for job in training_kube.all("jobs"):
            training_kube.delete("jobs", "train", job["metadata"]["name"])
    until(lambda: not training_kube.pods(), 60)


def until_step(kube, step):
    """Until rank 0 has said that it did this step, after its newest start."""
    newest = lambda: log(kube.pods(index=0)[-1])  # noqa: E731
    until(lambda: re.search(rf"step {step}\b", newest()), 240, state_of(kube))


@matrix_only
@pytest.mark.parametrize("place", ["s3://runs/team", "pvc://runs/team"])
def test_two_pods_train_and_go_on_after_one_was_killed(training_kube, project, place):
    kube = training_kube
    said = project.start(place, "launcher.retries=1")
    assert "cluster    context stand-in, namespace train, http://127.0.0.1:" in said
    assert "submitted  kubernetes://stand-in/train/job/default-x-001-" in said
    until_step(kube, 7)  # of 15: the checkpoint of the first epoch is there
    time.sleep(6)  # and in the store
    kube.kill(kube.pods(index=1, running=True)[0])
    assert "SUCCEEDED" in project("jobs", "wait", str(project.run))
    logs = log(kube.pods(index=0)[-1])
    assert "start 2 of attempt 1" in logs
    assert "resum" in logs
    assert {*seen(project("jobs", "logs", str(project.run)))} == {0, 1}
    assert "canary" not in "".join(map(log, kube.pods()))
    if place.startswith("s3"):
        project("jobs", "fetch", str(project.run))
        assert json.loads((project.run / "attempts/001/status.json").read_text())["restarts"] == 1
        assert last_step(project.run) == 15
        shown = project("jobs", "status", str(project.run))
        assert "SUCCEEDED, restarted 1 times" in shown


@matrix_only
def test_cancel_saves_and_resubmit_goes_on(training_kube, project):
    kube = training_kube
    project.start("s3://runs/again")
    until_step(kube, 2)
    assert "asked to end" in project("jobs", "cancel", str(project.run))
    assert "CANCELLED" in project("jobs", "wait", str(project.run), code=130)
    for pod in kube.pods():
        assert exit_code(pod) == 75, log(pod)
    assert "checkpoint" in log(kube.pods(index=0)[-1])
    # The image is a door: a run's own files cannot open it.
    again = ("launcher.image=distdl:1", "follow=false")
    said = project("jobs", "resubmit", str(project.run), *again)
    assert "default-x-002-" in said
    assert "SUCCEEDED" in project("jobs", "wait", str(project.run))
    assert "resum" in log(kube.pods(index=0)[-1])


@matrix_only
def test_a_rank_that_fails_is_named(training_kube, project):
    project.start("pvc://runs/failing", "launcher.env={FAILING_RANK: '1'}")
    assert "FAILED" in project("jobs", "wait", str(project.run), code=1)
    shown = project("jobs", "status", str(project.run))
    assert "rank 1: ValueError: as the test wishes" in shown


@matrix_only
@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("kubeconfig", "no kubeconfig"),
        ("context", "the kubeconfig has no context 'nope'"),
        ("namespace", 'namespaces "nope" not found'),
        ("token", "the API server does not know you"),
        ("rights", 'you have no right to: jobs is forbidden: User "somebody" cannot create'),
        ("quota", "the quota is used up: jobs is forbidden: exceeded quota"),
    ],
)
def test_what_the_command_line_says_of_refusals(training_kube, project, monkeypatch, case, text):
    kube = training_kube
    more = {"context": "launcher.context=nope", "namespace": "launcher.namespace=nope"}
    if case == "kubeconfig":
        project.env["KUBECONFIG"] = str(project.folder / "none")
    if case == "token":
        project.env["KUBECONFIG"] = str(kube.write_kubeconfig("other", "wrong"))
    if case == "rights":
        monkeypatch.setattr(kube, "forbidden", {("create", "jobs")})
    if case == "quota":
        monkeypatch.setattr(kube, "used_up", {"jobs"})
    words = (more[case],) if case in more else ()
    said = project(*TRAINING, "launcher.store=s3://runs/x", *words, code=2)
    assert said.count(text) == 1
    assert "1 problem, nothing was started" in said
    if case in ("kubeconfig", "context"):
        assert not project.run.exists()
        return
    status = json.loads((project.run / "attempts/001/status.json").read_text())
    assert status["state"] == "FAILED"
    assert text in status["error"]
    left = ("jobs", "services", "configmaps", "secrets")
    assert [kube.all(each) for each in left] == [[]] * 4


@matrix_only
def test_status_and_incident_name_an_image_that_is_not_there(training_kube, project):
    project.start("s3://runs/none", "launcher.image=distdl:none")
    began = time.monotonic()
    said = until(
        lambda: (s := project("jobs", "status", str(project.run))) and "FAILED" in s and s, 60
    )
    assert time.monotonic() - began < 60
    assert 'image pull: ErrImagePull: failed to resolve "distdl:none": not found' in said
    report = (project.run / "attempts/001/incident.md").read_text()
    assert "image pull" in report
    assert "correct launcher.image" in report


@matrix_only
@pytest.mark.parametrize("case", ["no Python", "port"])
def test_status_and_incident_name_what_only_a_node_can_know(training_kube, project, case):
    """Also with retries: no other start would find a Python."""
    kube = training_kube
    with contextlib.ExitStack() as stack:
        if case == "port":
            taken = stack.enter_context(socket.create_server(("", 0))).getsockname()[1]
            # The last of the same key counts.
            project.start("s3://runs/port", f"launcher.port={taken + 1}")
            what = f"port {taken} (launcher.port - 1) cannot be used"
            cause, remedy = "port in use", "another launcher.port"
        else:
            project.start("s3://runs/bare", f"launcher.image={BARE}", "launcher.retries=3")
            what = "python: not found"
            cause, remedy = "no Python", "an image with Python 3.11.4 or later"
        began = time.monotonic()
        status = ("jobs", "status", str(project.run))
        said = until(lambda: (s := project(*status)) and "FAILED" in s and s, 60, state_of(kube))
    assert time.monotonic() - began < 60
    assert what in said
    report = (project.run / "attempts/001/incident.md").read_text()
    for each in (what, cause, remedy):
        assert each in report


@matrix_only
def test_a_program_of_ones_own_runs_in_two_pods(training_kube, project):
    """`distdl run`: through the same worker, so that the launcher needs nothing for it."""
    settings = [word for word in TRAINING if word.startswith(("launcher", "trainer.num", "name"))]
    settings += ["trainer.devices=1", "trainer.accelerator=cpu", "launcher.store=s3://runs/program"]
    command = 'echo "hello from $RANK of $WORLD_SIZE at $MASTER_ADDR"'
    port = f"launcher.port={free_port() + 1}"
    project("run", *settings, port, "follow=false", "--", "sh", "-c", command)
    assert "SUCCEEDED" in project("jobs", "wait", str(project.run))
    said = project("jobs", "logs", str(project.run))
    for rank in (0, 1):
        assert f"hello from {rank} of 2 at default-x-001-" in said


def jobs_of(kube):
    """All jobs, and those that have not ended."""
    jobs = kube.all("jobs")
    return jobs, [job for job in jobs if not (has(job, "Complete") or has(job, "Failed"))]


@matrix_only
def test_a_search_has_a_job_for_each_trial_and_goes_on(training_kube, project, background):
    """Two pods at most at once; the command killed and typed again; the results are fetched."""
    pytest.importorskip("optuna")
    kube = training_kube
    typed = (
        "tune",
        *TINY,
        "launcher=kubernetes",
        "launcher.image=distdl:1",
        "launcher.store=s3://runs/search",
        "launcher.sync=5",
        "launcher.shm=null",
        "trainer.devices=1",
        "trainer.max_epochs=1",
        "data.train_samples=32",
        "data.val_samples=8",
        "name=s",
        "--json",
        "optimizer.lr=0.01,0.05,0.1",
        "--sampler",
        "grid",
        "--parallel",
        "2",
    )
    most = 0
    job = background(*typed, cwd=project.folder, module=UNCHECKED, env=project.env)

    def one_has_ended():
        nonlocal most
        jobs, at_work = jobs_of(kube)
        most = max(most, len(at_work))
        return len(jobs) > len(at_work)

    job.until(one_has_ended, 240)
    job.process.kill()
    job.process.wait()
    job = background(*typed, cwd=project.folder, module=UNCHECKED, env=project.env)
    while job.process.poll() is None:
        one_has_ended()
        time.sleep(0.05)
    assert job.wait() == 0, job.output()
    answer = next(line for line in job.output().splitlines() if line.startswith('{"schema"'))
    trials = json.loads(answer)["answer"]["trials"]
    assert [each["end"] for each in trials] == ["COMPLETE"] * 3
    assert len(kube.all("jobs")) == 3
    assert most == 2
    for each in trials:
        run = project.folder / each["run"]
        (attempt,) = run.glob("attempts/*")
        metrics = json.loads((attempt / "status.json").read_text())["metrics"]
        assert each["values"] == [metrics["val/acc1"]]
        assert last_step(run) == 4


class Away:
    """A server of S3 that can be away for a while, and keeps what it has."""

    def __init__(self):
        self.port = free_port()
        self.come()

    def come(self):
        server = pytest.importorskip("moto.server")
        self.server = server.ThreadedMotoServer("127.0.0.1", self.port, verbose=False)
        self.server.start()

    def go(self):
        listening = self.server._server
        self.server.stop()
        listening.server_close()


@pytest.fixture
def away(monkeypatch):
    store = Away()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{store.port}")
    yield store
    store.go()


def epochs_of(run):
    """Those of each batch that was trained, once for each time."""
    return sorted(step[0] for each in samples(run).values() for step in each)


PRUNED = (
    "tune",
    *TINY,
    "launcher=kubernetes",
    "launcher.image=distdl:1",
    "launcher.sync=5",
    "launcher.shm=null",
    "trainer.devices=1",
    "data.train_samples=32",
    "data.val_samples=8",
    "+callbacks.witness._target_=witness.Witness",
    "--json",
    "--metric",
    "val/loss:min",
    "--sampler",
    "grid",
    "checkpoint.background=false",
)


@matrix_only
@pytest.mark.timeout(900)
def test_a_trial_is_pruned_by_a_verdict_that_comes_late(
    training_kube, project, away, background, monkeypatch
):
    """Through a store that is away for a while. A validation is judged once its journal is there,
    and the run hears of it at a later one."""
    pytest.importorskip("optuna")
    kube = training_kube
    project.env["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{away.port}"
    typed = (*PRUNED, "launcher.store=s3://runs/pruned", "name=p", "--pruner", "asha")
    # The last one comes first, and the others are far too large.
    typed += ("optimizer.lr=300,500,400,0.01", "--parallel", "2", "trainer.max_epochs=7")
    typed += ("+callbacks.witness.pause=2.5",)
    job = background(*typed, cwd=project.folder, module=UNCHECKED, env=project.env)
    job.until(lambda: any("epoch 1 " in log(pod) for pod in kube.pods()), 300)
    away.go()
    time.sleep(12)
    away.come()
    assert job.wait(600) == 0, job.output()
    answer = next(line for line in job.output().splitlines() if line.startswith('{"schema"'))
    trials = json.loads(answer)["answer"]["trials"]
    assert {each["end"] for each in trials} == {"COMPLETE", "PRUNED"}
    assert re.search(r"trial \d cannot be (followed|told) \(.*: trying again", job.output())
    assert job.output().count("cannot be followed") <= 4
    for each in trials:
        run = project.folder / each["run"]
        (attempt,) = run.glob("attempts/*")
        status = json.loads((attempt / "status.json").read_text())
        assert status["state"] == {"COMPLETE": "SUCCEEDED"}.get(each["end"], each["end"])
        assert status["exit_code"] == 0
        trained = {*epochs_of(run)}
        assert len(trained) == len(each["validations"])
        if each["end"] == "PRUNED":
            assert 2 <= len(trained) < 7, "it has trained on until it heard"
            assert "pruned by its search at step" in status["error"]
            assert last_step(run) == 4 * len(trained)
        else:
            assert len(trained) == 7
        assert each["end"].replace("COMPLETE", "SUCCEEDED") in project("jobs", "list", str(run))
    jobs, at_work = jobs_of(kube)
    assert len(jobs) == len(trials)
    assert not at_work
    assert all(has(each, "Complete") for each in jobs)


@matrix_only
@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("launcher.store=pvc://runs/team",), "launcher.store: a search reads"),
        (("launcher.store=pvc://runs/s", "--pruner", "asha"), "launcher.store: a search reads"),
    ],
)
def test_a_search_that_could_not_read_its_trials_is_refused(project, words, text):
    typed = ("tune", *TINY, "launcher=kubernetes", "launcher.image=distdl:1", "trainer.devices=1")
    said = project(*typed, "optimizer.lr=0.01,0.1", "name=s", *words, code=2)
    assert text in said
    assert not project.run.parent.exists()
