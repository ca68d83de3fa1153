"""What validation refuses of a strategy's settings: one table, by the door that a config takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

from distdl.strategies import DeepSpeedStrategy
from distdl.strategies.deepspeed_precision import AutocastPrecision
from distdl.strategies.deepspeed_settings import settings_of
from distdl.util.errors import UserError
from distdl.validation.child import Binding

Problems = list[tuple[str, str, str]]
EMA = {"callbacks": {"ema": {"_target_": "distdl.callbacks.EMAWeightAveraging"}}}
TWICE = {"_target_": "distdl.models.ImageClassifier", "num_classes": 10}
MODELS = {
    "resnet": {**TWICE, "network": {"_target_": "torchvision.models.resnet18"}},
    "vit": {**TWICE, "network": {"_target_": "torchvision.models.vit_b_32"}},
    "plain": {"_target_": "lightning.pytorch.demos.boring_classes.BoringModel"},
}


def refused(name: str, node: dict[str, Any], **more: Any) -> Problems:
    """(path, what, remedy), paths relative to the strategy node.

    Args:
        name: Of the class, without "Strategy".
        node: Its arguments.
        more: The rest of the config; `world`: devices, `rows`: data.batch_size.
    """
    context = {"world_size": more.pop("world", 2), "accelerator": "cpu", "local": True}
    data = {"batch_size": more.pop("rows", 8)}
    strategy = {"_target_": f"distdl.strategies.{name}Strategy", **node}
    if isinstance(more.get("model"), str):
        more["model"] = MODELS[more["model"]]
    config = {"trainer": {}, "data": data, "strategy": strategy, **more}
    binding = Binding(
        {"config": config, "supplied": {}, "context": context, "trust": [[], []], "expressions": []}
    )
    binding.called[("strategy",)] = binding.locate(strategy["_target_"], ("strategy",))
    binding.visit(strategy, ("strategy",))
    return [(p.path[8:].removeprefix("."), p.what, p.remedy) for p in binding.problems]


INTERLEAVED = {"schedule": "interleaved", "micro_batches": 5}
BY_VALUE = {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}


@pytest.mark.parametrize(
    ("name", "node", "more", "path", "words"),
    [
        ("DDP", {"comm_hook": "fp8"}, {}, "comm_hook", "'bf16' or"),
        ("DDP", {"comm_hook": "powersgd", "powersgd_rank": 0}, {}, "powersgd_rank", "at least 1"),
        ("DDP", {"comm_hook": "powersgd", "hook_start_step": 1}, {}, "hook_start_step", "=2"),
        ("DDP", {"comm_hook": "post_local_sgd", "average_every": 1}, {}, "average_every", "=4"),
        ("DDP", {"comm_hook": "bf16", "powersgd_rank": 2}, {}, "powersgd_rank", "powersgd"),
        ("DDP", {"average_every": 8}, {}, "average_every", "post_local_sgd"),
        ("DDP", {"bucket_cap_mb": 0}, {}, "bucket_cap_mb", "=25"),
        ("DDP", {"first_bucket_mb": 0}, {}, "first_bucket_mb", "above 0"),
        ("DDP", {"comm_hook": "powersgd", "bucket_cap_mb": "auto"}, {}, "bucket_cap_mb", "=25"),
        ("DDP", {"comm_hook": "bf16", "ddp_comm_hook": "x"}, {}, "ddp_comm_hook", "none"),
        ("DDP", {"bucket_cap_mb": "auto"}, {"model": {"compile": True}}, "bucket_cap_mb", "=25"),
        ("DDP", {"bucket_cap_mb": "auto"}, {"model": {"compile": "x"}}, "bucket_cap_mb", "=25"),
        ("DDP", {"static_graph": "maybe"}, {}, "static_graph", "must be true or false"),
        ("DDP", {"gradient_as_bucket_view": 7}, {}, "gradient_as_bucket_view", "true or false"),
        ("DDP", {"process_group_backend": 3}, {}, "process_group_backend", "a string or null"),
        ("DDP", {"bucket_view": True}, {}, "bucket_view", "takes no argument"),
        ("LocalSGD", {"sync_every": 0}, {}, "sync_every", "at least 1"),
        ("LocalSGD", {"outer": "adam"}, {}, "outer", "nesterov"),
        ("LocalSGD", {"outer_lr": 0.5}, {}, "outer_lr", "nesterov"),
        ("LocalSGD", {"outer": "nesterov", "outer_lr": 0}, {}, "outer_lr", "above 0"),
        ("LocalSGD", {"outer": "nesterov", "outer_momentum": 1.0}, {}, "outer_momentum", "=0.9"),
        ("LocalSGD", {}, {"trainer": {"precision": "16-mixed"}}, "", "bf16-mixed"),
        ("LocalSGD", {}, {"trainer": {"sync_batchnorm": True}}, "", "sync_batchnorm=false"),
        ("FSDP", {"min_parameters": 0}, {}, "min_parameters", "at least 1"),
        ("FSDP", {}, {"trainer": {"precision": "16-mixed"}}, "", "precision=bf16-mixed"),
        ("FSDP", {}, EMA, "", "zero2"),
        ("DeepSpeed", {"stage": 4}, {}, "stage", "2 or 3"),
        ("DeepSpeed", {"stage": 3}, EMA, "", "callbacks.ema averages whole weights"),
        ("DeepSpeed", {"offload_parameters": True}, {}, "offload_parameters", "strategy.stage=3"),
        ("DeepSpeed", {}, {"trainer": BY_VALUE}, "", "gradient_clip_algorithm=norm"),
        ("DeepSpeed", {}, {"trainer": {"sync_batchnorm": True}}, "", "sync_batchnorm=false"),
        ("DeepSpeed", {"config": "nowhere.json"}, {}, "config", "no such file: nowhere.json"),
        ("Pipeline", {}, {"world": 1}, "", "at least two devices"),
        ("Pipeline", {"stages": 3}, {"world": 4}, "stages", "do not divide the 4 devices"),
        ("Pipeline", {"stages": 1}, {}, "stages", "a pipeline of one stage"),
        ("Pipeline", {"schedule": "gpip"}, {}, "schedule", "'gpipe' or"),
        ("Pipeline", {"across": "racks"}, {}, "across", "'devices' or 'nodes', not 'racks'"),
        ("Pipeline", {"micro_batches": 1}, {}, "micro_batches", "1 are too few for 2 stages"),
        ("Pipeline", {"micro_batches": 3}, {}, "micro_batches", "=8 does not divide into 3"),
        ("Pipeline", {}, {"rows": 12}, "micro_batches", "batch_size=12 does not divide into 8"),
        # One sample in each of four would not divide either, for a batch norm.
        ("Pipeline", {}, {"rows": 4}, "micro_batches", "micro_batches=2, or data.batch_size=16"),
        ("Pipeline", {}, {"rows": 2}, "micro_batches", "micro-batches data.batch_size=16"),
        ("Pipeline", INTERLEAVED, {"rows": 10}, "micro_batches", "equal rounds"),
        (
            "Pipeline",
            {"schedule": "interleaved", "pieces_per_stage": 1},
            {},
            "pieces_per_stage",
            "at least two",
        ),
        ("Pipeline", {"balance": "measurd"}, {}, "balance", "strategy.balance=measured?"),
        ("Pipeline", {"balance": "evenly"}, {}, "balance", "=[network.layer3.0]"),
        (
            "Pipeline",
            {"schedule": "interleaved", "pieces_per_stage": 9},
            {"model": "resnet"},
            "pieces_per_stage",
            "at most strategy.pieces_per_stage=5",
        ),
        ("Pipeline", {}, {"trainer": {"precision": "16-mixed"}}, "", "fp16"),
        ("Pipeline", {}, {"trainer": {"sync_batchnorm": True}}, "", "batch norm"),
        ("Pipeline", {"balance": ["network.layer9.0"]}, {"model": "resnet"}, "balance", "layer9"),
        ("Pipeline", {}, {"world": 16, "rows": 64, "model": "resnet"}, "stages", "than the 11"),
        ("Pipeline", {}, {"model": "vit"}, "", "does not state the blocks"),
        ("Pipeline", {}, {"model": "plain"}, "", "no pipeline_blocks()"),
    ],
)
def test_refused(name: str, node: dict, more: dict, path: str, words: str) -> None:
    ((where, what, remedy),) = refused(name, node, **more)
    assert where == path and words in f"{what} {remedy}"


@pytest.mark.parametrize(
    ("name", "node", "more"),
    [
        ("DDP", {}, {}),
        ("DDP", {"comm_hook": "post_local_sgd", "hook_start_step": 0, "average_every": 16}, {}),
        ("DDP", {"comm_hook": "bf16", "bucket_cap_mb": "auto"}, {}),
        ("DDP", {"bucket_cap_mb": 5}, {"model": {"compile": True}}),
        ("DDP", {"bucket_cap_mb": "auto"}, {"model": {"compile": False}}),
        ("LocalSGD", {}, {}),
        ("LocalSGD", {"outer": "nesterov", "outer_lr": 0.4, "outer_momentum": 0.8}, {}),
        ("FSDP", {"min_parameters": 1}, {}),
        ("DeepSpeed", {"stage": 3}, {}),
        ("DeepSpeed", {"stage": 2}, EMA),
        *(
            ("Pipeline", {"schedule": each, "stages": 2, "micro_batches": 4}, {"world": 4})
            for each in ("gpipe", "1f1b", "interleaved")
        ),
    ],
)
def test_accepted(name: str, node: dict, more: dict) -> None:
    assert refused(name, node, **more) == []


def test_zero_bubble_needs_a_torch_that_splits_the_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cu130"))
    ((path, what, remedy),) = refused("Pipeline", {"schedule": "zero_bubble"})
    assert path == "schedule" and remedy == "strategy.schedule=interleaved"
    assert "torch 2.14 or later, and there is an older one" in what
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.14.0"))
    assert refused("Pipeline", {"schedule": "zero_bubble"}) == []


# --------------------------------------------------------------------------------- of DeepSpeed


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"gradient_accumulation_steps": 4}', "write trainer.accumulate_grad_batches="),
        # As files for Hugging Face's Trainer have it; DeepSpeed would compile its own for minutes.
        ('{"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}', "write optimizer=adamw"),
        ("{", "is not JSON"),
        ("[]", "is not JSON object"),
    ],
)
def test_a_file_of_deepspeeds_settings(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "ds.json"
    file.write_text(text)
    ((path, what, remedy),) = refused("DeepSpeed", {"config": str(file)})
    assert path == "config" and words in f"{what} {remedy}"


def test_what_is_auto_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    zero = {"stage": 2, "overlap_comm": False, "reduce_bucket_size": "auto"}
    settings = {"zero_optimization": zero, "train_batch_size": "auto", "bf16": {"enabled": "auto"}}
    file.write_text(json.dumps(settings))
    assert settings_of(file) == {"zero_optimization": {"stage": 2, "overlap_comm": False}}


def test_deepspeed_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    context = {"local": True, "accelerator": "cpu", "config": {"trainer": {}}}
    (problem,) = DeepSpeedStrategy.check({}, context)
    assert problem.remedy == "pip install 'distdl[deepspeed]'"
    with pytest.raises(UserError, match="DeepSpeed is not installed"):
        DeepSpeedStrategy()


def test_clipping_by_hand_is_not_dropped() -> None:
    precision = AutocastPrecision("32-true")
    precision.clip_gradients(None, 1.0)  # the Trainer's is in DeepSpeed's settings
    precision.by_hand = True
    with pytest.raises(UserError, match="gradient_clipping"):
        precision.clip_gradients(None, 1.0)
