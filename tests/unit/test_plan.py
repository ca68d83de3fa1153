"""The verb `plan`: formulas against numbers by hand, the measured step against a real one."""

from __future__ import annotations

from typing import Any

import pytest

from distdl.benchmark.step_profile import MeasuredBlock, MeasuredStep, measure
from distdl.planner import estimate
from distdl.planner.estimate import GIB, Estimate, Machine, estimates
from distdl.planner.recommendation import advise
from tests.conftest import TINY

# 7.5 billion parameters in 16 bit with Adam's 12 bytes each: figure 1 of the ZeRO paper, in GB.
ZERO = MeasuredStep(
    batch_size=8, weights=15, gradients=15, optimizer=90, activations=30, transient=2, unit=1
)


def machine(
    devices: int = 8, memory: float = 16, link: float = 1e11, flops: float = 5e13
) -> Machine:
    return Machine(devices, memory * GIB, link, flops)


def rows(found: MeasuredStep, on: Machine) -> dict[str, Estimate]:
    return {row.name: row for row in estimates(found, on)}


def test_the_zero_paper_s_figure(monkeypatch) -> None:
    """64 ranks: 120, 31.4, 16.6 and 1.9 GB. DeepSpeed steps on a copy of its part: 15 / 64 more."""
    monkeypatch.setattr(estimate, "DEEPSPEED_BUCKET", 0)
    found = rows(ZERO, machine(64))

    def model(name: str) -> float:
        row = found[name]
        return row.weights + row.gradients + row.optimizer

    assert model("ddp") == 120
    assert model("deepspeed_zero1") == 15 + 15 + 90 / 64 + 15 / 64
    assert model("deepspeed_zero1") - 15 / 64 == pytest.approx(31.4, abs=0.05)
    assert model("deepspeed_zero2") == 15 + 15 / 64 + 90 / 64 + 15 / 64
    assert model("fsdp") == (15 + 15 + 90) / 64 == pytest.approx(1.9, abs=0.05)
    assert model("deepspeed_zero3") == (15 + 15 + 90 + 15) / 64
    assert all(row.activations == 32 for row in found.values() if not row.missing)


def test_buffers_of_the_strategies() -> None:
    found = rows(ZERO, machine(64))
    assert found["ddp"].other == 0  # gradients live in the buckets
    assert found["deepspeed_zero2"].other == 2 * 4 * 200_000_000
    assert found["fsdp"].other == 3
    assert found["deepspeed_offload"].gradients == found["deepspeed_offload"].optimizer == 0
    assert found["deepspeed_offload"].host == (15 + 15 + 90) / 64


def test_bytes_sent() -> None:
    """Four ranks, gradients of 400 bytes, buffers of 40: 2 x 3/4 x 400, and so on."""
    found = rows(MeasuredStep(4, weights=440, buffers=40, gradients=400, unit=100), machine(4))
    assert found["single"].sent == 0
    assert found["ddp"].sent == 600 + 30
    assert found["ddp comm_hook=bf16"].sent == 300 + 30
    for name in ("deepspeed_zero1", "deepspeed_zero2", "deepspeed_offload"):
        assert found[name].sent == 600 + 300  # an all-reduce, and the weights
    for name in ("deepspeed_zero3", "fsdp"):
        assert found[name].sent == 900


def test_frozen_weights_are_shared_by_nobody() -> None:
    """100 bytes of which 40 are trained."""
    found = rows(MeasuredStep(1, weights=100, gradients=40, optimizer=40, unit=10), machine(4))
    assert found["fsdp"].weights == 60 + 40 / 4


def blocks(*sizes: tuple[int, int, int]) -> list[MeasuredBlock]:
    return [
        MeasuredBlock(weights, weights, activations, output, flops=1.0)
        for weights, activations, output in sizes
    ]


def test_a_pipeline_of_two() -> None:
    """Batches of 10 on two devices: 20 samples in 8 micro-batches, of which stage 0 holds two."""
    found = MeasuredStep(
        10, weights=30, gradients=30, optimizer=60, activations=1200, transient=80, flops=6.0
    )
    found.blocks = blocks((10, 800, 50), (20, 400, 5))
    row = estimate.pipeline(found, 2)
    # One micro-batch is a quarter of a device's batch. Stage 0: 2 x 800 / 4; stage 1: 400 / 4.
    assert row.activations == 2 * 800 / 4 + 80 / 4
    assert (row.weights, row.gradients, row.optimizer) == (10, 10, 20)
    assert row.sent == 50 * 2  # one way each, the whole pipeline's batch
    # (p - 1) / (m + p - 1) of the time
    assert row.idle == pytest.approx(1 / 9)


def test_a_pipeline_needs_a_block_per_stage() -> None:
    found = MeasuredStep(1, blocks=blocks((1, 1, 1)))
    assert estimate.pipeline(found, 2).missing == "1 blocks for 2 stages"
    assert (
        estimate.pipeline(MeasuredStep(1, no_blocks="is not a chain"), 2).missing
        == "is not a chain"
    )


def test_time_counts_what_cannot_hide() -> None:
    """One second of work; DDP hides two thirds of a second behind its backward."""
    found = MeasuredStep(1, flops=1e12)
    on = Machine(2, 1, link=8e9, flops=1e12)
    assert Estimate("ddp", sent=0.5e9).seconds(found, on) == 1.0
    assert Estimate("ddp", sent=1e9).seconds(found, on) == pytest.approx(1 + 1 / 3)
    assert Estimate("pipeline", overlap=1.0, idle=0.5).seconds(found, on) == 2.0


# ------------------------------------------------------------------------------------ advice


def model(gib: float, activations: float, batch: int = 8, **more: object) -> MeasuredStep:
    """Weights, gradients and momentum of `gib` GiB each; a step of one second."""
    size = int(gib * GIB)
    fields: dict[str, Any] = {"flops": 5e13, "unit": size // 10, **more}
    return MeasuredStep(batch, size, 0, size, size, activations=int(activations * GIB), **fields)


ACCUMULATE = "trainer.accumulate_grad_batches="
HOOKED = ("strategy=ddp", "strategy.comm_hook=bf16")
CUT = ("data.batch_size=4", f"{ACCUMULATE}2")


@pytest.mark.parametrize(
    ("found", "on", "expected"),
    [
        (model(1, 4), machine(1), ("strategy=single",)),
        (model(1, 20), machine(1), ("strategy=single", *CUT)),
        (model(6, 4), machine(1), ("strategy=deepspeed_offload", *CUT)),
        (model(20, 4), machine(1), ()),
        (model(1, 8), machine(), ("strategy=ddp",)),
        (model(1, 30), machine(), ("strategy=ddp", "data.batch_size=2", f"{ACCUMULATE}4")),
        # 5 GiB x 3 are too many for 16, and 15 / 8 and three units are not.
        (model(5, 4), machine(), ("strategy=fsdp",)),
        (model(14, 2), machine(), ("strategy=fsdp",)),
        (model(400, 2), machine(), ()),
        # 2 GiB of gradients; 7/8 of them twice: 30 Gbit in each step of a second.
        (model(2, 2), machine(link=40e9), ("strategy=ddp",)),
        (model(2, 2), machine(link=20e9), HOOKED),
        # Two thirds of 15 Gbit stay; alone the step of eight devices takes eight seconds.
        (model(2, 2), machine(link=5e9), HOOKED),
        (
            model(2, 2),
            machine(link=1e9),
            ("strategy=single", "trainer.devices=1", f"{ACCUMULATE}8"),
        ),
        (model(2, 16), machine(), ("strategy=ddp", *CUT)),
        (model(2, 16), machine(link=20e9), (*HOOKED, *CUT)),
        # Too small for several devices.
        (
            model(0.001, 0.001, flops=1e9),
            machine(),
            ("strategy=single", "trainer.devices=1"),
        ),
        # One unit is too large to gather.
        (
            model(20, 1, unit=6 * GIB, blocks=blocks(*[(5 * GIB // 2, GIB // 8, GIB // 100)] * 8)),
            machine(),
            ("strategy=pipeline",),
        ),
        (
            model(2, 2, blocks=blocks(*[(GIB // 4, GIB // 4, GIB // 10_000)] * 8)),
            machine(link=1e9),
            ("strategy=pipeline",),
        ),
    ],
)
def test_advice(found: MeasuredStep, on: Machine, expected: tuple[str, ...]) -> None:
    assert advise(found, estimates(found, on), on).overrides == expected


def test_reasons() -> None:
    many, slow = model(1, 30), model(2, 2)
    assert "save nothing" in advise(many, estimates(many, machine()), machine()).reason
    on = machine(link=5e9)
    reason = advise(slow, estimates(slow, on), on).reason
    assert "strategy=local_sgd strategy.sync_every=32, about 1.2 s" in reason


# --------------------------------------------------------------------------- the measured step


@pytest.fixture(scope="module")
def tiny():
    from distdl.config import compose

    def config(*overrides: str):
        composed = compose.compose([*TINY, *overrides])
        composed.pop("hydra")
        return composed

    return config


def saved_bytes(config, size: int) -> tuple[int, int]:
    """What autograd keeps of a real step on the CPU, and the batch: independent of our counter."""
    import torch
    from torch.utils._pytree import tree_leaves

    from distdl.worker.build import make

    config = config.copy()
    config.data.batch_size = size
    data, module = make(config.data), make(config.model)
    batch = data.on_after_batch_transfer(next(iter(data.train_dataloader())), 0)
    own = {t.untyped_storage()._cdata for t in (*module.parameters(), *module.buffers())}
    kept: dict[int, int] = {}
    tensors = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage.nbytes()
            tensors.append(tensor)  # an address must not be used twice
        return tensor

    mixed = str(config.trainer.precision) == "bf16-mixed"
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
        torch.autocast("cpu", torch.bfloat16, enabled=mixed),
    ):
        module.training_step(batch, 0)
    inputs = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes()
        for t in tree_leaves(batch)
        if isinstance(t, torch.Tensor)
    }
    return sum(kept.values()), sum(v for k, v in inputs.items() if k not in kept)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("norm", ["group", "batch"])
def test_activations_are_those_of_a_real_step(tiny, precision, norm) -> None:
    config = tiny(f"trainer.precision={precision}", f"model.norm={norm}", "data.batch_size=16")
    found = measure(config, 16)
    kept, inputs = saved_bytes(config, 16)
    assert not found.notes
    assert found.activations == pytest.approx(kept + inputs, rel=0.01)


def test_weights_and_optimizer_of_resnet18(tiny) -> None:
    """11.18 million parameters with ten classes; GroupNorm has no buffers."""
    parameters = 11_181_642
    sgd = measure(tiny(), 8)
    assert sgd.weights == sgd.gradients == sgd.optimizer == 4 * parameters
    assert sgd.buffers == 0
    adam = measure(tiny("optimizer=adamw"), 8)
    assert adam.optimizer == 2 * 4 * parameters
    assert sum(block.weights for block in sgd.blocks) == sgd.weights
    assert sum(block.activations for block in sgd.blocks) == pytest.approx(sgd.activations, rel=0.1)


def test_a_step_that_looks_at_values_is_run_and_scaled(tiny, tmp_path, monkeypatch) -> None:
    (tmp_path / "looks.py").write_text(
        "from distdl.models import ImageClassifier\n"
        "class Looks(ImageClassifier):\n"
        "    def training_step(self, batch, batch_idx):\n"
        "        assert float(batch['image'].abs().sum()) > 0\n"
        "        return super().training_step(batch, batch_idx)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    plain = measure(tiny("data.batch_size=32"), 32)
    looked = measure(tiny("data.batch_size=32", "model._target_=looks.Looks"), 32)
    assert "measured on the CPU" in looked.notes[0]
    assert looked.activations == pytest.approx(plain.activations, rel=0.001)
    assert looked.weights == plain.weights and looked.optimizer == plain.optimizer
    assert looked.flops == pytest.approx(plain.flops, rel=0.01)


def test_a_step_that_fails_is_named(tiny, tmp_path, monkeypatch) -> None:
    from distdl.util.errors import UserError

    (tmp_path / "fails.py").write_text(
        "from distdl.models import ImageClassifier\n"
        "class Fails(ImageClassifier):\n"
        "    def training_step(self, batch, batch_idx):\n"
        "        return self(batch['picture'])\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match="training step fails here: KeyError: 'picture'"):
        measure(tiny("model._target_=fails.Fails"), 8)


# ------------------------------------------------------------------------------------ the verb


def test_the_verb(capsys, without_stage_2, monkeypatch, tmp_path) -> None:
    from distdl.cli.plan import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "150")
    slow = ("--tflops", "0.001")  # or eight images are nothing, and the link a reason
    assert main([*TINY, "--devices", "4", "--device-memory", "1", *slow]) == 0
    out = capsys.readouterr().out
    assert "deepspeed_offload: 31.99 MiB of host memory" in out
    assert "MiB on the fullest device" in out and "single: 4 batches, accumulated" in out
    (staged,) = [line for line in out.splitlines() if line.startswith("pipeline ")]
    assert not {"0.00", "0.0"} & set(staged.split()[1:5]), staged
    step = {line.split()[0]: line.split()[-1] for line in out.splitlines() if " yes " in line}
    assert float(step["single"]) == pytest.approx(4 * float(step["ddp"]), rel=0.01)
    for name in ("single", "ddp", "deepspeed_zero3", "fsdp", "pipeline", "deepspeed_offload"):
        assert f"\n{name}" in out, out
    assert "advice  strategy=ddp" in out
    assert "on      4 devices of 1 GiB" in out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--devices", "0"], "--devices: must be more than 0"),
        (["--device-memory", "-1"], "--device-memory"),
        (["trainer.devices=2", "lrr=1"], "did you mean"),
    ],
)
def test_refusals(words, said, without_stage_2, monkeypatch, tmp_path) -> None:
    from distdl.cli.plan import main
    from distdl.util.errors import UserError

    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=said):
        main([*TINY, *words])


@pytest.mark.parametrize(
    ("trainer", "given", "count"),
    [
        ({"devices": 4, "num_nodes": 2}, None, 8),
        ({"devices": [0, 2]}, None, 2),
        ({"devices": 4}, 16, 16),
        ({"devices": "auto"}, None, 8),
    ],
)
def test_how_many_devices(trainer, given, count, monkeypatch) -> None:
    from distdl.planner.strategies import how_many

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found, note = how_many(trainer, given)
    assert found == count
    assert bool(note) == (trainer["devices"] == "auto")
