"""Images per second of resnet50 (224 px, bf16 autocast, channels_last, synthetic) on one GPU."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torchvision


def by_hand(batch_size: int = 256, steps: int = 60, warm_up: int = 20) -> float:
    """A plain PyTorch loop with the same settings: uint8 images on the device, normalised there."""
    torch.backends.cudnn.benchmark = True
    device = torch.device("cuda")
    model = torchvision.models.resnet50(zero_init_residual=True)
    model = model.to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    pool = torch.randint(0, 256, (batch_size, 3, 224, 224), dtype=torch.uint8, device=device)
    labels = torch.randint(0, 1000, (batch_size,), device=device)
    mean = torch.tensor([123.675, 116.28, 103.53], device=device).view(1, 3, 1, 1)
    std = torch.tensor([58.395, 57.12, 57.375], device=device).view(1, 3, 1, 1)
    started = 0.0
    for step in range(warm_up + steps):
        if step == warm_up:
            torch.cuda.synchronize()
            started = time.perf_counter()
        images = ((pool.float() - mean) / std).contiguous(memory_format=torch.channels_last)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    torch.cuda.synchronize()
    return batch_size * steps / (time.perf_counter() - started)


def by_distdl(folder: Path, batch_size: int = 256, steps: int = 60, warm_up: int = 20) -> float:
    """The same by `python -m distdl`: the median of its log windows after the warm-up."""
    command = [
        *(sys.executable, "-m", "distdl", "+experiment=resnet50_ddp", "strategy=single"),
        *("trainer.devices=1", "trainer.accelerator=gpu", f"data.batch_size={batch_size}"),
        *(f"trainer.limit_train_batches={warm_up + steps}", "trainer.limit_val_batches=0"),
        *("trainer.log_every_n_steps=10", "tracking=none", f"output_dir={folder}"),
    ]
    env = {k: v for k, v in os.environ.items() if k != "RANK"}
    subprocess.run(command, check=True, env=env, cwd=folder)
    journal = max(folder.glob("*/*/logs/metrics.jsonl"), key=lambda p: p.stat().st_mtime)
    records = map(json.loads, journal.read_text().splitlines())
    speeds = [
        r["metrics"]["perf/images_per_second"]
        for r in records
        if "perf/images_per_second" in r["metrics"] and r["step"] > warm_up
    ]
    return statistics.median(speeds)
