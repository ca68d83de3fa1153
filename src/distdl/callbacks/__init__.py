"""Callbacks: checkpoints and preemption, metrics, progress."""

from distdl.callbacks.averaging import EMAWeightAveraging
from distdl.callbacks.checkpointer import Checkpointer
from distdl.callbacks.metrics import StepMetrics
from distdl.callbacks.module_state import ModuleState
from distdl.callbacks.pictures import Pictures
from distdl.callbacks.progress import Progress
from distdl.callbacks.record_samples import RecordSamples

__all__ = [
    "Checkpointer",
    "EMAWeightAveraging",
    "ModuleState",
    "Pictures",
    "Progress",
    "RecordSamples",
    "StepMetrics",
]
