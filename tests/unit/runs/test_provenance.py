"""Where a run comes from: its command, packages and the state of git."""

from __future__ import annotations

import subprocess
from functools import partial
from pathlib import Path

from distdl.config import own_code
from distdl.runs import provenance


def git_in(folder: Path, *arguments: str, code: int = 0) -> str:
    who = ("-c", "user.name=me", "-c", "user.email=me@example.org")
    done = subprocess.run(["git", *who, *arguments], cwd=folder, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done.stdout


def test_provenance_has_the_state_of_git(tmp_path, monkeypatch):
    git = partial(git_in, tmp_path)
    (tmp_path / "experiments").mkdir()
    monkeypatch.chdir(tmp_path / "experiments")
    assert provenance.git_state(tmp_path) == {}
    assert provenance.project_root(None) == Path.cwd()
    git("init", "-b", "trunk")
    assert provenance.git_state(tmp_path)["error"] == "there is no commit yet"
    (tmp_path / "train.py").write_text("lr = 0.1\n")
    git("add", "train.py")
    git("commit", "-m", "first")
    (tmp_path / "train.py").write_bytes("# Größe\nlr = 0.2\n".encode("latin-1"))
    (tmp_path / "new.py").write_text("")
    record = provenance.collect(["distdl", "data=imagenet"], tmp_path)
    assert record["command"] == ["distdl", "data=imagenet"]
    assert any(package.startswith("torch==") for package in record["packages"])
    state = record["git"]
    assert len(state["commit"]) == 40
    assert state["branch"] == "trunk"
    assert state["dirty"]
    assert state["changed"] == [" M train.py", "?? new.py"]
    assert "-lr = 0.1\n+# Gr\ufffd\ufffde\n+lr = 0.2" in state["diff"]
    for chosen, root in ((None, tmp_path), (".", Path.cwd()), ("..", tmp_path)):
        assert provenance.project_root(chosen) == root
    # The folder that a command is typed in comes first, if it is part of the project.
    folders = own_code.own_folders(tmp_path)
    assert own_code.python_path(tmp_path, folders) == ["experiments", "."]
    monkeypatch.setenv("PATH", "")  # without git
    (error,) = provenance.git_state(tmp_path).values()
    assert "git is not installed" in error


def test_the_command_that_was_typed(tmp_path):
    typed = [["/x/distdl/__main__.py", "a=1"], ["/x/bin/torchx", "run"], ["/x/bin/distdl", "a=1"]]
    commands = [provenance.collect(command, tmp_path)["command"] for command in typed]
    assert commands == [["python", "-m", "distdl", "a=1"], ["torchx", "run"], ["distdl", "a=1"]]


def test_a_renamed_and_a_conflicted_file_have_gits_short_form(tmp_path):
    git = partial(git_in, tmp_path)
    git("init", "-b", "trunk")
    (tmp_path / "old name.py").write_text("a\nb\nc\n")
    (tmp_path / "both.py").write_text("1\n")
    git("add", ".")
    git("commit", "-m", "first")
    for branch, line in (("other", "2\n"), ("trunk", "3\n")):
        git("checkout", "-B", branch)
        (tmp_path / "both.py").write_text(line)
        git("commit", "-am", branch)
        git("checkout", "--detach", "HEAD~")
    git("checkout", "--detach", "trunk")
    git("merge", "other", code=1)
    git("mv", "old name.py", "new name.py")
    (tmp_path / "both of us.py").write_text("")
    state = provenance.git_state(tmp_path)
    assert state["changed"] == ["R  old name.py -> new name.py", "UU both.py", "?? both of us.py"]
    assert state["branch"] == "HEAD"
    # `git status` quotes these names, and sorts otherwise.
    short = git("status", "--porcelain").replace('"', "").splitlines()
    assert sorted(short) == sorted(state["changed"])
