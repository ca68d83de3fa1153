"""Parameters that no optimizer has: they stay as they are, and nothing else says so."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from torch import nn
from torch.optim import Optimizer

from distdl.optim.parameter_groups import plain_name
from distdl.util.errors import UserError
from distdl.util.wording import first_few, plural

log = logging.getLogger(__name__)


def look(module: nn.Module, optimizers: Iterable[Optimizer], *, speaks: bool) -> None:
    """Warns of trainable parameters that no optimizer has.

    Args:
        module: Its `trained_later`, if it has that, names frozen parameters that will be trained.
        optimizers: All of a training.
        speaks: Whether this rank says what it finds.

    Raises:
        UserError: No optimizer has some of `trained_later`, so that nothing would train them.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    held = {id(parameter) for group in groups for parameter in group["params"]}
    left_out = {n: p for n, p in module.named_parameters() if id(p) not in held}
    later = getattr(module, "trained_later", ())
    never = [name for name in left_out if plain_name(name) in later]
    if never:
        count = plural("parameter", len(never))
        raise UserError.at(
            "model.unfreeze_at",
            what=f"would train {len(never)} {count} that no optimizer has: {first_few(never)}",
            remedy=(
                "give the optimizer all of self.parameters(), those that are frozen too; "
                "or model.unfreeze_at=null"
            ),
            code="incomplete",
        )
    idle = [name for name, parameter in left_out.items() if parameter.requires_grad]
    if idle and speaks:
        log.warning(
            "%d of %d trainable parameters are in no optimizer, and stay as they are: %s",
            len(idle),
            sum(parameter.requires_grad for parameter in module.parameters()),
            first_few(idle),
        )
