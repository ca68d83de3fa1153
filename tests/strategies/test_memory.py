"""What `distdl plan` says of the memory of a step, against a real step of two ranks."""

import pytest

from distdl.config import compose
from distdl.strategies.pipeline.balance import partition
from distdl.strategies.pipeline.splitting import blocks_in
from distdl.tools.measure.estimate import GIB, Machine
from distdl.tools.measure.mesh import rows_of
from distdl.tools.measure.step_profile import measure
from distdl.worker.build import make_module
from tests.conftest import matrix_only
from tests.strategies import matrix
from tests.strategies.ranks import Case, shared

# The files of this folder share the ranks.
pytestmark = pytest.mark.xdist_group("strategies")

BATCH = 16
COMMON = (
    "trainer.accelerator=cpu",
    "trainer.max_epochs=1",
    "trainer.max_steps=4",
    "trainer.limit_val_batches=0",
    "+trainer.enable_model_summary=false",
    "tracking=none",
    "callbacks=[]",
    "data=synthetic",
    "data.image_size=96",
    "data.num_classes=10",
    "data.num_workers=0",
    "data.train_samples=256",
    "data.val_samples=8",
    f"data.batch_size={BATCH}",
    "schedule.warmup_epochs=0",
    "checkpoint.monitor=null",
)
VIT = "image_size: 96, patch_size: 16, num_layers: 6, num_heads: 6, hidden_dim: 384, mlp_dim: 1536"
NETWORKS = {
    "resnet50": "",
    "resnet18": "",
    "mobilenet_v3_large": "",
    "efficientnet_b0": "",
    "convnext_tiny": "",
    "VisionTransformer": VIT,
}
STRATEGIES = ("single", "ddp", "fsdp", "pipeline")
RECOMPUTE = ("none", "blocks")


def words_of(network, strategy, recompute):
    node = f"_target_: torchvision.models.{network}, num_classes: 10, {NETWORKS[network]}"
    words = [*COMMON, "model=classifier", f"model.network={{{node.removesuffix(', ')}}}"]
    return [*words, f"+model.recompute={recompute}", f"strategy={strategy}"]


def planned(network, recompute):
    """The rows of `plan` for two devices, and the block at which its pipeline is divided."""
    config = compose.compose(words_of(network, "ddp", recompute))
    config.pop("hydra", None)
    step = measure(config, 2 * BATCH)
    rows = rows_of(config, step, Machine(2, GIB, 1e11, 1e13))
    assert step.notes == []
    if rows["pipeline"].missing:
        return rows, []
    names = [block.name for block in blocks_in(make_module(config.model))]
    at = partition([block.flops or 1.0 for block in step.blocks], 2)[1]
    # The batch of a pipeline is that of both devices.
    return rows, [f"strategy.balance=[{names[at]}]", f"data.batch_size={2 * BATCH}"]


def seen(folder, network, strategy, recompute, more=()):
    """Bytes on the fullest of the ranks."""
    call = "tests.strategies.memory:measured"
    words = [*words_of(network, strategy, recompute), *more]
    folder = folder / f"{network}-{strategy}-{recompute}"
    each = shared(1 if strategy == "single" else 2).train(Case(words, folder, call=call)).ranks
    return max(rank["total"] for rank in each)


@matrix_only
@pytest.mark.parametrize("network", NETWORKS)
def test_the_peak_of_a_step_is_what_plan_says(network, tmp_path, capsys):
    rows = []
    apart = {}
    for recompute in RECOMPUTE:
        plan, divided = planned(network, recompute)
        for strategy in STRATEGIES:
            if plan[strategy].missing:
                rows.append(f"{network:20} {strategy:9} {recompute:7} -: {plan[strategy].missing}")
                continue
            more = divided if strategy == "pipeline" else ()
            peak = seen(tmp_path, network, strategy, recompute, more)
            error = plan[strategy].total / peak - 1
            apart[strategy, recompute] = error
            numbers = f"{peak / 2**20:9.1f} {plan[strategy].total / 2**20:9.1f} MiB {error:+7.1%}"
            rows.append(f"{network:20} {strategy:9} {recompute:7} {numbers}")
    with capsys.disabled():
        print("", *rows, sep="\n")
    assert {case: error for case, error in apart.items() if abs(error) > 0.05} == {}


@matrix_only
def test_the_peak_on_a_mesh_is_what_plan_says(tmp_path):
    """Of two groups of two ranks; the small network has a wide layer."""
    words = [*COMMON, *matrix.mesh(2, 2, *matrix.batch(32)).overrides]
    words = [each for each in words if not each.startswith("trainer.accumulate")]
    words = ["model=resnet18", *words, "data.image_size=32"]
    config = compose.compose(words)
    config.pop("hydra", None)
    step = measure(config, 64)
    row = rows_of(config, step, Machine(4, GIB, 1e11, 1e13))["model_parallel"]
    call = "tests.strategies.memory:measured"
    each = shared(4).train(Case(words, tmp_path / "mesh", call=call)).ranks
    assert step.notes == []
    assert row.total == pytest.approx(max(rank["total"] for rank in each), rel=0.05)
