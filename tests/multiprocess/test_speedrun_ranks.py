"""`make speedrun` and its cross-validation on drawn photographs: real trainings of two ranks."""

import json
import os
import subprocess
import sys

from benchmarks.speedrun import __main__ as speedrun
from benchmarks.speedrun import cross_validate, ideas, training
from distdl.config.compose import compose
from distdl.data.synthetic_jpeg import jpegs
from distdl.validation.validate import problems_of
from tests.conftest import ROOT, matrix_only

IDEAS = """
first:
  overrides: [+experiment=first, trainer.max_epochs=1, data.image_size=32, data.batch_size=4]
  why: small
"""


def drawn(root, each):
    lines = []
    for number, data in enumerate(jpegs(10 * each, 10, 48, 40, 2_000, seed=each)):
        path = root / f"class{number % 10}" / f"{each}-{number:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        lines.append(f"{path.parent.name}/{path.name}\n")
    (root.parent / f"{root.name}.txt").write_text("".join(lines))


def started(cwd, *words):
    command = [sys.executable, "-m", *words]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


@matrix_only
def test_a_cross_validation_goes_on_where_it_was_cut_off(tmp_path, monkeypatch, capsys):
    drawn(tmp_path / "train", 10)
    file = tmp_path / "ideas.yaml"
    file.write_text(IDEAS)
    read = ideas.read(file)
    monkeypatch.setattr(cross_validate.ideas, "read", lambda: read)
    monkeypatch.chdir(tmp_path)
    words = ["first", "--photographs", "train", "--lists", ".", "--measured", "measured"]
    cross_validate.main([*words, "--folds", "0"])
    assert capsys.readouterr().err.count(" CPU s in ") == 1
    result = json.loads((tmp_path / "measured" / "first-fold0-seed0.json").read_text())
    assert result["samples"] == 20
    assert result["cpu"] > 5
    cross_validate.main([*words, "--folds", "0", "1"])
    printed = capsys.readouterr()
    assert printed.err.count(" CPU s in ") == 1
    assert printed.err.startswith("first, fold 1, seed 0: ")
    assert "| first |  | 2 (2) | " in printed.out


@matrix_only
def test_the_record_the_first_row_and_the_bare_loop_are_measured_alike(tmp_path):
    record = speedrun.best(speedrun.rows()).experiment
    drawn(tmp_path / "train", 8)
    drawn(tmp_path / "val", 5)
    words = ("--photographs", "train", "val", "--lists", ".", "--seeds", "1")
    done = started(tmp_path, "benchmarks.speedrun", *words)
    assert f"training 2 of 2: {record}, seed 0" in done.stderr
    assert f"CPU time of {record} / first: " in done.stdout
    done = started(tmp_path, "benchmarks.speedrun.bare_loop", record, *words)
    assert done.returncode in (0, 1), done.stderr
    assert "CPU time: " in done.stdout
    results = tmp_path / "outputs" / "speedrun" / "measure"
    for name in ("first-seed0.json", f"{record}-seed0.json", f"{record}-loop-seed0.json"):
        assert json.loads((results / name).read_text())["samples"] == 50


@matrix_only
def test_every_idea_is_a_config_that_may_start(tmp_path):
    all_ideas = ideas.read()
    for name in all_ideas:
        said = [*ideas.arguments(all_ideas, name), *training.MEASURED, f"data.root={tmp_path}"]
        config = compose(said, [str(training.CONF)])
        problems = [each for each in problems_of(config) if not each.path.startswith("data.root")]
        assert not problems, (name, problems)
        assert config.trainer.devices == 2
        assert config.data.num_classes == 10
