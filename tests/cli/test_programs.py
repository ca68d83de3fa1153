"""`distdl run -- COMMAND`: a program of the user's own, on this machine."""

from __future__ import annotations

import contextlib
import json
import random
import re
import shutil
import sqlite3

import psutil
import pytest
import yaml

from distdl.config import compose, programs, recipe
from tests import hostile_words
from tests.conftest import ROOT, distdl, matrix_only, python_of
from tests.written import write

FENCE = re.compile(r"^```\w+ (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGE = dict(FENCE.findall((ROOT / "docs/programs.md").read_text()))
# The page's experiment, with a program that needs no torch.
SHOWN = PAGE["conf/experiment/mine.yaml"].replace(
    '[ddp.py, "${program.params.steps}"]',
    "sh -c 'echo steps $0 attempt $DISTDL_ATTEMPT' ${program.params.steps}",
)
ALONE = ("name=a", "tracking=none", "trainer.accelerator=cpu")
RUN = "outputs/default/a"
ATTEMPT = f"{RUN}/attempts/001"
# Says what it got, one word a line.
ECHO = """#!/bin/sh
for word in "$@"; do echo "word:$word"; done
echo "rank:$RANK/$WORLD_SIZE local:$LOCAL_RANK attempt:$DISTDL_ATTEMPT run:$DISTDL_RUN"
touch "$DISTDL_CHECKPOINTS/was-here"
"""
HOSTILE = ("a b", "", "$HOME", "${HOME}", "\\${x}", "???", "it's", '"', "--cfg", "-m", "a=1,2", "*")


def executable(folder, files):
    write(folder, files)
    for name in files:
        (folder / name).chmod(0o755)


def status_of(path):
    return json.loads((path / "status.json").read_text())


def test_words_arrive_as_they_were_typed(tmp_path):
    executable(tmp_path, {"echo.sh": ECHO})
    done = distdl("run", *ALONE, "--", "./echo.sh", *HOSTILE, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    words = [line[5:] for line in done.stdout.splitlines() if line.startswith("word:")]
    assert words == [*HOSTILE]
    assert "rank:0/1 local:0 attempt:1 run:default/a" in done.stdout
    assert (tmp_path / RUN / "checkpoints/was-here").exists()
    assert "word:a b" in (tmp_path / ATTEMPT / "logs/rank_0.log").read_text()
    assert status_of(tmp_path / ATTEMPT)["state"] == "SUCCEEDED"
    config = yaml.safe_load((tmp_path / RUN / "config.yaml").read_text())
    assert not {"model", "data", "optimizer", "strategy", "callbacks"} & config.keys()


LAUNCHERS = {
    "local": [],
    "mpi": ["launcher.flavour=openmpi4"],
    "slurm": [],
    "azureml": ["launcher.vm_size=Standard_NC24ads_A100_v4"],
    "sagemaker": [
        "launcher.role=arn:aws:iam::123456789012:role/x",
        "launcher.image=x",
        "launcher.bucket=my-bucket",
        "launcher.instance_type=ml.m5.large",
    ],
    "kubernetes": ["launcher.image=x", "launcher.store=s3://bucket/x"],
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_no_word_reaches_what_a_platform_reads(launcher, command, without_stage_2, tmp_path):
    """What is sent is the same for every command: only the run's frozen config has its words."""
    write(tmp_path, {"x.py": ""})
    settings = [f"launcher={launcher}", "trainer.devices=1", "dry_run=true", *LAUNCHERS[launcher]]

    def sent(*words):
        said = command("run", *ALONE, *settings, "--", "x.py", *words)
        assert said.code == 0, said
        return said.out.partition("\n\n")[2]

    plain = sent("a")
    assert "DISTDL_LAUNCHER" in plain or launcher == "kubernetes"
    assert sent(*hostile_words.words()) == plain


def test_any_word_survives_the_config():
    pieces = [
        "\\",
        "'",
        '"',
        "${",
        "}",
        "$",
        "{",
        " ",
        "a",
        "\n",
        ",",
        "]",
        "[",
        "=",
        ":",
        "?",
        "é",
        "\x85",
        "\u2028",
    ]
    draw = random.Random(0)
    words = ["".join(draw.choices(pieces, k=draw.randint(1, 8))) for _ in range(500)]
    config = compose.compose([programs.command_override(["x", *words])])
    again = compose.OmegaConf.create(recipe.to_yaml(config.program))
    assert compose.OmegaConf.to_container(again, resolve=True)["command"] == ["x", *words]


REFUSED = {
    "no dashes": (["run", "./echo.sh", "a"], "did you mean: python -m distdl run -- ./echo.sh a"),
    "no command": (["run"], "neither a command behind --"),
    "nothing behind": (["run", "--"], "there is no command behind it"),
    "no file": (["run", "--", "./eco.sh"], "did you mean ./echo.sh?"),
    "no script": (["run", "--", "trian.py"], "did you mean train.py?"),
    "no module": (["run", "--", "-m", "trian"], "did you mean -m train?"),
    "no program": (["run", "--", "no-such-program"], "there is no program 'no-such-program'"),
    "not executable": (["run", "--", "./plain.sh"], "chmod +x ./plain.sh, or: bash ./plain.sh"),
    "no interpreter": (["run", "--", "./gone.sh"], "is run by /no/such/sh"),
    "no program at all": (["run", "--", "./text"], "begins with no #! line"),
    "a folder": (["run", "--", "./folder"], "is a folder"),
    "no mpirun": (["run", "program.framework=mpi", "--", "./echo.sh"], "launcher=mpi"),
    "unknown framework": (["run", "program.framework=tf", "--", "./echo.sh"], "tensorflow"),
    "servers": (["run", "program.parameter_servers=1", "--", "./echo.sh"], "framework=tensorflow"),
    "a model": (["run", "model.lr=1", "--", "./echo.sh"], "a program has none"),
    "a trainer": (["run", "trainer.max_epochs=1", "--", "./echo.sh"], "Lightning's Trainer"),
    "a misspelt size": (["run", "trainer.device=2", "--", "./echo.sh"], "trainer.devices?"),
    "a parameter": (["run", "params.lr=1", "--", "./echo.sh"], "+params.lr="),
    "no place that lasts": (
        [
            "run",
            "launcher=mpi",
            "launcher.flavour=openmpi4",
            "launcher.hosts=[node1:1,node2:1]",
            "trainer.num_nodes=2",
            "trainer.devices=1",
            "launcher.copy_bundle=true",
            "launcher.max_attempts=1",
            "--",
            "./echo.sh",
        ],
        "program.checkpoints: launcher.max_attempts=1 needs a place that lasts",
    ),
    "a tracker's key": (
        ["run", "tracking.mlflow.uri=http://x", "--", "./echo.sh"],
        "tracking.mlflow.uri: MLflowLogger takes no such argument",
    ),
    "another tracker": (["run", "tracking=csv", "--", "./echo.sh"], "tracking=mlflow"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_at_once(case, command, tmp_path):
    executable(tmp_path, {"echo.sh": ECHO, "gone.sh": "#!/no/such/sh\n", "text": "echo\n"})
    write(tmp_path, {"plain.sh": ECHO, "train.py": "", "folder/x": ""})
    before = sorted(tmp_path.rglob("*"))
    words, expected = REFUSED[case]
    said = command(*words)
    assert said.code == 2, said
    assert "1 problem, nothing was started" in said.err
    assert expected in said.err
    assert "Traceback" not in said.err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_says_nothing_for_its_user(command, tmp_path, monkeypatch):
    """A run's files may come from somebody else: they start no program that the user has not."""
    done = distdl("run", *ALONE, "--", "sh", "-c", "exit 3", cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))
    said = command("resume", RUN)
    assert said.code == 2, said
    assert "cannot agree to that in your name" in said.err
    said = command("resume", RUN, "dry_run=true", "--", "sh", "-c", "exit 3")
    assert said.code == 0, said
    monkeypatch.undo()
    assert distdl("resume", RUN, cwd=tmp_path).returncode == 3


# Each task listens where TF_CONFIG says that it is, and reaches every other task.
CLUSTER = """
import json, os, socket, threading
config = json.loads(os.environ["TF_CONFIG"])
task = config["task"]
chief = config["cluster"]["chief"][0]
others = [a for kind in config["cluster"].values() for a in kind if a != chief]
mine = config["cluster"][task["type"]][task["index"]]
def pair(address):
    host, port = address.rsplit(":", 1)
    return host, int(port)
server = socket.create_server(pair(mine))
def reach(address):
    while True:
        try:
            return socket.create_connection(pair(address), 1).close()
        except OSError:
            pass
for address in others:
    reach(address)
print(task["type"], "reached", len(others), flush=True)
if task["type"] == "chief":
    for _ in others:
        server.accept()
else:
    reach(chief)
    threading.Event().wait()  # as TensorFlow's servers do
"""


def test_a_tensorflow_cluster_forms_and_ends_with_its_chief(tmp_path):
    write(tmp_path, {"cluster.py": CLUSTER})
    framework = ("program.framework=tensorflow", "program.parameter_servers=1")
    done = distdl("run", *ALONE, *framework, "trainer.devices=3", "--", "cluster.py", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    logs = [(tmp_path / ATTEMPT / f"logs/rank_{rank}.log").read_text() for rank in range(3)]
    for kind, log in zip(("chief", "worker", "ps"), logs, strict=True):
        assert f"{kind} reached 2" in log


def test_ddp_is_asked_killed_and_resumed(tmp_path, background):
    """docs/programs.md, word for word."""
    write(tmp_path, PAGE)
    run = tmp_path / RUN
    started = background("run", *ALONE, "trainer.devices=2", "--", "ddp.py", "100000", cwd=tmp_path)
    saved = run / "checkpoints/state.pt"
    started.until(saved.exists)
    started.process.terminate()
    assert started.wait() == 75, started.output()
    assert status_of(tmp_path / ATTEMPT)["state"] == "PREEMPTED"

    again = background("resume", RUN, cwd=tmp_path)
    log = run / "attempts/002/logs/rank_1.log"
    again.until(lambda: log.exists() and "from step" in log.read_text())
    assert "from step 0" not in log.read_text()
    assert "(attempt 2)" in again.output()
    program = next(p for p in processes_of(again.process.pid) if is_rank(p, "1"))
    program.kill()
    assert again.wait() == 137, again.output()
    assert "rank 1 failed first: killed by SIGKILL" in again.output()
    incident = json.loads((run / "attempts/002/incident.json").read_text())
    assert incident["rank"] == 1
    assert incident["cause"] == "killed"


def processes_of(pid):
    return psutil.Process(pid).children(recursive=True)


def is_rank(process, rank):
    """Whether a process is the program of a rank, and not what has started it."""
    try:
        return "ddp.py" in process.cmdline() and process.environ()["RANK"] == rank
    except (psutil.Error, KeyError):
        return False


def test_an_experiment_of_a_program_is_swept(tmp_path):
    write(tmp_path, {**PAGE, "conf/experiment/mine.yaml": SHOWN})
    swept = ("+experiment=mine", "-m", "params.steps=2,4")
    done = distdl("run", *swept, "tracking=none", "trainer.accelerator=cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("steps")] == [
        "steps 2 attempt 1",
        "steps 4 attempt 1",
    ]
    assert "best" not in done.stdout


def test_a_programs_own_calls_reach_its_run(tmp_path):
    calls = "import mlflow\nwith mlflow.start_run():\n    mlflow.log_metric('mine', 0.5)\n"
    write(tmp_path, {"calls.py": calls + "raise SystemExit(4)\n"})
    done = distdl("run", "name=a", "trainer.accelerator=cpu", "--", "calls.py", cwd=tmp_path)
    assert done.returncode == 4, done.stdout + done.stderr
    with contextlib.closing(sqlite3.connect(tmp_path / "outputs/mlflow.db")) as database:
        assert database.execute("SELECT name, status FROM runs").fetchall() == [("a", "FAILED")]
        assert database.execute("SELECT key, value FROM metrics").fetchall() == [("mine", 0.5)]


FRAMEWORKS = {
    "tensorflow": ("local", "tf_sum.py"),
    "jax": ("local", "jax_sum.py"),
    "mpi": ("mpi", "mpi_sum.py"),
}


@matrix_only
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_each_framework_adds_up_over_two_ranks(framework, tmp_path):
    """The page's scripts, each with a virtual environment of its own (`make programs`)."""
    python = python_of(framework)
    write(tmp_path, PAGE)
    launcher, script = FRAMEWORKS[framework]
    settings = (f"launcher={launcher}", f"program.framework={framework}", "trainer.devices=2")
    root = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
    done = distdl("run", *ALONE, *settings, "--", python, script, cwd=tmp_path, env=root)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        assert "sum 3" in (tmp_path / ATTEMPT / f"logs/rank_{rank}.log").read_text()


def test_only_the_users_own_conf_names_a_program(command, tmp_path):
    write(tmp_path, {"conf/experiment/mine.yaml": SHOWN, "theirs/experiment/their.yaml": SHOWN})
    common = ("run", *ALONE, "dry_run=true")
    said = command(*common, "+experiment=mine", "params.steps=7")
    assert said.code == 0, said
    assert "sh -c 'echo steps $0 attempt $DISTDL_ATTEMPT' 7" in said.out
    shutil.rmtree(tmp_path / "conf")
    said = command(*common, "--config-dir", "theirs", "+experiment=their", "params.steps=7")
    assert said.code == 2, said
    assert "program.command" in said.err
