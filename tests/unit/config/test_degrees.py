"""The degrees of every strategy are checked in one place: their product is the number of ranks."""

import pytest

from distdl.config.degrees import EACH, MESH, PIPELINE, division_of, in_words
from distdl.job import Resources
from distdl.strategies import PipelineStrategy
from distdl.util.errors import UserError
from distdl.validation import rules
from distdl.validation.resolve import Resolved

OURS = "distdl.strategies.ModelParallelStrategy"
LIGHTNINGS = "lightning.pytorch.strategies.ModelParallelStrategy"
AUTO = {"data_parallel_size": "auto", "tensor_parallel_size": "auto"}


def test_the_node_of_a_strategy_shows_its_division():
    assert division_of({"_target_": "distdl.strategies.DDPStrategy"}) is EACH
    assert division_of({"_target_": LIGHTNINGS}) is MESH
    assert division_of({"stages": None}) is PIPELINE
    assert division_of("ddp") is EACH
    assert division_of(None) is EACH


# Ranks and nodes, and the shares of the data.
FITTING = [
    ({}, (8, 2), "8 devices", 8),
    ({"stages": None}, (4, 1), "1 pipeline x 4 stages", 1),
    ({"stages": 2}, (4, 1), "2 pipelines x 2 stages", 2),
    ({"stages": 4}, (4, 1), "1 pipeline x 4 stages", 1),
    ({"_target_": OURS, **AUTO}, (8, 2), "2 tensor-parallel groups x 4 ranks in each group", 2),
    ({"_target_": OURS}, (8, 1), "1 tensor-parallel group x 8 ranks in each group", 1),
    (AUTO | {"tensor_parallel_size": 2}, (8, 1), "4 tensor-parallel groups x 2 ranks", 4),
    (AUTO | {"data_parallel_size": 8}, (8, 2), "8 tensor-parallel groups x 1 rank", 8),
    ({"data_parallel_size": 2, "tensor_parallel_size": 2}, (4, 1), "2 tensor-parallel", 2),
]


@pytest.mark.parametrize(("node", "size", "words", "shares"), FITTING)
def test_degrees_that_are_not_given_are_what_the_others_leave(node, size, words, shares):
    division = division_of(node)
    assert [*division.problems(node, *size)] == []
    assert in_words(division.sizes(node, *size)).startswith(words)
    assert division.shares(node, *size) == shares


BOTH = {"data_parallel_size": 2, "tensor_parallel_size": 3}
UNFIT = [
    ({"stages": 3}, 4, "stages: 3 stages do not divide the 4 devices", "stages=2 or 4"),
    ({"stages": 2}, 1, "stages: 2 stages do not divide the 1 device", "2 devices in all"),
    (
        AUTO | {"tensor_parallel_size": 3},
        4,
        "tensor_parallel_size: 3 ranks in each group do not divide the 4 devices",
        "tensor_parallel_size=2 or 4",
    ),
    (
        AUTO | {"data_parallel_size": 3},
        4,
        "data_parallel_size: 3 tensor-parallel groups do not divide the 4 devices",
        "data_parallel_size=2 or 4",
    ),
    (
        BOTH,
        9,
        "data_parallel_size: 2 tensor-parallel groups x 3 ranks in each group are 6 devices, "
        "and the run has 9",
        "data_parallel_size=3, or 6 devices in all",
    ),
    (BOTH, 4, "tensor_parallel_size: 2 tensor-parallel groups x 3 ranks", "_parallel_size=2, or"),
    (BOTH, 5, "data_parallel_size: 2 tensor-parallel groups x 3 ranks", "6 devices in all"),
    ({"_target_": LIGHTNINGS, **BOTH}, 5, "data_parallel_size: 2 tensor-parallel", "6 devices"),
]


@pytest.mark.parametrize(("node", "ranks", "what", "remedy"), UNFIT)
def test_a_product_that_is_not_the_number_of_ranks_is_refused_in_one_message(
    node, ranks, what, remedy
):
    resolved = Resolved(values={"strategy": node, "trainer": {}})
    (problem,) = rules.topology(resolved, Resources(1, ranks, "cpu"), local=False)
    assert f"{problem.path}: {problem.what}".startswith(f"strategy.{what}")
    assert remedy in problem.remedy
    with pytest.raises(UserError, match=what.partition(": ")[2]):
        division_of(node).refuse(node, ranks)


def test_a_worker_asks_the_same_object():
    with pytest.raises(UserError, match="3 stages do not divide the 4 devices"):
        PipelineStrategy(stages=3).position_of(0, 4)
