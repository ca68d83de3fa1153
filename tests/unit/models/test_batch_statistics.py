"""The statistics of batch norms, computed again."""

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import update_bn

from distdl.models import batch_statistics
from distdl.models.batch_statistics import Measuring, over_all_ranks, set_statistics
from distdl.optim.averages import norms_of


def network():
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 3)
    return nn.Sequential(*layers, nn.BatchNorm2d(6, momentum=0.3), nn.InstanceNorm2d(6))


def test_they_are_those_that_torch_computes_for_swa():
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(5, 3, 9, 9, generator=generator) * 3 + 1 for _ in range(4)]
    ours = network()
    theirs = network()
    update_bn(batches, theirs)
    norms = norms_of(ours)
    assert [*norms] == ["1", "4"]
    measuring = Measuring(norms)
    with torch.no_grad(), measuring.watching():
        for batch in batches:
            ours(batch)
    assert all(norm.training for norm in norms.values())
    ours(batches[0])  # not measured any more
    set_statistics(norms, measuring.result())
    for name, norm in norms.items():
        wanted = theirs.get_submodule(name)
        assert norm.running_mean.numpy() == pytest.approx(wanted.running_mean.numpy(), abs=1e-6)
        assert norm.running_var.numpy() == pytest.approx(wanted.running_var.numpy(), rel=1e-5)


def test_a_batch_is_that_of_all_ranks(monkeypatch):
    inputs = torch.randn(12, 3, 4) * 2 + torch.arange(3.0)[:, None]
    shares = [inputs[:2], inputs[2:2], inputs[2:]]

    def gather(parts, mine):
        monkeypatch.setattr(batch_statistics.process_group, "world_size", lambda: 1)
        single = [torch.stack(over_all_ranks(share)) for share in shares]
        for part, (mean, variance, count) in zip(parts, single, strict=True):
            part.copy_(torch.stack((count, mean, variance)))

    whole = over_all_ranks(inputs)
    monkeypatch.setattr(batch_statistics.process_group, "world_size", lambda: 3)
    monkeypatch.setattr(batch_statistics.dist, "all_gather", gather)
    for together, alone in zip(over_all_ranks(shares[0]), whole, strict=True):
        torch.testing.assert_close(together, alone)
