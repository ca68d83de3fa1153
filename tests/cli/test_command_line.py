"""The command as a process, its start and its end, and what it prints without starting a run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from tests.conftest import distdl
from tests.written import write

HEAVY = ("torch", "torchvision", "lightning", "mlflow", "scipy", "matplotlib")
HELP = """* resnet50 |  timm |* mlflow |  resnet50_ddp |  cpu |resume|any model of timm by its \
name|python -m distdl experiment=resnet50_ddp debug=cpu"""
GROUPS = "model data optimizer schedule strategy launcher tracking trainer callbacks task debug"


@pytest.fixture(scope="module")
def no_torch(tmp_path_factory):
    """An environment in which importing torch, Lightning or MLflow fails."""
    folder = tmp_path_factory.mktemp("no_torch")
    (folder / "sitecustomize.py").write_text(
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] in {HEAVY}:\n"
        "            raise RuntimeError(f'{name} must not be imported here')\n"
        "sys.meta_path.insert(0, Refuse())\n"
    )
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


LIGHT = {
    "--help": [f"\n  {group}\n" for group in [*GROUPS.split(), "experiment"]] + HELP.split("|"),
    "convert --help": ["deepspeed_zero3", "epoch_002-fsdp.ckpt"],
    "--cfg job experiment=resnet50_imagenet debug=limit": ["resnet50_imagenet"],
    "--cfg job -m seed=1,2": ["# seed=1", "seed: 1", "# seed=2", "seed: 2"],
    "-sc install=bash": ["complete", "distdl"],
    "lrr": ["lrr"],
}


@pytest.mark.parametrize("typed", LIGHT)
def test_these_need_no_torch(typed, no_torch, tmp_path):
    done = distdl(*typed.split(), cwd=tmp_path, env=no_torch)
    assert "Traceback" not in done.stderr
    assert all(part.strip("\n") in done.stdout + done.stderr for part in LIGHT[typed])
    assert done.returncode == (2 if typed == "lrr" else 0), done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_typo_does_not_wait_for_torch(tmp_path):
    code = (
        "import sys; from distdl.cli.main import main; main(['trainer.max_epoch=1'])"
        f"; print(sorted({{*{HEAVY}}} & {{*sys.modules}}))"
    )
    done = distdl(cwd=tmp_path, module=("-c", code), fresh=True)
    assert "did you mean trainer.max_epochs?" in done.stderr
    assert done.stdout == "[]\n"


def test_completion(tmp_path):
    write(tmp_path, {"conf/model/res_of_mine.yaml": "_target_: mine.Model\n"})
    done = distdl("-sc", "query=bash", cwd=tmp_path, env={"COMP_LINE": "distdl model=res"})
    resnets = [f"model=resnet{depth}" for depth in (101, 152, 18, 34, 50)]
    assert done.stdout.split() == ["model=res_of_mine", *resnets, "model=resnet_small"]


@pytest.mark.parametrize("name", ["logging.py", "numpy/__init__.py"])
def test_a_file_with_the_name_of_a_module_that_others_need(name, tmp_path):
    write(tmp_path, {name: "x = 1\n"})
    # The second stage is in a child process: two devices.
    typed = ("model=resnet18", "trainer.devices=2", "trainer.accelerator=cpu")
    done = distdl(*typed, cwd=tmp_path, fresh=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr) < 1000
    assert done.stderr.startswith("distdl: 1 problem, nothing was started\n")
    assert f"{tmp_path / name}: hides /" in done.stderr
    assert "give it another name" in done.stderr


def test_ctrl_c_during_the_first_imports_is_one_line(tmp_path):
    interrupt = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
    (tmp_path / "argparse.py").write_text(interrupt)
    done = distdl("--help", cwd=tmp_path, fresh=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_in_a_shell(tmp_path):
    """In a folder that is gone, and with a reader that reads no further."""
    program = f"'{sys.executable}' -m distdl"
    typed = (
        f"mkdir gone; cd gone; rmdir ../gone; {program} debug=cpu; echo $?; cd ..; "
        f"{program} --help | head -1"
    )
    done = subprocess.run(["bash", "-c", typed], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.startswith("2\ndistdl trains")
    assert done.stdout.count("\n") == 2
    (line,) = [line for line in done.stderr.splitlines() if "the current folder no longer" in line]
    assert "Traceback" not in done.stderr, line
    assert "Broken pipe" not in done.stderr, line


def test_cfg_job(said):
    typed = ("experiment=resnet50_ddp", "optimizer.lr=0.25")
    text = said("--cfg", "job", *typed)
    assert text == said("--cfg", "job", f"+{typed[0]}", typed[1])
    shown = OmegaConf.create(text)
    assert shown.optimizer.lr == 0.25
    assert "hydra" not in shown
    assert shown.model.num_classes == 1000  # still refers to the data
    assert "num_classes: ${data.num_classes}" in text
    resolved = said("--cfg", "job", "--resolve", "-p", "model")
    assert OmegaConf.create(resolved).network.num_classes == 1000
    assert "${" not in resolved
    usage = said()
    assert "resume" in usage
    assert "experiment" in usage


def test_the_users_own_configs(command, said, without_stage_2, tmp_path):
    files = {
        "conf/model/mine.yaml": "# my very own\n_target_: mine.Model\n",
        "conf/model/resnet50.yaml": "_target_: mine.Fifty\n",
        # A foreign Hydra project has a primary config, and groups of its own.
        "conf/config.yaml": "defaults: [model: mine]\nseed: 99\n",
        "conf/db.yaml": "port: 3306\n",
        "mine.py": "",
    }
    write(tmp_path, files)
    output = command("dry_run=true", "trainer.accelerator=cpu")
    note = f"note: {tmp_path}/conf/model/resnet50.yaml replaces distdl's own\n"
    assert (output.code, output.err) == (0, note)
    shown = OmegaConf.create(command("--cfg", "job").out)
    assert (shown.model._target_, shown.seed, "db" in shown) == ("mine.Fifty", 0, False)
    assert "_target_: mine.Model" in command("--cfg", "job", "model=mine").out
    (tmp_path / "conf/model/latin.yaml").write_bytes(b"# gr\xf6\xdfer\n")
    shown = said("--help")
    assert "my very own" in shown
    assert "latin" in shown


def test_a_dry_run_shows_what_would_run_and_writes_nothing(said, without_stage_2, tmp_path):
    shown = said("+experiment=resnet50_ddp", "debug=cpu", "name=x", "dry_run=true")
    for text in (
        "run        outputs/resnet50_ddp/x\n",
        "resources  1 x 1 cpu",
        "batch      8 x 1 device = 8 per step",
        "# in this process\nDISTDL_LAUNCHER=single \\\n  python -m distdl.worker \\\n",
    ):
        assert text in shown
    shown = said("trainer.devices=2", "trainer.accelerator=cpu", "name=x", "dry_run=true")
    assert "# 2 processes under torch's elastic agent, each:\nDISTDL_LAUNCHER=local" in shown
    assert "batch      64 x 2 devices = 128 per step" in shown
    assert "time  " not in shown
    timed = ("schedule=cosine", "trainer.max_time={hours:2}", "trainer.max_epochs=9")
    words = " ".join(said(*timed, "dry_run=true").split())  # lines are fitted to the terminal
    assert "time 2 hours for the training, or less by trainer.max_epochs=9;" in words
    assert "the learning rate falls to its end with the first" in words
    shown = said("schedule=constant", "trainer.max_time=00:02:00:00", "dry_run=true")
    assert "time 00:02:00:00 for the training, or less by" in " ".join(shown.split())
    assert "falls to its end" not in shown
    shown = said("-m", "seed=1,2", "name=s", "dry_run=true")
    assert shown.count("run        outputs/default/s/") == 2
    assert list(tmp_path.iterdir()) == []
