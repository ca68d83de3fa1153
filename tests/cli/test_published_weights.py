"""A run from weights by their name: fetched once, stored with the run, and never again."""

import hashlib
import json
import shutil

import timm
from safetensors.torch import save

from tests.conftest import UNCHECKED, distdl, matrix_only
from tests.publisher import COMMIT, publishing

NAME = "test_resnet.r160_in1k"
TRAIN = (
    "model=timm",
    "model.network.model_name=test_resnet",
    f"model.weights=timm:{NAME}",
    "model.head=new",
    "data.num_classes=4",
    "data.image_size=32",
    "data.batch_size=8",
    "schedule.warmup_epochs=0",
    "debug=step",
    "trainer.accelerator=cpu",
)


@matrix_only
def test_a_run_keeps_what_was_fetched(tmp_path, monkeypatch):
    weights = timm.create_model("test_resnet").state_dict()
    data = save(weights)
    digest = hashlib.sha256(data).hexdigest()
    cache = tmp_path / "hub"
    with publishing() as server:
        server.hub = True
        for revision in ("main", COMMIT):
            server.files[f"/timm/{NAME}/resolve/{revision}/model.safetensors"] = data
        for key, value in {"HF_ENDPOINT": server.url, "HF_HUB_CACHE": str(cache)}.items():
            monkeypatch.setenv(key, value)
        wrong = distdl(*TRAIN, "model.network.model_name=test_vit", cwd=tmp_path)
        assert wrong.returncode == 2
        assert "holds the weights of another network" in wrong.stderr
        first = distdl(*TRAIN, "name=tuned", cwd=tmp_path, module=UNCHECKED)
        assert first.returncode == 0, first.stdout + first.stderr
        gets = [path for method, path, _ in server.requests if method == "GET"]
        assert len([path for path in gets if path.endswith(".safetensors")]) == 1, "for both"
        files = distdl(
            *TRAIN, "launcher=kubernetes", "launcher.image=i", "launcher.store=s3://b/k",
            "launcher.files=sent", "dry_run=true", "name=away", cwd=tmp_path, module=UNCHECKED,
        )  # fmt: skip
        assert files.returncode == 0, files.stdout + files.stderr
        (sent,) = tmp_path.glob("sent/**/bundle/inputs/*")
        assert hashlib.sha256(sent.read_bytes()).hexdigest() == digest
    assert "weights and buffers are from" in first.stdout + first.stderr
    run = tmp_path / "outputs/default/tuned"
    (stored,) = (run / "inputs").iterdir()
    assert hashlib.sha256(stored.read_bytes()).hexdigest() == digest
    record = json.loads((run / "provenance.json").read_text())["inputs"]["model.weights"]
    assert record["sha256"] == digest
    assert f"weights: timm:{NAME}" in (run / "config.yaml").read_text()
    shutil.rmtree(cache)
    again = distdl("resume", str(run), "trainer.max_epochs=2", cwd=tmp_path, module=UNCHECKED)
    assert again.returncode == 0, again.stdout + again.stderr
