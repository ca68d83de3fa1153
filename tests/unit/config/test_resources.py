"""The size of a run: how many ranks, and on what, decided without torch before anything is
submitted; and the global batch, which stays what it was when the number of ranks changes."""

from __future__ import annotations

import os

import pytest
from omegaconf import OmegaConf

from distdl.config import batches, resources
from distdl.config.schema import Size
from distdl.job import JobSpec, Resources
from distdl.launchers.local import LocalLauncher
from distdl.util.errors import UserError
from tests.written import program

VISIBLE = "CUDA_VISIBLE_DEVICES"


@pytest.fixture
def gpus(tmp_path, monkeypatch):
    """Lets this machine show so many GPUs, by an nvidia-smi of our own."""

    def show(count, visible=None, migs=0):
        migs = 2 if visible and "MIG" in visible else migs
        lines = [f"GPU {n}: NVIDIA H100 (UUID: GPU-{n})\n" for n in range(count)]
        lines += [f"  MIG 1g.10gb Device {n}: (UUID: MIG-{count - 1}{n})\n" for n in range(migs)]
        (tmp_path / "listed").write_text("".join(lines))
        program(tmp_path / "nvidia-smi", f'[ "$1" = -L ] && cat {tmp_path}/listed')
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin:/usr/bin")
        if visible is not None:
            monkeypatch.setenv(VISIBLE, visible)

    monkeypatch.delenv(VISIBLE, raising=False)
    monkeypatch.setattr("platform.system", lambda: "Linux")
    show(0)
    return show


def resolved(local=True, **trainer):
    return resources.resolve(Size.of(trainer), local=local)


SHOWN = {
    None: "0 1 2 3",
    "": "",
    "NoDevFiles": "",  # what Slurm writes for a job without GPUs
    "0, 2": "0 2",
    "0,-1,1": "0",
    "0,9,1": "0",
    "1,GPU-2": "1",
    "GPU-3,GPU-1,2": "GPU-3 GPU-1",
    "MIG-31,MIG-30": "MIG-31 MIG-30",
}


@pytest.mark.parametrize(("visible", "names"), SHOWN.items())
def test_visible(gpus, visible, names):
    """CUDA's own meaning of its variable."""
    gpus(4, visible)
    assert resources.visible() == names.split()
    if visible is None:  # of several MIG instances CUDA shows one
        gpus(2, migs=3)
        assert resources.visible() == ["MIG-10"]


@pytest.mark.parametrize("visible", ["1,1", "9", "GPU-7a", "MIG-0"])
def test_a_list_of_which_cuda_shows_nothing(gpus, visible):
    """It was written to choose GPUs: not a night on the CPU."""
    gpus(2, visible)
    with pytest.raises(UserError, match="CUDA shows none"):
        resolved()
    assert resolved(accelerator="cpu") == Resources(1, 1, "cpu")


CHOSEN = [
    ("4,5,6,7", [1, 2], ("5", "6")),
    ("4,5,6,7", 2, None),
    ("GPU-6,GPU-4", [1, 0], ("GPU-4", "GPU-6")),
]


@pytest.mark.parametrize(("visible", "devices", "cards"), CHOSEN)
def test_ids_are_indices_into_what_is_visible(gpus, visible, devices, cards):
    gpus(8, visible)
    size = resolved(devices=devices)
    assert size.device_ids == cards
    # And that is what the ranks get to see, here and in the record of the attempt.
    started = LocalLauncher().request(JobSpec("a/b", "/run", "/run", 1, size)).env
    assert started.get(VISIBLE) == (cards and ",".join(cards))


FAR = {"local": False, "devices": 8}  # on a cluster `auto` must be a GPU or an error there
SIZES = [
    (0, {}, (1, 1, "cpu")),
    (4, {}, (1, 4, "gpu")),
    (4, {"devices": -1}, (1, 4, "gpu")),
    (4, {"devices": [0, 3]}, (1, 2, "gpu", ("0", "3"))),
    (4, {"accelerator": "cuda", "devices": 1}, (1, 1, "gpu")),
    (4, {"accelerator": "cpu", "devices": 2}, (1, 2, "cpu")),
    (0, {**FAR, "num_nodes": 2}, (2, 8, "gpu")),
    (4, {**FAR, "accelerator": "cpu"}, (1, 8, "cpu")),
    # Refused: the path, and a part of what is read.
    (0, {"accelerator": "gpu"}, ("trainer.accelerator", "debug=cpu")),
    (2, {"devices": 4}, ("trainer.devices", "trainer.devices=2")),
    (2, {"devices": [0, 2]}, ("trainer.devices", "trainer.devices=2")),
    (2, {"devices": [1, 1]}, ("trainer.devices", "write trainer.devices=[1]")),
    (2, {"accelerator": "cpu", "devices": [0, 1]}, ("trainer.devices", "trainer.devices=2")),
    (2, {"num_nodes": 2}, ("trainer.num_nodes", "trainer.num_nodes=1")),
    (4, {**FAR, "devices": "auto"}, ("trainer.devices", "counted from here")),
]


@pytest.mark.parametrize(("count", "trainer", "expected"), SIZES)
def test_what_a_run_gets_and_what_is_refused(gpus, count, trainer, expected):
    gpus(count)
    if isinstance(expected[0], int):
        assert resolved(**trainer) == Resources(*expected)
        return
    with pytest.raises(UserError) as error:
        resolved(**trainer)
    (problem,) = error.value.problems
    assert problem.path == expected[0]
    assert expected[1] in f"{problem.what} {problem.remedy}"


def test_on_a_mac_and_without_a_driver(gpus, tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert resources.visible_gpus() == 0
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    assert resolved() == Resources(1, 1, "mps")


# ----------------------------------------------------------------------- the global batch


def config(batch_size=32, accumulate=1, target="distdl.data.ImageData", **more):
    data = {"batch_size": batch_size, "_target_": target}
    trainer = {"accumulate_grad_batches": accumulate}
    return OmegaConf.create({"data": data, "trainer": trainer, **more})


PARALLEL = {"_target_": "lightning.pytorch.strategies.ModelParallelStrategy"}
GROUPS = "64 x 2 tensor-parallel groups = 128 per step"
PRODUCTS = [
    (config(32, 2), (2, 4), 512, "32 x 8 devices x 2 accumulated = 512 per step"),
    (OmegaConf.create({"trainer": {}}), (1, 1), None, "shown when training starts"),
    # The stages of a pipeline share a batch.
    (config(64, strategy={"stages": 2}), (1, 4), 128, "64 x 2 pipelines = 128 per step"),
    # So do the ranks of a tensor-parallel group. The default of Lightning's strategy is a node.
    (config(64, strategy=PARALLEL | {"tensor_parallel_size": 2}), (1, 4), 128, GROUPS),
    (config(64, strategy=PARALLEL | {"data_parallel_size": 2}), (1, 4), 128, GROUPS),
    (config(64, strategy=PARALLEL), (2, 4), 128, GROUPS),
    # Another data module need not give its loaders what the config says.
    (config(16, target="mine.Data"), (1, 2), 32, "= 32 per step (by data.batch_size)"),
]


@pytest.mark.parametrize(("config", "size", "product", "text"), PRODUCTS)
def test_the_product(config, size, product, text):
    assert batches.global_batch_size(config, Resources(*size)) == product
    assert text in batches.describe(config, Resources(*size))


def test_another_number_of_ranks():
    """tests/cli/test_which_run.py resumes with more and with too many."""

    def kept(accumulate, typed=()):
        return batches.keep_global_batch(config(128, accumulate), Resources(1, 2), 256, typed)

    assert kept(4).changes == {"data.batch_size": 32}
    assert kept(4, ["trainer.accumulate_grad_batches"]).changes == {}
    with pytest.raises(UserError, match="not divisible by 2 devices x 3 accumulated"):
        kept(3)


@pytest.mark.parametrize("declared", [None, 16])
def test_where_the_loaders_gave_something_else_nothing_is_changed(declared):
    """Under another name, or divided by the data module itself."""
    status = {"loaders": {"batch_size": 8, "declared": declared, "shares": 2}}
    loaders = batches.recorded([{}, {"loaders": "nonsense"}, status])
    before = declared and 2 * declared
    kept = batches.keep_global_batch(config(declared), Resources(), before, (), loaders)
    assert kept.changes == {}
    assert "the loaders gave 8 x 2:" in kept.notes[0]
    same = batches.keep_global_batch(config(declared), Resources(1, 2), before, (), loaders)
    assert same == batches.Kept()
