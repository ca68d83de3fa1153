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

# What is typed | what is read, part after part. {word}: it is one word, with its spaces.
TYPED = """
# Hydra's own errors.
model=resnet5 | model: no option 'resnet5' | did you mean model=resnet50?
data=null | data: no option 'null' | available: imagenet, synthetic
experiment=resnet50 | did you mean experiment=resnet50_
optimizer.lr=[1 | 'optimizer.lr=[1' is not an override
name=a=b | 'name=a=b' is not an override
optimizer=Adam | optimizer: no option 'Adam' | did you mean optimizer=adamw?
~nothing_here | nothing_here
# What users of Hydra, lightning-hydra-template and LightningCLI type.
hydra/launcher=joblib | hydra/launcher: | launcher=slurm
hydra.run.dir=x | hydra.run.dir: | output_dir=FOLDER
hydra.job.chdir=true | hydra.job.chdir: | name=NAME
hydra/sweeper=optuna | hydra/sweeper: | -m optimizer.lr=0.1,0.01
--config-name train | --config-name: | experiment=NAME
--config-path=conf | --config-path=conf: | --config-dir FOLDER
--trainer.max_epochs=3 | written without dashes: trainer.max_epochs=3
logger=wandb | logger: unknown key | tracking=wandb
ckpt_path=a.ckpt | checkpoint.resume_from=FILE | task.checkpoint=FILE
+trainer.logger=true | trainer.logger: is set by distdl | tracking=
+trainer.resume_from_checkpoint=x | checkpoint.resume_from=FILE
trainer=gpu | trainer: no option 'gpu' | trainer.accelerator=gpu trainer.devices=1
task_name=mine | task_name: | experiment_name=NAME
test=True | test: | task=test
paths.data_dir=x | paths.data_dir: | data.root=FOLDER
hparams_search=optuna | hparams_search: | -m optimizer.lr=0.1,0.01
# Slips of the hand.
train | train: is not a command | python -m distdl experiment=NAME
train debug=cpu | python -m distdl debug=cpu
test | python -m distdl resume RUN task=test
resume | RUN: which run is to go on? | python -m distdl jobs list
resume trainer.max_epochs=3 | RUN: which run is to go on?
seed = 3 | seed=3: the shell takes it for several words | write seed=3
seed= 3 | write seed=3
seed =3 | write seed=3
resume outputs/x/y seed = 3 | there is no such folder
-m optimizer.lr=0.1, 0.2 | write optimizer.lr=0.1,0.2
{word}trainer.max_epochs = 3 | trainer.max_epochs: | write trainer.max_epochs=3
{word}{tab}seed=3 | seed: | write seed=3
seed:3 | seed:3: is not an override | write seed=3
trainer.max_epochs: 3 | write trainer.max_epochs=3
seed==3 | 'seed==3' is not an override | write seed=3
seed 3 | seed: is not an override | write seed=3
optimizer.lr=“0.1” | write optimizer.lr=0.1
tags=[„a b“,c] | write 'tags=["a b",c]'
trainer.max_epochs=–1 | write trainer.max_epochs=-1
–m seed=1,2 | write -m
—cfg job | write --cfg
name=größe | name: must be made of letters from a to z | not 'größe'
data=imagenet data.root=~/x | write data.root={home}/x
output_dir=s3://mine/runs | s3://mine/runs is not a folder | choose another
# Values that Python or another tool writes in another way.
seed=abc | seed: must be an integer, not 'abc'
trainer.max_epochs=3.0 | trainer.max_epochs: | write trainer.max_epochs=3
data.batch_size=1e3 | data.batch_size: | write data.batch_size=1000
data.num_workers=None | data.num_workers: | write data.num_workers=null
checkpoint.monitor=None | checkpoint.monitor: | write checkpoint.monitor=null
checkpoint.resume_from=None | resume_from: | write checkpoint.resume_from=null
trainer.detect_anomaly=yes | write trainer.detect_anomaly=true
trainer.precision=torch.float32 | write trainer.precision=32-true
trainer.precision=fp16 | trainer.precision: | 16-mixed or bf16-mixed
trainer.devices=0 | trainer.devices: must be a number of devices of each node
seed=${env:HOME} | seed: uses a resolver | write seed='${oc.env:HOME}'
seed=${data.seed} | refers to itself
# Keys as others name them.
trainer,max_epochs=3 | write trainer.max_epochs=3
trainer.lr=0.1 | trainer.lr: lightning's Trainer takes no | optimizer.lr=...
checkpoint=x.ckpt | checkpoint: must be a mapping | checkpoint.resume_from=FILE
--gpus 2 | written without dashes: trainer.devices=N
device=cuda | device: unknown key | trainer.accelerator=gpu or cpu
--devices 2 | written without dashes: trainer.devices=2
--experiment solar | written without dashes: experiment=solar
--lr 0.1 | dashes: optimizer.lr=... | or model.lr=... where the model makes
--max_epochs=3 | written without dashes: trainer.max_epochs=3
--batch-size=32 | written without dashes: data.batch_size=32
gpus=2 | gpus: unknown key | trainer.devices=N
nodes=2 | nodes: unknown key | trainer.num_nodes?
epochs=3 | epochs: unknown key | trainer.max_epochs=N
learning_rate=0.1 | learning_rate: unknown key | optimizer.lr=...
patience=3 | patience: | callbacks.early_stopping.patience=...
optimizer.betas=[0.9, 0.99] | write 'optimizer.betas=[0.9, 0.99]'
optimizer.betas=[0.1 | it lacks ]: 'optimizer.betas=[0.1]'
optimizer=none optimizer.lr=0.1 | optimizer: there is none here to take lr (optimizer=none | such as model.lr=..., or
checkpoint.save_top_k=3 | checkpoint.save_top_k: | checkpoint.keep_last=N
checkpoint.save_last=true | checkpoint.save_last: | checkpoint.keep_last=N
checkpoint.dirpath=x | checkpoint.dirpath: | output_dir=FOLDER
checkpoint.filename=x | checkpoint.filename: | name=NAME is the run's folder
experiment=solar | no option 'solar' | there is no ./conf here; available:
early_stopping.patience=3 | callbacks=[default,early_stopping]
callbacks.early_stopping.patience=3 | callbacks=[default,early_stopping]
data.batch_size=0 | data.batch_size: must be greater than or equal to 1
trainer.limit_train_batches=0 | 0 is a training of no batches | task=validate
output_dir= | output_dir: is empty
output_dir=/dev/null | output_dir: /dev/null is a file
output_dir=/dev/null/runs | output_dir: /dev/null is a file
task=test task.checkpoint=nowhere.ckpt | task.checkpoint=nowhere.ckpt: no such check
checkpoint.resume_from={file} | is not a checkpoint, or not all of one | Lightning
task=test task.checkpoint= | task.checkpoint=: names no checkpoint
name={201 letters} | name: must be of at most 200 characters
output_dir={300 letters} | output_dir: cannot be made: File name too long
checkpoint.resume_from=nowhere.ckpt | resume_from=nowhere.ckpt: no such checkpoint
--cfg job --resolve name=${nope} | 'nope' not found
--cfg job -p modle | the config has no 'modle'
--cfg job -m optimizer.lr=interval(0,1) | optimizer.lr=interval(0,1) cannot be count
# Those of the command line itself.
trainer.max_epochs=1,2 | several values, and no sweep | add -m
-m name=a,b | name: a sweep names its members itself
resme outputs/x | did you mean: python -m distdl resume
prepar folder --source x | distdl: 1 problem | did you mean: python -m distdl prepare
model resnet18 | model: is not an override | write model=resnet18
model._target_=mine:Net | model._target_: is not a dotted path | write mine.Net
--frobnicate | --frobnicate: is not an option of distdl
--cfg nonsense | invalid choice: 'nonsense'
--config-dir nowhere | --config-dir: | nowhere is not a folder
resume outputs/nothing/here | outputs/nothing/here
convert x --to zero3 | --to: there is no 'zero3' | --to deepspeed_zero3?
"""  # noqa: E501, RUF001


def rows(table: str) -> list[tuple[str, list[str]]]:
    found = [line.split(" | ") for line in table.splitlines() if line and line[0] != "#"]
    return [(typed, read) for typed, *read in found]


def check_one(said: Any, *read: str) -> None:
    """It is refused with one problem, in which all this stands, in this order."""
    assert (said.code, said.out) == (2, "") and "Traceback" not in said.err, said
    assert said.err.startswith("distdl: 1 problem, nothing was started\n  "), said.err
    assert said.err.count("\n  ") <= 4
    assert "Available options" not in said.err and "full_key" not in said.err
    rest = said.err
    for part in read:
        assert part in rest, said.err
        rest = rest.partition(part)[2]


MEANT = {"{home}": str(Path.home()), "{file}": __file__, "{tab}": "\t"}
MEANT |= {f"{{{count} letters}}": count * "a" for count in (201, 300)}


@pytest.mark.parametrize(("typed", "read"), rows(TYPED))
@pytest.mark.usefixtures("no_child")
def test_refused_before_anything_is_imported(typed, read, command, tmp_path) -> None:
    for name, text in MEANT.items():
        typed, read = typed.replace(name, text), [part.replace(name, text) for part in read]
    alone = typed.startswith("{word}")
    said = command(*([typed.removeprefix("{word}")] if alone else typed.split()))
    check_one(said, *read)
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

    monkeypatch.setattr("distdl.runs.directory.write_text", full)  # config.yaml, the last file
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
