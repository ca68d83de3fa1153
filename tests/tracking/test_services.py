"""Trackers of others: what they are told, on which rank, and what is said where one is missing."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

import pytest
from hydra.utils import instantiate
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger

from distdl.config import compose
from distdl.runs.records import journal_path, read
from distdl.tasks.evaluate import _log_as
from distdl.tracking import start_tracking
from distdl.util.errors import UserError
from distdl.validation import validate
from distdl.worker import summary
from tests.tracking.tracked import info_of

PRESETS = {"wandb": "wandb", "comet": "comet_ml", "clearml": "clearml"}


class WandbLogger(DummyLogger):
    """Known by its name; takes what Lightning's takes."""

    made: list[WandbLogger] = []

    def __init__(self, save_dir: str, id: str, name: str, project: str) -> None:
        super().__init__()
        assert Path(save_dir).is_dir()
        self.told, self.params, self.ended = (id, name, project), {}, None
        self.made.append(self)

    @property
    def experiment(self) -> Any:
        return self

    def log_hyperparams(self, params: Any, *_: Any) -> None:
        if "broken" in params:
            raise RuntimeError("No API key configured")
        self.params |= params

    def finish(self, exit_code: int = 0) -> None:
        self.ended = exit_code


def test_a_service_is_told_of_the_run_once_and_goes_on_in_it(tmp_path: Path) -> None:
    preset = functools.partial(WandbLogger, project="p")
    WandbLogger.made.clear()
    for attempt, status in ((1, "FAILED"), (2, "SUCCEEDED")):
        (tmp_path / "e/r/logs/wandb").mkdir(parents=True, exist_ok=True)
        for rank in (0, 1):
            info = info_of(
                tmp_path,
                "e/r",
                attempt,
                rank=rank,
                node_rank=rank,
                name="lr=0.1",
                key="k" * 32,
                params={"optimizer.lr": 0.1, "api_token": "canary"},
            )
            tracking = start_tracking(info, {"wandb": preset})
            assert len(tracking.loggers) == 2
            assert [*tracking.services] == ([] if rank else ["wandb"])
            if rank == 0:
                tracking.describe({"parameters.total": 7})
            tracking.finish(status)
    first, other, again, last = WandbLogger.made
    assert first.told == again.told == ("k" * 32, "lr=0.1", "p")
    assert first.params == {"optimizer.lr": "0.1", "api_token": "***", "parameters.total": 7}
    assert (first.ended, again.ended) == (1, 0)
    assert (other.params, other.ended, last.params, last.ended) == ({}, None, {}, None)


def test_one_that_cannot_start_is_said_in_one_message(tmp_path: Path) -> None:
    info = info_of(tmp_path, "e/r", params={"broken": 1})
    with pytest.raises(UserError) as refused:
        start_tracking(info, {"wandb": functools.partial(WandbLogger, project="p")})
    said = str(refused.value)
    assert "tracking.wandb: cannot start: RuntimeError: No API key configured" in said
    assert "log in to it" in said


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_names_the_extra_that_it_lacks(
    preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    there: dict[str, Any] = dict.fromkeys(PRESETS.values())
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: there.get(n, n) and find(n))
    config = compose.compose([f"tracking=[csv,{preset}]"])
    (problem,) = validate.problems_of(config)
    assert problem.path == f"tracking.{preset}"
    assert f"needs the package {PRESETS[preset]}, which is not installed" in problem.what
    assert f"pip install 'distdl[{preset}]'" in problem.remedy
    assert not validate.problems_of(config, local=False)  # what a job's environment has, it has


def test_neptune_is_refused_with_what_became_of_it() -> None:
    with pytest.raises(UserError, match=r"'neptune'\n? .*(.|\n)*Neptune was shut down"):
        compose.compose(["tracking=neptune"])


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("logger", "wandb", "tracking=wandb"),
        ("logger.comet.project", "x", "tracking=comet tracking.comet.project=..."),
        ("logger", "many_loggers", "tracking=NAME (--help lists them)"),
        ("loggers", "csv", "tracking=csv"),
    ],
)
def test_what_users_of_templates_type_is_answered(key: str, value: str, expected: str) -> None:
    from distdl.config import words

    assert words.for_key(key, value).startswith(expected)


def test_wandb_itself_goes_on_in_the_same_run_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    preset = instantiate(compose.compose(["tracking=wandb"]).tracking.wandb)
    for attempt in (1, 2):
        info = info_of(tmp_path, "e/r", attempt, key="k" * 32, name="r", params={"lr": 0.1})
        tracking = start_tracking(info, {"wandb": preset})
        tracking.loggers[0].log_metrics({"x": 1.0}, attempt)
        assert tracking.how_to_open()[0].startswith("wandb sync ")
        tracking.finish("SUCCEEDED")
    written = [*(tmp_path / "e/r/logs/wandb/wandb").glob("offline-run-*/run-*.wandb")]
    assert len(written) == 2 and {path.stem for path in written} == {"run-" + "k" * 32}


def test_hyperparameters_that_hydra_made_are_plain_data(tmp_path: Path) -> None:
    partial = {"_target_": "torch.optim.SGD", "_partial_": True, "lr": 0.1}
    csv = CSVLogger(tmp_path, name="", version="")
    tracking = start_tracking(info_of(tmp_path, "e/r"), {"csv": csv})
    csv.log_hyperparams({"optimizer": instantiate(partial), "width": 3})
    csv.log_metrics({"x": 1.0}, 1)
    csv.save()
    tracking.finish("SUCCEEDED")
    text = (tmp_path / "hparams.yaml").read_text()
    assert "_DeferredTarget" not in text and "!!python" not in text
    assert "lr: 0.1" in text and "width: 3" in text and "SGD" in text


def test_an_evaluation_draws_no_curve_of_a_placeholder(tmp_path: Path) -> None:
    tracking = start_tracking(info_of(tmp_path, "e/r"), {"a": DummyLogger()})
    heard = tracking.loggers[0]
    _log_as("validate", heard.log_metrics, {"hp_metric": -1.0}, 0)
    _log_as("validate", heard.log_metrics, {"val/loss": 1.0, "epoch": 2}, 4)
    tracking.finish("SUCCEEDED")
    told = [r.metrics for r in read(journal_path(tmp_path / "e/r")) if r.step == 4]
    assert told[0] == {"validate/val/loss": 1.0, "epoch": 2.0}
    assert not any("hp_metric" in "".join(r.metrics) for r in read(journal_path(tmp_path / "e/r")))


def test_what_was_swept_comes_first_and_the_environment_is_not_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from distdl.launch import sweeps
    from distdl.runs import provenance

    monkeypatch.setenv("MY_DATA", "/secret/place")
    member = [
        *("model=resnet18", "model.norm=group", "tracking=none", "trainer.accelerator=cpu"),
        *("data.num_classes=10", "+data.label=x-${oc.env:MY_DATA}", "name=rates"),
        *("optimizer.lr=0.01", "seed=2", "optimizer.momentum=null"),
    ]
    planned = sweeps.plan(member, ["optimizer.lr", "seed", "optimizer.momentum"], ())
    record = provenance.collect(
        ["distdl"], Path("/"), [*planned.overrides, "a.token=abc"], planned.swept
    )
    params = summary.parameters(planned.config, record)
    assert [*params][:3] == ["optimizer.lr", "seed", "optimizer.momentum"]
    assert [*params][3:6] == ["model", "tracking", "model.norm"]
    assert params["optimizer.lr"] == "0.01" and params["optimizer.momentum"] == "None"
    assert (params["model"], params["a.token"]) == ("resnet18", "***")
    assert params["model.num_classes"] == params["model.network.num_classes"] == "10"
    assert "/secret/place" not in str(params)
    assert params["data.label"] == "x-${oc.env:MY_DATA}"
    assert "checkpoint.resume_from" not in params and "launcher._target_" not in params
    assert summary.called(planned.swept) == "lr=0.01 seed=2 momentum=null"
    assert summary.called(["a.lr=1", "b.lr=2"]) == "a.lr=1 b.lr=2"


def test_parameters_are_counted_where_their_shape_is_known() -> None:
    from torch import nn

    module = nn.Sequential(nn.Linear(3, 2), nn.LazyLinear(4), nn.Linear(2, 5, bias=False))
    module[2].weight.requires_grad = False
    assert summary.parameters_of(module) == {"total": 18, "trainable": 8}
