"""Lightning's own callbacks and manual optimization beside ours: the losses of the plain Trainer,
also where the training was killed inside an epoch and gone on with."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import python
from tests.multiprocess import own_parts

NAMES = [*own_parts.CASES, *(own_parts.MORE if os.environ.get("DISTDL_MATRIX") else ())]


def ranks(name: str) -> int:
    return 2 if name.endswith("two ranks") else 1


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own_parts")
    shutil.copy(own_parts.__file__, folder / "mine.py")
    for path, target in {
        "model/small": "Small",
        "model/byhand": "ByHand",
        "data/table": "Data",
    }.items():
        (folder / "conf" / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / "conf" / f"{path}.yaml").write_text(f"_target_: mine.{target}\n")
    return folder


@pytest.fixture(scope="module")
def trained(project: Path) -> dict[str, Any]:
    done = python("mine.py", *NAMES, cwd=project, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", NAMES)
def test_it_trains_as_the_plain_trainer_does(trained: dict[str, Any], name: str) -> None:
    found = trained[name]
    assert found["codes"][:2] == [0, 0], found["output"]
    assert len(found["plain"]) >= 24 // ranks(name)
    if ranks(name) == 1:
        assert found["whole"] == found["plain"]
    else:  # a rank's samples are others of the same global batch
        assert found["whole"].keys() == found["plain"].keys()
        for number, losses in found["whole"].items():
            assert losses == pytest.approx(found["plain"][number], rel=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_killed_inside_an_epoch_it_goes_on_exactly(trained: dict[str, Any], name: str) -> None:
    found = trained[name]
    assert found["codes"][2:] == [-9, 0], found["killed"]
    assert int(found["first"]) % (12 // ranks(name)) > 1, "it went on inside an epoch"
    assert found["resumed"] == found["whole"]


def test_a_bar_of_lightnings_takes_the_place_of_ours(trained: dict[str, Any]) -> None:
    assert "samples/s  data_wait" not in trained["together"]["output"]
    assert "samples/s  data_wait" in trained["swa"]["output"]


def test_what_a_module_logs_as_its_losses_is_shown_with_each_rate(trained: dict[str, Any]) -> None:
    shown = [line for line in trained["by hand"]["output"].splitlines() if " step " in line]
    assert "  g_loss " in shown[1] and "  d_loss " in shown[1] and "  lr 0.05/0.02  " in shown[1]
    assert "step 12  batch 12/12" in shown[11], "a step is a batch, whoever steps how often"


def test_rates_have_the_names_of_the_monitor(trained: dict[str, Any], project: Path) -> None:
    journal = project / "outputs" / "e" / "by_hand" / "logs" / "metrics.jsonl"
    records = [json.loads(line)["metrics"] for line in journal.read_text().splitlines()]
    last = [record for record in records if "lr" in record][-1]
    # The schedules have been stepped in each of the three epochs, in their last batch.
    assert last["lr"] == last["lr-Adam"] == 0.05 / 8
    assert last["lr-SGD"] == pytest.approx(0.02 * 0.9**3)


def test_what_swa_has_averaged_is_saved(trained: dict[str, Any], project: Path) -> None:
    import torch

    folder = project / "outputs" / "e" / "swa" / "model_checkpoints"
    (file,) = folder.glob("swa_epoch_*.ckpt")
    saved = torch.load(file, weights_only=True)
    (state,) = (v for k, v in saved["callbacks"].items() if k.startswith("Stochastic"))
    average = state["average_model_state"]
    same = [torch.equal(saved["state_dict"][k], v) for k, v in average.items() if "weight" in k]
    assert all(same)
