"""How fast a GPU's loaders must be: known training rates, and a verdict from measured ones."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from pathlib import Path

from distdl.config.resources import loader_workers
from distdl.util.errors import UserError
from distdl.util.suggest import closest
from distdl.util.wording import plural

AZURE = "fp32, Horovod on Azure, github.com/msalvaris/BatchAIHorovodBenchmark"
NVIDIA = "mixed precision, NVIDIA/DeepLearningExamples, ConvNets, PyTorch"
LAMBDA = "fp16, github.com/lambdal/deeplearning-benchmark"
# Published training rates of ResNet-50 on one GPU, in images per second, with their sources.
GPUS = {
    "k80": (53, AZURE),
    "p40": (173, AZURE),
    "p100": (234, AZURE),
    "v100": (1_200, NVIDIA),
    "a100": (2_470, NVIDIA),
    "h100": (2_791, LAMBDA),
    "h200": (3_079, LAMBDA),
}
# GFLOP of one image of 224 pixels, from torchvision's list of weights
# (https://pytorch.org/vision/stable/models.html). Rates of other models are scaled by them.
MODELS = {
    "resnet18": 1.81,
    "resnet34": 3.66,
    "resnet50": 4.09,
    "resnet101": 7.80,
    "resnet152": 11.51,
    "vit_b_16": 17.56,
}
# A generous allowance for a worker's other work (queues, pages of shared memory).
BESIDES = 1.15
# Batches per worker: torch's default, and ours.
PREFETCH = 2


@dataclass(frozen=True)
class Need:
    """The training rate of one GPU, in images per second, and who measured it with which model."""

    rate: float
    source: str


def need(model: str, gpu: str, rate: float | None) -> Need:
    """The training rate of one GPU: the user's measurement, or that of a known model and GPU.

    Raises:
        UserError: The model or GPU is unknown, or `rate` is not positive.
    """
    if rate is not None:
        if rate <= 0:
            raise UserError.at(
                "--rate", what=f"must be more than 0, not {rate}", code="out-of-range"
            )
        return Need(rate, "your measurement")
    remedy = "measure yours with data=synthetic: --rate 1500"
    for option, value, known in (("--model", model, MODELS), ("--gpu", gpu, GPUS)):
        if value not in known:
            close = closest(value, known)
            raise UserError.at(
                option,
                what=f"no rate of {value} is known, only of {', '.join(known)}",
                remedy=f"{option} {close}" if close else remedy,
                code="wrong-choice",
            )
    published, source = GPUS[gpu]
    if model == "resnet50":
        return Need(published, f"resnet50 on one {gpu.upper()} ({source})")
    source = f"{model} on one {gpu.upper()}, estimated from resnet50's by GFLOP"
    return Need(published * MODELS["resnet50"] / MODELS[model], source)


def workers_for(rate: float, per_core: float) -> int:
    """Number of loader processes that decode `rate` images per second, each on its own core."""
    return max(1, math.ceil(rate * BESIDES / per_core))


def cores_for(rate: float, per_core: float) -> int:
    """Cores of the loader processes, plus one for the training process, which never sleeps."""
    return workers_for(rate, per_core) + 1


@dataclass(frozen=True)
class Format:
    """A format of the images."""

    name: str
    per_core: float  # images per second that one core of this machine decodes
    how: str = ""  # the command that converts the data set to it


@dataclass(frozen=True)
class FeedVerdict:
    """Whether loading keeps up with the GPUs, and the same as a sentence."""

    fed: bool
    text: str
    overrides: tuple[str, ...] = ()  # for the run's command line
    before: str = ""  # a command to run first


def judge(
    wanted: Need, formats: list[Format], reading: float, cores: int, gpus: int
) -> FeedVerdict:
    """Compares the rate that each GPU needs with what this machine reads and decodes.

    Args:
        formats: The current format first, then possible conversions, slower ones first.
        reading: Images per second that one process reads from the disk.
        cores: Of this machine, shared by `gpus` GPUs.
    """
    share = cores / gpus
    per_core = formats[0].per_core
    needed = cores_for(wanted.rate, per_core)
    if needed <= share:
        workers = workers_for(wanted.rate, per_core)
        noun = "workers" if workers > 1 else "worker"
        text = f"fed: {workers} {noun} and the training itself, on {share:g} cores per GPU"
        # A worker that waits for the disk uses no core, so more workers make up for it.
        waiting = math.ceil(wanted.rate * (BESIDES / per_core + 1 / reading))
        if waiting > workers:
            text += f"; {waiting} workers while the disk's cache is cold"
        more = waiting > loader_workers(int(share))
        return FeedVerdict(True, text, (f"data.num_workers={waiting}",) * more)
    # Whole processes, as in `needed`; rounded down, so that "starved" never shows 100 %.
    percent = int(100 * (int(share) - 1) * per_core / BESIDES / wanted.rate)
    text = f"starved: {share:g} {plural('core', share)} per GPU"
    if share < 2:
        text += f" {'has' if share == 1 else 'have'} the training itself to do"
    else:
        text += f" decode {percent or 'less than 1'} % of what it can train on"
    text += f"; {needed} are needed"
    for other in formats[1:]:
        enough = cores_for(wanted.rate, other.per_core)
        if enough <= share:
            text += f". {other.name[0].upper()}{other.name[1:]}, {enough} are enough"
            return FeedVerdict(False, text, before=other.how)
    text += ". Decode on the GPU (data.decoder=nvjpeg), or take a machine with more cores"
    return FeedVerdict(False, text, ("data.decoder=nvjpeg",))


@dataclass(frozen=True)
class Shm:
    """Shared memory, through which loaders pass their batches, in bytes.

    `size` is that of /dev/shm, None if there is none. All loaders of this machine need `needed`.
    """

    size: int | None
    needed: int

    @property
    def fits(self) -> bool:
        return self.size is None or self.size >= self.needed


def shm(workers: int, gpus: int, batch: int, image_size: int) -> Shm:
    """Available and needed shared memory, with `workers` per GPU and PREFETCH batches per worker.

    One more batch per GPU is in transfer to the device.
    """
    needed = gpus * (workers * PREFETCH + 1) * batch * 3 * image_size**2
    memory = Path("/dev/shm")
    return Shm(shutil.disk_usage(memory).total if memory.is_dir() else None, needed)
