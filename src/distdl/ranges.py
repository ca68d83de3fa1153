"""The name by which users' own code imports `distdl.util.ranges`."""

from distdl.util.ranges import AboveZero, Count, NotNegative, Positive

__all__ = ["AboveZero", "Count", "NotNegative", "Positive"]
