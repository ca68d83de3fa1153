"""The name by which users' own code imports `distdl.worker.build`."""

from distdl.worker.build import Built

__all__ = ["Built"]
