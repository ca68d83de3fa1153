"""`--json`: what a command says to a program, checked by a validator against its schema."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from distdl.cli.main import COMMANDS
from distdl.cli.schemas import ANSWERS, of_command, of_events
from tests.conftest import TINY, UNCHECKED, Said, distdl


def answer_of(said: Said, command: str) -> dict[str, Any]:
    """The last line of stdout."""
    *events, last = map(json.loads, said.out.splitlines())
    Draft202012Validator(of_command(command)).validate(last)
    for event in events:
        Draft202012Validator(of_events()).validate(event)
    assert last["exit_code"] == said.code
    return last


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The folder in which a command trained one epoch, and answered a program."""
    folder = tmp_path_factory.mktemp("json")
    typed = ("trainer.devices=1", "trainer.max_epochs=1", "name=x", "--json")
    done = distdl(*TINY, *typed, cwd=folder, module=UNCHECKED)
    (folder / "answer.json").write_text(done.stdout)
    (folder / "said.txt").write_text(done.stderr)
    return folder


@pytest.mark.parametrize("command", ANSWERS)
def test_each_answer_has_a_schema_that_describes_its_fields(command):
    schema = of_command(command)
    Draft202012Validator.check_schema(schema)
    for kind in schema["properties"]["answer"]["anyOf"][:-1]:
        assert kind["properties"]["schema"]["const"].endswith("/1")
        assert kind["description"]


def test_each_command_answers():
    verbs = {name.partition(" ")[0] for name in ANSWERS}
    assert verbs == {*COMMANDS, "train", "sweep"}


def test_a_training(trained):
    said = Said(0, (trained / "answer.json").read_text(), "")
    run = answer_of(said, "train")["answer"]
    assert (run["state"], run["attempt"], run["error"]) == ("SUCCEEDED", 1, None)
    assert run["run"] == "outputs/default/x"
    assert run["metrics"]["train/loss"] > 0
    assert Path(trained, run["checkpoint"]).is_file()
    *events, _ = map(json.loads, said.out.splitlines())
    assert [event["step"] for event in events if "train/loss" in event.get("metrics", {})]
    assert run["next"] == "python -m distdl report outputs/default/x"
    assert "train/loss" in (trained / "said.txt").read_text(), "people are told on stderr"


def test_a_run_that_has_ended(trained, command, tmp_path):
    shutil.copytree(trained / "outputs", tmp_path / "outputs", symlinks=True)
    run = "outputs/default/x"
    (listed,) = answer_of(command("jobs", "list", "--json"), "jobs list")["answer"]["runs"]
    said = command("jobs", "status", run, "--json")
    (shown,) = answer_of(said, "jobs status")["answer"]["runs"]
    assert shown["run"] == listed["run"] == run
    assert shown["metrics"] == listed["metrics"] != {}
    said = command("jobs", "logs", "--json", run)
    assert answer_of(said, "jobs logs")["answer"]["job"].startswith("local://")
    *lines, _ = map(json.loads, said.out.splitlines())
    assert [line["text"] for line in lines] == said.err.splitlines() != []
    said = command("jobs", "wait", run, "--json")
    assert [*answer_of(said, "jobs wait")["answer"]["done"].values()] == ["SUCCEEDED"]
    page = answer_of(command("report", run, "--json"), "report")["answer"]
    assert Path(page["page"]).is_file()
    said = command("convert", run, "--to", "weights", "--json")
    converted = answer_of(said, "convert")["answer"]
    assert converted["equal"] == ["weights"]
    assert Path(converted["target"]).is_file()
    (tmp_path / run / "config.yaml").write_text("seed: 1")
    said = command("jobs", "status", run, "--json")
    assert answer_of(said, "jobs status")["problems"][0]["code"] == "damaged-file"


def test_a_refusal(command):
    said = command("optimizer.lrr=1", "--json")
    last = answer_of(said, "train")
    assert said.code == 2
    assert last["answer"] is None
    assert last["outcome"] == "nothing was started"
    (problem,) = last["problems"]
    assert (problem["path"], problem["code"]) == ("optimizer.lrr", "unknown-key")
    assert "optimizer.lr" in problem["remedy"]
    assert "nothing was started" in said.err


# Words that each command refuses.
REFUSED = {
    "train": "seed=x",
    "sweep": "-m seed=1,x",
    "run": "nothing",
    "resume": "nowhere",
    "jobs list": "nowhere",
    "jobs status": "nowhere",
    "jobs logs": "nowhere",
    "jobs wait": "nowhere",
    "jobs cancel": "nowhere",
    "jobs ended": "nowhere",
    "jobs fetch": "nowhere",
    "jobs resubmit": "nowhere",
    "prepare": "folder --source nowhere --to out",
    "data check": "nowhere",
    "plan": "--devices 0",
    "doctor": "--expect 0",
    "scale": "--mode strange",
    "drill": "--faults strange seed=1",
    "serve": "nowhere",
    "export": "nowhere --to onnx",
    "convert": "nowhere --to ddp",
    "deploy": "azureml nowhere --name 1",
    "provision": "azuremll",
    "report": "nowhere",
    "compare": "nowhere",
    "tune": "seed=1",
    "track sync": "nowhere",
    "explain": "strange",
    "schema": "strange",
    "new project": "import",
    "completion": "csh",
}


@pytest.mark.parametrize("name", ANSWERS)
def test_each_command_refuses_in_json(name, command, tmp_path):
    verb = [] if name in ("train", "sweep") else name.split()
    said = command(*verb, *REFUSED[name].split(), "--json")
    last = answer_of(said, name)
    assert said.code == 2, said
    assert last["answer"] is None
    assert last["problems"][0]["message"]
    assert not [*tmp_path.iterdir()]


def test_dry_runs_configs_and_schemas(command, without_stage_2):
    said = command(*TINY, "trainer.devices=1", "dry_run=true", "--json")
    request = answer_of(said, "train")["answer"]
    assert request["schema"] == "request/1"
    assert "python -m distdl.worker" in request["text"]
    said = command("-m", *TINY, "trainer.devices=1", "seed=1,2", "dry_run=true", "--json")
    assert len(answer_of(said, "sweep")["answer"]["runs"]) == 2
    said = command("--cfg", "job", "--json", "optimizer.lr=0.3")
    (config,) = answer_of(said, "train")["answer"]["configs"]
    assert config["optimizer"]["lr"] == 0.3
    said = command("schema", "jobs", "list", "--json")
    assert answer_of(said, "schema")["answer"]["document"] == of_command("jobs list")
    names = ("resource_group=group", "workspace=vision")
    said = command("provision", "azureml", "dry_run=true", *names, "--json")
    assert "resources, in this order" in answer_of(said, "provision")["answer"]["text"]


def test_what_is_a_programs_own_is_left_to_it(command, without_stage_2):
    """`--json` behind `--` is a word of the program's."""
    said = command("run", "dry_run=true", "--", "python", "-c", "1", "--json")
    assert "--json" in said.out
    assert not said.out.startswith("{")
    assert "usage" in command("jobs", "--json", "--help").out


def test_what_only_prints_a_text_is_refused(command):
    said = command("--json")
    assert said.code == 2
    assert answer_of(said, "train")["problems"][0]["code"] == "unsupported"
    assert "Traceback" not in said.err


def test_an_unexpected_error_is_an_answer_too(command, monkeypatch):
    def fails(*_: object) -> None:
        raise RuntimeError("no such thing")

    monkeypatch.setattr("distdl.cli.jobs.list_runs", fails)
    said = command("jobs", "list", "--json")
    last = answer_of(said, "jobs list")
    assert said.code == 1
    assert last["problems"][0]["message"] == "RuntimeError: no such thing"
    assert "Traceback" in said.err
