"""How fast a step would be on more devices than there are: a model on paper (docs/scaling.md).

Standard library and numpy only, so that a prediction costs no start-up time.

    from distdl.scaling import Link, Links, Setting, predict, table
"""

from distdl.scaling.fit import Fit, fit
from distdl.scaling.links import Link, Links
from distdl.scaling.predict import Prediction, Row, predict, table
from distdl.scaling.setting import STRATEGIES, Setting

__all__ = [
    "STRATEGIES",
    "Fit",
    "Link",
    "Links",
    "Prediction",
    "Row",
    "Setting",
    "fit",
    "predict",
    "table",
]
