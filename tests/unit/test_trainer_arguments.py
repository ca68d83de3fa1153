"""What Lightning's Trainer takes can be given under `trainer.`, in Lightning's forms and names."""

from __future__ import annotations

import inspect
import re
from collections import defaultdict

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import StrategyRegistry
from sample_config import check_parts, problems, rows
from torch.optim import SGD, Adam

from distdl.callbacks.metrics import rates
from distdl.config import compose, words
from distdl.config.words import strategy_for

# All that plain Lightning takes, and distdl does not own.
TAKEN = """
devices=2 devices="2" devices=-1 devices='-1' devices=auto accelerator=auto accelerator=cpu
precision=16 precision=32 precision=64 precision=bf16 precision="16" precision="32"
precision=16-mixed precision=bf16-mixed precision=16-true precision=bf16-true precision=32-true
precision=64-true precision=null num_nodes=1 fast_dev_run=true fast_dev_run=3 max_epochs=null
max_epochs=-1 max_steps=5 min_epochs=2 min_steps=3 max_time=00:12:00:00 max_time="00:12:00:00"
max_time={hours:1} max_time={minutes:0.5} limit_train_batches=3 limit_train_batches=0.5
limit_val_batches=0 limit_test_batches=1.0 limit_predict_batches=1 overfit_batches=2
overfit_batches=0.1 val_check_interval=4 val_check_interval=0.5 val_check_interval=00:00:10:00
val_check_interval={minutes:10} check_val_every_n_epoch=2 num_sanity_val_steps=2
num_sanity_val_steps=-1 log_every_n_steps=5 log_every_n_steps=null enable_model_summary=true
accumulate_grad_batches=4 gradient_clip_val=1 gradient_clip_val=0.5 gradient_clip_algorithm=value
deterministic=true deterministic=warn benchmark=true inference_mode=false profiler=simple
profiler=advanced profiler=pytorch detect_anomaly=true reload_dataloaders_every_n_epochs=1
use_distributed_sampler=false enable_autolog_hparams=false
max_time={_target_:datetime.timedelta,seconds:100}
val_check_interval={_target_:datetime.timedelta,seconds:100}
profiler={_target_:lightning.pytorch.profilers.SimpleProfiler}
""".split()  # noqa: SIM905
REFUSED = """
accelerator=tpu | must be 'auto', 'cpu', 'gpu', 'cuda' or 'mps'
devices=0 | must be a number of devices
precision=fp8 | must be 32-true,
precision=transformer-engine | needs the package transformer_engine
max_time=12:00:00 | trainer.max_time: Lightning refuses it: MisconfigurationException
max_time={minute:1} | 'minute' is an invalid keyword
limit_train_batches=1.5 | trainer.limit_train_batches: Lightning refuses it
val_check_interval=0 | must be greater than
val_check_interval=soon | Expected 'DD:HH:MM:SS'
val_check_interval=0.5 trainer.check_val_every_n_epoch=null | check_val_every_n_epoch
profiler=fast | trainer.profiler: Lightning refuses it
profiler=true | must be a string or a mapping
fast_dev_run=-1 | greater than or equal to 0
barebones=true | task=benchmark
model_registry=mine | litmodels
logger=true | tracking=mlflow
callbacks=[] | +callbacks.<name>._target_
plugins=x | trainer.precision
default_root_dir=x | output_dir=FOLDER
enable_progress_bar=true | callbacks.progress=null
enable_checkpointing=false | checkpoint.*
strategy=ddp_spawn | strategy=ddp
"""


def refused(override: str) -> str:
    overrides = ["trainer.accelerator=cpu", *f"trainer.{override}".split()]
    return "\n".join(map(str, problems({"trainer": compose.compose(overrides).trainer})))


@pytest.mark.parametrize("override", TAKEN)
def test_what_lightning_takes_is_taken(override) -> None:
    assert refused(override) == ""
    assert not torch.are_deterministic_algorithms_enabled(), "asked about, and not done"


@pytest.mark.parametrize(("override", "parts"), rows(REFUSED))
def test_what_is_refused_says_why(override, parts) -> None:
    check_parts(refused(override), parts)


def test_every_argument_is_in_the_tables() -> None:
    wrong = {typed.split("=")[0] for typed, _ in rows(REFUSED)}
    known = {typed.split("=")[0] for typed in TAKEN} | wrong
    known.add("sync_batchnorm")  # planning asks whether there is a GPU
    assert inspect.signature(pl.Trainer).parameters.keys() <= known
    assert words.TRAINER_OWNED.keys() <= wrong


DEVICES = {'"2"': 2, '"0,1"': [0, 1], '"3,"': [3], '"-1"': -1, "auto": "auto"}


def test_texts_of_devices() -> None:
    for text, devices in DEVICES.items():
        assert compose.compose([f"trainer.devices={text}"]).trainer.devices == devices


def test_lightnings_names_of_strategies_lead_to_options_of_ours(command) -> None:
    names = set(StrategyRegistry.available_strategies())
    assert len(names) > 20
    with compose.hydra_session():
        options = compose.group_options("strategy")
    for name in sorted(names):
        ours = strategy_for(name)
        assert bool(ours) != bool(re.search("xla|tpu|nvme", name))
        first, *rest = [word for word in ours.split(",")[0].split() if "=" in word] or [""]
        if first:
            assert first.partition("=")[2] in options
            compose.compose([first, *rest])  # the keys are the option's
            section = compose.compose([first]).strategy
            keys = [word.partition("=")[0].removeprefix("strategy.") for word in rest]
            assert "ddp" in ours or all(key in section for key in keys)
    for typed in ("strategy=", "trainer.strategy=", "+trainer.strategy="):
        output = command(f"{typed}ddp_find_unused_parameters_true")
        assert output.code == 2
        assert "strategy=ddp strategy.find_unused_parameters=true" in output.err


def test_a_strategys_words() -> None:
    assert strategy_for("ddp_notebook") == strategy_for("dp") == "strategy=ddp"
    assert strategy_for("fsdp_cpu_offload") == "strategy=fsdp strategy.offload=true"
    offload = "strategy=deepspeed_offload strategy.stage=3"
    assert strategy_for("deepspeed_stage_3_offload").startswith(offload)
    assert strategy_for("nobodys") == ""


def optimizer(cls, *rates, **more):
    return cls([{"params": [torch.zeros(1)], "lr": rate, **more} for rate in rates])


def test_names_of_rates_are_those_of_the_monitor() -> None:
    assert rates([]) == {}
    assert rates([optimizer(SGD, 0.1)]) == {"lr": 0.1}
    assert rates([optimizer(SGD, 0.1, 0.1, reference_lr=0.1)]) == {"lr": 0.1}
    several = [optimizer(SGD, 0.1, 0.2), optimizer(Adam, 0.3), optimizer(Adam, 0.4)]
    named = rates(several)
    assert named.pop("lr") == 0.1
    monitor = pl.callbacks.LearningRateMonitor()
    names, _ = monitor._find_names_from_optimizers(several, [], defaultdict(int))
    assert sorted(named) == sorted(name for group in names for name in group)
    assert list(named.values()) == [0.1, 0.2, 0.3, 0.4]
