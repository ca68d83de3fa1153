"""Canaries: a secret that is used, forwarded, logged, raised or left in the working tree appears in
no file of the run, in no artifact and no database of the tracker, and on no screen.
"""

from __future__ import annotations

import os
import subprocess
from urllib.parse import quote

import pytest

from tests.conftest import TINY, distdl, status
from tests.miniature import everything
from tests.unit.sample_config import check_parts, rows
from tests.written import write

VARIABLES = {
    "SAMPLE_API_KEY": "canary-used+and/forwarded-81c5",
    "OTHER_TOKEN": "canary-only-in-the-environment-77",
}
CANARIES = {**VARIABLES, "diff": "canary-in-the-diff-4b", "untracked": "canary-in-a-new-file-9e"}
# What the user's own code may do with it: log it, warn with it, fail with it.
LEAKY = """
import logging, os, time, warnings
from pathlib import Path
from lightning.pytorch import Callback
class Leaky(Callback):
    def __init__(self, token: str) -> None:
        self.token = token
    def on_train_start(self, trainer, module):
        logging.getLogger("mine").info("connecting with %s", self.token)
        logging.getLogger("mine").error("Authorization: Bearer %s", self.token)
        warnings.warn(f"no answer from https://me:{self.token}@example.org")
        if trainer.global_rank:  # the terminal is the user's own
            print("printed", self.token)
            os.system("echo by another process: $SAMPLE_API_KEY >&2")
    def on_train_end(self, trainer, module):
        # After MLflow has it: a rank that waits for it is killed 30 s after the other's end.
        end = time.monotonic() + 100
        while not list(Path("outputs").rglob("artifacts/**/config.yaml")):
            assert time.monotonic() < end, "MLflow has got nothing"
            time.sleep(0.1)
        try:
            raise KeyError(self.token)
        except KeyError as error:
            raise RuntimeError(f"refused: {self.token}") from error
"""
TOKEN = "+callbacks.leaky.token=${oc.env:SAMPLE_API_KEY}"
CALLBACK = ("+callbacks.leaky._target_=leaky.Leaky", TOKEN)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """The user's repository, with a secret that is not committed yet."""
    folder = tmp_path_factory.mktemp("project")
    before = {"leaky.py": LEAKY, "upload.py": "import leaky\n", ".gitignore": "outputs/\n"}
    write(folder, before)
    identity = ("-c", "user.name=me", "-c", "user.email=me@example.org")
    for command in (["init"], ["add", "."], ["commit", "-m", "first"]):
        subprocess.run(["git", *identity, *command], cwd=folder, check=True, capture_output=True)
    leak = 'import leaky\npassword = "{diff}"\nurl = "https://{diff}@h"\n'
    after = {"upload.py": leak.format(**CANARIES), "credentials.txt": CANARIES["untracked"]}
    write(folder, after)
    return folder


@pytest.fixture(scope="module")
def failed(project):
    """A real run of two ranks, tracked in MLflow, whose code leaks what it can."""
    limits = ("data.train_samples=16", "trainer.limit_val_batches=0", "trainer.max_epochs=1")
    where = ("trainer.devices=2", "tracking=[mlflow,csv]", "name=x")
    forward = "launcher.forward_env=[SAMPLE_API_KEY]"
    return distdl(*TINY, *limits, *where, *CALLBACK, forward, cwd=project, env=VARIABLES)


def test_the_leaks_were_real(failed, project):
    """Else the next test would find nothing because nothing happened."""
    assert failed.returncode == 1, failed.stdout + failed.stderr
    run = project / "outputs/default/x"
    for rank in (0, 1):
        log = (run / f"attempts/001/logs/rank_{rank}.log").read_text()
        assert "connecting with ***SAMPLE_API_KEY***" in log
        assert rank or "no answer from https://me:***" in log, "other ranks keep warnings quiet"
        assert "RuntimeError: refused: ***SAMPLE_API_KEY***" in log
        assert (run / f"attempts/001/errors/rank_{rank}.json").exists()
    (out,), (err,) = (run.glob(f"**/agent/**/{name}.log") for name in ("stdout", "stderr"))
    assert "printed ***SAMPLE_API_KEY***\n" in out.read_text()
    assert "by another process: ***SAMPLE_API_KEY***\n" in err.read_text()
    assert "refused: ***SAMPLE_API_KEY***" in status(run)["error"]
    assert "refused: ***SAMPLE_API_KEY***" in failed.stderr
    assert "${oc.env:SAMPLE_API_KEY}" in (run / "config.yaml").read_text()
    recorded = (run / "provenance.json").read_text()
    assert "+password = " in recorded
    assert "+callbacks.leaky.token=${oc.env" in recorded
    assert (project / "outputs/mlflow.db").exists()
    assert list((project / "outputs").rglob("artifacts/**/config.yaml"))


@pytest.mark.parametrize("canary", CANARIES.values(), ids=CANARIES)
def test_no_file_holds_it_and_no_screen_shows_it(failed, project, canary):
    spellings = {canary.encode(), quote(canary, safe="").encode()}
    texts = {"stdout": failed.stdout.encode(), "stderr": failed.stderr.encode()}
    texts |= everything(project / "outputs")
    assert len(texts) > 12
    assert not [name for name, text in texts.items() if any(s in text for s in spellings)]
    assert not any(canary in path for path in texts)


def test_no_rendered_request_holds_it(said, without_stage_2, monkeypatch, tmp_path):
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "leaky.py").write_text(LEAKY)
    forward = "launcher.forward_env=[SAMPLE_API_KEY,OTHER_TOKEN]"
    for devices in (1, 2):
        typed = ("dry_run=true", "trainer.accelerator=cpu", f"trainer.devices={devices}")
        assert "canary" not in said(*typed, forward, *CALLBACK)
    # --cfg shows what is written, and not what it leads to.
    shown = said("--cfg", "job", TOKEN)
    assert "token: ${oc.env:SAMPLE_API_KEY}" in shown
    assert "canary" not in shown


# A variable is never one that a shell has, which would be lost: $PATH for a key called path.
LITERALS = """
+callbacks.leaky.token=canary-literal-31 | export LEAKY_TOKEN
+callbacks.leaky.token=${oc.env:SAMPLE_API_KEY,canary-literal-31} | export LEAKY_TOKEN
+data.path="https://h/c?sv=1&sig=canary-literal-31" | export DATA_PATH
+data.keys=[fine,{secret:canary-literal-31}] | data.keys[1].secret: | export KEYS_SECRET
+data.x=canary-literal-31 +data.api_token=${data.x} | data.api_token: refers to a secret that is pl
tracking.mlflow.tracking_uri=https://me:canary-literal-31@example.org | ${oc.env:
+model.note="before_canary-only-in-the-environment-77_after" | export OTHER_TOKEN
+launcher.inputs.x.path="https://h/c?sv=1&sig=canary-literal-31" | azureml://datastores/NAME/paths/
password=canary-literal-31 | password:
+data.url=https://h/c?sv=1&sig=canary-literal-31 | is not an override
+model.password=canary-literal-31[ | model.password
-m +model.password=canary-literal-31,canary-literal-32 | export MODEL_PASSWORD
"""


@pytest.mark.parametrize(("typed", "parts"), rows(LITERALS))
def test_a_literal_on_the_command_line_is_refused_unread(
    typed, parts, said, no_child, monkeypatch, tmp_path
):
    monkeypatch.setenv("OTHER_TOKEN", VARIABLES["OTHER_TOKEN"])
    shown = said(*typed.split(" "), code=2)
    assert os.listdir(tmp_path) == []
    check_parts(shown, parts)
    assert "canary" not in shown.lower()


@pytest.mark.parametrize("name", ["MY_TOKEN", "PLAIN"])
def test_a_secret_among_a_launchers_settings_is_refused(
    name, said, without_stage_2, monkeypatch, tmp_path
):
    """They are resolved before the job is sent, and stand in its request."""
    monkeypatch.setenv("MY_TOKEN", "canary-of-the-launcher-7")
    monkeypatch.setenv("PLAIN", "hf_canaryOfTheLauncher0123456789abcdef")
    setting = f"+launcher.env.{name}=${{oc.env:{name}}}"
    typed = ("launcher=slurm", "trainer.devices=1", "dry_run=true", setting)
    shown = said(*typed, code=2)
    check_parts(shown, ["would be readable in the request", "launcher.forward_env=["])
    assert "canary" not in shown
    assert os.listdir(tmp_path) == []
    if name == "PLAIN":  # any other setting may be read from the shell
        monkeypatch.setenv(name, "eth0")
        said(*typed)
