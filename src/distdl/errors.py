"""The name by which users' own code imports `distdl.util.errors`."""

from distdl.util.errors import Problem, UserError

__all__ = ["Problem", "UserError"]
