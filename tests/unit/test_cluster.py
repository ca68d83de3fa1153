"""What ranks agree on, and over which backends."""

import pytest
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy as LightningDDP

from distdl.distributed import process_group
from distdl.strategies.ddp import DDPStrategy
from distdl.strategies.fsdp import FSDPStrategy
from distdl.strategies.local_sgd import LocalSGDStrategy


def test_one_rank_needs_no_group_to_agree_with_itself():
    """As on one GPU with Lightning's own group, which knows the device alone."""
    dist.init_process_group("cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert process_group.broadcast({"value": 1}) == {"value": 1}
        assert process_group.gather("mine") == ["mine"]
    finally:
        dist.destroy_process_group()


BOTH = "cpu:gloo,cuda:nccl"


@pytest.mark.parametrize(
    ("cls", "arguments", "expected"),
    [
        *((cls, {}, BOTH) for cls in (DDPStrategy, LocalSGDStrategy, FSDPStrategy, LightningDDP)),
        (LightningDDP, {"process_group_backend": "nccl"}, "nccl"),  # chosen by the user
    ],
)
def test_a_group_of_one_has_both_backends(cls, arguments, expected):
    strategy = cls(**arguments)
    process_group.give_backends(strategy, "gpu")
    assert strategy._get_process_group_backend() == expected
