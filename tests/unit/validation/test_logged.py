"""What models of distdl's own log after a validation is known before they train."""

from distdl.models import ImageClassifier
from distdl.validation.logged import metrics_of


def test_metrics_of_our_own_models_are_known():
    known = metrics_of(ImageClassifier)
    assert known["main"] == ("val/acc1", "max")
    assert {"val/acc1", "val/acc5", "val/loss"} <= {*known["logged"]}
    foreign = type("Mine", (ImageClassifier,), {"__module__": "mine"})
    assert metrics_of(foreign)["logged"] is None, "it may log more"
