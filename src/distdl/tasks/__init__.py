"""What a worker is asked to do with the built run: train, validate, test, predict."""

from distdl.tasks.evaluate import test, validate
from distdl.tasks.predict import predict
from distdl.tasks.train import train

__all__ = ["predict", "test", "train", "validate"]
