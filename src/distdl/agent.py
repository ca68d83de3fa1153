"""Starts the ranks of one node under torch's elastic agent: `python -m distdl.agent ...`.

`launcher=local` uses it for this machine; where a place starts one process per node (SageMaker, MPI
with `launcher.agent=true`), that process is this one.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


def run(
    command: Sequence[str],
    *,
    name: str,
    devices: int,
    logs: Path,
    nodes: int = 1,
    node_rank: int = 0,
    main: str = "127.0.0.1:0",
    grace_seconds: int = 30,
    env: Mapping[str, str] | None = None,
) -> int:
    """Starts `devices` ranks here and waits for them.

    Args:
        command: What each rank runs, without the interpreter.
        name: Names the job to the other nodes' agents.
        devices: Ranks on this node.
        logs: Where the output of all but the node's first rank goes.
        nodes, node_rank: How many nodes there are, and which one this is.
        main: `host:port` where node 0 keeps the ranks' store; port 0 chooses a free one.
        grace_seconds: From a signal until the ranks are killed.
        env: Variables to set before.

    Returns:
        0, or the exit code of the rank that failed first; -N for one that signal N ended.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.update(env or {})
    # One thread per process unless asked: what torchrun does, without its warning.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    several = {"rdzv_backend": "static", "rdzv_configs": {"rank": node_rank, "timeout": 900}}
    options: dict[str, Any] = {
        "min_nodes": nodes,
        "max_nodes": nodes,
        "nproc_per_node": devices,
        "run_id": name.replace("/", "_"),
        "rdzv_endpoint": main,
        "max_restarts": 0,
        "monitor_interval": 0.1,
        # The first rank keeps the terminal; what the others print goes to a file.
        "logs_specs": DefaultLogsSpecs(
            log_dir=str(logs), redirects=dict.fromkeys(range(1, devices), Std.ALL)
        ),
        "signals_to_handle": SIGNALS,
        "shutdown_timeout": grace_seconds,
        **(several if nodes > 1 else {"rdzv_backend": "c10d"}),
    }
    known = {f.name for f in dataclasses.fields(LaunchConfig)}
    config = LaunchConfig(**{k: v for k, v in options.items() if k in known})
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = SIGNALS
    try:
        elastic_launch(config, sys.executable)(*command)
    except ChildFailedError as error:
        return int(error.get_first_failure()[1].exitcode)
    except SignalException:
        return 1  # the status says what the workers made of it
    return 0


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """One node's agent; after `--` come the worker's arguments."""
    parser = argparse.ArgumentParser("python -m distdl.agent", description=__doc__)
    parser.add_argument("--devices", type=int, required=True, help="ranks on this node")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--node-rank", type=int, help="default: by the launcher's own variables")
    parser.add_argument("--main-address", default=os.environ.get("MASTER_ADDR", "127.0.0.1"))
    parser.add_argument("--main-port", type=int, default=int(os.environ.get("MASTER_PORT", "0")))
    parser.add_argument("--grace-seconds", type=int, default=30)
    parser.add_argument("worker", nargs="+", help="BUNDLE STORE --attempt N")
    given = list(sys.argv[1:] if argv is None else argv)
    split = given.index("--")
    options = parser.parse_args([*given[:split], "worker"])
    store, number = Path(given[split + 2]), int(given[given.index("--attempt") + 1])
    node_rank = options.node_rank
    if node_rank is None:
        from distdl import environment

        # One agent per node: its rank among the agents is the node's number.
        node_rank = environment.resolve().rank
    from distdl.leaving import leave

    launcher = os.environ.get("DISTDL_LAUNCHER", "local")
    code = run(
        ["-m", "distdl.worker", *given[split + 1 :]],
        name="distdl",  # the same on every node; their store's address tells jobs apart
        devices=options.devices,
        logs=store / "attempts" / f"{number:03d}" / "logs" / f"agent-{node_rank}",
        nodes=options.nodes,
        node_rank=node_rank,
        main=f"{options.main_address}:{options.main_port}",
        grace_seconds=options.grace_seconds,
        # From here on the ranks are torchrun's, whatever started this agent.
        env={"DISTDL_LAUNCHER": "local"},
    )
    leave(code if code >= 0 else 128 - code, launcher)


if __name__ == "__main__":
    main()
