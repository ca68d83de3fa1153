"""Secrets are found by what a file holds, whatever it is called; examples are not taken for any."""

from __future__ import annotations

import base64
import json
import os
import random
import string
from pathlib import Path

import pytest

from distdl.runs import snapshot
from distdl.runs.bundle import Bundle
from distdl.runs.directory import RunDirectory
from distdl.runs.snapshot import Snapshot
from distdl.util.errors import UserError
from distdl.util.redact import hide_shapes
from distdl.util.secret_shapes import SHAPES, find


def made(length: int, alphabet: str = string.ascii_letters + string.digits) -> str:
    """A token that nobody ever had: put together here, so that none stands in this file."""
    chosen = random.Random(length)
    return "".join(chosen.choice(alphabet) for _ in range(length))


def pem(kind: str, newline: str = "\n") -> str:
    lines = [made(64)[i:] + made(64)[:i] for i in range(8)]
    return newline.join([f"-----BEGIN {kind}-----", *lines, f"-----END {kind}-----", ""])


ACCOUNT = json.dumps({"type": "service_account", "private_key": pem("PRIVATE KEY")}, indent=1)
STORAGE = f"DefaultEndpointsProtocol=https;AccountName=me;AccountKey={made(86)}==;Endpoint=x"
NOTEBOOK = {"cells": [{"outputs": [{"text": [f"login hf_{made(34)} ok\n"]}], "image": made(5000)}]}

# File -> content, kind, line.
SECRETS: dict[str, tuple[str, str, int]] = {
    "deploy": (pem("OPENSSH PRIVATE KEY"), "a private key", 1),
    "deploy.txt": ("\n" + pem("ENCRYPTED PRIVATE KEY", "\r\n"), "a private key", 2),
    "gcp.json": (ACCOUNT, "a private key", 3),
    "kube": (base64.b64encode(pem("EC PRIVATE KEY").encode()).decode(), "a private key", 1),
    "storage.cfg": (STORAGE, "the key of a storage account", 1),
    "blob.sh": (
        f"azcopy 'https://a.blob.core.windows.net/c?sv=2024&sig={made(43)}%3D'",
        "a signed URL",
        1,
    ),
    "hub": (f"hf_{made(34)}", "a Hugging Face token", 1),
    "clone.sh": (f"git clone https://ghp_{made(36)}@github.com/o/r", "a GitHub token", 1),
    "pat": (f"github_pat_{made(82)}", "a GitHub token", 1),
    "dsn.ini": ("url = postgres://me:hunter2-vq8@db.corp.net/x", "a password in a URL", 1),
    "aws": (
        f"[default]\naws_secret_access_key = {made(40)}\n",
        "an AWS secret key",
        2,
    ),
    "key-id": ("AKIA" + made(16, string.ascii_uppercase + string.digits), "an AWS access key", 1),
    "slack": ("xoxb-" + made(24), "a Slack token", 1),
    "openai.yaml": (f"key: sk-proj-{made(40)}", "an API key (sk-...)", 1),
    "wandb.sh": (
        f"export WANDB_API_KEY={made(40, '0123456789abcdef')}",
        "a Weights & Biases key",
        1,
    ),
    "session": (f"eyJ{made(30)}.eyJ{made(40)}.{made(43)}", "a web token (JWT)", 1),
    "run.ipynb": (json.dumps(NOTEBOOK), "a Hugging Face token", 1),
    "settings.yaml": (f'service:\n  api_key: "{made(32)}"\n', "a secret by its name", 2),
}
HARMLESS = {
    "README.md": "AKIAIOSFODNN7EXAMPLE, https://user:password@host, hf_" + "x" * 34,
    "docs.md": "AccountKey=<your key>; ghp_YOUR_TOKEN_YOUR_TOKEN_YOUR_TOKEN; Bearer ${TOKEN}",
    "parse.py": 'if text.startswith("-----BEGIN RSA PRIVATE KEY-----"):\n    token = read(text)\n',
    "model.py": "token_embedding = self.backbone2.embed_tokens_with_positions7(x)\npad_token = 7",
    "ssh.py": 'URL = f"https://{user}:{token}@github.com"; sig=inspect.signature(f)',
    "poetry.lock": f'hash = "sha256:{made(64, "0123456789abcdef")}"\n' * 50,
    "cert.crt": pem("CERTIFICATE"),
    "plot.ipynb": json.dumps({"png": base64.b64encode(random.Random(1).randbytes(10**6)).decode()}),
    "hex.txt": random.Random(2).randbytes(5 * 10**5).hex(),
    "sk.html": "#sk-container-id-1 div.sk-estimator-doc-link-12 { sk-toggleable__label-arrow-3 }",
    "azurite.md": "AccountKey=Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZ"
    "FPTOtr/KBHBeksoGMGw==",
    "weights.bin": random.Random(3).randbytes(10**6).decode("latin-1"),
}  # fmt: skip


def written(root: Path, **files: str | bytes) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        data = content if isinstance(content, bytes) else content.encode("utf-8")
        (root / name).write_bytes(data)
    return root


def take(root: Path) -> Snapshot:
    return snapshot.take(root, [], 300)


def names(taken: Snapshot) -> set[str]:
    return {place.removeprefix("project/") for _, place in taken.files if "project/" in place}


def test_each_is_left_out_and_named_with_its_line_and_kind(tmp_path: Path) -> None:
    contents = {name: content for name, (content, _, _) in SECRETS.items()}
    taken = take(written(tmp_path, **contents, **{"train.py": "import torch\n"}))
    assert names(taken) == {"train.py"}
    told = dict(taken.left_out)
    for name, (content, kind, line) in SECRETS.items():
        assert f"line {line} holds {kind}" in told[name], name
        longest = max(content.replace("\\n", " ").split(), key=len)
        assert longest[:30] not in "\n".join(taken.lines_left_out())


def test_what_only_looks_like_one_goes(tmp_path: Path) -> None:
    taken = take(written(tmp_path, **HARMLESS))
    assert taken.left_out == () and names(taken) == {*HARMLESS}


def test_no_file_of_distdl_is_taken_for_a_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DB_PASSWORD", "password")
    assert take(tmp_path).left_out == ()


def test_a_module_is_refused_and_its_test_is_left_out(tmp_path: Path) -> None:
    module = f"import os\nTOKEN = 'hf_{made(34)}'\n"
    written(tmp_path, **{"tests/keys.py": module, "test_hub.py": module})
    assert {name for name, _ in take(tmp_path).left_out} == {"tests/keys.py", "test_hub.py"}
    written(tmp_path, **{"package/hub.py": module})
    with pytest.raises(UserError) as refused:
        take(tmp_path)
    assert [p.path for p in refused.value.problems] == ["package/hub.py"]
    assert "line 2 holds a Hugging Face token" in str(refused.value)
    assert "!package/hub.py" in str(refused.value) and made(34) not in str(refused.value)


def test_a_file_that_the_user_names_goes_and_a_pattern_is_no_such_word(tmp_path: Path) -> None:
    written(tmp_path, **{"docs/a.pem": pem("PRIVATE KEY"), "b": pem("PRIVATE KEY"), "c.pem": ""})
    written(tmp_path, **{".amlignore": "*\n!*.pem\n!b*\n!docs/\n!/docs/a.pem\n!c.pem\n"})
    taken = take(tmp_path)
    assert names(taken) == {"docs/a.pem", "c.pem"}
    assert [name for name, _ in taken.left_out] == ["b"]
    written(tmp_path, **{".amlignore": "\ufeff!b\n# Größe\n!c.pem\n!docs/a.pem".encode("utf-8")})
    assert take(tmp_path).left_out == ()
    written(tmp_path, **{".amlignore": "!b\n# Größe\n!c.pem\n!docs/a.pem".encode("latin-1")})
    assert take(tmp_path).left_out == ()
    assert taken.lines_left_out()[-1].endswith("!b)")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "latin-1"])
def test_another_encoding_hides_nothing(tmp_path: Path, encoding: str) -> None:
    written(tmp_path, note=f"é\nhf_{made(34)}".encode(encoding))
    assert take(tmp_path).left_out == (("note", "line 2 holds a Hugging Face token"),)


def test_a_large_file_is_searched_to_its_end_across_its_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "PIECE", 1000)
    monkeypatch.setattr(snapshot, "OVERLAP", 100)
    for before in (980, 3000, 3961):
        written(
            tmp_path, log=b"x" * (before - 2) + b"\n " + f"hf_{made(34)}".encode() + b"\n" * 999
        )
        assert take(tmp_path).left_out == (("log", "line 2 holds a Hugging Face token"),), before


def test_what_changed_after_the_search_is_not_sent(tmp_path: Path) -> None:
    project = written(tmp_path / "project", **{"train.py": "import torch\n"})
    run = RunDirectory(tmp_path / "outputs/e/run")
    run.create("seed: 1\n", {})
    attempt = run.begin_attempt({"where": {"project": {}}})
    taken = take(project)
    written(project, **{"train.py": f"TOKEN = 'hf_{made(34)}'\n"})
    with pytest.raises(UserError, match=r"train\.py: was changed while the job was put together"):
        Bundle.write(run, attempt, taken)


def test_names_of_any_bytes_are_sent_and_told_on_one_line(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_text("x")
    (tmp_path / "odd\nname").write_text(f"hf_{made(34)}")
    taken = take(tmp_path)
    assert os.fsdecode(b"caf\xe9.txt") in names(taken)
    assert [name for name, _ in taken.left_out] == [r"'odd\nname'"]


def test_logs_hide_all_that_files_may_not_hold() -> None:
    """One list: what keeps a file here is hidden in a log as well."""
    for name, (content, kind, _) in SECRETS.items():
        if kind != "a secret by its name":  # by name logs hide more, see test_redact
            assert not [*find(hide_shapes(content).encode())], name
    assert len({shape.pattern.pattern for shape in SHAPES}) == len(SHAPES)
