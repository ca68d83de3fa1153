"""torch on the simulated GPUs: which operators get a stand-in, and what takes NCCL's place.

`install` is run at the end of each `import torch`, as an extension of torch's that is found by its
entry point (https://docs.pytorch.org/tutorials/unstable/python_extension_autoload.html).
"""

import os
import warnings
from typing import Any

_kept: list[Any] = []  # torch forgets operators whose library is gone


def install() -> None:
    operators()
    collectives()


def operators() -> None:
    """Replaces the operators of cuDNN and cuBLAS, which ask the driver for more than the simulation
    has. They return memory of the right shape, type and layout, in which nothing was computed."""
    import torch
    from torch import Tensor

    def like(tensor: Tensor, *shape: int) -> Tensor:
        are_images = tensor.dim() == len(shape) == 4
        layout = torch.contiguous_format
        if are_images and tensor.is_contiguous(memory_format=torch.channels_last):
            layout = torch.channels_last
        return torch.empty(shape, dtype=tensor.dtype, device=tensor.device, memory_format=layout)

    def convolution(images: Tensor, weight: Tensor, bias: Tensor | None, *more: Any) -> Tensor:
        meta = images.to("meta"), weight.to("meta"), None
        return like(images, *torch.ops.aten.convolution.default(*meta, *more).shape)

    def convolution_backward(
        gradient: Tensor, images: Tensor, weight: Tensor, bias_sizes: Any, *more: Any
    ) -> tuple[Tensor | None, ...]:
        *_, (of_images, of_weight, of_bias) = more  # which gradients are asked for
        return (
            like(images, *images.shape) if of_images else None,
            like(weight, *weight.shape) if of_weight else None,
            like(weight, weight.shape[0]) if of_bias else None,
        )

    def batch_norm(images: Tensor, weight: Tensor, *more: Any) -> tuple[Tensor, ...]:
        reserved = torch.empty(0, dtype=torch.uint8, device=images.device)
        return (*batch_norm_backward(images, images, weight), reserved)

    def batch_norm_backward(
        images: Tensor, gradient: Tensor, weight: Tensor, *more: Any
    ) -> tuple[Tensor, ...]:
        of_bias = like(weight, *weight.shape)
        return like(images, *images.shape), like(weight, *weight.shape), of_bias

    replaced = {
        "convolution": convolution,
        "convolution_backward": convolution_backward,
        "cudnn_batch_norm": batch_norm,
        "cudnn_batch_norm_backward": batch_norm_backward,
        "mm": lambda a, b: like(a, a.shape[0], b.shape[1]),
        "mm.out": lambda a, b, *, out: out,
        "addmm": lambda c, a, b, *, beta=1, alpha=1: like(a, a.shape[0], b.shape[1]),
        "bmm": lambda a, b: like(a, *a.shape[:2], b.shape[2]),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that they are replaced
        library = torch.library.Library("aten", "IMPL")
        for name, stand_in in replaced.items():
            library.impl(name, stand_in, "CUDA")
    _kept.append(library)


def collectives() -> None:
    """gloo, which copies to the host and back, under NCCL's name."""
    import torch
    import torch.distributed as dist

    def create(options: Any, _: Any) -> Any:
        # A group of NCCL's binds its device (torch 2.15), which other parts of torch look at.
        local = int(os.environ.get("LOCAL_RANK", options.group_rank))
        device = torch.device("cuda", local % torch.cuda.device_count())
        options.process_group.bound_device_id = options.process_group.bound_device_id or device
        group = dist.ProcessGroupGloo(
            options.store, options.group_rank, options.group_size, timeout=options.timeout
        )
        group.options.global_ranks_in_group = options.global_ranks_in_group
        group.options.group_name = options.group_id
        return group

    kind = dist.ProcessGroup.BackendType.NCCL
    dist.Backend.register_backend("nccl", create, True, ["cuda"], _backend_type=kind)
