"""Data: sampling that resumes exactly, and data modules for images."""

from distdl.data.folder import ImageFolderData
from distdl.data.sampling import EvalBatches, SampleKey, TrainBatches, TrainPosition
from distdl.data.synthetic import SyntheticImages

__all__ = [
    "EvalBatches",
    "ImageFolderData",
    "SampleKey",
    "SyntheticImages",
    "TrainBatches",
    "TrainPosition",
]
