"""`torchrun -m distdl ...`: another tool has started the ranks. Rank 0 plans, all ranks train.

Only rank 0 runs Hydra, and it creates the run directory. The other ranks wait for its message in
torch's store. No further processes are started.
"""

from __future__ import annotations

import datetime
import os
import sys
import time
from collections.abc import Callable, Sequence

from omegaconf import DictConfig, ListConfig

from distdl.config import compose, grammar, programs, user_conf
from distdl.launch import dry_run, planning, start, submitting
from distdl.launch.planning import Plan
from distdl.ranks import environment as environments
from distdl.ranks import scratch
from distdl.util.errors import UserError
from distdl.util.exit_codes import EXIT_REFUSED
from distdl.util.screen import say

TARGET = "distdl.launchers.external.ExternalLauncher"
# Rank 0's messages to the others, besides "<attempt> <run directory>".
REFUSED, NOTHING_TO_DO = "refused", "nothing to do"
Planner = Callable[[environments.Environment], Plan]


def train(overrides: Sequence[str], config_dirs: Sequence[str] = ()) -> int:
    """Runs `torchrun -m distdl key=value ...` on each rank."""

    def planner(ranks: environments.Environment) -> Plan:
        user_conf.print_shadowed()
        parsed = grammar.parse_overrides(overrides)
        composed = compose.composed(parsed, config_dirs)
        config = composed.config
        refuse_program(config)
        # The number of started ranks overrides a preset's size (debug=cpu: one device).
        typed = {override.key_or_group for override in parsed}
        requested = config.trainer.get("devices") if "trainer.devices" in typed else None
        if "launcher.max_attempts" in typed:
            raise UserError.at(
                "launcher.max_attempts",
                what="the tool that has started these ranks starts them again",
                remedy="leave it out; for torchrun: --max-restarts=N",
                code="conflict",
            )
        adopt_ranks(config, ranks, requested)
        planned = planning.plan(config, typed=composed.typed)
        planning.check_classes(planned)
        return planned

    return main(planner)


def main(planner: Planner) -> int:
    """Runs on each rank; only rank 0 calls the planner. Returns the worker's exit code."""
    os.environ[environments.LAUNCHER_VARIABLE] = "external"
    ranks = environments.resolve()
    ranks.export()
    if ranks.rank != 0:
        return _work(_broadcast(ranks, None))
    try:
        message = _create(planner(ranks))
    except BaseException:  # whatever it is, the other ranks must not wait for a message
        _broadcast(ranks, REFUSED)
        raise
    return _work(_broadcast(ranks, message))


def adopt_ranks(where: DictConfig, ranks: environments.Environment, requested: object) -> None:
    """Writes the number of started ranks into a config; `requested` is from the command line."""
    per_node = ranks.local_world_size
    nodes, rest = divmod(ranks.world_size, per_node)
    what = ""
    remedy = "leave it out: the number of started processes sets it"
    if rest:
        what = f"the nodes have different numbers of processes ({ranks.world_size})"
        remedy = ""
    elif isinstance(requested, (list, ListConfig)):
        what = f"{list(requested)} chooses GPUs, but the processes are running already"
        remedy = "leave it out, and export CUDA_VISIBLE_DEVICES before they are started"
    elif isinstance(requested, int) and requested not in (-1, per_node):
        what = f"the run asks for {requested} per node, but the node has {per_node}"
    if what:
        raise UserError.at("trainer.devices", what=what, remedy=remedy, code="mismatch")
    where.trainer.devices = per_node
    where.trainer.num_nodes = nodes
    where.launcher = {"_target_": TARGET}


def refuse_program(config: DictConfig) -> None:
    """Refuses a program. Another tool has started a distdl for each of its ranks, and torchrun
    holds the port at which the first of them would listen."""
    if programs.is_program(config):
        raise UserError.at(
            programs.SECTION,
            what="torchrun, mpirun or srun has started this process already, as one of several",
            remedy=(
                "let distdl start the ranks: python -m distdl run trainer.devices=2 -- COMMAND, "
                "with "
                "launcher=mpi or slurm on several hosts; or start the program without distdl"
            ),
            code="conflict",
        )


def _create(planned: Plan) -> str:
    """Creates the run and its attempt on rank 0; returns the message for the other ranks."""
    if planned.config.dry_run:
        dry_run.show(planned)
        return NOTHING_TO_DO
    if planned.finished:
        say(start.how_to_train_longer(planned))
        return NOTHING_TO_DO
    scratch.refuse(planned.config.get("data"), planned.resources.devices)
    submitting.move_failed_run(planned)
    attempt = submitting.create_attempt(planned, sys.argv, None)
    return f"{attempt.number} {planned.run.path}"


def _work(message: str) -> int:
    if message == REFUSED:
        # Rank 0 prints the reason. It should exit first, because the first exit is reported as the
        # cause. torchrun then ends the other ranks; under other tools they end after a short wait.
        time.sleep(30 if _under_torchrun() else 2)
        return EXIT_REFUSED
    if message == NOTHING_TO_DO:
        return 0
    from distdl.worker import main as worker

    number, run = message.split(" ", 1)
    return worker.main([run, run, "--attempt", number])


def _under_torchrun() -> bool:
    """Whether torchrun started this rank. If so, its agent hosts a store at the main port."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _broadcast(ranks: environments.Environment, message: str | None) -> str:
    """Rank 0's message, on every rank. Uses torch's store: there is no process group yet."""
    if ranks.world_size == 1:
        assert message is not None
        return message
    from torch.distributed import PrefixStore, TCPStore

    # Not at the main port, where the training's own store will open: an early rank must not connect
    # to this store while it closes.
    under_torchrun = _under_torchrun()
    tcp = TCPStore(
        ranks.main_address,
        ranks.main_port + (0 if under_torchrun else 1),
        is_master=ranks.rank == 0 and not under_torchrun,
        timeout=datetime.timedelta(minutes=10),
        wait_for_workers=False,
    )
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"distdl/{restart}", tcp)
    if message is not None:
        store.set("run", message)
    received = store.get("run").decode()
    store.add("received", 1)
    # Without torchrun rank 0 hosts the store, so it waits until all ranks have the message.
    while ranks.rank == 0 and not under_torchrun and store.add("received", 0) < ranks.world_size:
        time.sleep(0.05)
    return received
