"""The process group, and Lightning's view of it."""

from __future__ import annotations

import datetime
import socket
from typing import Protocol, TypeVar, runtime_checkable

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.accelerators import Accelerator, CUDAAccelerator

from distdl.job import JobState
from distdl.ranks.environment import Environment
from distdl.ranks.stopping import Stopped, StopRequest
from distdl.util.errors import UserError

Value = TypeVar("Value")
# Long enough for a slow data set to load on one rank; the end of a lost rank is noticed earlier.
TIMEOUT = datetime.timedelta(minutes=30)


def attempts_store(attempt: int, timeout: datetime.timedelta = TIMEOUT) -> dist.Store:
    """The store by which the ranks of an attempt find each other.

    torchrun's agent may keep one store over its restarts (`--rdzv-backend=static`, torch 2.15).
    What an attempt writes there, such as the addresses of its ranks, is not for the next one.

    Raises:
        torch.distributed.DistStoreError, DistNetworkError: Not all ranks came in time.
    """
    store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
    return dist.PrefixStore(f"distdl/attempt/{attempt}", store)


def connect(
    environment: Environment, accelerator: str, attempt: int = 1, store: dist.Store | None = None
) -> None:
    """Joins the ranks of a run, for Lightning to find; does nothing for a single rank.

    Both backends are used, so that small agreements use gloo and never wait for the GPU's stream.

    Args:
        store: By which the ranks have found each other already; None: they do so here.

    Raises:
        UserError: NCCL finds two ranks on one GPU.
    """
    if environment.world_size == 1 or dist.is_initialized():
        return
    device = None
    if accelerator == "gpu":
        device = torch.device("cuda", device_index(environment))
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(
            backend(accelerator),
            store=attempts_store(attempt) if store is None else store,
            rank=environment.rank,
            world_size=environment.world_size,
            timeout=TIMEOUT,
            # Without it, torch 2.15 guesses the device by LOCAL_RANK, and 2.11 leaves it open until
            # the first collective. With it, NCCL connects here and reports its errors here.
            device_id=device,
        )
    except dist.DistBackendError as error:
        if "Duplicate GPU" not in str(error):
            raise
        who = f"rank {environment.rank} on {socket.gethostname()}"
        reason = str(error).strip()
        raise UserError.at(
            "trainer.devices",
            what=f"{who} has the same GPU as another rank: {reason.splitlines()[-1]}",
            remedy="start one process per GPU; with srun, --gpus-per-task=1 gives each its own",
            code="conflict",
        ) from error


def device_index(environment: Environment) -> int:
    """This rank's GPU among the visible ones: the only one (`srun --gpus-per-task=1`, a container
    with one GPU), else the one with the local rank's number."""
    return 0 if torch.cuda.device_count() == 1 else environment.local_rank


def accelerator_of(environment: Environment, accelerator: str) -> str | Accelerator:
    """Lightning's accelerator for this rank."""
    alone = environment.local_world_size > 1 and torch.cuda.device_count() == 1
    return OneVisible() if accelerator == "gpu" and alone else accelerator


class OneVisible(CUDAAccelerator):
    """Several ranks on a node, each of which sees only its own GPU, as number 0."""

    @staticmethod
    def parse_devices(devices: int | str | list[int]) -> list[int]:
        assert isinstance(devices, int)  # as `worker.build` passes it
        return list(range(devices))

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device("cuda", 0) for _ in devices]


def backend(accelerator: str) -> str:
    return "cpu:gloo,cuda:nccl" if accelerator in ("gpu", "cuda") else "gloo"


@runtime_checkable
class _ChoosesBackend(Protocol):
    """One of Lightning's strategies with a process group."""

    _process_group_backend: str | None


def give_backends(strategy: object, accelerator: str) -> None:
    """Makes Lightning's strategy use the backends of `connect`. With a single rank, Lightning opens
    the group itself. On a GPU that would be NCCL alone, which cannot exchange host tensors."""
    if not isinstance(strategy, _ChoosesBackend):
        return
    if strategy._process_group_backend is None:  # else set by the user
        strategy._process_group_backend = backend(accelerator)


def disconnect(failed: bool = False) -> None:
    """Leaves the process group.

    Args:
        failed: This rank failed, and the others do not know it yet. NCCL would wait for them to
            join queued collectives, so the group is left open, and ends with this process.
    """
    if dist.is_initialized() and not (failed and dist.get_world_size() > 1):
        dist.destroy_process_group()


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def broadcast(value: Value) -> Value:
    """Rank 0's value, on every rank (anything that can be pickled)."""
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


def gather(value: Value) -> list[Value]:
    """Every rank's value, in rank order, on every rank."""
    values = [value] * world_size()
    if len(values) > 1:
        dist.all_gather_object(values, value)  # on gloo: objects need not go through a GPU
    return values


def check_all(stop: StopRequest, when: str) -> None:
    """Ends all ranks in the same way if any rank was asked to end. Every rank calls it.

    Raises:
        Stopped: With the signal, followed by `when`.
    """
    state, signal = max(gather((str(stop.state or ""), stop.signal)))
    if state:
        raise Stopped(JobState(state), f"{signal} {when}")


class LaunchedEnvironment(TorchElasticEnvironment):
    """Lightning's view of our rank table: the processes exist, and nothing has to be spawned."""

    def __init__(self, environment: Environment) -> None:
        super().__init__()
        self._environment = environment

    @property
    def main_address(self) -> str:
        return self._environment.main_address

    @property
    def main_port(self) -> int:
        return self._environment.main_port

    def world_size(self) -> int:
        return self._environment.world_size

    def global_rank(self) -> int:
        return self._environment.rank

    def local_rank(self) -> int:
        return self._environment.local_rank

    def node_rank(self) -> int:
        return self._environment.node_rank
