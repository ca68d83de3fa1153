"""Predicts the speed of a step on more devices than are available, by a model (docs/scaling.md).

It imports no torch.

    from distdl.tools.scaling import Link, Links, Setting, predict, table
"""

from distdl.tools.scaling.fit import Fit, fit
from distdl.tools.scaling.links import Link, Links
from distdl.tools.scaling.predict import PredictedRow, Prediction, predict, table
from distdl.tools.scaling.setting import STRATEGIES, Setting

__all__ = [
    "STRATEGIES",
    "Fit",
    "Link",
    "Links",
    "PredictedRow",
    "Prediction",
    "Setting",
    "fit",
    "predict",
    "table",
]
