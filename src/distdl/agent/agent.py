"""Starts the ranks of one node under torch's elastic agent: `python -m distdl.agent ...`.

`launcher=local` uses it for this machine. Where a platform starts one process per node (SageMaker,
MPI with `launcher.agent=true`), the platform starts this program.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from distdl.ranks import stopping
from distdl.ranks.environment import PROGRAM_PORT
from distdl.runs import failures
from distdl.runs.directory import Attempt
from distdl.util import loopback as loopback_ports
from distdl.util.exit_codes import EXIT_CANCELLED, EXIT_FAILURE, EXIT_PREEMPTED, as_shell
from distdl.util.names import kept_apart
from distdl.util.orphans import PARENT

# Seconds. torch's agent kills ranks that are still running 30 s after the first one ended. A rank
# killed earlier was killed by something else.
BEFORE_AGENT_KILLS = 20


def run(
    command: Sequence[str],
    *,
    name: str,
    devices: int,
    attempt: Attempt,
    nodes: int = 1,
    node_rank: int = 0,
    main: str = "127.0.0.1:0",
    grace_seconds: int = 30,
    env: Mapping[str, str] | None = None,
    standby: bool = False,
) -> int:
    """Starts `devices` ranks on this machine and waits for them. With one node, the ranks listen
    only on this machine's loopback interface.

    Args:
        name: Identifies the job to the agents of the other nodes.
        attempt: Its folder gets the redacted output of all ranks but the node's first, and a
            record of each rank that was killed.
        main: With several nodes, `host:port` of the ranks' store on node 0.
        grace_seconds: Time from a signal until the ranks are killed.
        standby: Keep a process ready that starts the ranks of this process's next attempt sooner.

    Returns:
        0, or the exit code of the rank that failed first; -N if signal N ended that rank or asked
        this process to end.
    """
    handlers = {n: signal.getsignal(n) for n in (*stopping.STATE_AFTER, signal.SIGQUIT)}
    os.environ.update(env or {})
    os.environ[PARENT] = str(os.getpid())
    # One thread per process, unless the user has set it: as torchrun does, without its warning.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if nodes == 1 and (interface := loopback()):
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ[variable] = os.environ.get(variable) or interface
    options: dict[str, Any] = {
        "min_nodes": nodes,
        "max_nodes": nodes,
        "nproc_per_node": devices,
        "run_id": kept_apart(name, name.replace("/", "_")),
        "rdzv_endpoint": main,
        "max_restarts": 0,
        "monitor_interval": 0.1,
        "shutdown_timeout": grace_seconds,
    }
    if PROGRAM_PORT not in os.environ:
        os.environ[PROGRAM_PORT] = str(program_port(nodes, main))
    if nodes > 1:
        options["rdzv_backend"] = "static"
        options["rdzv_configs"] = {"rank": node_rank, "timeout": 900}
    folder = attempt.logs / (f"agent-{node_rank}" if nodes > 1 else "agent")
    try:
        with stopping.raise_on_signal():
            return _run(command, folder, attempt, options, standby)
    except KeyboardInterrupt as interrupt:  # before torch's agent handled signals
        return -stopping.signal_number(interrupt)
    finally:
        os.environ.pop(PARENT, None)
        os.environ.pop(PROGRAM_PORT, None)
        stopping.set_handlers(handlers)


def _run(
    command: Sequence[str], folder: Path, attempt: Attempt, options: dict[str, Any], standby: bool
) -> int:
    """The part of `run` that needs torch. The ranks write their output into `folder`; `options` are
    arguments of torch's LaunchConfig."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from distdl.agent import rendezvous, standby_ranks
    from distdl.agent.rank_output import RankOutput

    signals = ",".join(n.name for n in (*stopping.signals(), signal.SIGQUIT))
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = signals
    fields = {f.name for f in dataclasses.fields(LaunchConfig)}
    with RankOutput(folder, options["nproc_per_node"]) as output:
        options = {"rdzv_backend": rendezvous.register(), **options, "logs_specs": output.specs}
        options["signals_to_handle"] = signals
        config = LaunchConfig(**{k: v for k, v in options.items() if k in fields})
        standby_ranks.use(attempt.path / "status.json", standby)
        try:
            elastic_launch(config, sys.executable)(*command)
        except ChildFailedError as error:
            return record_kills(attempt, error.failures)
        except SignalException as error:
            return -int(error.sigval)
        finally:
            standby_ranks.end_ranks(options["shutdown_timeout"])
    standby_ranks.end()
    return 0


def record_kills(attempt: Attempt, failed: Mapping[int, Any]) -> int:
    """Records the ranks that were killed or crashed before they recorded it. Returns the exit code
    of the rank that failed first. torch reports `exitcode` and `timestamp` of each failure."""
    start = min(each.timestamp for each in failed.values())
    for rank, each in failed.items():
        code = int(each.exitcode)
        agreed = code in (EXIT_PREEMPTED, EXIT_CANCELLED) or -code in stopping.STATE_AFTER
        if not agreed and each.timestamp - start < BEFORE_AGENT_KILLS:
            # torch rounds its timestamps down to seconds. A rank that crashes because another one
            # failed must be dated after it. A SIGKILL is never such a consequence.
            later = 0 if -code == signal.SIGKILL else 1
            failures.record_end(attempt.errors, rank, code, each.timestamp + later)
    first = attempt.first_error()
    if first and first["rank"] in failed:
        return int(failed[first["rank"]].exitcode)
    return int(min(failed.values(), key=lambda each: each.timestamp).exitcode)


def program_port(nodes: int, main: str) -> int:
    """A port for a program on rank 0's host: a free one, or beside that of the ranks' store, which
    every node knows."""
    if nodes > 1:
        return int(main.rpartition(":")[2]) + 1
    with loopback_ports.listen() as probe:
        return int(probe.getsockname()[1])


def loopback() -> str | None:
    """The network interface that only this machine can reach."""
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs one node's agent. The worker's arguments follow after `--`."""
    parser = argparse.ArgumentParser("python -m distdl.agent", description=__doc__)
    parser.add_argument("--devices", type=int, required=True, help="number of ranks on this node")
    parser.add_argument("--nodes", type=int, default=1, help="number of nodes (default: 1)")
    parser.add_argument("--node-rank", type=int, help="default: read from the launcher's variables")
    parser.add_argument("--main-address", default=os.environ.get("MASTER_ADDR", "127.0.0.1"))
    parser.add_argument("--main-port", type=int, default=int(os.environ.get("MASTER_PORT", "0")))
    parser.add_argument("--grace-seconds", type=int, default=30)
    parser.add_argument("worker", nargs="+", help="BUNDLE STORE --attempt N")
    options = parser.parse_args(argv)
    _, store, _, number = options.worker
    node_rank = options.node_rank
    if node_rank is None:
        from distdl.ranks import environment

        # There is one agent per node, so its rank among the agents is the node's number.
        node_rank = environment.resolve().rank
    from distdl.ranks.process_exit import exit_process

    launcher = os.environ.get("DISTDL_LAUNCHER", "local")
    code = run(
        ["-m", "distdl.worker", *options.worker],
        name="distdl",  # the same on every node; the address of their store distinguishes jobs
        devices=options.devices,
        attempt=Attempt(Path(store, "attempts", f"{int(number):03d}")),
        nodes=options.nodes,
        node_rank=node_rank,
        main=f"{options.main_address}:{options.main_port}",
        grace_seconds=options.grace_seconds,
        # The agent sets torchrun's variables for its ranks, whatever started the agent.
        env={"DISTDL_LAUNCHER": "local"},
    )
    if -code in stopping.STATE_AFTER:  # status.json records how the ranks ended
        code = EXIT_FAILURE
    exit_process(as_shell(code), launcher)
