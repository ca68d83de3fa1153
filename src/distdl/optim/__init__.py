"""The optimizer and the learning rate over time, from their config nodes."""

from distdl.optim.schedules import constant, warmup_cosine, warmup_step

__all__ = ["constant", "warmup_cosine", "warmup_step"]
