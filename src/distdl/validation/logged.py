"""What a model of distdl's own logs after a validation, and by what its runs are judged."""

from __future__ import annotations

import inspect
import logging
from typing import Any

from distdl.config.recipe import is_own

log = logging.getLogger(__name__)


def metrics_of(model: object) -> dict[str, Any]:
    """`main`: name and direction of the metric that chooses best.ckpt if the user names none;
    `logged`: all names. None: unknown, as of a module of somebody else's, which may log anything.

    Args:
        model: What `model._target_` names.
    """
    domain = getattr(model, "domain", None)
    main = getattr(domain, "main_metric", None)
    known: dict[str, Any] = {"main": None, "logged": None}
    if isinstance(main, str):
        known["main"] = (main, str(getattr(domain, "mode", "max")))
    if inspect.isclass(model) and is_own(model.__module__):
        known["logged"] = _logged(domain)
    return known


def _logged(domain: Any) -> list[str] | None:  # noqa: ANN401 - of a package above this one
    import torch

    try:
        metric = domain.metric()
        metric.start(torch.device("cpu"))
        return sorted(f"val/{name}" for name in metric.result(lambda values: values))
    except Exception as error:  # without a sample it may have no result
        log.debug("the metrics of %s are not known", domain, exc_info=error)
        return None
