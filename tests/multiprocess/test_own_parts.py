"""Lightning's own callbacks and manual optimization beside ours: the losses of the plain Trainer,
also where the training was killed inside an epoch and resumed."""

import functools
import json
import os
import shutil
import signal
from types import SimpleNamespace

import pytest
import torch

from tests.conftest import UNCHECKED, distdl, python
from tests.multiprocess import own_parts

NAMES = [*own_parts.CASES, *(own_parts.MORE if os.environ.get("DISTDL_MATRIX") else ())]
COMMON = (
    *("data=table", "optimizer=none", "schedule=none", "trainer.accelerator=cpu"),
    *("trainer.max_epochs=3", "trainer.log_every_n_steps=1", "tracking=none", "experiment_name=e"),
    *("checkpoint.monitor=null", "checkpoint.every_n_steps=1"),
)
CONF = {"model/small": "Small", "model/byhand": "ByHand", "data/table": "Data"}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own_parts")
    shutil.copy(own_parts.__file__, folder / "mine.py")
    for path, target in CONF.items():
        (folder / "conf" / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / "conf" / f"{path}.yaml").write_text(f"_target_: mine.{target}\n")
    return folder


def run(project, name, kill=0, *arguments):
    """Exit code, output and losses by batch; without arguments it is the plain Trainer."""
    file = project / "losses.jsonl"
    file.write_text("")
    env = {"LOSSES": str(file), "KILL": str(kill)}
    if arguments:
        done = distdl(*arguments, cwd=project, env=env, module=UNCHECKED)
    else:
        done = python("mine.py", name, cwd=project, env=env)
    losses = dict(json.loads(line) for line in file.read_text().splitlines())
    return SimpleNamespace(code=done.returncode, output=done.stdout + done.stderr, losses=losses)


@pytest.fixture(scope="module")
def trained(project):
    """name -> by the plain Trainer, by distdl, killed with -9 inside an epoch, and resumed."""

    @functools.cache
    def of(name):
        cls, _, callbacks, overrides, kill = {**own_parts.CASES, **own_parts.MORE}[name]
        words = name.replace(" ", "_").replace(",", "")
        command = [f"model={cls.__name__.lower()}", *COMMON]
        command += [*(own_parts.node(*each) for each in callbacks), *overrides]
        if own_parts.ranks_of(name) > 1:
            command += ["trainer.devices=2", "strategy=ddp", "strategy.find_unused_parameters=true"]
        return (
            run(project, name),
            run(project, name, 0, *command, f"name={words}"),
            run(project, name, kill, *command, f"name={words}-killed"),
            run(project, name, 0, "resume", f"outputs/e/{words}-killed"),
        )

    return of


@pytest.mark.parametrize("name", NAMES)
def test_trains_as_the_plain_trainer_does_and_resumes_exactly(trained, name):
    plain, whole, killed, resumed = trained(name)
    ranks = own_parts.ranks_of(name)
    assert (plain.code, whole.code) == (0, 0), plain.output + whole.output
    # A rank's samples are others of the same global batch.
    expected = plain.losses if ranks == 1 else pytest.approx(plain.losses, rel=1e-4)
    assert len(plain.losses) >= 24 // ranks and whole.losses == expected
    assert killed.code == -signal.SIGKILL or (ranks > 1 and killed.code), killed.output
    assert resumed.code == 0, resumed.output
    first = int(next(iter(resumed.losses)))
    assert first % (12 // ranks) > 1, "it resumed inside an epoch"
    assert {**killed.losses, **resumed.losses} == whole.losses


def test_a_bar_of_lightnings_replaces_ours(trained):
    assert "samples/s  data_wait" not in trained("together")[1].output
    assert "samples/s  data_wait" in trained("swa")[1].output


def test_what_a_module_logs_as_its_losses_is_shown_with_each_rate(trained):
    shown = [line for line in trained("by hand")[1].output.splitlines() if " step " in line]
    assert "  g_loss " in shown[1] and "  d_loss " in shown[1] and "  lr 0.05/0.02  " in shown[1]
    assert "step 12  batch 12/12" in shown[11], "a step is a batch, whoever steps how often"


def test_rates_have_the_names_of_the_monitor(trained, project):
    trained("by hand")
    journal = project / "outputs/e/by_hand/logs/metrics.jsonl"
    records = [json.loads(line)["metrics"] for line in journal.read_text().splitlines()]
    last = [record for record in records if "lr" in record][-1]
    # The schedules have been stepped in each of the three epochs, in their last batch.
    assert last["lr"] == last["lr-Adam"] == 0.05 / 8
    assert last["lr-SGD"] == pytest.approx(0.02 * 0.9**3)


def test_what_swa_has_averaged_is_saved(trained, project):
    trained("swa")
    (file,) = (project / "outputs/e/swa/model_checkpoints").glob("swa_epoch_*.ckpt")
    saved = torch.load(file, weights_only=True)
    (state,) = (v for k, v in saved["callbacks"].items() if k.startswith("Stochastic"))
    average, weights = state["average_model_state"], saved["state_dict"]
    assert all(torch.equal(weights[k], v) for k, v in average.items() if "weight" in k)
