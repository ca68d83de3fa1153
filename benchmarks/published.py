"""Scaling that others measured and published, as data for `benchmarks.held_out` to predict.

Bandwidths and latencies are those that the hardware's makers state, so they are upper limits. None
of them was chosen by looking at a measurement over several nodes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from distdl.tools.scaling.links import RING, Link, Links
from distdl.tools.scaling.published import AZURE_RATES, AZURE_SOURCE, INTEL
from distdl.tools.scaling.setting import BACKWARD_SHARE, Setting

GBIT = 1e9 / 8

# PCIe 3.0 x16: 16 lanes of 8 GT/s, 128 bits in 130 (PCI-SIG, PCI Express Base Specification 3.0).
PCIE_3 = Link(16 * 8e9 * 128 / 130 / 8, 5e-6)
# Six links of 25 GB/s in each direction (NVIDIA, Tesla V100 architecture whitepaper, WP-08608-001).
NVLINK_V100 = Link(150e9, 5e-6)
# Four links of 20 GB/s in each direction (NVIDIA, Tesla P100 architecture whitepaper, WP-08019-001)
NVLINK_P100 = Link(80e9, 5e-6)
# 12 links of 25 GB/s in each direction (NVIDIA, A100 architecture whitepaper).
NVLINK_A100 = Link(300e9, 5e-6)
# The rate is from launchers/azureml/vm_sizes.yaml (`infiniband_gbps`); FDR sends 64 bits in 66. The
# latency is from OSU's benchmarks with MPI on Azure's HBv2, 1.6 to 2 us:
# techcommunity.microsoft.com, "HPC performance and scalability results with Azure HBv2 VMs".
FDR = Link(56 * GBIT * 64 / 66, 2e-6)
# The pages of these VM sizes give no bandwidth of their Ethernet, only that it is not accelerated:
# https://learn.microsoft.com/azure/virtual-machines/sizes/gpu-accelerated/ncv3-series. The nearest
# published number is that of NDv2, the V100 size that followed: 24,000 Mbit/s for all NICs
# (https://learn.microsoft.com/azure/virtual-machines/sizes/gpu-accelerated/ndv2-series).
# The latency is assumed: TCP through a software switch.
ETHERNET = Link(24 * GBIT, 50e-6)

# Bytes of fp32 gradients, for the parameters in https://docs.pytorch.org/vision/stable/models.html
RESNET50 = 4 * 25_557_032
RESNET101 = 4 * 44_549_160
RESNEXT50 = 4 * 25_028_904
RESNEXT101 = 4 * 88_791_336

# Horovod sent all ready gradients every 5 ms (HOROVOD_CYCLE_TIME at that time, in operations.cc).
# It splits no tensor; ResNet-50 has 161.
HOROVOD_CYCLE = 5e-3
RESNET50_TENSORS = 161


@dataclass(frozen=True)
class Published:
    """One machine and library.

    Args:
        name: Shown in a table.
        group: Rows with the same group are summarised together.
        seconds: Devices to seconds of a step, at the same batch per device.
        batch: Images per device.
        setting: With the hardware's links, and the step of the fewest devices.
        source: Address of the publication.
        note: Anything that a reader must know about the numbers.
    """

    name: str
    group: str
    seconds: Mapping[int, float]
    batch: int
    setting: Setting
    source: str
    note: str = ""


AZURE_NOTE = (
    "Read off the bars of `experiments/*_resnet50/plot.svg`, which name no batch. 64 images per "
    "GPU are from a script there (a later script has 256, too many for 16 GB). NCCL ran with "
    "`NCCL_IB_DISABLE=1` over `eth0`, Intel MPI over InfiniBand (`generate_job_spec.py`)"
)
AZURE_BATCH = 64

# Seconds of a step (median), batch 32, fp32, PyTorch 1.4. Those of ResNets and ResNeXt-50 come from
# images per second, which have one more digit. A DGX-1 has 8 GPUs and four adapters of 100 Gbit/s.
PYTORCH_SOURCE = "https://github.com/pytorch/pytorch/blob/main/benchmarks/distributed/ddp/README.md"
PYTORCH_BATCH = 32
PYTORCH_SECONDS: dict[str, tuple[int, dict[int, float]]] = {
    "resnet50": (
        RESNET50,
        {n: PYTORCH_BATCH / r for n, r in {1: 329, 2: 310, 4: 310, 8: 307, 16: 306}.items()},
    ),
    "resnet101": (
        RESNET101,
        {n: PYTORCH_BATCH / r for n, r in {1: 197, 2: 182, 4: 182, 8: 179, 16: 178}.items()},
    ),
    "resnext50_32x4d": (
        RESNEXT50,
        {n: PYTORCH_BATCH / r for n, r in {1: 220, 2: 209, 4: 208, 8: 204, 16: 203}.items()},
    ),
    "resnext101_32x8d": (RESNEXT101, {1: 0.415, 2: 0.438, 4: 0.439, 8: 0.447, 16: 0.450}),
}

# Images per second of all GPUs together: 256 images per GPU, read and decoded by DALI.
NVIDIA_SOURCE = (
    "https://github.com/NVIDIA/DeepLearningExamples/blob/master/PyTorch/Classification/ConvNets/"
    "resnet50v1.5/README.md"
)
NVIDIA_BATCH = 256
NVIDIA_RATES: dict[str, tuple[Link, dict[int, float]]] = {
    "resnet50, A100, mixed precision": (NVLINK_A100, {1: 2470.0, 8: 16621.0}),
    "resnet50, A100, TF32": (NVLINK_A100, {1: 938.0, 8: 7248.0}),
    "resnet50, V100, mixed precision": (NVLINK_V100, {1: 1200.0, 8: 8322.0}),
}


def azure(batch: int = AZURE_BATCH) -> list[Published]:
    """Azure's four GPU types with both libraries, from a benchmark of Azure's own.

    Args:
        batch: Images per GPU, which the source does not state beyond doubt.
    """
    series = []
    for gpu, libraries in AZURE_RATES.items():
        for library, rates in libraries.items():
            seconds = {n: n * batch / rate for n, rate in rates.items()}
            cycles = BACKWARD_SHARE * seconds[1] / HOROVOD_CYCLE
            setting = Setting(
                step_seconds=seconds[1],
                gradient_bytes=RESNET50,
                links=Links(PCIE_3, FDR if library == INTEL else ETHERNET),
                devices_per_node=4,
                bucket_bytes=RESNET50 / min(RESNET50_TENSORS, math.ceil(cycles)),
                # NCCL's trees came with 2.4, a year later.
                algorithm=RING,
            )
            name = f"{gpu}, {library}"
            series.append(
                Published(name, "Azure", seconds, batch, setting, AZURE_SOURCE, AZURE_NOTE)
            )
    return series


def pytorch() -> list[Published]:
    """PyTorch's own DDP table."""
    return [
        Published(
            name,
            "PyTorch DDP, V100",
            seconds,
            PYTORCH_BATCH,
            Setting(
                step_seconds=seconds[1],
                gradient_bytes=size,
                links=Links(NVLINK_V100, Link(400 * GBIT, 2e-6)),
                devices_per_node=8,
            ),
            PYTORCH_SOURCE,
            "32 bit, 32 images per GPU, medians; a node has 8 V100 with NVLink and 400 Gbit/s",
        )
        for name, (size, seconds) in PYTORCH_SECONDS.items()
    ]


def goyal() -> Published:
    """Goyal et al. 2017, "Accurate, Large Minibatch SGD", 256 GPUs against 8.

    100 MB of gradients, a backward of 120 ms, 8 P100 with NVLink and 50 Gbit/s Ethernet in a server
    (section 4.3), recursive halving and doubling between servers (section 4.2); 256 GPUs at about
    90 % of the efficiency of 8 (abstract). The step of 8 follows from their 29 hours for 90 epochs
    of 5,005 steps each (NVIDIA, https://developer.nvidia.com/facebook-trains-imagenet-1-hour).
    """
    step = 29 * 3600 / (90 * 5005)
    return Published(
        "ResNet-50, P100",
        "Goyal 2017",
        {8: step, 256: step / 0.9},
        32,
        Setting(
            step_seconds=step,
            gradient_bytes=100e6,
            links=Links(NVLINK_P100, Link(50 * GBIT, 20e-6)),
            devices_per_node=8,
            backward_share=0.120 / step,
        ),
        "https://arxiv.org/abs/1706.02677",
        "Nothing is published below 8 GPUs, so nothing is fitted, and efficiency is relative to 8. "
        "NVLink and 50 Gbit/s Ethernet; a latency of 20 us is assumed",
    )


def nvidia() -> list[Published]:
    """NVIDIA's own ResNet-50 v1.5, with real images: 1 GPU, and 8 in a node."""
    return [
        Published(
            name,
            "NVIDIA DeepLearningExamples",
            {n: n * NVIDIA_BATCH / rate for n, rate in rates.items()},
            NVIDIA_BATCH,
            Setting(
                step_seconds=NVIDIA_BATCH / rates[1],
                gradient_bytes=RESNET50,
                links=Links(inside, Link(1600 * GBIT, 5e-6)),
                devices_per_node=8,
            ),
            NVIDIA_SOURCE,
            "For 1 and 8 GPUs only, so nothing is fitted. Images are read and decoded",
        )
        for name, (inside, rates) in NVIDIA_RATES.items()
    ]
