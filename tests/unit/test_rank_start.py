"""Which GPU a rank takes, by what torch sees, and how it is passed on; how the rank leaves; what
its output's pipe and its allocator keep. tests/gpu_rehearsal starts on simulated cards, and
tests/cli/test_secrets.py shows that output is redacted."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy as LightningDDP
from omegaconf import OmegaConf

from distdl.agent.rank_output import RankOutput
from distdl.distributed import process_group, rank_table
from distdl.job import JobState, Resources
from distdl.launch import external
from distdl.ranks.environment import Environment
from distdl.ranks.stopping import Ended, Stopped, StopRequest, raise_on_signal
from distdl.strategies import DDPStrategy, FSDPStrategy
from distdl.util.errors import UserError
from distdl.worker import allocator, main
from distdl.worker.rank_context import RankContext

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
    rank_table.warn_without_bf16("gpu", "bf16-mixed")
    assert caplog.text.count("trainer.precision=16-mixed") == 1
    rank_table.warn_without_bf16("gpu", "16-mixed")
    properties.major = 8
    rank_table.warn_without_bf16("gpu", "bf16-mixed")
    assert len(caplog.records) == 1


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


def test_a_list_cannot_choose_for_ranks_that_run_already():
    """torchrun -m distdl trainer.devices=[1,2] took cards 0 and 1."""
    config = OmegaConf.create({"trainer": {"devices": [1, 2]}})
    with pytest.raises(UserError, match="export CUDA_VISIBLE_DEVICES before"):
        external.adopt_ranks(config, rank(0, 2), config.trainer.devices)


FAILING = [(RuntimeError(), 2, 0), (RuntimeError(), 1, 1), (Stopped(JobState.PREEMPTED, ""), 2, 1)]


@pytest.mark.parametrize(("error", "world", "left"), FAILING)
def test_who_fails_does_not_wait_for_the_others(monkeypatch, error, world, left):
    """With NCCL it would: for collectives that they have not joined. Those who stop agree on it."""

    def fail(*_):
        raise error

    calls = []
    kept = []
    config = OmegaConf.create({"task": {"_target_": "distdl.tasks.train"}})
    monkeypatch.setattr(main, "effective_config", lambda *_: config)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: world)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append(1))
    monkeypatch.setattr(rank_table, "announce", fail)
    monkeypatch.setattr(allocator, "keep_freed_memory", lambda: kept.append(1))
    bundle = SimpleNamespace(python_path=lambda _: [])
    record = {"record_error": lambda *_, **__: None}
    attempt = SimpleNamespace(number=1, path=Path("r/attempts/1"), **record)
    size = Resources(accelerator="cpu")
    with pytest.raises(type(error)):
        main.perform(bundle, RankContext(attempt, {}, size, rank(0, world), StopRequest()))
    assert len(calls) == left
    assert kept == [1]


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
def test_a_full_disk_stops_no_rank(tmp_path):
    """Its pipe, and those of the others, are still emptied."""
    with RankOutput(tmp_path, 2) as output:
        paths = ("/dev/full", tmp_path / "there")
        full, other = (os.open(output.pipe_to(str(path)), os.O_WRONLY) for path in paths)
        for number in range(2000):  # more than a pipe holds
            os.write(full, b"x" * 99 + b"\n")
            os.write(other, b"%d\n" % number)
        os.close(full)
        os.close(other)
    assert (tmp_path / "there").read_text().split()[-1] == "1999"


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_signal_while_an_output_is_set_up_still_reads_what_came(moment, tmp_path, monkeypatch):
    """The start of a thread is such a moment: the job must end as PREEMPTED, with no traceback."""
    start = threading.Thread.start

    def with_signal(thread):
        if moment == "before":
            os.kill(os.getpid(), signal.SIGUSR1)
        start(thread)
        if moment == "after":
            os.kill(os.getpid(), signal.SIGUSR1)

    with pytest.raises(Ended), raise_on_signal(), RankOutput(tmp_path, 2) as output:
        first = os.open(output.pipe_to(str(tmp_path / "first")), os.O_WRONLY)
        os.write(first, b"what came\n")
        os.close(first)
        monkeypatch.setattr(threading.Thread, "start", with_signal)
        output.pipe_to(str(tmp_path / "second"))
    assert (tmp_path / "first").read_text() == "what came\n"


# As steps do: blocks of some megabytes, several at once, all freed before the next step.
STEPS = """
import resource
from distdl.worker.allocator import keep_freed_memory
kept = keep_freed_memory()
def faults(steps):
    for _ in range(steps):
        tensors = [b"x" * (12 * 2**20 + n) for n in range(6)]
        del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
before = faults(6)
print(kept, faults(10) - before)
"""
PAGES = 10 * 6 * 12 * 2**20 // 4096  # that ten steps write to
THRESHOLDS = {"MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "131072"}
MEMORY = [
    ({"GLIBC_TUNABLES": "glibc.cpu.x86_ibt=off"}, True, 0, PAGES / 8),
    # The user's settings of malloc stay; these make glibc do what it does by default.
    (THRESHOLDS, False, PAGES / 2, 99 * PAGES),
    ({"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}, False, 0, 99 * PAGES),
]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
@pytest.mark.parametrize(("variables", "kept", "least", "most"), MEMORY)
def test_memory_that_a_step_freed_is_kept_for_the_next(variables, kept, least, most):
    command = [sys.executable, "-c", STEPS]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    answer, faults = done.stdout.split()
    assert answer == str(kept)
    assert least <= int(faults) < most
