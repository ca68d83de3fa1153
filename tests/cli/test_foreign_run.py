"""A run of somebody else, full of traps: looking at it runs none of its code."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from distdl.config import compose, recipe
from distdl.launchers.mpi.supervisor import LOG
from tests.conftest import TINY, Said, filled

CONTROLLER = "distdl.launchers.slurm.commands.run"
MPI = "distdl.launchers.mpi.MpiLauncher"
SLURM = "distdl.launchers.slurm.SlurmLauncher"
# Launchers that would run something, and handles that would lead somewhere.
LAUNCHERS: dict[str, tuple[dict[str, Any], str]] = {
    "a class of theirs": ({"_target_": "evil.Launcher"}, "evil://1"),
    "a class that they allow": ({"_target_": "evil.Launcher"}, "evil://1"),
    "a function": ({"_target_": CONTROLLER, "_args_": ["touch", "{ran}"]}, "slurm://1"),
    "nested": ({"_target_": SLURM, "env": {"_target_": "evil.Launcher"}}, "slurm://1"),
    "interpolated": (
        {"_target_": SLURM, "env": "${{oc.create:{{_target_: evil.Launcher}}}}"},
        "slurm://1",
    ),
    "interpolated twice": (
        {"_target_": SLURM, "partition": r"\${{oc.create:{{_target_: evil.Launcher}}}}"},
        "slurm://1",
    ),
    "a secret": ({"_target_": SLURM, "partition": "${{oc.env:MY_TOKEN}}"}, "slurm://1"),
    "a program": (
        {"_target_": MPI, "mpirun": "{program}", "ssh": "{program}"},
        "mpi://{host}{run}",
    ),
    "another's process": ({"_target_": MPI}, "mpi://{host}{run}/attempts/001"),
    "an option": ({"_target_": SLURM}, "slurm://--help"),
    "a shell": ({"_target_": SLURM}, "slurm://1; touch {ran}"),
    "local": ({"_target_": "distdl.launchers.local.LocalLauncher"}, ""),
}


@pytest.fixture
def secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "shadow").write_text("root:hunter2-of-a-file\n")
    monkeypatch.setenv("MY_TOKEN", "hunter2-of-a-shell")
    return "hunter2"


@pytest.fixture
def foreign(
    tmp_path: Path, secret: str, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], tuple[Path, Path]]:
    """Lays down a run with one of the launchers; returns it, and the file that its code makes."""
    killed: list[Any] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: number and killed.append(pid))
    monkeypatch.setattr(os, "killpg", lambda *given: killed.append(given))

    def create_attempt(name: str, *overrides: str) -> tuple[Path, Path]:
        sys.modules.pop("evil", None)  # of the case before: it would not run again
        ran, run = tmp_path / "ran", tmp_path / "theirs/default/r"
        (run / "attempts/001/logs").mkdir(parents=True)
        trap = f"open({str(ran)!r}, 'w').close()\n"
        code = trap + "class Launcher: ...\nclass Model: ...\n"
        for place in (run, run / "conf", tmp_path / "theirs"):
            place.mkdir(exist_ok=True)
            for module in ("evil", "sitecustomize", "usercustomize", "yaml", "rich", "torch"):
                (place / f"{module}.py").write_text(code)
        (run / "conf/project.yaml").write_text("project: {allow: [evil]}\n")
        program = run / "mpirun"
        program.write_text(f"#!/bin/sh\ntouch {ran}\necho 'mpirun (Open MPI) 5.0.1'\n")
        program.chmod(0o755)
        words: dict[str, Any] = {
            "ran": ran,
            "run": run,
            "program": program,
            "host": socket.gethostname(),
        }
        words = {key: str(value) for key, value in words.items()}
        launcher, handle = filled(LAUNCHERS[name][0], words), LAUNCHERS[name][1].format(**words)
        composed = compose.compose([*TINY, "trainer.devices=1", *overrides])
        (run / "config.yaml").write_text(recipe.to_yaml(recipe.recipe_of(composed)))
        where = OmegaConf.to_container(recipe.where_of(composed), resolve=False)
        assert isinstance(where, dict)
        where["launcher"] = launcher
        where["project"] = {"root": str(run), "allow": ["evil", "os"], "max_snapshot_mb": 300}
        attempt = run / "attempts/001"
        launch = {
            "run_id": "default/r",
            "python_path": [".", "../.."],
            "where": where,
            "resources": {"num_nodes": 1, "devices": 1, "accelerator": "cpu", "device_ids": None},
            "changes": {},
            "global_batch_size": 8,
        }
        (attempt / "launch.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(launch)))
        state = {"state": "RUNNING", "host": socket.gethostname(), "pid": -1}
        state |= {"error": "\x1b]0;title\x07", "metrics": {"[/b]val": 1.0}, "started": 1.0}
        (attempt / "status.json").write_text(json.dumps(state))
        (attempt / "mpirun.json").write_text(json.dumps({**state, "birth": ""}))
        if handle:
            (attempt / "job.json").write_text(json.dumps({"handle": handle, "url": None}))
        for link in ("logs/rank_0.log", LOG):
            (attempt / link).symlink_to(tmp_path / "shadow")
        (run / "attempts/002").symlink_to(tmp_path)
        (tmp_path / "launch.yaml").write_text("a link leads here\n")
        (run / "logs").mkdir()
        for link in ("provenance.json", "benchmark.json", "logs/metrics.jsonl"):
            (run / link).symlink_to(tmp_path / "shadow")
        return run, ran

    yield create_attempt
    assert killed == []


@pytest.fixture
def here(tmp_path: Path, command: Callable[..., Said], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another folder, with a project of one's own."""
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    return tmp_path / "mine"


@pytest.mark.parametrize("name", LAUNCHERS)
def test_nothing_of_it_runs(
    name: str, foreign, here: Path, secret: str, command: Callable[..., Said], without_stage_2: None
) -> None:
    run, ran = foreign(name)
    path, imported, before = (
        str(run),
        {*sys.modules},
        (run / "attempts/001/launch.yaml").read_text(),
    )
    said = {
        "list": command("jobs", "list", str(run.parents[1])),
        "status": command("jobs", "status", path),
        "logs": command("jobs", "logs", path),
        "cancel": command("jobs", "cancel", path),
        "report": command("report", path),
        "dry run": command("resume", path, "dry_run=true"),
    }
    if name != "local":  # that one is said to run here, and would be followed to its end
        said["follow"] = command("jobs", "logs", "--follow", path)
    assert not ran.exists(), said
    assert "evil" not in {*sys.modules} - imported
    for verb, one in said.items():
        assert secret not in one.out + one.err, (verb, one)
        assert "\x1b" not in one.out, (verb, one)
    assert secret not in (run / "report.html").read_text()
    assert (run / "attempts/001/launch.yaml").read_text() == before
    assert any(w in said["list"].out for w in ("UNKNOWN", "FAILED", "RUNNING")), said["list"]
    assert said["report"].code == 0 and said["logs"].code == 2


def test_it_is_said_what_was_not_asked_and_how_to(
    foreign, here: Path, command: Callable[..., Said], without_stage_2: None
) -> None:
    run, ran = foreign("a class of theirs")
    said = command("jobs", "status", str(run))
    assert said.code == 1 and "evil.Launcher is outside the allowed packages" in said.out
    assert "its platform was not asked" in said.out and "project.allow=[evil]" in said.out
    said = command("jobs", "status", str(run), "trainer.max_epochs=3")
    assert said.code == 2 and "changes nothing here" in said.err
    said = command("resume", str(run), "dry_run=true")
    assert said.code == 2 and "1 problem" in said.err
    assert "project.root: the run was started with" in said.err and "no evil.Launcher" in said.err
    assert f"or if you trust it: project.root={run}\n" in said.err
    # From now on it is trusted, and does what it likes.
    assert not ran.exists()
    (here / "evil.py").write_text("class Launcher: ...\n")
    said = command("jobs", "status", str(run))
    assert said.code == 2 and "evil.Launcher is not a launcher" in said.err


def test_the_run_folder_is_no_project(
    foreign, here: Path, command: Callable[..., Said], without_stage_2: None, monkeypatch
) -> None:
    run, ran = foreign("a class that they allow")
    monkeypatch.chdir(run)
    monkeypatch.setattr(sys, "path", [str(run), *sys.path])  # as `python -m` has it
    assert command("jobs", "status", ".").code == 1
    assert command("resume", ".", "dry_run=true").code == 2
    assert str(run) not in sys.path and not ran.exists()


def test_its_mpirun_is_started_only_if_typed(
    foreign, here: Path, command: Callable[..., Said], without_stage_2: None
) -> None:
    run, ran = foreign("a program")
    said = command("resume", str(run), "dry_run=true")
    assert said.code == 2 and f"if it is yours: launcher.mpirun={run}/mpirun" in said.err
    assert not ran.exists()
    said = command("resume", str(run), "dry_run=true", f"launcher.mpirun={run}/mpirun")
    assert said.code == 0 and ran.exists(), said


def test_its_model_is_not_imported_to_be_checked(
    foreign, here: Path, command: Callable[..., Said]
) -> None:
    """With the real child, which imports what a config names."""
    run, ran = foreign("local", "model._target_=evil.Model")
    said = command("resume", str(run), "dry_run=true")
    assert said.code == 2 and "has no evil.Model" in said.err
    assert not ran.exists()
