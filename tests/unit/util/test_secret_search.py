# ruff: noqa: E501 - a file is one line here
"""Which files are held back because they may hold a secret. The files are made up at random by
`benchmarks.secret_corpus`; `python -m benchmarks.run secrets_in_files` compares with other tools."""

from __future__ import annotations

import base64
import gzip
import io
import json
import pickle
import plistlib
import sqlite3
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


WORD, LOBSTER = "domino" + "kitchen", "lob" + "ster7"
KEY = secret_corpus.Maker(SEED).bytes(16)
HEX = secret_corpus.Maker(SEED).hex(32)
MIXED = "".join(("eJ7lc2qE", "V4Cb9Fw6", "uR3yQ8oA", "5hB1qD0j"))
CONFIRM = "Confir" + "mar"
SEALED = base64.b64encode(b"\2" + secret_corpus.Maker(SEED).bytes(200)).decode()
# Family -> file -> content. None of these lines is of a set of the benchmark.
FAMILIES: dict[str, dict[str, str | bytes]] = {
    "a word beside a user, a network, a directory": {
        "a.conf": f'network={{\n ssid="lab"\n psk="{WORD}"\n}}\n',
        "a.properties": f"datasource.username=me\ndatasource.password={WORD}\n",
        "a.yaml": f"bind_dn: cn=me\nbind_pw: {PASSWORD}\n",
    },
    "an option of a program": {
        "curl.sh": f"curl --user me:{WORD} https://h.org\n",
        "plink.bat": f"plink -ssh me@h -pw {PASSWORD} ls\n",
        "openssl.sh": f"openssl enc -aes-256-cbc -in a -pass pass:{WORD}\n",
        "zip.sh": f"unzip -P {PASSWORD} data.zip\n",
        "net.cmd": f"net use S: \\\\nas\\x {PASSWORD} /user:me\n",
        "sec.ps1": f"ConvertTo-SecureString '{WORD}' -AsPlainText -Force\n",
    },
    "an answer to a prompt": {
        "a.exp": f'expect "*assword:" {{ send "{PASSWORD}\\r" }}\n',
        "a.py": f"child.expect('assword:')\nchild.sendline('{PASSWORD}')\n",
    },
    "an argument by its place": {
        "login.py": f"ftp.login('me', '{PASSWORD}')\n",
        "auth.py": f"get(url, auth=('me', '{PASSWORD}'))\n",
        "c.java": f'DriverManager.getConnection("jdbc:x", "me", "{PASSWORD}");\n',
        "c.scala": f'spark.conf.set("fs.s3a.password", "{PASSWORD}")\n',
    },
    "another language": {
        "de.txt": f"Kennwort: {PASSWORD}\n",
        "es.txt": f"Contraseña: {PASSWORD}\n".encode("latin-1"),
        "ru.txt": f"Пароль: {PASSWORD}\n",
        "ja.txt": f"パスワード\uff1a{PASSWORD}\n",
    },
    "notes": {
        "a.md": f"The password is `{PASSWORD}`.\n",
        "b.md": f"| password | {PASSWORD} |\n",
        "c.txt": f"Login: me / {PASSWORD}\n",
    },
    "bytes in a program": {
        "a.go": f"var signingKey = []byte{{{', '.join(f'{byte:#04x}' for byte in KEY)}}}\n",
        "a.rs": f"const AES_KEY: [u8; 16] = [{', '.join(map(str, KEY))}];\n",
        "a.py": "SECRET_KEY = b'" + "".join(f"\\x{byte:02x}" for byte in KEY) + "'\n",
    },
    "a key of an unknown service": {"a.sh": f"export WEATHER_KEY={HEX}\n"},
    "what stands in for a value that is missing": {
        "env.py": f'key = os.getenv("TIDE_API_KEY", "{MIXED}")\nx = os.environ.get("A", "b")\n',
        "argparse.py": f'p.add_argument(\n    "--db-password",\n    type=str,\n    default="{PASSWORD}",\n)\n',
        "click.py": f'@click.option("--token", default="{MIXED}")\n',
        "field.py": f'class C(Base):\n    api_key: str = Field("{MIXED}")\n',
        "a.js": f'const key = process.env.TIDE_API_KEY || "{MIXED}";\n',
        "variables.tf": f'variable "db_password" {{\n  type    = string\n  default = "{PASSWORD}"\n}}\n',
    },
    "an argument after its name": {
        "spark.conf": f"spark.hadoop.fs.s3a.secret.key   {MIXED}\n",
        "rclone.sh": f"rclone config create lab s3 provider Minio secret_access_key {MIXED}\n",
        "mc.sh": f"mc alias set lab https://minio.lab:9000 trainer {MIXED}\n",
        "submit.sh": f"spark-submit --conf spark.hadoop.fs.s3a.secret.key={MIXED} train.py\n",
        "a.md": f"Jump host: user kim, password `{PASSWORD}`\n",
    },
    "a command that a program starts": {
        "curl.py": f'subprocess.run(["curl", "-u", "me:{PASSWORD}", url])\n',
        "login.py": f'run(\n    "docker", "login", "-u", "me",\n    "-p", "{PASSWORD}",\n)\n',
    },
    "a header, a cookie, a part of an address": {
        "basic.py": f'H = {{"Authorization": "Basic {base64.b64encode(f"me:{PASSWORD}".encode()).decode()}"}}\n',
        "token.py": f'H = {{"Authorization": "Token {MIXED}"}}\n',
        "cookies.py": f'get(url, cookies={{"sessionid": "{MIXED}"}})\n',
        "appid.py": f'get("https://api.weather.net/data?q=Oslo&appid={HEX}")\n',
        ".condarc": f"channels:\n- https://conda.anaconda.org/t/xy-{MIXED}/lab\n",
        "pip.conf": f"[global]\nfind-links = https://ci:{MIXED}@wheels.example/own\n",
    },
    "a password that begins with a sign, a key named key": {
        "a.yaml": f"user: me\npassword: '!{PASSWORD}'\n",
        "a.ini": f"[db]\nuser = me\npassword = @{PASSWORD}\n",
        "fernet.py": f'KEY = b"{MIXED}{MIXED[:11]}="\n',
    },
    "in a test, too": {"test_api.py": f'client(token="{MIXED}", password="{PASSWORD}")\n'},
    "a default, a statement": {
        "a.yaml": f"DB_PASSWORD: ${{DB_PASSWORD:-{PASSWORD}}}\n",
        "Dockerfile": f"ENV DB_PASSWORD {PASSWORD}\n",
    },
    "an option of a server": {
        "compose.yaml": f"command: redis-server --appendonly yes --requirepass {PASSWORD}\n",
        "exec.json": f'["redis-server", "--requirepass", "{PASSWORD}"]\n',
    },
    "words joined by a dot, in settings": {
        "settings.xml": "<password>" + "silver." + "rocket1</password>\n",
        "a.properties": "db.password=silver." + "rocket1\n",
    },
    "an assignment in R": {
        "a.R": f'db_password <- "{PASSWORD}"\n',
        "b.R": f'tide_key <- "{MIXED}"\n',
    },
    "beside what only resembles it": {
        "messages_de.properties": f"login.password=Passwort\nsmtp.password={PASSWORD}\n",
        ".pgpass.sample": f"h:5432:*:user:password\nh:5432:*:me:{PASSWORD}\n",
        "sealed.yaml": f"kind: SealedSecret\npassword: {PASSWORD}\n",
        "a.R": f'connect(password = askpass("Password"))\nf(user = "me", password = "{PASSWORD}")\n',
        "a.csv": f"token_address,token\n0x{HEX}{HEX[:8]},{MIXED}\n",
    },
    "text inside": {
        "a.pkl": pickle.dumps({"user": "me", "db_password": PASSWORD}),
        "a.plist": plistlib.dumps({"Password": PASSWORD}, fmt=plistlib.FMT_BINARY),
        "a.yaml": f"content: {base64.b64encode(f'user=me{chr(10)}password={PASSWORD}'.encode()).decode()}\n",
        "a.ipynb": json.dumps(
            {"cells": [{"cell_type": "code", "source": [f"%env DB_PASSWORD {PASSWORD}\n"]}]}
        ),
        "a.ini": f"[db]\npassword={PASSWORD}\n".encode("utf-32"),
    },
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_secret_is_found_in_every_form_of_its_family(family, tmp_path):
    files = FAMILIES[family].items()
    assert [name for name, content in files if not why(tmp_path, name, content)] == []


def test_a_database_is_searched_table_by_table_and_left_as_it_is(tmp_path):
    path = tmp_path / "app.db"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE settings (key TEXT, value TEXT)")
        database.execute("INSERT INTO settings VALUES ('db_password', ?)", (PASSWORD,))
    database.close()
    before = path.read_bytes()
    reason = snapshot.secret_in(path, snapshot.state_of(path), ())
    assert reason == "settings.jsonl in it: line 1 holds a password"
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["app.db"]
    assert why(tmp_path, "cut.db", before[:5000]) == ""


def test_a_database_is_not_taken_for_text_with_two_bytes_a_character(tmp_path):
    path = tmp_path / "mlflow.db"  # columns that follow each other in a row look like one word
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE params (key TEXT, run TEXT, value TEXT)")
        row = ("global_batch_size", "c95fa97cb1fa4fa9af14c1c5d6ff7f6f", "I4")
        database.execute("INSERT INTO params VALUES (?, ?, ?)", row)
    database.close()
    assert snapshot.secret_in(path, snapshot.state_of(path), ()) == ""


USERS = "root:x:0:0:root:/root:/bin/bash\nme:x:1000:1000:Me:/home/me:/bin/sh\n"
PUBLIC = secret_corpus.Maker(SEED).pem("CERTIFICATE", KEY * 20)
# Names that suggest secrets, and forms that resemble the families above.
HARMLESS: dict[str, str] = {
    "chain.pem": PUBLIC + PUBLIC,
    "verify.pem": PUBLIC.replace("CERTIFICATE", "PUBLIC KEY"),
    "passwd": USERS,
    "secret.yaml": "apiVersion: v1\nkind: Secret\ndata:\n  token: {{ .Values.token | b64enc }}\n",
    ".npmrc": "registry=https://registry.npmjs.org/\nsave-exact=true\n",
    "must.yml": 'user: me\npassword: "${DB_PASSWORD:?must be set}"\n',
    "build.yml": "secrets-manager:\n  DB_PASSWORD: prod/db:password\n",
    ".secrets.baseline": f'{{"hashed_secret": "{KEY.hex()}aabbccdd"}}\n',
    "curl.sh": 'curl -u "$USER:$PASS" h\ncurl -u user:password h\ncurl -u elastic:elastic h\n',
    "calls.py": "login('me', 'password')\nconnect('h', 22, 'me', timeout='x9')\nprint('password', 'x1')\n",
    "bytes.c": f"const uint8_t kTable[16] = {{{', '.join(map(str, KEY))}}};\n",
    "vector.c": f"const uint8_t kAesKey[16] = {{{', '.join(map(str, range(16)))}}};\n",
    "cache.yml": f"CACHE_KEY: {HEX}\n",
    "note.md": "The password is hashed with sha256. | password | string | The password |\n",
    "a.minisig": "untrusted comment: signature from minisign secret key\n" + "RWQf6LRC" * 12 + "\n",
    "call.R": 'f(user = "me", password = Sys.getenv("PGPASSWORD"))\n'
    'f(user = "me", password = rstudioapi::askForPassword("Password"))\n'
    'f(user = "me", password = askpass("Password"), token <- get("x"))\n',
    "call.cpp": 'connect(user = me, password = vault::read("db"), x);\n',
    "messages_es.properties": f"login.user=Usuario\nlogin.password=Contraseña\nnew.password={CONFIRM}\n",
    "ja.json": '{"user": "ユーザー名", "password": "パスワード", "new_password": "パスワードを入力。"}\n',
    "pt_BR.yml": "user: Usuário\npassword: Senha*\n",
    "example.yaml": 'user: me\npassword: "tu_contraseña"\ndb_password: put_your_password_here\n'
    "a_password: DEIN_PASSWORT\nb_password: votre_mot_de_passe\nc_password: AKIAIOSFODNN7EXAMPLE\n"
    "d_password: '********'\n",
    ".pgpass.sample": "localhost:5432:*:user:password\n",
    "sealed.yaml": f"kind: SealedSecret\nspec:\n  encryptedData:\n    password: Ag{SEALED[2:]}\n",
    "transfers.csv": f"token_address,token\n0x{HEX}{HEX[:8]},0x{HEX}{HEX[:8]}\n",
    "environment.yml": "  - secretstorage=3.17.5=py310h65e1ca8_0\n  - passlib=1.7.4=pyhd8ed1ab_1\n",
    "test.yml": "POSTGRES_USER: postgres\nPOSTGRES_PASSWORD: postgres\n",
    "test_login.py": 'post("/login", {"user": "alice", "password": "wonderland"})\n'
    f'DSN = "postgres://me:{LOBSTER}@db.corp.net/x"\nrun(["curl", "-u", "me:{LOBSTER}", url])\n',
    "disguised.py": 'TOKEN = "c4nary-c4nary"\nSECRET = "s4mple-7oken-9x"\n',
    "hosts.py": 'MultiHostUrl("https://foo.com:123,foo:bar@bar.com/path")\n',
    "id.json": '{"SecretId": "MyTestDatabaseSecret1"}\n',
    "refers.env": "A=op://ml/wandb/credential\nB=vault:secret/data/ml#password\nC=$(gh auth token)\n"
    "export D=${D}\n# a comment\nE=@Microsoft.KeyVault(SecretUri=https://kv.vault.azure.net/secrets/x/)\n",
    "signs.yaml": "password: !vault\ndb_password: '$DB_PASSWORD'\nsecret: '@param1'\ntoken: '%TOKEN%'\n",
    "defaults.py": 'p.add_argument("--token", default="none")\nos.getenv("DB_PASSWORD", "changeme")\n'
    'x = os.environ.get("HOME", "/root1")\nname = getenv("RUN_NAME", "vit-b16-384")\n',
    "scope.tfvars.yaml": "user: me\npassword: var.password1\n",
    "image.yaml": f"icon: {base64.b64encode(KEY * 9).decode()}\n",
}


@pytest.mark.parametrize("name", HARMLESS)
def test_a_file_that_shows_that_it_has_no_secret_is_sent(name, tmp_path):
    assert why(tmp_path, name, HARMLESS[name]) == ""


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chain.pem", PUBLIC + "-----BEGIN PRIVATE KEY-----\nx\n"),
        ("passwd", f"{WORD}\n"),
        ("secret.yaml", f"kind: Secret\ndata:\n  token: {WORD}\n"),
        (".env", "SEED=1\n"),
    ],
)
def test_a_name_for_secrets_counts_unless_the_whole_file_shows_otherwise(name, content, tmp_path):
    assert why(tmp_path, name, content)


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


def test_this_repository_is_sent_with_its_tests_that_have_made_up_secrets():
    """It has every word for a secret, and patterns, examples and templates of all kinds."""
    taken = snapshot.take(secret_corpus.ROOT, [secret_corpus.ROOT / "outputs"], 300)
    assert [name for name, why in taken.left_out if "holds" in why] == []
