"""Predicts the speed of a step on more devices than are available, by a model (docs/scaling.md).

It imports no torch.

    from distdl.scaling import Link, Links, Setting, predict, table
"""

from distdl.scaling.fit import Fit, fit
from distdl.scaling.links import Link, Links
from distdl.scaling.predict import PredictedRow, Prediction, predict, table
from distdl.scaling.setting import STRATEGIES, Setting

__all__ = ["STRATEGIES", "Fit", "Link", "Links", "PredictedRow", "Prediction", "Setting"]
__all__ += ["fit", "predict", "table"]
