"""`distdl deploy`: every input that is refused before a platform is asked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from distdl.launchers.deploying import Example, NotDeployed
from tests.served import model_folder
from tests.serving.colours import photo

NAME = "deploy.name=flowers"
IMAGE = "deploy.image=123456789012.dkr.ecr.eu-west-1.amazonaws.com/serve:1"
AWS = ("launcher.role=arn:aws:iam::123456789012:role/serve", "launcher.bucket=my-bucket", IMAGE)
SPACE = ("launcher.subscription=s", "launcher.resource_group=g", "launcher.workspace=w")

# Words behind `deploy`, and a part of the message. MODEL is a model folder.
REFUSED = {
    "platform": ("aws", "invalid choice: 'aws'"),
    "no model": (f"azureml {NAME}", "RUN: missing"),
    "not a model, of a sweep": (f"azureml lr=1 {NAME}", "lr=1: holds no exported model"),
    "not a model": (f"azureml empty {NAME}", "python -m distdl export empty --to pt2"),
    "incomplete": (f"azureml incomplete {NAME}", "incomplete: has no score.py"),
    "damaged": (f"azureml damaged {NAME} {' '.join(SPACE)}", "is missing or damaged: export"),
    "other answers": (
        f"azureml other {NAME} {' '.join(SPACE)}",
        "was red, and on this machine is g",
    ),
    "no name": ("azureml MODEL", "deploy.name: missing\n      deploy.name=..."),
    "name": ("azureml MODEL deploy.name=a_b", "deploy.name: 'a_b' is not a name for an endpoint"),
    "long name": (f"azureml MODEL deploy.name={'a' * 33}", "is not a name for an endpoint"),
    "unknown key": (f"azureml MODEL {NAME} deploy.instance=3", "deploy.instance: no such setting"),
    "another key": (f"azureml MODEL {NAME} data.root=x", "data.root: is not a setting of deploy"),
    "instances": (f"azureml MODEL {NAME} deploy.instances=0", "deploy.instances: 0 is not"),
    "keep": (f"azureml MODEL {NAME} deploy.keep=2", "deploy.keep: 2 is not 0 or 1"),
    "rollback": (f"azureml {NAME} deploy.rollback=1", "deploy.rollback: 1 is not true or false"),
    "dry run": (f"azureml MODEL {NAME} dry_run=1", "dry_run: 1 is not true or false"),
    "rollback and dry": (
        f"azureml {NAME} deploy.rollback=true dry_run=true",
        "dry_run: does not go",
    ),
    "delete a model": (f"azureml MODEL {NAME} --delete", "does not go with --delete"),
    "delete unasked": (f"azureml {NAME} --delete", "--delete: there is no terminal"),
    "size": (
        f"azureml MODEL {NAME} deploy.instance_type=big",
        "deploy.instance_type: 'big' is not",
    ),
    "retired": (f"azureml MODEL {NAME} deploy.instance_type=Standard_NC6", "Azure retired"),
    "batch without cluster": (f"azureml MODEL {NAME} --batch", "launcher.compute: missing"),
    "mini batch": (f"azureml MODEL {NAME} deploy.mini_batch=0", "deploy.mini_batch: 0 is not"),
    "launcher key": (
        f"azureml MODEL {NAME} launcher.worspace=x",
        "launcher.worspace: no such setting",
    ),
    "no workspace": (f"azureml MODEL {NAME}", "launcher.workspace: missing"),
    "role": (f"sagemaker MODEL {NAME} {AWS[1]} {IMAGE}", "launcher.role: missing"),
    "bucket": (f"sagemaker MODEL {NAME} {AWS[0]} {IMAGE}", "launcher.bucket: missing"),
    "image": (f"sagemaker MODEL {NAME} {AWS[0]} {AWS[1]}", "deploy.image: missing"),
    "type": (
        f"sagemaker MODEL {NAME} {' '.join(AWS)} deploy.instance_type=ml.m5.larg",
        "ml.m5.larg is not an instance type for this",
    ),
    "no input": (f"sagemaker MODEL {NAME} {' '.join(AWS)} --batch", "deploy.input: missing"),
    "input": (
        f"sagemaker MODEL {NAME} {' '.join(AWS)} --batch deploy.input=x deploy.output=s3://b/o",
        "deploy.input: 'x' is not an address in S3",
    ),
    "transform": (
        f"sagemaker {NAME} {' '.join(AWS)} --batch --delete --yes "
        "deploy.input=s3://b/i deploy.output=s3://b/o",
        "a transform job ends by itself",
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("folders")
    (root / "empty").mkdir()
    (root / "lr=1").mkdir()
    good = model_folder(root / "MODEL")
    for name in ("incomplete", "damaged", "other"):
        shutil.copytree(good, root / name)
    (root / "incomplete/score.py").unlink()
    (root / "damaged/model.pt2").write_bytes(b"other")
    description = json.loads((good / "model.json").read_text())
    description["verification"]["examples"][0]["class"] = "red"
    (root / "other/model.json").write_text(json.dumps(description))
    return root


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_anything_is_asked(case: str, folders, command, monkeypatch) -> None:
    words, said = REFUSED[case]
    monkeypatch.chdir(folders)
    output = command("deploy", *words.split())
    assert output.code == 2 and said in output.err and "Traceback" not in output.err, output


GOOD = {"class": "red", "probability": 0.9}


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ({"predictions": [GOOD]}, True),
        ({"predictions": [{**GOOD, "probability": 0.9005}]}, True),
        ({"predictions": [{**GOOD, "probability": 0.902}]}, False),
        ({"predictions": [{**GOOD, "probability": float("nan")}]}, False),
        ({"predictions": [{**GOOD, "class": "green"}]}, False),
        ({"predictions": [GOOD, GOOD]}, False),
        ({"predictions": []}, False),
        ({"error": "no"}, False),
        ([], False),
    ],
)
def test_an_answer_is_compared(answer, right: bool) -> None:
    example = Example(photo("red"), "red", 0.9)
    if right:
        return example.check(json.dumps(answer))
    with pytest.raises(NotDeployed):
        example.check(json.dumps(answer))
