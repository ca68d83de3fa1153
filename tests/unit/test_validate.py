"""Stage 1: each kind of bad input, by the message that a user reads."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sample_config import sample

from distdl.job import Resources
from distdl.util.errors import Unchecked, UserError
from distdl.validation import validate as validation
from distdl.validation.validate import problems_of, validate


def messages(changes: dict[str, Any], **options: Any) -> list[str]:
    return [str(problem) for problem in problems_of(sample(changes), **options)]


def only(changes: dict[str, Any], **options: Any) -> str:
    (message,) = messages(changes, **options)
    return message


def test_a_valid_config_has_no_problems() -> None:
    assert messages({}) == []


# path = value (of Python) | what the message says; several parts of it
WRONG = """
lrr = 1 | lrr: unknown key in the config; did you mean optimizer.lr?
max_epochs = 1 | max_epochs: unknown key in; did you mean trainer.max_epochs?
batch_size = 1 | did you mean data.batch_size?
optimiser.lr = 1 | optimiser.lr: unknown key in optimiser; did you mean optimizer.lr?
checkpoint.every_n_step = 1 | did you mean checkpoint.every_n_steps?
project.alow = 1 | did you mean project.allow?
sede = 1 | did you mean seed?
seed = "3" | seed: must be an integer, not '3'
seed = True | seed: must be an integer, not true
seed = -1 | seed: must be greater than or equal to 0, not -1
tags = "a" | tags: must be a list, not 'a'
name = "a/b" | name: must be made of letters from a to z, digits, dots, underscores and dashes
name = "../x" | name: must be made of letters
name = 2024 | write name='"2024"'
optimizer.lr = 0 | optimizer.lr: must be greater than 0, not 0
optimizer.lr = "big" | optimizer.lr: must be a number, not 'big'
optimizer.lr_scaling = "cubic" | must be 'linear', 'sqrt' or 'none', not 'cubic'
data.batch_size = 0 | data.batch_size: must be greater than or equal to 1, not 0
checkpoint.mode = "up" | checkpoint.mode: must be 'min' or 'max', not 'up'
checkpoint.every_minutes = 0 | checkpoint.every_minutes: must be greater than 0
project = 3 | project: must be a mapping, not 3
trainer.devices = 0 | must be a number of devices of each node, 1 or more, -1 or auto for all
trainer.devices = "two" | must be a number of devices of each node, 1 or more
trainer.precision = "fp16" | write trainer.precision=16-mixed or bf16-mixed
trainer.max_epochs = 1.5 | trainer.max_epochs: must be an integer
trainer.limit_train_batches = "few" | trainer.limit_train_batches: must be
trainer.logger = True | trainer.logger: is set by distdl itself; tracking=mlflow
trainer.accelerator = "ddp" | ddp is a strategy; strategy=ddp, and trainer.accelerator=auto
trainer.gpus = 2 | trainer.gpus: Lightning 2's Trainer has it no more; trainer.devices=N
trainer.weights_summary = None | trainer.enable_model_summary=true or false
trainer.resume_from_checkpoint = "x.ckpt" | checkpoint.resume_from=FILE
model = "resnet50" | model: must be a mapping, not 'resnet50'
optimizer._partial_ = "yes" | optimizer._partial_: must be a boolean
data.root = "???" | data.root: missing; write data.root=...
callbacks.early_stoping.patience = 3 | callbacks.early_stoping: names no class (_target_), \
only patience; did you mean callbacks.early_stopping?
optimizer = {"lr": 0.1} | optimizer: there is none here to take lr; optimizer=NAME
model.num_classes = "${data.num_clases}" | refers to data.num_clases, which is not in the config; \
did you mean data.num_classes?
model.num_classes = "${nowhere.at.all}" | refers to nowhere.at.all, which is not in the config
model.num_classes = "${nosuch:3}" | uses a resolver that is not known: ${nosuch:3}
model.num_classes = "${model.num_classes}" | model.num_classes:
model.lr = "${${data.which}.lr}" | model.lr: refers to nowhere.lr, which is not in the config
model._target_ = "foo.bar.Baz" | foo.bar.Baz is outside the allowed packages; project.allow=[foo]
model._target_ = "os.system" | os.system is outside the allowed packages
"""
ROWS = [line for line in WRONG.replace("\\\n", "").splitlines() if line]


@pytest.mark.parametrize("row", ROWS)
def test_what_is_wrong_is_one_problem(row: str) -> None:
    typed, _, expected = row.partition(" | ")
    path, _, value = typed.partition(" = ")
    further = {"data.num_classes": 10, "data.which": "nowhere"}
    message = only({**further, path: ast.literal_eval(value)})
    assert all(part in message for part in expected.split("; "))


def test_what_has_no_remedy() -> None:
    assert only({"zzzzqqq": 1}) == "zzzzqqq: unknown key in the config"
    assert "project.allow" not in only({"model._target_": "os.system"})  # hardly ever meant
    config = sample()
    del config["seed"]
    assert str(problems_of(config)[0]) == "seed: missing\n    write seed=..."


SIMPLE = {"_target_": "lightning.pytorch.profilers.SimpleProfiler"}
ACCEPTED: list[tuple[str, Any]] = [
    *(("optimizer.lr", 1), ("trainer.devices", [0, 2]), ("trainer.devices", -1)),
    *(("trainer.precision", 16), ("trainer.limit_train_batches", 0.5), ("optimizer", {})),
    *(("model", None), ("callbacks.early_stopping", None), ("tracking", None)),
    *(("name", "run-1.b_2"), ("trainer.profiler", SIMPLE)),
    ("strategy.timeout", {"_target_": "datetime.timedelta", "hours": 1}),
]


@pytest.mark.parametrize(("path", "value"), ACCEPTED)
def test_accepted_values(path: str, value: Any) -> None:
    assert messages({path: value}) == []


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


def test_values_of_the_environment_are_never_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMPLE_SIZE", "very-private")
    message = only({"data.batch_size": "${oc.env:SAMPLE_SIZE}", "data.twin": "${data.batch_size}"})
    assert message == "data.batch_size: must be an integer, not ${oc.env:SAMPLE_SIZE}"
    message = only({"data.x": "${oc.env:SAMPLE_SIZE}", "seed": "${data.x}"})
    assert message == "seed: must be an integer, not ${data.x}"
    assert "very-private" not in only({"data._target_": "${oc.env:SAMPLE_SIZE}"})


TARGETS = (
    "os.system builtins.eval subprocess.Popen foo.bar.Baz distdl_evil.Thing resnet50 torch.nn. "
    "torch.nn.Module.__subclasses__ timm.models._helpers.load_state_dict a/b.c"
)


@pytest.mark.parametrize("target", [*TARGETS.split(), "a b.c", 7])
def test_target_outside_the_allowed_prefixes(target: Any) -> None:
    node = {"_target_": target}
    changes = {"model.a": node, "model.b": [1, {"deep": [node]}], "trainer.profiler": node}
    paths = {message.partition(": ")[0] for message in messages(changes)}
    places = ("model.a", "model.b[1].deep[0]", "trainer.profiler")
    assert paths == {f"{place}._target_" for place in places}
    assert any(m.startswith("model._target_: ") for m in messages({"model._target_": target}))


def test_what_is_allowed_by_name() -> None:
    assert messages({"model._target_": "foo.bar.Baz", "project.allow": ["foo"]}) == []
    assert len(messages({"model._target_": "foobar.Baz", "project.allow": ["foo"]})) == 1


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


PLAIN = """
model.tokenizer=bert-base-uncased model.max_tokens=512 model.pad_token=<pad> model.class_token=true
model.token=null model.password= model.token_length=77 launcher.credential=managed_identity
tracking.csv.api_token=${oc.env:API_TOKEN} tracking.csv.api_token=${oc.env:API_TOKEN,null}
tracking.csv.uri=https://${oc.env:API_TOKEN}:${oc.env:API_TOKEN}@host
data.connection_string=AccountName=x;AccountKey=${oc.env:API_TOKEN}
data.secret_file=secrets/key.pem tracking.csv.uri=http://localhost:5000
"""


@pytest.mark.parametrize("typed", PLAIN.split())
def test_no_false_alarm_about_secrets(typed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_TOKEN", "another-value")
    path, _, value = typed.partition("=")
    plain = {"true": True, "null": None, "512": 512, "77": 77}
    assert messages({path: plain.get(value, value)}) == []


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


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import sys; print('noise'); sys.exit('last words')", r"\(exit code 1\)\n    last words"),
        ("import time; time.sleep(60)", "took more than"),
    ],
)
def test_a_child_that_crashes_or_hangs(
    code: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seconds = subprocess.run, 0.5 if "sleep" in code else 60
    monkeypatch.setattr(validation, "_CHILD_SECONDS", seconds)
    monkeypatch.setattr(
        validation.subprocess, "run", lambda command, **k: real([sys.executable, "-c", code], **k)
    )
    with pytest.raises(UserError, match=said):
        validate(sample(), None)
