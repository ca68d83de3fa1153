"""Low-rank adapters leave a run merged with the weights beside them."""

import json
import signal

import pytest
import torch
from safetensors.torch import load_file

from distdl.models import lora
from distdl.models.weights import read_weights
from distdl.runs.checkpoints import manifest_at
from tests.conftest import UNCHECKED, distdl, matrix_only, status
from tests.serving.colours import Server
from tests.serving.conftest import DATA, RUN, SMALL, validation_images

BASE = f"{RUN}/checkpoints/last.ckpt"
ADAPTED = "outputs/default/adapted"
WORDS = (
    *DATA,
    *SMALL,
    f"model.weights={BASE}",
    "model.head=new",
    "model.lora.rank=4",
    "optimizer.lr=0.05",
    "optimizer.lr_scaling=none",
    "schedule=constant",
    "trainer.max_epochs=2",
    "checkpoint.every_n_steps=1",
    "checkpoint.keep_last=9",
    "tracking=none",
)


def run(project, *words, code=0, module=UNCHECKED):
    done = distdl(*words, cwd=project, module=module)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


KILLS = """
import os
from pathlib import Path
from lightning.pytorch import Callback


class Kills(Callback):
    def on_train_batch_start(self, trainer, module, batch, index):
        if (trainer.current_epoch, index) == (1, 1) and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), 9)
"""


@pytest.fixture(scope="module")
def adapted(project):
    """The checkpoints of a run."""
    run(project, *WORDS, "name=adapted", module=("-m", "distdl"))
    return project / ADAPTED / "checkpoints"


@matrix_only
def test_killed_and_resumed_it_ends_with_the_same_bits(project, adapted):
    (project / "kills.py").write_text(KILLS)
    killed = "outputs/default/killed"
    run(project, *WORDS, "name=killed", "+callbacks.kills._target_=kills.Kills", code=-9)
    assert [*(project / killed / "checkpoints").glob("epoch_*.ckpt")]
    run(project, "resume", killed)
    both = (project / killed / "checkpoints/last.ckpt", adapted / "last.ckpt")
    resumed, whole = (torch.load(file, weights_only=True) for file in both)
    torch.testing.assert_close(resumed["state_dict"], whole["state_dict"], rtol=0, atol=0)
    (one,), (other,) = resumed["optimizer_states"], whole["optimizer_states"]
    torch.testing.assert_close(one["state"], other["state"], rtol=0, atol=0)
    assert one["param_groups"] == other["param_groups"]
    assert resumed[lora.SAVED] == whole[lora.SAVED]


@matrix_only
def test_it_predicts_and_is_served_as_it_was_validated(project, adapted, background):
    run(project, "resume", ADAPTED, "task=predict", "task.format=jsonl")
    (file,) = (project / ADAPTED / "predictions").glob("*.jsonl")
    rows = {row["name"]: row for row in map(json.loads, file.read_text().splitlines())}
    started = background("serve", ADAPTED, "serve.port=0", cwd=project, module=UNCHECKED)
    started.until(lambda: "stop    " in started.output())
    port = int(started.output().split("serve   http://127.0.0.1:")[1].split()[0])
    server = Server(started.process, port)
    images = validation_images(project)
    assert len(rows) == len(images)
    for path in images:
        answer = server.score(path.read_bytes())[1]["predictions"][0]
        row = rows[f"{path.parent.name}/{path.name}"]
        assert answer["class"] == row["class_1"]
        assert answer["probability"] == pytest.approx(row["probability_1"], abs=1e-5)
    started.process.send_signal(signal.SIGINT)
    assert started.wait() == 0


@matrix_only
def test_they_are_merged_for_export_and_evaluation_and_a_resume_is_exact(project, adapted):
    folder = adapted
    last = folder / "last.ckpt"
    saved = torch.load(last, weights_only=True)["state_dict"]
    assert {n for n in saved if "running" not in n and "tracked" not in n} == {
        n for n in saved if ".lora_" in n or ".fc." in n
    }
    assert last.resolve().stat().st_size < (project / BASE).resolve().stat().st_size / 5
    # Killed after its first epoch, and resumed from there.
    first = folder / "epoch_000.ckpt"
    words = (*WORDS, f"checkpoint.resume_from={first}", "name=again")
    run(project, *words)
    again = torch.load(project / "outputs/default/again/checkpoints/last.ckpt", weights_only=True)
    torch.testing.assert_close(again["state_dict"], saved, rtol=0, atol=0)
    metrics = manifest_at(last)["metrics"]
    run(project, "resume", ADAPTED, "task=validate", "task.checkpoint=last")
    evaluated = status(project / ADAPTED)["metrics"]
    assert evaluated["val/loss"] == pytest.approx(metrics["val/loss"], abs=1e-5)
    for kind in ("weights", "pt2"):
        printed = run(project, "export", f"{ADAPTED}/checkpoints/last.ckpt", "--to", kind)
        assert "agrees  with the network" in printed
    (file,) = (project / ADAPTED / "exports").glob("weights-*/model.safetensors")
    merged = load_file(file)
    base = read_weights(project / BASE)
    assert merged.keys() == base.keys()
    scaled = saved["network.conv1.lora_B.default.weight"].flatten(1)
    product = scaled @ saved["network.conv1.lora_A.default.weight"].flatten(1)
    name = "conv1.weight"
    expected = base[name] + product.view_as(base[name])
    torch.testing.assert_close(merged[name], expected, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(merged[name], base[name], atol=1e-4)
    assert torch.equal(merged["bn1.running_mean"], base["bn1.running_mean"])
    run(project, *DATA, *SMALL, f"model.weights={file}", "debug=step", "name=onwards")
    refused = run(project, "convert", str(last), "--to", "weights", code=2)
    assert "holds what model.lora trains" in refused
    assert lora.KEY in refused
