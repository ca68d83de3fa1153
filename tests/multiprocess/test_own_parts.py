"""Lightning's own callbacks and manual optimization beside ours: the losses of the plain Trainer,
also where the training was killed inside an epoch and resumed."""

import json
import os
import shutil

import pytest
import torch

from tests.conftest import python
from tests.multiprocess import own_parts

NAMES = [*own_parts.CASES, *(own_parts.MORE if os.environ.get("DISTDL_MATRIX") else ())]
CONF = {"model/small": "Small", "model/byhand": "ByHand", "data/table": "Data"}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own_parts")
    shutil.copy(own_parts.__file__, folder / "mine.py")
    for path, target in CONF.items():
        (folder / "conf" / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / "conf" / f"{path}.yaml").write_text(f"_target_: mine.{target}\n")
    return folder


@pytest.fixture(scope="module")
def trained(project):
    done = python("mine.py", *NAMES, cwd=project, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", NAMES)
def test_it_trains_as_the_plain_trainer_does(trained, name):
    case, ranks = trained[name], own_parts.ranks_of(name)
    assert case["codes"][:2] == [0, 0], case["output"]
    # A rank's samples are others of the same global batch.
    expected = case["plain"] if ranks == 1 else pytest.approx(case["plain"], rel=1e-4)
    assert len(case["plain"]) >= 24 // ranks and case["whole"] == expected


@pytest.mark.parametrize("name", NAMES)
def test_killed_inside_an_epoch_it_resumes_exactly(trained, name):
    case = trained[name]
    assert case["codes"][2:] == [-9, 0], case["killed"]
    assert int(case["first"]) % (12 // own_parts.ranks_of(name)) > 1, "it resumed inside an epoch"
    assert case["resumed"] == case["whole"]


def test_a_bar_of_lightnings_replaces_ours(trained):
    assert "samples/s  data_wait" not in trained["together"]["output"]
    assert "samples/s  data_wait" in trained["swa"]["output"]


def test_what_a_module_logs_as_its_losses_is_shown_with_each_rate(trained):
    shown = [line for line in trained["by hand"]["output"].splitlines() if " step " in line]
    assert "  g_loss " in shown[1] and "  d_loss " in shown[1] and "  lr 0.05/0.02  " in shown[1]
    assert "step 12  batch 12/12" in shown[11], "a step is a batch, whoever steps how often"


def test_rates_have_the_names_of_the_monitor(trained, project):
    journal = project / "outputs/e/by_hand/logs/metrics.jsonl"
    records = [json.loads(line)["metrics"] for line in journal.read_text().splitlines()]
    last = [record for record in records if "lr" in record][-1]
    # The schedules have been stepped in each of the three epochs, in their last batch.
    assert last["lr"] == last["lr-Adam"] == 0.05 / 8
    assert last["lr-SGD"] == pytest.approx(0.02 * 0.9**3)


def test_what_swa_has_averaged_is_saved(trained, project):
    (file,) = (project / "outputs/e/swa/model_checkpoints").glob("swa_epoch_*.ckpt")
    saved = torch.load(file, weights_only=True)
    (state,) = (v for k, v in saved["callbacks"].items() if k.startswith("Stochastic"))
    average, weights = state["average_model_state"], saved["state_dict"]
    assert all(torch.equal(weights[k], v) for k, v in average.items() if "weight" in k)
