"""What a user of Hydra, lightning-hydra-template or LightningCLI types, in distdl's words."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from distdl.suggest import strategy_for

_PLACE = "output_dir=FOLDER is where all runs lie, name=NAME is the folder of this one"
_START = "checkpoint.resume_from=FILE trains on from it, task=test task.checkpoint=FILE tests it"
_SWEEP = "a sweep is -m and several values: -m optimizer.lr=0.1,0.01"
_TASKS = "choose one: task=train, task=validate or task=test"
_SIZE = "trainer.accelerator=cpu or gpu, trainer.devices=N, strategy=ddp"
_NOWHERE = "not there yet: best.ckpt loads by Module.load_from_checkpoint in a script of yours"

_SAVING = "checkpoint.monitor=METRIC checkpoint.mode=max, checkpoint.keep_last=N"

# A key, or the section that it is in. Trainer arguments have tables of their own.
_KEYS = {
    "hydra/launcher": "launcher=slurm (--help lists them); a sweep on any of them: -m",
    "hydra/sweeper": _SWEEP,
    "hydra.sweeper": _SWEEP,
    "hydra.launcher": "launcher.<argument>=...",
    "hydra.run": _PLACE,
    "hydra.sweep": _PLACE,
    "hydra.output_subdir": "the run's config.yaml is what was composed",
    "hydra.job": "experiment_name=NAME and name=NAME name a run; nothing changes the folder",
    "hydra": "distdl writes its own logs and folders; of hydra only hydra.searchpath is read",
    "ckpt_path": _START,
    "resume_from_checkpoint": _START,
    "logger": "tracking=NAME (--help lists them); several: tracking=[mlflow,tensorboard]",
    "loggers": "tracking=NAME (--help lists them); several: tracking=[mlflow,tensorboard]",
    "seed_everything": "seed=N",
    "task_name": "experiment_name=NAME",
    "hparams_search": _SWEEP,
    "optimized_metric": "checkpoint.monitor=METRIC checkpoint.mode=max chooses best.ckpt",
    "train": _TASKS,
    "test": _TASKS,
    "paths.data_dir": "where it is used: data.root=FOLDER, or as your class calls it",
    "paths": "output_dir=FOLDER for the runs, data.root=FOLDER for the data",
    "extras": "tags=[...] labels a run; its config is kept in any case",
    "print_config": "--cfg job prints it",
    "model_checkpoint": _SAVING,
    "callbacks.model_checkpoint": _SAVING,
    "callbacks.model_summary": "trainer.enable_model_summary=true",
    "callbacks.rich_progress_bar": "+callbacks.bar._target_="
    "lightning.pytorch.callbacks.RichProgressBar",
    "lr_scheduler": "schedule=NAME and schedule.<argument>=...",
    "scheduler": "schedule=NAME and schedule.<argument>=...",
    "dataset": "data=NAME and data.<argument>=...",
    "datamodule": "data=NAME and data.<argument>=...",
}  # fmt: skip
# Options of groups.
_CHOICES = {
    "trainer=cpu": "trainer.accelerator=cpu",
    "trainer=gpu": "trainer.accelerator=gpu trainer.devices=1",
    "trainer=mps": "trainer.accelerator=mps",
    "trainer=ddp": "strategy=ddp trainer.accelerator=gpu trainer.devices=N",
    "trainer=ddp_sim": "strategy=ddp trainer.accelerator=cpu trainer.devices=2",
    "debug=default": "debug=cpu trainer.detect_anomaly=true",
    "debug=fdr": "debug=step, or trainer.fast_dev_run=true",
    "task=fit": "task=train",
    "task=eval": "task=test task.checkpoint=FILE",
    "task=predict": _NOWHERE,
}
# Options of the command line.
_OPTIONS = {
    "--config-name": "experiment=NAME takes conf/experiment/NAME.yaml",
    "-cn": "experiment=NAME takes conf/experiment/NAME.yaml",
    "--config-path": "--config-dir FOLDER, or export DISTDL_CONF=FOLDER",
    "-cp": "--config-dir FOLDER, or export DISTDL_CONF=FOLDER",
    "--config": "experiment=NAME takes conf/experiment/NAME.yaml",
    "--ckpt_path": _START,
    "--experimental-rerun": "python -m distdl resume RUN",
    "--print_config": "--cfg job",
    "--run": "python -m distdl key=value ... starts a run",
}
# Verbs of others.
_VERBS = {
    **dict.fromkeys(("train", "fit", "run", "launch", "start"), "python -m distdl {}"),
    **dict.fromkeys(("test", "eval", "evaluate"), "python -m distdl resume RUN task=test"),
    **dict.fromkeys(("validate", "val"), "python -m distdl resume RUN task=validate"),
    "predict": _NOWHERE,
    "sweep": "python -m distdl -m {}",
    "multirun": "python -m distdl -m {}",
    "list": "python -m distdl jobs list",
    "logs": "python -m distdl jobs logs RUN",
    "status": "python -m distdl jobs status RUN",
    "cancel": "python -m distdl jobs cancel RUN",
}


def for_key(key: str, value: Any = None) -> str:
    """What to write instead of a key like `hydra.run.dir`; "" for one that nobody has."""
    name, _, rest = key.partition(".")
    if name in ("logger", "loggers"):  # `logger=wandb`, `logger.wandb.group=x`
        asked, _, argument = rest.partition(".")
        if option := for_component("tracking", asked or str(value)):
            option = option.replace("[mlflow,", "").rstrip("]")
            return f"{option} tracking.{rest}=..." if argument else option
    for collection in ("callbacks", "tracking"):  # `early_stopping.patience`
        if option := for_component(collection, name):
            return f"{option} {collection}.{key}=..." if rest else option
    while key and key not in _KEYS:
        key = key.rpartition(".")[0] if "." in key else key.rpartition("/")[0]
    return _KEYS.get(key, "")


def for_choice(group: str, option: str) -> str:
    """What to write instead of `trainer=gpu`; "" for an option that nobody has."""
    ours = strategy_for(option) if group in ("trainer", "strategy") else ""
    rest = ours or (_SIZE if group == "trainer" else _KEYS.get(f"{group}.{option}", ""))
    return _CHOICES.get(f"{group}={option}", rest)


def for_component(collection: str, name: str) -> str:
    """How to choose an option beside the default one; "" if distdl has none of the name."""
    if not files("distdl.conf").joinpath(collection, f"{name}.yaml").is_file():
        return ""
    first = {"callbacks": "default", "tracking": "mlflow"}[collection]
    return "" if name in (first, "none") else f"{collection}=[{first},{name}]"


def for_option(option: str) -> str:
    """What to write instead of `--config-name` or `--trainer.max_epochs`."""
    name, equals, value = option.partition("=")
    if name in _OPTIONS:
        return _OPTIONS[name]
    if not equals and "." not in name:
        return ""
    return f"values are written without dashes: {name.lstrip('-')}={value or '...'}"


def for_verb(verb: str, rest: Sequence[str]) -> str:
    """What to write instead of `distdl train`; `rest` follows it."""
    verb = "train" if verb.endswith(".py") else verb
    return _VERBS.get(verb, "").format(" ".join(rest) or "experiment=NAME")


def open_brackets(text: str) -> str:
    """What closes the brackets that are open at the end of a text: `]` for `[0.1`."""
    if "'" in text or '"' in text:  # a bracket in quotes is none
        return ""
    closing, waiting = {"[": "]", "{": "}", "(": ")"}, ""
    for letter in text:
        if letter in closing:
            waiting = closing[letter] + waiting
        elif waiting.startswith(letter):
            waiting = waiting[1:]
    return waiting


def whole(words: Sequence[str]) -> tuple[int, str]:
    """How many words the shell made of the first override, and that override: 3 and `seed=3` of
    `seed = 3`, 2 and `a=[1, 2]` of `a=[1,` and `2]`; 1 where a word stands for itself.
    """
    first, *rest = words
    second = rest[0] if rest else ""
    if second == "=" and len(rest) > 1:
        return 3, f"{first}={rest[1]}"
    if "=" not in first and second.startswith("=") and len(second) > 1:
        return 2, first + second
    if first.endswith("=") and second and "=" not in second:
        return 2, first + second
    if "=" in first and open_brackets(first):
        for count in range(2, len(words) + 1):
            if not open_brackets(joined := " ".join(words[:count])):
                return count, joined
    return 1, first
