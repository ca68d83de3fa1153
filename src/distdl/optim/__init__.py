"""Optimizers and learning rate schedules, built from their config nodes."""

from distdl.optim.schedules import constant, warmup_cosine, warmup_linear, warmup_step

__all__ = ["constant", "warmup_cosine", "warmup_linear", "warmup_step"]
