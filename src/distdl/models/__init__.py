"""Models: LightningModules for the `model` node."""

from distdl.models.classifier import ImageClassifier
from distdl.models.detection_network import torchvision_detector
from distdl.models.detector import Detector

__all__ = ["Detector", "ImageClassifier", "torchvision_detector"]
