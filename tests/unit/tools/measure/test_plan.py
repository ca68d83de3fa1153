"""The verb `plan`: formulas against numbers by hand, the measured step against a real one."""

import re

import pytest
import torch
from omegaconf import OmegaConf
from pytest import approx
from torch.utils._pytree import tree_leaves

from distdl.config import compose
from distdl.tools.measure import estimate
from distdl.tools.measure.estimate import GIB, Estimate, Machine, by_strategy, estimates
from distdl.tools.measure.measured_step import MeasuredBlock, MeasuredStep
from distdl.tools.measure.plan import fast_path, how_many
from distdl.tools.measure.recommendation import advise
from distdl.tools.measure.step_profile import measure
from distdl.util.errors import UserError
from distdl.worker.build import make
from tests.conftest import RESNET18

# 7.5 billion parameters in 16 bit with Adam's 12 bytes each: figure 1 of the ZeRO paper, in GB.
ZERO = {"weights": 15, "gradients": 15, "optimizer": 90, "activations": 30, "transient": 2}


def machine(devices=8, memory=16, link=1e11, flops=5e13):
    return Machine(devices, memory * GIB, link, flops)


def rows(measured, devices):
    return by_strategy(estimates(measured, machine(devices)))


def test_the_zero_papers_figure(monkeypatch):
    """64 ranks: 120, 31.4, 16.6 and 1.9 GB. DeepSpeed steps on a copy of its part: 15 / 64 more."""
    measured = MeasuredStep(batch_size=8, unit=1, **ZERO)
    buffers = rows(measured, 64)
    assert buffers["ddp"].other == 0
    assert buffers["fsdp"].other == 3
    assert buffers["deepspeed_zero2"].other == 2 * 4 * 200_000_000
    offload = buffers["deepspeed_offload"]
    assert offload.gradients == offload.optimizer == 0
    assert offload.host == (15 + 15 + 90) / 64
    monkeypatch.setattr(estimate, "DEEPSPEED_BUCKET", 0)
    by_name = rows(measured, 64)
    model = {name: row.weights + row.gradients + row.optimizer for name, row in by_name.items()}
    assert model["ddp"] == 120
    assert model["deepspeed_zero1"] - 15 / 64 == 15 + 15 + 90 / 64 == approx(31.4, abs=0.05)
    assert model["deepspeed_zero2"] == 15 + 15 / 64 + 90 / 64 + 15 / 64
    assert model["fsdp"] == (15 + 15 + 90) / 64 == approx(1.9, abs=0.05)
    assert model["deepspeed_zero3"] == (15 + 15 + 90 + 15) / 64
    assert all(row.activations == 32 for row in by_name.values() if not row.missing)


def test_bytes_sent_and_the_time_that_they_take():
    """Four ranks, gradients of 400 bytes, buffers of 40: 2 x 3/4 x 400, and so on."""
    by_name = rows(MeasuredStep(4, weights=440, buffers=40, gradients=400, unit=100), 4)
    sent = {"single": 0, "ddp": 600 + 30, "ddp comm_hook=bf16": 300 + 30}
    partitioned = ("zero1", "zero2", "zero3", "offload")  # an all-reduce, and the weights
    sent |= {f"deepspeed_{name}": 900 for name in partitioned} | {"fsdp": 900}
    assert {name: by_name[name].sent for name in sent} == sent
    # Frozen weights are not partitioned: of 100 bytes 40 are trained.
    frozen = MeasuredStep(1, weights=100, gradients=40, optimizer=40, unit=10)
    assert rows(frozen, 4)["fsdp"].weights == 60 + 40 / 4
    # DDP's backward, two thirds of a second, hides as much sending.
    on = Machine(2, 1, link=8e9, flops=1e12)
    measured = MeasuredStep(1, flops=1e12)
    assert Estimate("ddp", sent=0.5e9).seconds(measured, on) == 1.0
    assert Estimate("ddp", sent=1e9).seconds(measured, on) == approx(1 + 1 / 3)
    assert Estimate("pipeline", overlap=1.0, idle=0.5).seconds(measured, on) == 2.0


def blocks(*sizes):
    """Of weights, activations, output."""
    return [MeasuredBlock(w, w, activations, output, flops=1.0) for w, activations, output in sizes]


def test_a_pipeline_of_two():
    """Batches of 10 on two devices: 20 samples in 8 micro-batches, of which stage 0 holds two."""
    sizes = {"weights": 30, "gradients": 30, "optimizer": 60, "activations": 1200, "transient": 80}
    measured = MeasuredStep(10, **sizes, flops=6.0, blocks=blocks((10, 800, 50), (20, 400, 5)))
    row = estimate.pipeline(measured, 2)
    # One micro-batch is a quarter of a device's batch. Stage 0: 2 x 800 / 4; stage 1: 400 / 4.
    assert row.activations == 2 * 800 / 4 + 80 / 4
    assert (row.weights, row.gradients, row.optimizer) == (10, 10, 20)
    assert row.sent == 50 * 2  # one way each, the whole pipeline's batch
    assert row.idle == approx(1 / 9)  # (p - 1) / (m + p - 1) of the time
    short = MeasuredStep(1, blocks=blocks((1, 1, 1)))
    branched = MeasuredStep(1, no_blocks="a fork")
    assert estimate.pipeline(short, 2).missing == "1 blocks for 2 stages"
    assert estimate.pipeline(branched, 2).missing == "a fork"


def model(gib, activations, **more):
    """Weights, gradients and momentum of `gib` GiB each; a step of one second."""
    size = int(gib * GIB)
    fields = {"flops": 5e13, "unit": size // 10, **more}
    return MeasuredStep(8, size, 0, size, size, activations=int(activations * GIB), **fields)


ACCUMULATE = "trainer.accumulate_grad_batches="
SINGLE = "strategy=single"
DDP = "strategy=ddp"
CUT = ("data.batch_size=4", f"{ACCUMULATE}2")
HOOKED = (DDP, "strategy.comm_hook=bf16")
LARGE_UNIT = {"unit": 6 * GIB, "blocks": blocks(*[(5 * GIB // 2, GIB // 8, GIB // 100)] * 8)}
SMALL_BLOCKS = {"blocks": blocks(*[(GIB // 4, GIB // 4, GIB // 10_000)] * 8)}
ADVICE = [
    (model(1, 4), machine(1), (SINGLE,), ""),
    (model(1, 20), machine(1), (SINGLE, *CUT), ""),
    (model(6, 4), machine(1), ("strategy=deepspeed_offload", *CUT), ""),
    (model(20, 4), machine(1), (), ""),
    (model(1, 30), machine(), (DDP, "data.batch_size=2", f"{ACCUMULATE}4"), "save nothing"),
    # 5 GiB x 3 are too many for 16, and 15 / 8 and three units are not.
    (model(5, 4), machine(), ("strategy=fsdp",), ""),
    (model(400, 2), machine(), (), "no strategy fits"),
    # 2 GiB of gradients; 7/8 of them twice: 30 Gbit in each step of a second.
    (model(2, 2), machine(link=40e9), (DDP,), ""),
    (model(2, 2), machine(link=20e9), HOOKED, ""),
    # Two thirds of 15 Gbit stay; alone the step of eight devices takes eight seconds.
    (model(2, 2), machine(link=5e9), HOOKED, "strategy.sync_every=32, about 1.2 s"),
    (model(2, 2), machine(link=1e9), (SINGLE, "trainer.devices=1", f"{ACCUMULATE}8"), ""),
    (model(2, 16), machine(link=20e9), (*HOOKED, *CUT), ""),
    # Too small for several devices.
    (model(0.001, 0.001, flops=1e9), machine(), (SINGLE, "trainer.devices=1"), ""),
    # One unit is too large to gather.
    (model(20, 1, **LARGE_UNIT), machine(), ("strategy=pipeline",), ""),
    (model(2, 2, **SMALL_BLOCKS), machine(link=1e9), ("strategy=pipeline",), "bubble"),
]


@pytest.mark.parametrize("measured, on, expected, reason", ADVICE)
def test_advice(measured, on, expected, reason):
    advice = advise(measured, estimates(measured, on), on)
    assert advice.overrides == expected
    assert reason in advice.reason


def tiny(*overrides):
    config = compose.compose([*RESNET18, *overrides])
    config.pop("hydra")
    return config


def saved_bytes(config):
    """What autograd keeps of a real step on the CPU, and the batch: independent of our counter."""
    data, module = make(config.data), make(config.model)
    batch = data.on_after_batch_transfer(next(iter(data.train_dataloader())), 0)
    ignored = {t.untyped_storage()._cdata for t in (*module.parameters(), *module.buffers())}
    kept = {}
    tensors = []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in ignored:
            kept[storage._cdata] = storage.nbytes()
            tensors.append(tensor)  # an address must not be used twice
        return tensor

    mixed = torch.autocast("cpu", torch.bfloat16, enabled=config.trainer.precision == "bf16-mixed")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), mixed:
        module.training_step(batch, 0)
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor):
            pack(leaf)
    return sum(kept.values())


@pytest.mark.parametrize("precision, norm", [("32-true", "group"), ("bf16-mixed", "batch")])
def test_the_step_is_measured_as_a_real_one(precision, norm):
    """11.18 million parameters with ten classes; GroupNorm has no buffers."""
    config = tiny(f"trainer.precision={precision}", f"model.norm={norm}", "data.batch_size=16")
    measured = measure(config, 16)
    assert not measured.notes
    assert measured.activations == approx(saved_bytes(config), rel=0.01)
    assert measured.gradients == measured.optimizer == 4 * 11_181_642
    assert measured.weights == measured.gradients + measured.buffers
    assert (measured.buffers == 0) == (norm == "group")
    assert sum(block.weights for block in measured.blocks) == measured.weights
    kept = sum(block.activations for block in measured.blocks)
    assert kept == approx(measured.activations, rel=0.1)


OWN_STEPS = """
from distdl.models import ImageClassifier
class Looks(ImageClassifier):
    def training_step(self, batch, **more):  # without the batch's number, as Lightning allows
        assert float(batch['image'].abs().sum()) > 0
        return super().training_step(batch, 0)
class Fails(ImageClassifier):
    def training_step(self, batch, batch_idx):
        return self(batch['picture'])
"""


def test_a_step_that_reads_values_is_run_and_scaled(tmp_path, monkeypatch):
    (tmp_path / "own_steps.py").write_text(OWN_STEPS)
    monkeypatch.syspath_prepend(str(tmp_path))
    plain = measure(tiny("data.batch_size=32", "optimizer=adamw"), 32)
    own = ("model._target_=own_steps.Looks", "optimizer=adamw")
    scaled = measure(tiny("data.batch_size=32", *own), 32)
    assert "measured on the CPU" in scaled.notes[0]
    assert scaled.activations == approx(plain.activations, rel=0.001)
    assert scaled.weights == plain.weights
    assert scaled.optimizer == plain.optimizer == 2 * plain.gradients
    assert scaled.flops == approx(plain.flops, rel=0.01)
    with pytest.raises(UserError, match="training step fails here: KeyError: 'picture'"):
        measure(tiny("model._target_=own_steps.Fails"), 8)


NAMES = ("single", "ddp", "deepspeed_zero3", "fsdp", "deepspeed_offload")
SHOWN = (
    "deepspeed_offload: 31.99 MiB of host memory",
    "MiB on the fullest device",
    "single: 4 batches, accumulated",
    "advice  strategy=ddp",
    "on      4 devices of 1 GiB",
)


def test_the_verb(command, without_stage_2, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "150")
    slow = ("--tflops", "0.001")  # or eight images are nothing, and the link a reason
    result = command("plan", *RESNET18, "--devices", "4", "--device-memory", "1", *slow)
    assert result.code == 0, result.err
    for text in (*SHOWN, *(f"\n{name}" for name in NAMES)):
        assert text in result.out
    rows = [line.split() for line in result.out.splitlines()]
    (staged,) = [row for row in rows if row[:1] == ["pipeline"]]
    assert not {"0.00", "0.0"} & {*staged[1:5]}, staged
    step = {row[0]: row[-1] for row in rows if "yes" in row}
    assert float(step["single"]) == approx(4 * float(step["ddp"]), rel=0.01)
    assert not list(tmp_path.iterdir())
    refused = {"--devices=0": "--devices: must be more than 0", "lrr=1": "did you mean"}
    for word, message in refused.items():
        result = command("plan", *RESNET18, word)
        assert result.code == 2
        assert message in result.err


def test_recomputing_is_counted_and_proposed(command, without_stage_2):
    """For a batch that does not fit, with what it costs."""
    large = ("data.batch_size=512", "data.train_samples=512")
    typed = ("plan", *RESNET18, *large, "--devices=1", "--device-memory=0.3")
    before = command(*typed)
    assert before.code == 0, before.err
    proposed = before.out[before.out.index("or      model.recompute=blocks") :]
    found = re.search(
        r"single then takes (\S+) \S+ instead of (\S+), .*, for (\d+)% more", proposed
    )
    after, plain, work = map(float, found.groups())
    assert after < 0.8 * plain
    assert 15 < work < 35  # a forward is a third of a step, and its start and end are no blocks
    again = command(*typed, "model.recompute=auto")
    said = " ".join(again.out.split())
    assert f"model.recompute=auto is blocks: single takes {plain / 1024:.3g} of 0.3 GiB" in said
    (single,) = [line.split() for line in again.out.splitlines() if line.startswith("single ")]
    assert float(single[6]) == approx(after, rel=0.01)
    assert "or      model" not in again.out


def test_what_compiling_and_one_device_change_is_said():
    one = machine(devices=1)
    two = machine(devices=2)
    compiled, plain = (OmegaConf.create({"model": {"compile": c}}) for c in ("auto", False))
    assert fast_path(OmegaConf.create({"model": {}}), two) == []
    (note,) = fast_path(compiled, two)
    assert note.startswith("model.compile=auto: computed as not compiled")
    first, second = fast_path(plain, one)
    assert first.startswith("model.compile=false: with auto")
    assert second.startswith("ddp: on one device it has no wrapper")


def test_how_many_devices(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert how_many({"devices": 4, "num_nodes": 2}, None) == (8, "")
    assert how_many({"devices": [0, 2]}, None) == (2, "")
    assert "(set --devices)" in how_many({"devices": "auto"}, None)[1]
