"""A small ImageNet from its tars to a training: kills, Blob, two ranks, a server that ends."""

from __future__ import annotations

import io
import itertools
import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from distdl.datasets.imagenet import val_labels
from tests.cluster.azurite import CONTAINER, Azurite, Places, connection
from tests.conftest import distdl, last_step, samples
from tests.miniature import encoded, photograph, stored, tar

pytestmark = [
    pytest.mark.skipif(shutil.which("azurite-blob") is None, reason="npm install -g azurite"),
    pytest.mark.xdist_group("azurite"),
]
WNIDS = sorted(set(val_labels().values()))[:24]
TRAIN, VAL = 240, 37
STEPS, EPOCHS = 10, 2  # steps of 2 x 12 images


def make_tars(folder: Path) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """ILSVRC2012's two tars with its nesting, names and oddities. Returns the images by name."""
    source = (encoded(photograph(n, 400, 333), quality=98) for n in itertools.count())
    classes: dict[str, dict[str, bytes]] = {}
    for wnid in WNIDS:
        classes[wnid] = {f"{wnid}_{n}.JPEG": next(source) for n in range(TRAIN // len(WNIDS))}
    # As n02105855_2933.JPEG and 22 others of the real ones.
    for wnid, mode, form in ((WNIDS[0], "RGB", "PNG"), (WNIDS[1], "CMYK", "JPEG")):
        with Image.open(io.BytesIO(next(source))) as image:
            classes[wnid][f"{wnid}_0.JPEG"] = encoded(image.convert(mode), form)
    numbers = [number for number, wnid in sorted(val_labels().items()) if wnid in WNIDS]
    val = {f"ILSVRC2012_val_{number:08d}.JPEG": next(source) for number in numbers[:VAL]}
    folder.mkdir()
    inner = {f"{wnid}.tar": tar(images) for wnid, images in classes.items()}
    (folder / "ILSVRC2012_img_train.tar").write_bytes(tar(inner))
    (folder / "ILSVRC2012_img_val.tar").write_bytes(tar(val))
    return {name: data for images in classes.values() for name, data in images.items()}, val


@pytest.fixture
def blobs(tmp_path: Path) -> Iterator[Azurite]:
    server = Azurite(Places(tmp_path), tmp_path / "azurite")
    yield server
    server.close()


def test_from_tars_to_two_ranks_without_a_server(
    tmp_path: Path, background: Any, blobs: Azurite
) -> None:
    train, val = make_tars(tmp_path / "tars")
    out, url = tmp_path / "out", f"azure://{CONTAINER}/imagenet"
    env = {
        "AZURE_STORAGE_CONNECTION_STRING": connection(blobs.port),
        "REQUESTS_CA_BUNDLE": str(tmp_path / "cert.pem"),
        "DISTDL_CACHE": str(tmp_path / "cache"),
    }
    prepare = ["prepare", "imagenet", "--source", str(tmp_path / "tars"), "--to", str(out)]
    prepare += ["--subset", "--shard-mb", "0.3"]

    # Killed while it uploads; tests/unit/test_prepare_interrupted.py kills it while it prepares.
    start = background(*prepare, "--upload", url, cwd=tmp_path, env=env)
    start.until(lambda: len(blobs.contents()) >= 5)
    start.kill_all()
    done = distdl(*prepare, "--upload", url, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"python -m distdl +experiment=resnet50_imagenet data.root={url}" in done.stdout

    # Nothing is lost or stored twice, and only the odd images have other bytes.
    for split, images, odd in (("train", train, WNIDS[:2]), ("val", val, [])):
        result = stored(out, split)
        assert {Path(name).stem for name in result} == {Path(name).stem for name in images}
        for name, (_, label) in result.items():
            number = Path(name).stem.rpartition("_")[2]
            wnid = name.partition("_")[0] if split == "train" else val_labels()[int(number)]
            assert WNIDS[label] == wnid
        changed = {n: d for n, (d, _) in result.items() if d != images[f"{Path(n).stem}.JPEG"]}
        assert changed.keys() == {f"{wnid}_0.jpg" for wnid in odd}
        for data in changed.values():
            with Image.open(io.BytesIO(data)) as image:
                assert (image.format, image.mode) == ("JPEG", "RGB")
    folder = f"{CONTAINER}/imagenet/"
    there = {name.removeprefix(folder): data for name, data in blobs.contents().items()}
    assert there == {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}

    checked = distdl("data", "check", url, "--gpu", "v100", cwd=tmp_path, env=env)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{url}  (shards in a store, {len(WNIDS)} classes)" in checked.stdout

    # Two ranks; the server is there for the first epoch only.
    run, log = tmp_path / "outputs" / "default" / "run", tmp_path / "azurite" / "azurite.log"
    before = len(log.read_text())
    training = background(
        *("model=resnet18", "model.norm=group", "data=imagenet", f"data.root={url}"),
        *(f"data.num_classes={len(WNIDS)}", "data.image_size=32", "data.batch_size=12"),
        *("data.num_workers=1", "data.shuffle_window=4", "schedule.warmup_epochs=0"),
        *("trainer.accelerator=cpu", "trainer.devices=2", f"trainer.max_epochs={EPOCHS}"),
        *("trainer.log_every_n_steps=1", "tracking=none", "callbacks=[default,record_samples]"),
        "name=run",
        cwd=tmp_path,
        env=env,
    )
    training.until(lambda: last_step(run) > STEPS)
    blobs.close()
    assert training.wait() == 0, training.output()
    steps = samples(run)[1]
    assert sorted(steps) == [(e, e * STEPS + s + 1) for e in range(EPOCHS) for s in range(STEPS)]
    for epoch in range(EPOCHS):
        seen = Counter(i for (e, _), ids in steps.items() if e == epoch for i in ids)
        assert seen == Counter(range(TRAIN))
    metrics = (run / "logs" / "metrics.jsonl").read_text().splitlines()
    assert sum("val/acc1" in json.loads(line)["metrics"] for line in metrics) == EPOCHS
    # Each shard was downloaded once, for both ranks together.
    requests = Counter(re.findall(r'"GET \S*?/([\w-]+\.tar)', log.read_text()[before:]))
    assert requests == Counter(path.name for path in out.glob("*.tar"))
