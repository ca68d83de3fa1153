"""What a worker can be asked to do: each task is a function of the built run."""

from distdl.tasks.benchmark import benchmark
from distdl.tasks.train import train
from distdl.tasks.validate import validate

__all__ = ["benchmark", "train", "validate"]
