"""Which files leave this machine with a job: what git would keep, and never a secret."""

from __future__ import annotations

import base64
import codecs
import json
import os
import random
import re
import shutil
import string
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from distdl.runs import provenance, snapshot
from distdl.runs.bundle import Bundle
from distdl.runs.directory import RunDirectory
from distdl.runs.project import listing
from distdl.runs.snapshot import Snapshot
from distdl.util.errors import UserError
from distdl.util.redact import hide_shapes
from distdl.util.secret_shapes import find
from tests.conftest import ROOT


def written(root: Path, **files: str | bytes) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        data = content if isinstance(content, bytes) else content.encode("utf-8")
        (root / name).write_bytes(data)
    return root


def take(root: Path, limit_mb: float = 300, **options: Any) -> Snapshot:
    return snapshot.take(root, [root / "outputs"], limit_mb, **options)


def sent(root: Path, **options: Any) -> set[str]:
    files = take(root, **options).files
    return {name.removeprefix("project/") for _, name in files if name.startswith("project/")}


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", "-C", str(folder), *arguments], check=True)


@pytest.fixture
def project(tmp_path) -> Path:
    """As files; not a repository."""
    names = (
        "train.py",
        "package/model.py",
        "notes.txt",
        "big.bin",
        "outputs/run/config.yaml",
        "elsewhere/e/run/config.yaml",
        "elsewhere/e/run/attempts/001/launch.yaml",
    )
    files = {name: f"this is {name}" for name in names}
    return written(tmp_path / "project", **files, **{".gitignore": "*.bin\n"})


@pytest.fixture
def repository(project) -> Path:
    git(project, "init", "-q")
    git(project, "add", "train.py", ".gitignore")
    return project


def test_of_a_repository_what_git_would_keep(repository, tmp_path):
    """Runs, wherever they are, are no code, and a link to elsewhere is not the project."""
    assert sent(repository) == {"train.py", ".gitignore", "package/model.py", "notes.txt"}
    inner = written(repository / "vendored", **{"layers.py": ""})
    git(inner, "init", "-q")  # a submodule
    (repository / "linked.py").symlink_to(written(tmp_path, elsewhere="") / "elsewhere")
    (repository / "alias.txt").symlink_to("notes.txt")
    (repository / "train.py").unlink()  # still tracked
    written(repository, **{".env.example": "TOKEN="})
    taken = take(repository)
    assert [name for name, _ in taken.left_out] == ["linked.py"]
    expected = {".gitignore", "package/model.py", "notes.txt", "vendored/layers.py", "alias.txt"}
    assert sent(repository) == {*expected, ".env.example"}
    written(repository, **{".amlignore": "*.txt\npackage/\nvendored/\n.env*\n"})
    assert sent(repository) == {".gitignore", ".amlignore"}


def test_outside_git_what_is_neither_hidden_nor_ignored(project):
    written(project, **{".cache/w.pt": "", "venv/pyvenv.cfg": "", "venv/activate.py": ""})
    assert sent(project) == {"train.py", "package/model.py", "notes.txt"}
    written(project, **{"data/images.tar": bytes(2_000_000)})
    with pytest.raises(UserError, match="data 2 MB"):
        sent(project, limit_mb=1)
    written(project, **{".amlignore": "data/\n"})
    assert "data/images.tar" not in sent(project, limit_mb=1)


def assumed_foreign(repository: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    return f"git config --global --add safe.directory {repository}"


def without_its_folder(repository: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (repository / ".git").rename(repository.parent / "moved")
    (repository / ".git").write_text("gitdir: ../removed\n")
    return "not a git repository: .*removed"


def damaged(repository: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (repository / ".git/HEAD").write_text("")
    return f"repair it, or remove {repository}/.git"


def inside_another(repository: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    damaged(repository, monkeypatch)
    git(repository.parent, "init", "-q")
    return "its own .git is damaged"


def without_git(repository: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PATH", "")
    return "git is not installed here"


def nested(repository: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    inner = written(repository / "vendored", **{"layers.py": "", "private.csv": ""})
    git(inner, "init", "-q")
    written(inner, **{".git/info/exclude": "private.csv\n", ".git/HEAD": ""})
    return "project/vendored: its own .git is damaged"


REFUSALS = (assumed_foreign, without_its_folder, damaged, inside_another, without_git, nested)


@pytest.mark.parametrize("spoilt", REFUSALS)
def test_a_repository_that_git_refuses_sends_nothing(spoilt, repository, monkeypatch):
    """Which files it ignores is unknown then: those must not leave this machine."""
    expected = spoilt(repository, monkeypatch)
    with pytest.raises(UserError, match=expected) as error:
        sent(repository)
    assert str(repository) in str(error.value)
    state = provenance.git_state(repository)
    assert spoilt is nested or {*state} == {"error"}, "what is unknown is not recorded as nothing"


def test_what_git_ignores_stays_and_is_said_wherever_git_reads_it(repository, monkeypatch):
    """Also in a hook, where git points every command to the repository of the hook."""
    inner = written(repository / "vendored", **{"layers.py": "", "private.csv": "", "a/b.csv": ""})
    git(inner, "init", "-q")
    files = {
        "data/.gitignore": "private.csv\n",
        "data/private.csv": "",
        "data/public.csv": "",
        ".git/info/exclude": "notes.txt\n",
        "vendored/.gitignore": "private.csv\na/\n",
    }
    written(repository, **files)
    monkeypatch.setenv("GIT_DIR", ".git")
    taken = take(repository)
    ignored = {"data/private.csv", "notes.txt", "big.bin"}
    assert {*taken.ignored} == {*ignored, "vendored/private.csv", "vendored/a/"}
    assert not sent(repository) & {*taken.ignored}
    assert "data/public.csv" in sent(repository)
    (line, hint) = taken.lines_left_out()
    assert line.startswith("ignored by git, or hidden: big.bin, ")
    assert "!big.bin" in hint
    written(repository, **{".amlignore": "!notes.txt\nvendored/\n"})
    assert "notes.txt" in sent(repository), "sent, as the hint says"
    assert {*take(repository).ignored} == {*ignored}


def test_outside_git_every_gitignore_counts_and_nothing_is_missed(project):
    """A folder that is left out says nothing about the size of the rest, nor does a name."""
    files = {
        "a/.gitignore": "*.csv\n",
        "a/b/x.csv": "",
        "a/x.py": "",
        "attempts/x.py": "",
        ".amlignore": "big/\n",
        "big/x": bytes(2_000_000),
        "game/attempts/x.py": "",
        "inner/.git/x": "",
        "z.py": "",
    }
    written(project, **files)
    (project / "inner/.git/x").unlink()
    git(project / "inner", "init", "-q")
    written(project / "inner", **{".git/info/exclude": "private\n", "private": "", "x.py": ""})
    taken = {"train.py", "package/model.py", "notes.txt", "z.py", "a/x.py", "attempts/x.py"}
    assert sent(project, limit_mb=0.1) == {*taken, "game/attempts/x.py", "inner/x.py"}
    assert {"a/b/x.csv", "inner/private", "big.bin"} <= {*take(project).ignored}


def as_another_user(root: Path) -> str:
    """What a refusal says if this process is no administrator, who may read everything."""
    codecs.lookup("utf-8-sig")  # another user may not read this Python's modules
    reading, writing = os.pipe()
    if os.fork() == 0:
        try:
            os.setuid(1234 if os.getuid() == 0 else os.getuid())
            take(root)
        except Exception as error:  # the parent fails with any text that it gets
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        return pipe.read()


@pytest.mark.parametrize("with_git", [True, False])
def test_a_folder_that_cannot_be_read_is_refused(with_git):
    with tempfile.TemporaryDirectory() as folder:
        root = written(Path(folder), **{"x.py": "", "shut/y.py": ""})
        if with_git:
            git(root, "init", "-q")
        for path in (root, *root.rglob("*")):
            os.chown(path, 1234 if os.getuid() == 0 else os.getuid(), -1)
        (root / "shut").chmod(0)
        assert "shut: cannot be read: Permission denied" in as_another_user(root)
        written(root, **{".amlignore": "shut/\n"})
        assert as_another_user(root) == ""
        (root / "shut").chmod(0o700)


LINKED = {
    "pkg/inner": "../real/inner",
    "pkg/z_link.py": "../real/inner/z.py",
    "pkg/deep": "../real",
}
LEFT_OUT = {
    "around": (".", "is a link to a folder that it is in"),
    "real/back": ("../pkg", ""),
    "nothing": ("nowhere", "is a link to nothing"),
    "itself": ("itself", "is a link to nothing"),
    "helpers": ("../outside/helpers", "is a link that leads out of the project"),
    "shared.py": ("../outside/shared.py", "is a link that leads out of the project"),
    "private": ("data/private.csv", "is a link to data/private.csv, which is not sent"),
    "generated": ("data/generated", "is a link to data/generated, which is not sent"),
}


@pytest.mark.parametrize("with_git", [True, False])
def test_a_link_is_followed_inside_the_project_and_named_otherwise(with_git, project, tmp_path):
    written(tmp_path / "outside", **{"helpers/h.py": "y = 1", "shared.py": ""})
    files = {"real/inner/z.py": "", ".gitignore": "*.bin\ndata/\n", "pkg/__init__.py": ""}
    written(project, **files, **{"data/private.csv": "", "data/generated/x.py": ""})
    for name, target in {**LINKED, **{k: v for k, (v, _) in LEFT_OUT.items()}}.items():
        (project / name).symlink_to(target)
    if with_git:
        git(project, "init", "-q")
        git(project, "add", ".")
    names = sent(project)
    expected = {"pkg/inner/z.py", "pkg/z_link.py", "pkg/deep/inner/z.py", "real/inner/z.py"}
    assert expected <= names
    assert "real/back/__init__.py" in names
    reasons = dict(take(project).left_out)
    assert {k: v for k, (_, v) in LEFT_OUT.items() if v}.items() <= reasons.items()
    assert not {*LEFT_OUT} & names
    assert not [n for n in names if "private" in n or "helpers" in n]
    written(project, **{".amlignore": "!helpers\n!shared.py\n"})
    assert {"helpers/h.py", "shared.py"} <= sent(project), "sent, as the hint says"
    shutil.rmtree(project / "real")  # git still lists what is in it
    (project / "real").symlink_to("../outside")
    assert not [n for n in sent(project) if n.startswith("real/")]
    assert "real" in dict(take(project).left_out)


def test_a_clone_of_distdl_sends_no_file_twice():
    """Its links for mypy stay, which would send launchers/ again."""
    names = listing(ROOT, []).names
    files = {(ROOT / name).resolve() for name in names}
    assert "launchers/local.py" in names
    assert len(files) == len(names)


def test_what_no_line_can_send_is_not_offered(project):
    (project / "big.bin").unlink()  # it is ignored, and so would be offered
    (project / "nothing").symlink_to("nowhere")
    lines = take(project).lines_left_out()
    assert lines == ["nothing: is a link to nothing"]
    written(project, **{".gitignore": "ignored*\n"})
    (project / "ignored").symlink_to("nowhere")
    assert take(project).lines_left_out() == lines
    written(project, **{"ignored.txt": ""})
    assert take(project).lines_left_out()[-1].endswith("name it in .amlignore: !ignored.txt)")


def test_a_module_that_is_imported_here_and_not_sent_is_refused(repository, tmp_path):
    """Without it the job would fail on the nodes, or find another module of that name."""
    helpers = written(tmp_path / "outside", **{"h.py": ""})
    (repository / "helpers").symlink_to(helpers)
    names = ("package/model.py", "package/_version.py", "gen/a_pb2.py", "helpers/h.py", "cut/x.py")
    written(repository, **{name: "" for name in names if name != "helpers/h.py"})
    written(repository, **{".gitignore": "_version.py\ngen/\n", ".amlignore": "cut/\n"})
    imported = [str(repository / name) for name in names]
    with pytest.raises(UserError) as error:
        take(repository, imported=[*imported, "/usr/lib/python3/abc.py"])
    problems = {p.path: str(p) for p in error.value.problems}
    assert {*problems} == {*names} - {"package/model.py"}
    assert "git ignores gen/" in problems["gen/a_pb2.py"]
    assert "git ignores package/_version.py" in problems["package/_version.py"]
    assert "helpers is a link that leads out of the project" in problems["helpers/h.py"]
    assert ".amlignore leaves it out" in problems["cut/x.py"]
    lines = "!gen/a_pb2.py\n!package/_version.py\n!helpers\ncut/*\ncut/x.py\n"
    written(repository, **{".amlignore": lines})  # as the messages say
    taken = take(repository, imported=imported)
    assert {*names} - {name.removeprefix("project/") for _, name in taken.files} == {"cut/x.py"}


def test_a_module_where_runs_are_written_is_named_with_that_reason(project):
    written(project, **{"outputs/mine/net.py": ""})
    imported = [str(project / "outputs/mine/net.py")]
    with pytest.raises(UserError, match="without it: runs are written to outputs"):
        take(project, imported=imported)
    written(project, **{".amlignore": "!outputs/mine/net.py\n"})  # as the message says
    assert "outputs/mine/net.py" in sent(project, imported=imported)


def test_files_made_for_secrets_stay_and_are_reported(repository):
    names = ".env .env.local prod.env id_rsa server.pem credentials.json hf_token.txt"
    names += " " + " ".join(f"{number}.pem" for number in range(5))
    taken = take(written(repository, **dict.fromkeys(names.split(), "whatever")))
    why = "is a file for secrets, by its name"
    assert {*taken.left_out} == {(name, why) for name in names.split()}
    lines = taken.lines_left_out()
    assert why in lines[0]
    assert lines[10] == "and 2 more"


def test_a_secret_of_this_shell_stays_and_a_module_with_one_is_refused(repository, monkeypatch):
    monkeypatch.setenv("MY_SERVICE_TOKEN", "c4nary-c4nary")
    monkeypatch.setenv("PLAIN", "plain-but-forwarded")
    written(repository, **{"notes.txt": "\nplain-but-forwarded"})
    taken = take(repository, secret_names=["PLAIN"])
    assert taken.left_out == (("notes.txt", "line 2 holds the value of $PLAIN"),)
    module = 'TOKEN = "c4nary-c4nary"'
    tests = {"tests/keys.py", "test_hub.py"}  # those are left out, and not refused
    taken = take(written(repository, **dict.fromkeys(tests, module)))
    assert {name for name, _ in taken.left_out} == tests
    written(repository, **{"package/client.py": module})
    refusal = r"line 1 holds the value of \$MY_SERVICE_TOKEN.*\n.*!package/client"
    with pytest.raises(UserError, match=refusal) as error:
        sent(repository, secret_names=["PLAIN"])
    assert [p.path for p in error.value.problems] == ["package/client.py"]
    assert "c4nary" not in str(error.value)


def made(length: int, alphabet: str = string.ascii_letters + string.digits) -> str:
    """A token that nobody ever had: put together here, so that none stands in this file."""
    chosen = random.Random(length)
    return "".join(chosen.choice(alphabet) for _ in range(length))


def pem(kind: str, newline: str = "\n") -> str:
    lines = [made(64)[i:] + made(64)[:i] for i in range(8)]
    return newline.join([f"-----BEGIN {kind}-----", *lines, f"-----END {kind}-----", ""])


HEX = "0123456789abcdef"
HUB = f"hf_{made(34)}"
ACCOUNT = json.dumps({"type": "service_account", "private_key": pem("PRIVATE KEY")}, indent=1)
STORAGE = f"DefaultEndpointsProtocol=https;AccountName=me;AccountKey={made(86)}==;Endpoint=x"
NOTEBOOK = {"cells": [{"outputs": [{"text": [f"login {HUB} ok\n"]}], "image": made(5000)}]}
BLOB = f"azcopy 'https://a.blob.core.windows.net/c?sv=2024&sig={made(43)}%3D'"
# Kind -> file -> content. The secret is in the first line, or in the one after "N:".
SECRETS = {
    "a private key": {
        "deploy": pem("OPENSSH PRIVATE KEY"),
        "2:deploy.txt": "\n" + pem("ENCRYPTED PRIVATE KEY", "\r\n"),
        "3:gcp.json": ACCOUNT,
        "kube": base64.b64encode(pem("EC PRIVATE KEY").encode()).decode(),
    },
    "the key of a storage account": {"storage.cfg": STORAGE},
    "a signed URL": {"blob.sh": BLOB},
    "a Hugging Face token": {"hub": HUB, "run.ipynb": json.dumps(NOTEBOOK)},
    "a GitHub token": {
        "clone.sh": f"git clone https://ghp_{made(36)}@github.com/o/r",
        "fine-grained": f"github_pat_{made(82)}",
    },
    "a password in a URL": {"dsn.ini": "url = postgres://me:hunter2-vq8@db.corp.net/x"},
    "an AWS secret key": {"2:aws": f"[default]\naws_secret_access_key = {made(40)}\n"},
    "an AWS access key": {"key-id": "AKIA" + made(16, string.ascii_uppercase + string.digits)},
    "a Slack token": {"slack": "xoxb-" + made(24)},
    "an API key (sk-...)": {"openai.yaml": f"key: sk-proj-{made(40)}"},
    "a Weights & Biases key": {"wandb.sh": f"export WANDB_API_KEY={made(40, HEX)}"},
    "a web token (JWT)": {"session": f"eyJ{made(30)}.eyJ{made(40)}.{made(43)}"},
    "a secret by its name": {"2:settings.yaml": f'service:\n  api_key: "{made(32)}"\n'},
}
HARMLESS = {
    "README.md": "AKIAIOSFODNN7EXAMPLE, https://user:password@host, hf_" + "x" * 34,
    "docs.md": "AccountKey=<your key>; ghp_YOUR_TOKEN_YOUR_TOKEN_YOUR_TOKEN; Bearer ${TOKEN}",
    "parse.py": 'if text.startswith("-----BEGIN RSA PRIVATE KEY-----"):\n    token = read(text)\n',
    "model.py": "token_embedding = self.backbone2.embed_tokens_with_positions7(x)\npad_token = 7",
    "ssh.py": 'URL = f"https://{user}:{token}@github.com"; sig=inspect.signature(f)',
    "poetry.lock": f'hash = "sha256:{made(64, HEX)}"\n' * 50,
    "cert.crt": pem("CERTIFICATE"),
    "plot.ipynb": json.dumps({"png": base64.b64encode(random.Random(1).randbytes(10**6)).decode()}),
    "hex.txt": random.Random(2).randbytes(5 * 10**5).hex(),
    "sk.html": "#sk-container-id-1 div.sk-estimator-doc-link-12 { sk-toggleable__label-arrow-3 }",
    "azurite.md": "AccountKey=Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZ"
    "FPTOtr/KBHBeksoGMGw==",
    "weights.bin": random.Random(3).randbytes(10**6).decode("latin-1"),
}


def test_a_secret_is_left_out_and_named_by_line_and_kind(tmp_path):
    """And it is hidden in a log as well."""
    labels = [(kind, *item) for kind, files in SECRETS.items() for item in files.items()]
    written(tmp_path, **{label.rpartition(":")[2]: content for _, label, content in labels})
    taken = take(written(tmp_path, **{"train.py": "import torch\n"}))
    reasons = dict(taken.left_out)
    shown = str(taken.left_out)
    for kind, label, content in labels:
        line, _, name = label.rpartition(":")
        assert f"line {line or 1} holds {kind}" in reasons[name]
        longest = max(content.replace("\\n", " ").split(), key=len)
        assert longest[:30] not in shown
        # Logs also hide values whose names look secret: test_redact proves that.
        if kind != "a secret by its name":
            assert not [*find(hide_shapes(content).encode())]
    assert sent(tmp_path) == {"train.py"}


def test_what_only_looks_like_one_is_sent(tmp_path, monkeypatch):
    monkeypatch.setenv("DB_PASSWORD", "password")  # no file of distdl is taken for a secret either
    taken = take(written(tmp_path, **{k: v for k, v in HARMLESS.items() if "password" not in v}))
    assert taken.left_out == ()
    monkeypatch.delenv("DB_PASSWORD")
    assert sent(written(tmp_path, **HARMLESS)) == {*HARMLESS}


def test_a_file_named_in_amlignore_is_sent_and_a_pattern_names_none(tmp_path):
    written(tmp_path, **{"docs/a.pem": pem("PRIVATE KEY"), "b": pem("PRIVATE KEY"), "c.pem": ""})
    written(tmp_path, **{".amlignore": "*\n!*.pem\n!b*\n!docs/\n!/docs/a.pem\n!c.pem\n"})
    taken = take(tmp_path)
    assert sent(tmp_path) == {"docs/a.pem", "c.pem"}
    assert [name for name, _ in taken.left_out] == ["b"]
    assert taken.lines_left_out()[-1].endswith("!b)")
    for start, encoding in (("\ufeff", "utf-8"), ("", "latin-1")):
        lines = f"{start}!b\n# Größe\n!c.pem\n!docs/a.pem".encode(encoding)
        assert take(written(tmp_path, **{".amlignore": lines})).left_out == ()


@pytest.mark.parametrize("before", [980, 3000, 3961])
def test_a_large_file_is_searched_across_its_pieces(tmp_path, monkeypatch, before):
    monkeypatch.setattr(snapshot, "PIECE", 1000)
    monkeypatch.setattr(snapshot, "OVERLAP", 100)
    written(tmp_path, log="x" * (before - 2) + "\n " + HUB + "\n" * 999)
    assert take(tmp_path).left_out == (("log", "line 2 holds a Hugging Face token"),)


def test_no_encoding_hides_a_secret_and_any_name_is_printed_on_one_line(tmp_path):
    names = {encoding: f"é\n{HUB}".encode(encoding) for encoding in ("utf-16-be", "latin-1")}
    written(tmp_path, **names, **{"odd\nname": f"é\n{HUB}".encode("utf-16")})
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_text("x")
    why = "line 2 holds a Hugging Face token"
    assert {*take(tmp_path).left_out} == {(name, why) for name in (*names, r"'odd\nname'")}
    assert sent(tmp_path) == {os.fsdecode(b"caf\xe9.txt")}


def test_what_changed_after_the_search_is_not_sent(tmp_path):
    project = written(tmp_path / "project", **{"train.py": "import torch\n"})
    run = RunDirectory(tmp_path / "outputs/e/run")
    run.create("seed: 1\n", {})
    attempt = run.begin_attempt({"where": {"project": {}}})
    taken = take(project)
    written(project, **{"train.py": f"TOKEN = '{HUB}'\n"})
    with pytest.raises(UserError, match=r"train\.py: was changed"):
        Bundle.write(run, attempt, taken)


AZURE = ("launcher=azureml", "trainer.devices=1", "trainer.accelerator=gpu", "dry_run=true")


def test_the_files_of_a_dry_run_are_not_in_the_next_one(command, tmp_path, without_stage_2):
    """Wherever they are in the project; a bundle alone neither."""
    written(tmp_path, **{"train.py": "x = 1\n", "bundle/launch.yaml": "mine: 1\n"})
    described = set[str]()
    for number in range(2):
        done = command("model=resnet18", *AZURE, "launcher.files=azure", f"name=n{number}")
        assert done.code == 0, done.err
        described.add(next(x for x in done.out.splitlines() if x.startswith("code  ")))
        assert (tmp_path / f"azure/default/n{number}/bundle/code/project/train.py").is_file()
        shutil.copytree(tmp_path / f"azure/default/n{number}/bundle", tmp_path / f"copy{number}")
    assert len(described) == 1, described
    own = {"train.py", "bundle/launch.yaml"}
    assert sent(tmp_path) == own
    git(tmp_path, "init", "-q")
    assert sent(tmp_path) == own


# `output_dir`, and what a job gets of the project.
BESIDE = {".": {"train.py"}, "..": {"train.py", "e/old.bin", "mlflow.db"}}


@pytest.mark.parametrize("outputs", BESIDE)
def test_the_project_travels_though_runs_are_written_to_a_folder_that_holds_it(
    outputs, command, tmp_path, without_stage_2, monkeypatch
):
    project = tmp_path / "project"
    written(project, **{"train.py": "", "e/old.bin": "", "mlflow.db": ""})
    monkeypatch.chdir(project)
    words = (f"output_dir={outputs}", "experiment_name=e", "launcher.files=azure", "name=n")
    done = command("model=resnet18", *AZURE, *words)
    assert done.code == 0, done.err
    code = project / "azure/e/n/bundle/code/project"
    sent_files = {path.relative_to(code).as_posix() for path in code.rglob("*") if path.is_file()}
    assert sent_files == BESIDE[outputs]


def test_a_failed_dry_run_keeps_nothing_and_says_so(
    command, tmp_path, without_stage_2, monkeypatch
):
    written(tmp_path, **{"train.py": "x = 1\n"})
    blocked = command("model=resnet18", *AZURE, "launcher.files=train.py", "name=n")
    assert blocked.code == 2
    assert "launcher.files: train.py/default cannot be written" in blocked.err
    assert "choose another: launcher.files=FOLDER" in blocked.err
    snapshot.secret_in.cache_clear()
    real = shutil.copy

    def edited(source: Path, target: Path) -> None:
        real(source, target)
        if Path(source) == tmp_path / "train.py":
            Path(source).write_text("x = 1  # edited meanwhile\n", encoding="utf-8")

    monkeypatch.setattr("distdl.runs.bundle.shutil.copy", edited)
    done = command("model=resnet18", *AZURE, "launcher.files=azure", "name=n")
    assert done.code == 2
    assert "was changed while the job was being prepared" in done.err
    assert "is kept" not in done.err
    assert "resume" not in done.err
    assert not [*(tmp_path / "azure/default").iterdir()]


@pytest.mark.parametrize("why", ["git ignores run.sh", ".amlignore leaves it out"])
def test_a_program_that_would_not_travel_is_refused(repository, why):
    written(repository, **{"run.sh": "#!/bin/sh\n"})
    ignore = ".gitignore" if why.startswith("git") else ".amlignore"
    with (repository / ignore).open("a") as file:
        file.write("\n*.sh\n")
    what = "run.sh: is what the command starts, and the job would be without it: "
    with pytest.raises(UserError, match=re.escape(what + why)):
        take(repository, started=[str(repository / "run.sh")])
    take(repository, started=["/usr/bin/env"])


def test_a_program_with_a_secret_is_refused(repository):
    written(repository, **{"run.sh": f"#!/bin/sh\nexport HF_TOKEN={HUB}\n"})
    with pytest.raises(UserError, match="would leave this machine with the job"):
        take(repository, started=[str(repository / "run.sh")])
    assert "run.sh" in dict(take(repository).left_out)
