"""What ranks agree on, and over which back ends."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy as LightningDDP

from distdl.distributed import process_group
from distdl.strategies.ddp import DDPStrategy
from distdl.strategies.fsdp import FSDPStrategy
from distdl.strategies.local_sgd import LocalSGDStrategy


def test_one_rank_needs_no_group_to_agree_with_itself() -> None:
    """As on one GPU with Lightning's own group, which knows the device alone."""
    dist.init_process_group("cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert process_group.broadcast({"said": 1}) == {"said": 1}
        assert process_group.gather("mine") == ["mine"]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "strategy",
    [DDPStrategy, LocalSGDStrategy, FSDPStrategy, LightningDDP],
    ids=lambda c: c.__module__,
)
def test_a_group_of_one_has_both_back_ends(strategy: type) -> None:
    made = strategy()
    process_group.give_backends(made, "gpu")
    assert made._get_process_group_backend() == "cpu:gloo,cuda:nccl"


def test_a_back_end_that_was_chosen_stays() -> None:
    made = LightningDDP(process_group_backend="nccl")
    process_group.give_backends(made, "gpu")
    assert made._get_process_group_backend() == "nccl"
