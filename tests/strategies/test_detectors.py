"""Mask R-CNN under the strategies: it trains, validates and resumes, also in bf16-mixed, where the
network itself says what stays float32 (small_detector)."""

import math

import pytest

from tests import drawn_coco
from tests.conftest import matrix_only
from tests.strategies import matrix
from tests.strategies.matrix import step
from tests.strategies.ranks import Case, shared

# The files of this folder share the ranks.
pytestmark = pytest.mark.xdist_group("strategies")

STEPS, HALF, VAL = 4, 2, 5
SMALL = (
    "+experiment=maskrcnn_coco",
    "debug=cpu",
    "data.num_classes=5",
    "data.batch_size=2",
    "data.image_size=null",
    "model.network._target_=tests.strategies.small_detector.Small",
    "model.network.min_size=48",
    "model.network.max_size=64",
    "+model.network.box_score_thresh=0.0",
    "+model.network.box_detections_per_img=8",
    "trainer.max_epochs=1",
    "trainer.limit_train_batches=null",
    "trainer.limit_val_batches=null",
    "+trainer.enable_model_summary=false",
    f"checkpoint.every_n_steps={HALF}",
    "tracking=none",
)
STRATEGIES = {
    "ddp": (),
    "fsdp": ("strategy.min_parameters=500",),
    "deepspeed_zero2": (),
    "deepspeed_zero3": (),
    "local_sgd": ("strategy.sync_every=2",),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Batches of four, two a rank."""
    folder = tmp_path_factory.mktemp("coco")
    return f"data.root={drawn_coco.draw(folder, train=4 * STEPS, val=VAL, seed=2)}"


def train(folder, *words, **options):
    return shared(2).train(Case([*SMALL, *words], folder, **options), timeout=300)


@matrix_only
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_trains_validates_and_resumes(name, precision, root, tmp_path):
    words = (root, f"strategy={name}", *STRATEGIES[name], f"trainer.precision={precision}")
    whole = train(tmp_path / "whole", *words)
    assert len(whole.losses) == STEPS
    assert all(map(math.isfinite, whole.losses))
    assert whole.metrics["val/samples"] == VAL
    assert 0 <= whole.metrics["val/mask_ap"] <= whole.metrics["val/box_ar100"] <= 1
    checkpoints = tmp_path / "whole/checkpoints"
    rest = train(tmp_path / "rest", *words, resume=step(checkpoints, HALF))
    assert rest.losses == whole.losses[HALF:]
    for name in ("val/box_ap", "val/mask_ap", "val/samples", "train/loss"):
        assert rest.metrics[name] == whole.metrics[name]
    files = (checkpoints / "last.ckpt", tmp_path / "rest/checkpoints/last.ckpt")
    weights = [matrix.read(file)["state_dict"] for file in files]
    assert matrix.apart(*weights) == 0
