"""Low-rank adapters leave a run merged with the weights beside them."""

import pytest
import torch
from safetensors.torch import load_file

from distdl.models import lora
from distdl.models.weights import read_weights
from distdl.runs.checkpoints import manifest_at
from tests.conftest import UNCHECKED, distdl, matrix_only, status
from tests.serving.conftest import DATA, RUN, SMALL

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


@matrix_only
def test_they_are_merged_for_export_and_evaluation_and_a_resume_is_exact(project):
    run(project, *WORDS, "name=adapted", module=("-m", "distdl"))
    folder = project / ADAPTED / "checkpoints"
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
