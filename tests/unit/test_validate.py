"""Stage 1: each kind of bad input, by the message that a user reads."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sample_config import sample

from distdl import validate as validation
from distdl.errors import Unchecked, UserError
from distdl.job import Resources
from distdl.validate import problems_of, validate


def messages(changes: dict[str, Any], **options: Any) -> list[str]:
    return [str(problem) for problem in problems_of(sample(changes), **options)]


def only(changes: dict[str, Any], **options: Any) -> str:
    (message,) = messages(changes, **options)
    return message


def test_a_valid_config_has_no_problems() -> None:
    assert messages({}) == []


@pytest.mark.parametrize(
    ("path", "suggestion"),
    [
        ("lrr", "optimizer.lr"),
        ("max_epochs", "trainer.max_epochs"),
        ("batch_size", "data.batch_size"),
        ("optimiser.lr", "optimizer.lr"),
        ("checkpoint.every_n_step", "checkpoint.every_n_steps"),
        ("project.alow", "project.allow"),
        ("sede", "seed"),
    ],
)
def test_unknown_key_is_refused_with_a_suggestion(path: str, suggestion: str) -> None:
    message = only({path: 1})
    assert message.startswith(f"{path}: unknown key in")
    assert f"did you mean {suggestion}?" in message


def test_unknown_key_that_resembles_nothing_has_no_suggestion() -> None:
    assert only({"zzzzqqq": 1}) == "zzzzqqq: unknown key in the config"


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("seed", "3", "seed: must be an integer, not '3'"),
        ("seed", True, "seed: must be an integer, not true"),
        ("seed", -1, "seed: must be greater than or equal to 0, not -1"),
        ("dry_run", 1, "dry_run: must be a boolean, not 1"),
        ("tags", "a", "tags: must be a list, not 'a'"),
        (
            "name",
            "a/b",
            "name: must be made of letters from a to z, digits, dots, underscores and dashes",
        ),
        ("name", "../x", "name: must be made of letters"),
        ("optimizer.lr", 0, "optimizer.lr: must be greater than 0, not 0"),
        ("optimizer.lr", "big", "optimizer.lr: must be a number, not 'big'"),
        ("optimizer.lr_scaling", "cubic", "must be 'linear', 'sqrt' or 'none', not 'cubic'"),
        ("data.batch_size", 0, "data.batch_size: must be greater than or equal to 1, not 0"),
        ("checkpoint.mode", "up", "checkpoint.mode: must be 'min' or 'max', not 'up'"),
        ("checkpoint.every_minutes", 0, "checkpoint.every_minutes: must be greater than 0"),
        ("project", 3, "project: must be a mapping, not 3"),
        (
            "trainer.devices",
            0,
            "must be a number of devices of each node, 1 or more, -1 or auto for all",
        ),
        ("trainer.devices", "two", "must be a number of devices of each node, 1 or more"),
        ("trainer.precision", "fp16", "write trainer.precision=16-mixed or bf16-mixed"),
        ("trainer.max_epochs", 1.5, "trainer.max_epochs: must be an integer"),
        ("trainer.limit_train_batches", "few", "trainer.limit_train_batches: must be"),
        ("model", "resnet50", "model: must be a mapping, not 'resnet50'"),
        ("optimizer._partial_", "yes", "optimizer._partial_: must be a boolean"),
    ],
)
def test_wrong_type_or_value(path: str, value: Any, expected: str) -> None:
    assert expected in only({path: value})


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("optimizer.lr", 1),
        ("trainer.devices", [0, 2]),
        ("trainer.devices", -1),
        ("trainer.precision", 16),
        ("trainer.limit_train_batches", 0.5),
        ("trainer.profiler", {"_target_": "lightning.pytorch.profilers.SimpleProfiler"}),
        ("optimizer", {}),
        ("model", None),
        ("callbacks.early_stopping", None),
        ("tracking", None),
        ("name", "run-1.b_2"),
    ],
)
def test_accepted_values(path: str, value: Any) -> None:
    assert messages({path: value}) == []


def test_a_number_as_a_name_shows_how_to_quote_it() -> None:
    assert only({"name": 2024}).endswith("""write name='"2024"'""")


def test_missing_values_say_what_to_write() -> None:
    assert only({"data.root": "???"}) == "data.root: missing\n    write data.root=..."
    config = sample()
    del config["seed"]
    assert str(problems_of(config)[0]) == "seed: missing\n    write seed=..."


def test_component_without_a_class() -> None:
    message = only({"callbacks.early_stoping.patience": 3})
    assert message.startswith("callbacks.early_stoping: names no class (_target_), only patience")
    assert "did you mean callbacks.early_stopping?" in message
    message = only({"optimizer": {"lr": 0.1}})
    assert "optimizer: there is none here to take lr" in message
    assert "optimizer=NAME" in message


def test_trainer_arguments_that_distdl_owns() -> None:
    message = only({"trainer.logger": True})
    assert message.startswith("trainer.logger: is set by distdl itself")
    assert "tracking=mlflow" in message


def test_unset_environment_variable_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SAMPLE_ROOT", raising=False)
    message = only({"data.root": "${oc.env:SAMPLE_ROOT}", "data.twin": "${data.root}"})
    assert message.startswith("data.root: the environment variable SAMPLE_ROOT is not set")
    assert "export SAMPLE_ROOT=... or give a default: ${oc.env:SAMPLE_ROOT,default}" in message
    assert messages({"data.root": "${oc.env:SAMPLE_ROOT,data}"}) == []


def test_variable_that_a_remote_job_will_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMPLE_ROOT", "somewhere")
    changes: dict[str, Any] = {
        "data.root": "${oc.env:SAMPLE_ROOT}",
        "launcher": {"_target_": "distdl.launchers.slurm.SlurmLauncher", "forward_env": ["A"]},
    }
    message = only(changes)
    assert "data.root: reads the environment variable SAMPLE_ROOT" in message
    assert "launcher.forward_env=[A,SAMPLE_ROOT]" in message
    changes["launcher"]["forward_env"] = ["SAMPLE_ROOT"]
    assert messages(changes) == []
    assert messages({"data.root": "${oc.env:SAMPLE_ROOT}"}) == []  # launcher=local


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("${data.num_clases}", "refers to data.num_clases, which is not in the config"),
        ("${nowhere.at.all}", "refers to nowhere.at.all, which is not in the config"),
        ("${nosuch:3}", "uses a resolver that is not known: ${nosuch:3}"),
        ("${model.num_classes}", "model.num_classes: "),
    ],
)
def test_bad_interpolation(written: str, expected: str) -> None:
    message = only({"model.num_classes": written, "data.num_classes": 10})
    assert expected in message


def test_computed_interpolation_that_leads_nowhere() -> None:
    message = only({"model.which": "nowhere", "model.lr": "${${model.which}.lr}"})
    assert message.startswith("model.lr: refers to nowhere.lr, which is not in the config")


def test_interpolation_suggests_a_path() -> None:
    message = only({"model.num_classes": "${data.num_clases}", "data.num_classes": 10})
    assert "did you mean data.num_classes?" in message


def test_values_of_the_environment_are_never_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMPLE_SIZE", "very-private")
    changes = {"data.batch_size": "${oc.env:SAMPLE_SIZE}", "data.twin": "${data.batch_size}"}
    message = only({**changes, "optimizer.lr": "${data.batch_size}"} | {"optimizer.lr": 0.1})
    assert message == "data.batch_size: must be an integer, not ${oc.env:SAMPLE_SIZE}"
    message = only({"data.x": "${oc.env:SAMPLE_SIZE}", "seed": "${data.x}"})
    assert message == "seed: must be an integer, not ${data.x}"
    message = only({"data._target_": "${oc.env:SAMPLE_SIZE}"})
    assert "very-private" not in message


@pytest.mark.parametrize(
    "target",
    [
        "os.system",
        "builtins.eval",
        "subprocess.Popen",
        "foo.bar.Baz",
        "distdl_evil.Thing",
        "torch.nn.Module.__subclasses__",
        "timm.models._helpers.load_state_dict",
        "resnet50",
        "torch.nn.",
        "a b.c",
        7,
    ],
)
@pytest.mark.parametrize("path", ["model._target_", "model.a", "model.b", "trainer.profiler"])
def test_target_outside_the_allowed_prefixes(target: Any, path: str) -> None:
    value: Any = {"_target_": target}
    if path == "model.b":
        value = [1, {"deep": [value]}]
    if path == "model._target_":
        value = target
    problems = messages({path: value})
    assert len(problems) >= 1
    place = {"model.b": "model.b[1].deep[0]", "model._target_": "model"}.get(path, path)
    assert any(p.startswith(f"{place}._target_: ") for p in problems)


def test_remedy_for_a_foreign_package_but_not_for_pythons_own() -> None:
    message = only({"model._target_": "foo.bar.Baz"})
    assert "foo.bar.Baz is outside the allowed packages" in message
    assert "project.allow=[foo]" in message
    assert "project.allow" not in only({"model._target_": "os.system"})
    assert messages({"model._target_": "foo.bar.Baz", "project.allow": ["foo"]}) == []
    assert len(messages({"model._target_": "foobar.Baz", "project.allow": ["foo"]})) == 1
    assert messages({"strategy.timeout": {"_target_": "datetime.timedelta", "hours": 1}}) == []


def test_the_users_own_project_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").touch()
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "net.py").touch()
    (tmp_path / "subprocess.py").touch()
    for target in ("mine.Model", "package.net.Model"):
        assert len(messages({"model._target_": target})) == 1
        assert messages({"model._target_": target}, project_root=str(tmp_path)) == []
        assert messages({"model._target_": target, "project.root": str(tmp_path)}) == []
    monkeypatch.chdir(tmp_path)
    assert messages({"model._target_": "mine.Model"}) == []
    assert len(messages({"model._target_": "subprocess.Popen"})) == 1


def test_topology() -> None:
    remote = {"launcher._target_": "distdl.launchers.slurm.SlurmLauncher"}
    message = only({**remote, "trainer.devices": [0, 1]})
    assert "a list names devices of this machine" in message
    assert "trainer.devices=2" in message
    message = only({"trainer.num_nodes": 2})
    assert "trainer.num_nodes: launcher=local is one machine, not 2" in message
    assert messages({**remote, "trainer.num_nodes": 2}) == []
    single = {"strategy": {"_target_": "distdl.strategies.single"}}
    message = only(single, topology=Resources(devices=4))
    assert message.startswith("strategy: single trains on one device, not on 4 devices x 1 nodes")
    assert "strategy=ddp" in message
    assert messages(single, topology=Resources()) == []
    assert "an Apple GPU is one device" in only(
        {}, topology=Resources(devices=2, accelerator="mps")
    )


def test_batches_that_do_not_divide() -> None:
    changes = {"data.batch_size": 8, "data.global_batch_size": 100}
    message = only(changes, topology=Resources(devices=4))
    assert "data.global_batch_size: 100 is not 8 (data.batch_size) x 4 devices" in message
    assert "nor divisible" not in message and "data.batch_size=25" in message
    changes["data.global_batch_size"] = 98
    message = only(changes, topology=Resources(devices=4))
    assert "nor divisible" in message and "data.global_batch_size=96" in message
    changes["data.global_batch_size"] = 32
    assert messages(changes, topology=Resources(devices=4)) == []


SAS = "https://account.blob.core.windows.net/c?sv=1&sig=hunter2hunter2%3D"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("tracking.csv.api_token", "hunter2hunter2"),
        ("tracking.csv.password", "x"),
        ("tracking.csv.api_token", "${oc.env:API_TOKEN,hunter2hunter2}"),
        ("tracking.csv.uri", "https://me:hunter2hunter2@host/x"),
        ("data.url", SAS),
        ("data.path", SAS),
        ("data.home", SAS),
        ("data.note", "AKIAABCDEFGHIJKLMNOP"),
        ("data.keys", ["fine", {"secret": "hunter2hunter2"}]),
        ("tags", ["value-of-canary-1"]),
        ("model.note", "prefix value-of-canary-1 suffix"),
    ],
)
def test_literal_secrets_are_refused_without_being_repeated(
    path: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAMPLE_CANARY_TOKEN", "value-of-canary-1")
    monkeypatch.setenv("API_TOKEN", "another-value")
    message = only({path: value})
    name = re.search(r"='\$\{oc\.env:(\w+)\}' and export \1$", message)
    # None that a shell has, which would be lost: $PATH for a key called path.
    assert name is not None and name[1] not in {*os.environ} - {"SAMPLE_CANARY_TOKEN"}
    for secret in ("hunter2", "AKIA", "value-of-canary"):
        assert secret not in message


def test_a_signed_address_of_an_input_needs_no_variable() -> None:
    """Whose value would stand in the request, so that it is refused in its turn."""
    message = only({"launcher.inputs": {"imagenet": {"path": SAS}}})
    assert "azureml://datastores/NAME/paths/... keeps its own" in message
    assert "export" not in message and "hunter2" not in message


def test_a_secret_reached_by_reference_is_a_literal_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_TOKEN", "another-value")
    changes = {"data.note": "hunter2", "tracking.csv.api_token": "${data.note}"}
    assert "refers to a secret that is plain text" in only(changes)
    changes["data.note"] = "${oc.env:API_TOKEN}"
    assert messages(changes) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model.tokenizer", "bert-base-uncased"),
        ("model.max_tokens", 512),
        ("model.pad_token", "<pad>"),
        ("model.class_token", True),
        ("model.token", None),
        ("model.password", ""),
        ("model.token_length", 77),
        ("tracking.csv.api_token", "${oc.env:API_TOKEN}"),
        ("tracking.csv.api_token", "${oc.env:API_TOKEN,null}"),
        ("tracking.csv.uri", "https://${oc.env:API_TOKEN}:${oc.env:API_TOKEN}@host"),
        ("data.connection_string", "AccountName=x;AccountKey=${oc.env:API_TOKEN}"),
        ("launcher.credential", "managed_identity"),
        ("data.secret_file", "secrets/key.pem"),
        ("tracking.csv.uri", "http://localhost:5000"),
    ],
)
def test_no_false_alarm_about_secrets(
    path: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_TOKEN", "another-value")
    assert messages({path: value}) == []


def test_wrong_value_of_a_secret_key_is_not_printed() -> None:
    assert "hunter2" not in " ".join(messages({"password": "hunter2", "trainer.password": "x"}))


def test_problems_of_the_text_are_told_before_anything_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(validation, "_ask_child", lambda request: pytest.fail("imports"))
    with pytest.raises(Unchecked) as caught:
        validate(sample({"seed": -1, "lrr": 1, "trainer.max_epoch": 3}), Resources())
    paths = [problem.path for problem in caught.value.problems]
    assert paths == ["lrr", "seed", "trainer.max_epoch"]
    assert caught.value.exit_code == 2


def test_all_problems_of_the_second_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    what = "the folder somewhere-private is absent"
    answer = {"problems": [["model", "b", ""], ["data", what, ""]], "notes": [], "facts": {}}
    monkeypatch.setattr(validation, "_ask_child", lambda request: answer)
    monkeypatch.setenv("SAMPLE_ROOT", "somewhere-private")
    with pytest.raises(UserError) as caught:
        validate(sample({"data.root": "${oc.env:SAMPLE_ROOT}"}), Resources())
    assert [problem.path for problem in caught.value.problems] == ["data", "model"]
    assert "data: the folder ${oc.env:SAMPLE_ROOT} is absent" in str(caught.value)


def test_a_child_that_crashes_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    crash = "import sys; print('noise'); sys.exit('last words')"
    real = subprocess.run
    monkeypatch.setattr(
        validation.subprocess, "run", lambda command, **k: real([sys.executable, "-c", crash], **k)
    )
    with pytest.raises(UserError) as caught:
        validate(sample(), None)
    assert "ended Python (exit code 1)\n    last words" in str(caught.value)


def test_a_child_that_hangs_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    real = subprocess.run
    hang = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(validation, "_CHILD_SECONDS", 0.5)
    monkeypatch.setattr(validation.subprocess, "run", lambda command, **k: real(hang, **k))
    with pytest.raises(UserError, match="took more than"):
        validate(sample(), None)
