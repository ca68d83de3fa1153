"""Other services' loggers: what they receive, on which rank, and what is reported without one."""

import functools
import importlib.util
from pathlib import Path

import pytest
from lightning.pytorch.loggers.logger import DummyLogger
from torch import nn

from distdl.config import compose
from distdl.launch import sweeps
from distdl.runs import provenance
from distdl.util.errors import UserError
from distdl.validation import validate
from distdl.worker import described, summary
from tests.tracking.conftest import Tracked


class WandbLogger(DummyLogger):
    """Known by its name; accepts what Lightning's accepts."""

    made = []
    experiment = property(lambda self: self)

    def __init__(self, save_dir, id, name, project):
        super().__init__()
        assert Path(save_dir).is_dir()
        self.names = (id, name, project)
        self.params = {}
        self.ended = None
        self.offline = True
        self.made.append(self)

    def log_hyperparams(self, params, *_):
        if "broken" in params:
            raise RuntimeError("No API key configured")
        self.params |= params

    def finish(self, exit_code=0):
        self.ended = exit_code


def test_a_service_has_the_run_once_and_continues_it(tmp_path):
    preset = {"wandb": functools.partial(WandbLogger, project="p")}
    (tmp_path / "e/r/logs/wandb").mkdir(parents=True)
    run = {"name": "lr=0.1", "key": "k" * 32, "params": {"optimizer.lr": 0.1, "api_token": "x"}}
    for attempt, status in ((1, "FAILED"), (2, "SUCCEEDED")):
        for rank in (0, 1):
            tracked = Tracked(tmp_path, "e/r", attempt, preset, rank=rank, node_rank=rank, **run)
            assert len(tracked.loggers) == 2
            assert [*tracked.tracking.services] == ([] if rank else ["wandb"])
            if rank == 0:
                tracked.tracking.describe({"parameters.total": 7})
                assert tracked.tracking.how_to_open()[0].startswith("wandb sync ")
            tracked.finish(status)
    first, other, again, last = WandbLogger.made
    assert first.names == again.names == ("k" * 32, "lr=0.1", "p")
    assert first.params == {"optimizer.lr": "0.1", "api_token": "***", "parameters.total": 7}
    assert (first.ended, again.ended) == (1, 0)
    assert (other.params, other.ended, last.params, last.ended) == ({}, None, {}, None)
    with pytest.raises(UserError, match="RuntimeError: No API key configured") as error:
        Tracked(tmp_path, components=preset, params={"broken": 1})
    assert [problem.path for problem in error.value.problems] == ["tracking.wandb"]


def test_a_preset_names_the_extra_that_it_lacks(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "comet_ml" else find(n))
    config = compose.compose(["tracking=[csv,comet]"])
    (problem,) = validate.problems_of(config)
    assert problem.path == "tracking.comet"
    assert "comet_ml" in problem.what
    assert "pip install 'distdl[comet]'" in problem.remedy
    assert not validate.problems_of(config, local=False)  # a job has its own environment
    with pytest.raises(UserError, match=r"'neptune'\n? .*(.|\n)*Neptune was shut down"):
        compose.compose(["tracking=neptune"])


def test_swept_values_come_first_and_the_environment_is_not_sent(monkeypatch):
    monkeypatch.setenv("MY_DATA", "/secret/folder")
    member = (
        "model=resnet18 model.norm=group tracking=none trainer.accelerator=cpu name=rates "
        "data.num_classes=10 +data.label=x-${oc.env:MY_DATA} "
        "optimizer.lr=0.01 seed=2 optimizer.momentum=null"
    )
    varied = ["optimizer.lr", "seed", "optimizer.momentum"]
    planned = sweeps.plan(member.split(), varied, ())
    typed = [*planned.overrides, "a.token=abc"]
    record = provenance.collect(["distdl"], Path("/"), typed, planned.swept)
    params = described.parameters(planned.config, record)
    assert [*params][:6] == [*varied, "model", "tracking", "model.norm"]
    expected = {
        "optimizer.lr": "0.01",
        "optimizer.momentum": "None",
        "model": "resnet18",
        "a.token": "***",
        "data.label": "x-${oc.env:MY_DATA}",
        "model.num_classes": "10",
        "model.network.num_classes": "10",
    }
    assert params.items() >= expected.items()
    assert "/secret/folder" not in str(params)
    assert not {"checkpoint.resume_from", "launcher._target_"} & params.keys()
    assert described.member_name(planned.swept) == "lr=0.01 seed=2 momentum=null"
    assert described.member_name(["a.lr=1", "b.lr=2"]) == "a.lr=1 b.lr=2"


def test_parameters_are_counted_where_their_shape_is_known():
    module = nn.Sequential(nn.Linear(3, 2), nn.LazyLinear(4), nn.Linear(2, 5, bias=False))
    module[2].weight.requires_grad = False
    assert summary.parameters_of(module) == {"total": 18, "trainable": 8}
