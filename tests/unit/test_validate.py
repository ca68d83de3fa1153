"""Stage 1 of validation: what is wrong with the text of a config, found without an import."""

from __future__ import annotations

import os
import re

import pytest
from sample_config import change, check_parts, node, rows, sample

from distdl.job import Resources
from distdl.util.errors import Unchecked
from distdl.validation.validate import problems_of, validate

SAS = "https://account.blob.core.windows.net/c?sv=1&sig=hunter2hunter2%3D"
NAMES = {
    "SAS": SAS,
    "SIMPLE": node("lightning.pytorch.profilers.SimpleProfiler"),
    "SLURM": node("distdl.launchers.slurm.SlurmLauncher"),
    "SLURM_ENV": node("distdl.launchers.slurm.SlurmLauncher", forward_env=["SAMPLE_SIZE"]),
}
WRONG = """
lrr = 1 | lrr: unknown key in the config | did you mean optimizer.lr?
optimiser.lr = 1 | optimiser.lr: unknown key in optimiser | did you mean optimizer.lr?
trainer.max_epoch = 1 | trainer.max_epoch: lightning's Trainer takes no argument | trainer.max_epochs?
seed = -1 | seed: must be greater than or equal to 0, not -1
seed = None | seed: must be an integer
tags = "a" | tags: must be a list, not 'a'
name = 2024 | write name='"2024"'
optimizer.lr = 0 | optimizer.lr: must be greater than 0, not 0
checkpoint.mode = "up" | checkpoint.mode: must be 'min' or 'max', not 'up'
project = 3 | project: must be a mapping, not 3
trainer.devices = "two" | must be a number of devices of each node, 1 or more, -1 or auto for all
trainer.logger = True | trainer.logger: is set by distdl itself | tracking=mlflow
trainer.accelerator = "ddp" | ddp is a strategy | strategy=ddp, and trainer.accelerator=auto
trainer.gpus = 2 | trainer.gpus: Lightning 2's Trainer no longer has it | trainer.devices=N
trainer.num_nodes = 2 | trainer.num_nodes: launcher=local is one machine, not 2
optimizer._partial_ = "yes" | optimizer._partial_: must be a boolean
data.root = "???" | data.root: missing | write data.root=...
callbacks.early_stoping.patience = 3 | callbacks.early_stoping: names no class (_target_), only \
patience | did you mean callbacks.early_stopping?
optimizer = {"lr": 0.1} | optimizer: names no class (_target_) to take lr | optimizer=NAME
model.num_classes = "${data.num_clases}" | refers to data.num_clases, which is not in the config | \
did you mean data.num_classes?
model.num_classes = "${nosuch:3}" | uses an unknown resolver: ${nosuch:3}
model.num_classes = "${model.num_classes}" | model.num_classes:
model.lr = "${${data.which}.lr}" | model.lr: refers to nowhere.lr, which is not in the config
model._target_ = "foo.bar.Baz" | is outside the allowed packages | project.allow=[foo]
model._target_ = "os.system" | os.system is outside the allowed packages
# Values of the environment are not repeated.
data.batch_size = "${oc.env:SAMPLE_SIZE}" | batch_size: must be an integer, not ${oc.env:SAMPLE_SIZE}
model._target_ = "${oc.env:SAMPLE_SIZE}" | model._target_: is not a dotted path
"""  # noqa: E501
PLAIN = """
optimizer = {}
model = None
name = "run-1.b_2"
trainer.devices = [0, 2]
trainer.precision = 16
trainer.profiler = SIMPLE
strategy.timeout = node("datetime.timedelta", hours=1)
data.root = "${oc.env:NOT_SET,data}"
data.root = "${oc.env:SAMPLE_SIZE}"
# No secrets.
model.tokenizer = "bert-base-uncased"
model.class_token = True
model.password = ""
model.token_length = 77
launcher.credential = "managed_identity"
tracking.csv.api_token = "${oc.env:API_TOKEN,null}"
tracking.csv.uri = "https://${oc.env:API_TOKEN}:${oc.env:API_TOKEN}@host"
data.connection_string = "AccountName=x;AccountKey=${oc.env:API_TOKEN}"
data.secret_file = "secrets/key.pem"
"""
SECRET = """
tracking.csv.api_token = "hunter2hunter2"
tracking.csv.api_token = "${oc.env:API_TOKEN,hunter2hunter2}"
tracking.csv.uri = "https://me:hunter2hunter2@host/x"
data.path = SAS
data.note = "AKIAABCDEFGHIJKLMNOP"
data.keys = ["fine", {"secret": "hunter2hunter2"}]
tags = ["value-of-canary-1"]
model.note = "prefix value-of-canary-1 suffix"
"""


@pytest.fixture(autouse=True)
def variables(monkeypatch) -> None:
    monkeypatch.setenv("SAMPLE_SIZE", "very-private")
    monkeypatch.setenv("SAMPLE_CANARY_TOKEN", "value-of-canary-1")
    monkeypatch.setenv("API_TOKEN", "another-value")
    monkeypatch.delenv("NOT_SET", raising=False)


def found(changes, **options):
    return problems_of(sample(changes), **options)


def only(changes, **options):
    (problem,) = found(changes, **options)
    return str(problem)


@pytest.mark.parametrize(("typed", "parts"), rows(WRONG))
def test_what_is_wrong_is_one_problem(typed, parts) -> None:
    message = only({"data.num_classes": 10, "data.which": "nowhere", **change(typed, **NAMES)})
    check_parts(message, parts)
    assert "very-private" not in message


@pytest.mark.parametrize(("typed", "_"), rows(PLAIN))
def test_accepted_values(typed, _) -> None:
    assert found(change(typed, **NAMES)) == []


@pytest.mark.parametrize(("typed", "_"), rows(SECRET))
def test_literal_secrets_are_refused_without_being_repeated(typed, _) -> None:
    message = only(change(typed, **NAMES))
    name = re.search(r"='\$\{oc\.env:(\w+)\}' and export \1$", message)
    # None that a shell has, which would be lost: $PATH for a key called path.
    assert name is not None and name[1] not in {*os.environ} - {"SAMPLE_CANARY_TOKEN"}
    assert not re.search("hunter2|AKIA|value-of-canary", message)


def test_secrets_in_other_places() -> None:
    """A signed address of an input would be in the request if a variable held it."""
    message = only({"launcher.inputs": {"imagenet": {"path": SAS}}})
    assert "azureml://datastores/NAME/paths/..." in message
    assert "export" not in message and "hunter2" not in message
    message = only({"data.note": "hunter2", "tracking.csv.api_token": "${data.note}"})
    assert "refers to a secret that is plain text" in message
    wrong = found({"password": "hunter2", "trainer.password": "x"})
    assert wrong and "hunter2" not in "".join(map(str, wrong))


def test_what_has_no_remedy() -> None:
    for changes in ({"zzzzqqq": 1}, {"model._target_": "os.system"}):  # that is hardly ever meant
        assert not found(changes)[0].remedy
    config = sample()
    del config["seed"]
    assert str(problems_of(config)[0]) == "seed: missing\n    write seed=..."


def test_a_value_that_others_refer_to_is_reported_once() -> None:
    message = only({"data.root": "${oc.env:NOT_SET}", "data.twin": "${data.root}"})
    assert message.startswith("data.root: the environment variable NOT_SET is not set")
    assert "export NOT_SET=... or give a default: ${oc.env:NOT_SET,default}" in message
    only({"data.batch_size": "${oc.env:SAMPLE_SIZE}", "data.twin": "${data.batch_size}"})
    message = only({"data.x": "${oc.env:SAMPLE_SIZE}", "seed": "${data.x}"})
    assert message == "seed: must be an integer, not ${data.x}"


def test_a_remote_job() -> None:
    size = {"data.root": "${oc.env:SAMPLE_SIZE}"}
    message = only({**size, "launcher": {**NAMES["SLURM_ENV"], "forward_env": ["A"]}})
    assert "data.root: reads the environment variable SAMPLE_SIZE" in message
    assert "launcher.forward_env=[A,SAMPLE_SIZE]" in message
    assert found({**size, "launcher": NAMES["SLURM_ENV"], "trainer.num_nodes": 2}) == []
    message = only({"launcher": NAMES["SLURM"], "trainer.devices": [0, 1]})
    assert "a list names devices of this machine" in message and "trainer.devices=2" in message


TARGETS = (
    "builtins.eval subprocess.Popen distdl_evil.Thing resnet50 torch.nn. a/b.c foobar.Baz "
    "torch.nn.Module.__subclasses__ timm.models._helpers.load_state_dict"
)


@pytest.mark.parametrize("target", [*TARGETS.split(), "a b.c", 7])
def test_targets_outside_the_allowed_prefixes(target) -> None:
    bad, allow = node(target), {"project.allow": ["foo"]}
    nested = {"model.a": bad, "model.b": [1, {"deep": [bad]}], "trainer.profiler": bad}
    paths = ["model.a", "model.b[1].deep[0]", "trainer.profiler"]
    assert [p.path for p in found(nested | allow)] == [f"{path}._target_" for path in paths]
    assert {p.path for p in found({"model._target_": target})} == {"model._target_"}


def test_allowed_by_name_or_in_the_users_project(tmp_path, monkeypatch) -> None:
    assert found({"model._target_": "foo.bar.Baz", "project.allow": ["foo"]}) == []
    (tmp_path / "package").mkdir()
    for name in ("mine.py", "package/net.py", "subprocess.py"):
        (tmp_path / name).touch()
    for target in ("mine.Model", "package.net.Model"):
        only({"model._target_": target})
        assert found({"model._target_": target}, project_root=str(tmp_path)) == []
        assert found({"model._target_": target, "project.root": str(tmp_path)}) == []
    monkeypatch.chdir(tmp_path)
    assert found({"model._target_": "mine.Model"}) == []
    only({"model._target_": "subprocess.Popen"})


SINGLE = {"strategy": node("distdl.strategies.single")}
BATCHES = {"data.batch_size": 8, "data.global_batch_size": 100}
SIZES = [
    (SINGLE, {"devices": 4}, ["strategy: single trains on one device, not on 4", "strategy=ddp"]),
    (SINGLE, {}, None),
    ({}, {"devices": 2, "accelerator": "mps"}, ["an Apple GPU is one device"]),
    (BATCHES, {"devices": 4}, ["100 is not 8 (data.batch_size) x 4 devices", "batch_size=25"]),
    ({**BATCHES, "data.global_batch_size": 98}, {"devices": 4}, ["and not divisible", "size=96"]),
    ({**BATCHES, "data.global_batch_size": 32}, {"devices": 4}, None),
]


@pytest.mark.parametrize(("changes", "size", "parts"), SIZES)
def test_the_size_of_the_run(changes, size, parts) -> None:
    problems = found(changes, topology=Resources(**size))
    assert len(problems) == bool(parts)
    check_parts("".join(map(str, problems)), parts or [])


@pytest.mark.usefixtures("no_child")
def test_problems_of_the_text_are_reported_before_anything_is_imported() -> None:
    with pytest.raises(Unchecked) as error:
        validate(sample({"seed": -1, "lrr": 1, "trainer.max_epoch": 3}), Resources())
    assert [problem.path for problem in error.value.problems] == [
        "lrr",
        "seed",
        "trainer.max_epoch",
    ]
    assert error.value.exit_code == 2
