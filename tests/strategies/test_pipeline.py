"""strategy=pipeline against one process with the same micro-batches; see pipeline_cases.py."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torchvision.models import resnet18

from distdl.models import ImageClassifier
from distdl.models.blocks import blocks_of
from distdl.ranks import environment as environments
from distdl.strategies.pipeline import balance, partition_plan, probe, splitting
from distdl.strategies.pipeline.stage_rules import StagePosition
from distdl.util.errors import UserError
from tests.strategies import ranks
from tests.strategies.matrix import HALF, STEPS, TOPOLOGIES, Runs, step
from tests.strategies.matrix import difference as apart
from tests.strategies.pipeline_cases import CASES, run

# With test_equality: they share the ranks.
pytestmark = pytest.mark.xdist_group("strategies")


def run_cases(folder: Path, size: int, names: list[str]) -> None:
    case = ranks.Case(names, folder, call="tests.strategies.pipeline_cases:run_all")
    ranks.shared(size).train(case)


def run_alone(folder: Path, names: list[str]) -> None:
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


@pytest.mark.parametrize("name, other", [("clipped", "clipped-alone"), ("to-alone", "alone")])
def test_as_one_process_but_for_the_order_of_sums(trained: Path, name: str, other: str) -> None:
    assert difference(trained, name, other) < 1e-6


@pytest.mark.parametrize("name", ["twice", "twice-zero", "twice-accumulated"])
def test_two_pipelines_average_their_gradients(trained_on_four: Path, name: str) -> None:
    assert difference(trained_on_four, name, "twice-alone") < 1e-6


@pytest.mark.parametrize("name", ["1f1b", "interleaved"])
def test_validation_counts_every_sample_once(trained: Path, name: str) -> None:
    expected = seen(trained, "alone")[0][1]
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
    first, last = seen(trained, "gpipe")
    assert (first[2], last[2]) == (["cpu"], ["meta"])
    assert first[3] == 1 + 4 * 8 and last[3] == 0  # one sample to learn the sizes from
    assert first[0] == last[0]  # the loss, which the last stage computes


def test_asked_to_stop_it_resumes_exactly(runs: Runs) -> None:
    two = TOPOLOGIES["pipeline x2"]
    complete = runs.whole("pipeline x2")
    cut = runs.train("pipeline cut", two, stop_after=HALF - 1)
    assert len(runs.seen["pipeline cut"].losses) == HALF, "agreed on a step later"
    rest = runs.train("pipeline resumed", two, resume=step(cut, HALF))
    losses = [*runs.seen["pipeline cut"].losses, *runs.seen["pipeline resumed"].losses]
    assert losses == runs.seen["pipeline x2"].losses
    assert apart(step(complete, STEPS), step(rest, STEPS)) == 0


# ------------------------------------------------------------------ without any process


def classifier() -> ImageClassifier:
    return ImageClassifier(resnet18(num_classes=10), num_classes=10)


def test_one_sample_is_too_few_for_a_batch_norm() -> None:
    """Found before the training, timed or not: at 32 px the last layers have one value each."""
    blocks = splitting.blocks_in(classifier())
    probed = {"convert": lambda m: m, "context": nullcontext, "measured": False}
    for rows in (2, 1):
        with nullcontext() if rows > 1 else pytest.raises(UserError) as refused:
            probe.run_through(blocks, torch.zeros(1, 3, 32, 32), rows=rows, trains=True, **probed)
    (problem,) = refused.value.problems
    assert problem.path == "strategy.micro_batches" and "network.layer4" in problem.what
    assert "model.norm=group, or larger micro-batches" in problem.remedy


def test_the_table_of_a_plan() -> None:
    blocks = splitting.blocks_in(classifier())
    position = StagePosition.of_rank(0, 4, 2)
    how = {"schedule": "1f1b", "micro_batches": 8, "pieces_per_stage": 1}
    strategy: Any = SimpleNamespace(position=position, **how)
    for seconds, share in (([1.0] * len(blocks), "45 %"), (None, "-")):
        plan = partition_plan.PipelinePlan([0, 5, len(blocks)], [], seconds)
        first, _, stage, *_, last = partition_plan.table(strategy, blocks, plan).splitlines()
        assert first.startswith("pipeline  2 stages x 2 replicas, 1f1b, 8 micro-batches: predicted")
        assert share in stage and stage.endswith(blocks[0].name)
        assert last == f"  the same split again: strategy.balance=[{blocks[5].name}]"


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


def test_each_rank_has_one_position() -> None:
    near = [StagePosition.of_rank(rank, 4, 2) for rank in range(4)]
    assert [(p.stage, p.replica) for p in near] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    far = [StagePosition.of_rank(rank, 4, 2, "nodes") for rank in range(4)]
    assert [(p.stage, p.replica) for p in far] == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize(
    "name",
    [
        *(f"torchvision {n}" for n in ("resnet18", "convnext_tiny", "mobilenet_v3_small", "vgg11")),
        *(f"timm {n}" for n in ("resnet18", "resnet50d", "seresnet50", "resnetv2_50")),
    ],
)
def test_known_networks_are_chains(name: str) -> None:
    import timm
    import torchvision

    package, model = name.split()
    network = (
        timm.create_model(model, num_classes=10, drop_rate=0.1)
        if package == "timm"
        else getattr(torchvision.models, model)()
    ).eval()
    x = images = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        for _, block in blocks_of(network):
            x = block.eval()(x)
        assert torch.equal(x, network(images))


def test_a_split_module_keeps_its_names_and_loads_whole_weights() -> None:
    module = classifier()
    full = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    blocks = splitting.blocks_in(module)
    splitting.split(module, blocks, kept=range(4))
    own = module.state_dict()
    assert 0 < len(own) < len(full) and own.keys() <= full.keys()
    with splitting.complete(module):
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
