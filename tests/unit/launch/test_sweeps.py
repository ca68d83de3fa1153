"""The end of a sweep: its table, and what to type next."""

import json
from types import SimpleNamespace

from omegaconf import OmegaConf

from distdl.job import JobState
from distdl.launch import sweeps
from distdl.runs.directory import RunDirectory


def member(tmp_path, name, monitor="val/acc1", mode="max", state=JobState.SUCCEEDED, **metrics):
    config = {"checkpoint": {"monitor": monitor, "mode": mode}, "model": {}, "data": {}}
    status = {"metrics": {f"val/{name}": value for name, value in metrics.items()}}
    run = RunDirectory(tmp_path / "outputs/default/sweep" / name)
    last = SimpleNamespace(status=lambda: status)
    planned = SimpleNamespace(config=OmegaConf.create(config), run=run, last_attempt=last)
    return f"seed={name}", planned, state


def judged(tmp_path, name, monitor, **metrics):
    """A member whose user chose no metric, with a best.ckpt of the main one of its domain."""
    made = member(tmp_path, name, **metrics)
    folder = made[1].run.checkpoints
    folder.mkdir(parents=True)
    best = {f"val/{key}": value + 0.125 for key, value in metrics.items()}
    facts = {"files": {"best.ckpt": {"size": 0, "sha256": ""}}, "monitor": monitor, "mode": "max"}
    manifest = json.dumps({**facts, "metrics": best})
    (folder / "best.ckpt.manifest.json").write_text(manifest)
    return made


def test_the_end_of_a_sweep_marks_the_best_and_says_what_to_type(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["distdl", "-m", "seed=1,2,3"])

    def end(*results):
        sweeps.print_table(results)
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
    assert "best    unknown, as no run has a val/f1 at its end\n" in end(*none)
    diverged = member(tmp_path, "5", acc1=float("nan"))
    assert "best    seed=3: val/acc1 0.7\n" in end(made[2], diverged), "NaN is worse"
    detectors = [judged(tmp_path, f"d{n}", "val/box_ap", box_ap=n / 8) for n in (1, 3, 2)]
    printed = end(*detectors)
    assert "best    seed=d3: val/box_ap 0.5\n" in printed
    assert printed.count(", best") == 1
    printed = end(*detectors, judged(tmp_path, "m", "val/mask_ap", mask_ap=0.75))
    assert "the runs are judged by different metrics (val/box_ap, val/mask_ap)" in printed
    assert ", best" not in printed
