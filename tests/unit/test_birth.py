"""Which GPU a rank takes, by what torch says it sees: no GPU is needed to ask that."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from omegaconf import OmegaConf

from distdl import birth, cluster, external
from distdl.environment import Environment
from distdl.errors import UserError

VISIBLE = "CUDA_VISIBLE_DEVICES"


def rank(local: int, of: int = 4) -> Environment:
    return Environment("slurm", local, of, local, of)


@pytest.fixture
def sees(monkeypatch: pytest.MonkeyPatch):
    """Lets torch see so many GPUs."""

    def see(count: int, visible: str | None = None) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        if visible is not None:
            monkeypatch.setenv(VISIBLE, visible)

    monkeypatch.delenv(VISIBLE, raising=False)
    return see


@pytest.mark.parametrize(("count", "local", "index"), [(4, 0, 0), (4, 3, 3), (8, 3, 3), (1, 3, 0)])
def test_the_only_gpu_or_that_of_its_number(sees, count, local, index) -> None:
    sees(count)
    birth.refuse_missing_device(rank(local), "gpu")
    assert cluster.device_index(rank(local)) == index


@pytest.mark.parametrize(("count", "visible"), [(0, ""), (2, "4,5"), (1, "MIG-a,MIG-b")])
def test_a_rank_without_a_gpu(sees, count, visible) -> None:
    sees(count, visible)
    with pytest.raises(UserError, match=f"torch sees . GPUs there .{VISIBLE}='{visible}'"):
        birth.refuse_missing_device(rank(2), "gpu")
    birth.refuse_missing_device(rank(2), "cpu")


def test_each_rank_takes_its_own_mig_instance(sees) -> None:
    sees(1, "MIG-a,MIG-b")  # CUDA shows the first of them only
    birth.refuse_missing_device(rank(1, 2), "gpu")
    assert os.environ[VISIBLE] == "MIG-b"


def test_lightning_takes_it_too(sees, monkeypatch: pytest.MonkeyPatch) -> None:
    """srun --gpus-per-task=1: Lightning itself refuses two devices where one is seen."""
    sees(1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    here = rank(1, 2)
    trainer = Trainer(
        accelerator=cluster.accelerator_of(here, "gpu"),
        devices=2,
        strategy=DDPStrategy(),
        plugins=[cluster.LaunchedEnvironment(here)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.strategy.set_world_ranks()
    assert trainer.strategy.root_device == torch.device("cuda", 0)
    assert (trainer.world_size, trainer.global_rank, trainer.num_devices) == (2, 1, 2)
    # Where all are seen, and on a CPU, Lightning's own is taken.
    assert cluster.accelerator_of(rank(0, 1), "gpu") == "gpu"
    assert cluster.accelerator_of(here, "cpu") == "cpu"
    sees(2)
    assert cluster.accelerator_of(here, "gpu") == "gpu"


def test_two_ranks_on_one_gpu_are_refused() -> None:
    def born(*uuids: str) -> list[dict[str, Any]]:
        return [{"rank": i, "uuid": uuid, "host": "gpu003"} for i, uuid in enumerate(uuids)]

    birth.refuse_shared(born("a", "b", "c"))
    birth.refuse_shared(born("", ""))  # CPUs
    with pytest.raises(UserError, match=r"ranks 1 and 2 have the same GPU \(b on"):
        birth.refuse_shared(born("a", "b", "b"))


def test_a_list_cannot_choose_for_ranks_that_run_already() -> None:
    """torchrun -m distdl trainer.devices=[1,2] took cards 0 and 1."""
    config = OmegaConf.create({"trainer": {"devices": [1, 2]}})
    with pytest.raises(UserError, match="export CUDA_VISIBLE_DEVICES before"):
        external.place(config, rank(0, 2), config.trainer.devices)
