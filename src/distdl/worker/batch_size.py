"""`data.batch_size=auto`: the largest batch of a device with which the run trains.

On GPUs it is tried: on all ranks together, fresh processes train a few steps with growing batches,
until one is out of memory, which never reaches the run. Elsewhere, as memory is the system's, it is
what `distdl plan` measures without memory, and the memory that is free. The choice is kept as by
`distdl.worker.kept_choices`: the global batch and the rate of learning follow from it.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch
from omegaconf import DictConfig

from distdl.config.heaviest import heaviest
from distdl.config.recipe import plain
from distdl.distributed import process_group
from distdl.health import machine
from distdl.util import loopback
from distdl.util.errors import UserError
from distdl.worker import batch_trial, kept_choices, named_tools
from distdl.worker.batch_trial import TrialOutcome, TrialRequest
from distdl.worker.build import make
from distdl.worker.rank_context import RankContext

KEY = "data.batch_size"
FIRST, MOST = 2, 1 << 20  # batches that are tried
# The chosen batch is nearer than this to one that does not train.
CLOSE = 1.05
# Large batches are multiples of this, with which kernels are fastest.
EVEN, LARGE = 8, 160
LOOK_S = 0.3  # between two looks at the trials
# Data whose batches are not all of one shape.
OF_ALL_SIZES = ("distdl.data.StoredObjects",)
GRACE_S = 5.0  # for the processes of other ranks, once one has failed

# Tries batches in a fresh process of each rank, in order, up to the first that does not train.
Try = Callable[[Sequence[int]], list[TrialOutcome]]


def tuned(config: DictConfig, context: RankContext) -> DictConfig:
    """Returns the config with a number. Raises a UserError if no batch trains. Collective."""
    if str(config.data.get("_target_")) in OF_ALL_SIZES:
        text = "batch_size: images differ in size, so later batches may need more memory than these"
        kept_choices.report(context.environment, text)
    if context.resources.accelerator == "gpu":
        seen: list[TrialOutcome] = []
        wanted = heaviest(config)

        def attempted(batches: Sequence[int]) -> list[TrialOutcome]:
            outcomes = tried(wanted, context, batches)
            for each in outcomes:
                kept_choices.report(context.environment, "batch_size: %s", line(each))
            seen.extend(outcomes)
            return outcomes

        chosen = largest(attempted)
        lines = [*map(line, seen)]
    else:
        planned = planned_for(config, context) if context.environment.rank == 0 else (0, "")
        chosen, reason = process_group.broadcast(planned)
        kept_choices.report(context.environment, "batch_size: %s", reason)
        lines = [reason]
    name = f"{KEY}={chosen}"
    return kept_choices.freeze(config, context, "batch_size", {KEY: chosen}, name, lines)


def largest(attempted: Try) -> int:
    """The largest batch that trains: doubled until one does not, then halfway between. One counts
    as too large if it fails as the first of a fresh process, whose memory is not fragmented.

    Raises:
        UserError: None trains.
    """
    fits, fails = 0, MOST
    start = FIRST
    while fails == MOST and start < MOST:
        outcomes = attempted([start << n for n in range(21) if start << n < MOST])
        fits = max([fits, *(each.batch for each in outcomes if not each.why)])
        last = outcomes[-1]
        if not last.why:
            break
        if len(outcomes) == 1:
            fails = last.batch
        start = last.batch
    if not fits:
        (last,) = attempted([1])
        if last.why:
            what = f"no batch trains on these devices: {last.why}"
            remedy = "a number, as data.batch_size=32, shows the whole error"
            if last.no_memory:
                remedy = "docs/memory.md says what to try: model.recompute=blocks, strategy=fsdp"
            raise UserError.at(KEY, what=what, remedy=remedy, code="failed")
        return 1
    while (between := _between(fits, fails)) is not None:
        (outcome,) = attempted([between])
        if outcome.why:
            fails = between
        else:
            fits = between
    return fits


def _between(fits: int, fails: int) -> int | None:
    """The next batch to try; None if the two are close enough."""
    middle = (fits + fails) // 2
    if middle >= LARGE:
        middle -= middle % EVEN
    return middle if fits < middle < fails and fails > CLOSE * fits else None


def line(outcome: TrialOutcome) -> str:
    """One row of what is logged and kept in launch.yaml."""
    took = outcome.why or f"trains, with {outcome.memory / 2**30:.2f} GiB of a device"
    return f"{KEY}={outcome.batch:<8} {took}"


def tried(config: DictConfig, context: RankContext, batches: Sequence[int]) -> list[TrialOutcome]:
    """Tries batches in a fresh process of each rank; of each batch the outcome on all ranks.
    Collective.

    Raises:
        Stopped: A rank was asked to end.
        UserError: A process ended without an outcome, for another reason than a signal.
    """
    environment = context.environment
    if environment.world_size > 1:
        port = process_group.broadcast(_free_port())
        environment = replace(environment, main_port=port)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "outcomes"
        request = TrialRequest(
            config, tuple(batches), environment, context.resources, file, os.getpid()
        )
        with _started(request) as process:
            code = _ended(process, context)
        text = file.read_text(encoding="utf-8") if file.exists() else ""
    mine = [TrialOutcome(**json.loads(each)) for each in text.splitlines()]
    return _on_all_ranks(batches, process_group.gather((mine, code)))


def _ended(process: subprocess.Popen[bytes], context: RankContext) -> int | None:
    """Waits for the processes of all ranks, and returns the exit code of this rank's. Those that
    wait for one that has failed get a few seconds: then it is None."""
    codes: list[int | None] = [None]
    patience = GRACE_S
    while None in codes and patience > 0:
        time.sleep(LOOK_S)
        process_group.check_all(context.stop, "before training began")
        codes = process_group.gather(process.poll())
        if any(codes):
            patience -= LOOK_S
    return process.poll()


def _on_all_ranks(
    batches: Sequence[int], of_ranks: Sequence[tuple[Sequence[TrialOutcome], int | None]]
) -> list[TrialOutcome]:
    """The outcomes that hold for all ranks, up to the first batch that does not train."""
    together: list[TrialOutcome] = []
    for number, batch in enumerate(batches):
        each = [outcomes[number] for outcomes, _ in of_ranks if number < len(outcomes)]
        failed = [outcome for outcome in each if outcome.why]
        if failed:  # the lack of memory of one makes the others lose it
            return [*together, max(failed, key=lambda outcome: outcome.no_memory)]
        if len(each) < len(of_ranks):
            codes = [code for outcomes, code in of_ranks if number >= len(outcomes)]
            return [*together, _without_outcome(batch, codes)]
        together.append(max(each, key=lambda outcome: outcome.memory))
    return together


def _without_outcome(batch: int, codes: Sequence[int | None]) -> TrialOutcome:
    """Of processes that said nothing: some were killed, for the memory of the host."""
    killed = next((-code for code in codes if code is not None and code < 0), None)
    if killed is None:
        raise UserError.at(
            KEY,
            what=f"the processes that tried a batch of {batch} ended with exit codes {codes}",
            remedy="a number, as data.batch_size=32",
            code="failed",
        )
    return TrialOutcome(batch, why=f"its process was killed by signal {killed}", no_memory=True)


@contextmanager
def _started(request: TrialRequest) -> Iterator[subprocess.Popen[bytes]]:
    """The process of a trial, which is ended at the end."""
    quiet = subprocess.DEVNULL
    # Its ranks meet at a port of their own, and not at that of torchrun's agent.
    variables = {**os.environ, "TORCHELASTIC_USE_AGENT_STORE": "False"}
    process = subprocess.Popen(
        [sys.executable, "-P", batch_trial.__file__],
        stdin=subprocess.PIPE,
        stdout=quiet,
        stderr=quiet,
        env=variables,
    )
    try:
        assert process.stdin is not None
        # Its exit code says why it has ended already.
        with suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(json.dumps(sys.path).encode() + b"\n" + pickle.dumps(request))
        yield process
    finally:
        process.kill()
        process.wait()


def _free_port() -> int:
    with loopback.listen() as probe:
        return int(probe.getsockname()[1])


def planned_for(config: DictConfig, context: RankContext) -> tuple[int, str]:
    """The batch that the planner finds for the free memory, and the reason.

    Raises:
        UserError: Not even one sample fits, or a step cannot be measured.
    """
    ranks = context.environment.local_world_size
    memory = free_memory(context.resources.accelerator) / ranks
    world = context.environment.world_size
    found = named_tools.planner().largest_batch(config, world, memory)
    samples = samples_in(config)
    if samples is not None and found.batch * world > samples:
        batch = max(1, samples // world)
        return batch, f"{batch}: an epoch has no more than {samples:,} samples"
    return found.batch, f"{found.batch}: {found.reason}"


def free_memory(accelerator: str) -> float:
    """Bytes for all ranks of this machine."""
    if accelerator == "mps":
        return float(torch.mps.recommended_max_memory())
    known = machine.memory(os.getpid())
    free = known["available"]
    if "limit" in known:  # of a container, which may have less than its machine
        free = min(free, known["limit"] - known["used"])
    return float(free)


def samples_in(config: DictConfig) -> int | None:
    """The samples of an epoch; None if the training loader does not say."""
    data = make({**plain(config.data), "batch_size": 1})
    data.setup("fit")
    try:
        return len(data.train_dataloader().dataset)
    except (AttributeError, TypeError):
        return None
