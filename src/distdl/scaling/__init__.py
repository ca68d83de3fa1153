"""How fast a step would be on more devices than there are: a model on paper (docs/scaling.md).

It imports no torch.

    from distdl.scaling import Link, Links, Setting, predict, table
"""

from distdl.scaling.fit import Fit, fit
from distdl.scaling.links import Link, Links
from distdl.scaling.predict import PredictedRow, Prediction, predict, table
from distdl.scaling.setting import STRATEGIES, Setting

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
