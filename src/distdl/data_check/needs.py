"""What a GPU needs of its loaders: known training rates, and what follows from measured ones."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from pathlib import Path

from distdl.config.resources import loader_workers
from distdl.util.errors import UserError
from distdl.util.suggest import closest

AZURE = "fp32, Horovod on Azure, github.com/msalvaris/BatchAIHorovodBenchmark"
NVIDIA = "mixed precision, NVIDIA/DeepLearningExamples, ConvNets, PyTorch"
LAMBDA = "fp16, github.com/lambdal/deeplearning-benchmark"
# Images per second of ResNet-50 that one GPU trains, as published, and who measured it, and how.
GPUS = {
    "k80": (53, AZURE),
    "p40": (173, AZURE),
    "p100": (234, AZURE),
    "v100": (1_200, NVIDIA),
    "a100": (2_470, NVIDIA),
    "h100": (2_791, LAMBDA),
    "h200": (3_079, LAMBDA),
}
# GFLOP of one image of 224 pixels, as torchvision states them for its weights
# (https://pytorch.org/vision/stable/models.html). Rates of others than resnet50 are scaled by them.
MODELS = {
    "resnet18": 1.81,
    "resnet34": 3.66,
    "resnet50": 4.09,
    "resnet101": 7.80,
    "resnet152": 11.51,
    "vit_b_16": 17.56,
}
# What a worker does besides (queues, pages of shared memory): an allowance, on the safe side.
BESIDES = 1.15
# torch's default, and ours.
PREFETCH = 2


@dataclass(frozen=True)
class Need:
    """What one GPU trains.

    Args:
        rate: Images per second.
        source: Of what, and who measured it.
    """

    rate: float
    source: str


def need(model: str, gpu: str, rate: float | None) -> Need:
    """The images per second that one GPU trains.

    Args:
        model: Of `MODELS`.
        gpu: Of `GPUS`.
        rate: As measured by the user, instead of what is known.

    Raises:
        UserError: Nothing is known of that model or GPU.
    """
    if rate is not None:
        if rate <= 0:
            raise UserError.at("--rate", f"must be more than 0, not {rate}")
        return Need(rate, "as you say")
    remedy = "measure yours with data=synthetic, and say it: --rate 1500"
    for option, value, known in (("--model", model, MODELS), ("--gpu", gpu, GPUS)):
        if value not in known:
            close = closest(value, known)
            what = f"no rate of {value} is known; known are {', '.join(known)}"
            raise UserError.at(option, what, f"{option} {close}" if close else remedy)
    published, source = GPUS[gpu]
    if model == "resnet50":
        return Need(published, f"resnet50 on one {gpu.upper()} ({source})")
    factor = MODELS["resnet50"] / MODELS[model]
    return Need(
        published * factor, f"{model} on one {gpu.upper()}, estimated from resnet50's by GFLOP"
    )


def workers_for(rate: float, per_core: float) -> int:
    """Loader processes that decode `rate` images per second, each on a core of its own."""
    return max(1, math.ceil(rate * BESIDES / per_core))


def cores_for(rate: float, per_core: float) -> int:
    """Theirs, and one for the training process, which never sleeps."""
    return workers_for(rate, per_core) + 1


@dataclass(frozen=True)
class Format:
    """A way in which the images may lie.

    Args:
        name: For the table.
        per_core: Images per second that one core decodes, measured here.
        how: What to type to have it.
    """

    name: str
    per_core: float
    how: str = ""


@dataclass(frozen=True)
class FeedVerdict:
    """Whether the GPUs will be fed.

    Args:
        fed: Yes or no.
        text: In a sentence.
        overrides: What the run should be told.
        before: A command to run first, if any.
    """

    fed: bool
    text: str
    overrides: tuple[str, ...] = ()
    before: str = ""


def judge(
    wanted: Need, formats: list[Format], reading: float, cores: int, gpus: int
) -> FeedVerdict:
    """Compares what is needed with what this machine reads and decodes.

    Args:
        wanted: Of each GPU.
        formats: As it lies first, then what it could be made, slower ones first.
        reading: Images per second that one process reads from the disk.
        cores: Of this machine.
        gpus: That share them.
    """
    share, per_core = cores / gpus, formats[0].per_core
    needed = cores_for(wanted.rate, per_core)
    if needed <= share:
        workers = workers_for(wanted.rate, per_core)
        several = "s" * (workers > 1)
        text = f"fed: {workers} worker{several} and the training itself, on {share:g} cores per GPU"
        # Who waits for the disk takes no core: more workers repair that.
        waiting = math.ceil(wanted.rate * (BESIDES / per_core + 1 / reading))
        if waiting > workers:
            text += f"; {waiting} workers while the disk's cache is cold"
        default = loader_workers(int(share))
        return FeedVerdict(
            True, text, (f"data.num_workers={waiting}",) if waiting > default else ()
        )
    # Whole processes, as in `needed`; rounded down, since what starves is never at 100 %.
    percent = int(100 * (int(share) - 1) * per_core / BESIDES / wanted.rate)
    text = f"starved: {share:g} core{'s' * (share != 1)} per GPU"
    if share < 2:
        text += f" {'has' if share == 1 else 'have'} the training itself to do"
    else:
        text += f" decode {percent or 'less than 1'} % of what it trains"
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
    """Shared memory, through which loaders hand over their batches, in bytes.

    Args:
        size: Of /dev/shm; None: there is none to look at.
        needed: By all loaders of this machine.
    """

    size: int | None
    needed: int

    @property
    def fits(self) -> bool:
        return self.size is None or self.size >= self.needed


def shm(workers: int, gpus: int, batch: int, image_size: int) -> Shm:
    """Of what is there and what `workers` per GPU need, who each hold PREFETCH batches.

    One batch more per GPU is on its way to the device.
    """
    needed = gpus * (workers * PREFETCH + 1) * batch * 3 * image_size**2
    place = Path("/dev/shm")
    return Shm(shutil.disk_usage(place).total if place.is_dir() else None, needed)
