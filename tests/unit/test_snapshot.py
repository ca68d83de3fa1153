"""Which files leave this machine with a job, and which never do."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from distdl.runs import snapshot
from distdl.util.errors import UserError

HERE = ("train.py", "package/model.py", "notes.txt", "big.bin", "outputs/run/config.yaml")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    for name in HERE:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"this is {name}")
    return root


@pytest.fixture
def repository(project: Path) -> Path:
    git(project, "init", "-q")
    (project / ".gitignore").write_text("*.bin\n")
    git(project, "add", "train.py", ".gitignore")
    return project


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", "-C", str(folder), *arguments], check=True)


def sent(root: Path, **options: object) -> set[str]:
    taken = snapshot.take(root, [root / "outputs"], **{"limit_mb": 300, **options})  # type: ignore[arg-type]
    names = {name for _, name in taken.files if name.startswith("project/")}
    return {name.removeprefix("project/") for name in names}


def test_of_a_repository_what_git_would_keep(repository: Path) -> None:
    assert sent(repository) == {"train.py", ".gitignore", "package/model.py", "notes.txt"}
    inner = repository / "vendored"  # a submodule
    inner.mkdir()
    git(inner, "init", "-q")
    (inner / "layers.py").write_text("")
    assert "vendored/layers.py" in sent(repository)
    (repository / "train.py").unlink()  # still tracked
    (repository / ".env.example").write_text("TOKEN=")
    assert "train.py" not in sent(repository) and ".env.example" in sent(repository)
    (repository / ".amlignore").write_text("notes.*\npackage/\nvendored/\n.env*\n")
    assert sent(repository) == {".gitignore", ".amlignore"}
    taken = snapshot.take(repository, [repository / "outputs"], 300)
    assert taken.size == sum(path.stat().st_size for path, _ in taken.files)


def test_outside_git_what_is_neither_hidden_nor_ignored(project: Path) -> None:
    (project / ".gitignore").write_text("*.bin\n")
    for name in (".cache/weights.pt", "venv/pyvenv.cfg", "venv/activate.py"):
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text("")
    assert sent(project) == {"train.py", "package/model.py", "notes.txt"}


@pytest.mark.parametrize("in_git", [True, False])
def test_runs_are_no_code_wherever_they_are(project: Path, in_git: bool) -> None:
    if in_git:
        git(project, "init", "-q")
    for name in ("config.yaml", "attempts/001/launch.yaml", "checkpoints/last.ckpt"):
        (project / "elsewhere/e/run" / name).parent.mkdir(parents=True, exist_ok=True)
        (project / "elsewhere/e/run" / name).write_text("")
    assert not any(name.startswith("elsewhere") for name in sent(project))


def test_a_link_to_elsewhere_is_not_the_project(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere.py").write_text("")
    (repository / "linked.py").symlink_to(tmp_path / "elsewhere.py")
    (repository / "alias.py").symlink_to("train.py")
    taken = snapshot.take(repository, [repository / "outputs"], 300)
    assert taken.left_out == (("linked.py", "is a link that leads out of the project"),)
    assert "project/alias.py" in {place for _, place in taken.files}


@pytest.mark.parametrize(
    "name",
    [".env", ".env.local", "prod.env", "id_rsa", "server.pem", "credentials.json", "hf_token.txt"],
)
def test_files_made_for_secrets_stay_and_it_is_said(repository: Path, name: str) -> None:
    (repository / name).write_text("whatever")
    taken = snapshot.take(repository, [repository / "outputs"], 300)
    assert f"project/{name}" not in {place for _, place in taken.files}
    assert taken.left_out == ((name, "is a file for secrets, by its name"),)
    assert name in taken.lines_left_out()[0]


def test_what_holds_a_secret_of_this_shell_stays_and_a_module_is_refused(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SERVICE_TOKEN", "c4nary-c4nary")
    monkeypatch.setenv("PLAIN", "plain-but-forwarded")
    (repository / "notes.txt").write_text("\nplain-but-forwarded")
    taken = snapshot.take(repository, [repository / "outputs"], 300, secret_names=["PLAIN"])
    assert taken.left_out == (("notes.txt", "line 2 holds the value of $PLAIN"),)
    (repository / "package" / "client.py").write_text('TOKEN = "c4nary-c4nary"')
    with pytest.raises(UserError) as refused:
        sent(repository, secret_names=["PLAIN"])
    assert [p.path for p in refused.value.problems] == ["package/client.py"]
    assert "line 1 holds the value of $MY_SERVICE_TOKEN" in str(refused.value)
    assert "c4nary" not in str(refused.value)


def test_too_much_is_refused_and_the_largest_is_named(repository: Path) -> None:
    (repository / "data").mkdir()
    (repository / "data" / "images.tar").write_bytes(bytes(2_000_000))
    with pytest.raises(UserError, match="data 2 MB"):
        sent(repository, limit_mb=1)
    (repository / ".amlignore").write_text("data/\n")
    assert "data/images.tar" not in sent(repository, limit_mb=1)


def test_distdl_goes_as_it_is_imported() -> None:
    names = {name for _, name in snapshot.own_files()}
    wanted = {"worker/main.py", "conf/distdl.yaml", "launchers/local.py", "models/classifier.py"}
    assert wanted <= names
    assert not any("__pycache__" in name for name in names)
