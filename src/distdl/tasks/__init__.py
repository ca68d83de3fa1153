"""What a worker can be asked to do: each task is a function of the built run."""

from typing import Any

from distdl.tasks.evaluate import test, validate
from distdl.tasks.train import train

__all__ = ["benchmark", "test", "train", "validate"]


def __getattr__(name: str) -> Any:
    # Imported when it is named: distdl.benchmark stands above this package.
    if name != "benchmark":
        raise AttributeError(name)
    from distdl.tasks.benchmark import benchmark

    # The import has put the module itself under this name.
    globals()[name] = benchmark
    return benchmark
