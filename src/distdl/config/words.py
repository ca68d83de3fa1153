"""What users of Hydra, lightning-hydra-template or LightningCLI type, and what to write instead."""

from __future__ import annotations

import itertools
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from distdl.config import user_conf
from distdl.util.errors import Problem, UserError
from distdl.util.redact import redact
from distdl.util.suggest import closest, nearest

_RUN_FOLDER = "output_dir=FOLDER is the folder of all runs, name=NAME the folder of this one in it"
_START = "checkpoint.resume_from=FILE continues from it, task=test task.checkpoint=FILE tests it"
_SWEEP = "a sweep is -m and several values: -m optimizer.lr=0.1,0.01"
_BEST = "checkpoint.monitor=METRIC checkpoint.mode=max"
_SIZE = "trainer.accelerator=cpu or gpu, trainer.devices=N, strategy=ddp"

PLAIN = re.compile(r"\s*[\w./:@%+-]*\s*")  # an item of a list that needs no quotes


def table(text: str) -> dict[str, str]:
    """Parses lines of `name other_name: what to write instead` into a dict by name."""
    rows = [line.strip().partition(": ") for line in text.strip().splitlines()]
    return {name: instead for names, _, instead in rows for name in names.split()}


# Keys, or the sections that contain them. Trainer arguments have their own tables.
_KEYS = table(f"""
    hydra/launcher: launcher=slurm (--help lists them); a sweep on any of them: -m
    hydra/sweeper hydra.sweeper hparams_search: {_SWEEP}
    hydra.launcher: launcher.<argument>=...
    hydra.run hydra.sweep: {_RUN_FOLDER}
    hydra.output_subdir: the composed config is always kept, as the run's config.yaml
    hydra.job: experiment_name=NAME and name=NAME name a run; the current folder never changes
    hydra: distdl writes its own logs and folders; only hydra.searchpath has an effect
    ckpt_path resume_from_checkpoint: {_START}
    logger loggers wandb comet neptune clearml mlflow tensorboard csv: tracking=NAME (--help lists \
them); several: tracking=[mlflow,tensorboard]
    seed_everything: seed=N
    task_name: experiment_name=NAME
    optimized_metric: {_BEST} chooses best.ckpt
    train test: choose one: task=train, task=validate or task=test
    paths.data_dir: data.root=FOLDER, or the argument of your own class
    paths: output_dir=FOLDER for the runs, data.root=FOLDER for the data
    extras: tags=[...] labels a run; its config is always kept
    print_config: --cfg job prints it
    checkpoint.save_last: the newest N are always kept: checkpoint.keep_last=N
    checkpoint.dirpath: checkpoints are in the run's folder: {_RUN_FOLDER}
    checkpoint.filename: distdl names the files; name=NAME names the run's folder
    callbacks.model_summary: trainer.enable_model_summary=true
    lr_scheduler scheduler: schedule=NAME and schedule.<argument>=...
    dataset datamodule: data=NAME and data.<argument>=...
    gpu gpus n_gpu n_gpus ngpus num_gpus nproc_per_node num_devices: trainer.devices=N
    num_processes world_size: trainer.devices=N
    nnodes n_nodes: trainer.num_nodes=N
    epoch epochs n_epochs num_epochs num_train_epochs: trainer.max_epochs=N
    steps num_steps iterations max_iters: trainer.max_steps=N
    grad_clip clip_grad clip max_grad_norm gradient_clip: trainer.gradient_clip_val=...
    accumulate grad_accum gradient_accumulation_steps: trainer.accumulate_grad_batches=N
    workers nworkers: data.num_workers=N
    data_dir data_path data_root dataset_path: data.root=FOLDER
    wd l2: optimizer.weight_decay=...
    optim opt: optimizer=NAME
    exp config config_name recipe: experiment=NAME
    device cuda use_gpu use_cuda: trainer.accelerator=gpu or cpu, trainer.devices=N
    warmup warmup_steps: schedule.warmup_epochs=N
    out output save_dir log_dir out_dir work_dir default_root_dir: output_dir=FOLDER
    run_name exp_name project_name: experiment_name=NAME and name=NAME
    resume resume_run: python -m distdl resume RUN
    checkpoint.save_top_k model_checkpoint callbacks.model_checkpoint: {_BEST}, \
checkpoint.keep_last=N
    callbacks.rich_progress_bar: +callbacks.bar._target_=lightning.pytorch.callbacks.RichProgressBar
    fp16 bf16 amp half dtype mixed_precision: trainer.precision=16-mixed, bf16-mixed or 32-true
    bs bsz train_batch_size per_device_train_batch_size: data.batch_size=N, per device
    lr learning_rate base_lr max_lr: optimizer.lr=..., or model.lr=... where the model makes the \
optimizer itself
""")
# Arguments of the Trainer that distdl sets itself.
TRAINER_OWNED = {
    "logger": "choose loggers by the group tracking: tracking=mlflow, tracking=csv",
    "callbacks": "add callbacks under callbacks: +callbacks.<name>._target_=package.Class",
    "plugins": "choose the precision by trainer.precision, the rest by the group strategy",
    "strategy": "choose the strategy by its group: strategy=ddp",
    "default_root_dir": "choose the folder of all runs by output_dir=FOLDER",
    "enable_progress_bar": "the bar is shown on a terminal; callbacks.progress=null removes it",
    "enable_checkpointing": "choose what is saved by checkpoint.*",
    "model_registry": "add litmodels' callback, which uploads: +callbacks.<name>._target_=...",
    "barebones": "task=benchmark measures training steps alone",
}
# Lightning's names of strategies, as its messages and documents use them. The ways to start ddp
# (spawn, fork, notebook) make no difference here: each rank is its own process.
_STRATEGIES = {
    r"dp|ddp(_spawn|_fork|_notebook)?(_find_unused_parameters_false)?": "ddp",
    r"ddp_((spawn|fork|notebook)_)?find_\w+_true": "ddp strategy.find_unused_parameters=true",
    "fsdp": "fsdp",
    "fsdp_cpu_offload": "fsdp strategy.offload=true",
    "single_device": "single",
    r"deepspeed(_stage_2)?": "deepspeed_zero2",
    r"deepspeed_stage_([13])": r"deepspeed_zero\1",
    "deepspeed_stage_2_offload": "deepspeed_offload",
    "deepspeed_stage_3_offload": "deepspeed_offload strategy.stage=3 "
    "strategy.offload_parameters=true",
}
# The names that other libraries give to precisions.
_PRECISIONS = {
    r"(float|fp|f)?16|half|amp|mixed|16-mix\w*": "16-mixed or bf16-mixed, with weights of 32 bit",
    r"bf(loat)?16(-mix\w*)?": "bf16-mixed, with weights of 32 bit, or bf16-true",
    r"t?(float|fp|f)?32|full|single|float|high(est)?": "32-true",
    r"(float|fp|f)?64|double": "64-true",
}
# An experiment or debug file without `# @package _global_`: what is wrong, and the remedy.
NOT_GLOBAL = (
    "its keys would be nested below it, not beside model and data",
    "make its first line: # @package _global_",
)
# Options of groups.
_CHOICES = table("""
    trainer=cpu: trainer.accelerator=cpu
    trainer=gpu: trainer.accelerator=gpu trainer.devices=1
    trainer=mps: trainer.accelerator=mps
    trainer=ddp: strategy=ddp trainer.accelerator=gpu trainer.devices=N
    trainer=ddp_sim: strategy=ddp trainer.accelerator=cpu trainer.devices=2
    debug=default: debug=cpu trainer.detect_anomaly=true
    debug=fdr: debug=step, or trainer.fast_dev_run=true
    task=fit: task=train
    task=eval: task=test task.checkpoint=FILE
    tracking=neptune: Neptune was shut down, and Lightning's logger for it only raises: \
tracking=wandb, comet or clearml
""")
# Options of the command line.
_OPTIONS = table(f"""
    --config-name -cn --config: experiment=NAME takes conf/experiment/NAME.yaml
    --config-path -cp: --config-dir FOLDER, or export DISTDL_CONF=FOLDER
    --ckpt_path: {_START}
    --experimental-rerun --resume: python -m distdl resume RUN
    --debug: debug=cpu
    --print_config: --cfg job
    --run: python -m distdl key=value ... starts a run
""")
# Other tools' verbs. {} stands for the words that follow.
_VERBS = table("""
    train fit run launch start: python -m distdl {}
    test eval evaluate: python -m distdl resume RUN task=test
    validate val: python -m distdl resume RUN task=validate
    predict: python -m distdl resume RUN task=predict data.root=FOLDER
    sweep multirun: python -m distdl -m {}
    list: python -m distdl jobs list
    logs: python -m distdl jobs logs RUN
    status: python -m distdl jobs status RUN
    cancel: python -m distdl jobs cancel RUN
""")


def strategy_for(name: str) -> str:
    """What to write instead of `ddp_find_unused_parameters_true`; "" for an unknown name."""
    for pattern, ours in _STRATEGIES.items():
        if match := re.fullmatch(pattern, name.lower()):
            return f"strategy={match.expand(ours)}"
    return ""


def precision_for(name: str) -> str:
    """What to write instead of `trainer.precision=fp16`; "" for an unknown name."""
    name = name.lower().removeprefix("torch.").replace("_", "-")
    ours = (ours for pattern, ours in _PRECISIONS.items() if re.fullmatch(pattern, name))
    return next((f"write trainer.precision={each}" for each in ours), "")


def for_key(key: str, value: Any = None, config: Mapping[str, Any] | None = None) -> str:
    """What to write instead of a key like `hydra.run.dir`; "" for an unknown key.

    `config` is the resolved config, if it is known already.
    """
    key = "early_stopping.patience" if key == "patience" else key
    name, _, rest = key.partition(".")
    if name in ("logger", "loggers"):  # `logger=wandb`, `logger.wandb.group=x`
        logger, _, argument = rest.partition(".")
        if for_component("tracking", logger := logger or str(value)):
            return f"tracking={logger}" + (f" tracking.{rest}=..." if argument else "")
    for collection in ("callbacks", "tracking"):  # `early_stopping.patience`
        if option := for_component(collection, name, config):
            return f"{option} {collection}.{key}=..." if rest else option
    while key and key not in _KEYS:
        key = key.rpartition(".")[0] if "." in key else key.rpartition("/")[0]
    return _KEYS.get(key, "")


def for_choice(group: str, option: str) -> str:
    """What to write instead of `trainer=gpu`; "" for an unknown option."""
    ours = strategy_for(option) if group in ("trainer", "strategy") else ""
    rest = ours or (_SIZE if group == "trainer" else _KEYS.get(f"{group}.{option}", ""))
    return _CHOICES.get(f"{group}={option}", rest)


def for_component(collection: str, name: str, config: Mapping[str, Any] | None = None) -> str:
    """How to add an option to those of the config; "" if distdl has no option of that name."""
    shipped = files("distdl.conf").joinpath(collection, f"{name}.yaml").is_file()
    if not shipped or name in ("none", {"callbacks": "default", "tracking": "mlflow"}[collection]):
        return ""
    return f"{collection}=[{','.join([*_chosen(collection, config), name])}]"


def _chosen(collection: str, config: Mapping[str, Any] | None) -> list[str]:
    """The options of a collection that the config uses, found by the keys in the option files.
    Keys that are in no option file are ignored."""
    options: dict[str, set[str]] = {}
    for folder in _folders():
        for file in folder.glob(f"{collection}/*.yaml"):
            for key in re.findall(r"^(\w+):", file.read_text(errors="replace"), re.MULTILINE):
                options.setdefault(key, set()).add(file.stem)
    section = (config or {}).get(collection)
    nodes = section.items() if isinstance(section, Mapping) else ()
    chosen = [key for key, node in nodes if isinstance(node, Mapping) and "_target_" in node]
    names = [options[key] for key in chosen if key in options]
    if config is None or any(len(several) > 1 for several in names):
        return ["<those you have>"]
    return [*dict.fromkeys(name for (name,) in names)]


def _folders() -> list[Path]:
    return [Path(str(files("distdl.conf"))), *user_conf.folders()]


def for_option(option: str, known: Iterable[str], following: str = "") -> str:
    """What to write instead of `--config-name` or `--max_epochs=3`; "" for an unknown option.

    `known` are all keys of the config; `following` is the next word, which may be its value.
    """
    name, equals, value = option.partition("=")
    if not equals and "=" not in following and not following.startswith("-"):
        value = following
    if name in _OPTIONS:
        return _OPTIONS[name]
    key = name.lstrip("-").replace("-", "_")
    if not (meant := for_key(key)):
        names = [key] if key in (known := [*known]) else nearest(key, known)
        if not names and not equals and "." not in key:
            return ""
        meant = f"{names[0] if names else key}={value or '...'}"
    return f"values are written without dashes: {meant}"


def for_verb(verb: str, rest: Sequence[str]) -> str:
    """What to write instead of `distdl train`; `rest` follows it."""
    ours = _VERBS.get("train" if verb.endswith(".py") else verb, "")
    return ours.format(" ".join(rest) or "experiment=NAME")


def for_experiment(word: str, rest: Sequence[str]) -> str:
    """What to write instead of `distdl ours`; "" if there is no experiment of that name."""
    name = re.sub(r"^(.*/)?experiment/|\.ya?ml$", "", word)
    if not any((folder / f"experiment/{name}.yaml").is_file() for folder in _folders()):
        return ""
    return " ".join(["python -m distdl", f"experiment={name}", *rest])


def for_override(text: str, error: str) -> str:
    """What to write instead of an override that Hydra's grammar refuses with this error."""
    key, equals, value = text.partition("=")
    if not equals or text.startswith("~"):
        return "write key=value, +key=value, group=option or ~key"
    if missing := open_brackets(value):
        return f"it lacks {missing}: {redact(repr(text.rstrip(', ') + missing))}"
    if (typed := meant(text)) != text:
        return f"write {redact(shlex.quote(typed))}"
    if value.startswith(("{", '"', "'")):  # a mapping, or quoted already
        return redact(error)
    quoted = quoted_items(value) or '"{}"'.format(value.replace('"', '\\"'))
    return redact(f"{error}\n    quote a text with special characters: '{key}={quoted}'")


def quoted_items(value: str) -> str:
    """A list whose items are quoted where Hydra wants it: `[a,"b[1-2]"]` for `[a,b[1-2]]`; empty if
    the value is no list, or has quotes already."""
    if not re.fullmatch(r"\[[^'\"]*\]", value):
        return ""
    items = re.findall(r"(?:[^],[]|\[[^]]*\])+", value[1:-1])  # a comma in brackets parts none
    texts = [item if PLAIN.fullmatch(item) else f'"{item.strip()}"' for item in items]
    return f"[{','.join(texts)}]"


def open_brackets(text: str) -> str:
    """The closing brackets that a text without quotes lacks: `]` for `[0.1`."""
    closing, waiting = {"[": "]", "{": "}", "(": ")"}, ""
    for letter in text if not {"'", '"'} & {*text} else "":  # those inside quotes do not count
        if letter in closing:
            waiting = closing[letter] + waiting
        elif waiting.startswith(letter):
            waiting = waiting[1:]
    return waiting


def first_override(words: Sequence[str]) -> tuple[int, str]:
    """The number of words into which the shell split the first override, and that override.

    `seed = 3` gives 3 and `seed=3`; `a=[1,` `2]` gives 2 and `a=[1, 2]`; a complete word gives 1.
    """
    first, *rest = words
    second = rest[0] if rest else ""
    if second in _SIGNS and len(rest) > 1:
        return 3, f"{first}={rest[1]}"
    if "=" not in first and second.startswith(("=", ":=")) and second not in _SIGNS:
        return 2, f"{first}={second.lstrip(':=')}"
    if first.endswith(("=", ":")) and second and "=" not in second:
        return 2, f"{first.rstrip(':=')}={second}"
    if "=" in first and _is_open(first):
        until = itertools.takewhile(lambda word: "=" not in word, rest)  # the next override
        for count, _ in enumerate(until, 2):
            if not _is_open(joined := " ".join(words[:count])):
                return count, joined
    elif "=" in first and first.endswith(",") and second and "=" not in second:
        count, joined = first_override([first + second, *rest[1:]])  # a sweep's `lr=0.1, 0.2, 0.3`
        return count + 1, joined
    return 1, first


_KEY = re.compile(r"[a-z_]\w*(\.\w+)*")
_SIGNS = ("=", ":", "==", ":=")
# Quotes, dashes and spaces as word processors and web pages write them.
_QUOTES = "\u201c\u201d\u201e\u201f\u00ab\u00bb\u2018\u2019\u201a"
_DASHES, _SIGNS_WIDE = "\u2010\u2011\u2012\u2013\u2014\u2212", "\u00a0\u3000\uff1d\uff1a\uff0c"
_TYPESET = str.maketrans(
    _QUOTES + _DASHES + _SIGNS_WIDE, '"' * len(_QUOTES) + "-" * 6 + "  =:,", "\u200b\ufeff"
)


def _is_open(text: str) -> bool:
    return bool(open_brackets(text)) or sum(letter in _QUOTES for letter in text) % 2 == 1


def is_quoted(text: str) -> bool:
    """Whether a text contains quotes, including typographic ones."""
    return any(letter in text for letter in f"'\"{_QUOTES}")


def meant(word: str) -> str:
    """A word as it should have been typed; unchanged if nothing is wrong with it.

    `seed : 4` and `seed==4` become `seed=4`, typographic signs plain ones, `~/x` becomes
    `/home/me/x`."""
    text = word.translate(_TYPESET).strip()
    if text.startswith("-"):
        name = text.lstrip("-")
        return text if word.startswith("-") else f"{'-' if len(name) == 1 else '--'}{name}"
    key, sign, value = text.partition("=")
    if not sign:
        key, sign, value = text.partition(":")
        if not sign or value[:1] in ("", "/", "\\"):  # a URL or a Windows drive
            return text
    key = re.sub(r"[\s,:.()\[\]]+", ".", key).strip(".")
    value = value.lstrip("=").strip().strip(",;")
    if value[:1] in ('"', "'") and word[-1] != value[0] == value[-1]:  # typographic quotes
        value = value[1:-1]
    return f"{key}={os.path.expanduser(value)}"


def check(words: Sequence[str], commands: Iterable[str] = ()) -> None:
    """Checks overrides as the shell passed them, before they are parsed: refuses, by a UserError,
    words without `=`. These are misspelt or other tools' verbs (if there are `commands`), or a part
    of an override that the shell split."""
    problems, left, commands = [], list(words), [*commands]
    while left:
        count, override = first_override(left)
        word, left = left[0], left[count:]
        if (count == 1 and "=" in word[1:]) or word.startswith("~"):
            continue
        typed, close = meant(override), closest(word, commands)
        if left and left[0].replace(".", "", 1).isdigit():  # a value, and no command takes one
            close = ""
        verb = for_verb(word, left) or (for_experiment(word, left) if count == 1 else "")
        what, remedy, last = "is not an override", "write key=value, or group=option", False
        if count > 1:
            what, word = "the shell splits it into several words", typed
            remedy = f"write {shlex.quote(typed)}"
        elif typed != word and ("=" in typed or typed.startswith("-")):
            remedy, last = f"write {shlex.quote(typed)}", typed.startswith("-")
        elif not (verb or close) and left and "=" not in left[0] and _KEY.fullmatch(word):
            remedy = f"write {shlex.quote(f'{word}={left.pop(0)}')}"
        elif commands:
            what, last = "is neither a command nor an override", bool(close or verb)
            known = f"write key=value, or begin with a command: {', '.join(commands)}"
            remedy = verb or (f"did you mean: python -m distdl {close}" if close else known)
        problems.append(Problem(word, what, remedy))
        if last:
            break  # what follows are that command's arguments, or the option's value
    if problems:
        raise UserError(*problems)
