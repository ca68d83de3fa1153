"""Each journey of tests/adoption/table.py, killed with -9 in three epochs and resumed each time: it
ends with the bits of one that was never disturbed, and that one trains as plain Lightning does.

`$DISTDL_SEED` chooses batches, ranks and how often checkpoints are written.
"""

import json
import os
import random

import pytest

from tests.adoption.project import Project
from tests.adoption.table import JOURNEYS
from tests.conftest import matrix_only
from tests.multiprocess.test_campaign import differing, last_checkpoint

SEED = os.environ.get("DISTDL_SEED", "34")
HALVED = ("trainer.devices=2", "data.batch_size=2", "strategy=ddp")


def logged(run):
    """(step, name) -> the metric in the journal; a later attempt's counts."""
    lines = (run / "logs/metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    names = ("train", "val", "mean", "lr")
    return {
        (record["step"], name): value
        for record in records
        for name, value in record["metrics"].items()
        if name.startswith(names)
    }


@matrix_only
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", JOURNEYS)
def test_killed_in_three_epochs_it_ends_as_if_undisturbed(name, ranks, tmp_path):
    project = Project(JOURNEYS[name], tmp_path / "ours")
    draw = random.Random(f"{SEED} {name} {ranks}")
    more = [f"checkpoint.every_n_steps={draw.choice([1, 2, 3, 'null'])}"]
    more += [*HALVED, *(project.idiom.two or ())] if ranks == 2 else []
    project.start("whole", *more)
    whole = [project.seen("whole", rank) for rank in range(ranks)]
    assert len(whole[0]) == project.idiom.batches
    if ranks == 1:
        expected = project.control("whole")
        assert whole[0] == project.seen("control")
        metrics = project.metrics("whole")
        assert {name: metrics.get(name) for name in expected["fit"]} == expected["fit"]
    # Not the first batch of an epoch.
    inside = {}
    for batch, line in whole[0].items():
        inside.setdefault(line["epoch"], []).append(batch)
    epochs = sorted(draw.sample([*inside], 3))
    kills = [f"{draw.randrange(ranks)} {draw.choice(inside[epoch][1:])}" for epoch in epochs]
    project.start("killed", *more, kill=kills[0])
    for kill in (*kills[1:], ""):
        project.resume("killed", kill=kill)
    why = f"killed at {kills}, {more}"
    for rank in range(ranks):
        seen = project.seen("killed", rank)
        assert seen.keys() == whole[rank].keys(), why
        for batch, line in whole[rank].items():
            # A metric of an earlier batch is shown until the process ends.
            assert seen[batch].pop("logged").items() <= line.pop("logged").items(), why
            assert seen[batch] == line, why
    runs = [project.folder / "outputs/ours" / run for run in ("whole", "killed")]
    assert not differing(*map(last_checkpoint, runs)), why
    assert logged(runs[0]) == logged(runs[1]), why
