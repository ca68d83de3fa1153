"""Loaders of a user's own on two real ranks: other samples on each, and exact on resume."""

from __future__ import annotations

from typing import Any

import pytest

from tests.multiprocess.loader_cases import LOADERS, ROWS, SAMPLES, STEPS, STOP_AT
from tests.strategies import two_ranks

# One process group serves this file, test_ddp and test_traffic.
pytestmark = pytest.mark.xdist_group("two_ranks")


def found(name: str) -> list[Any]:
    return two_ranks.results("tests.multiprocess.loader_cases", timeout=600)[name]


def ids(steps: list[list[float]]) -> list[list[int]]:
    """Of each step, without what was drawn for augmentation."""
    return [[int(value) for value in step[::2]] for step in steps]


@pytest.mark.parametrize("name", LOADERS)
def test_a_killed_and_resumed_run_sees_what_an_undisturbed_one_sees(name) -> None:
    for rank in found(name):
        assert rank["ended"] == f"SIGTERM at step {STOP_AT + 1}"
        assert rank["parts"] == rank["whole"] and len(rank["whole"]) == STEPS
        # A batch sampler without `batch_size` does not say how many samples it takes.
        samples = None if name == "batches" else 2 * ROWS
        assert rank["size"] == [samples, 2 if name == "batches" else 2 * ROWS]


@pytest.mark.parametrize("name", LOADERS)
def test_an_epoch_is_dealt_out(name) -> None:
    """Each sample once, to one of the ranks, and another order in the next epoch."""
    one, two = (ids(rank["whole"]) for rank in found(name))
    epoch = [i for step in one[:8] + two[:8] for i in step]
    assert sorted(epoch) == list(range(SAMPLES))
    assert one[8:] != one[:4]


def test_what_is_to_be_left_alone_is() -> None:
    """`trainer.use_distributed_sampler=false`."""
    one, two = found("alone")
    assert one and ids(one) == ids(two)


def test_a_stream_is_taken_in_turns_or_refused() -> None:
    one, two = (ids(steps) for steps in found("stream"))
    assert one[:2] == [[0, 2], [4, 6]] and two[:2] == [[1, 3], [5, 7]]
    for said in found("unknown"):
        assert "Stream, an iterable dataset" in said and "shards_itself" in said
        assert "trainer.use_distributed_sampler=false" in said


def test_uneven_ranks_finish_a_validation_and_are_refused_in_training() -> None:
    assert found("uneven_validation") == [3 * 3, 2 * 3]
    for said in found("uneven_training"):
        assert "3 batches on rank 0 and 2 on rank 1" in said
        assert "trainer.limit_train_batches=2" in said
