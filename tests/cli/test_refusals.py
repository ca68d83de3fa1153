"""Each kind of bad input on the real command line: the message a user reads, exit code 2, no
traceback, and no file written.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import distdl, environment

# Everything that is wrong in one of these is told by one command: kind -> (what is typed, what is
# read). The first needs nothing imported, and so ends the command in a moment.
TEXT = {
    "unknown key": (["lrr=1"], ["lrr: unknown key", "did you mean optimizer.lr?"]),
    "unknown key, added": (
        ["+trainer.max_epoch=3"],
        ["trainer.max_epoch: ", "did you mean trainer.max_epochs?"],
    ),
    "missing value": (["data=imagenet"], ["data.root: missing", "write data.root=..."]),
    "wrong type": (["seed=abc"], ["seed: must be an integer, not 'abc'"]),
    "wrong type, nested": (["data.batch_size=many"], ["data.batch_size: must be an integer"]),
    "wrong value": (["optimizer.lr_scaling=cubic"], ["optimizer.lr_scaling: ", "linear"]),
    "foreign target": (
        ["+callbacks.shell._target_=os.system"],
        ["callbacks.shell._target_: os.system is outside the allowed packages"],
    ),
    "a package that could be allowed": (
        ["+callbacks.foreign._target_=composer.Thing"],
        ["composer.Thing is outside", "if you trust it: project.allow=[composer]"],
    ),
    "devices against the strategy": (
        ["strategy=single", "trainer.devices=2", "trainer.accelerator=cpu"],
        ["strategy: single trains on one device", "strategy=ddp"],
    ),
    "interpolation to nothing": (
        ["experiment_name=${projct.name}"],
        ["experiment_name: refers to projct.name, which is not in the config"],
    ),
    "unset variable": (
        ["checkpoint.resume_from=${oc.env:NOT_SET_ANYWHERE}"],
        ["the environment variable NOT_SET_ANYWHERE is not set", "export NOT_SET_ANYWHERE="],
    ),
    "plain secret": (
        ["+model.api_token=canary-5e11a0"],
        ["model.api_token: holds a secret as plain text", "${oc.env:"],
    ),
    "what distdl sets itself": (["+trainer.callbacks=[]"], ["trainer.callbacks: is set by distdl"]),
    "number out of range": (
        ["data.image_size=0"],
        ["data.image_size: must be an integer of at least 1"],
    ),
    "rate out of range": (
        ["schedule.warmup_epochs=-1"],
        ["schedule.warmup_epochs: must be greater than or equal to 0, not -1"],
    ),
    "a training of nothing": (
        ["trainer.limit_train_batches=0"],
        ["trainer.limit_train_batches: 0 is a training of no batches"],
    ),
}

CLASSES = {
    "unknown argument": (
        ["optimizer.momentun=0.9"],
        ["optimizer.momentun: torch.optim.SGD takes no argument", "optimizer.momentum?"],
    ),
    "LightningCLI's class": (
        ["optimizer.class_path=mine.Adam"],
        ["optimizer.class_path: ", "LightningCLI's word: optimizer._target_=mine.Adam"],
    ),
    "missing argument": (
        ["+callbacks.stop._target_=lightning.pytorch.callbacks.EarlyStopping"],
        ["callbacks.stop.monitor: missing", "write callbacks.stop.monitor=..."],
    ),
    "target that cannot be imported": (
        ["+callbacks.ours._target_=distdl.callbacks.Progres"],
        ["callbacks.ours._target_: distdl.callbacks has no 'Progres'"],
    ),
    "number out of range, as the class says": (
        ["data.num_classes=ten"],
        ["data.num_classes: must be an integer of at least 1, not 'ten'"],
    ),
    "3.0 for 3": (["data.train_samples=3.0"], ["write data.train_samples=3"]),
    "a number for a tensor": (
        ["optimizer.weight_decay=1e-4x"],
        ["optimizer.weight_decay: must be a number or a tensor, not '1e-4x'"],
    ),
    "another type": (
        ["optimizer.nesterov=yes"],
        ["optimizer.nesterov: must be true or false, not 'yes'", "write optimizer.nesterov=true"],
    ),
    "no dtype": (
        ["+callbacks.half._target_=own.Casts", "+callbacks.half.dtype=fp16"],
        ["callbacks.half.dtype: must be a dtype of torch or null, not 'fp16'", "torch.float16?"],
    ),
    "a module's name": (
        ["+callbacks.other._target_=own.cast.Casts"],
        ["callbacks.other._target_: own has no 'cast'", "did you mean own.casts?"],
    ),
    "clipping by the Trainer": (
        ["model._target_=own.Manual", "trainer.gradient_clip_val=1"],
        ["trainer.gradient_clip_val: the model steps its optimizers itself", "clip_gradients"],
    ),
}
BAD = {**TEXT, **CLASSES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("refused")


OWN = """
import torch
from lightning.pytorch import Callback, LightningModule

class Casts(Callback):
    def __init__(self, dtype: torch.dtype | None = None): self.dtype = dtype

class Manual(LightningModule):
    def __init__(self, **arguments):
        super().__init__()
        self.automatic_optimization = False
"""


@pytest.fixture(scope="module", params=[TEXT, CLASSES], ids=["text", "classes"])
def all_wrong(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], subprocess.CompletedProcess[str]]:
    """Every mistake of one table, and what the command said to them."""
    typed = [word for words, _ in request.param.values() for word in words]
    if request.param is CLASSES:
        root = tmp_path_factory.mktemp("project")
        (root / "own").mkdir()
        (root / "own/casts.py").touch()
        (root / "own/__init__.py").write_text(OWN)
        typed.append(f"project.root={root}")
    return request.param, distdl(*typed, cwd=folder)


@pytest.fixture
def no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second stage must not be reached."""

    def reached(request: str) -> None:
        raise AssertionError("something was imported to find this out")

    monkeypatch.setattr("distdl.validate._ask_child", reached)
    monkeypatch.setattr("distdl.validate._ask_here", reached)


def check_refused(done: subprocess.CompletedProcess[str], folder: Path) -> None:
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr and "Error executing job" not in done.stderr
    assert done.stdout == ""
    assert list(folder.iterdir()) == [], "a refused command writes no file"


def test_all_problems_in_one_go(all_wrong, folder) -> None:
    table, done = all_wrong
    check_refused(done, folder)
    head, *lines = done.stderr.splitlines()
    problems = [line for line in lines if line.startswith("  ") and line[2] != " "]
    assert head == f"distdl: {len(problems)} problems, nothing was started"
    unchecked = "classes and their arguments were not checked yet"
    assert (lines[-1] == unchecked) == (table is TEXT)
    paths = [line.strip().split(":")[0] for line in problems]
    assert paths == sorted(paths)
    assert len(problems) >= len(table) and len(set(problems)) == len(problems)
    for _, read in table.values():
        for words in read:
            assert words in done.stderr
    assert "canary-5e11a0" not in done.stdout + done.stderr, "a secret is not repeated"
    for right in ("trainer.devices", "trainer.accelerator", "model.network", "tracking"):
        assert f"\n  {right}" not in done.stderr


def test_a_typo_does_not_wait_for_torch(tmp_path) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "distdl", "trainer.max_epoch=1"],
        cwd=tmp_path, env=environment(), capture_output=True, text=True,
    )  # fmt: skip
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert done.returncode == 2 and "did you mean trainer.max_epochs?" in done.stderr
    assert "hydra" in imported and not imported & {
        "torch",
        "lightning",
        "mlflow",
        "scipy",
        "matplotlib",
    }


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        # Hydra's own errors.
        ("model=resnet5", ["model: no option 'resnet5'", "did you mean model=resnet50?"]),
        ("data=null", ["data: no option 'null'", "available: imagenet, synthetic"]),
        ("experiment=resnet50", ["did you mean experiment=resnet50_"]),
        ("optimizer.lr=[1", ["'optimizer.lr=[1' is no override"]),
        ("name=a=b", ["'name=a=b' is no override"]),
        ("optimizer=Adam", ["optimizer: no option 'Adam'", "did you mean optimizer=adamw?"]),
        ("~nothing_here", ["nothing_here"]),
        # What users of Hydra, lightning-hydra-template and LightningCLI type.
        ("hydra/launcher=joblib", ["hydra/launcher: ", "launcher=slurm"]),
        ("hydra.run.dir=x", ["hydra.run.dir: ", "output_dir=FOLDER"]),
        ("hydra.job.chdir=true", ["hydra.job.chdir: ", "name=NAME"]),
        ("hydra/sweeper=optuna", ["hydra/sweeper: ", "-m optimizer.lr=0.1,0.01"]),
        ("--config-name train", ["--config-name: ", "experiment=NAME"]),
        ("--config-path=conf", ["--config-path=conf: ", "--config-dir FOLDER"]),
        ("--trainer.max_epochs=3", ["written without dashes: trainer.max_epochs=3"]),
        ("logger=wandb", ["logger: unknown key", "tracking=wandb"]),
        (
            "ckpt_path=a.ckpt",
            ["checkpoint.resume_from=FILE", "task.checkpoint=FILE"],
        ),
        ("+trainer.logger=true", ["trainer.logger: is set by distdl", "tracking="]),
        ("+trainer.resume_from_checkpoint=x", ["checkpoint.resume_from=FILE"]),
        ("trainer=gpu", ["trainer: no option 'gpu'", "trainer.accelerator=gpu trainer.devices=1"]),
        ("task_name=mine", ["task_name: ", "experiment_name=NAME"]),
        ("test=True", ["test: ", "task=test"]),
        ("paths.data_dir=x", ["paths.data_dir: ", "data.root=FOLDER"]),
        ("hparams_search=optuna", ["hparams_search: ", "-m optimizer.lr=0.1,0.01"]),
        # Slips of the hand.
        ("train", ["train: is no command", "python -m distdl experiment=NAME"]),
        ("train debug=cpu", ["python -m distdl debug=cpu"]),
        ("test", ["python -m distdl resume RUN task=test"]),
        ("resume", ["RUN: which run is to go on?", "python -m distdl jobs list"]),
        ("resume trainer.max_epochs=3", ["RUN: which run is to go on?"]),
        ("seed = 3", ["seed=3: the shell takes it for several words", "write seed=3"]),
        ("seed= 3", ["write seed=3"]),
        ("seed =3", ["write seed=3"]),
        ("resume outputs/x/y seed = 3", ["there is no such folder"]),
        ("-m optimizer.lr=0.1, 0.2", ["write optimizer.lr=0.1,0.2"]),
        (["trainer.max_epochs = 3"], ["trainer.max_epochs: ", "write trainer.max_epochs=3"]),
        (["\tseed=3"], ["seed: ", "write seed=3"]),
        ("seed:3", ["seed:3: is no override", "write seed=3"]),
        ("trainer.max_epochs: 3", ["write trainer.max_epochs=3"]),
        ("seed==3", ["'seed==3' is no override", "write seed=3"]),
        ("seed 3", ["seed: is no override", "write seed=3"]),
        ("optimizer.lr=\u201c0.1\u201d", ["write optimizer.lr=0.1"]),
        ("tags=[\u201ea b\u201c,c]", ["""write 'tags=["a b",c]'"""]),
        ("trainer.max_epochs=\u20131", ["write trainer.max_epochs=-1"]),
        ("\u2013m seed=1,2", ["write -m"]),
        ("\u2014cfg job", ["write --cfg"]),
        ("name=größe", ["name: must be made of letters from a to z", "not 'größe'"]),
        ("data=imagenet data.root=~/x", [f"write data.root={Path.home()}/x"]),
        ("output_dir=s3://mine/runs", ["s3://mine/runs is no folder", "choose another"]),
        # Values that Python or another tool writes in another way.
        ("seed=abc", ["seed: must be an integer, not 'abc'"]),
        ("trainer.max_epochs=3.0", ["trainer.max_epochs: ", "write trainer.max_epochs=3"]),
        ("data.batch_size=1e3", ["data.batch_size: ", "write data.batch_size=1000"]),
        ("data.num_workers=None", ["data.num_workers: ", "write data.num_workers=null"]),
        ("checkpoint.monitor=None", ["checkpoint.monitor: ", "write checkpoint.monitor=null"]),
        ("checkpoint.resume_from=None", ["resume_from: ", "write checkpoint.resume_from=null"]),
        ("trainer.detect_anomaly=yes", ["write trainer.detect_anomaly=true"]),
        ("trainer.precision=torch.float32", ["write trainer.precision=32-true"]),
        ("trainer.precision=fp16", ["trainer.precision: ", "16-mixed or bf16-mixed"]),
        ("trainer.devices=0", ["trainer.devices: must be a number of devices of each node"]),
        ("seed=${env:HOME}", ["seed: uses a resolver", "write seed='${oc.env:HOME}'"]),
        ("seed=${data.seed}", ["refers to itself"]),
        # Keys as others name them.
        ("trainer,max_epochs=3", ["write trainer.max_epochs=3"]),
        ("trainer.lr=0.1", ["trainer.lr: lightning's Trainer takes no", "optimizer.lr=..."]),
        ("checkpoint=x.ckpt", ["checkpoint: must be a mapping", "checkpoint.resume_from=FILE"]),
        ("--gpus 2", ["written without dashes: trainer.devices=N"]),
        ("device=cuda", ["device: unknown key", "trainer.accelerator=gpu or cpu"]),
        ("--devices 2", ["written without dashes: trainer.devices=2"]),
        ("--experiment solar", ["written without dashes: experiment=solar"]),
        ("--lr 0.1", ["dashes: optimizer.lr=...", "or model.lr=... where the model makes"]),
        ("--max_epochs=3", ["written without dashes: trainer.max_epochs=3"]),
        ("--batch-size=32", ["written without dashes: data.batch_size=32"]),
        ("gpus=2", ["gpus: unknown key", "trainer.devices=N"]),
        ("nodes=2", ["nodes: unknown key", "trainer.num_nodes?"]),
        ("epochs=3", ["epochs: unknown key", "trainer.max_epochs=N"]),
        ("learning_rate=0.1", ["learning_rate: unknown key", "optimizer.lr=..."]),
        ("patience=3", ["patience: ", "callbacks.early_stopping.patience=..."]),
        ("optimizer.betas=[0.9, 0.99]", ["write 'optimizer.betas=[0.9, 0.99]'"]),
        ("optimizer.betas=[0.1", ["it lacks ]: 'optimizer.betas=[0.1]'"]),
        (
            "optimizer=none optimizer.lr=0.1",
            [
                "optimizer: there is none here to take lr (optimizer=none",
                "such as model.lr=..., or",
            ],
        ),
        ("checkpoint.save_top_k=3", ["checkpoint.save_top_k: ", "checkpoint.keep_last=N"]),
        ("checkpoint.save_last=true", ["checkpoint.save_last: ", "checkpoint.keep_last=N"]),
        ("checkpoint.dirpath=x", ["checkpoint.dirpath: ", "output_dir=FOLDER"]),
        ("checkpoint.filename=x", ["checkpoint.filename: ", "name=NAME is the run's folder"]),
        ("experiment=solar", ["no option 'solar'", "there is no ./conf here; available: "]),
        ("early_stopping.patience=3", ["callbacks=[default,early_stopping]"]),
        ("callbacks.early_stopping.patience=3", ["callbacks=[default,early_stopping]"]),
        ("data.batch_size=0", ["data.batch_size: must be greater than or equal to 1"]),
        ("trainer.limit_train_batches=0", ["0 is a training of no batches", "task=validate"]),
        ("output_dir=", ["output_dir: is empty"]),
        ("output_dir=/dev/null", ["output_dir: /dev/null is a file"]),
        ("output_dir=/dev/null/runs", ["output_dir: /dev/null is a file"]),
        ("task=test task.checkpoint=nowhere.ckpt", ["task.checkpoint=nowhere.ckpt: no such check"]),
        (
            f"checkpoint.resume_from={__file__}",
            ["is no checkpoint, or not all of one", "Lightning"],
        ),
        ("task=test task.checkpoint=", ["task.checkpoint=: names no checkpoint"]),
        (f"name={'a' * 201}", ["name: must be of at most 200 characters"]),
        (f"output_dir={'a' * 300}", ["output_dir: cannot be made: File name too long"]),
        ("checkpoint.resume_from=nowhere.ckpt", ["resume_from=nowhere.ckpt: no such checkpoint"]),
        ("--cfg job --resolve name=${nope}", ["'nope' not found"]),
        ("--cfg job -p modle", ["the config has no 'modle'"]),
        ("--cfg job -m optimizer.lr=interval(0,1)", ["optimizer.lr=interval(0,1) cannot be count"]),
        # Those of the command line itself.
        ("trainer.max_epochs=1,2", ["several values, and no sweep", "add -m"]),
        ("-m name=a,b", ["name: a sweep names its members itself"]),
        ("resme outputs/x", ["did you mean: python -m distdl resume"]),
        (
            "prepar folder --source x",
            ["distdl: 1 problem", "did you mean: python -m distdl prepare"],
        ),
        ("model resnet18", ["model: is no override", "write model=resnet18"]),
        ("model._target_=mine:Net", ["model._target_: is no dotted path", "write mine.Net"]),
        ("--frobnicate", ["--frobnicate: is no option of distdl"]),
        ("--cfg nonsense", ["invalid choice: 'nonsense'"]),
        ("--config-dir nowhere", ["--config-dir: ", "nowhere is no folder"]),
        ("resume outputs/nothing/here", ["outputs/nothing/here"]),
        ("convert x --to zero3", ["--to: there is no 'zero3'", "--to deepspeed_zero3?"]),
    ],
)
@pytest.mark.usefixtures("no_child")
def test_refused_before_anything_is_imported(typed, read, command, tmp_path) -> None:
    said = command(*(typed.split() if isinstance(typed, str) else typed))
    assert (said.code, said.out) == (2, "") and "Traceback" not in said.err
    assert said.err.startswith("distdl: 1 problem, nothing was started\n  ")
    assert said.err.count("\n  ") <= 4
    for words in read:
        assert words in said.err, said.err
    assert list(tmp_path.iterdir()) == [], "a refused command writes no file"


@pytest.mark.parametrize(
    ("file", "content", "typed", "read"),
    [
        ("conf/model/broken.yaml", "a: [1\nb: 2\n", "model=broken", "broken.yaml"),
        (
            "conf/model/odd.yaml",
            "defaults:\n  - nothing\n",
            "model=odd",
            "model: no option 'nothing', in model/odd.yaml",
        ),
        (
            "conf/experiment/a.yaml",
            "defaults:\n  - a\n",
            "experiment=a",
            "experiment/a.yaml: names itself under defaults: experiment/a -> experiment/a",
        ),
        (
            "conf/experiment/latin.yaml",
            b"# one\n# gr\xf6\xdfe\n",
            "experiment=latin",
            "experiment/latin.yaml: is not UTF-8: invalid start byte, line 2",
        ),
        (
            "conf/experiment/a.yaml",
            "# @package _global_\ndefaults:\n  - /data: synthetic\n",
            "experiment=a",
            "in the file: - override /data: NAME",
        ),
        (
            "conf/experiment/a.yaml",
            "# @package _global_\ndefaults:\n  - /data: synthetic_jpeg\n",
            "experiment=a",
            "in the file: - override /data: synthetic_jpeg",
        ),
        (
            "conf/experiment/a.yaml",
            "# @package _global_\ndefaults:\n  - override data: synthetic\n",
            "experiment=a",
            "in experiment/a.yaml\n      in the file: - override /data: NAME",
        ),
        (
            "conf/experiment/a.yaml",
            "# @package _global_\ndefaults:\n  - override /callbacks: [defalt]\n",
            "experiment=a",
            "did you mean callbacks=default?",
        ),
        (
            "conf/experiment/a.yaml",
            "# @package _global_\ndefaults:\n  - override /cllbacks: [default]\n",
            "experiment=a",
            "in the file: - override /callbacks: NAME",
        ),
        (
            "conf/experiment/a.yaml",
            "defaults:\n  - override /data: synthetic\n",
            "experiment=a",
            "experiment/a.yaml: its keys land below it",
        ),
        ("conf/distdl.yaml", "seed: 1\n", "seed=1", "would replace distdl's primary config"),
    ],
)
def test_broken_configs_of_the_users_own(file, content, typed, read, command, tmp_path) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    said = command(typed)
    assert (said.code, said.out) == (2, "") and read in said.err, said.err
    assert not (tmp_path / "outputs").exists()


@pytest.mark.usefixtures("no_child")
def test_a_members_problem_names_the_member(command) -> None:
    said = command("-m", "experiment=resnet50_ddp,imagenette_cpu", "trainer.accelerator=cpu")
    assert said.code == 2 and "missing, in the member experiment=imagenette_cpu\n" in said.err


def test_help_shows_what_it_cannot_read(command, tmp_path) -> None:
    (tmp_path / "conf/model").mkdir(parents=True)
    (tmp_path / "conf/model/latin.yaml").write_bytes(b"# gr\xf6\xdfer\n")
    said = command("--help")
    assert said.code == 0 and "latin" in said.out


@pytest.mark.usefixtures("no_child")
def test_what_each_stage_could_find_is_told_at_once(command) -> None:
    wrong = ("data.image_size=0", "trainer.limit_train_batches=0", "schedule.warmup_epochs=-1")
    said = command("checkpoint.resume_from=nowhere", *wrong)
    assert said.code == 2 and said.err.startswith("distdl: 4 problems, nothing was started\n")
    for key in ("checkpoint.resume_from=nowhere", *(each.partition("=")[0] for each in wrong)):
        assert f"\n  {key}: " in said.err


@pytest.mark.parametrize("name", ["configs", "config"])
def test_a_folder_of_configs_by_another_name(name, command, tmp_path) -> None:
    (tmp_path / name / "experiment").mkdir(parents=True)
    (tmp_path / name / "experiment/solar.yaml").touch()
    told = f"there is no ./conf here (there is ./{name}: --config-dir {name}); available: "
    assert told in command("experiment=solar").err
    assert command("experiment=solar", "--config-dir", name, "--cfg", "job").code == 0


def test_a_folder_that_cannot_be_written(command, without_stage_2, monkeypatch, tmp_path) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("distdl.run_directory.write_text", full)  # config.yaml, the last file
    said = command("trainer.accelerator=cpu", "name=x", "output_dir=here")
    assert (said.code, said.out) == (2, "") and said.err == (
        "distdl: 1 problem, nothing was started\n"
        "  output_dir: here/default/x cannot be written: No space left on device\n"
        "      choose another: output_dir=FOLDER\n"
    )
    assert not (tmp_path / "here/default/x").exists()
    monkeypatch.setattr("os.access", lambda *_: False)
    assert f"output_dir: {tmp_path}/here is not yours to write" in command("output_dir=here/a").err


def test_inside_a_run_and_beside_it(command, without_stage_2, monkeypatch, tmp_path) -> None:
    (tmp_path / "conf/experiment").mkdir(parents=True)
    (tmp_path / "conf/experiment/mine.yaml").write_text("# @package _global_\nseed: 3\n")
    (tmp_path / "outputs/a/b/checkpoints").mkdir(parents=True)
    (tmp_path / "outputs/a/b/config.yaml").touch()
    (tmp_path / "outputs/a/b/checkpoints/last.ckpt").touch()
    for inside in ("checkpoints/last.ckpt", "checkpoints/none.ckpt", "config.yaml"):
        said = command("resume", f"outputs/a/b/{inside}")
        assert said.code == 2 and "did you mean outputs/a/b?" in said.err
    monkeypatch.chdir("outputs")
    said = command("experiment=mine")
    assert said.code == 2 and f"{tmp_path}/conf has it: cd {tmp_path}" in said.err
    assert said.err.startswith("distdl: 1 problem, nothing was started\n")


def test_an_unknown_machine_is_one_problem(folder) -> None:
    """Not two, as its devices cannot be counted either; nor does a wrong key beside it hide it."""
    role = "launcher.role=arn:aws:iam::123456789012:role/x"
    place = f"launcher.image=me/x launcher.bucket=mine {role}"
    typed = "launcher=sagemaker launcher.instance_type=ml.p4d.24xlargee launcher.spott=true"
    done = distdl(*typed.split(), *place.split(), cwd=folder)
    check_refused(done, folder)
    assert "2 problems" in done.stderr, done.stderr
    assert "launcher.instance_type: " in done.stderr and "ml.p4d.24xlarge?" in done.stderr
    assert "did you mean launcher.spot?" in done.stderr


def test_batches_that_do_not_divide(command, without_stage_2) -> None:
    own = ("data._target_=mine.Data", "project.allow=[mine]", "trainer.accelerator=cpu")
    said = command(*own, "+data.global_batch_size=99", "data.batch_size=8", "trainer.devices=2")
    assert said.code == 2
    assert "99 is not 8 (data.batch_size) x 2 devices x 1 accumulated, nor divisible" in said.err
    assert "data.global_batch_size=98" in said.err


def test_hydras_own_flags(tmp_path) -> None:
    done = distdl("--info", "config", "modl=x", cwd=tmp_path)
    assert done.returncode == 2 and "Could not override 'modl'" in done.stderr
    assert "Traceback" not in done.stderr and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "typed",
    [
        *(f"{group}=null" for group in ("experiment", "model", "trainer", "tracking")),
        *(f"~{group}" for group in ("launcher", "model", "strategy", "task", "trainer", "project")),
        *(f"{group}=${{nope}}" for group in ("tracking", "output_dir", "experiment_name")),
        *(f"{key}=${{nope}}" for key in ("name", "dry_run", "project.root", "trainer.devices")),
        *(f"{key}=???" for key in ("name", "output_dir", "data.batch_size", "trainer.devices")),
        *(f"{key}=5" for key in ("project", "project.root", "checkpoint", "tags", "name")),
        *(f"trainer.devices={value}" for value in ("0", "[]", "abc", "[0,1]", "[a]", "1.5")),
        *(f"trainer.num_nodes={value}" for value in ("0", "2", "abc", "null")),
        *(f"name={value}" for value in ("a/b", "../x", "'a b'", "''")),
        "experiment_name=../x",
        "model@somewhere=resnet18",
        "=5",
        "-m model=glob(nothing*)",
    ],
)
def test_nothing_that_is_typed_ends_in_a_traceback(
    typed, command, without_stage_2, tmp_path
) -> None:
    """Each of them alone, through the first stage only: the second is not what fails here."""
    said = command(*typed.split(" ", 1 if typed.startswith("-m") else 0))
    assert said.code == 2, said
    count, told = said.err.split("\n", 1)
    assert count == "distdl: 1 problem, nothing was started", said.err
    assert told.strip()
    assert list(tmp_path.iterdir()) == []


# The commands of lightning-hydra-template's README and of LightningCLI's pages, in a project that
# was taken over (conf/model/net.yaml, conf/data/points.yaml, conf/experiment/example.yaml).
TEMPLATE = [
    ("trainer=cpu", "trainer: no option 'cpu'", "trainer.accelerator=cpu"),
    ("trainer=mps", "trainer: ", "trainer.accelerator=mps"),
    ("trainer=ddp trainer.devices=4", "trainer: ", "strategy=ddp trainer.accelerator=gpu"),
    ("trainer=ddp_sim", "trainer: ", "strategy=ddp trainer.accelerator=cpu trainer.devices=2"),
    ("logger=csv", "logger: ", "tracking=csv"),
    ("logger=many_loggers", "logger: ", "several: tracking=[mlflow,tensorboard]"),
    ("logger.csv.name=x", "logger.csv.name: ", "tracking=csv tracking.csv.name=..."),
    ("debug=default", "debug: ", "debug=cpu trainer.detect_anomaly=true"),
    ("debug=fdr", "debug: ", "debug=step, or trainer.fast_dev_run=true"),
    ("debug=profiler", "debug: ", "did you mean debug=profile?"),
    ("callbacks=null", "callbacks: ", "did you mean callbacks=none?"),
    ("callbacks=rich_progress_bar", "callbacks: ", "lightning.pytorch.callbacks.RichProgressBar"),
    ("callbacks=[default,model_summary]", "callbacks: ", "trainer.enable_model_summary=true"),
    ("callbacks.model_checkpoint.monitor=a", "model_checkpoint: ", "checkpoint.monitor=METRIC"),
    ("callbacks.model_summary.max_depth=2", "model_summary: ", "trainer.enable_model_summary=true"),
    ("optimized_metric=val/acc_best", "optimized_metric: ", "checkpoint.monitor=METRIC"),
    ("extras.print_config=false", "extras.print_config: ", "tags=[...]"),
    ("data.data_dir=${paths.data_dir}", "data.data_dir: refers to paths.", "data.root=FOLDER"),
    ("model.lr=${task_name}", "model.lr: refers to task_name", "experiment_name=NAME"),
    ("task=eval", "task: ", "task=test task.checkpoint=FILE"),
    ("task=predict", "task: ", "Module.load_from_checkpoint"),
    ("predict --ckpt_path=x", "predict: is no command", "Module.load_from_checkpoint"),
    ("src/train.py experiment=example", "src/train.py: ", "python -m distdl experiment=example"),
    ("--print_config", "--print_config: ", "--cfg job"),
    ("experiment=example +experiment=example", "chosen twice: example, example", "`- example` und"),
    ("debug=step debug=limit", "debug: chosen twice: step, limit", "choose one"),
    ("experiment=conf/experiment/example.yaml", "experiment: ", "mean experiment=example?"),
    ("experiment=configs/experiment/example.yaml", "experiment: ", "mean experiment=example?"),
    ("data=conf/data/points.yaml", "data: no option", "did you mean data=points?"),
    ("experiment=team/example", "experiment: no option 'team/example'", "available: example,"),
    ("model/net=wide_", "model/net: no option 'wide_'", "did you mean model/net=wide?"),
    ("+model.class_path=a.Net +model.init_args.c=1", "model: class_path", "{_target_: a.Net, c:"),
    ("model=odd", "model: names no class (_target_), only", "in a file: _target_: package.Class"),
    ("conf/experiment/example.yaml seed=1", "is no command", "distdl experiment=example seed=1"),
    ("example", "example: is no command", "python -m distdl experiment=example"),
    ("experiment=old", "no option 'old'", "rename conf/experiment/old.yml to old.yaml; available"),
    (
        "callbacks=[default,watch] callbacks.early_stopping.patience=3",
        "callbacks.early_stopping: names no class",
        "callbacks=[default,watch,early_stopping] callbacks.early_stopping.patience=...",
    ),
    ("callbacks=[watch] patience=3", "patience: ", "callbacks=[watch,early_stopping] callbacks."),
    ("--patience 3", "--patience: ", "callbacks=[<those you have>,early_stopping] callbacks."),
    (
        "tracking=[csv,tensorboard] tracking.wandb.project=x",
        "tracking.wandb: names no class",
        "tracking=[csv,tensorboard,wandb] tracking.wandb.project=...",
    ),
    ("+callbacks.x.class_path=a.B", "callbacks.x: class_path", "callbacks.x: {_target_: a.B}"),
]  # fmt: skip
# What is pasted into a file: its content after the first line -> what is read.
PASTED = {
    "cli": (
        "model: {class_path: a.Net, init_args: {width: 3}}",
        "model: class_path and init_args are LightningCLI's words",
        "model: {_target_: a.Net, width: ...}, and under defaults: - override /model: null",
    ),
    "list": (
        "callbacks: [{class_path: a.B}]",
        "pasted.yaml: a list",
        "callbacks: {NAME: {_target_",
    ),
    "trainer": ("defaults: [override /trainer: gpu]", "trainer: no opt", "trainer.accelerator=gpu"),
    "logger": ("defaults: [override /logger: csv]", "logger: no group of that", "tracking=NAME"),
    "paths": ("defaults: [paths: default]", "paths: no group of that", "output_dir=FOLDER"),
    "data": ("defaults: [data: points]", "in experiment/pasted.yaml", "- override /data: points"),
    "no package": ("model: {a: 1}\ndata: {b: 2}", "experiment: its keys", "# @package _global_"),
    "optuna": ("defaults: [override /hydra/sweeper: optuna]", "sweeper: ", "a sweep is -m"),
    "callbacks": (
        "callbacks: {model_checkpoint: {monitor: a}}",
        "callbacks.model_checkpoint: ",
        "checkpoint.monitor=METRIC",
    ),
}


@pytest.fixture
def taken_over(tmp_path: Path, no_child: None) -> Path:
    files = {
        "model/net": "defaults: [net: small]\n_target_: mine.Net\nlr: 1\n",
        "model/net/small": "width: 1\n",
        "model/net/wide": "width: 2\n",
        "model/odd": "lr: 1\n",
        "callbacks/watch": "gradwatch: {_target_: lightning.pytorch.callbacks.Timer}\n",
        "data/points": "_target_: mine.Points\ndata_dir: x\n",
        "experiment/example": "# @package _global_\n"
        "defaults: [override /model: net, override /data: points]\n",
    }
    for name, text in files.items():
        path = tmp_path / "conf" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "conf/experiment/old.yml").touch()
    return tmp_path


def check_one(said: Any, told: str, remedy: str) -> None:
    assert said.code == 2 and "Traceback" not in said.err, said
    assert said.err.startswith("distdl: 1 problem, nothing was started\n"), said.err
    assert told in said.err and remedy in said.err.partition(told)[2], said.err
    assert "Available options" not in said.err and "full_key" not in said.err


@pytest.mark.parametrize(("typed", "told", "remedy"), TEMPLATE, ids=[t for t, _, _ in TEMPLATE])
def test_what_users_of_the_template_type(typed, told, remedy, command, taken_over) -> None:
    check_one(command(*typed.split()), told, remedy)
    assert not (taken_over / "outputs").exists()


@pytest.mark.parametrize(("text", "told", "remedy"), PASTED.values(), ids=PASTED)
def test_what_is_pasted_into_an_experiment(text, told, remedy, command, taken_over) -> None:
    head = "" if "its keys" in told else "# @package _global_\n"
    (taken_over / "conf/experiment/pasted.yaml").write_text(f"{head}{text}\n")
    check_one(command("experiment=pasted"), told, remedy)


@pytest.mark.parametrize("model", ["net", "resnet18"])
def test_a_group_within_an_option_is_chosen_or_added(model, command, taken_over) -> None:
    said = command("model/net=wide", f"model={model}", "--cfg", "job", "-p", "model.net")
    assert (said.code, said.out) == (0, "width: 2\n"), said


def test_a_debug_adds_nothing_that_the_users_data_may_not_take(command, taken_over) -> None:
    said = command("experiment=example", "debug=cpu", "--cfg", "job", "-p", "data")
    assert (said.code, said.out) == (0, "_target_: mine.Points\ndata_dir: x\n"), said
    said = command("debug=cpu", "--cfg", "job", "-p", "data.num_workers")
    assert (said.code, said.out) == (0, "0\n"), said
