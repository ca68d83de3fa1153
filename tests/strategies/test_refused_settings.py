"""What validation refuses of a strategy's settings: one table, by the door that a config takes."""

import json

import pytest
import torch
from torch.torch_version import TorchVersion

from distdl.strategies import DeepSpeedStrategy
from distdl.strategies.deepspeed_precision import AutocastPrecision
from distdl.strategies.deepspeed_settings import settings_of
from distdl.util.errors import UserError
from distdl.validation.binding import Binding
from distdl.validation.located import locate
from tests.conftest import ROOT

EMA = {"callbacks": {"ema": {"_target_": "distdl.callbacks.EMAWeightAveraging"}}}
BY_VALUE = {"trainer": {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}}
FP16 = {"trainer": {"precision": "16-mixed"}}
SYNC = {"trainer": {"sync_batchnorm": True}}
CLASSIFIER = {"_target_": "distdl.models.ImageClassifier", "num_classes": 10}
RESNET = {"model": {**CLASSIFIER, "network": {"_target_": "torchvision.models.resnet18"}}}
RECOMPUTED = {"model": {**RESNET["model"], "recompute": "blocks"}}  # not an argument of the class
VIT = {"model": {**CLASSIFIER, "network": {"_target_": "torchvision.models.vit_b_32"}}}
ADAFACTOR = {"optimizer": {"_target_": "torch.optim.Adafactor"}}
LAMB = {"optimizer": {"_target_": "timm.optim.Lamb"}}
GROUPS = {"data_parallel_size": 2}
PLAIN = {"model": {"_target_": "lightning.pytorch.demos.boring_classes.BoringModel"}}


def meshed(kind):
    """A module of tests/strategies/small.py, which divides itself."""
    network = {"_target_": "tests.strategies.small.Wide", "zero_init_residual": False}
    own = {"_target_": f"tests.strategies.small.{kind}", "num_classes": 10}
    return {"model": {**own, "network": {**network, "num_classes": 10}}}


def apart(world):
    return {"world": world, **meshed("Undivided")}


def refused(name, node, world=2, rows=8, **more):
    """(path, what, remedy), paths relative to the strategy's node; `more` is the other config."""
    context = {"world_size": world, "accelerator": "cpu", "local": True}
    strategy = {"_target_": f"distdl.strategies.{name}Strategy", **node}
    config = {"trainer": {}, "data": {"batch_size": rows}, "strategy": strategy, **more}
    trust = [[str(ROOT)], []]
    request = {"config": config, "supplied": {}, "context": context, "trust": trust}
    binding = Binding({**request, "expressions": []})
    target = strategy["_target_"]
    called = locate(target, ("strategy",), binding.trust, binding.findings)
    assert called is not None
    binding.called[("strategy",)] = called
    binding.visit(strategy, ("strategy",))
    return [(p.path[8:].removeprefix("."), p.what, p.remedy) for p in binding.findings.problems]


# One setting: the first value is refused, for this reason; the others are needed for that.
SETTINGS = [
    ("DDP", {"comm_hook": "fp8"}, "'bf16' or"),
    ("DDP", {"hook_start_step": 1, "comm_hook": "powersgd"}, "=2"),
    ("DDP", {"average_every": 1, "comm_hook": "post_local_sgd"}, "=4"),
    ("DDP", {"powersgd_rank": 2, "comm_hook": "bf16"}, "powersgd"),
    ("DDP", {"bucket_cap_mb": 0}, "=25"),
    ("DDP", {"bucket_cap_mb": "auto", "comm_hook": "powersgd"}, "=25"),
    ("DDP", {"ddp_comm_hook": "x", "comm_hook": "bf16"}, "leave one"),
    ("DDP", {"bucket_view": True}, "takes no argument"),
    ("LocalSGD", {"sync_every": 0}, "at least 1"),
    ("LocalSGD", {"outer_lr": 0.5}, "nesterov"),
    ("LocalSGD", {"outer_momentum": 1.0, "outer": "nesterov"}, "=0.9"),
    ("DeepSpeed", {"stage": 4}, "2 or 3"),
    ("DeepSpeed", {"offload_parameters": True}, "strategy.stage=3"),
    ("DeepSpeed", {"config": "nowhere.json"}, "no such file: nowhere.json"),
    ("Pipeline", {"stages": 1}, "at least two stages"),
    ("Pipeline", {"micro_batches": 1}, "1 are too few for 2 stages"),
    ("Pipeline", {"micro_batches": 3}, "=8 does not divide into 3"),
    ("Pipeline", {"pieces_per_stage": 1, "schedule": "interleaved"}, "at least two"),
    ("Pipeline", {"balance": "measurd"}, "strategy.balance=measured?"),
    ("Pipeline", {"balance": "evenly"}, "=[network.layer3.0]"),
]
NINE = {"schedule": "interleaved", "pieces_per_stage": 9}
ROUNDS = {"schedule": "interleaved", "micro_batches": 5}
# Of the strategy with other parts of the config.
TOGETHER = [
    ("DDP", {"bucket_cap_mb": "auto"}, {"model": {"compile": True}}, "bucket_cap_mb", "=25"),
    ("LocalSGD", {}, FP16, "", "bf16-mixed"),
    ("LocalSGD", {}, SYNC, "", "sync_batchnorm=false"),
    ("FSDP", {}, FP16, "", "precision=bf16-mixed"),
    ("FSDP", {}, EMA, "", "zero2"),
    ("DeepSpeed", {"stage": 3}, EMA, "", "callbacks.ema averages full weights"),
    ("DeepSpeed", {}, BY_VALUE, "", "gradient_clip_algorithm=norm"),
    ("DeepSpeed", {}, SYNC, "", "sync_batchnorm=false"),
    ("Pipeline", {}, {"world": 1}, "", "at least two devices"),
    # One sample in each of four would not divide either, for a batch norm.
    ("Pipeline", {}, {"rows": 4}, "micro_batches", "micro_batches=2, or data.batch_size=16"),
    ("Pipeline", {}, {"rows": 2}, "micro_batches", "micro-batches data.batch_size=16"),
    ("Pipeline", ROUNDS, {"rows": 10}, "micro_batches", "equal rounds"),
    ("Pipeline", NINE, RESNET, "pieces_per_stage", "at most strategy.pieces_per_stage=5"),
    ("Pipeline", {}, FP16, "", "fp16"),
    ("Pipeline", {}, SYNC, "", "batch norm"),
    ("Pipeline", {"balance": ["network.layer9.0"]}, RESNET, "balance", "layer9"),
    ("Pipeline", {}, {"world": 16, "rows": 64, **RESNET}, "stages", "than the 11"),
    ("Pipeline", {}, {"world": 16, "rows": 64, **RECOMPUTED}, "stages", "than the 11"),
    ("Pipeline", {}, VIT, "", "cannot be divided into a chain of blocks"),
    ("Pipeline", {}, PLAIN, "", "no pipeline_blocks()"),
    ("ModelParallel", {}, {"world": 1}, "", "at least two devices"),
    ("ModelParallel", {}, FP16, "", "precision=bf16-mixed"),
    ("ModelParallel", {}, SYNC, "", "sync_batchnorm=false"),
    ("ModelParallel", {}, EMA, "", "callbacks.ema averages full weights"),
    ("ModelParallel", {}, ADAFACTOR, "", "Adafactor computes something of whole layers"),
    ("ModelParallel", {}, LAMB, "", "optimizer.max_grad_norm=null"),
    ("ModelParallel", {}, PLAIN, "", "BoringModel does not parallelise itself"),
    ("ModelParallel", {}, RESNET, "", "write a configure_model that calls parallelize"),
    ("ModelParallel", GROUPS, apart(4), "", "no gradients of 15 parameters"),
]


@pytest.mark.parametrize(
    ("name", "node", "more", "path", "words"),
    [*((name, node, {}, next(iter(node)), words) for name, node, words in SETTINGS), *TOGETHER],
)
def test_refused(name, node, more, path, words):
    ((result, what, remedy),) = refused(name, node, **more)
    assert result == path
    assert words in f"{what} {remedy}"


def test_accepted():
    for name, node, more in (
        ("DDP", {"comm_hook": "post_local_sgd", "hook_start_step": 0, "average_every": 16}, {}),
        ("DDP", {"comm_hook": "bf16", "bucket_cap_mb": "auto"}, {"model": {"compile": False}}),
        ("LocalSGD", {"outer": "nesterov", "outer_lr": 0.4, "outer_momentum": 0.8}, {}),
        ("DeepSpeed", {"stage": 2}, EMA),
        ("Pipeline", {"schedule": "gpipe", "stages": 2, "micro_batches": 4}, {"world": 4}),
        ("Pipeline", {"schedule": "interleaved", "stages": 2, "micro_batches": 4}, {"world": 4}),
        ("ModelParallel", {"tensor_parallel_size": 2}, {"world": 4, **meshed("Meshed")}),
        ("ModelParallel", {}, meshed("Undivided")),  # one group, which averages with no other
    ):
        assert refused(name, node, **more) == [], (name, node)


def test_slices_are_not_for_everyone(command):
    result = command("strategy=ddp", "checkpoint.sharded=true", "dry_run=true")
    assert result.code == 2
    assert "checkpoint.sharded: DDPStrategy writes each checkpoint as one file" in result.err


def test_zero_bubble_needs_a_torch_that_splits_the_backward(monkeypatch):
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cu130"))
    ((path, what, remedy),) = refused("Pipeline", {"schedule": "zero_bubble"})
    assert path == "schedule"
    assert remedy == "strategy.schedule=interleaved"
    assert "torch 2.14 or later, and this is an older one" in what
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.14.0"))
    assert refused("Pipeline", {"schedule": "zero_bubble"}) == []


def test_a_file_of_deepspeeds_settings(tmp_path):
    file = tmp_path / "ds.json"
    for text, words in {
        '{"gradient_accumulation_steps": 4}': "write trainer.accumulate_grad_batches=",
        # DeepSpeed would compile its own for minutes.
        '{"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}': "write optimizer=adamw",
        "{": "is not JSON",
        "[]": "is not a JSON object",
    }.items():
        file.write_text(text)
        ((path, what, remedy),) = refused("DeepSpeed", {"config": str(file)})
        assert path == "config"
        assert words in f"{what} {remedy}"
    # What is "auto", as in files for Hugging Face's Trainer, is left out.
    zero = {"stage": 2, "overlap_comm": False, "reduce_bucket_size": "auto"}
    settings = {"zero_optimization": zero, "train_batch_size": "auto", "bf16": {"enabled": "auto"}}
    file.write_text(json.dumps(settings))
    assert settings_of(file) == {"zero_optimization": {"stage": 2, "overlap_comm": False}}


def test_what_deepspeed_lacks_here(monkeypatch):
    precision = AutocastPrecision("32-true")
    precision.clip_gradients(None, 1.0)  # the Trainer's is in DeepSpeed's settings
    precision.optimizes_manually = True
    with pytest.raises(UserError, match="gradient_clipping"):
        precision.clip_gradients(None, 1.0)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    context = {"local": True, "accelerator": "cpu", "config": {"trainer": {}}}
    (problem,) = DeepSpeedStrategy.check({}, context)
    assert problem.remedy == "pip install 'distdl[deepspeed]'"
    with pytest.raises(UserError, match="DeepSpeed is not installed"):
        DeepSpeedStrategy()
