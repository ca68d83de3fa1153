"""DDP's communication hooks, which replace the all-reduce of plain gradients, on every device."""

# No `from __future__ import annotations`: DDP checks the annotation of `bucket`.
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

Name = Literal["none", "bf16", "fp16", "powersgd", "post_local_sgd"]
Future = torch.futures.Future[torch.Tensor]
# State and function, as `DistributedDataParallel.register_comm_hook` takes them.
Hook = tuple[Any, Callable[[Any, dist.GradBucket], Future]]

# DDP rebuilds its buckets after the first step, and PowerSGD keeps its errors per bucket.
PLAIN_STEPS = 2
# The hooks that each setting belongs to.
SETTINGS: Mapping[str, tuple[str, ...]] = {
    "powersgd_rank": ("powersgd",),
    "hook_start_step": ("powersgd", "post_local_sgd"),
    "average_every": ("post_local_sgd",),
}


def make(name: Name, *, powersgd_rank: int, start_step: int, step: int, per_node: int) -> Hook:
    """A hook by its name, which must not be "none".

    Args:
        powersgd_rank: Rank of the matrices that replace a gradient (Vogels et al. 2019, "PowerSGD",
            https://arxiv.org/abs/1905.13727, algorithm 1).
        start_step: Optimizer steps with plain all-reduces before powersgd or post_local_sgd begins.
        step: Optimizer steps before the resume. No checkpoint holds PowerSGD's errors, so PowerSGD
            starts again with plain steps.
        per_node: Ranks per node, within which post_local_sgd still averages gradients.
    """
    if name in ("bf16", "fp16"):
        return None, bf16_compress_hook if name == "bf16" else fp16_compress_hook
    if name == "powersgd":
        state = PowerSGDState(None, powersgd_rank, max(start_step, step + PLAIN_STEPS))
        state.iter = step
        return state, power_sgd
    assert name == "post_local_sgd"
    in_node = 1 < per_node < dist.get_world_size()
    node = dist.new_subgroups(group_size=per_node)[0] if in_node else None
    local = PostLocalSGDState(None, node, start_step, post_local_gradient_allreduce=in_node)
    local.iter = step
    return local, post_localSGD_hook


def power_sgd(state: PowerSGDState, bucket: dist.GradBucket) -> Future:
    """torch's PowerSGD hook, with a fix for gloo, where several buckets at once would hang.

    The hook sends the second half of a bucket from the thread that received the first half, and
    gloo has few threads. So on the CPU, each bucket is finished before the next one starts.
    """
    future = powerSGD_hook(state, bucket)
    if bucket.buffer().device.type != "cpu":
        return future
    finished: Future = torch.futures.Future()
    finished.set_result(future.wait())
    return finished
