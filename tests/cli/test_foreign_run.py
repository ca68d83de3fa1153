"""A run of somebody else, full of traps: looking at it runs none of its code."""

from __future__ import annotations

import json
import os
import socket
import sys

import pytest
from omegaconf import OmegaConf

from distdl.config import compose, recipe
from distdl.launchers.mpi.supervisor import LOG
from tests.conftest import TINY, filled
from tests.unit.sample_config import node
from tests.written import program

EVIL = node("evil.Launcher")
CREATED = "${{oc.create:{{_target_: evil.Launcher}}}}"
MPI = "distdl.launchers.mpi.MpiLauncher"
SLURM = "distdl.launchers.slurm.SlurmLauncher"
# Launchers that would run something, and handles that would lead somewhere.
LAUNCHERS = {
    "a class of theirs": (EVIL, "evil://1"),
    "a function": (node("distdl.launchers.slurm.commands.run", "touch", "{ran}"), "slurm://1"),
    "nested": (node(SLURM, env=EVIL), "slurm://1"),
    "interpolated": (node(SLURM, env=CREATED), "slurm://1"),
    "interpolated twice": (node(SLURM, partition=rf"\{CREATED}"), "slurm://1"),
    "a secret": (node(SLURM, partition="${{oc.env:MY_TOKEN}}"), "slurm://1"),
    "a program": (node(MPI, mpirun="{program}", ssh="{program}"), "mpi://{host}{run}"),
    "another's process": (node(MPI), "mpi://{host}{run}/attempts/001"),
    "an option": (node(SLURM), "slurm://--help"),
    "a shell": (node(SLURM), "slurm://1; touch {ran}"),
    "local": (node("distdl.launchers.local.LocalLauncher"), ""),
}
SECRET = "hunter2"


class Foreign:
    """A run with one of the launchers; whatever of its code runs makes a file `ran`."""

    def __init__(self, folder, name, *overrides):
        sys.modules.pop("evil", None)  # of the case before: it would not run again
        self.ran = folder / "ran"
        self.run = folder / "theirs/default/r"
        attempt = self.run / "attempts/001"
        (attempt / "logs").mkdir(parents=True)
        (self.run / "logs").mkdir()
        (self.run / "conf").mkdir()
        code = f"open({str(self.ran)!r}, 'w').close()\nclass Launcher: ...\nclass Model: ...\n"
        for parent in (self.run, self.run / "conf", folder / "theirs"):
            for module in ("evil", "sitecustomize", "usercustomize", "yaml", "rich", "torch"):
                (parent / f"{module}.py").write_text(code)
        (self.run / "conf/project.yaml").write_text("project: {allow: [evil]}\n")
        mpirun = program(self.run / "mpirun", f"touch {self.ran}\necho 'mpirun (Open MPI) 5.0.1'")
        host = socket.gethostname()
        words = {"ran": str(self.ran), "run": str(self.run), "program": mpirun, "host": host}
        launcher, handle = filled([*LAUNCHERS[name]], words)
        composed = compose.compose([*TINY, "trainer.devices=1", *overrides])
        (self.run / "config.yaml").write_text(recipe.to_yaml(recipe.recipe_of(composed)))
        where = OmegaConf.to_container(recipe.where_of(composed), resolve=False)
        where["launcher"] = launcher
        where["project"] = {"root": str(self.run), "allow": ["evil", "os"], "max_snapshot_mb": 300}
        launch = {"run_id": "default/r", "python_path": [".", "../.."], "where": where}
        size = {"num_nodes": 1, "devices": 1, "accelerator": "cpu", "device_ids": None}
        launch |= {"resources": size, "changes": {}, "global_batch_size": 8}
        OmegaConf.save(OmegaConf.create(launch), attempt / "launch.yaml")
        state = {
            "state": "RUNNING",
            "host": host,
            "pid": -1,
            "error": "\x1b]0;title\x07",
            "metrics": {"[/b]val": 1.0},
            "started": 1.0,
        }
        (attempt / "status.json").write_text(json.dumps(state))
        (attempt / "mpirun.json").write_text(json.dumps({**state, "birth": ""}))
        if handle:
            (attempt / "job.json").write_text(json.dumps({"handle": handle, "url": None}))
        (folder / "shadow").write_text(f"root:{SECRET}-of-a-file\n")
        for link in (attempt / "logs/rank_0.log", attempt / LOG):
            link.symlink_to(folder / "shadow")
        for link in ("provenance.json", "benchmark.json", "logs/metrics.jsonl"):
            (self.run / link).symlink_to(folder / "shadow")
        (self.run / "attempts/002").symlink_to(folder)
        (folder / "launch.yaml").write_text("a link leads here\n")


@pytest.fixture
def foreign(tmp_path, command, without_stage_2, monkeypatch):
    """Creates runs beside a folder with a project of one's own, which is the current one."""
    killed = []
    monkeypatch.setenv("MY_TOKEN", f"{SECRET}-of-a-shell")
    monkeypatch.setattr(os, "kill", lambda pid, number: number and killed.append(pid))
    monkeypatch.setattr(os, "killpg", lambda *arguments: killed.append(arguments))
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    yield lambda name, *overrides: Foreign(tmp_path, name, *overrides)
    assert killed == []


@pytest.mark.parametrize("name", LAUNCHERS)
def test_nothing_of_it_runs(name, foreign, command):
    its = foreign(name)
    path = str(its.run)
    imported = {*sys.modules}
    before = (its.run / "attempts/001/launch.yaml").read_text()
    verbs = ["jobs status", "jobs logs", "jobs cancel", "report"]
    if name != "local":  # that one is said to run here, and would be followed to its end
        verbs.append("jobs logs --follow")
    outputs = {verb: command(*verb.split(), path) for verb in verbs}
    outputs["resume"] = command("resume", path, "dry_run=true")
    outputs["list"] = command("jobs", "list", str(its.run.parents[1]))
    assert not its.ran.exists(), outputs
    assert "evil" not in {*sys.modules} - imported
    for verb, output in outputs.items():
        assert SECRET not in output.out + output.err, (verb, output)
        assert "\x1b" not in output.out, (verb, output)
    assert SECRET not in (its.run / "report.html").read_text()
    assert (its.run / "attempts/001/launch.yaml").read_text() == before
    assert any(word in outputs["list"].out for word in ("UNKNOWN", "FAILED", "RUNNING"))
    assert outputs["report"].code == 0
    assert outputs["jobs logs"].code == 2


def test_what_was_not_asked_is_reported_and_how_to(foreign, said, tmp_path):
    its = foreign("a class of theirs")
    path = str(its.run)
    shown = said("jobs", "status", path, code=1)
    assert "evil.Launcher is outside the allowed packages" in shown
    assert "its platform was not asked" in shown
    assert "project.allow=[evil]" in shown
    assert "has no effect here" in said("jobs", "status", path, "trainer.max_epochs=3", code=2)
    shown = said("resume", path, "dry_run=true", code=2)
    assert "1 problem" in shown
    assert "project.root: the run was started with" in shown
    assert "does not have evil.Launcher" in shown
    assert f"or if you trust that code: project.root={path}\n" in shown
    # From now on it is trusted, and does what it likes.
    assert not its.ran.exists()
    (tmp_path / "mine/evil.py").write_text("class Launcher: ...\n")
    assert "evil.Launcher is not a launcher" in said("jobs", "status", path, code=2)


def test_the_run_folder_is_not_a_project(foreign, said, monkeypatch):
    its = foreign("a class of theirs")
    monkeypatch.chdir(its.run)
    monkeypatch.setattr(sys, "path", [str(its.run), *sys.path])  # as `python -m` has it
    said("jobs", "status", ".", code=1)
    said("resume", ".", "dry_run=true", code=2)
    assert str(its.run) not in sys.path
    assert not its.ran.exists()


def test_its_programs_are_not_started_and_none_by_a_dry_run(foreign, said):
    its = foreign("a program")
    mpirun, ssh = f"launcher.mpirun={its.run}/mpirun", f"launcher.ssh={its.run}/mpirun"
    for more in ([], ["dry_run=true"]):
        refused = said("resume", str(its.run), *more, code=2)
        assert "2 problems" in refused
        assert f"if you trust it: {mpirun}" in refused
        assert f"if you trust it: {ssh}" in refused
    # Typed, they are trusted; a dry run starts none, and needs to be told what it cannot ask.
    refused = said("resume", str(its.run), mpirun, ssh, "dry_run=true", code=2)
    assert f"a dry run does not start {its.run}/mpirun" in refused
    flavour = "launcher.flavour=openmpi5"
    assert f"{its.run}/mpirun" in said("resume", str(its.run), mpirun, ssh, flavour, "dry_run=true")
    assert not its.ran.exists()


ASKS = """# @package _global_
defaults: [{override /launcher: mpi}, {override /model: classifier}]
project: {root: THEIRS}
checkpoint: {trust_pickle: true}
launcher: {mpirun: THEIRS/mpirun, env: {TORCH_HOME: THEIRS}}
model: {_target_: evil.Model}
"""


@pytest.mark.parametrize("more", [[], ["dry_run=true"], ["-m", "seed=1,2"]], ids=str)
def test_an_experiment_of_somebody_else_agrees_to_nothing(more, foreign, said):
    its = foreign("a program")
    (its.run / "options/experiment").mkdir(parents=True)
    (its.run / "options/experiment/asks.yaml").write_text(ASKS.replace("THEIRS", str(its.run)))
    refused = said("--config-dir", str(its.run / "options"), "experiment=asks", *more, code=2)
    assert refused.startswith("distdl: 4 problems, nothing was started\n")
    for key in ("project.root", "checkpoint.trust_pickle", "launcher.mpirun", "env.TORCH_HOME"):
        assert f"{key}: " in refused
        assert f"{key}=" in refused
    assert not its.ran.exists()
    assert "evil" not in sys.modules


@pytest.mark.parametrize("verb", ["plan", "doctor", "scale", "drill"])
def test_no_verb_takes_its_word(verb, foreign, said, monkeypatch):
    its = foreign("a program")
    (its.run / "options/experiment").mkdir(parents=True)
    (its.run / "options/experiment/asks.yaml").write_text(ASKS.replace("THEIRS", str(its.run)))
    monkeypatch.setenv("DISTDL_CONF", str(its.run / "options"))
    assert "launcher.mpirun: " in said(verb, "experiment=asks", code=2)
    assert not its.ran.exists()
    assert "evil" not in sys.modules


def test_its_model_is_not_imported_to_be_checked(tmp_path, said):
    """With the real child, which imports what a config names."""
    its = Foreign(tmp_path, "local", "model._target_=evil.Model")
    (tmp_path / "mine").mkdir()
    os.chdir(tmp_path / "mine")
    assert "does not have evil.Model" in said("resume", str(its.run), "dry_run=true", code=2)
    assert not its.ran.exists()
