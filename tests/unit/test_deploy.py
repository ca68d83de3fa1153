"""`distdl deploy`: every input that is refused before anything is created."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from distdl.launchers.deploying import NotDeployed, check
from tests.served import model_folder

MODEL = "MODEL --name flowers"
ROLE, BUCKET = "launcher.role=arn:aws:iam::123456789012:role/serve", "launcher.bucket=my-bucket"
AWS = f"sagemaker {MODEL} {ROLE} {BUCKET} --image 123456789012.dkr.ecr.eu-west-1.amazonaws.com/s:1"

# Words behind `deploy`, and a part of the message. MODEL is a model folder.
REFUSED = {
    "platform": (f"aws {MODEL}", "invalid choice: 'aws'"),
    "no name": ("azureml MODEL", "required: --name"),
    "name": ("azureml MODEL --name a_b", "--name: a_b is not a name for an endpoint"),
    "long name": (f"azureml MODEL --name {'a' * 24}", "is not a name for an endpoint"),
    "instances": (f"azureml {MODEL} --instances 0", "--instances: 0 is less than 1"),
    "no model": ("azureml --name flowers", "RUN: missing"),
    "not a model": ("azureml empty --name flowers", "empty: is not a run"),
    "of a sweep": ("azureml lr=1 --name flowers", "lr=1: is not a run"),
    "weights": ("azureml weights --name flowers", "weights: holds weights"),
    "damaged": ("azureml damaged --name flowers", "model.pt2 is missing or damaged"),
    "key": (f"azureml {MODEL} dryrun=true", "did you mean dry_run?"),
    "section": (f"azureml {MODEL} laucher.compute=x", "did you mean launcher.compute?"),
    "task": (f"azureml {MODEL} task=train", "task=train: is not a setting of deploy"),
    "launcher key": (f"azureml {MODEL} launcher.worspace=x", "launcher.worspace"),
    "rollback and dry": ("azureml --name flowers --rollback dry_run=true", "is not a setting"),
    "delete a model": (f"azureml {MODEL} --delete", "MODEL: is not a setting of deploy"),
    "delete and rollback": ("azureml --name flowers --delete --rollback", "not allowed with"),
    "size": (f"azureml {MODEL} --instance-type big", "--instance-type: big is not a VM size"),
    "cluster": (f"azureml {MODEL} --batch", "launcher.compute=NAME"),
    "no workspace": (f"azureml {MODEL}", "launcher.workspace: missing"),
    "role": (f"sagemaker {MODEL} {BUCKET} --image x", "launcher.role=arn:aws:iam::<account>"),
    "bucket": (f"sagemaker {MODEL} {ROLE} --image x", "launcher.bucket=<name>"),
    "image": (f"sagemaker {MODEL} {ROLE} {BUCKET}", "endpoint/Dockerfile builds one"),
    "type": (f"{AWS} --instance-type ml.m5.larg", "did you mean ml.m5.large?"),
    "input": (f"{AWS} --batch --output s3://b/o", "--input, --output: must be in S3"),
    "output": (f"{AWS} --batch --input s3://b/i --output x", "--input, --output: must be in S3"),
    "transform": (f"{AWS} --batch --delete".replace("MODEL ", ""), "ends by itself"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("folders")
    for name in ("empty", "lr=1", "weights"):
        (root / name).mkdir()
    (root / "weights/model.json").write_text('{"kind": "weights", "classes": [], "files": {}}')
    shutil.copytree(model_folder(root / "MODEL"), root / "damaged")
    (root / "damaged/model.pt2").write_bytes(b"other")
    return root


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_anything_is_created(case: str, folders, command, monkeypatch) -> None:
    words, expected = REFUSED[case]
    monkeypatch.chdir(folders)
    output = command("deploy", *words.split())
    assert output.code == 2 and expected in output.err and "Traceback" not in output.err, output


GOOD = {"class": "red", "probability": 0.9}
ANSWERS = {
    "equal": ({"predictions": [GOOD]}, True),
    "nearly": ({"predictions": [{**GOOD, "probability": 0.9005}]}, True),
    "different": ({"predictions": [{**GOOD, "probability": 0.902}]}, False),
    "nan": ({"predictions": [{**GOOD, "probability": float("nan")}]}, False),
    "class": ({"predictions": [{**GOOD, "class": "green"}]}, False),
    "none": ({"predictions": []}, False),
    "error": ({"error": "no"}, False),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_an_answer_is_compared(case: str) -> None:
    answer, right = ANSWERS[case]
    if right:
        return check(json.dumps(answer), GOOD)
    with pytest.raises(NotDeployed):
        check(json.dumps(answer), GOOD)
