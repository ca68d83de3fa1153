"""What a setting of a launcher does is written once, below its field: help, dry runs, refusals and
documents show it from there."""

from __future__ import annotations

import pytest

from distdl.launchers import common
from tests.launcher_settings import PAGES, ROOT, node_of, table

SLURM = ("launcher=slurm", "launcher.partition=gpu")


@pytest.mark.parametrize("option", PAGES)
def test_every_setting_has_a_sentence_and_one_default(option):
    node, launcher = node_of(option)
    about = launcher.about_settings()
    assert set(node) == set(launcher.model_fields) == {key.partition(".")[0] for key in about}
    for key, field in launcher.model_fields.items():
        entry = common._entry_of(field.annotation)
        inner = {path.rpartition(".")[2] for path in about if path.startswith(f"{key}.")}
        assert inner == set(entry.model_fields if entry else ()), f"sentences of {key}"
    assert launcher(**node).changed_settings() == []
    sentences = {key: text.splitlines()[0] for key, text in about.items()}
    assert [key for key, text in sentences.items() if not text.endswith(".")] == []


@pytest.mark.parametrize("option", PAGES)
def test_the_documents_show_every_setting(option):
    text = (ROOT / PAGES[option]).read_text(encoding="utf-8")
    assert table(option) in text, "run `python -m tests.launcher_settings --write`"


def test_help_shows_each_setting_of_the_chosen_launcher(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    shown = command(*SLURM, "--help").out
    assert shown.startswith("launcher=slurm: a Slurm cluster")
    assert "  launcher.partition=gpu\n      The partition; null: that of SBATCH_PARTITION" in shown
    assert max(map(len, shown.splitlines()[2:])) <= 60
    assert "experiment\n" not in shown
    assert "launcher=slurm --help" in command("--help").out


def test_help_says_when_a_launcher_cannot_explain_its_settings(command):
    typed = ("launcher=slurm", "launcher._target_=nobody.s.Launcher", "--help")
    shown = command(*typed).out
    assert "nobody.s.Launcher is not allowed, or not installed" in shown
    assert "  launcher.partition=null\n" in shown


def test_a_dry_run_says_what_changed_settings_do(command, without_stage_2):
    shown = command(*SLURM, "debug=cpu", "trainer.devices=2", "dry_run=true").out
    lines = [line for line in shown.splitlines() if line.startswith("setting")]
    about = node_of("slurm")[1].about_settings()
    assert lines == [f"setting    launcher.partition: {about['partition']}"]


def test_a_refusal_without_a_remedy_says_what_the_setting_does():
    launcher = node_of("azureml")[1]
    (problem,) = launcher.check({"create_compute": "maybe"}, {"num_nodes": 1, "devices": 1})
    assert problem.what == "'maybe' is not true or false"
    assert problem.remedy.startswith("Whether a missing cluster is created.")


def test_keys_inside_a_setting_are_explained_where_they_are_set(command):
    node, launcher = node_of("azureml")
    inputs = {"faces": {"path": "azureml:faces:1", "mode": "download"}}
    changed = launcher(**{**node, "inputs": inputs, "sweep_job": {"metric": "loss"}})
    inside = ["inputs.NAME.mode", "inputs.NAME.path", "sweep_job.metric"]
    assert changed.changed_settings() == ["inputs", *inside[:2], "sweep_job", inside[2]]
    shown = " ".join(command("launcher=azureml", "--help").out.split())
    for key in inside:
        assert f"{key}: {launcher.about_settings()[key]}" in shown
