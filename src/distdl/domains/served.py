"""The domains whose models answer outside of their runs. This file goes into every model folder."""

from __future__ import annotations

from typing import Any

from distdl.domains.answers import Answers
from distdl.domains.classification.class_answers import ClassAnswers
from distdl.domains.detection.detection_answers import DetectionAnswers

# By what `model.json` says under "domain"; older folders say nothing, and hold classifiers.
ANSWERS: dict[str, type[Answers[Any, Any]]] = {
    each.domain: each for each in (ClassAnswers, DetectionAnswers)
}
UNNAMED = ClassAnswers.domain
