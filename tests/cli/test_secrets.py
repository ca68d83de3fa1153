"""Canaries: a secret that is used, forwarded, logged, raised or left in the working tree appears in
no file of the run, in no artifact and no database of the tracker, and on no screen.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.conftest import TINY, distdl, status

# Where each of them is put.
CANARIES = {
    "SAMPLE_API_KEY": "canary-used+and/forwarded-81c5",
    "OTHER_TOKEN": "canary-only-in-the-environment-77",
    "diff": "canary-in-the-dirty-diff-4b",
    "untracked": "canary-in-a-new-file-9e",
}
VARIABLES = {name: CANARIES[name] for name in ("SAMPLE_API_KEY", "OTHER_TOKEN")}

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
        # Not before MLflow was told: a rank that waits for it is killed 30 s after the other's end.
        end = time.monotonic() + 100
        while not list(Path("outputs").rglob("artifacts/**/config.yaml")):
            assert time.monotonic() < end, "MLflow was told nothing"
            time.sleep(0.1)
        try:
            raise KeyError(self.token)
        except KeyError as error:
            raise RuntimeError(f"refused: {self.token}") from error
"""


def git(folder: Path, *arguments: str) -> None:
    who = ("-c", "user.name=me", "-c", "user.email=me@example.org")
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The user's repository, with a secret that is not committed yet."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "leaky.py").write_text(LEAKY)
    (folder / "upload.py").write_text("import leaky\n")
    (folder / ".gitignore").write_text("outputs/\n")
    git(folder, "init")
    git(folder, "add", ".")
    git(folder, "commit", "-m", "first")
    (folder / "upload.py").write_text(
        f'import leaky\npassword = "{CANARIES["diff"]}"\nurl = f"https://{CANARIES["diff"]}@h"\n'
    )
    (folder / "credentials.txt").write_text(CANARIES["untracked"])
    return folder


@pytest.fixture(scope="module")
def failed(project: Path) -> subprocess.CompletedProcess[str]:
    """A real run of two ranks, tracked in MLflow, whose code leaks what it can."""
    return distdl(
        *TINY,
        "data.train_samples=16",
        "trainer.limit_val_batches=0",
        "trainer.max_epochs=1",
        "trainer.devices=2",
        "tracking=[mlflow,csv]",
        "name=x",
        "+callbacks.leaky._target_=leaky.Leaky",
        "+callbacks.leaky.token=${oc.env:SAMPLE_API_KEY}",
        "launcher.forward_env=[SAMPLE_API_KEY]",
        cwd=project,
        env=VARIABLES,
    )


def spellings(canary: str) -> set[bytes]:
    return {canary.encode(), quote(canary, safe="").encode()}


def test_the_leaks_were_real(failed, project) -> None:
    """Else the other tests here would find nothing because nothing happened."""
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
    assert "+password = " in recorded and "+callbacks.leaky.token=${oc.env" in recorded
    assert (project / "outputs/mlflow.db").exists()
    assert list((project / "outputs").rglob("artifacts/**/config.yaml"))


@pytest.mark.parametrize("place", CANARIES)
def test_no_file_holds_it(failed, project, place) -> None:
    files = [path for path in (project / "outputs").rglob("*") if path.is_file()]
    assert len(files) > 10
    for path in files:
        content = path.read_bytes()
        assert not any(s in content for s in spellings(CANARIES[place])), f"{place} is in {path}"
        assert CANARIES[place] not in str(path)


@pytest.mark.parametrize("place", CANARIES)
def test_no_screen_shows_it(failed, place) -> None:
    for text in (failed.stdout, failed.stderr):
        assert not any(s.decode() in text for s in spellings(CANARIES[place]))


def test_no_rendered_request_holds_it(command, without_stage_2, monkeypatch, tmp_path) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "leaky.py").write_text(LEAKY)
    for devices in (1, 2):
        said = command(
            "dry_run=true",
            "trainer.accelerator=cpu",
            f"trainer.devices={devices}",
            "launcher.forward_env=[SAMPLE_API_KEY,OTHER_TOKEN]",
            "+callbacks.leaky._target_=leaky.Leaky",
            "+callbacks.leaky.token=${oc.env:SAMPLE_API_KEY}",
        )
        assert said.code == 0, said
        assert "canary" not in said.out + said.err
    # --cfg shows what is written, and not what it leads to.
    said = command("--cfg", "job", "+callbacks.leaky.token=${oc.env:SAMPLE_API_KEY}")
    assert "token: ${oc.env:SAMPLE_API_KEY}" in said.out and "canary" not in said.out


@pytest.mark.parametrize(
    ("typed", "remedy"),
    [
        ("+callbacks.leaky.token=canary-literal-31", "export LEAKY_TOKEN"),
        ("+data.sas=canary-literal-31", "${oc.env:DATA_SAS}"),
        ("tracking.mlflow.tracking_uri=https://me:canary-literal-31@example.org", "${oc.env:"),
        (f"tags=[{VARIABLES['OTHER_TOKEN']}]", "export OTHER_TOKEN"),
        ('+data.url="https://h/c?sv=1&sig=canary-literal-31"', "${oc.env:"),
        ("+data.url=https://h/c?sv=1&sig=canary-literal-31", "is not an override"),
        ("+model.password=canary-literal-31[", ""),
        ("-m +model.password=canary-literal-31,canary-literal-32", "export MODEL_PASSWORD"),
    ],
)
def test_a_literal_on_the_command_line_is_refused_unread(
    typed, remedy, command, without_stage_2, monkeypatch, tmp_path
) -> None:
    monkeypatch.setenv("OTHER_TOKEN", VARIABLES["OTHER_TOKEN"])
    said = command(*typed.split(" "))
    assert said.code == 2
    assert remedy in said.err
    assert "canary" not in said.out + said.err
    assert os.listdir(tmp_path) == []


CLUSTERS = {
    "slurm": ("launcher=slurm",),
    "mpi": ("launcher=mpi", "launcher.flavour=mpich", "launcher.mpirun=sh"),
    "azureml": ("launcher=azureml", "launcher.vm_size=Standard_NC24ads_A100_v4"),
    "sagemaker": ("launcher=sagemaker", "launcher.instance_type=ml.g5.xlarge"),
}


@pytest.mark.parametrize("launcher", CLUSTERS)
@pytest.mark.parametrize(
    "setting", ["+launcher.env.MY_TOKEN=${oc.env:MY_TOKEN}", "+launcher.env.PLAIN=${oc.env:PLAIN}"]
)
def test_a_secret_among_a_launchers_settings_is_refused(
    launcher, setting, command, without_stage_2, monkeypatch, tmp_path
) -> None:
    """They are resolved before the job is sent, and stand in its request."""
    monkeypatch.setenv("MY_TOKEN", "canary-of-the-launcher-7")
    monkeypatch.setenv("PLAIN", "hf_canaryOfTheLauncher0123456789abcdef")
    said = command(*CLUSTERS[launcher], "trainer.devices=1", "dry_run=true", setting)
    assert said.code == 2, said
    assert "would stand in the request" in said.err and "launcher.forward_env=[" in said.err
    assert "canary" not in said.out + said.err
    assert os.listdir(tmp_path) == []


def test_a_plain_setting_of_a_launcher_may_be_read_from_the_shell(
    command, without_stage_2, monkeypatch
) -> None:
    monkeypatch.setenv("PLAIN", "eth0")
    said = command(
        *CLUSTERS["slurm"], "dry_run=true", "trainer.devices=1", "+launcher.env.X=${oc.env:PLAIN}"
    )
    assert said.code == 0, said
