"""strategy=pipeline against one process with the same micro-batches."""

from contextlib import nullcontext

import pytest
import timm
import torch
import torchvision
from torch import nn
from torchvision.models import resnet18

from distdl.models import ImageClassifier
from distdl.models.blocks import blocks_of
from distdl.strategies.pipeline import balance, partition_plan, probe, splitting, stage_rules
from distdl.strategies.pipeline.stage_rules import StagePosition
from distdl.util.errors import UserError
from tests.conftest import matrix_only
from tests.strategies import matrix
from tests.strategies.matrix import HALF, SAME_TO, TOPOLOGIES, difference, step

# With test_equality: they share the ranks.
pytestmark = pytest.mark.xdist_group("strategies")

CHAIN = ("model.network._target_=tests.strategies.small.Chain",)
# torch before 2.14 has no zero_bubble: its trainings are then of another schedule in pieces.
ZERO_BUBBLE = "zero_bubble" if stage_rules.splits_backward() else "interleaved"


def alone(accumulate, *overrides):
    overrides = ("strategy=single", *CHAIN, *matrix.batch(2, accumulate), *overrides)
    return matrix.Topology(1, overrides), None


def piped(schedule, *overrides, count=2, rows=8, repeat=1, resume=None):
    schedule = f"strategy.schedule={schedule}"
    return matrix.staged(count, rows, 4, *CHAIN, schedule, *overrides, repeat=repeat), resume


# A real network: its batch norms see micro-batches, and so do those of the single process.
RESNET = "model.network._target_=torchvision.models.resnet18"
BF16 = (RESNET, "model.norm=batch", "+trainer.precision=bf16-mixed")
EMA = ("callbacks=[ema]", "callbacks.ema.decay=0.5")
DROPPING = ("model.network._target_=tests.strategies.small.Dropping", "data.num_workers=1")
NUMBERED = "model._target_=tests.strategies.small.Numbered"
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
    "zero_bubble": piped(ZERO_BUBBLE),
    "bf16 measured": piped(ZERO_BUBBLE, *BF16, "strategy.balance=measured"),
    "ema": piped("1f1b", *EMA),
    "ema resumed": piped("gpipe", *EMA, resume="ema"),
    "resumed": piped(ZERO_BUBBLE, resume="1f1b"),
    "dropping": piped("1f1b", *DROPPING),
    "dropping resumed": piped("1f1b", *DROPPING, resume="dropping"),
    "numbered": piped("1f1b", NUMBERED),
    "alone numbered": alone(4, NUMBERED),
    "from alone": piped("interleaved", resume="alone"),
    "to alone": (alone(4)[0], "1f1b"),
    # 8 rows in 4 micro-batches, and that twice before the optimizer steps.
    "clipped": piped("1f1b", CLIP, repeat=2),
    "twice": piped("1f1b", CLIP, count=4),
    "twice zero": piped(ZERO_BUBBLE, CLIP, "strategy.across=nodes", count=4),
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
        pytest.param("bf16 measured", "alone bf16", 0, marks=matrix_only),
        ("dropping resumed", "dropping", 0),
        ("numbered", "alone numbered", 0),
        ("ema, ema resumed", "alone ema", 0),
        # But for the order of sums; the last ones are two pipelines, and average gradients.
        ("clipped, twice", "alone clipped", SAME_TO),
        pytest.param("twice zero, twice often", "alone clipped", SAME_TO, marks=matrix_only),
    ],
)
def test_trains_as_one_process_with_the_same_micro_batches(names, other, tolerance, train):
    apart = {n: difference(step(train(n)), step(train(other))) for n in names.split(", ")}
    assert max(apart.values()) <= tolerance, apart


def test_what_each_rank_has_validated_and_loaded(train, runs):
    for name in VALIDATED:
        train(name)
    seen = {name.removeprefix("p "): seen for name, seen in runs.seen.items()}
    for name, other in (("1f1b", "alone"), ("interleaved", "alone"), ("twice", "alone clipped")):
        expected = seen[other].validated
        assert 21 in expected.values()
        for rank in seen[name].ranks:
            assert rank["validated"] == (pytest.approx(expected) if name == "twice" else expected)
    # Only the first stage loads images.
    assert [rank["device"] for rank in seen["1f1b"].ranks] == ["cpu", "meta"]


def test_asked_to_stop_it_resumes_exactly(runs):
    topology = TOPOLOGIES["pipeline x2"]
    complete = runs.train("pipeline x2")
    cut = runs.train("pipeline cut", topology, stop_after=HALF - 1)
    rest = runs.train("pipeline resumed", topology, resume=step(cut, HALF))
    first, second = (runs.seen[f"pipeline {part}"].losses for part in ("cut", "resumed"))
    assert len(first) == HALF, "agreed on a step later"
    assert first + second == runs.seen["pipeline x2"].losses
    assert difference(step(complete), step(rest)) == 0


# ------------------------------------------------------------------ without any process


def test_one_sample_is_too_few_for_a_batch_norm():
    """Found before the training, timed or not: at 32 px the last layers have one value each."""
    blocks = splitting.blocks_in(ImageClassifier(resnet18(num_classes=10), num_classes=10))
    options = {"convert": lambda m: m, "context": nullcontext, "measured": False, "trains": True}
    probe.run_through(blocks, torch.zeros(1, 3, 32, 32), rows=2, **options)
    with pytest.raises(UserError, match=r"network\.layer4.*\n.*model\.norm=group") as error:
        probe.run_through(blocks, torch.zeros(1, 3, 32, 32), rows=1, **options)
    assert error.value.problems[0].path == "strategy.micro_batches"


def test_the_slowest_stage_is_as_fast_as_it_can_be_and_the_bubble_predicted():
    assert balance.partition([1, 1, 1, 1, 4, 1], 2) == [0, 4, 6]
    assert balance.partition([5, 1, 1, 1], 4) == [0, 1, 2, 3, 4]
    # Two pieces each: device 0 has pieces 0 and 2.
    costs = [4.0, 1, 1, 1, 1, 1, 1]
    cuts = balance.even_out(costs, balance.partition(costs, 4), 2)
    loads = [sum(costs[cuts[i] : cuts[i + 1]]) for i in range(4)]
    assert sorted((loads[0] + loads[2], loads[1] + loads[3])) == [5, 5]
    assert balance.bubble("gpipe", [1, 1], 1, 4) == pytest.approx(1 / 5)  # (p-1) / (m+p-1)
    assert balance.bubble("interleaved", [1, 1], 2, 4) == pytest.approx(1 / 9)
    assert balance.bubble("1f1b", [1, 3], 1, 4) == pytest.approx(1 - 16 / 26)


def test_a_run_that_resumes_is_cut_as_before(caplog):
    """Each stage draws its own dropout: measured again, a block may be on another one."""
    names = ["stem", "one", "two", "head"]
    assert partition_plan.cut_as_before(names, ["two"], 2) == [0, 2, 4]
    assert partition_plan.cut_as_before(names, ["one", "two"], 3) == [0, 1, 2, 4]
    assert partition_plan.cut_as_before(names, None, 2) is None, "of an older checkpoint"
    assert not caplog.messages
    # Another number of pieces, another model, a damaged or foreign manifest: balanced again.
    for starts in (["two", "one"], ["stem"], ["three"], ["one", "two"], [1], "two", {}):
        assert partition_plan.cut_as_before(names, starts, 2) is None
        assert f"split {starts} is none of this model in 2 pieces" in caplog.messages[-1]
    assert len(caplog.messages) == 7


def test_each_rank_has_one_position():
    for across, places in (("devices", "00 10 01 11"), ("nodes", "00 01 10 11")):
        positions = [StagePosition.of_rank(rank, 4, 2, across) for rank in range(4)]
        assert " ".join(f"{p.stage}{p.replica}" for p in positions) == places


TORCHVISION = ("resnet18", "convnext_tiny", "mobilenet_v3_small", "vgg11")
TIMM = ("resnet18", "resnet50d", "seresnet50", "resnetv2_50")
KNOWN = [(torchvision.models.get_model, name) for name in TORCHVISION]
KNOWN += [(timm.create_model, name) for name in TIMM]


@pytest.mark.parametrize(("create", "name"), KNOWN)
def test_known_networks_are_chains(create, name):
    network = create(name, num_classes=10).eval()
    x = images = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        for _, block in blocks_of(network):
            x = block.eval()(x)
        assert torch.equal(x, network(images))


def test_a_parameter_outside_the_blocks_is_refused():
    module = ImageClassifier(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), num_classes=2)
    module.scale = nn.Parameter(torch.ones(1))
    with pytest.raises(UserError, match="scale is in none of the blocks"):
        splitting.blocks_in(module)
