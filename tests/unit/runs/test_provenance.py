"""Where a run comes from: its command, packages and the state of git."""

from __future__ import annotations

import subprocess
from pathlib import Path

from distdl.config import own_code
from distdl.runs import provenance


def test_provenance_has_the_state_of_git(tmp_path, monkeypatch):
    def git(*arguments: str) -> None:
        who = ("-c", "user.name=me", "-c", "user.email=me@example.org")
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True)

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
