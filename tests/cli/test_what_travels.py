"""What a job takes along of the user's folder, and what is said of the rest, before it starts."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.conftest import TINY, UNCHECKED, distdl
from tests.written import write

MINE = """
import helpers.greeting
from generated import version
from lightning.pytorch import Callback
class Hello(Callback):
    pass
"""
DRY = (*TINY, "launcher=slurm", "trainer.devices=1", "dry_run=true")
HELLO = "+callbacks.hello._target_=mine.Hello"


@pytest.fixture
def project(tmp_path):
    """A repository whose module imports from a linked folder outside and from one that git
    ignores."""
    write(tmp_path / "common/helpers", {"greeting.py": ""})
    folder = tmp_path / "project"
    write(folder, {"mine.py": MINE, "generated/version.py": "", ".gitignore": "generated/\n"})
    (folder / "helpers").symlink_to("../common/helpers")
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    return folder


def test_a_job_that_would_lack_a_module_is_refused_with_what_to_write(project):
    refused = distdl(*DRY, HELLO, cwd=project)
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert refused.stdout == "", refused.stdout + refused.stderr
    for part in ("generated/version.py: is imported here", "git ignores generated/", "!helpers "):
        assert part in refused.stderr
    assert "helpers/greeting.py: is imported here, and the job would be without" in refused.stderr
    write(project, {".amlignore": "!generated/version.py\n!helpers\n"})
    sent = distdl(*DRY, HELLO, cwd=project)
    assert sent.returncode == 0, sent.stderr
    assert "left out   ignored by git, or hidden: generated/" in sent.stdout


def test_a_repository_that_git_refuses_starts_no_job_and_a_run_here_says_what_it_lacks(project):
    foreign = {"GIT_TEST_ASSUME_DIFFERENT_OWNER": "1"}
    refused = distdl(*DRY, cwd=project, env=foreign, module=UNCHECKED)
    assert refused.returncode == 2
    assert f"git config --global --add safe.directory {project}" in refused.stderr
    typed = (*TINY, "trainer.devices=1", "trainer.max_epochs=1", "name=x")
    done = distdl(*typed, cwd=project, env=foreign, module=UNCHECKED)
    assert done.returncode == 0, done.stderr
    assert "note       no commit is recorded" in done.stderr
    assert "safe.directory" in done.stderr


ESCAPE = "\x1b]0;title\x07\x1b[31m"


@pytest.mark.parametrize("launcher", ["slurm", "mpi", "sagemaker"])
def test_a_dry_run_and_a_refusal_show_no_control_character(
    launcher, said, without_stage_2, tmp_path
):
    """A value from somebody else's config, or a file's name, would else act on the terminal."""
    write(
        tmp_path,
        {
            f"{ESCAPE}.env": "x",
            "conf/experiment/theirs.yaml": f"""
# @package _global_
launcher: {{env: {{NOTE: {json.dumps(ESCAPE)}}}}}
""",
        },
    )
    typed = ("+experiment=theirs", f"launcher={launcher}", "trainer.devices=1", "dry_run=true")
    shown = said(*typed)
    assert "\\x1b" in shown or "\\u001b" in shown, shown
    assert not [c for c in shown if not (c.isprintable() or c in "\n\t")]
    shown = said(*typed, f"trainer.max_epochs={ESCAPE}", code=2)
    assert not [c for c in shown if not (c.isprintable() or c in "\n\t")]
