"""Which GPU a rank takes, by what torch sees, and how it is passed on. tests/gpu_rehearsal starts
on simulated cards."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy as LightningDDP

from distdl.distributed import process_group, rank_table
from distdl.ranks.environment import Environment
from distdl.strategies import DDPStrategy, FSDPStrategy
from distdl.util.errors import UserError
from tests.conftest import matrix_only

VISIBLE = "CUDA_VISIBLE_DEVICES"


def rank(local, of=4):
    return Environment("slurm", local, of, local, of)


@pytest.fixture
def sees(monkeypatch):
    """Lets torch see so many GPUs."""

    def see(count, visible=None):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        if visible is not None:
            monkeypatch.setenv(VISIBLE, visible)

    monkeypatch.delenv(VISIBLE, raising=False)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    return see


CARDS = [
    (4, None, 3, 3),
    (1, None, 3, 0),
    # None is left for the third rank.
    (0, "", 2, None),
    (2, "4,5", 2, None),
    (1, "MIG-a,MIG-b", 2, None),
    (1, "MIG-a,MIG-b", 1, 0),  # CUDA shows the first of them only
]


@pytest.mark.parametrize(("count", "visible", "local", "index"), CARDS)
def test_the_only_gpu_or_that_of_its_number(sees, count, visible, local, index):
    sees(count, visible)
    rank_table.refuse_missing_device(rank(local), "cpu")
    if index is None:
        with pytest.raises(UserError, match=f"torch sees . GPUs there .{VISIBLE}='{visible}'"):
            rank_table.refuse_missing_device(rank(local), "gpu")
        return
    rank_table.refuse_missing_device(rank(local), "gpu")
    assert process_group.device_index(rank(local)) == index
    assert os.environ.get(VISIBLE) == (visible and "MIG-b")


def test_a_driver_that_is_too_old_and_a_torch_without_cuda(sees, monkeypatch):
    """NVML counts GPUs all the same, so that torch fails later, in the middle of the start."""

    def init():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11).\nAnd")

    sees(1)
    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(UserError, match=r": torch .* \(CUDA .*found version 11\)\.\n.*update"):
        rank_table.refuse_missing_device(rank(0, 1), "gpu")
    sees(0)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(UserError, match="this torch is built for CPUs"):
        rank_table.refuse_missing_device(rank(0, 1), "gpu")


def test_without_bf16_the_way_out_is_named(monkeypatch, caplog):
    device = {"is_available": True, "current_device": 0, "get_device_name": "Tesla T4"}
    device["get_device_properties"] = properties = SimpleNamespace(major=7)
    for name, value in device.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    rank_table.warn_of_slow_bf16("gpu", "bf16-mixed")
    assert caplog.text.count("trainer.precision=16-mixed") == 1
    rank_table.warn_of_slow_bf16("gpu", "16-mixed")
    properties.major = 8
    rank_table.warn_of_slow_bf16("gpu", "bf16-mixed")
    assert len(caplog.records) == 1


def test_a_processor_that_is_slow_in_bf16_is_named(monkeypatch, caplog):
    before = torch.get_rng_state()
    assert rank_table.bf16_by_float32() > 0
    assert torch.equal(torch.get_rng_state(), before), "the training draws what it would have drawn"
    monkeypatch.setattr(rank_table, "bf16_by_float32", lambda: 1.5)
    rank_table.warn_of_slow_bf16("cpu", "32-true")
    assert not caplog.records
    rank_table.warn_of_slow_bf16("cpu", "bf16-mixed")
    assert "this processor is slow in bf16, and takes 1.5 times as long" in caplog.text
    assert "trainer.precision=32-true is faster here" in caplog.text


@matrix_only
def test_a_processor_without_bf16_is_measured_to_be_slow():
    """oneDNN, restricted to the instructions of an older processor, in a process of its own: 5 to
    12 times as slow in one thread."""
    code = """
from distdl.distributed import rank_table
rank_table.warn_of_slow_bf16("cpu", "bf16-mixed")
"""
    env = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stderr.count("this processor is slow in bf16, and takes ") == 1
    assert "trainer.precision=32-true is faster here" in done.stderr


def test_where_bf16_is_faster_nothing_is_said(monkeypatch, caplog):
    monkeypatch.setattr(rank_table, "bf16_by_float32", lambda: 0.6)
    rank_table.warn_of_slow_bf16("cpu", "bf16-mixed")
    rank_table.warn_of_slow_bf16("mps", "bf16-mixed")  # neither CUDA's nor timed
    assert not caplog.records


def test_the_group_is_bound_to_the_ranks_gpu(sees, monkeypatch):
    text = "NCCL error in: ...\nLast error:\nDuplicate GPU detected : rank 1 and rank 0 on 4000"
    calls = []

    def init(backend, device_id=None, **kwargs):
        calls.append((backend, device_id))
        if device_id and device_id.index == 0:
            raise dist.DistBackendError(text)

    monkeypatch.setattr(dist, "init_process_group", init)
    monkeypatch.setattr(process_group, "attempts_store", lambda attempt: dist.HashStore())
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    sees(2)
    own = torch.device("cuda", 1)
    process_group.connect(rank(1, 2), "gpu")
    process_group.connect(rank(1, 2), "cpu")
    assert calls == [own, ("cpu:gloo,cuda:nccl", own), ("gloo", None)]
    with pytest.raises(UserError, match="has the same GPU as another rank: Duplicate GPU detected"):
        process_group.connect(rank(0, 2), "gpu")


def test_an_attempt_reads_nothing_that_the_one_before_has_left(monkeypatch):
    """As under torchrun, whose agent keeps its store when it starts the ranks again."""
    agents = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(agents.port))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    process_group.attempts_store(1).set("address of rank 1", "127.0.0.1:6575")
    assert process_group.attempts_store(1).check(["address of rank 1"])
    assert not process_group.attempts_store(2).check(["address of rank 1"])


def test_a_group_of_one_rank_has_both_backends_unless_the_user_has_chosen():
    """Lightning opens it, and knows the device alone."""
    strategies = {LightningDDP(process_group_backend="nccl"): "nccl"}
    strategies |= {cls(): "cpu:gloo,cuda:nccl" for cls in (DDPStrategy, FSDPStrategy)}
    for strategy, expected in strategies.items():
        process_group.give_backends(strategy, "gpu")
        assert strategy._get_process_group_backend() == expected
