"""The name by which users' own code imports `distdl.util.tail`."""

from distdl.util.tail import tail

__all__ = ["tail"]
