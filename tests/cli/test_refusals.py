"""Each kind of bad input on the real command line: the message a user reads, exit code 2, no
traceback, no file written, and all that is wrong in one go, sorted by its path."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from distdl import conf as shipped
from tests.conftest import distdl
from tests.unit.sample_config import check_parts, rows
from tests.written import write

# What is typed | what is read, part after part. {word}: it is one word, with its spaces.
TYPED = """
# Options and keys that do not exist.
model=resnet5 | model: no option 'resnet5' | did you mean model=resnet50?
data=null | data: no option 'null' | available: coco, imagenet, points, synthetic
~nothing_here | nothing_here
# As Hydra, its templates and Lightning have it.
hydra/launcher=joblib | hydra/launcher: | launcher=slurm
--config-name train | --config-name: | experiment=NAME
ckpt_path=a.ckpt | checkpoint.resume_from=FILE | task.checkpoint=FILE
trainer=gpu | trainer: no option 'gpu' | trainer.accelerator=gpu trainer.devices=1
checkpoint=x.ckpt | checkpoint: must be a mapping | checkpoint.resume_from=FILE
early_stopping.patience=3 | callbacks=[default,early_stopping]
logger=wandb | logger: unknown key | tracking=wandb
trainer.strategy=ddp_find_unused_parameters_true | strategy=ddp strategy.find_unused_parameters=true
--batch-size=32 | written without dashes: data.batch_size=32
doctor task=train | task: the doctor has its own, and trains nothing | leave it out
# Slips of the hand.
train debug=cpu | train: is neither a command | python -m distdl debug=cpu
resume | RUN: | python -m distdl jobs list
seed = 3 | seed=3: the shell splits it into several words | write seed=3
seed= 3 | write seed=3
seed =3 | write seed=3
-m optimizer.lr=0.1, 0.2 | write optimizer.lr=0.1,0.2
{word}trainer.max_epochs = 3 | trainer.max_epochs: | write trainer.max_epochs=3
seed:3 | seed:3: is not an override | write seed=3
seed 3 | seed: is not an override | write seed=3
seed==3 | 'seed==3' is not an override | write seed=3
trainer,max_epochs=3 | write trainer.max_epochs=3
tags=[„a b“,c] | write 'tags=["a b",c]'
–m seed=1,2 | write -m
{word}launcher.hosts=[node[1-4]:8,a] | 'launcher.hosts=["node[1-4]:8",a]'
{word}b=[1, " | is not an override | quote a text with special characters: 'b="[1, \\""'
output_dir={300 letters} | output_dir: cannot be created: File name too long
name=größe | name: must be made of letters from a to z | not 'größe'
data=imagenet data.root=~/x | write data.root={home}/x
optimizer.betas=[0.9, 0.99] | write 'optimizer.betas=[0.9, 0.99]'
optimizer.lr=“0.1” | write optimizer.lr=0.1
optimizer.betas=[0.1 | it lacks ]: 'optimizer.betas=[0.1]'
trainer.max_epochs=1,2 | several values, and no sweep | add -m
# Values; more are in VALUES.
checkpoint.resume_from=None | resume_from: | write checkpoint.resume_from=null
name={201 letters} | name: must be of at most 200 characters
optimizer=none optimizer.lr=0.1 | optimizer: names no class (_target_) to take lr | optimizer=NAME
# The size of the run.
strategy=single trainer.devices=4 trainer.accelerator=cpu | strategy: single trains on one device
trainer.devices=2 trainer.accelerator=mps | trainer.devices: an Apple GPU is one device
{4 devices} +data.global_batch_size=100 | 100 is not 8 (data.batch_size) x 4 | batch_size=25
{4 devices} +data.global_batch_size=98 | and not divisible | data.global_batch_size=96
data.batch_size=auto +data.global_batch_size=96 | has no effect beside data.batch_size=auto
data.batch_size=Auto | data.batch_size: must be an integer | write data.batch_size=auto, or a number
launcher=slurm trainer.devices=[0,1] | a list names devices of this machine | trainer.devices=2
launcher=slurm trainer.devices=1 data.cache_dir=${oc.env:HOME} | data.cache_dir: reads the \
environment variable HOME | launcher.forward_env=[HOME]
# Files and folders.
output_dir= | output_dir: is empty
output_dir=/dev/null/runs | output_dir: /dev/null is a file
output_dir=s3://mine/runs | s3://mine/runs is not a folder | choose another
checkpoint.resume_from={file} | is not a checkpoint, or an incomplete one | Lightning
launcher=mpi launcher.flavour=mpich launcher.mpirun=sh trainer.devices=2 \
checkpoint.resume_from=x | an absolute path
task=test task.checkpoint= | task.checkpoint=: names no checkpoint
resume outputs/nothing/here | outputs/nothing/here | there is no such folder
# Options of the command line, and sweeps.
--frobnicate | --frobnicate: is not an option of distdl
--cfg nonsense | --cfg: there is no 'nonsense'
--config-dir nowhere | --config-dir: | nowhere is not a folder
--cfg job --resolve name=${nope} | 'nope' not found
--cfg job -p modle | the config has no 'modle'
--cfg job -m optimizer.lr=interval(0,1) | of optimizer.lr=interval(0,1) cannot be listed
-m model=glob(nothing*) | model=glob(nothing*) matches nothing
-m name=a,b | name: cannot be swept: a sweep names its members
-m experiment=resnet50_ddp,imagenette_cpu | missing, in the member experiment=imagenette_cpu
convert x --to zero3 | --to: there is no 'zero3' | --to deepspeed_zero3?
# In this project, which was taken over from lightning-hydra-template or LightningCLI.
data.data_dir=${paths.data_dir} | data.data_dir: refers to paths. | data.root=FOLDER
task=predict | task.checkpoint=best: this run has no best.ckpt | train first: python -m distdl; \
then: python -m distdl resume RUN task=predict
src/train.py experiment=example | src/train.py:  | python -m distdl experiment=example
experiment=example +experiment=example | chosen twice: example, example | `- example` und
model/net=wide_ | model/net: no option 'wide_' | did you mean model/net=wide?
model=odd | model: names no class (_target_), only | in a file: _target_: package.Class
conf/experiment/example.yaml seed=1 | is neither a command | distdl experiment=example seed=1
experiment=old | no option 'old' | rename conf/experiment/old.yml to old.yaml; available
callbacks=[default,watch] callbacks.early_stopping.patience=3 | early_stopping: names no class | \
callbacks=[default,watch,early_stopping] callbacks.early_stopping.patience=...
""".replace("\\\n", "")  # noqa: RUF001
# A file of the user's, its content ({all}: `# @package _global_`), and what is read.
FILES = r"""
model/broken | a: [1\nb: 2\n | broken.yaml
model/lost | defaults:\n  - nothing\n | model: no option 'nothing', in model/lost.yaml
experiment/a | defaults:\n  - a\n | experiment/a.yaml: names itself under defaults: experiment/a ->
experiment/latin | # one\n# größe\n | experiment/latin.yaml: is not UTF-8: invalid start byte, line
experiment/a | {all}defaults:\n  - /data: synthetic\n | in the file: - override /data: NAME
experiment/a | {all}defaults:\n  - override data: synthetic\n | in experiment/a.yaml | - override /d
experiment/a | defaults:\n  - override /data: synthetic\n | experiment/a.yaml: its keys would be
experiment/a | {all}strategy: ddp_spawn | strategy: must be a mapping | strategy=ddp
experiment/a | {all}defaults:\n  - override /callbacks: [defalt]\n | did you mean callbacks=default?
experiment/a | model: {a: 1}\ndata: {b: 2} | experiment: its keys | # @package _global_
experiment/a | {all}model: {class_path: a.Net, init_args: {width: 3}} | model: class_path and in \
| model: {_target_: a.Net, width: ...}, and under defaults: - override /model: null
experiment/a | {all}callbacks: [{class_path: a.B}] | a.yaml: a list | callbacks: {NAME: {_target_
experiment/a | {all}defaults: [override /trainer: gpu] | trainer: no opt | trainer.accelerator=gpu
experiment/a | {all}defaults: [override /logger: csv] | logger: no group of that | tracking=NAME
distdl | seed: 1\n | would replace distdl's primary config
""".replace("\\\n", "")
# Whatever the message: no traceback.
ODD = """
experiment=null model=null trainer=null ~launcher ~model ~strategy ~task ~trainer ~project
tracking=${nope} output_dir=${nope} name=${nope} dry_run=${nope} project.root=${nope}
trainer.devices=${nope} name=??? data.batch_size=??? trainer.devices=??? project=5 project.root=5
tags=5 trainer.devices=[] trainer.devices=[a] trainer.devices=1.5 trainer.num_nodes=null name=a/b
name=../x name='' experiment_name=../x model@somewhere=resnet18 =5
""".split()  # noqa: SIM905
MEANT = {
    "{home}": str(Path.home()),
    "{file}": __file__,
    "{201 letters}": 201 * "a",
    "{300 letters}": 300 * "a",
    "{4 devices}": "trainer.accelerator=cpu trainer.devices=4 data.batch_size=8",
}


def check_one(output, *parts):
    """It is refused with one problem, in which all this stands, in this order."""
    assert (output.code, output.out) == (2, ""), output
    assert "Traceback" not in output.err, output
    assert output.err.startswith("distdl: 1 problem, nothing was started\n  "), output.err
    assert output.err.count("\n  ") <= 4
    assert "Available options" not in output.err
    assert "full_key" not in output.err
    check_parts(output.err, parts)


@pytest.fixture
def taken_over(tmp_path, no_child):
    conf = tmp_path / "conf"
    files = {
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
    write(conf, files)
    return conf


REFUSED = [*rows(TYPED), *((word, []) for word in [*ODD, "{word}name='a b'"])]


@pytest.mark.parametrize(("typed", "parts"), REFUSED)
def test_refused_before_anything_is_imported(typed, parts, command, taken_over, tmp_path):
    for name, text in MEANT.items():
        typed = typed.replace(name, text)
        parts = [part.replace(name, text) for part in parts]
    alone = typed.startswith("{word}")
    check_one(command(*([typed[6:]] if alone else typed.split())), *parts)
    assert [*tmp_path.iterdir()] == [taken_over], "a refused command writes no file"


@pytest.mark.parametrize(("name", "parts"), rows(FILES))
def test_files_of_the_users_own(name, parts, command, taken_over):
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
}


@pytest.mark.parametrize(("typed", "shown"), SHOWN.items())
def test_accepted_in_such_a_project(typed, shown, command, taken_over):
    output = command("--cfg", "job", *typed.split())
    assert (output.code, output.out) == (0, shown), output


OWN = "./conf here is distdl's own"


def test_a_folder_of_configs_by_another_name_or_above(command, without_stage_2, tmp_path):
    write(tmp_path, {"configs/experiment/solar.yaml": "# @package _global_\nseed: 3\n"})
    text = "there is no ./conf here (there is ./configs: --config-dir configs); available: "
    check_one(command("experiment=solar"), text)
    assert command("experiment=solar", "--config-dir", "configs", "--cfg", "job").code == 0
    (tmp_path / "conf").symlink_to(Path(shipped.__file__).parent)  # as in a clone of distdl
    check_one(command("experiment=solar"), text.replace("there is no ./conf here", OWN))
    (tmp_path / "conf").unlink()
    (tmp_path / "configs").rename(tmp_path / "conf")
    (tmp_path / "sub").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir("sub")
        check_one(command("experiment=solar"), f"{tmp_path}/conf has it: cd {tmp_path}")


def test_a_folder_that_cannot_be_written(command, without_stage_2, monkeypatch, tmp_path):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("distdl.runs.directory.write_text", full)  # config.yaml, the last file
    output = command("trainer.accelerator=cpu", "name=x", "output_dir=folder")
    text = "output_dir: folder/default/x cannot be written: No space left on device"
    check_one(output, f"{text} [not-writable]\n", "      choose another: output_dir=FOLDER\n")
    assert not (tmp_path / "folder/default/x").exists()
    monkeypatch.setattr("os.access", lambda *_: False)
    output = command("output_dir=folder/a")
    check_one(output, f"output_dir: you may not write to {tmp_path}/folder")


def test_a_path_inside_a_run_is_not_the_run(command, tmp_path):
    for inside in ("config.yaml", "checkpoints/last.ckpt"):
        write(tmp_path / "outputs/a/b", {inside: ""})
        check_one(command("resume", f"outputs/a/b/{inside}"), "did you mean outputs/a/b?")


def test_hydras_own_flags(tmp_path):
    done = distdl("--info", "config", "modl=x", cwd=tmp_path)
    assert done.returncode == 2
    assert "Could not override 'modl'" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


# ----------------------------------------------------------------- all problems at once

# All typed in one command, each of it wrong, as the text itself shows. Of the first ones only the
# path is read.
VALUES = """
seed=-1 tags=a checkpoint.mode=up trainer.devices=two trainer.num_nodes=2 data.image_size=0
optimizer.lr=0 optimizer._partial_=yes schedule.warmup_epochs=-1 +callbacks.shell._target_=os.system
""".split()  # noqa: SIM905
VALUES = [(word, [word.strip("+").split("=")[0] + ":"]) for word in VALUES]
VALUES += rows("""
lrr=1 | lrr: unknown key in the config | did you mean optimizer.lr?
optimiser.lr=1 | optimiser.lr: unknown key in optimiser | did you mean optimizer.lr?
name=2024 | name: | write name='"2024"'
checkpoint.keep_last=${env:HOME} | checkpoint.keep_last: uses an unknown resolver | '${oc.env:HOME}'
checkpoint.resume_from=nowhere | checkpoint.resume_from=nowhere: no such checkpoint
trainer.max_epoch=1 | trainer.max_epoch: lightning's Trainer takes no argument | trainer.max_epochs?
trainer.max_epochs=3.0 | trainer.max_epochs: | write trainer.max_epochs=3
trainer.gpus=2 | trainer.gpus: Lightning 2's Trainer no longer has it | trainer.devices=N
trainer.accelerator=ddp | trainer.accelerator: ddp is a strategy | and trainer.accelerator=auto
trainer.detect_anomaly=yes | trainer.detect_anomaly: | write trainer.detect_anomaly=true
trainer.limit_train_batches=0 | trainer.limit_train_batches: 0 would train on no | task=validate
data=imagenet | data.root: missing | write data.root=...
data.batch_size=${oc.env:SIZE} | data.batch_size: must be an integer, not ${oc.env:SIZE}
data.batchsize=2 | data.batchsize: | did you mean data.batch_size?
data.cache_dir=${oc.env:NOT_SET} | data.cache_dir: the environment variable NOT_SET is not set
+data.itself=${data.itself} | data.itself: refers to itself
model.num_classes=${data.num_clases} | model.num_classes: refers to | mean data.num_classes?
+model.api_token=canary-5e11a0 | model.api_token: holds a secret
model.network._target_=mine:Net | model.network._target_: is not a dotted path | write mine.Net
+callbacks.other._target_=foo.Bar | callbacks.other._target_: there is no module 'foo' | [foo]
callbacks.early_stoping.patience=3 | callbacks.early_stoping: names no class | early_stopping?
""")
# Right, and refers to what is wrong: that is reported once.
RIGHT = ["callbacks=[default,early_stopping]", "+data.twin=${data.batch_size}"]
# These need the classes.
CLASSES = rows("""
optimizer.momentun=0.9 | optimizer.momentun: torch.optim.SGD takes no argument | optimizer.momentum?
data.num_classes=ten | data.num_classes:
+callbacks.ours._target_=distdl.callbacks.Progres | callbacks.ours._target_: | has no 'Progres'
+callbacks.stop._target_=lightning.pytorch.callbacks.EarlyStopping | callbacks.stop.monitor: missing
""")


@pytest.mark.parametrize(("table", "right"), [(VALUES, RIGHT), (CLASSES, [])])
def test_all_problems_in_one_go(table, right, command, monkeypatch, tmp_path):
    monkeypatch.setenv("SIZE", "very-private")
    words, expected = zip(*table, strict=True)
    output = command(*words, *right)
    assert (output.code, output.out) == (2, "")
    assert list(tmp_path.iterdir()) == []
    heading, *problems = re.split(r"\n  (?=\S)", output.err)
    assert heading == f"distdl: {len(words)} problems, nothing was started", output.err
    for problem, parts in zip(problems, sorted(expected), strict=True):
        check_parts(problem, parts)
    unchecked = output.err.endswith("classes and their arguments were not checked yet\n")
    assert unchecked == (table is VALUES)
    assert not re.search("canary|very-private", output.err), "a secret is not repeated"


def test_an_unknown_machine_is_one_problem(command):
    """Not two, as its devices cannot be counted either; nor does a wrong key beside it hide it."""
    typed = (
        "launcher=sagemaker launcher.instance_type=ml.p4d.24xlargee launcher.spott=true "
        "launcher.image=me/x launcher.bucket=mine launcher.role=arn:aws:iam::123456789012:role/x"
    )
    output = command(*typed.split())
    assert output.code == 2
    assert "2 problems" in output.err
    check_parts(output.err, ["\n  launcher.instance_type: ", "ml.p4d.24xlarge?", "launcher.spot?"])
