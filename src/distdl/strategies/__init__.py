"""Strategies that are not simply a class of Lightning's."""


def auto() -> str:
    """Lightning's choice: one process alone, DDP over several."""
    return "auto"


def single() -> str:
    """One process on one device; validation refuses more."""
    return "auto"
