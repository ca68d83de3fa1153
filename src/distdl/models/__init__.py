"""Models: LightningModules for the `model` node."""

from distdl.models.classifier import ImageClassifier

__all__ = ["ImageClassifier"]
