"""Models: LightningModules that a `model` node can name."""

from distdl.models.classifier import ImageClassifier

__all__ = ["ImageClassifier"]
