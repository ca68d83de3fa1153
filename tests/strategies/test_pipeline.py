"""strategy=pipeline against one process with the same micro-batches; see pipeline_cases.py.

The ranks of each topology start once and run all its cases.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.torch_version import TorchVersion

from distdl import environment as environments
from distdl.errors import UserError
from distdl.models import ImageClassifier
from distdl.models.blocks import blocks_of
from distdl.strategies.pipeline import balance, checks, splitting
from distdl.strategies.pipeline.place import Place
from tests.conftest import (
    TINY,
    UNCHECKED,
    Background,
    distdl,
    environment,
    last_step,
    losses,
    status,
)
from tests.strategies.pipeline_cases import CASES, run
from tests.warm import Popen

SCRIPT = Path(__file__).with_name("pipeline_cases.py")
PIPELINE = (*TINY, "strategy=pipeline", "trainer.devices=2", "strategy.micro_batches=4")


def run_cases(folder: Path, ranks: int, names: Sequence[str]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    started = []
    for rank in range(ranks):
        variables = {
            "DISTDL_LAUNCHER": "local",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        log = (folder / f"{ranks}-ranks-{rank}.log").open("w")
        process = Popen(
            [sys.executable, str(SCRIPT), str(folder), *names],
            env=environment(PYTHONPATH=str(SCRIPT.parents[2]), **variables),
            stdout=log,
            stderr=log,
        )
        started.append((process, log))
    for process, log in started:
        code = process.wait(200)
        log.close()
        assert code == 0, Path(log.name).read_text()[-4000:]


def run_alone(folder: Path, names: Sequence[str]) -> None:
    """In this process, on one thread as the ranks are: the order of sums depends on it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name in names:
            run(name, CASES[name], environments.resolve({}), folder)
    finally:
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cases of one process and of two ranks."""
    folder = tmp_path_factory.mktemp("pipeline")
    alone = [name for name, case in CASES.items() if case.strategy is None]
    run_alone(folder, [name for name in alone if CASES[name].resume is None])
    two = [n for n, case in CASES.items() if case.strategy and not n.startswith("twice")]
    run_cases(folder, 2, two)
    run_alone(folder, [name for name in alone if CASES[name].resume])
    return folder


@pytest.fixture(scope="module")
def trained_on_four(trained: Path) -> Path:
    run_cases(trained, 4, [n for n in CASES if n.startswith("twice") and CASES[n].strategy])
    return trained


def checkpoint(folder: Path, name: str) -> dict[str, Any]:
    return torch.load(folder / f"{name}.ckpt", weights_only=True)


def tensors(saved: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Weights, averaged weights, running statistics and momentum, by name."""
    found = {f"weight {n}": t for n, t in saved["state_dict"].items()}
    found |= {f"current {n}": t for n, t in saved.get("current_model_state", {}).items()}
    for state in saved["optimizer_states"]:
        for name, values in state["state"].items():
            found |= {f"{k} {name}": v for k, v in values.items() if torch.is_tensor(v)}
    return found


def difference(folder: Path, one: str, other: str) -> float:
    """The largest difference of any number in two checkpoints; 0 is bitwise."""
    left, right = checkpoint(folder, one), checkpoint(folder, other)
    assert list(left["state_dict"]) == list(right["state_dict"])
    for a, b in zip(left["optimizer_states"], right["optimizer_states"], strict=True):
        assert [g["params"] for g in a["param_groups"]] == [g["params"] for g in b["param_groups"]]
        assert [g["lr"] for g in a["param_groups"]] == [g["lr"] for g in b["param_groups"]]
    a, b = tensors(left), tensors(right)
    assert a.keys() == b.keys()
    return max(float((a[n].double() - b[n].double()).abs().max()) for n in a)


def seen(folder: Path, name: str) -> list[tuple[Any, ...]]:
    """Per rank: losses, metrics, where the images were, samples asked for, early buckets."""
    return torch.load(folder / f"{name}.seen", weights_only=True)


@pytest.mark.parametrize(
    "name, other",
    [
        ("gpipe", "alone"),
        ("1f1b", "alone"),
        ("interleaved", "alone"),
        ("zero_bubble", "alone"),
        # bf16-mixed and batch norms, running statistics included; cut by parameters, by time.
        ("resnet", "resnet-alone"),
        ("resnet-measured", "resnet-alone"),
        # 2 steps, then 2 more under the other: equal to 4 under one.
        ("resumed", "alone"),
        ("from-alone", "alone"),
        ("ema-resumed", "ema-alone"),
    ],
)
def test_bitwise_as_one_process_with_the_same_micro_batches(
    trained: Path, name: str, other: str
) -> None:
    assert difference(trained, name, other) == 0


@pytest.mark.parametrize(
    "name, other", [("clipped", "clipped-alone"), ("to-alone", "alone"), ("valid", "valid-alone")]
)
def test_as_one_process_but_for_the_order_of_sums(trained: Path, name: str, other: str) -> None:
    assert difference(trained, name, other) < 1e-6


@pytest.mark.parametrize("name", ["twice", "twice-zero", "twice-accumulated"])
def test_two_pipelines_average_their_gradients(trained_on_four: Path, name: str) -> None:
    assert difference(trained_on_four, name, "twice-alone") < 1e-6


@pytest.mark.parametrize(
    "name, other", [("valid", "valid-alone"), ("valid-interleaved", "valid-alone")]
)
def test_validation_counts_every_sample_once(trained: Path, name: str, other: str) -> None:
    expected = seen(trained, other)[0][1]
    assert expected["val/samples"] == 21
    assert all(each[1] == expected for each in seen(trained, name))


def test_validation_of_two_pipelines_counts_every_sample_once(trained_on_four: Path) -> None:
    expected = seen(trained_on_four, "twice-alone")[0][1]
    for each in seen(trained_on_four, "twice"):
        assert each[1] == pytest.approx(expected) and each[1]["val/samples"] == 21


@pytest.mark.parametrize("name", ["twice-zero", "twice-accumulated"])
def test_gradients_travel_before_the_schedule_ends(trained_on_four: Path, name: str) -> None:
    for each in seen(trained_on_four, name):
        launched, buckets = each[4]
        assert launched == buckets >= (2 if name == "twice-accumulated" else 1)


def test_only_the_first_stage_loads_images(trained: Path) -> None:
    first, last = seen(trained, "1f1b")
    assert (first[2], last[2]) == (["cpu"], ["meta"])
    assert first[3] == 1 + 4 * 8 and last[3] == 0  # one sample to learn the sizes from
    assert first[0] == last[0]  # the loss, which the last stage computes


# ------------------------------------------------------------------ without any process


def problems(**node: Any) -> list[str]:
    world = node.pop("world", 2)
    config = {"data": {"batch_size": node.pop("rows", 8)}, **node.pop("config", {})}
    context = {"world_size": world, "config": config}
    return [f"{p.path}: {p.what} {p.remedy}" for p in checks.check(node, context)]


def test_zero_bubble_needs_a_torch_that_splits_the_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cu130"))
    (said,) = problems(schedule="zero_bubble")
    assert "torch 2.14 or later, and there is an older one" in said
    assert said.startswith("schedule: ") and said.endswith("strategy.schedule=interleaved")
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.14.0"))
    assert problems(schedule="zero_bubble") == []


@pytest.mark.parametrize(
    "settings, path, text",
    [
        ({"world": 1}, "", "at least two devices"),
        ({"world": 4, "stages": 3}, "stages", "3 stages do not divide the 4 devices"),
        ({"stages": 1}, "stages", "a pipeline of one stage"),
        ({"schedule": "gpip"}, "schedule", "there is no 'gpip'"),
        ({"micro_batches": 1}, "micro_batches", "1 are too few for 2 stages"),
        ({"micro_batches": 3}, "micro_batches", "data.batch_size=8 does not divide into 3"),
        ({"rows": 12}, "micro_batches", "data.batch_size=12 does not divide into 8"),
        ({"schedule": "interleaved", "micro_batches": 5, "rows": 10}, "micro_batches", "rounds"),
        ({"schedule": "zero_bubble", "pieces_per_stage": 1}, "pieces_per_stage", "at least two"),
        ({"across": "racks"}, "across", "racks"),
        ({"balance": "measurd"}, "balance", "did you mean strategy.balance=measured?"),
        ({"balance": "evenly"}, "balance", "strategy.balance=[network.layer3.0]"),
        # One sample in each of four would not divide either, for a batch norm.
        ({"rows": 4}, "micro_batches", "strategy.micro_batches=2, or data.batch_size=16"),
        ({"rows": 2}, "micro_batches", "into 8 micro-batches data.batch_size=16"),
        (
            {"schedule": "zero_bubble", "pieces_per_stage": 9, "config": {"model": "resnet"}},
            "pieces_per_stage",
            "at most strategy.pieces_per_stage=5",
        ),
        ({"config": {"trainer": {"precision": "16-mixed"}}}, "", "fp16"),
        ({"config": {"trainer": {"sync_batchnorm": True}}}, "", "batch norm"),
        ({"balance": ["network.layer9.0"], "config": {"model": "resnet"}}, "balance", "layer9"),
        ({"world": 16, "rows": 64, "config": {"model": "resnet"}}, "stages", "more than the 11"),
        ({"config": {"model": "vit"}}, "", "does not state the blocks"),
        ({"config": {"model": "plain"}}, "", "no pipeline_blocks()"),
    ],
)
def test_refused_before_the_start(settings: dict[str, Any], path: str, text: str) -> None:
    models = {
        "resnet": ("distdl.models.ImageClassifier", "torchvision.models.resnet18"),
        "vit": ("distdl.models.ImageClassifier", "torchvision.models.vit_b_32"),
        "plain": ("lightning.pytorch.demos.boring_classes.BoringModel", None),
    }
    config = dict(settings.get("config", {}))
    if "model" in config:
        module, network = models[config["model"]]
        inner = {"network": {"_target_": network}} if network else {}
        config["model"] = {"_target_": module, **inner}
    found = problems(**{**settings, "config": config})
    assert len(found) == 1 and found[0].startswith(f"{path}: ") and text in found[0], found


def test_what_is_right_is_not_refused() -> None:
    for schedule in checks.SCHEDULES:
        assert problems(schedule=schedule, world=4, stages=2, micro_batches=4) == []


def test_the_command_line_refuses_it(tmp_path: Path) -> None:
    done = distdl(*PIPELINE, "strategy.micro_batches=3", "data.batch_size=10", cwd=tmp_path)
    assert done.returncode == 2 and "strategy.micro_batches" in done.stderr + done.stdout
    assert not (tmp_path / "outputs").exists()


def test_one_sample_is_too_few_for_a_batch_norm(tmp_path: Path) -> None:
    """Found before the training, timed or not: at 32 px the last layers have one value each."""
    small = ("model.norm=batch", "strategy.micro_batches=8", "strategy.balance=parameters")
    done = distdl(*PIPELINE, *small, cwd=tmp_path, module=UNCHECKED)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "strategy.micro_batches: batch norm in network.layer4" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert "model.norm=group, or larger micro-batches" in done.stderr


def test_the_slowest_stage_is_as_fast_as_it_can_be() -> None:
    assert balance.partition([1, 1, 1, 1, 4, 1], 2) == [0, 4, 6]
    assert balance.partition([5, 1, 1, 1], 4) == [0, 1, 2, 3, 4]
    # Two pieces each: device 0 has pieces 0 and 2.
    costs = [4.0, 1, 1, 1, 1, 1, 1]
    cuts = balance.even_out(costs, balance.partition(costs, 4), 2)
    loads = [sum(costs[cuts[i] : cuts[i + 1]]) for i in range(4)]
    assert sorted((loads[0] + loads[2], loads[1] + loads[3])) == [5, 5]


def test_the_predicted_bubble() -> None:
    assert balance.bubble("gpipe", [1, 1], 1, 4) == pytest.approx(1 / 5)  # (p-1) / (m+p-1)
    assert balance.bubble("interleaved", [1, 1], 2, 4) == pytest.approx(1 / 9)
    assert balance.bubble("1f1b", [1, 3], 1, 4) == pytest.approx(1 - 16 / 26)


def test_each_rank_has_one_place() -> None:
    near = [Place.of(rank, 4, 2) for rank in range(4)]
    assert [(p.stage, p.replica) for p in near] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    far = [Place.of(rank, 4, 2, "nodes") for rank in range(4)]
    assert [(p.stage, p.replica) for p in far] == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize("model", ["resnet18", "convnext_tiny", "mobilenet_v3_small", "vgg11"])
def test_torchvisions_networks_are_chains(model: str) -> None:
    import torchvision

    assert_chain(getattr(torchvision.models, model)())


@pytest.mark.parametrize("model", ["resnet18", "resnet50d", "seresnet50", "resnetv2_50"])
def test_timms_resnets_are_chains(model: str) -> None:
    import timm

    assert_chain(timm.create_model(model, num_classes=10, drop_rate=0.1))


def assert_chain(network: nn.Module) -> None:
    network.eval()
    x = expected = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        expected = network(expected)
        for _, block in blocks_of(network):
            x = block.eval()(x)
    assert torch.equal(x, expected)


def test_a_split_module_keeps_its_names_and_loads_whole_weights() -> None:
    import torchvision

    module = ImageClassifier(torchvision.models.resnet18(), num_classes=1000)
    full = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    blocks = splitting.blocks_in(module)
    splitting.split(module, blocks, kept=range(4))
    own = module.state_dict()
    assert 0 < len(own) < len(full) and own.keys() <= full.keys()
    with splitting.whole(module):
        assert list(module.state_dict()) == list(full)
    module.load_state_dict({name: torch.ones_like(t) for name, t in full.items()})
    assert all(bool((t == 1).all()) for t in module.state_dict().values())
    with pytest.raises(RuntimeError, match="Missing"):
        module.load_state_dict({n: t for n, t in full.items() if n != next(iter(own))})


def test_a_parameter_outside_the_blocks_is_refused() -> None:
    module = ImageClassifier(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), num_classes=2)
    module.scale = nn.Parameter(torch.ones(1))
    with pytest.raises(UserError, match="scale is in none of the blocks"):
        splitting.blocks_in(module)


# --------------------------------------------------------------------- by the command line


def test_a_signal_stops_it_and_it_goes_on_exactly(tmp_path: Path, background: Any) -> None:
    arguments = (*PIPELINE, "trainer.max_epochs=1", "data.train_samples=80")
    arguments += ("strategy.balance=parameters",)
    whole = distdl(*arguments, "name=whole", cwd=tmp_path, module=UNCHECKED)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    assert "predicted bubble" in whole.stdout + whole.stderr
    run = tmp_path / "outputs" / "default" / "cut"
    job: Background = background(*arguments, "name=cut", cwd=tmp_path, module=UNCHECKED)
    job.until(lambda: last_step(run) >= 2)
    job.process.terminate()
    assert job.wait() != 0
    assert status(run)["state"] == "PREEMPTED", job.output()
    again = distdl("resume", str(run), cwd=tmp_path, module=UNCHECKED)
    assert again.returncode == 0, again.stdout + again.stderr
    assert losses(run) == losses(tmp_path / "outputs" / "default" / "whole")
