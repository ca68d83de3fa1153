"""What a command proposes to type next: complete, in one line, and nothing that is there yet."""

from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from distdl.cli import plan
from distdl.config import compose, recipe
from distdl.job import JobState
from distdl.launch import checkpoint_checks, sweeps
from distdl.runs.directory import RunDirectory
from distdl.tools.measure import plan_table
from distdl.util.errors import UserError
from distdl.util.ordinals import ordinal
from distdl.util.suggest import closest, did_you_mean
from tests.conftest import TINY


def test_suggestions_compare_numbers_as_numbers():
    depths = [f"resnet{depth}" for depth in (18, 34, 50, 101, 152)]
    meant = {"resnet51": 50, "resnet49": 50, "resnet500": 50, "resnet35": 34, "resnet100": 101}
    for typed, depth in meant.items():
        assert closest(typed, depths) == f"resnet{depth}"
        assert did_you_mean(f"model.{typed}", [f"model.{d}" for d in depths]).endswith(f"{depth}?")
    assert closest("x" + "9" * 5000, depths) == "" == closest("a1", ["a9"])
    with pytest.raises(UserError, match="did you mean model=resnet50"):
        compose.compose(["model=resnet51"])


def test_ordinals():
    numbers = (1, 2, 3, 4, 11, 12, 13, 21, 22, 101, 112)
    expected = "1st 2nd 3rd 4th 11th 12th 13th 21st 22nd 101st 112th"
    assert " ".join(map(ordinal, numbers)) == expected


def test_the_advice_of_plan_is_one_line_that_can_be_copied(capsys):
    typed = [*TINY, "strategy=fsdp", "tags=[my run]", "data.train_samples=640"]
    plan.main([*typed, "--devices", "8", "--link", "0.01", "--tflops", "0.001"])
    printed = capsys.readouterr().out
    (command,) = (line for line in printed.splitlines() if "python -m distdl" in line)
    assert "'tags=[my run]'" in command
    assert command.count("strategy=") == printed_keys(command)
    assert command.strip().startswith("python -m distdl ")
    (reason,) = (line for line in printed.splitlines() if "on this link" in line)
    assert reason.endswith(".")
    assert len(reason) > 160, "as one line, however long"
    assert plan_table.command(
        ["strategy=fsdp", "strategy.sharding=x", "+a=1 2"], ["strategy=ddp"]
    ) == ("python -m distdl '+a=1 2' strategy=ddp")


def printed_keys(command):
    return len({word.partition("=")[0] for word in command.split() if "strategy=" in word})


def test_a_task_without_a_checkpoint_says_what_to_type(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = compose.compose(["task=predict", "model=resnet18", "seed=3"])
    run = RunDirectory(tmp_path / "outputs/default/new")
    (problem,) = checkpoint_checks.for_task(config, run, compose.typed(config))
    train = "train first: python -m distdl model=resnet18 seed=3; then"
    assert problem.remedy == f"{train}: python -m distdl resume RUN task=predict"
    trained = SimpleNamespace(path=tmp_path / "outputs/default/old one", checkpoints=tmp_path)
    (tmp_path / "last.ckpt").touch()
    monkeypatch.setattr(checkpoint_checks.jobs, "runs_below", lambda folder: [trained])
    (problem,) = checkpoint_checks.for_task(config, run, compose.typed(config))
    assert "python -m distdl resume 'outputs/default/old one' task=predict" in problem.remedy


def test_an_export_that_is_refused_says_what_to_type():
    own = {"_target_": "mine.Net"}
    ours = {"_target_": recipe.EXPORTABLE["model"]}
    synthetic = recipe.exportable_instead({"model": ours, "data": own}, "outputs/r")
    assert "data=imagenet data.root=FOLDER" in synthetic
    weights = "its weights alone: python -m distdl convert outputs/r --to weights"
    assert synthetic.endswith(weights)
    stored = {"_target_": recipe.EXPORTABLE["data"]}
    assert recipe.exportable_instead({"model": own, "data": stored}, "outputs/r") == weights


def member(tmp_path, name, monitor="val/acc1", mode="max", state=JobState.SUCCEEDED, **metrics):
    config = {"checkpoint": {"monitor": monitor, "mode": mode}, "model": {}, "data": {}}
    status = {"metrics": {f"val/{name}": value for name, value in metrics.items()}}
    run = RunDirectory(tmp_path / "outputs/default/sweep" / name)
    last = SimpleNamespace(status=lambda: status)
    planned = SimpleNamespace(config=OmegaConf.create(config), run=run, last_attempt=last)
    return f"seed={name}", planned, state


def test_the_end_of_a_sweep_marks_the_best_and_says_what_to_type(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["distdl", "-m", "seed=1,2,3"])

    def end(*results):
        sweeps._print_table(results)
        sweeps._print_next(results)
        return capsys.readouterr().out

    made = [member(tmp_path, str(n), acc1=acc) for n, acc in ((1, 0.5), (2, 0.9), (3, 0.7))]
    printed = end(*made)
    assert printed.count(", best") == 1
    assert "best    seed=2: val/acc1 0.9\n" in printed
    assert "next    python -m distdl report outputs/default/sweep/2" in printed
    least = [member(tmp_path, str(n), "val/loss", "min", loss=n) for n in (3, 2)]
    assert "best    seed=2: val/loss 2\n" in end(*least)
    failed = member(tmp_path, "4", state=JobState.FAILED, acc1=0.99)
    printed = end(*made, failed)
    assert "best    seed=2" in printed, "a failed member is not the best"
    assert "failed  python -m distdl jobs status outputs/default/sweep/4" in printed
    assert "again   python -m distdl -m seed=1,2,3" in printed
    none = [member(tmp_path, str(n), "val/f1") for n in (1, 2)]
    assert "best    unknown, as no two runs have a val/f1" in end(*none)
