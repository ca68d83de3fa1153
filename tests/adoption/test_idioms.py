"""Each idiom of tests/adoption/table.py under distdl as under plain Lightning.

One run of one rank is killed with -9 in the middle of its second epoch and resumed; Lightning's own
Trainer trains the same project undisturbed. Where the order of the samples is drawn, distdl draws
another one than Lightning, so the control is given that of the run.
"""

import functools
import json
import os

import pytest
import torch

from tests.adoption.project import Project
from tests.adoption.table import IDIOMS

MATRIX = bool(os.environ.get("DISTDL_MATRIX"))
CHOSEN = [name for name, idiom in IDIOMS.items() if MATRIX or idiom.quick]
TWO = [name for name in CHOSEN if IDIOMS[name].two is not None]
POINTS = list(range(32))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """name -> a project with its run `one`, killed and resumed, and what that printed."""

    @functools.cache
    def of(name):
        project = Project(IDIOMS[name], tmp_path_factory.mktemp(name) / "ours")
        return project, project.killed_and_resumed("one")

    return of


def epochs(project, run, ranks=1):
    """The ids of the samples in each."""
    return [sorted(i for batch in epoch for i in batch) for epoch in project.order(run, ranks)]


@pytest.mark.parametrize("name", CHOSEN)
def test_learns_and_is_evaluated_as_under_lightning(made, name):
    project, _ = made(name)
    results = project.control()
    seen, expected = project.seen("one"), project.seen("control")
    assert len(expected) == project.idiom.batches
    assert seen.keys() == expected.keys()
    for batch, line in expected.items():
        assert seen[batch] == line, f"batch {batch}"
    metrics = project.metrics("one")
    assert {name: metrics.get(name) for name in results["fit"]} == results["fit"]
    order = project.order("one")
    ids = epochs(project, "one")
    if project.idiom.data in ("plain", "stream", "two sets"):
        assert order == [[POINTS[i : i + 4] for i in range(0, 32, 4)]] * len(order)
    elif project.idiom.data == "weighted":
        assert all(len(epoch) == len(POINTS) for epoch in ids)
        assert ids[0] != ids[1]
    else:
        assert ids == [POINTS] * len(ids), "each sample once"
        assert order[0] != order[1], "in another order in each epoch"
    for task in ("validate", "test") if project.idiom.evaluated else ():
        project.resume("one", f"task={task}", "task.checkpoint=last")
        values = {k: v for loader in results[task] for k, v in loader.items()}
        assert project.metrics("one") == values


@pytest.mark.parametrize("name", TWO if MATRIX else [])
def test_two_ranks_share_what_one_sees(made, name):
    """In each epoch one of the two ranks sees each sample that one rank alone sees, also after a
    kill and a resume, and both ranks have the same weights."""
    project, _ = made(name)
    halved = ("trainer.devices=2", "data.batch_size=2", *project.idiom.two)
    project.killed_and_resumed("two", *halved, rank=1)
    assert epochs(project, "two", ranks=2) == epochs(project, "one")
    one, other = project.seen("two", rank=0), project.seen("two", rank=1)
    for batch, line in one.items():
        assert line["weights"] == other[batch]["weights"], f"batch {batch}"
        if project.idiom.data != "weighted":
            assert not set(line["ids"]) & set(other[batch]["ids"])
    project.start("undisturbed", *halved)
    assert [one, other] == [project.seen("undisturbed", rank) for rank in (0, 1)]


def test_what_a_module_logs_as_its_losses_is_shown_with_each_rate(made):
    """Unless a bar of Lightning's replaces ours."""
    project, printed = made("gan")
    for name in ("swa", "callbacks"):
        assert "samples/s  data_wait" in printed
        assert "samples/s  data_wait" not in made(name)[1]
    first, *_, last = [line for line in printed.splitlines() if " step " in line]
    assert "  g_loss " in first
    assert "  d_loss " in first
    assert "  lr 0.01/0.02  " in first
    assert "step 24  batch 8/8" in last, "a step is a batch, whoever steps how often"
    journal = (project.folder / "outputs/ours/one/logs/metrics.jsonl").read_text()
    records = [json.loads(line)["metrics"] for line in journal.splitlines()]
    rates = [record for record in records if "lr" in record][-1]
    # Stepped after each of two epochs; the names are those of LearningRateMonitor.
    assert rates["lr"] == rates["lr-Adam"] == 0.01 / 4
    assert rates["lr-SGD"] == 0.02 / 4


def test_what_swa_has_averaged_is_saved(made):
    project, _ = made("swa")
    (file,) = project.folder.glob("outputs/ours/one/model_checkpoints/swa_epoch_*.ckpt")
    saved = torch.load(file, weights_only=True)
    (state,) = (v for k, v in saved["callbacks"].items() if k.startswith("Stochastic"))
    average, weights = state["average_model_state"], saved["state_dict"]
    assert all(torch.equal(weights[k], v) for k, v in average.items() if "weight" in k)


if MATRIX:

    @pytest.mark.parametrize("every", [1, 7, None])
    @pytest.mark.parametrize("at", [1, 2, 8, 9, 16])
    @pytest.mark.parametrize("name", IDIOMS)
    def test_killed_at_any_batch(made, name, at, every):
        """With a checkpoint before it, at an epoch's end only, or none at all."""
        project, _ = made(name)
        run = f"at-{at}-{every}"
        saved = every if every and project.idiom.every else "null"
        project.start(run, f"checkpoint.every_n_steps={saved}", kill=f"0 {at}")
        project.resume(run)
        resumed = project.seen(run)
        one = project.seen("one")
        assert resumed.keys() == one.keys()
        for batch, expected in one.items():
            # A metric of an earlier batch is shown until the process ends.
            assert resumed[batch].pop("logged").items() <= expected.pop("logged").items()
            assert resumed[batch] == expected
