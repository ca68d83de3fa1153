"""Where a run came from, with no secret in it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from distdl.config import own_code
from distdl.runs import provenance

CANARY = "canary-0d9f61e2"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """One commit, and then one changed and one new file."""

    def git(*arguments: str) -> None:
        who = ("-c", "user.name=me", "-c", "user.email=me@example.org")
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-b", "trunk")
    assert provenance.git_state(tmp_path) == {}, "there is no commit yet"
    (tmp_path / "train.py").write_text("lr = 0.1\n")
    git("add", "train.py")
    git("commit", "-m", "first")
    (tmp_path / "train.py").write_text(f'lr = 0.2\napi_key = "{CANARY}"\n')
    (tmp_path / "new.py").write_text("")
    return tmp_path


def test_commit_branch_and_what_is_not_committed(repository, monkeypatch) -> None:
    state = provenance.git_state(repository)
    assert len(state["commit"]) == 40 and state["branch"] == "trunk"
    assert state["dirty"] and set(state["changed"]) == {" M train.py", "?? new.py"}
    assert "-lr = 0.1\n+lr = 0.2" in state["diff"]
    assert CANARY not in state["diff"] and "api_key" in state["diff"]
    (repository / "train.py").write_bytes("# Größe\nlr = 0.3\n".encode("latin-1"))  # no UTF-8
    state = provenance.git_state(repository)
    assert "+lr = 0.3" in state["diff"] and "# Gr\ufffd\ufffde" in state["diff"]
    json.dumps(state).encode("ascii")
    monkeypatch.setattr(provenance, "DIFF_LIMIT", 100)
    diff = provenance.git_state(repository)["diff"]
    assert diff.endswith("[cut here]\n") and len(diff) < 130


@pytest.mark.parametrize("installed", [True, False])
def test_without_git(tmp_path, monkeypatch, installed: bool) -> None:
    if not installed:
        monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert provenance.git_state(tmp_path) == {}
    assert provenance.project_root(None) == tmp_path


def test_everything_that_is_recorded(repository, monkeypatch) -> None:
    monkeypatch.setenv("SAMPLE_TOKEN", CANARY)
    monkeypatch.setenv("HARMLESS_LOOKING", "value-of-the-environment")
    command = ["distdl", "data=imagenet", f"+model.api_token={CANARY}", f"name=x{CANARY}"]
    record = provenance.collect(command, repository)
    text = json.dumps(record)
    assert CANARY not in text
    assert "value-of-the-environment" not in text, "os.environ is never recorded"
    assert record["command"][1] == "data=imagenet"
    assert any(package.startswith("torch==") for package in record["packages"])
    assert {"created", "distdl", "python", "platform"} <= set(record)


def test_the_users_code(repository, monkeypatch) -> None:
    inner = repository / "experiments"
    inner.mkdir()
    monkeypatch.chdir(inner)
    for given, root in ((None, repository), (str(inner), inner), ("..", repository)):
        assert provenance.project_root(given) == root
    # The folder that a command is typed in comes first, if it is part of the project.
    assert own_code.python_path(repository) == ["experiments", "."]
    assert own_code.python_path(Path("/elsewhere")) == ["."]
