"""The rank of this process: reads each platform's variables into one record.

`DISTDL_LAUNCHER` names the launcher and thereby selects rows of the table below, because a Slurm
shell or an MPI image may have variables of other jobs. Only `launcher=external`, which
`torchrun -m distdl ...` uses, reads all rows.
"""

from __future__ import annotations

import json
import logging
import os
import re
import zlib
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field, fields
from itertools import chain

from distdl.job import Resources
from distdl.util import loopback
from distdl.util.errors import Problem, UserError

log = logging.getLogger(__name__)

LAUNCHER_VARIABLE = "DISTDL_LAUNCHER"
# A port of rank 0's host that is free for a program; without it MASTER_PORT is. An agent sets it,
# whose own store is at MASTER_PORT.
PROGRAM_PORT = "DISTDL_PROGRAM_PORT"
DEFAULT_PORT = 29500


@dataclass(frozen=True)
class Row:
    """The variables that one tool sets for the processes it starts; "" if it has none."""

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: tuple[str, ...] = ()
    node_rank: str = ""


TORCHRUN = Row("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", ("LOCAL_WORLD_SIZE",), "GROUP_RANK")
# Azure ML's PyTorch distribution differs from torchrun: it sets NODE_RANK, and no local size.
AZUREML = Row("azureml", "RANK", "WORLD_SIZE", "LOCAL_RANK", ("LOCAL_WORLD_SIZE",), "NODE_RANK")
# OMPI_COMM_WORLD_NODE_RANK is not the node's index, which is therefore rank // local size.
OPENMPI = Row(
    "openmpi",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    ("OMPI_COMM_WORLD_LOCAL_SIZE",),
)
# MPICH and Intel MPI are both started by hydra (the process manager, not the config library).
MPICH = Row("mpich", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", ("MPI_LOCALNRANKS",))
SLURM = Row(
    "slurm",
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "SLURM_LOCALID",
    ("SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
    "SLURM_NODEID",
)

# The first row whose rank and world size are both set is used.
ROWS: dict[str, tuple[Row, ...]] = {
    "single": (),
    "local": (TORCHRUN,),
    "mpi": (OPENMPI, MPICH),
    "slurm": (SLURM,),
    "azureml": (OPENMPI, MPICH, AZUREML),
    "sagemaker": (TORCHRUN, OPENMPI),
    "kubernetes": (TORCHRUN,),
    "external": (TORCHRUN, OPENMPI, MPICH, SLURM),
}

# Variables that name the host of rank 0 if MASTER_ADDR does not. mpi and external use all of them.
MAIN_ADDRESS = {
    "azureml": ("AZ_BATCHAI_MPI_MASTER_NODE", "AZ_BATCH_MASTER_NODE", "AZ_BATCH_HOST_LIST"),
    "sagemaker": ("SM_HOSTS",),
    "slurm": ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"),
}
# The smallest number of Slurm's own steps (interactive, batch, extern); srun's steps start at 0.
FIRST_SPECIAL_STEP = 0xFFFFFFF0


@dataclass(frozen=True)
class Environment:
    """The rank of this process. `sources` names the variable that each value came from."""

    launcher: str
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    main_address: str = "127.0.0.1"
    main_port: int = DEFAULT_PORT
    sources: Mapping[str, str] = field(default_factory=dict)

    def export(self, env: MutableMapping[str, str] = os.environ) -> None:
        """Sets the standard names, which torch, DeepSpeed and other libraries read."""
        env.update(
            RANK=str(self.rank),
            WORLD_SIZE=str(self.world_size),
            LOCAL_RANK=str(self.local_rank),
            LOCAL_WORLD_SIZE=str(self.local_world_size),
            NODE_RANK=str(self.node_rank),
            MASTER_ADDR=self.main_address,
            MASTER_PORT=str(self.main_port),
        )

    def describe(self) -> str:
        values = ((f.name, getattr(self, f.name)) for f in fields(self)[1:-1])
        sourced = (
            f"{name}={value} ({self.sources.get(name, 'default')})" for name, value in values
        )
        return f"launcher={self.launcher}: {', '.join(sourced)}"


def detect(env: Mapping[str, str] = os.environ) -> str | None:
    """The tool (not distdl) that started this process as one of several; None if none did."""
    rows = [] if env.get(LAUNCHER_VARIABLE) else _claims(env)
    return rows[0].name if rows else None


def _claims(env: Mapping[str, str]) -> list[Row]:
    """The rows of the tools that seem to have started this process."""
    rows = [r for r in ROWS["external"] if {r.rank, r.world_size, r.local_rank} <= set(env)]
    # RANK alone may be left over in a shell; torchrun also sets the id of its run.
    if TORCHRUN in rows and "TORCHELASTIC_RUN_ID" not in env:
        rows.remove(TORCHRUN)
    if SLURM in rows and not _in_step(env):
        rows.remove(SLURM)
    return rows


def _in_step(env: Mapping[str, str]) -> bool:
    """Whether srun started this process as a rank; batch scripts and interactive shells are not."""
    step = env.get("SLURM_STEP_ID", "")
    if not step.isdigit() or int(step) >= FIRST_SPECIAL_STEP:
        return False
    shell = env.get("SLURM_JOB_NAME") in ("bash", "interactive") or "SLURM_PTY_PORT" in env
    return not (shell and env["SLURM_NTASKS"] == "1")  # srun --pty bash


def resolve(env: Mapping[str, str] = os.environ, resources: Resources | None = None) -> Environment:
    """Reads the variables of this process; `DISTDL_LAUNCHER` says which of them count.

    Args:
        resources: The size of the run, to compare with the started processes.

    Raises:
        UserError: The launcher is unknown, or its variables are missing, are not numbers, or
            contradict each other or `resources`.
    """
    launcher = env.get(LAUNCHER_VARIABLE) or "single"
    if launcher not in ROWS:
        raise UserError.at(
            LAUNCHER_VARIABLE,
            what=f"{launcher!r} is not a launcher",
            remedy=f"one of: {', '.join(ROWS)}",
            code="wrong-kind",
        )
    if launcher == "external":
        rows = _claims(env)
        _agree(rows, env)
    else:
        rows = [r for r in ROWS[launcher] if r.rank in env and r.world_size in env]
    if launcher == "single" or (launcher == "local" and not rows):
        # A single process with `strategy=ddp` also opens a port, which two runs must not share.
        with loopback.listen() as probe:
            address, port = probe.getsockname()[:2]
        free = {"main_port": "free"}
        resolved = Environment(launcher, main_address=address, main_port=port, sources=free)
    elif not rows:
        wanted = " or ".join(f"{r.rank} and {r.world_size}" for r in ROWS[launcher])
        raise UserError.at(
            LAUNCHER_VARIABLE,
            what=f"launcher={launcher} started this process without setting {wanted}",
            code="incomplete",
        )
    else:
        resolved = _read(launcher, rows[0], env, resources)
    if resources is not None and resolved.world_size != resources.world_size:
        raise UserError.at(
            "trainer.devices",
            what=(
                f"{resolved.world_size} processes were started by {resolved.launcher}, but the run "
                f"asks for {resources.num_nodes} x {resources.devices} = {resources.world_size}"
            ),
            remedy="start as many processes as trainer.num_nodes x trainer.devices",
            code="mismatch",
        )
    return resolved


def _read(
    launcher: str, row: Row, env: Mapping[str, str], resources: Resources | None
) -> Environment:
    sources: dict[str, str] = {}

    def read(name: str, variables: tuple[str, ...], otherwise: int = 0, why: str = "") -> int:
        variable = next((v for v in variables if v in env), None)
        sources[name] = variable or why
        return _number(env, variable) if variable else otherwise

    rank, world = read("rank", (row.rank,)), read("world_size", (row.world_size,))
    size, why = (resources.devices, "trainer.devices") if resources else (world, "one node")
    local_world = read("local_world_size", row.local_world_size, size, why)
    per_node = max(local_world, 1)
    nodes = -(-world // per_node)
    why = f"{row.rank} % local_world_size"
    local_rank = read("local_rank", (row.local_rank,), rank % per_node, why)
    why = f"{row.rank} // local_world_size"
    node_rank = read("node_rank", (row.node_rank,), rank // per_node, why)

    checks = (
        (rank < world, "rank", f"rank {rank} does not exist in a world of {world}"),
        (
            local_rank < local_world,
            "local_rank",
            f"local rank {local_rank} does not exist on a node with {local_world} processes",
        ),
        (node_rank < nodes, "node_rank", f"node rank {node_rank} does not exist on {nodes} nodes"),
        (
            1 <= local_world <= world,
            "local_world_size",
            f"{local_world} processes per node do not fit a world of {world}",
        ),
    )
    if wrong := [
        Problem(sources[name], what=what, code="mismatch")
        for is_right, name, what in checks
        if not is_right
    ]:
        raise UserError(*wrong)

    address, sources["main_address"] = _main_address(launcher, env)
    if not address:
        if local_world < world:
            raise UserError.at(
                "MASTER_ADDR",
                what=f"{row.name}: {world} processes on several nodes, but no address of rank 0",
                remedy="export MASTER_ADDR=HOST on every node, that of rank 0",
                code="missing-key",
            )
        address = loopback.address()
        sources["main_address"] = "one node"
    port, sources["main_port"] = _main_port(env)
    return Environment(
        launcher, rank, world, local_rank, local_world, node_rank, address, port, sources
    )


def _agree(rows: list[Row], env: Mapping[str, str]) -> None:
    """Refuses contradictory variables if several tools seem to have started this process."""
    for row in rows[1:]:
        first = rows[0]
        # srun may start one torchrun or mpirun agent per node, which then numbers its own ranks.
        agents = re.match(r"1(\(x\d+\))?$", env.get("SLURM_STEP_TASKS_PER_NODE", ""))
        if row is SLURM and (agents or env[row.world_size] != env[first.world_size]):
            continue
        for one, other in ((first.rank, row.rank), (first.world_size, row.world_size)):
            if env[one] != env[other]:
                raise UserError.at(
                    one,
                    what=f"{one}={env[one]} contradicts {other}={env[other]}",
                    remedy="unset the variables of the launcher that did not start this process",
                    code="conflict",
                )


def _number(env: Mapping[str, str], name: str) -> int:
    # Slurm writes "2(x3)" for two tasks on each of three nodes.
    match = re.fullmatch(r"(\d+)(\(x\d+\))?", env[name].strip())
    if match is None and "," in env[name]:
        raise UserError.at(
            name,
            what=f"{env[name]}: the nodes have different numbers of processes",
            remedy="start the same number on every node",
            code="mismatch",
        )
    if match is None:
        raise UserError.at(name, what=f"{env[name]!r} is not a number", code="wrong-type")
    return int(match[1])


def _main_address(launcher: str, env: Mapping[str, str]) -> tuple[str, str]:
    """The host of rank 0 and the variable that names it; two empty strings if none does."""
    every_platform = chain.from_iterable(MAIN_ADDRESS.values())
    names = () if launcher == "local" else MAIN_ADDRESS.get(launcher, every_platform)
    name = next((n for n in ("MASTER_ADDR", *names) if env.get(n, "").strip()), "")
    value = env.get(name, "").strip()
    if name == "SM_HOSTS":
        return json.loads(value)[0], name
    if "NODELIST" in name:  # Slurm's short form: in `gpu[003-005,9]-ib,login` gpu003-ib is first
        value = re.sub(r"\[(\d+)[^\]]*\]", r"\1", value)
    # Azure Batch writes "host:port,host:port"; a bare IPv6 address keeps its colons.
    first = value.split(",")[0]
    return (first if first.count(":") > 1 else first.split(":")[0]), name


def _main_port(env: Mapping[str, str]) -> tuple[int, str]:
    if env.get("MASTER_PORT"):
        return _number(env, "MASTER_PORT"), "MASTER_PORT"
    # Derived from the job's id, because two jobs on one machine must not share a port.
    for name in ("SLURM_JOB_ID", "OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE"):
        if env.get(name):
            return 15000 + zlib.crc32(env[name].encode()) % 10000, name
    return DEFAULT_PORT, "default"
