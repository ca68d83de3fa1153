"""Which files are held back because they may hold a secret. The files are made up at random by
`benchmarks.secret_corpus`; `python -m benchmarks.run secrets` compares with other tools."""

from __future__ import annotations

import gzip
import io
import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks import secret_corpus
from benchmarks.secret_corpus import Maker
from distdl.runs import snapshot
from distdl.util import archives

SEED = 7
SETS = (secret_corpus.first_set, secret_corpus.second_set, secret_corpus.third_set)


def why(folder: Path, name: str, content: str | bytes) -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(secret_corpus.as_bytes(content))
    return snapshot.secret_in(path, snapshot.state_of(path), ())


@pytest.mark.parametrize("files", SETS, ids=lambda each: each.__name__)
def test_made_up_secrets_are_found_and_the_reason_repeats_none(files, tmp_path):
    made = [*files(Maker(SEED))]
    reasons = {}
    for number, (_, name, content) in enumerate(made):
        reasons[name] = why(tmp_path / str(number), name, content)
    missed = [name for name, reason in reasons.items() if not reason]
    assert len(missed) <= len(made) // 20, missed
    for _, name, content in made:
        words = secret_corpus.as_bytes(content).decode("latin-1").replace("\0", "").split()
        assert not any(word in reasons[name] for word in words if len(word) > 12), name


def test_files_that_only_resemble_secrets_are_sent(tmp_path):
    made = secret_corpus.made_harmless(Maker(SEED))
    held = {name: reason for name, content in made if (reason := why(tmp_path, name, content))}
    assert held == {}


PASSWORD = "Kro" + "plo47!"  # in two parts: this file is searched, too
SETTINGS = f"""
password: {PASSWORD} -> a password
password: "{PASSWORD}"  # of the database -> a password
export DB_PASSWORD={PASSWORD} -> a password
password: ${{oc.env:DB_PASSWORD}} ->
password: ${{DB_PASSWORD:-none}} ->
password: {{{{ vault_password }}}} ->
password: <password> ->
password: changeme ->
password: ->
password: null ->
password: string ->
password_file: /run/{PASSWORD} ->
password: /run/secrets/db1 ->
tokenizer: gpt2xl4 ->
"""


@pytest.mark.parametrize("line", SETTINGS.strip().splitlines())
def test_a_literal_under_a_secret_name_counts_and_a_reference_does_not(line, tmp_path):
    text, _, kind = line.partition("->")
    reason = why(tmp_path, "x.yaml", text.rstrip() + "\n")
    assert reason == (f"line 1 holds {kind.strip()}" if kind else "")


def test_letters_alone_are_a_password_only_beside_a_user(tmp_path):
    word = "sword" + "fish"
    assert why(tmp_path, "a.ini", f"user = me\npassword = {word}\n") == "line 2 holds a password"
    assert why(tmp_path, "b.ini", f"[labels]\npassword = {word}\n") == ""


def packed(files: dict[str, str]) -> bytes:
    return secret_corpus.zipped(files)


def test_archives_are_searched_one_level_deep_and_named(tmp_path, monkeypatch):
    secret = f"x=1\npassword={PASSWORD}\n"
    reason = why(tmp_path, "a.zip", packed({"b/x.txt": "", "b/conf.ini": secret}))
    assert reason == "b/conf.ini in it: line 2 holds a password"
    assert why(tmp_path, "conf.ini.gz", gzip.compress(secret.encode())).startswith(
        "unpacked, line 2"
    )
    assert "is a file for secrets" in why(tmp_path, "c.tgz", secret_corpus.tarred({"a/.env": "x"}))
    twice = io.BytesIO()
    with zipfile.ZipFile(twice, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("inner.zip", packed({"conf.ini": secret}))
    assert why(tmp_path, "d.zip", twice.getvalue()) == "", "archives in archives are not opened"
    broken = gzip.compress(secret.encode() + b"x" * 1000)
    assert why(tmp_path, "e.ini.gz", broken[:-20]) in ("", "unpacked, line 2 holds a password")
    assert why(tmp_path, "f.gz", b"\x1f\x8b not packed at all") == ""
    monkeypatch.setattr(archives, "LIMIT", 1000)
    bomb = why(tmp_path, "g.gz", gzip.compress(b"x" * 10**6))
    assert bomb.startswith("is an archive that was not searched: it has more than")
    encrypted = bytearray(packed({"x": "y"}))
    encrypted[encrypted.index(b"PK\x01\x02") + 8] |= 1
    assert "not searched: it is encrypted" in why(tmp_path, "h.zip", bytes(encrypted))


def test_nothing_is_opened_but_the_files(tmp_path):
    """No network, no process."""
    events: list[str] = []
    watching = [True]
    sys.addaudithook(lambda name, _: events.append(name) if watching[0] else None)
    for _, name, content in secret_corpus.first_set(Maker(SEED)):
        assert why(tmp_path, name, content)
    watching[0] = False
    assert "open" in events
    assert not [e for e in events if e.startswith(("socket", "subprocess", "os.system", "os.exec"))]


def test_this_repository_is_sent_but_for_the_tests_that_have_made_up_secrets():
    """It has every word for a secret, and patterns, examples and templates of all kinds."""
    taken = snapshot.take(secret_corpus.ROOT, [secret_corpus.ROOT / "outputs"], 300)
    held = {name for name, why in taken.left_out if "holds" in why}
    assert held <= {"tests/unit/test_redact.py", "tests/unit/test_snapshot.py"}
