"""Each kind of bad input on the real command line: the message a user reads, exit code 2, no
traceback, no file written, and all that is wrong in one go, sorted by its path."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import distdl
from tests.unit.sample_config import check_parts, rows

# What is typed | what is read, part after part. {word}: it is one word, with its spaces.
TYPED = """
# Options and keys that do not exist.
model=resnet5 | model: no option 'resnet5' | did you mean model=resnet50?
data=null | data: no option 'null' | available: imagenet, synthetic
experiment=solar | no option 'solar' | there is no ./conf here; available:
~nothing_here | nothing_here
nodes=2 | nodes: unknown key | trainer.num_nodes?
# As Hydra, its templates and Lightning have it.
hydra/launcher=joblib | hydra/launcher: | launcher=slurm
--config-name train | --config-name: | experiment=NAME
ckpt_path=a.ckpt | checkpoint.resume_from=FILE | task.checkpoint=FILE
trainer=gpu | trainer: no option 'gpu' | trainer.accelerator=gpu trainer.devices=1
checkpoint=x.ckpt | checkpoint: must be a mapping | checkpoint.resume_from=FILE
epochs=3 | epochs: unknown key | trainer.max_epochs=N
patience=3 | patience: | callbacks.early_stopping.patience=...
early_stopping.patience=3 | callbacks=[default,early_stopping]
logger=wandb | logger: unknown key | tracking=wandb
--gpus 2 | written without dashes: trainer.devices=N
--lr 0.1 | dashes: optimizer.lr=... | or model.lr=... where the model makes
--batch-size=32 | written without dashes: data.batch_size=32
# Slips of the hand.
train debug=cpu | train: is neither a command | python -m distdl debug=cpu
test | python -m distdl resume RUN task=test
resume | RUN: | python -m distdl jobs list
resme outputs/x | did you mean: python -m distdl resume
seed = 3 | seed=3: the shell splits it into several words | write seed=3
seed= 3 | write seed=3
seed =3 | write seed=3
resume outputs/x/y seed = 3 | there is no such folder
-m optimizer.lr=0.1, 0.2 | write optimizer.lr=0.1,0.2
{word}trainer.max_epochs = 3 | trainer.max_epochs: | write trainer.max_epochs=3
seed:3 | seed:3: is not an override | write seed=3
seed 3 | seed: is not an override | write seed=3
seed==3 | 'seed==3' is not an override | write seed=3
trainer,max_epochs=3 | write trainer.max_epochs=3
tags=[„a b“,c] | write 'tags=["a b",c]'
–m seed=1,2 | write -m
output_dir={300 letters} | output_dir: cannot be created: File name too long
name=größe | name: must be made of letters from a to z | not 'größe'
data=imagenet data.root=~/x | write data.root={home}/x
optimizer.betas=[0.9, 0.99] | write 'optimizer.betas=[0.9, 0.99]'
optimizer.lr=“0.1” | write optimizer.lr=0.1
optimizer.betas=[0.1 | it lacks ]: 'optimizer.betas=[0.1]'
trainer.max_epochs=1,2 | several values, and no sweep | add -m
# Values.
trainer.max_epochs=3.0 | trainer.max_epochs: | write trainer.max_epochs=3
data.batch_size=1e3 | data.batch_size: | write data.batch_size=1000
data.image_size=0 | data.image_size: must be an integer of at least 1
checkpoint.resume_from=None | resume_from: | write checkpoint.resume_from=null
trainer.detect_anomaly=yes | write trainer.detect_anomaly=true
trainer.limit_train_batches=0 | 0 would train on no batches | task=validate
seed=${env:HOME} | seed: uses an unknown resolver | write seed='${oc.env:HOME}'
seed=${data.seed} | refers to itself
name={201 letters} | name: must be of at most 200 characters
model._target_=mine:Net | model._target_: is not a dotted path | write mine.Net
# Files and folders.
output_dir= | output_dir: is empty
output_dir=/dev/null/runs | output_dir: /dev/null is a file
output_dir=s3://mine/runs | s3://mine/runs is not a folder | choose another
checkpoint.resume_from=nowhere.ckpt | resume_from=nowhere.ckpt: no such checkpoint
checkpoint.resume_from={file} | is not a checkpoint, or an incomplete one | Lightning
task=test task.checkpoint= | task.checkpoint=: names no checkpoint
resume outputs/nothing/here | outputs/nothing/here
# Options of the command line, and sweeps.
--frobnicate | --frobnicate: is not an option of distdl
--cfg nonsense | invalid choice: 'nonsense'
--config-dir nowhere | --config-dir: | nowhere is not a folder
--cfg job --resolve name=${nope} | 'nope' not found
--cfg job -p modle | the config has no 'modle'
--cfg job -m optimizer.lr=interval(0,1) | of optimizer.lr=interval(0,1) cannot be listed
-m name=a,b | name: cannot be swept: a sweep names its members
-m experiment=resnet50_ddp,imagenette_cpu | missing, in the member experiment=imagenette_cpu
convert x --to zero3 | --to: there is no 'zero3' | --to deepspeed_zero3?
"""  # noqa: RUF001
# In a project that was taken over from lightning-hydra-template or LightningCLI.
TEMPLATE = """
trainer=ddp_sim | trainer:  | strategy=ddp trainer.accelerator=cpu trainer.devices=2
logger=many_loggers | logger:  | several: tracking=[mlflow,tensorboard]
callbacks.model_checkpoint.monitor=a | model_checkpoint:  | checkpoint.monitor=METRIC
data.data_dir=${paths.data_dir} | data.data_dir: refers to paths. | data.root=FOLDER
task=predict | task.checkpoint=best: this run has no best.ckpt | a .ckpt file
src/train.py experiment=example | src/train.py:  | python -m distdl experiment=example
experiment=example +experiment=example | chosen twice: example, example | `- example` und
model/net=wide_ | model/net: no option 'wide_' | did you mean model/net=wide?
+model.class_path=a.Net +model.init_args.c=1 | model: class_path | {_target_: a.Net, c:
model=odd | model: names no class (_target_), only | in a file: _target_: package.Class
conf/experiment/example.yaml seed=1 | is neither a command | distdl experiment=example seed=1
example | example: is neither a command | python -m distdl experiment=example
experiment=old | no option 'old' | rename conf/experiment/old.yml to old.yaml; available
callbacks=[default,watch] callbacks.early_stopping.patience=3 | early_stopping: names no class | \
callbacks=[default,watch,early_stopping] callbacks.early_stopping.patience=...
--patience 3 | --patience:  | callbacks=[<those you have>,early_stopping] callbacks.
tracking=[csv,tensorboard] tracking.wandb.project=x | tracking.wandb: names no class | \
tracking=[csv,tensorboard,wandb] tracking.wandb.project=...
"""
# A file of the user's, its content ({all}: `# @package _global_`), and what is read.
FILES = r"""
model/broken | a: [1\nb: 2\n | broken.yaml
model/lost | defaults:\n  - nothing\n | model: no option 'nothing', in model/lost.yaml
experiment/a | defaults:\n  - a\n | experiment/a.yaml: names itself under defaults: experiment/a -> experiment/a
experiment/latin | # one\n# größe\n | experiment/latin.yaml: is not UTF-8: invalid start byte, line 2
experiment/a | {all}defaults:\n  - /data: synthetic\n | in the file: - override /data: NAME
experiment/a | {all}defaults:\n  - override data: synthetic\n | in experiment/a.yaml | - override /data: NAME
experiment/a | {all}defaults:\n  - override /callbacks: [defalt]\n | did you mean callbacks=default?
experiment/a | defaults:\n  - override /data: synthetic\n | experiment/a.yaml: its keys would be nested below it
experiment/a | model: {a: 1}\ndata: {b: 2} | experiment: its keys | # @package _global_
experiment/a | {all}model: {class_path: a.Net, init_args: {width: 3}} | model: class_path and init_args are \
LightningCLI's keys | model: {_target_: a.Net, width: ...}, and under defaults: - override /model: null
experiment/a | {all}callbacks: [{class_path: a.B}] | a.yaml: a list | callbacks: {NAME: {_target_
experiment/a | {all}callbacks: {model_checkpoint: {monitor: a}} | callbacks.model_checkpoint: | checkpoint.
experiment/a | {all}defaults: [override /trainer: gpu] | trainer: no opt | trainer.accelerator=gpu
experiment/a | {all}defaults: [override /logger: csv] | logger: no group of that | tracking=NAME
experiment/a | {all}defaults: [override /hydra/sweeper: optuna] | sweeper: | a sweep is -m
experiment/a | {all}strategy: ddp_spawn | strategy: must be a mapping | strategy=ddp
experiment/a | {all}defaults: [{override /strategy: ddp_spawn}] | strategy: | strategy=ddp
distdl | seed: 1\n | would replace distdl's primary config
""".replace("\\\n", "")  # noqa: E501
# Each alone, through the first stage only: the second is not what fails here.
ODD = """
experiment=null model=null trainer=null tracking=null ~launcher ~model ~strategy ~task ~trainer
~project tracking=${nope} output_dir=${nope} experiment_name=${nope} name=${nope} dry_run=${nope}
project.root=${nope} trainer.devices=${nope} name=??? output_dir=??? data.batch_size=???
trainer.devices=??? project=5 project.root=5 checkpoint=5 tags=5 name=5 trainer.devices=0
trainer.devices=[] trainer.devices=abc trainer.devices=[0,1] trainer.devices=[a] trainer.devices=1.5
trainer.num_nodes=0 trainer.num_nodes=2 trainer.num_nodes=abc trainer.num_nodes=null name=a/b
name=../x name='' experiment_name=../x model@somewhere=resnet18 =5
""".split()  # noqa: SIM905
MEANT = {
    "{home}": str(Path.home()),
    "{file}": __file__,
    "{201 letters}": 201 * "a",
    "{300 letters}": 300 * "a",
}


def check_one(output, *parts: str) -> None:
    """It is refused with one problem, in which all this stands, in this order."""
    assert (output.code, output.out) == (2, "") and "Traceback" not in output.err, output
    assert output.err.startswith("distdl: 1 problem, nothing was started\n  "), output.err
    assert output.err.count("\n  ") <= 4
    assert "Available options" not in output.err and "full_key" not in output.err
    check_parts(output.err, parts)


@pytest.mark.parametrize(("typed", "parts"), rows(TYPED))
@pytest.mark.usefixtures("no_child")
def test_refused_before_anything_is_imported(typed, parts, command, tmp_path) -> None:
    for name, text in MEANT.items():
        typed, parts = typed.replace(name, text), [part.replace(name, text) for part in parts]
    alone = typed.startswith("{word}")
    check_one(command(*([typed[6:]] if alone else typed.split())), *parts)
    assert list(tmp_path.iterdir()) == [], "a refused command writes no file"


@pytest.mark.parametrize("typed", [*ODD, "name='a b'", "-m model=glob(nothing*)"])
def test_nothing_that_is_typed_ends_in_a_traceback(
    typed, command, without_stage_2, tmp_path
) -> None:
    check_one(command(*typed.split(" ", typed.startswith("-m"))))
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def taken_over(tmp_path, no_child) -> Path:
    conf, files = tmp_path / "conf", {
        "model/net.yaml": "defaults: [net: small]\n_target_: mine.Net\nlr: 1\n",
        "model/net/small.yaml": "width: 1\n",
        "model/net/wide.yaml": "width: 2\n",
        "model/odd.yaml": "lr: 1\n",
        "callbacks/watch.yaml": "gradwatch: {_target_: lightning.pytorch.callbacks.Timer}\n",
        "data/points.yaml": "_target_: mine.Points\ndata_dir: x\n",
        "experiment/example.yaml": "# @package _global_\n"
        "defaults: [override /model: net, override /data: points]\n",
        "experiment/old.yml": "",
    }  # fmt: skip
    for name, text in files.items():
        (conf / name).parent.mkdir(parents=True, exist_ok=True)
        (conf / name).write_text(text)
    return conf


@pytest.mark.parametrize(("typed", "parts"), rows(TEMPLATE))
def test_what_users_of_the_template_type(typed, parts, command, taken_over) -> None:
    check_one(command(*typed.split()), *parts)
    assert not Path("outputs").exists()


@pytest.mark.parametrize(("name", "parts"), rows(FILES))
def test_files_of_the_users_own(name, parts, command, taken_over) -> None:
    text = parts[0].replace(r"\n", "\n").replace("{all}", "# @package _global_\n")
    (taken_over / f"{name}.yaml").write_bytes(text.encode("latin-1"))
    check_one(command(name.replace("/", "=") if "/" in name else "seed=1"), *parts[1:])
    assert not Path("outputs").exists()


SHOWN = {
    # A group within an option is chosen or added.
    "model/net=wide model=net -p model.net": "width: 2\n",
    "model/net=wide model=resnet18 -p model.net": "width: 2\n",
    # A debug adds nothing that the user's own data may not take.
    "experiment=example debug=cpu -p data": "_target_: mine.Points\ndata_dir: x\n",
    "debug=cpu -p data.num_workers": "0\n",
}


@pytest.mark.parametrize(("typed", "shown"), SHOWN.items())
def test_accepted_in_such_a_project(typed, shown, command, taken_over) -> None:
    output = command("--cfg", "job", *typed.split())
    assert (output.code, output.out) == (0, shown), output


def test_a_folder_of_configs_by_another_name(command, tmp_path) -> None:
    (tmp_path / "configs/experiment").mkdir(parents=True)
    (tmp_path / "configs/experiment/solar.yaml").touch()
    text = "there is no ./conf here (there is ./configs: --config-dir configs); available: "
    assert text in command("experiment=solar").err
    assert command("experiment=solar", "--config-dir", "configs", "--cfg", "job").code == 0


def test_a_folder_that_cannot_be_written(command, without_stage_2, monkeypatch, tmp_path) -> None:
    def full(*arguments) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("distdl.runs.directory.write_text", full)  # config.yaml, the last file
    output = command("trainer.accelerator=cpu", "name=x", "output_dir=folder")
    text = "output_dir: folder/default/x cannot be written: No space left on device\n"
    check_one(output, text, "      choose another: output_dir=FOLDER\n")
    assert not (tmp_path / "folder/default/x").exists()
    monkeypatch.setattr("os.access", lambda *_: False)
    assert (
        f"output_dir: you may not write to {tmp_path}/folder" in command("output_dir=folder/a").err
    )


@pytest.mark.usefixtures("without_stage_2")
def test_inside_a_run_and_beside_it(command, monkeypatch, tmp_path) -> None:
    (tmp_path / "conf/experiment").mkdir(parents=True)
    (tmp_path / "conf/experiment/mine.yaml").write_text("# @package _global_\nseed: 3\n")
    (tmp_path / "outputs/a/b/checkpoints").mkdir(parents=True)
    (tmp_path / "outputs/a/b/config.yaml").touch()
    (tmp_path / "outputs/a/b/checkpoints/last.ckpt").touch()
    for inside in ("checkpoints/last.ckpt", "checkpoints/none.ckpt", "config.yaml"):
        check_one(command("resume", f"outputs/a/b/{inside}"), "did you mean outputs/a/b?")
    monkeypatch.chdir("outputs")
    check_one(command("experiment=mine"), f"{tmp_path}/conf has it: cd {tmp_path}")


def test_hydras_own_flags(tmp_path) -> None:
    done = distdl("--info", "config", "modl=x", cwd=tmp_path)
    assert done.returncode == 2 and "Could not override 'modl'" in done.stderr
    assert "Traceback" not in done.stderr and list(tmp_path.iterdir()) == []


# ----------------------------------------------------------------- all problems at once

# What is typed, each of it wrong. The text needs nothing imported, and so ends the command soon.
TEXT = """
lrr=1 +trainer.max_epoch=3 data=imagenet seed=abc data.batch_size=many optimizer.lr_scaling=cubic
+callbacks.shell._target_=os.system +callbacks.foreign._target_=composer.Thing strategy=single
experiment_name=${projct.name} name=${oc.env:NOT_SET_ANYWHERE}
+model.api_token=canary-5e11a0 +trainer.callbacks=[] data.image_size=0 schedule.warmup_epochs=-1
trainer.limit_train_batches=0 data.batchsize=2 optimiser.lr=1
"""
CLASSES = """
optimizer.momentun=0.9 optimizer.class_path=mine.Adam data.num_classes=ten data.train_samples=3.0
+callbacks.ours._target_=distdl.callbacks.Progres optimizer.weight_decay=1e-4x
optimizer.nesterov=yes +callbacks.half.dtype=fp16 +callbacks.other._target_=own.cast.Casts
trainer.gradient_clip_val=1 +callbacks.stop._target_=lightning.pytorch.callbacks.EarlyStopping
"""
RIGHT = {
    TEXT: ["trainer.devices=2", "trainer.accelerator=cpu"],
    CLASSES: ["+callbacks.half._target_=own.Casts", "model._target_=own.Manual"],
}
# Where the problem is reported, if not at what was typed.
ELSEWHERE = {"data": "data.root", "callbacks.stop._target_": "callbacks.stop.monitor"}
OWN = """
import torch
from lightning.pytorch import Callback, LightningModule
class Casts(Callback):
    def __init__(self, dtype: torch.dtype | None = None): self.dtype = dtype
class Manual(LightningModule):
    def __init__(self, **arguments):
        super().__init__()
        self.automatic_optimization = False
    def training_step(self, batch, batch_idx): ...
"""


def refused(*typed, cwd) -> tuple[list[str], str]:
    """The paths of the problems, in their order, and what was printed."""
    done = distdl(*typed, cwd=cwd)
    assert (done.returncode, done.stdout) == (2, ""), done
    assert "Traceback" not in done.stderr and "Error executing job" not in done.stderr
    assert list(cwd.iterdir()) == [], "a refused command writes no file"
    paths = re.findall(r"^  ([^ :]+):", done.stderr, re.MULTILINE)
    assert done.stderr.startswith(f"distdl: {len(paths)} problems, nothing was started\n")
    return paths, done.stderr


@pytest.mark.parametrize("words", [TEXT, CLASSES], ids=["text", "classes"])
def test_all_problems_in_one_go(words, tmp_path, tmp_path_factory) -> None:
    root = tmp_path_factory.mktemp("project")
    (root / "own").mkdir()
    (root / "own/casts.py").touch()
    (root / "own/__init__.py").write_text(OWN)
    typed = [*words.split(), *RIGHT[words], f"project.root={root}"]
    paths, printed = refused(*typed, cwd=tmp_path)
    keys = [word.lstrip("+").partition("=")[0] for word in words.split()]
    assert paths == sorted(ELSEWHERE.get(key, key) for key in keys), printed
    unchecked = printed.endswith("classes and their arguments were not checked yet\n")
    assert unchecked == (words is TEXT)
    assert "canary-5e11a0" not in printed, "a secret is not repeated"


@pytest.mark.usefixtures("no_child")
def test_a_missing_checkpoint_is_reported_with_the_rest(command) -> None:
    output = command("checkpoint.resume_from=nowhere", "data.image_size=0")
    assert output.code == 2 and output.err.startswith("distdl: 2 problems, nothing was started\n")
    assert "\n  checkpoint.resume_from=nowhere: " in output.err


def test_an_unknown_machine_is_one_problem(tmp_path) -> None:
    """Not two, as its devices cannot be counted either; nor does a wrong key beside it hide it."""
    typed = (
        "launcher=sagemaker launcher.instance_type=ml.p4d.24xlargee launcher.spott=true "
        "launcher.image=me/x launcher.bucket=mine launcher.role=arn:aws:iam::123456789012:role/x"
    )
    paths, printed = refused(*typed.split(), cwd=tmp_path)
    assert paths == ["launcher.instance_type", "launcher.spott"]
    assert "ml.p4d.24xlarge?" in printed and "did you mean launcher.spot?" in printed
