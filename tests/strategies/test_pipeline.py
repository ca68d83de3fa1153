"""strategy=pipeline against one process with the same micro-batches."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torchvision.models import resnet18

from distdl.models import ImageClassifier
from distdl.models.blocks import blocks_of
from distdl.strategies.pipeline import balance, partition_plan, probe, splitting
from distdl.strategies.pipeline.stage_rules import StagePosition
from distdl.util.errors import UserError
from tests.strategies.matrix import (
    HALF,
    SAME_TO,
    STEPS,
    TOPOLOGIES,
    Topology,
    batch,
    difference,
    staged,
    step,
)

# With test_equality: they share the ranks.
pytestmark = pytest.mark.xdist_group("strategies")


CHAIN = "model.network._target_=tests.strategies.small.Chain"


def alone(accumulate, *overrides):
    return Topology(1, ("strategy=single", CHAIN, *batch(2, accumulate), *overrides)), None


def piped(schedule, *overrides, count=2, rows=8, repeat=1, resume=None):
    schedule = f"strategy.schedule={schedule}"
    return staged(count, rows, 4, CHAIN, schedule, *overrides, repeat=repeat), resume


# A real network: its batch norms see micro-batches, and so do those of the single process.
RESNET = "model.network._target_=torchvision.models.resnet18"
BF16 = (RESNET, "model.norm=batch", "+trainer.precision=bf16-mixed")
EMA = ("callbacks=[ema]", "callbacks.ema.decay=0.5")
CLIP = "+trainer.gradient_clip_val=0.05"
# name -> topology, and the training from whose middle it resumes
TRAININGS = {
    "alone": alone(4),
    "alone bf16": alone(4, *BF16),
    "alone ema": alone(4, *EMA),
    "alone clipped": alone(8, CLIP),
    "gpipe": piped("gpipe"),
    "1f1b": piped("1f1b"),
    "interleaved": piped("interleaved"),
    "zero_bubble": piped("zero_bubble"),
    "bf16": piped("1f1b", *BF16),
    "bf16 measured": piped("zero_bubble", *BF16, "strategy.balance=measured"),
    "ema": piped("1f1b", *EMA),
    "ema resumed": piped("gpipe", *EMA, resume="ema"),
    "resumed": piped("zero_bubble", resume="1f1b"),
    "from alone": piped("interleaved", resume="alone"),
    "to alone": (alone(4)[0], "1f1b"),
    # 8 rows in 4 micro-batches, and that twice before the optimizer steps.
    "clipped": piped("1f1b", CLIP, repeat=2),
    "twice": piped("1f1b", CLIP, count=4),
    "twice zero": piped("zero_bubble", CLIP, "strategy.across=nodes", count=4),
    "twice often": piped("gpipe", CLIP, "strategy.bucket_cap_mb=0.002", count=4, rows=4, repeat=2),
}
VALIDATED = ("alone", "alone clipped", "1f1b", "interleaved", "twice")


@pytest.fixture
def train(runs):
    def train(name):
        topology, before = TRAININGS[name]
        resume = step(train(before), HALF) if before else None
        return runs.train(f"p {name}", topology, resume=resume, validate=name in VALIDATED)

    return train


@pytest.mark.parametrize(
    ("names", "other", "tolerance"),
    [
        ("gpipe, 1f1b, interleaved, zero_bubble, resumed, to alone, from alone", "alone", 0),
        ("bf16, bf16 measured", "alone bf16", 0),
        ("ema, ema resumed", "alone ema", 0),
        # But for the order of sums; the last three are two pipelines, and average gradients.
        ("clipped, twice, twice zero, twice often", "alone clipped", SAME_TO),
    ],
)
def test_trains_as_one_process_with_the_same_micro_batches(names, other, tolerance, train):
    apart = {n: difference(step(train(n)), step(train(other))) for n in names.split(", ")}
    assert max(apart.values()) <= tolerance, apart


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "twice"])
def test_validation_counts_every_sample_once(name, train, runs):
    other = "alone clipped" if name == "twice" else "alone"
    train(name), train(other)
    expected = runs.seen[f"p {other}"].validated
    assert 21 in expected.values()
    for rank in runs.seen[f"p {name}"].ranks:
        assert rank["validated"] == (pytest.approx(expected) if name == "twice" else expected)


@pytest.mark.parametrize(("name", "least"), [("twice zero", 1), ("twice often", 2)])
def test_gradients_travel_before_the_schedule_ends(name, least, train, runs):
    train(name)
    for rank in runs.seen[f"p {name}"].ranks:
        launched, buckets = rank["buckets"]
        assert launched == buckets >= least


def test_only_the_first_stage_loads_images(train, runs):
    train("gpipe")
    first, last = runs.seen["p gpipe"].ranks
    # One sample more, to learn the sizes from.
    assert (first["devices"], first["asked"]) == (["cpu"], STEPS * 8 + 1)
    assert (last["devices"], last["asked"]) == (["meta"], 0)


def test_asked_to_stop_it_resumes_exactly(runs):
    topology, complete = TOPOLOGIES["pipeline x2"], runs.train("pipeline x2")
    cut = runs.train("pipeline cut", topology, stop_after=HALF - 1)
    rest = runs.train("pipeline resumed", topology, resume=step(cut, HALF))
    first, second = (runs.seen[f"pipeline {part}"].losses for part in ("cut", "resumed"))
    assert len(first) == HALF, "agreed on a step later"
    assert first + second == runs.seen["pipeline x2"].losses
    assert difference(step(complete), step(rest)) == 0


# ------------------------------------------------------------------ without any process


@pytest.fixture
def module():
    return ImageClassifier(resnet18(num_classes=10), num_classes=10)


def test_one_sample_is_too_few_for_a_batch_norm(module):
    """Found before the training, timed or not: at 32 px the last layers have one value each."""
    blocks = splitting.blocks_in(module)
    options = {"convert": lambda m: m, "context": nullcontext, "measured": False, "trains": True}
    probe.run_through(blocks, torch.zeros(1, 3, 32, 32), rows=2, **options)
    with pytest.raises(UserError, match=r"network\.layer4.*\n.*model\.norm=group") as error:
        probe.run_through(blocks, torch.zeros(1, 3, 32, 32), rows=1, **options)
    assert error.value.problems[0].path == "strategy.micro_batches"


def test_the_table_of_a_plan(module):
    blocks = splitting.blocks_in(module)
    settings = {"schedule": "1f1b", "micro_batches": 8, "pieces_per_stage": 1}
    strategy = SimpleNamespace(position=StagePosition.of_rank(0, 4, 2), **settings)
    for seconds, share in (([1.0] * len(blocks), "45 %"), (None, "-")):
        plan = partition_plan.PipelinePlan([0, 5, len(blocks)], [], seconds)
        first, _, stage, *_, last = partition_plan.table(strategy, blocks, plan).splitlines()
        assert first.startswith("pipeline  2 stages x 2 replicas, 1f1b, 8 micro-batches: predicted")
        assert share in stage and stage.endswith(blocks[0].name)
        assert last == f"  the same split again: strategy.balance=[{blocks[5].name}]"


def test_the_slowest_stage_is_as_fast_as_it_can_be():
    assert balance.partition([1, 1, 1, 1, 4, 1], 2) == [0, 4, 6]
    assert balance.partition([5, 1, 1, 1], 4) == [0, 1, 2, 3, 4]
    # Two pieces each: device 0 has pieces 0 and 2.
    costs = [4.0, 1, 1, 1, 1, 1, 1]
    cuts = balance.even_out(costs, balance.partition(costs, 4), 2)
    loads = [sum(costs[cuts[i] : cuts[i + 1]]) for i in range(4)]
    assert sorted((loads[0] + loads[2], loads[1] + loads[3])) == [5, 5]


def test_the_predicted_bubble():
    assert balance.bubble("gpipe", [1, 1], 1, 4) == pytest.approx(1 / 5)  # (p-1) / (m+p-1)
    assert balance.bubble("interleaved", [1, 1], 2, 4) == pytest.approx(1 / 9)
    assert balance.bubble("1f1b", [1, 3], 1, 4) == pytest.approx(1 - 16 / 26)


def test_each_rank_has_one_position():
    near, far = (
        [StagePosition.of_rank(n, 4, 2, a) for n in range(4)] for a in ("devices", "nodes")
    )
    assert [(p.stage, p.replica) for p in near] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert [(p.stage, p.replica) for p in far] == [(0, 0), (0, 1), (1, 0), (1, 1)]


TORCHVISION = ("resnet18", "convnext_tiny", "mobilenet_v3_small", "vgg11")
TIMM = ("resnet18", "resnet50d", "seresnet50", "resnetv2_50")


@pytest.mark.parametrize("name", [*TORCHVISION, *(f"timm.{name}" for name in TIMM)])
def test_known_networks_are_chains(name):
    import timm
    import torchvision

    package, _, model = name.rpartition(".")
    if package:
        network = timm.create_model(model, num_classes=10, drop_rate=0.1).eval()
    else:
        network = getattr(torchvision.models, model)().eval()
    x = images = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        for _, block in blocks_of(network):
            x = block.eval()(x)
        assert torch.equal(x, network(images))


def test_a_split_module_keeps_its_names_and_loads_complete_weights(module):
    full = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    splitting.split(module, splitting.blocks_in(module), kept=range(4))
    kept = module.state_dict()
    assert 0 < len(kept) < len(full) and kept.keys() <= full.keys()
    with splitting.complete(module):
        assert list(module.state_dict()) == list(full)
    module.load_state_dict({name: torch.ones_like(t) for name, t in full.items()})
    assert all(bool((t == 1).all()) for t in module.state_dict().values())
    with pytest.raises(RuntimeError, match="Missing"):
        module.load_state_dict({n: t for n, t in full.items() if n != next(iter(kept))})


def test_a_parameter_outside_the_blocks_is_refused():
    module = ImageClassifier(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), num_classes=2)
    module.scale = nn.Parameter(torch.ones(1))
    with pytest.raises(UserError, match="scale is in none of the blocks"):
        splitting.blocks_in(module)
