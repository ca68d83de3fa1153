"""Which GPU a rank takes, by what torch sees, how it is passed on, how the rank leaves."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from omegaconf import OmegaConf
from torch import nn

from distdl.distributed import process_group, rank_table
from distdl.job import JobState, Resources
from distdl.launch import external
from distdl.ranks.environment import Environment
from distdl.ranks.stopping import Stopped, StopRequest
from distdl.strategies import DDPStrategy, ddp
from distdl.util.errors import UserError
from distdl.worker import allocator, main
from distdl.worker.rank_context import RankContext

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
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    return see


@pytest.mark.parametrize(
    ("count", "visible", "local", "index"),
    [
        (4, None, 3, 3),
        (8, None, 3, 3),
        (1, None, 3, 0),
        # None is left for the third rank.
        (0, "", 2, None),
        (2, "4,5", 2, None),
        (1, "MIG-a,MIG-b", 2, None),
        (1, "MIG-a,MIG-b", 1, 0),  # CUDA shows the first of them only
    ],
)
def test_the_only_gpu_or_that_of_its_number(sees, count, visible, local, index) -> None:
    sees(count, visible)
    rank_table.refuse_missing_device(rank(local), "cpu")
    if index is None:
        with pytest.raises(UserError, match=f"torch sees . GPUs there .{VISIBLE}='{visible}'"):
            rank_table.refuse_missing_device(rank(local), "gpu")
        return
    rank_table.refuse_missing_device(rank(local), "gpu")
    assert process_group.device_index(rank(local)) == index
    assert os.environ.get(VISIBLE) == (visible and "MIG-b")


def test_a_driver_that_is_too_old_and_a_torch_without_cuda(sees, monkeypatch) -> None:
    """NVML counts GPUs all the same, so that torch fails later, in the middle of the start."""

    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11).\nAnd")

    sees(1)
    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(UserError, match=r": torch .* \(CUDA .*found version 11\)\.\n.*update"):
        rank_table.refuse_missing_device(rank(0, 1), "gpu")
    sees(0)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(UserError, match="this torch is built for CPUs"):
        rank_table.refuse_missing_device(rank(0, 1), "gpu")


@pytest.mark.parametrize(
    ("major", "precision", "count"),
    [(7, "bf16-mixed", 1), (7, "16-mixed", 0), (7, None, 0), (8, "bf16-mixed", 0)],
)
def test_without_bf16_the_way_out_is_named(monkeypatch, caplog, major, precision, count) -> None:
    device = {
        "is_available": True,
        "current_device": 0,
        "get_device_name": "Tesla T4",
        "get_device_properties": SimpleNamespace(major=major),
    }
    for name, value in device.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    rank_table.warn_without_bf16("gpu", precision)
    rank_table.warn_without_bf16("cpu", "bf16-mixed")
    assert caplog.text.count("trainer.precision=16-mixed") == count == len(caplog.records)


def test_lightning_takes_it_too(sees, monkeypatch: pytest.MonkeyPatch) -> None:
    """srun --gpus-per-task=1: Lightning itself refuses two devices where one is seen."""
    sees(1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    environment = rank(1, 2)
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = Trainer(
        accelerator=process_group.accelerator_of(environment, "gpu"),
        devices=2,
        strategy=DDPStrategy(),
        plugins=[process_group.LaunchedEnvironment(environment)],
        **dict.fromkeys(off, False),
    )
    trainer.strategy.set_world_ranks()
    assert trainer.strategy.root_device == torch.device("cuda", 0)
    assert (trainer.world_size, trainer.global_rank, trainer.num_devices) == (2, 1, 2)
    # Where all are seen, and on a CPU, Lightning's own is taken.
    assert process_group.accelerator_of(rank(0, 1), "gpu") == "gpu"
    assert process_group.accelerator_of(environment, "cpu") == "cpu"
    sees(2)
    assert process_group.accelerator_of(environment, "gpu") == "gpu"


def test_the_group_is_bound_to_the_ranks_gpu(sees, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "NCCL error in: ...\nLast error:\nDuplicate GPU detected : rank 1 and rank 0 on 4000"
    calls: list[Any] = []

    def init(backend: str, device_id: Any = None, **kwargs: Any) -> None:
        calls.append((backend, device_id))
        if device_id and device_id.index == 0:
            raise dist.DistBackendError(text)

    monkeypatch.setattr(dist, "init_process_group", init)
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    sees(2)
    own = torch.device("cuda", 1)
    process_group.connect(rank(1, 2), "gpu")
    process_group.connect(rank(1, 2), "cpu")
    assert calls == [own, ("cpu:gloo,cuda:nccl", own), ("gloo", None)]
    with pytest.raises(UserError, match="has the same GPU as another rank: Duplicate GPU detected"):
        process_group.connect(rank(0, 2), "gpu")


def test_a_list_cannot_choose_for_ranks_that_run_already() -> None:
    """torchrun -m distdl trainer.devices=[1,2] took cards 0 and 1."""
    config = OmegaConf.create({"trainer": {"devices": [1, 2]}})
    with pytest.raises(UserError, match="export CUDA_VISIBLE_DEVICES before"):
        external.adopt_ranks(config, rank(0, 2), config.trainer.devices)


def test_ddp_is_built_on_the_stream_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning builds it on another one, where its gradients would be accumulated."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: pytest.fail("on a stream of its own"))
    monkeypatch.setattr(ddp, "DistributedDataParallel", lambda module, **options: options)
    strategy = DDPStrategy(gradient_as_bucket_view=True)
    monkeypatch.setattr(strategy, "determine_ddp_device_ids", lambda: [3])
    options = strategy._setup_model(nn.Linear(1, 1))
    assert options["device_ids"] == [3] and options["gradient_as_bucket_view"]


def perform(monkeypatch: pytest.MonkeyPatch, world: int, accelerator: str) -> None:
    """What a worker does up to the table of ranks."""
    monkeypatch.setattr(
        main,
        "effective_config",
        lambda *_: OmegaConf.create({"task": {"_target_": "distdl.tasks.train"}}),
    )
    bundle: Any = SimpleNamespace(python_path=lambda _: [])
    attempt: Any = SimpleNamespace(record_error=lambda *_, **__: None, path=Path("r/attempts/1"))
    size = Resources(accelerator=accelerator)
    main.perform(bundle, RankContext(attempt, {}, size, rank(0, world), StopRequest()))


@pytest.mark.parametrize(
    ("error", "world", "left"),
    [(RuntimeError(), 2, 0), (RuntimeError(), 1, 1), (Stopped(JobState.PREEMPTED, ""), 2, 1)],
)
def test_who_fails_does_not_wait_for_the_others(monkeypatch, error, world: int, left: int) -> None:
    """With NCCL it would: for collectives that they have not joined. Those who stop agree on it."""

    def fail(*_: Any) -> None:
        raise error

    calls: list[int] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: world)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append(1))
    monkeypatch.setattr(rank_table, "announce", fail)
    monkeypatch.setattr(allocator, "keep_freed_memory", lambda: None)
    with pytest.raises(type(error)):
        perform(monkeypatch, world, "cpu")
    assert len(calls) == left


@pytest.mark.parametrize(("accelerator", "count"), [("cpu", 1), ("gpu", 0)])
def test_a_rank_on_a_cpu_keeps_freed_memory(monkeypatch, accelerator: str, count: int) -> None:
    """A GPU has an allocator of its own, and its host's memory may be wanted elsewhere."""
    calls: list[int] = []
    monkeypatch.setattr(allocator, "keep_freed_memory", lambda: calls.append(1))
    monkeypatch.setattr(rank_table, "refuse_missing_device", lambda *_: None)
    monkeypatch.setattr(process_group, "connect", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        perform(monkeypatch, 1, accelerator)
    assert len(calls) == count
