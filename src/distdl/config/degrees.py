"""The degrees of a strategy: the factors into which it divides the ranks of a run.

A pipeline has replicas and stages, a mesh of devices tensor-parallel groups and their ranks. Each
strategy declares its degrees below, once. From that follow how many shares the data have, who takes
one, and whether the product of all degrees is the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from distdl.job import Resources
from distdl.util.errors import Problem, UserError

DATA, TENSOR = "data_parallel_size", "tensor_parallel_size"


@dataclass(frozen=True)
class Degree:
    """One factor.

    Args:
        key: Of the strategy's node; "": it has none, and is what the other degrees leave.
        one, several: What it counts.
        alike: Whether the ranks along it have the same samples.
    """

    key: str
    one: str
    several: str
    alike: bool = False


@dataclass(frozen=True)
class Division:
    """How a strategy divides the ranks.

    Args:
        degrees: The outermost first.
        target: How the name of the strategy's class ends. A node with the key of a degree belongs
            to the division in any case.
        of_a_node: If no degree is given, the innermost is the ranks of a node, else all ranks.
    """

    degrees: tuple[Degree, ...]
    target: str = ""
    of_a_node: bool = False

    @property
    def keys(self) -> set[str]:
        return {degree.key for degree in self.degrees if degree.key}

    def has(self, node: Mapping[str, object]) -> bool:
        named = bool(self.target) and str(node.get("_target_")).endswith(f".{self.target}")
        return named or not self.keys.isdisjoint(node)

    def sizes(self, node: Mapping[str, object], ranks: int, nodes: int = 1) -> dict[Degree, int]:
        """The size of each degree. Their product may be wrong: `problems` says so."""
        given = self._given(node)
        rest = [degree for degree in self.degrees if degree not in given]
        if len(rest) > 1:
            innermost = rest.pop()
            given[innermost] = max(1, ranks // nodes) if self.of_a_node else ranks
        if rest:
            given[rest[0]] = max(1, ranks // math.prod(given.values()))
        return {degree: given[degree] for degree in self.degrees}

    def _given(self, node: Mapping[str, object]) -> dict[Degree, int]:
        values = {degree: node.get(degree.key) for degree in self.degrees if degree.key}
        return {d: v for d, v in values.items() if isinstance(v, int) and v > 0}

    def shares(self, node: Mapping[str, object], ranks: int, nodes: int = 1) -> int:
        """How many ranks, or groups of them, take different samples."""
        alike = [size for d, size in self.sizes(node, ranks, nodes).items() if d.alike]
        return max(1, ranks // math.prod(alike))

    def problems(self, node: Mapping[str, object], ranks: int, nodes: int = 1) -> Iterator[Problem]:
        """Whether the product of the degrees is the number of ranks; a path is the key alone."""
        sizes = self.sizes(node, ranks, nodes)
        product = math.prod(sizes.values())
        if product == ranks:
            return
        given = self._given(node)
        devices = f"{ranks} device{'s' if ranks > 1 else ''}"
        enough = f"{product} devices in all"
        if len(given) < len(self.degrees):
            degree = next(iter(given))
            fit = [str(n) for n in range(2, ranks + 1) if ranks % n == 0]
            count = given[degree]
            what = f"{count} {degree.several} do not divide the {devices}"
            yield Problem(
                degree.key,
                what=what,
                remedy=f"strategy.{degree.key}={' or '.join(fit)}" if fit else enough,
                code="indivisible",
            )
            return
        what = f"{in_words(sizes)} are {product} devices, and the run has {ranks}"
        for degree, size in sizes.items():
            fitting, rest = divmod(ranks * size, product)
            if not rest and fitting:
                yield Problem(
                    degree.key,
                    what=what,
                    remedy=f"strategy.{degree.key}={fitting}, or {enough}",
                    code="indivisible",
                )
                return
        yield Problem(self.degrees[0].key, what=what, remedy=enough, code="indivisible")

    def refuse(self, node: Mapping[str, object], ranks: int, nodes: int = 1) -> None:
        """Raises a UserError if the product of the degrees is not the number of ranks."""
        found = [at_strategy(problem) for problem in self.problems(node, ranks, nodes)]
        if found:
            raise UserError(*found)


EACH = Division((Degree("", "device", "devices"),))
PIPELINE = Division(
    (
        Degree("", "pipeline", "pipelines"),
        Degree("stages", "stage", "stages", alike=True),
    )
)
# Lightning's strategy has the same arguments as ours.
MESH = Division(
    (
        Degree(DATA, "tensor-parallel group", "tensor-parallel groups"),
        Degree(TENSOR, "rank", "ranks in each group", alike=True),
    ),
    target="ModelParallelStrategy",
    of_a_node=True,
)


def division_of(strategy: object) -> Division:
    """That of a strategy's node. A name, as Lightning takes one, is refused elsewhere."""
    node = strategy if isinstance(strategy, Mapping) else {}
    return next((each for each in (PIPELINE, MESH) if each.has(node)), EACH)


def in_words(sizes: Mapping[Degree, int]) -> str:
    """`2 pipelines x 1 stage`."""
    return " x ".join(f"{n} {d.one if n == 1 else d.several}" for d, n in sizes.items())


def described(config: Mapping[str, Any], size: Resources) -> Iterator[str]:
    """How a run's strategy divides its ranks in more than one way; else nothing."""
    node = config.get("strategy")
    division = division_of(node)
    if division is not EACH:
        yield in_words(division.sizes(node or {}, size.world_size, size.num_nodes))


def at_strategy(problem: Problem) -> Problem:
    """The problem with its full path, `strategy...`."""
    return replace(problem, path=f"strategy.{problem.path}".removesuffix("."))
