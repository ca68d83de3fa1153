"""Published scaling measurements of others, which the plot of `scale` shows beside ours.

`benchmarks/published.py` has more of them, with the hardware, to compare predictions with.
"""

from __future__ import annotations

# Images per second of all GPUs together: ResNet-50, synthetic images, Horovod 0.13.2 and TensorFlow
# 1.8, read off the bars of experiments/*_resnet50/plot.svg (heights to 0.1 %, the axis to 0.2 %).
AZURE_SOURCE = "https://github.com/msalvaris/BatchAIHorovodBenchmark"
INTEL, NCCL = "Intel MPI", "OpenMPI + NCCL"
AZURE_RATES: dict[str, dict[str, dict[int, float]]] = {
    "V100": {
        INTEL: {1: 335.7, 2: 668.2, 3: 773.2, 4: 979.4, 8: 1809.5, 16: 3405.6, 32: 6516.0},
        NCCL: {1: 349.6, 2: 674.1, 3: 951.3, 4: 1243.9, 8: 1247.4, 16: 2210.5, 32: 4270.1},
    },
    "P100": {
        INTEL: {1: 226.4, 2: 436.6, 3: 653.6, 4: 862.8, 8: 1615.2, 16: 3039.9, 32: 5818.0},
        NCCL: {1: 230.1, 2: 435.2, 3: 646.9, 4: 855.6, 8: 1098.5, 16: 1999.6, 32: 3942.7},
    },
    "P40": {
        INTEL: {1: 169.1, 2: 337.1, 3: 496.3, 4: 658.1, 8: 1309.7, 16: 2620.3, 32: 5180.0},
        NCCL: {1: 171.5, 2: 337.9, 3: 492.1, 4: 653.9, 8: 967.6, 16: 1787.4, 32: 3635.0},
    },
    "K80": {
        INTEL: {1: 52.0, 2: 104.7, 3: 157.0, 4: 206.7, 8: 412.5, 16: 823.2, 32: 1648.0},
        NCCL: {1: 52.0, 2: 109.2, 3: 152.2, 4: 154.1, 8: 317.8, 16: 554.7, 32: 985.8},
    },
}
