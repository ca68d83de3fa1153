"""Each idiom of tests/adoption/table.py under distdl as under plain Lightning.

One run of one rank is killed with -9 in the middle of its second epoch and resumed; Lightning's own
Trainer trains the same project undisturbed. Where the order of the samples is drawn, distdl draws
another one than Lightning, so the control is given that of the run.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.adoption.project import TASKS, Project
from tests.adoption.table import IDIOMS

MATRIX = bool(os.environ.get("DISTDL_MATRIX"))
POINTS = list(range(32))


def idioms(those: str = "") -> list[Any]:
    """As parameters of `project`: outside the matrix only those of which this is true."""
    nothing = pytest.mark.skip(reason="adds nothing to another idiom; make matrix")
    # All of them each time: by their places pytest knows which tests share a project.
    return [
        pytest.param(name, marks=() if MATRIX or not those or getattr(idiom, those) else nothing)
        for name, idiom in IDIOMS.items()
    ]


@pytest.fixture(scope="module", params=idioms())
def project(request, tmp_path_factory) -> Project:
    """A project with its run `one`, killed and resumed."""
    made = Project(request.param, tmp_path_factory.mktemp(request.param) / "ours")
    made.killed_and_resumed("one")
    return made


def epochs(project: Project, run: str, ranks: int = 1) -> list[list[int]]:
    """The ids of the samples in each."""
    return [sorted(i for batch in epoch for i in batch) for epoch in project.order(run, ranks)]


def test_learns_as_under_lightning(project: Project) -> None:
    project.control()
    seen, expected = project.seen("one"), project.seen("control")
    assert seen.keys() == expected.keys() and len(expected) in (24, 32)
    for batch, line in expected.items():
        assert seen[batch] == line, f"batch {batch}"
    metrics, expected = project.metrics("one"), project.control_results()["fit"]
    assert {name: metrics.get(name) for name in expected} == expected
    ids = epochs(project, "one")
    if project.idiom.drawn:
        assert all(len(epoch) == len(POINTS) for epoch in ids) and ids[0] != ids[1]
    else:
        assert ids == [POINTS] * len(ids), "each sample once"


@pytest.mark.parametrize("project", idioms("evaluated"), indirect=True)
@pytest.mark.parametrize("task", TASKS)
def test_evaluated_as_under_lightning(project: Project, task: str) -> None:
    project.resume("one", f"task={task}", "task.checkpoint=last")
    loaders = project.control_results()[task]
    assert project.metrics("one") == {k: v for loader in loaders for k, v in loader.items()}


@pytest.mark.parametrize("project", idioms("two"), indirect=True)
def test_two_ranks_share_what_one_sees(project: Project) -> None:
    """Killed and resumed as well: in each epoch every sample of one rank is seen by one of two."""
    project.killed_and_resumed("two", *project.idiom.halved, ranks=2)
    assert epochs(project, "two", ranks=2) == epochs(project, "one")
    one, other = project.seen("two", rank=0), project.seen("two", rank=1)
    for batch, line in one.items():
        assert line["weights"] == other[batch]["weights"], f"batch {batch}"
        assert project.idiom.drawn or not set(line["ids"]) & set(other[batch]["ids"])
    if MATRIX:
        project.start("undisturbed", *project.idiom.halved, ranks=2)
        assert [one, other] == [project.seen("undisturbed", rank) for rank in (0, 1)]


if MATRIX:

    @pytest.mark.parametrize("every", [1, 7, None])
    @pytest.mark.parametrize("at", [1, 2, 8, 9, 16])
    def test_killed_at_any_batch(project: Project, at: int, every: int | None) -> None:
        """With a checkpoint before it, at an epoch's end only, or none at all."""
        run, saved = f"at-{at}-{every}", every if every and project.idiom.every else "null"
        project.start(run, f"checkpoint.every_n_steps={saved}", kill=f"0 {at}")
        project.resume(run)
        assert project.seen(run) == project.seen("one")
