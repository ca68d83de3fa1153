"""The memory of a module that divides itself over a mesh, against numbers by hand."""

import pytest

from distdl.config import compose
from distdl.tools.measure.estimate import GIB, Machine
from distdl.tools.measure.mesh import of_mesh, rows_of
from distdl.tools.measure.step_profile import measure
from distdl.util.errors import UserError
from tests.conftest import RESNET18

MESHED = (
    "model._target_=tests.strategies.small.Meshed",
    "model.network._target_=tests.strategies.small.Wide",
    "optimizer=adamw",
)
MACHINE = Machine(4, GIB, 1e11, 1e13)
GROUPS = ("strategy=model_parallel", "strategy.tensor_parallel_size=2")
# Of the small network: what is divided over both axes, and what over the groups alone.
WIDE, LAST = 32 * 4096 + 4096, 10 * 4096
OTHERS = 3 * 8 * 9 + 2 * 8 + 4 * (8 * 8 * 9 + 8) + 10


def of(*overrides):
    config = compose.compose([*RESNET18, *MESHED, *overrides])
    config.pop("hydra")
    return config, measure(config, 32)


def test_weights_gradients_and_optimizer_are_divided_as_the_module_divides_them():
    config, measured = of(*GROUPS)
    row = rows_of(config, measured, MACHINE)["model_parallel"]
    part = (WIDE + LAST) // 4 + OTHERS // 2
    assert measured.gradients == 4 * (WIDE + LAST + OTHERS)
    assert row.gradients == 4 * part
    assert row.weights == 4 * part + measured.buffers
    assert row.optimizer == 2 * 4 * part
    assert measured.notes == [], "the step was rehearsed"
    parts = row.weights + row.gradients + row.optimizer
    whole = parts + measured.activations + measured.transient
    assert parts + 4 * WIDE // 2 < row.total < whole + 3 * 4 * (WIDE + LAST) // 2


def test_without_a_mesh_in_the_config_all_devices_are_one_group():
    row = of_mesh(*of("strategy=ddp"), MACHINE)
    assert row.gradients == 4 * ((WIDE + LAST) // 4 + OTHERS)
    assert row.sent == 0


def test_no_row_for_a_module_that_does_not_divide_itself():
    own = "model._target_=distdl.models.ImageClassifier"
    config, measured = of(own)
    assert of_mesh(config, measured, MACHINE) is None
    config, measured = of(own, *GROUPS)
    with pytest.raises(UserError, match="does not run without devices"):
        rows_of(config, measured, MACHINE)
