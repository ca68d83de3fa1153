# ruff: noqa: E501 - a file is one line here
"""Made-up secrets in the files in which people keep them, and files that hold none.

Every secret is put together at random when this is called: none stands in this file, and none was
ever anybody's. The kinds and the forms of their values are those that the rule lists of Kingfisher,
CredSweeper and Gitleaks document; the files are those of the tools that read them.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import random
import string
import subprocess
import sysconfig
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LETTERS = string.ascii_letters + string.digits
HEX = "0123456789abcdef"
_SYLLABLES = "ba ke lo mi nu ra se ti vo zu dar fen gol hix jum kro plo qua sti tra"
_WORDS = "sunshine dragon winter summer monkey football shadow orange tiger coffee"
SYLLABLES = _SYLLABLES.split()
WORDS = _WORDS.split()


class Maker:
    """Random values of the forms that services and people give to secrets."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def of(self, length: int, alphabet: str = LETTERS) -> str:
        return "".join(self.random.choice(alphabet) for _ in range(length))

    def hex(self, length: int) -> str:
        return self.of(length, HEX)

    def bytes(self, length: int) -> bytes:
        return self.random.randbytes(length)

    def base64(self, length: int) -> str:
        return base64.b64encode(self.bytes(length)).decode()

    def password(self) -> str:
        """As people choose one: syllables, a digit or two, perhaps a sign."""
        word = "".join(self.random.choice(SYLLABLES) for _ in range(3)).capitalize()
        return word + self.of(2, string.digits) + self.random.choice(["", "!", "#", "_"])

    def weak(self) -> str:
        return self.random.choice(WORDS) + self.of(self.random.choice([2, 4]), string.digits)

    def der(self, tag: int, content: bytes) -> bytes:
        size = len(content)
        if size < 128:
            return bytes([tag, size]) + content
        length = size.to_bytes((size.bit_length() + 7) // 8, "big")
        return bytes([tag, 0x80 | len(length)]) + length + content

    def integer(self, length: int) -> bytes:
        return self.der(2, b"\x00" + bytes([0x80 | self.bytes(1)[0]]) + self.bytes(length - 1))

    def rsa(self) -> bytes:
        """A private key of RSA, in PKCS#1; its numbers are random, so that it fits nothing."""
        numbers = [
            self.der(2, b"\x00"),
            self.integer(256),
            self.der(2, b"\x01\x00\x01"),
            self.integer(256),
            *(self.integer(128) for _ in range(5)),
        ]
        return self.der(0x30, b"".join(numbers))

    def pkcs8(self) -> bytes:
        oid = bytes.fromhex("06092a864886f70d0101010500")
        inner = self.der(0x30, oid) + self.der(4, self.rsa())
        return self.der(0x30, self.der(2, b"\x00") + inner)

    def ec(self) -> bytes:
        curve = self.der(0xA0, bytes.fromhex("06082a8648ce3d030107"))
        return self.der(0x30, self.der(2, b"\x01") + self.der(4, self.bytes(32)) + curve)

    def pkcs12(self) -> bytes:
        data = bytes.fromhex("06092a864886f70d010701") + self.der(
            0xA0, self.der(4, self.bytes(900))
        )
        return self.der(0x30, self.der(2, b"\x03") + self.der(0x30, data))

    def pem(self, kind: str, content: bytes | None = None) -> str:
        text = base64.b64encode(content or self.rsa()).decode()
        lines = [text[i : i + 64] for i in range(0, len(text), 64)]
        return "\n".join([f"-----BEGIN {kind}-----", *lines, f"-----END {kind}-----", ""])

    def jwt(self) -> str:
        parts = ({"alg": "HS256", "typ": "JWT"}, {"sub": self.hex(12), "exp": 1999999999})
        encoded = (base64.urlsafe_b64encode(json.dumps(p).encode()).decode() for p in parts)
        return ".".join([*(each.rstrip("=") for each in encoded), self.of(43)])


File = tuple[str, str, str | bytes]  # kind, name, content


def first_set(make: Maker) -> Iterator[File]:
    """60 files of 30 kinds."""
    p, w = make.password, make.weak
    yield (
        "password in ini",
        "db.ini",
        f"[database]\nhost = db.corp.net\nuser = me\npassword = {w()}\n",
    )
    yield "password in ini", "mail.cfg", f"[smtp]\nlogin=me\npasswd={p()}\nport=587\n"
    yield "password in YAML", "settings.yaml", f"db:\n  user: me\n  password: {p()}\n  port: 5432\n"
    yield (
        "password in YAML",
        "compose.yml",
        (f"services:\n  db:\n    environment:\n      POSTGRES_PASSWORD: {w()}\n      - X=1\n"),
    )
    yield (
        "password in JSON",
        "conf.json",
        json.dumps({"smtp": {"user": "me", "pass": p()}}, indent=1),
    )
    yield "password in JSON", "appsettings.json", json.dumps({"Db": {"Password": w()}})
    yield (
        "secret in TOML",
        "config.toml",
        f'[auth]\nclient_id = "me"\nclient_secret = "{make.of(14)}"\n',
    )
    yield "secret in TOML", "Rocket.toml", f'[default]\nsecret_key = "{make.base64(32)}"\n'
    yield "shell variables", "env.sh", f"export LR=0.1\nexport DB_PASSWORD='{p()}'\n"
    yield "shell variables", "vars.env.txt", f"DEBUG=1\nREDIS_PASSWORD={p()}\n"
    yield "shell command", "upload.sh", f"curl -u me:{p()} -T model.pt https://files.corp.net/\n"
    yield "shell command", "dump.sh", f"PGPASSWORD={w()} pg_dump -h db.corp.net app > dump.sql\n"
    yield "Python", "upload.py", f'import hub\nhub.login("me", password="{p()}")\n'
    yield "Python", "service.py", f'API_KEY = "{make.of(24)}"\nURL = "https://api.corp.net"\n'
    cell = {"cell_type": "code", "outputs": [], "metadata": {}}
    for source in (
        [f'wandb.login(key="{make.hex(40)}")\n'],
        ["import os\n", f'os.environ["MY_API_TOKEN"] = "{make.of(20)}"\n'],
    ):
        yield (
            "notebook",
            f"{len(source)}.ipynb",
            json.dumps({"cells": [{**cell, "source": source}]}),
        )
    yield (
        "Terraform",
        "main.tf",
        f'resource "db" "x" {{\n  username = "me"\n  password = "{p()}"\n}}\n',
    )
    yield "Terraform", "prod.tfvars", f'region = "eu"\ndb_password = "{w()}"\n'
    secret = base64.b64encode(p().encode()).decode()
    head = "apiVersion: v1\nkind: Secret\nmetadata:\n  name: db\ntype: Opaque\n"
    yield "Kubernetes", "secret-db.yaml", f"{head}data:\n  password: {secret}\n"
    yield "Kubernetes", "db-k8s.yml", f"{head}stringData:\n  url: x\n  token: {make.of(16)}\n"
    user = base64.b64encode(f"me:{p()}".encode()).decode()
    auths = {"auths": {"https://index.docker.io/v1/": {"auth": user}}}
    yield "docker", "docker/config.json", json.dumps(auths, indent=1)
    yield "docker", "pull-secret.txt", json.dumps(auths)
    yield "netrc", "netrc", f"machine api.wandb.ai\n  login user\n  password {make.hex(40)}\n"
    yield "netrc", "ci_netrc.txt", f"machine git.corp.net login me password {w()}\n"
    yield "database files", "pgpass.conf", f"db.corp.net:5432:app:me:{p()}\n"
    yield "database files", "my.cnf", f"[client]\nuser=me\npassword={w()}\n"
    yield "PEM key", "deploy", make.pem("RSA PRIVATE KEY")
    yield "PEM key", "tls.txt", make.pem("EC PRIVATE KEY", make.ec())
    yield "DER key", "server.der", make.pkcs8()
    yield "DER key", "signing.bin", make.ec()
    yield "key store", "bundle.bin", make.pkcs12()
    yield "key store", "store.dat", bytes.fromhex("feedfeed0000000200000001") + make.bytes(900)
    yield (
        "SSH key",
        "putty.txt",
        (
            "PuTTY-User-Key-File-3: ssh-rsa\nEncryption: none\nPrivate-Lines: 3\n"
            + "".join(make.of(64) + "\n" for _ in range(3))
        ),
    )
    yield (
        "SSH key",
        "backup",
        make.pem("OPENSSH PRIVATE KEY", b"openssh-key-v1\0" + make.bytes(300)),
    )
    account = {"type": "service_account", "project_id": "x", "private_key_id": make.hex(40)}
    account["private_key"] = make.pem("PRIVATE KEY", make.pkcs8())
    yield "GCP", "gcp.json", json.dumps(account, indent=1)
    user_of = {
        "client_id": "1-x.apps.googleusercontent.com",
        "client_secret": make.of(24),
        "refresh_token": f"1//0{make.of(60)}",
        "type": "authorized_user",
    }
    yield "GCP", "adc.json", json.dumps(user_of)
    upper = string.ascii_uppercase + "234567"
    keys = f"aws_access_key_id = AKIA{make.of(16, upper)}\naws_secret_access_key = {make.of(40)}\n"
    yield "AWS", "aws.ini", f"[default]\n{keys}"
    yield (
        "AWS",
        "s3.py",
        f'import boto3\ns3 = boto3.client("s3", aws_secret_access_key="{make.of(40)}")\n',
    )
    account_key = f"DefaultEndpointsProtocol=https;AccountName=me;AccountKey={make.base64(64)};"
    yield "Azure", "storage.txt", account_key
    yield (
        "Azure",
        "azcopy.sh",
        f"azcopy 'https://a.blob.core.windows.net/c?sv=2024&sig={make.of(43)}%3D'",
    )
    yield (
        "webhook",
        "notify.sh",
        f"curl https://hooks.slack.com/services/T{make.of(8, upper)}/B{make.of(10, upper)}/{make.of(24)}\n",
    )
    yield (
        "webhook",
        "alert.yaml",
        f"url: https://discord.com/api/webhooks/{make.of(18, string.digits)}/{make.of(68)}\n",
    )
    yield "bot", "telegram.yaml", f"bot: {make.of(10, string.digits)}:AA{make.of(33)}\n"
    yield "bot", "discord.env", f"BOT=M{make.of(23)}.G{make.of(5)}.{make.of(38)}\n"
    yield "code hosts", "clone.sh", f"git clone https://x:ghp_{make.of(36)}@github.com/o/r\n"
    yield "code hosts", "ci.yml", f"variables:\n  DEPLOY: glpat-{make.of(20)}\n"
    yield "hubs", "hub.txt", f"hf_{make.of(34)}\n"
    yield "hubs", "train.slurm", f"#SBATCH -N 2\nexport WANDB_API_KEY={make.hex(40)}\n"
    yield "language models", "llm.yaml", f"key: sk-proj-{make.of(74)}T3BlbkFJ{make.of(74)}\n"
    yield "language models", "chat.json", json.dumps({"anthropic": f"sk-ant-api03-{make.of(93)}AA"})
    yield "JWT", "session.txt", f"{make.jwt()}\n"
    yield "JWT", "request.http", f"GET /me\nAuthorization: Bearer {make.jwt()}\n"
    yield "package index", "npmrc", f"//registry.npmjs.org/:_authToken=npm_{make.of(36)}\n"
    yield (
        "package index",
        "upload.cfg",
        f"[pypi]\nusername = __token__\npassword = pypi-AgEIcHlwaS5vcmc{make.of(120)}\n",
    )
    yield "hex key", "keys.yaml", f"encryption_key: {make.hex(64)}\n"
    yield "hex key", "app.py", f'SECRET_KEY = "{make.hex(32)}"\n'
    yield "URL", "dsn.txt", f"postgresql://me:{p()}@db.corp.net:5432/app\n"
    yield "URL", "broker.conf", f"broker_url = redis://:{w()}@cache.corp.net:6379/0\n"
    yield "archive", "token.txt.gz", gzip.compress(f"hf_{make.of(34)}\n".encode())
    yield "archive", "deploy.zip", zipped({"app/.env": f"DB_PASSWORD={p()}\n"})


def second_set(make: Maker) -> Iterator[File]:
    """60 further files, of other services and forms: written before the patterns were chosen."""
    p, w = make.password, make.weak
    upper = string.ascii_uppercase + string.digits
    yield (
        "archive",
        "code.tar.gz",
        tarred({"k/id": make.pem("OPENSSH PRIVATE KEY", make.bytes(300))}),
    )
    yield "htpasswd", "users", f"me:$apr1${make.of(8)}${make.of(22)}\n"
    yield "htpasswd", "web.passwd", f"me:$2y$05${make.of(53)}\n"
    yield (
        "Databricks",
        "databricks.cfg",
        f"[DEFAULT]\nhost = https://x.cloud.databricks.com\ntoken = dapi{make.hex(32)}\n",
    )
    yield "Kaggle", "kaggle_api.json", json.dumps({"username": "me", "key": make.hex(32)})
    yield "Comet", "comet.config", f"[comet]\napi_key={make.of(25)}\nworkspace=x\n"
    neptune = {"api_address": "https://app.neptune.ai", "api_key": make.hex(32)}
    yield (
        "Neptune",
        "neptune.sh",
        f"export NEPTUNE_API_TOKEN={base64.b64encode(json.dumps(neptune).encode()).decode()}\n",
    )
    yield (
        "ClearML",
        "clearml.conf",
        f'api {{\n  credentials {{\n    "access_key" = "{make.of(20, upper)}"\n    "secret_key" = "{make.of(50)}"\n  }}\n}}\n',
    )
    yield (
        "Teams webhook",
        "teams.py",
        f'URL = "https://corp.webhook.office.com/webhookb2/{make.hex(8)}-{make.hex(4)}-{make.hex(4)}-{make.hex(4)}-{make.hex(12)}@x/IncomingWebhook/{make.hex(32)}/y"\n',
    )
    yield (
        "Azure client secret",
        "sp.json",
        json.dumps({"appId": "x", "password": f"{make.of(3)}8Q~{make.of(34)}", "tenant": "y"}),
    )
    yield (
        "Azure SQL",
        "web.config",
        f'<add name="db" connectionString="Server=tcp:x;User ID=me;Password={p()};" />\n',
    )
    yield (
        "Service Bus",
        "bus.txt",
        f"Endpoint=sb://x.servicebus.windows.net/;SharedAccessKeyName=root;SharedAccessKey={make.base64(32)}\n",
    )
    yield (
        "Maven",
        "settings.xml",
        f"<server><id>x</id><username>me</username><password>{p()}</password></server>\n",
    )
    yield "properties", "db.properties", f"jdbc.user=me\njdbc.password={w()}\n"
    yield "R", "Renviron", f"HOME=/x\nGITHUB_PAT=ghp_{make.of(36)}\n"
    yield "Docker", "Dockerfile", f"FROM x\nENV API_TOKEN={make.of(18)}\nRUN ls\n"
    yield "Ansible", "hosts.ini", f"[web]\nweb1 ansible_user=me ansible_password={p()}\n"
    yield "rclone", "rclone.conf", f"[drive]\ntype = webdav\nuser = me\npass = {make.of(40)}\n"
    yield (
        "WireGuard",
        "wg0.conf",
        f"[Interface]\nAddress = 10.0.0.2\nPrivateKey = {make.base64(32)}\n",
    )
    yield "age", "age.txt", f"# created: now\nAGE-SECRET-KEY-1{make.of(58, upper)}\n"
    yield "PGP", "me.asc", make.pem("PGP PRIVATE KEY BLOCK", make.bytes(700))
    yield "Stripe", "pay.rb", f'Stripe.api_key = "sk_live_{make.of(24)}"\n'
    yield "SendGrid", "mail.js", f'sg.setApiKey("SG.{make.of(22)}.{make.of(43)}")\n'
    yield (
        "Twilio",
        "sms.js",
        f'const client = twilio("AC{make.hex(32)}", "{make.hex(32)}");\nconst authToken = "{make.hex(32)}";\n',
    )
    yield (
        "Google API key",
        "map.html",
        f'<script src="https://maps.googleapis.com/js?key=AIza{make.of(35)}"></script>\n',
    )
    yield (
        "Google OAuth",
        "client.json",
        json.dumps({"installed": {"client_secret": f"GOCSPX-{make.of(28)}"}}),
    )
    yield "Shopify", "shop.yaml", f"access: shpat_{make.hex(32)}\n"
    yield "DigitalOcean", "do.sh", f"doctl auth init -t dop_v1_{make.hex(64)}\n"
    yield "Vault", "vault.sh", f"vault login hvs.{make.of(90)}\n"
    yield "Grafana", "grafana.ini", f"[auth]\nkey = glsa_{make.of(32)}_{make.hex(8)}\n"
    yield "New Relic", "newrelic.yml", f"common:\n  license_key: {make.hex(36)}NRAL\n"
    yield "Sentry", "sentry.conf", f"dsn=https://{make.hex(32)}:{make.hex(32)}@sentry.io/1\n"
    yield "Replicate", "replicate.txt", f"r8_{make.of(37)}\n"
    yield "Groq", "groq.yaml", f"model: gsk_{make.of(52)}\n"
    yield (
        "Pinecone",
        "pine.py",
        f'pinecone.init(api_key="{make.hex(8)}-{make.hex(4)}-{make.hex(4)}-{make.hex(4)}-{make.hex(12)}")\n',
    )
    yield "Docker token", "push.sh", f"docker login -u me -p dckr_pat_{make.of(27)}\n"
    yield "Postman", "pm.json", json.dumps({"values": [{"key": "api_token", "value": make.of(22)}]})
    yield "Linear", "linear.env.yml", f"x: lin_api_{make.of(40)}\n"
    yield "Notion", "notion.ts", f'const notion = new Client({{ auth: "secret_{make.of(43)}" }})\n'
    yield (
        "MongoDB",
        "mongo.js",
        f'mongoose.connect("mongodb+srv://me:{p()}@c0.abcde.mongodb.net/x")\n',
    )
    yield "MySQL command", "q.sh", f"mysql -h db.corp.net -u me -p{p()} app\n"
    yield "sshpass", "copy.sh", f"sshpass -p '{p()}' scp x me@node1:/data\n"
    yield "SMB", "mount.sh", f"mount -t cifs //nas/x /mnt -o username=me,password={p()}\n"
    yield "sudo", "setup.sh", f"echo '{p()}' | sudo -S apt-get install x\n"
    yield (
        "TOTP",
        "otp.txt",
        f"otpauth://totp/me@corp.net?secret={make.of(32, 'ABCDEFGHIJKLMNOPQRSTUVWXYZ234567')}&issuer=x\n",
    )
    yield (
        "Jupyter",
        "jupyter_config.py",
        f'c.NotebookApp.password = "argon2:$argon2id$v=19$m=10240,t=10,p=8${make.of(22)}${make.of(43)}"\n',
    )
    yield (
        "Django",
        "settings.py",
        f"SECRET_KEY = 'django-insecure-{make.of(40, LETTERS + '!@#$%^&*(-_=+)')}'\n",
    )
    yield "Rails", "secrets.rb.yml", f"production:\n  secret_key_base: {make.hex(128)}\n"
    yield (
        "Airflow",
        "airflow.cfg",
        f"[core]\nfernet_key = {base64.urlsafe_b64encode(make.bytes(32)).decode()}\n",
    )
    yield (
        "basic header",
        "api.http",
        f"Authorization: Basic {base64.b64encode(f'me:{p()}'.encode()).decode()}\n",
    )
    yield "UTF-16", "win.ini", f"[db]\r\npassword={p()}\r\n".encode("utf-16")
    yield "CSV", "accounts.csv", f"user,password\nanna,{p()}\nbob,{w()}\n"
    yield "JS config", "config.js", f"module.exports = {{ user: 'me', password: '{p()}' }}\n"
    yield "Go", "main.go", f'var dbPassword = "{p()}"\n'
    yield "dictionary", "d.py", f'config = {{"user": "me", "password": "{w()}"}}\n'
    yield "function call", "c.py", f'ssh.connect("node1", username="me", password="{p()}")\n'
    yield "GitHub App key", "app.json", json.dumps({"pem": make.pem("RSA PRIVATE KEY")})
    yield (
        "base64 key",
        "kube.yaml",
        f"client-key-data: {base64.b64encode(make.pem('RSA PRIVATE KEY').encode()).decode()}\n",
    )
    yield "kube token", "kube2.yaml", f"users:\n- name: me\n  user:\n    token: {make.of(30)}\n"
    yield "README", "NOTES.md", f"# Cluster\n\nuser: me\npassword: {p()}\n"


def third_set(make: Maker) -> Iterator[File]:
    """Further services and forms, of which some were missed at first."""
    p, w = make.password, make.weak
    word, digits = "sword" + "fish", "1234" + "5678"
    upper = string.ascii_uppercase + string.digits
    yield "", "a.yaml", f"mail:\n  smtp_pass: {p()}\n"
    yield "", "b.ini", f"[db]\nuser=me\npass = {word}\n"
    yield "", "c.env.local.cfg", "SECRET=q8w3e7r1\n"
    yield "", "d.json", f'{{"user":"me","password":"{word}"}}'
    yield "", "e.py", f'PASSWORD = "{word}"\nUSER = "me"\n'
    yield "", "f.py", f'conn = psycopg2.connect(host="db", user="me", password="{word}")\n'
    yield "", "g.yaml", f"deploy:\n  env:\n    - name: DB_PASSWORD\n      value: {p()}\n"
    yield "", "h.toml", f'[tool.x]\npassword = "{p()}"\n'
    yield (
        "",
        "i.xml",
        f"<datasource><user-name>me</user-name><password>{w()}</password></datasource>",
    )
    yield "", "j.sh", f"export AWS_SECRET_ACCESS_KEY={make.of(40)}\n"
    yield (
        "",
        "k.sh",
        f"az login --service-principal -u x -p {make.of(3)}8Q~{make.of(34)} --tenant y\n",
    )
    yield "", "l.sh", f"wandb login {make.hex(40)}\n"
    yield "", "m.sh", f"huggingface-cli login --token hf_{make.of(34)}\n"
    yield "", "n.sh", f"docker run -e POSTGRES_PASSWORD={p()} postgres\n"
    yield "", "o.Dockerfile", f"ARG TOKEN={make.of(20)}\n"
    yield "", "p.conf", f"requirepass {p()}\n"
    yield "", "q.conf", f'network={{\n ssid="x"\n psk="{p()}"\n}}\n'
    yield "", "r.json", json.dumps({"token": make.of(12)})
    yield "", "s.yaml", f"access_token: {make.hex(40)}\n"
    yield "", "t.txt", f"user: me\npassword: {p()}\n"
    yield "", "u.txt", f"{make.of(40)}\n"
    yield "", "v.txt", f"{make.hex(40)}\n"
    yield "", "w.cfg", f'[remote "o"]\n url = https://me:{p()}@git.corp.net/x.git\n'
    yield (
        "",
        "x.jwk.json",
        json.dumps(
            {"kty": "EC", "crv": "P-256", "x": make.of(43), "y": make.of(43), "d": make.of(43)}
        ),
    )
    yield (
        "",
        "y.bin",
        make.der(
            0x30,
            make.der(0x30, bytes.fromhex("06092a864886f70d01050d") + make.der(0x30, make.bytes(40)))
            + make.der(4, make.bytes(300)),
        ),
    )
    yield "", "z.bin", make.rsa()
    yield "", "aa.jceks", b"\xce\xce\xce\xce" + make.bytes(300)
    yield (
        "",
        "ab.ovpn.txt",
        "<tls-auth>\n-----BEGIN OpenVPN Static key V1-----\n"
        + make.hex(32)
        + "\n-----END OpenVPN Static key V1-----\n",
    )
    yield "", "ac.json", json.dumps({"bot_token": f"{make.of(10, string.digits)}:AA{make.of(33)}"})
    yield (
        "",
        "ad.py",
        f'requests.post("https://discordapp.com/api/webhooks/{make.of(18, string.digits)}/{make.of(68)}")\n',
    )
    yield (
        "",
        "ae.yaml",
        f"url: https://corp.webhook.office.com/webhookb2/{make.hex(8)}-{make.hex(4)}-{make.hex(4)}-{make.hex(4)}-{make.hex(12)}@{make.hex(8)}-{make.hex(4)}-{make.hex(4)}-{make.hex(4)}-{make.hex(12)}/IncomingWebhook/{make.hex(32)}/{make.hex(8)}-{make.hex(4)}\n",
    )
    yield (
        "",
        "af.txt",
        f"https://chat.googleapis.com/v1/spaces/AAAA{make.of(7)}/messages?key=AIza{make.of(35)}&token={make.of(43)}\n",
    )
    yield (
        "",
        "ag.json",
        json.dumps(
            {
                "neptune": {
                    "api_token": base64.b64encode(
                        json.dumps(
                            {"api_address": "https://app.neptune.ai", "api_key": make.hex(32)}
                        ).encode()
                    ).decode()
                }
            }
        ),
    )
    yield "", "ah.ini", f"[comet]\napi_key = {make.of(25)}\n"
    yield "", "ai.sh", f"export MLFLOW_TRACKING_PASSWORD={w()}\n"
    yield "", "aj.sh", f"curl -H 'Authorization: token {make.hex(40)}' https://x\n"
    yield "", "ak.sh", f"curl -H 'X-API-Key: {make.of(32)}' https://x\n"
    yield "", "al.sh", f"curl 'https://api.x.com/v1?api_key={make.hex(32)}'\n"
    yield "", "am.py", f'headers = {{"Authorization": "Bearer {make.of(40)}"}}\n'
    yield "", "an.py", f'openai.api_key = "sk-{make.of(48)}"\n'
    yield (
        "",
        "ao.ipynb",
        json.dumps({"cells": [{"source": ["!wandb login " + make.hex(40) + "\n"]}]}),
    )
    yield (
        "",
        "ap.ipynb",
        json.dumps(
            {
                "cells": [
                    {
                        "source": ["password = 'x'\n"],
                        "outputs": [{"text": ["token=" + make.of(24) + "\n"]}],
                    }
                ]
            }
        ),
    )
    yield (
        "",
        "aq.yaml",
        f"apiVersion: v1\nkind: Secret\ntype: kubernetes.io/dockerconfigjson\ndata:\n  .dockerconfigjson: {base64.b64encode(b'{}' + make.bytes(90)).decode()}\n",
    )
    yield (
        "",
        "ar.dockercfg",
        json.dumps(
            {
                "https://x": {
                    "username": "me",
                    "auth": base64.b64encode(b"me:" + p().encode()).decode(),
                    "email": "a@b",
                }
            }
        ),
    )
    yield "", "as", f"default login me password {p()}\n"
    yield "", "at", f"localhost:5432:*:me:{p()}\n*:*:*:me:{w()}\n"
    yield "", "au.htpasswd.txt", f"me:{{SHA}}{base64.b64encode(make.bytes(20)).decode()}\n"
    yield "", "av.shadow", f"root:$6$abcdefgh${make.of(86)}:19000:0:99999:7:::\n"
    yield "", "aw.tfvars.json", json.dumps({"db_password": p()})
    yield "", "ax.properties", f"spring.datasource.password={w()}\n"
    yield "", "ay.cs", f'var cs = "Server=x;Database=y;User Id=me;Password={p()};";\n'
    yield "", "az.R", f'Sys.setenv(API_KEY = "{make.of(32)}")\n'
    yield "", "ba.jl", f'const TOKEN = "{make.of(32)}"\n'
    yield "", "bb.bat", f"set DB_PASSWORD={p()}\r\n"
    yield "", "bc.ps1", f'$env:API_TOKEN = "{make.of(24)}"\n'
    yield "", "bd.gradle", f'storePassword "{p()}"\n'
    yield "", "be.plist", f"<key>password</key><string>{p()}</string>\n"
    yield "", "bf.sql", f"CREATE USER me IDENTIFIED BY '{p()}';\n"
    yield "", "bg.sql", f"ALTER ROLE me WITH PASSWORD '{p()}';\n"
    yield "", "bh.tar", tarred({"x/conf.ini": f"password={p()}"}, "")
    yield "", "bi.jar", zipped({"application.properties": f"db.password={p()}\n"})
    yield "", "bj.zip", zipped({"k/server.key": "x"})
    yield "", "bk.yaml", f'private_key: "0x{make.hex(64)}"\n'
    yield "", "bl.yaml", f"cookie_secret: {make.hex(64)}\n"
    yield "", "bm.py", f'SALT = "x"\napp.secret_key = b"{make.hex(16)}zz"\n'
    yield "", "bn.md", f"Login with `me` / password: `{p()}`\n"
    yield "", "bo.yaml", f'password: "{p()} {p()} x9"\n'
    yield "", "bp.yaml", f"auth:\n  basic: me:{p()}\n"
    yield "", "bq.yaml", f'db:\n  user: me\n  password: "{digits}"\n'
    yield "", "br.toml", f'[registries.x]\ntoken = "Bearer {make.of(30)}"\n'
    yield "", "bs.npmrc.txt", f"_auth={base64.b64encode(('me:' + p()).encode()).decode()}\n"
    yield "", "bt.yaml", f"gitlab:\n  runner: glrt-{make.of(20)}\n"
    yield "", "bu.yaml", f"v: xai-{make.of(80)}\n"
    yield "", "bv.yaml", f"v: nvapi-{make.of(64)}\n"
    yield "", "bw.yaml", f"v: pplx-{make.of(48)}\n"
    yield "", "bx.yaml", f"v: figd_{make.of(40)}\n"
    yield "", "by.yaml", f"v: dp.pt.{make.of(43)}\n"
    yield "", "bz.yaml", f"v: pul-{make.hex(40)}\n"
    yield "", "ca.yaml", f"v: sbp_{make.hex(40)}\n"
    yield "", "cb.yaml", f"v: tfp_{make.of(59)}\n"
    yield "", "cc.yaml", f"v: {make.of(14)}.atlasv1.{make.of(67)}\n"
    yield "", "cd.yaml", f"v: EAAA{make.of(60)}\n"
    yield "", "ce.yaml", f"v: ya29.{make.of(60)}\n"
    yield (
        "",
        "cf.yaml",
        f"v: xapp-1-A{make.of(10, upper)}-{make.of(13, string.digits)}-{make.hex(64)}\n",
    )
    yield "", "cg.yaml", f"v: ATATT3{make.of(186)}\n"
    yield "", "ch.yaml", f"v: PMAK-{make.hex(24)}-{make.hex(34)}\n"
    yield "", "ci.yaml", f"v: NRAK-{make.of(27, upper)}\n"
    yield "", "cj.yaml", f"v: pk.eyJ{make.of(60)}.{make.of(22)}\n"
    yield "", "ck.yaml", f"v: AccountKey={make.base64(64)}\n"
    yield "", "cl.yaml", f"v: sq0csp-{make.of(43)}\n"
    yield "", "cm.yaml", f"v: key-{make.hex(32)}\n"
    yield "", "cn.yaml", f"v: SK{make.hex(32)}\n"
    yield "", "co.yaml", f"v: rk_live_{make.of(24)}\n"
    yield "", "cp.yaml", f"v: whsec_{make.of(32)}\n"
    yield "", "cq.yaml", f"v: ops_eyJ{make.of(200)}\n"
    yield "", "cr.yaml", f"v: sk-or-v1-{make.hex(64)}\n"
    yield "", "cs.yaml", f"v: eyJrIjoi{make.of(80)}\n"
    yield "", "ct.yaml", f"v: glc_eyJ{make.of(80)}\n"
    yield "", "cu.yaml", f"v: dckr_pat_{make.of(27)}\n"
    yield "", "cv.yaml", f"v: AGE-SECRET-KEY-1{make.of(58, upper)}\n"
    yield "", "cw.yaml", f"v: gho_{make.of(36)}\n"
    yield "", "cx.yaml", f"v: ntn_{make.of(46)}\n"
    yield "", "cy.yaml", f"v: tskey-auth-{make.of(12)}-{make.of(32)}\n"


def zipped(files: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return buffer.getvalue()


def tarred(files: dict[str, str], packed: str = "gz") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=f"w:{packed}") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    return buffer.getvalue()


def harmless(count: int = 1000) -> list[tuple[str, bytes]]:
    """Names and contents of files without a secret: made-up ones in forms that resemble secrets,
    this repository's, and those of installed packages, which were made public by their authors."""
    made = [
        (name, as_bytes(text)) for seed in range(8) for name, text in made_harmless(Maker(seed))
    ]
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, check=True
    )
    ours = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    site = Path(sysconfig.get_path("purelib"))
    kinds = (
        "*.py",
        "METADATA",
        "RECORD",
        "*.json",
        "*.yaml",
        "*.yml",
        "*.toml",
        "*.cfg",
        "*.txt",
        "*.pyi",
    )
    theirs = sorted(path for kind in kinds for path in site.rglob(kind) if path.is_file())
    choose = random.Random(0)
    choose.shuffle(ours)
    choose.shuffle(theirs)
    rest = count - len(made)
    half = min(len(ours), rest // 2)
    paths = [*ours[:half], *theirs[: rest - half]]
    return [
        *made,
        *((path.name, path.read_bytes()) for path in paths if path.stat().st_size < 2**21),
    ]


def as_bytes(content: str | bytes) -> bytes:
    return content if isinstance(content, bytes) else content.encode()


def made_harmless(make: Maker) -> Iterator[tuple[str, str | bytes]]:
    """Files with references to secrets, placeholders, hashes and random data."""
    n = make.of(2, string.digits)
    sha = hashlib.sha256(make.bytes(8)).hexdigest()
    yield f"db{n}.yaml", "db:\n  password: ${oc.env:DB_PASSWORD}\n  token: ${oc.env:TOKEN,null}\n"
    yield (
        f"track{n}.yaml",
        "tracking:\n  api_key: null\n  token: ???\n  secret: ''\n  password: <password>\n",
    )
    yield (
        f"ci{n}.yml",
        "env:\n  TOKEN: ${{ secrets.TOKEN }}\n  PASSWORD: ${PASSWORD}\n  SECRET: $SECRET\n",
    )
    yield (
        f"pod{n}.yaml",
        (
            "env:\n- name: DB_PASSWORD\n  valueFrom:\n    secretKeyRef:\n      name: db-credentials\n"
            "      key: password\nvolumes:\n- secret:\n    secretName: my-secret-2\n"
            "imagePullSecrets:\n- name: regcred\nautomountServiceAccountToken: false\n"
        ),
    )
    yield (
        f"main{n}.tf",
        "password = var.db_password\nsecret_id = aws_secret.x.id\ntoken = data.x.token\n",
    )
    yield f"conf{n}.env.example", "DB_PASSWORD=changeme\nAPI_KEY=your-api-key-here\nTOKEN=\n"
    yield (
        f"README{n}.md",
        (
            "Set `HF_TOKEN=hf_...` or `--password <password>`. password: your password\n"
            "https://user:password@host/db, `Authorization: Bearer <token>`, token: see below.\n"
            "Secret: how it works. Password: at least 8 characters. api_key: str, the key.\n"
        ),
    )
    yield (
        f"client{n}.py",
        (
            'token = os.environ["HF_TOKEN"]\npassword = getpass.getpass("Password: ")\n'
            'def login(user: str, password: str = "", token: str | None = None) -> None: ...\n'
            'parser.add_argument("--api-key", help="API key of the service", default=None)\n'
            'PAD_TOKEN = "<pad>"\nbos_token="<|startoftext|>"\nself.token = tokens[i + 1]\n'
            'if token.type == "NAME" and token.value == "lambda2": raise ValueError("bad token: x1")\n'
            'secret = secrets.token_hex(16)\nkey = jax.random.PRNGKey(0)\npassword_field = "password"\n'
        ),
    )
    yield (
        f"test_auth{n}.py",
        (
            'def test_login():\n    assert login("me", password="password")\n'
            '    client = Client(token="test-token", api_key="fake", secret="secret")\n'
        ),
    )
    packages = {
        f"p{i}": {"version": "1.2.3", "integrity": f"sha512-{make.base64(64)}"} for i in range(40)
    }
    yield f"package-lock{n}.json", json.dumps({"packages": packages}, indent=2)
    yield (
        f"poetry{n}.lock",
        "".join(f'{{file = "x.whl", hash = "sha256:{make.hex(64)}"}}\n' for _ in range(60)),
    )
    yield (
        f"requirements{n}.txt",
        "".join(f"x{i}==1.0 --hash=sha256:{make.hex(64)}\n" for i in range(30)),
    )
    yield f"SHA256SUMS{n}", "".join(f"{make.hex(64)}  shard-{i:05d}.tar\n" for i in range(40))
    yield f"data{n}.dvc", f"outs:\n- md5: {make.hex(32)}.dir\n  size: 1\n  path: data\n"
    yield (
        f"pointer{n}.bin",
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha}\nsize 12\n",
    )
    manifest = {
        "shards": [
            {"name": f"s{i}", "sha256": make.hex(64), "key": make.hex(32)} for i in range(20)
        ]
    }
    yield f"manifest{n}.json", json.dumps(manifest, indent=1)
    image = {"output_type": "display_data", "data": {"image/png": make.base64(30000)}}
    cells = [
        {"cell_type": "code", "id": make.hex(8), "source": ["model.fit()\n"], "outputs": [image]}
    ]
    yield f"plot{n}.ipynb", json.dumps({"cells": cells}, indent=1)
    vocabulary = {"".join(make.random.choice(SYLLABLES) for _ in range(2)): i for i in range(300)}
    special = {"bos_token": "<s>", "pad_token": "[PAD]", "unk_token": {"content": "<unk>"}}
    yield f"tokenizer{n}.json", json.dumps({**special, "vocab": vocabulary, "sep_token_id": 102})
    yield f"vocab{n}.txt", "\n".join(make.of(make.random.randint(2, 9)) for _ in range(500))
    yield f"cert{n}.crt", make.pem("CERTIFICATE", make.bytes(900))
    yield f"public{n}.pem.txt", make.pem("PUBLIC KEY", make.bytes(290))
    yield f"id_ed25519_{n}.pub", f"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5{make.of(48)} me@host\n"
    yield (
        f"table{n}.csv",
        "id,hash,score\n" + "".join(f"{i},{make.hex(32)},{i / 7:.4f}\n" for i in range(200)),
    )
    yield (
        f"uuids{n}.csv",
        "session_id,user\n"
        + "".join(
            f"{make.hex(8)}-{make.hex(4)}-4{make.hex(3)}-a{make.hex(3)}-{make.hex(12)},u{i}\n"
            for i in range(99)
        ),
    )
    yield f"data{n}.npy", b"\x93NUMPY\x01\x00" + make.bytes(20000)
    yield f"photo{n}.jpg", b"\xff\xd8\xff\xe0" + make.bytes(20000)
    yield f"photo{n}.png", b"\x89PNG\r\n\x1a\n" + make.bytes(20000)
    yield f"weights{n}.pt", zipped({"data.pkl": make.of(300), "data/0": make.of(4000)})
    yield f"code{n}.tar.gz", tarred({"a/train.py": "print(1)\n", "a/hashes": make.hex(64)})
    yield f"log{n}.txt.gz", gzip.compress(f"epoch 1 loss 0.5 id {make.hex(32)}\n".encode())
    yield (
        f"bundle{n}.min.js",
        "".join(
            f"function {make.of(3, string.ascii_letters)}(a){{return a.token||a.key}}"
            for _ in range(200)
        ),
    )
    yield (
        f"icon{n}.svg",
        f'<svg><path d="M{" ".join(make.of(3, string.digits) for _ in range(200))}"/></svg>',
    )
    yield (
        f"page{n}.html",
        f'<link integrity="sha384-{make.base64(48)}" crossorigin><input type="password" name="password" value="">',
    )
    yield (
        f"sweep{n}.yaml",
        f"name: run-{make.hex(8)}\nid: {make.of(8)}\nparent_id: {make.hex(20)}\nkey: val/acc\nauthor: me\n",
    )
    yield (
        f"experiment{n}.yaml",
        "tokenizer: bert-base-uncased-v2\nmax_tokens: 512\ntoken_dropout: 0.1\ncredential: managed_identity\nkeys: [a, b]\nsecret_sauce: false\n",
    )
    yield (
        f"i18n{n}.json",
        json.dumps(
            {
                "password": "Passwort",
                "enter_password": "Please enter your password",
                "token": "Zeichen",
            }
        ),
    )
    yield (
        f"openapi{n}.yaml",
        "securitySchemes:\n  token:\n    type: apiKey\n    name: X-API-Key\nproperties:\n  password:\n    type: string\n    format: password\n    description: at least 12 characters\n",
    )
    yield (
        f"trace{n}.log",
        f"2026-01-01 token count 512, tokens/s 1234.5\nKeyError: 'password'\nrun {make.hex(40)}\n",
    )


def corpus(seed: int, make: Callable[[Maker], Iterator[File]]) -> list[tuple[str, str, bytes]]:
    """Kind, name and content of each file of a set."""
    return [(kind, name, as_bytes(content)) for kind, name, content in make(Maker(seed))]
