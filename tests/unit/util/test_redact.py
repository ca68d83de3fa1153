"""What is hidden, and what stays readable. tests/unit/runs/test_snapshot.py has the kinds of
secrets, and tests/cli/test_secrets.py the logs."""

from __future__ import annotations

import pytest

from distdl.util.redact import redact, redact_command, redact_diff
from distdl.util.secret_names import looks_secret

CANARY = "canary-5f2a9c81d7"
SECRET = """
HF_TOKEN api_key apiKey PGPASSWORD my-secret credentials sas SAS_URL account_key AccountKey db_pwd
AZURE_STORAGE_CONNECTION_STRING model.api_token AWS_SECRET_ACCESS_KEY
"""
PLAIN = """
tokenizer max_tokens pad_token AZURE_TOKEN_CREDENTIALS TOKENIZERS_PARALLELISM PWD OLDPWD seed
SASL_HOST_NAME monkey password_file num_tokens model.tokenizer key token_dim
"""
# What is written, and what is left of it; a line without an arrow stays as it is.
TEXTS = f"""
connecting with {CANARY}. -> connecting with ***SAMPLE_API_KEY***.
GET /?p=a%22b%2Fc%20d%3D9 -> GET /?p=***SAMPLE_PASSWORD***
note {{"p": "a\\"b/c d=9"}} -> note {{"p": "***SAMPLE_PASSWORD***"}}
a"b/c d=9 -> ***SAMPLE_PASSWORD***
password = "x y" -> password = "***"
password: str = 'x y' -> password: str = '***'
token: x7 -> token: ***
{{"api_key": "x7", "lr": 1}} -> {{"api_key": "***", "lr": 1}}
env: API_TOKEN=x7, note: my token = x8 -> env: API_TOKEN=***, note: my token = ***
train --api-key x7 --lr 1 -> train --api-key *** --lr 1
Authorization: Bearer abcdef123 -> Authorization: *** ***
curl -u me:x7 host -> curl -u me:*** host
mysql -h db -u me -pKroplo47 app -> mysql -h db -u me -p*** app
returned 1: sshpass -p 'Kroplo47' ssh me@n1 -> returned 1: sshpass -p '***' ssh me@n1
no user me with the password 'Kroplo47' -> no user me with the password '***'
GET /bot123456789:AAabcdefgHIJKLMNOPqrstuvwxyz0987_-x -> GET /bot***
tests/unit/test_a_very_long_name_of_a_test_2.py::test_another_long_name_3
step 10 loss 0.53 img/s 1200 lr=0.1 val/acc1: 0.75
tokenizer=bert-base max_tokens: 512
api_key=${{oc.env:SAMPLE_API_KEY}}
commit 4b825dc642cb6eb9a060e54bf8d69288fbee4904
"""
COMMAND = f"""
distdl +model.api_token=abc -> distdl +model.api_token=***
++data.password=a=b --api-key x7 -> ++data.password=*** --api-key ***
optimizer.lr=0.2 tracking.mlflow.token=${{oc.env:SAMPLE_API_KEY}}
+launcher.env={{TOKEN:abc,LR:1}} -> +launcher.env={{TOKEN:***,LR:1}}
tags=[{CANARY}] --password=x7 -> tags=[***SAMPLE_API_KEY***] --password=***
"""


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("SAMPLE_API_KEY", CANARY)
    monkeypatch.setenv("SAMPLE_SHORT_TOKEN", "step")
    monkeypatch.setenv("SAMPLE_PASSWORD", 'a"b/c d=9')


def test_names():
    assert [name for name in SECRET.split() if not looks_secret(name)] == []
    assert [name for name in PLAIN.split() if looks_secret(name)] == []


def test_what_is_hidden_of_a_text_and_of_a_command_line():
    for hide, table in ((redact, TEXTS), (lambda x: " ".join(redact_command(x.split())), COMMAND)):
        for line in table.strip().splitlines():
            text, _, hidden = line.partition(" -> ")
            assert hide(text) == (hidden or text)


DIFF = f"""\
diff --git a/conf/model/resnet50.yaml b/conf/model/resnet50.yaml
index 83db48f84ec878fbfb30b46d16630e944e34f205..4b825dc642cb6eb9a060e54bf8d69288fbee4904 100644
--- a/conf/model/resnet50.yaml
+++ b/conf/model/resnet50.yaml
@@ -1,4 +1,12 @@ def main():
 learning_rate = 0.1
+optimizer = make("sgd", resnet50_imagenet_ddp_2nodes)
+value = "{CANARY}"
+login("me", "hunter two")  # the password
+PASSWORD = (
+    "leaked phrase one"
+    "leaked phrase two"
+)
+after = "visible"
+<password>leaked phrase three</password>
+opaque = "q7Wz9LmX2pR8vT4nB6kD"
+hash = 4b825dc642cb6eb9a060e54bf8d69288fbee4904
-token = abcdef
+-----BEGIN PRIVATE KEY-----
+MIIEvQIBADANBg
+-----END PRIVATE KEY-----
"""


def test_diff_hides_more_than_enough():
    safe = redact_diff(DIFF)
    secrets = (CANARY, "hunter two", "leaked phrase", "q7Wz9LmX2pR8vT4nB6kD", "= abcdef", "MIIEvQ")
    assert not [secret for secret in (*secrets, "hash = 4b825") if secret in safe]
    assert {*DIFF.splitlines()[:7], '+after = "visible"'} <= {*safe.splitlines()}
