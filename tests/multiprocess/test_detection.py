"""A detector is killed with -9 in the middle of its second epoch, and resumes with the same images,
at the same number of ranks with the same weights (`make matrix`); an evaluation that takes longer
than the watchdog's limit."""

import shutil

import pytest
import torch

from distdl.runs.checkpoints import CheckpointStore
from tests.conftest import UNCHECKED, Background, distdl, matrix_only, samples, status
from tests.drawn_coco import draw
from tests.miniature import prepare

IMAGES, GLOBAL, STEPS, EPOCHS = 26, 4, 6, 2  # two images of an epoch fill no batch
TINY = (
    "model=detector",
    "model.network.name=fasterrcnn_mobilenet_v3_large_320_fpn",
    "model.network.min_size=64",
    "model.network.max_size=96",
    "data=coco",
    "data.num_classes=5",
    "data.masks=false",
    "data.augment={horizontal_flip: 0.5, multiscale: {short_sides: [56, 64, 72]}, photometric: {}}",
    "data.num_workers=1",
    "schedule.warmup_epochs=0",
    "trainer.accelerator=cpu",
    "trainer.log_every_n_steps=1",
    f"trainer.max_epochs={EPOCHS}",
    "trainer.limit_val_batches=0",
    "checkpoint.monitor=null",
    "checkpoint.every_n_steps=2",
    "tracking=none",
    "callbacks=[default,record_samples]",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    draw(folder / "coco", train=IMAGES, val=3)
    prepare("coco", folder / "coco", folder / "out", "--workers", "1", "--shard-mb", "0.02")
    return f"data.root={folder / 'out'}"


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """A run of two ranks that nobody has killed."""
    folder = tmp_path_factory.mktemp("whole")
    options = (data, "data.batch_size=2", "trainer.devices=2", "name=r")
    done = distdl(*TINY, *options, cwd=folder, module=UNCHECKED)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "outputs/default/r"


@pytest.fixture(scope="module")
def killed_run(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed")
    run = folder / "outputs/default/r"
    options = (data, "data.batch_size=2", "trainer.devices=2", "name=r")
    job = Background(*TINY, *options, cwd=folder, module=UNCHECKED)
    job.until(lambda: len(samples(run).get(1, ())) >= STEPS + 3, timeout=500)
    job.kill_all()
    return run


def images(rows):
    """The images of each step, whatever rank took them."""
    return {step: sorted(ids) for (_, step), ids in sorted(rows.items())}


@matrix_only
@pytest.mark.parametrize("ranks", [2, 1])
def test_each_image_once_and_the_same_batches(ranks, whole, killed_run, tmp_path):
    run = shutil.copytree(killed_run, tmp_path / "outputs/default/r")
    newest = CheckpointStore(run / "checkpoints").newest()
    done = distdl("resume", str(run), f"trainer.devices={ranks}", cwd=tmp_path, module=UNCHECKED)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = samples(run)[1], samples(run)[2]
    begin = min(step for _, step in second)
    assert begin > STEPS, (begin, newest)
    rows = {key: ids for key, ids in first.items() if key[1] < begin} | second
    assert images(rows) == images(samples(whole)[1])
    for epoch in range(EPOCHS):
        ids = [i for (e, _), row in rows.items() if e == epoch for i in row]
        assert len(ids) == len({*ids}) == STEPS * GLOBAL
    if ranks == 2:
        weights = [
            torch.load(CheckpointStore(r / "checkpoints").newest(), weights_only=False)
            for r in (run, whole)
        ]
        one, other = (each["state_dict"] for each in weights)
        assert one.keys() == other.keys()
        assert all(torch.equal(value, other[key]) for key, value in one.items())


LIMIT_S, EVALUATION_S = 3, 9
SLOW = f'''"""A network of one weight, and COCO's evaluation on a very large set."""

import time

import torch
from faster_coco_eval import COCOeval_faster

evaluate = COCOeval_faster.evaluate


def slow(self):
    time.sleep({EVALUATION_S})
    evaluate(self)


COCOeval_faster.evaluate = slow


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, images, targets=None):
        if targets is not None:
            return {{"loss": self.weight**2}}
        found = {{
            "boxes": torch.tensor([[1.0, 1.0, 9.0, 9.0]]),
            "labels": torch.tensor([1]),
            "scores": torch.tensor([0.5]),
        }}
        return [found for _ in images]
'''


@matrix_only
def test_nobody_is_called_hung_while_the_first_rank_evaluates(tmp_path):
    draw(tmp_path / "coco", train=8, val=4)
    (tmp_path / "mine.py").write_text(SLOW)
    (tmp_path / "conf/model").mkdir(parents=True)
    (tmp_path / "conf/model/mine.yaml").write_text(
        "_target_: distdl.models.Detector\nnetwork: {_target_: mine.Net}\nnum_classes: 5\n"
    )
    done = distdl(
        "model=mine",
        "data=coco",
        "data.root=coco",
        "data.num_classes=5",
        "data.num_workers=0",
        "schedule.warmup_epochs=0",
        "trainer.accelerator=cpu",
        "trainer.devices=2",
        "trainer.max_epochs=1",
        f"watchdog.timeout={LIMIT_S}",
        "tracking=none",
        "name=r",
        cwd=tmp_path,
        module=UNCHECKED,
    )
    run = tmp_path / "outputs/default/r"
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (run / "attempts/001/incident.json").exists()
    record = status(run)
    assert record["metrics"]["val/samples"] == 4
    assert record["ended"] - record["started"] > EVALUATION_S
