"""Programs of each framework on SageMaker, Azure and Kubernetes: the dry run, and what the platform
does then to start the job on two nodes, around the real entry points (test_sagemaker.py, nodes.py,
kube.py)."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cli.test_programs import PAGE
from tests.cluster.azurite import needs_azurite
from tests.cluster.kube import why_not
from tests.cluster.nodes import KEPT
from tests.cluster.test_azureml import (  # noqa: F401 - fixtures
    TWO_NODES,
    azure,
    distdl,
    job_of,
    project,
    shared_azure,
)
from tests.cluster.test_kubernetes import TRAINING, moto, training_kube  # noqa: F401 - fixtures
from tests.cluster.test_kubernetes import project as pods  # noqa: F401 - a fixture
from tests.cluster.test_sagemaker import JOB, Containers
from tests.cluster.test_sagemaker import cloud as sagemaker  # noqa: F401 - a fixture
from tests.conftest import free_port, matrix_only, python_of
from tests.written import write

pytestmark = [matrix_only, pytest.mark.timeout(600), pytest.mark.xdist_group("programs")]
PROGRAMS = Path(__file__).parent / "programs"
# The framework: the environment below .servers/, the words of the command, and what each rank
# prints.
STARTED = {
    "": ("", ["ddp.py", "3"], "done"),
    "shell": ("", ["./counting.sh", "3"], "done"),
    "compiled": ("", ["./counting", "3"], "done"),
    "tensorflow": ("tensorflow", ["tf_sum.py"], "sum 3"),
    "jax": ("jax", ["jax_sum.py"], "sum 3"),
    "mpi": ("mpi", ["mpi_sum.py"], "sum 3"),
    "transformers": ("transformers", ["hf_trainer.py", "6"], "done"),
}


def words_of(framework):
    """The overrides of a framework, and its command."""
    environment, command, _ = STARTED[framework]
    named = framework in ("tensorflow", "jax", "mpi")
    settings = [f"program.framework={framework}"] if named else []
    first = [python_of(environment)] if environment else []
    return [*settings, "tracking=none", "trainer.accelerator=cpu"], [*first, *command]


def fill(folder):
    write(folder, PAGE)
    for path in PROGRAMS.iterdir():
        shutil.copy(path, folder)
    subprocess.run(["cc", "-o", "counting", "counting.c"], cwd=folder, check=True)


@pytest.fixture
def started(sagemaker):  # noqa: F811
    """Starts the containers of the job that was sent last."""
    running = []

    def start(name):
        running.append(Containers(sagemaker, name))
        return running[-1]

    yield start
    for each in running:
        each.close()


@pytest.mark.parametrize("framework", [name for name in STARTED if name != "mpi"])
def test_on_sagemaker(framework, sagemaker, started):  # noqa: F811
    fill(sagemaker.folder / "project")
    settings, command = words_of(framework)
    where = [word for word in JOB if word.startswith("launcher") and "forward_env" not in word]
    where = [word for word in where if "metrics" not in word]
    name = f"p-{framework or 'torch'}"
    size = ["trainer.num_nodes=2", "trainer.devices=1", f"name={name}"]
    shown = sagemaker.submit(["run", *settings, *where, *size], ["--", *command])
    assert f"program    {' '.join(command)}" in shown
    sagemaker.run = sagemaker.folder / "project/outputs/default" / name
    both = started(name)
    assert both.wait(240) == [0, 0], both.log()
    for rank, folder in enumerate(both.opt_ml.values()):
        log = folder / f"checkpoints/attempts/001/logs/rank_{rank}.log"
        assert STARTED[framework][2] in log.read_text()


def test_sagemaker_starts_no_ranks_of_mpi(sagemaker):  # noqa: F811
    settings, command = words_of("mpi")
    where = [word for word in JOB if word.startswith("launcher")]
    with pytest.raises(AssertionError, match=r"launcher=azureml launcher\.distribution=mpi"):
        sagemaker.submit(["run", *settings, *where, "name=none"], ["--", *command])


@needs_azurite
@pytest.mark.parametrize("framework", STARTED)
@pytest.mark.filterwarnings("ignore")
def test_on_azureml(framework, azure, project, distdl):  # noqa: F811
    fill(project)
    settings, command = words_of(framework)
    name = f"p-{framework or 'torch'}"
    words = ["run", *settings, "launcher=azureml", *TWO_NODES, f"name={name}"]
    words += [f"launcher.tags={{{KEPT}: 'yes'}}", "launcher.env={OMP_NUM_THREADS: 1}"]
    words += ["launcher.distribution=mpi"] if framework == "mpi" else []
    shown = distdl(*words, "dry_run=true", "--", *command).out
    assert f"program    {' '.join(command)}" in shown
    job = job_of(azure, distdl(*words, "--", *command).out)
    assert job.status == "Completed"
    run = project / "outputs/default" / name
    distdl("jobs", "fetch", str(run))
    for rank in (0, 1):
        assert STARTED[framework][2] in (run / f"attempts/001/logs/rank_{rank}.log").read_text()
    assert json.loads((run / "attempts/001/status.json").read_text())["state"] == "SUCCEEDED"


@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize("framework", [name for name in STARTED if name != "mpi"])
def test_on_kubernetes(framework, training_kube, pods):  # noqa: F811
    fill(pods.folder)
    settings, command = words_of(framework)
    where = [word for word in TRAINING if word.startswith("launcher")]
    where += ["launcher.store=pvc://runs/programs", f"launcher.port={free_port() + 1}"]
    size = ["trainer.num_nodes=2", "trainer.devices=1", f"name=p-{framework or 'torch'}"]
    words = ["run", *settings, *where, *size]
    shown = pods(*words, "dry_run=true", "--", *command)
    assert f"program    {' '.join(command)}" in shown
    pods(*words, "follow=false", "--", *command)
    run = str(pods.folder / "outputs/default" / size[-1].removeprefix("name="))
    assert "SUCCEEDED" in pods("jobs", "wait", run)
    lines = pods("jobs", "logs", run).splitlines()
    for label in ("", "[1] "):  # of the second pod's lines
        assert any(line.startswith(f"{label}{STARTED[framework][2]}") for line in lines)
