"""Train, from the newest checkpoint if there is one."""

from __future__ import annotations

from distdl.build import Built
from distdl.starting import start
from distdl.tasks.needs import needs


def train(context: Built) -> dict[str, float]:
    """Fits the module and returns the last value of every metric."""
    start(context, context.checkpoint, context.trainer.fit)
    metrics = {k: float(v) for k, v in context.trainer.callback_metrics.items()}
    speeds = sorted(context.metrics.images_per_second)
    if speeds:
        metrics["perf/images_per_second"] = speeds[len(speeds) // 2]
    latest = context.metrics.latest
    return {**{k: v for k, v in latest.items() if k in ("train/loss", "perf/data_wait")}, **metrics}


train.check = needs("training_step", "train_dataloader")  # type: ignore[attr-defined]
