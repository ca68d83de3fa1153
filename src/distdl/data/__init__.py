"""Data: sampling that resumes exactly, and data modules for images."""

from distdl.data.objects import StoredObjects
from distdl.data.sampling import EvalBatches, SampleKey, TrainBatches, TrainPosition
from distdl.data.stored import StoredImages
from distdl.data.synthetic import SyntheticImages
from distdl.data.synthetic_jpeg import SyntheticJpegs

__all__ = [
    "EvalBatches",
    "SampleKey",
    "StoredImages",
    "StoredObjects",
    "SyntheticImages",
    "SyntheticJpegs",
    "TrainBatches",
    "TrainPosition",
]
