"""Commands and files of other projects that build on Lightning and Hydra: what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.test_refusals import check_one, rows

# The commands of lightning-hydra-template's README and of LightningCLI's pages, in a project that
# was taken over (conf/model/net.yaml, conf/data/points.yaml, conf/experiment/example.yaml).
TEMPLATE = """
trainer=cpu | trainer: no option 'cpu' | trainer.accelerator=cpu
trainer=mps | trainer:  | trainer.accelerator=mps
trainer=ddp trainer.devices=4 | trainer:  | strategy=ddp trainer.accelerator=gpu
trainer=ddp_sim | trainer:  | strategy=ddp trainer.accelerator=cpu trainer.devices=2
logger=csv | logger:  | tracking=csv
logger=many_loggers | logger:  | several: tracking=[mlflow,tensorboard]
logger.csv.name=x | logger.csv.name:  | tracking=csv tracking.csv.name=...
debug=default | debug:  | debug=cpu trainer.detect_anomaly=true
debug=fdr | debug:  | debug=step, or trainer.fast_dev_run=true
debug=profiler | debug:  | did you mean debug=profile?
callbacks=null | callbacks:  | did you mean callbacks=none?
callbacks=rich_progress_bar | callbacks:  | lightning.pytorch.callbacks.RichProgressBar
callbacks=[default,model_summary] | callbacks:  | trainer.enable_model_summary=true
callbacks.model_checkpoint.monitor=a | model_checkpoint:  | checkpoint.monitor=METRIC
callbacks.model_summary.max_depth=2 | model_summary:  | trainer.enable_model_summary=true
optimized_metric=val/acc_best | optimized_metric:  | checkpoint.monitor=METRIC
extras.print_config=false | extras.print_config:  | tags=[...]
data.data_dir=${paths.data_dir} | data.data_dir: refers to paths. | data.root=FOLDER
model.lr=${task_name} | model.lr: refers to task_name | experiment_name=NAME
task=eval | task:  | task=test task.checkpoint=FILE
task=predict | task:  | Module.load_from_checkpoint
predict --ckpt_path=x | predict: is not a command | Module.load_from_checkpoint
src/train.py experiment=example | src/train.py:  | python -m distdl experiment=example
--print_config | --print_config:  | --cfg job
experiment=example +experiment=example | chosen twice: example, example | `- example` und
debug=step debug=limit | debug: chosen twice: step, limit | choose one
experiment=conf/experiment/example.yaml | experiment:  | mean experiment=example?
experiment=configs/experiment/example.yaml | experiment:  | mean experiment=example?
data=conf/data/points.yaml | data: no option | did you mean data=points?
experiment=team/example | experiment: no option 'team/example' | available: example,
model/net=wide_ | model/net: no option 'wide_' | did you mean model/net=wide?
+model.class_path=a.Net +model.init_args.c=1 | model: class_path | {_target_: a.Net, c:
model=odd | model: names no class (_target_), only | in a file: _target_: package.Class
conf/experiment/example.yaml seed=1 | is not a command | distdl experiment=example seed=1
example | example: is not a command | python -m distdl experiment=example
experiment=old | no option 'old' | rename conf/experiment/old.yml to old.yaml; available
callbacks=[default,watch] callbacks.early_stopping.patience=3 | callbacks.early_stopping: names no class | callbacks=[default,watch,early_stopping] callbacks.early_stopping.patience=...
callbacks=[watch] patience=3 | patience:  | callbacks=[watch,early_stopping] callbacks.
--patience 3 | --patience:  | callbacks=[<those you have>,early_stopping] callbacks.
tracking=[csv,tensorboard] tracking.wandb.project=x | tracking.wandb: names no class | tracking=[csv,tensorboard,wandb] tracking.wandb.project=...
+callbacks.x.class_path=a.B | callbacks.x: class_path | callbacks.x: {_target_: a.B}
"""  # noqa: E501
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


@pytest.mark.parametrize(("typed", "read"), rows(TEMPLATE))
def test_what_users_of_the_template_type(typed, read, command, taken_over) -> None:
    check_one(command(*typed.split()), *read)
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
