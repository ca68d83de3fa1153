"""What a worker is asked to do with the built run: train, validate, test, predict."""

from distdl.tasks.evaluate import Test, Validate
from distdl.tasks.predict import Predict
from distdl.tasks.train import Train
from distdl.worker.task import Task, Unbuilt

# Their names in the configs of runs: `_target_: distdl.tasks.train`.
predict = Predict
test = Test
train = Train
validate = Validate

__all__ = ["Task", "Unbuilt", "predict", "test", "train", "validate"]
