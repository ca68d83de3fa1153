"""ResNet-50 on one GPU: 224 px, bf16, channels_last, synthetic images, batch 256.

    python -m benchmarks.run gpu

The competitor is timm's resnet50 in a bare PyTorch loop: autocast, channels_last, cudnn's
autotuning, torch's SGD; then the same loop under `torch.compile(mode="max-autotune")`. distdl runs
from its command line with everything that a run has: with the defaults, with
`model.compile=measured`, and with DDP on one device. The arms are interleaved, and each run of
distdl is a separate process. The loop is compiled once, and the modes of `model.compile` are
measured once: later rounds train with the chosen one, as a resumed run does. The loops take a
device and sizes, so that a test can run them on a CPU.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.nn import functional as F

from benchmarks.table import Goal, Result, against_itself, paired, row

REPEATS = 3
# DRAM traffic of an image in a training step, in bytes, with BatchNorm, ReLU and the residual's
# addition fused (NHWC, bf16): computed from the layers' shapes.
BYTES_PER_IMAGE = 353e6
TITLE = "resnet50, 224 px, bf16, synthetic, batch 256, one GPU (img/s)"
AGAINST_LOOP = "resnet50 224 px bf16, img/s against timm's model in a bare PyTorch loop"
AGAINST_COMPILED = 'the same against torch.compile(mode="max-autotune") of that loop'
OF_MEMORY = "img/s x 353 MB against the copy bandwidth of the same run"
DDP_ALONE = "DDP with world size 1 against no DDP"
LOOP = "timm, bare loop"
AGAIN = "timm, bare loop, again"
COMPILED = "timm, max-autotune"
PLAIN, FAST, DDP = "distdl", "distdl, model.compile=measured", "distdl, strategy=ddp"


def goals(ratios: dict[str, float], same: tuple[float, float] | None = None) -> list[Goal]:
    """The four goals, with their measured ratios, if any."""
    bounds = {AGAINST_LOOP: 1.3, AGAINST_COMPILED: 1.1, OF_MEMORY: 0.6, DDP_ALONE: 0.97}
    return [
        Goal(what, f"at least {bound}", ratios.get(what), same if bound < 1 else None, "GPU")
        for what, bound in bounds.items()
    ]


def not_run() -> list[Goal]:
    return goals({})


@dataclass(frozen=True)
class Size:
    """The sizes of a measurement; the defaults are the benchmark's."""

    batch: int = 256
    pixels: int = 224
    classes: int = 1000
    warm_up: int = 20
    steps: int = 60
    model: str = "resnet50"

    @property
    def window(self) -> int:
        """Steps of one of distdl's log windows."""
        return max(1, self.steps // 6)


class Loop:
    """The bare loop: uint8 images on the device, normalised there; forward, backward, SGD.

    `compiled`: with torch.compile(mode="max-autotune").
    """

    def __init__(self, device: torch.device, size: Size, compiled: bool = False) -> None:
        import timm

        torch.backends.cudnn.benchmark = True
        self.device = device
        self.size = size
        model = timm.create_model(size.model, num_classes=size.classes)
        self.model = model.to(device, memory_format=torch.channels_last).train()
        self.forward: Callable[..., Any] = self.model
        if compiled:
            self.forward = torch.compile(self.model, mode="max-autotune")
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4
        )
        shape = (size.batch, 3, size.pixels, size.pixels)
        self.images = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
        self.labels = torch.randint(0, size.classes, (size.batch,), device=device)
        self.mean = torch.tensor([123.675, 116.28, 103.53], device=device).view(1, 3, 1, 1)
        self.std = torch.tensor([58.395, 57.12, 57.375], device=device).view(1, 3, 1, 1)

    def step(self) -> None:
        images = (self.images.float() - self.mean) / self.std
        images = images.contiguous(memory_format=torch.channels_last)
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            loss = F.cross_entropy(self.forward(images), self.labels)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()

    def rate(self) -> float:
        """Images per second, measured after a warm-up."""
        for _ in range(self.size.warm_up):
            self.step()
        synchronize(self.device)
        started = time.perf_counter()
        for _ in range(self.size.steps):
            self.step()
        synchronize(self.device)
        rate = self.size.batch * self.size.steps / (time.perf_counter() - started)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # distdl's processes need the memory
        return rate


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def by_distdl(folder: Path, device: torch.device, size: Size, *overrides: str) -> Path:
    """Trains the same by `python -m distdl`; returns the run's directory.

    Raises:
        RuntimeError: The command failed; the message has the end of its output.
    """
    name = f"run-{len([*folder.glob('*/run-*')])}"
    command = [
        sys.executable,
        "-m",
        "distdl",
        "+experiment=resnet50_ddp",
        f"model={size.model}",
        "trainer.devices=1",
        f"trainer.accelerator={'gpu' if device.type == 'cuda' else 'cpu'}",
        f"data.batch_size={size.batch}",
        f"data.image_size={size.pixels}",
        f"data.num_classes={size.classes}",
        "trainer.limit_val_batches=0",
        f"trainer.limit_train_batches={size.warm_up + size.steps}",
        f"trainer.log_every_n_steps={size.window}",
        "tracking=none",
        f"output_dir={folder}",
        f"name={name}",
        *overrides,
    ]
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(overrides)}: {(done.stdout + done.stderr)[-3000:]}")
    (run,) = folder.glob(f"*/{name}")
    return run


def rate_of(run: Path, size: Size) -> float:
    """Images per second: the median of the log windows that began after the warm-up."""
    records = map(json.loads, (run / "logs/metrics.jsonl").read_text().splitlines())
    return statistics.median(
        r["metrics"]["perf/images_per_second"]
        for r in records
        if "perf/images_per_second" in r["metrics"] and r["step"] >= size.warm_up + size.window
    )


class Chosen:
    """distdl with `model.compile=measured`; after the first run with the mode that was chosen."""

    mode: object = "measured"

    def train(self, folder: Path, device: torch.device, size: Size) -> Path:
        compile = f"model.compile={str(self.mode).lower()}"
        run = by_distdl(folder, device, size, "strategy=single", compile)
        if self.mode == "measured":
            launch = yaml.safe_load((run / "attempts/001/launch.yaml").read_text())
            self.mode = launch["changes"]["model.compile"]
        return run


def measured(
    device: torch.device, size: Size, repeats: int, folder: Path
) -> tuple[dict[str, list[float]], list[float], object]:
    """Images per second of every arm, the copy bandwidths in bytes per second, and the mode that
    `model.compile=measured` has chosen."""
    from distdl.tools.measure import limits

    loop = Loop(device, size)
    compiled = Loop(device, size, compiled=True)
    own = (folder, device, size)
    chosen = Chosen()
    arms: dict[str, Callable[[], float]] = {
        LOOP: loop.rate,
        AGAIN: loop.rate,
        PLAIN: lambda: rate_of(by_distdl(*own, "strategy=single"), size),
        DDP: lambda: rate_of(by_distdl(*own, "strategy=ddp"), size),
        # Those that compile for minutes in the first round come last.
        FAST: lambda: rate_of(chosen.train(*own), size),
        COMPILED: compiled.rate,
    }
    rates: dict[str, list[float]] = {name: [] for name in arms}
    copies = []
    for number in range(repeats):
        copies.append(limits.measure(device, "bf16-mixed").copy_bytes)
        for name, arm in arms.items():
            rates[name].append(arm())
            print(f"  {number + 1} of {repeats}  {name}: {rates[name][-1]:,.0f} img/s", flush=True)
    return rates, copies, chosen.mode


def main(repeats: int = REPEATS, size: Size | None = None) -> Result:
    if not torch.cuda.is_available():
        raise RuntimeError("needs an NVIDIA GPU, and torch sees none on this machine")
    with tempfile.TemporaryDirectory() as folder:
        rates, copies, mode = measured(torch.device("cuda"), size or Size(), repeats, Path(folder))
    name = max((PLAIN, FAST), key=lambda arm: statistics.median(rates[arm]))
    ours = rates[name]
    first, *more = goals(
        {
            AGAINST_LOOP: paired(ours, rates[LOOP]),
            AGAINST_COMPILED: paired(ours, rates[COMPILED]),
            OF_MEMORY: BYTES_PER_IMAGE * paired(ours, copies),
            DDP_ALONE: paired(rates[DDP], rates[PLAIN]),
        },
        against_itself(rates[LOOP], rates[AGAIN]),
    )
    return Result(
        title=TITLE,
        what=first.what,
        competitor="timm's resnet50 in a bare PyTorch loop, same batch",
        goal=first.goal,
        ratio=first.measured or 0.0,
        rows=[row(n, values, "img/s") for n, values in rates.items()]
        + [row("copy bandwidth", [value / 1e9 for value in copies], "GB/s")],
        command="python -m benchmarks.run gpu",
        notes=f"distdl's number in the first three ratios is that of `{name}`; measured, and used "
        f"from then on, was model.compile={str(mode).lower()}.",
        more=more,
        where="GPU",
    )
