"""The variables of a program: which rank it is, where the others are, and its run.

Each framework has names of its own for these (https://www.tensorflow.org/guide/distributed_training,
https://docs.jax.dev/en/latest/_autosummary/jax.distributed.initialize.html). The ones of torch are
always set. It never gets those of the program that started its rank: it is not torchrun's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distdl.config.schema import Program
from distdl.ranks.environment import LAUNCHER_VARIABLE, PROGRAM_PORT, Environment
from distdl.ranks.process_exit import LINGER
from distdl.util.errors import UserError
from distdl.util.orphans import PARENT

# Set by torch's agent for the ranks that it starts: their store is then in the agent. A program's
# first rank opens the store itself.
AGENTS = "TORCHELASTIC_"
OF_AGENT = ("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE")
OURS = (LAUNCHER_VARIABLE, PARENT, PROGRAM_PORT, LINGER)


@dataclass(frozen=True)
class TensorFlowTask:
    """One of TensorFlow's tasks: `worker`, number 1."""

    kind: str
    index: int


def placed(
    environment: Environment, per_node: bool, env: Mapping[str, str] = os.environ
) -> Environment:
    """The place of a program that is started once per node, or once per rank. Its first rank opens
    the main port itself, so that it is not the one of an agent's store."""
    port = int(env.get(PROGRAM_PORT) or environment.main_port)
    if not per_node:
        return replace(environment, main_port=port)
    nodes = -(-environment.world_size // environment.local_world_size)
    return Environment(
        environment.launcher,
        rank=environment.node_rank,
        world_size=nodes,
        node_rank=environment.node_rank,
        main_address=environment.main_address,
        main_port=port,
    )


def inherited(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What a program takes over of its rank's variables."""
    left = (*OURS, *OF_AGENT)
    return {k: v for k, v in env.items() if k not in left and not k.startswith(AGENTS)}


def of_torch(place: Environment, devices: int) -> dict[str, str]:
    """torch's names, and the devices of a node, which a program per node shares out itself."""
    values = dict[str, str]()
    place.export(values)
    return {**values, "DISTDL_DEVICES": str(devices), "PYTHONUNBUFFERED": "1"}


def of_run(
    run_id: str, attempt: int, checkpoints: Path, params: Mapping[str, Any]
) -> dict[str, str]:
    return {
        "DISTDL_RUN": run_id,
        "DISTDL_ATTEMPT": str(attempt),
        "DISTDL_CHECKPOINTS": str(checkpoints),
        "DISTDL_PARAMS": json.dumps(params),
    }


def of_framework(program: Program, place: Environment, addresses: Sequence[str]) -> dict[str, str]:
    """The variables of the program's framework. `addresses`: `host:port` for each rank."""
    if program.framework == "tensorflow":
        return {"TF_CONFIG": json.dumps(tf_config(program, place.rank, addresses))}
    if program.framework == "jax":
        return {
            "JAX_COORDINATOR_ADDRESS": addresses[0],
            "JAX_NUM_PROCESSES": str(place.world_size),
            "JAX_PROCESS_ID": str(place.rank),
        }
    return {}


def tasks(program: Program, count: int) -> list[TensorFlowTask]:
    """TensorFlow's task of each rank: a chief, workers, parameter servers, an evaluator.

    Raises:
        UserError: There are fewer ranks than these need.
    """
    servers = program.parameter_servers
    evaluators = int(program.evaluator)
    workers = count - 1 - servers - evaluators
    if workers < bool(servers):
        raise UserError.at(
            "program.parameter_servers",
            what=(
                f"{count} tasks are too few for {servers} parameter servers and {evaluators} "
                "evaluators"
            ),
            remedy="more trainer.devices",
            code="not-enough",
        )
    kinds = {"chief": 1, "worker": workers, "ps": servers, "evaluator": evaluators}
    return [
        TensorFlowTask(kind, index) for kind, number in kinds.items() for index in range(number)
    ]


def tf_config(program: Program, rank: int, addresses: Sequence[str]) -> dict[str, Any]:
    """TF_CONFIG of a rank. An evaluator is no part of the cluster that the others form, and its own
    has it alone (https://www.tensorflow.org/tutorials/distribute/parameter_server_training)."""
    assigned = tasks(program, len(addresses))
    mine = assigned[rank]
    cluster: dict[str, list[str]] = {}
    for task, address in zip(assigned, addresses, strict=True):
        if (task.kind == "evaluator") == (mine.kind == "evaluator"):
            cluster.setdefault(task.kind, []).append(address)
    return {"cluster": cluster, "task": {"type": mine.kind, "index": mine.index}}


def serves(program: Program, rank: int, count: int) -> bool:
    """Whether a rank's task only serves the chief, and so ends with it: TensorFlow's parameter
    servers and the workers beside them wait for ever, and so does an evaluator."""
    if program.framework != "tensorflow":
        return False
    kind = tasks(program, count)[rank].kind
    return kind in ("ps", "evaluator") or (kind == "worker" and program.parameter_servers > 0)
