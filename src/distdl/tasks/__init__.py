"""The tasks that a worker can run: each is a function of the built run."""

from distdl.tasks.benchmark import benchmark
from distdl.tasks.doctor import doctor
from distdl.tasks.evaluate import test, validate
from distdl.tasks.predict import predict
from distdl.tasks.train import train

__all__ = ["benchmark", "doctor", "predict", "test", "train", "validate"]
