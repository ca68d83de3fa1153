"""`model.recompute`: the same bits with less memory, under the same names."""

import copy

import pytest
import torch
import torchvision
from torch import nn
from torch.nn import functional as F
from torchvision.models.resnet import Bottleneck

from distdl.models import recompute
from distdl.models.detection_network import torchvision_detector
from distdl.util.errors import UserError
from tests.conftest import matrix_only
from tests.prepared import refusal


class Dropping(nn.Module):
    """A user's network, whose blocks have batch norm and dropout, and take a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Conv2d(3, 8, 3, padding=1)
        self.layers = nn.ModuleList(Dropped() for _ in range(3))
        self.end = nn.Linear(8, 10)

    def forward(self, images):
        x = self.start(images)
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return self.end(x.mean((2, 3)))


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.3)

    def forward(self, x, scale):
        return x + scale * self.drop(F.relu(self.norm(self.conv(x))))


def resnet() -> nn.Module:
    return torchvision.models.resnet18(num_classes=10)


NETWORKS = {"resnet": resnet, "dropout": Dropping}


def trained(network, steps=2):
    """Losses, gradients, buffers and the random state after a few steps."""
    torch.manual_seed(1)
    network.train()
    images = torch.rand(4, 3, 32, 32)
    labels = torch.randint(0, 10, (4,))
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(network(images), labels)
        loss.backward()
        losses.append(loss.detach())
    gradients = {name: p.grad for name, p in network.named_parameters()}
    return {
        **{f"loss {step}": loss for step, loss in enumerate(losses)},
        **gradients,
        **dict(network.named_buffers()),
        "random": torch.get_rng_state(),
    }


def equal(one, two):
    assert one.keys() == two.keys()
    assert [name for name in one if not torch.equal(one[name], two[name])] == []


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_buffers_and_names_are_the_same(name):
    torch.manual_seed(0)
    plain = NETWORKS[name]()
    other = copy.deepcopy(plain)
    blocks = recompute.apply(other, "blocks")
    assert len(blocks) == {"resnet": 8, "dropout": 3}[name]
    assert recompute.blocks_in(other) == blocks
    assert [*other.state_dict()] == [*plain.state_dict()]
    copied = copy.deepcopy(other)
    expected = trained(plain)
    equal(trained(other), expected)
    # A copy, as an average of weights has it, recomputes its own blocks.
    equal(trained(copied), expected)
    images = torch.rand(4, 3, 32, 32)
    assert torch.equal(other.eval()(images), plain.eval()(images))


def test_the_backward_needs_less():
    def kept(network):
        sizes = []

        def noted(tensor):
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(noted, lambda tensor: tensor):
            network(torch.rand(4, 3, 32, 32))
        return sum(sizes)

    plain = kept(resnet())
    other = resnet()
    recompute.apply(other, "blocks")
    assert kept(other) < plain / 2


SLOW = {"resnet": matrix_only}


@pytest.mark.parametrize("name", [pytest.param(n, marks=SLOW.get(n, ())) for n in NETWORKS])
def test_compiled(name):
    torch.manual_seed(0)
    plain = NETWORKS[name]()
    other = copy.deepcopy(plain)
    recompute.apply(other, "blocks")
    for network in (plain, other):
        network.compile(backend="aot_eager")
    equal(trained(other), trained(plain))


def short() -> nn.Module:
    return torchvision.models.ResNet(Bottleneck, [1, 1, 1, 1], num_classes=10)


class Features(nn.Module):
    """A detector's backbone with its pyramid, which is what can be compiled of it."""

    def __init__(self) -> None:
        super().__init__()
        detector = torchvision_detector("retinanet_resnet50_fpn", 10, "resnet18")
        self.backbone = detector.backbone
        self.head = nn.Linear(256, 10)

    def forward(self, images):
        maps = self.backbone(images).values()
        return self.head(sum(each.mean((2, 3)) for each in maps))


def steps(network, count=12):
    """The losses of a training, and the weights and buffers at its end."""
    torch.manual_seed(1)
    network.train()
    optimizer = torch.optim.SGD(network.parameters(), 0.01, momentum=0.9)
    images = torch.rand(4, 3, 32, 32, dtype=torch.float64)
    labels = torch.randint(0, 10, (4,))
    losses = []
    for _ in range(count):
        loss = F.cross_entropy(network(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return {"losses": torch.stack(losses), **network.state_dict()}


@matrix_only
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("build", [short, Features, Dropping])
def test_under_inductor(build, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    plain = build().double()
    other = copy.deepcopy(plain)
    assert recompute.apply(other, "blocks")
    other.compile()
    if build is Dropping:  # Inductor draws other numbers than torch
        plain.compile()
    wanted, found = steps(plain), steps(other)
    assert wanted["losses"].min() < wanted["losses"][0], "it trains"
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5)


class Counting(nn.Module):
    """Its second forward would be another one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls.add_(1)
        return self.layer(x) * self.calls


def test_what_cannot_be_recomputed_is_refused():
    with pytest.raises(UserError, match=r"model.recompute: Linear has no blocks"):
        recompute.apply(nn.Linear(2, 2), "blocks")
    with pytest.raises(UserError, match=r"no layer of ResNet has the name 'layr1\.0'") as error:
        recompute.apply(resnet(), ["layer1.*", "layr1.0"])
    assert "did you mean 'model.recompute=[layer1.0]'" in str(error.value)
    problem = refusal(recompute.apply, resnet(), ["layr[12].*"])
    assert problem.remedy == "did you mean 'model.recompute=[layer[12].*]'?"
    with pytest.raises(UserError, match="is 'all'"):
        recompute.apply(resnet(), "all")
    counting = nn.Sequential(Counting(), Counting())
    assert recompute.apply(counting, ["*"]) == ["0", "1"]
    with pytest.raises(UserError, match="0: Counting changes a buffer in its forward"):
        counting(torch.rand(2, 4))


def test_patterns_choose_the_outermost():
    network = resnet()
    assert recompute.apply(network, ["layer[34].*", "layer3.0.conv1"]) == [
        "layer3.0",
        "layer3.1",
        "layer4.0",
        "layer4.1",
    ]
    assert recompute.apply(resnet(), "none") == []
