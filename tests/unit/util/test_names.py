"""Different names stay different where a platform does not accept them, and accepted ones stay."""

from pathlib import Path

import pytest
from mlflow.utils.validation import _validate_metric_name

from distdl.config import compose
from distdl.launchers.azureml import request
from distdl.launchers.slurm import script
from distdl.tracking.clearml import curve_of
from distdl.tracking.client import metric_name
from distdl.util.names import kept_apart
from distdl.worker.described import member_name
from tests.unit.launchers.test_azureml import spec

ODD = (
    "acc@1",
    "IoU<0.5",
    "IoU>0.5",
    "f1[a]",
    "f1(a)",
    "a//b",
    "a/./b",
    "../a/b",
    "/a/b",
    "a/b/",
    "",
    ".",
    "..",
    "..a",
    "a\n",
    "a=1",
    "a%1",
    "\ud800",
    f"{'x' * 300}1",
    f"{'x' * 300}2",
)
FINE = ("acc_1", "IoU_0.5", "f1_a_", "a/b", "_", "a", "a_1", "x" * 250, "Val/Loss", "val/loss", " ")


def test_metrics_and_parameters_of_mlflow():
    made = {name: metric_name(name) for name in (*ODD, *FINE)}
    assert [made[name] for name in FINE] == [*FINE]
    assert len({*made.values()}) == len(made)
    for name in made.values():
        _validate_metric_name(name)
        assert len(name) <= 250
        assert metric_name(name) == name
    assert made["IoU<0.5"] == "IoU_0.5-663209e0", "the same in every attempt and version"


def test_names_of_other_trackers_and_platforms():
    names = ("loss", "loss/loss", "/loss", "loss/", "val/loss", "val/a/loss", "/", "")
    assert len({curve_of(name) for name in names}) == len(names)
    assert [curve_of(name) for name in ("loss", "val/loss")] == [("loss", "loss"), ("val", "loss")]
    long = [f"a={'x' * 300}{n}" for n in (1, 2)]
    assert member_name(long[:1]) != member_name(long[1:])
    assert len(member_name(long[:1])) == 250
    variables = ("A_B", "A__B", "A_B_", "a_b", "A" * 60, "A" * 61, "HTTP_PROXY", "http_proxy")
    made = request.secret_names(spec("e/r", forward_env=variables))
    assert len({name.lower() for name in made.values()}) == len(variables)
    assert made["A_B"].endswith("-A-B")
    assert all(len(name) <= 127 for name in made.values())
    jobs = [f"e/{name}" for name in ("lr=1,2", "lr=1 2", "lr=1_2")]
    titles = {next(script.directives(Settings, [spec(name)], array=False)) for name in jobs}
    assert len(titles) == 3
    assert "--job-name=e/lr=1_2" in titles
    settings = request.AzureSettings.model_construct(experiment_name=None)
    titles = {request.titles(settings, f"{name}/r")["experiment_name"] for name in ("a.b", "a-b")}
    assert len(titles) == 2
    assert "a-b" in titles
    assert kept_apart("a", "a", 1) == "a"


class Settings:
    cpus_per_task = None
    gpus = "none"
    gpu_type = None


@pytest.mark.parametrize("both", [False, True])
def test_experiments_in_folders(both, tmp_path, monkeypatch):
    """The name of an experiment stays what it was, unless another experiment has it."""
    monkeypatch.chdir(tmp_path)
    options = ("a/b", "a_b") if both else ("a/b",)
    for option in options:
        file = Path(f"conf/experiment/{option}.yaml")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("# @package _global_\nseed: 3\n", encoding="utf-8")
    names = [compose.compose([f"+experiment={each}"]).experiment_name for each in options]
    assert names[-1] == "a_b"
    assert len({*names}) == len(options)
    several = ",".join(options)
    assert compose.compose([f"experiment=[{several}]"]).experiment_name == "-".join(
        option.replace("/", "_") for option in options
    )
