"""Ranks that stay: one process group per topology runs case after case, since a start is slow.

A case is what the command line would be given. Each rank builds and trains it as a worker does,
from the composed config on; what comes back is what rank 0 saw.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.conftest import ROOT, environment
from tests.warm import Popen

if TYPE_CHECKING:
    from distdl.worker.build import Built


@dataclass
class Case:
    """One training.

    Args:
        overrides: As on the command line.
        folder: The run's directory; checkpoints lie below it.
        resume: A checkpoint to resume from.
        fit: False: no training, only what follows.
        validate: Afterwards, in the same process, validate the checkpoint that was written last.
        stop_after: Step after which the last rank is asked to end, as by a signal; 0: none.
        call: "module:function" to call instead, with the folder and the overrides; its pairs are
            what each rank has `found`.
    """

    overrides: Sequence[str]
    folder: Path
    resume: Path | None = None
    fit: bool = True
    validate: bool = False
    stop_after: int = 0
    call: str = ""


@dataclass
class Seen:
    """What rank 0 saw.

    Args:
        losses: Of each micro-batch, the mean over the ranks.
        metrics: The last value of each.
        validated: Those of the validation afterwards.
        counts: On simulated GPUs, by rank and step, as tests.gpu_rehearsal.counting has them.
        found: By rank: what `call` gave.
        error: A traceback, or nothing.
    """

    losses: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    validated: dict[str, float] = field(default_factory=dict)
    counts: list[list[dict[str, int]]] = field(default_factory=list)
    found: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""


class Ranks:
    """A process group of `size` gloo ranks on this machine, which trains what it is told.

    Args:
        module: What each rank runs; its `main` is ours, or is like it.
        more: Variables of its environment.
    """

    def __init__(self, size: int, folder: Path, module: str = __name__, **more: str) -> None:
        self.size, self.log = size, folder / f"ranks-{size}.log"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        self._output = self.log.open("w")
        self._ranks = [
            Popen(
                [sys.executable, "-m", module],
                cwd=ROOT,
                env=environment(
                    RANK=str(rank),
                    LOCAL_RANK=str(rank),
                    WORLD_SIZE=str(size),
                    LOCAL_WORLD_SIZE=str(size),
                    MASTER_ADDR="127.0.0.1",
                    MASTER_PORT=port,
                    DISTDL_LAUNCHER="local",
                    **more,
                ),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if rank == 0 else self._output,
                stderr=self._output,
                text=True,
            )
            for rank in range(size)
        ]

    def train(self, case: Case, timeout: float = 120) -> Seen:
        """Trains it on all ranks, and fails with the ranks' own traceback."""
        seen = self.attempt(case, timeout)
        assert not seen.error, f"{case}\n{seen.error}"
        return seen

    def attempt(self, case: Case, timeout: float = 120) -> Seen:
        line = json.dumps(vars(case), default=str) + "\n"
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(line)
            rank.stdin.flush()
        reader = self._ranks[0].stdout
        assert reader is not None
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            answer = reader.readline()
            if answer.startswith("SEEN "):
                return Seen(**json.loads(answer.removeprefix("SEEN ")))
            if not answer:
                break
        raise AssertionError(f"the ranks ended:\n{self.log.read_text()[-6000:]}")

    def close(self) -> None:
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.close()
        for rank in self._ranks:
            try:
                rank.wait(20)
            except subprocess.TimeoutExpired:
                rank.kill()
        self._output.close()


@functools.cache
def shared(size: int) -> Ranks:
    """The ranks that all tests of this process share; they end with it."""
    folder = tempfile.TemporaryDirectory(prefix="ranks-")
    ranks = Ranks(size, Path(folder.name))
    atexit.register(lambda: (ranks.close(), folder.cleanup()))
    return ranks


def train(case: Case) -> Seen:
    """One case on this rank."""
    from contextlib import suppress

    from lightning.pytorch import Callback

    from distdl import tasks
    from distdl.distributed import process_group
    from distdl.job import JobState
    from distdl.ranks import stopping

    if case.call:
        module, _, name = case.call.partition(":")
        function = getattr(importlib.import_module(module), name)
        found = dict(function(Path(case.folder), *case.overrides))
        return Seen(found=process_group.gather(found))
    seen, stop = Seen(), stopping.StopRequest()

    class Watch(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, index) -> None:
            loss = outputs["loss"] if isinstance(outputs, dict) else outputs
            losses = process_group.gather(float(loss))
            seen.losses.append(sum(losses) / len(losses))
            last = trainer.global_rank == trainer.world_size - 1
            if last and case.stop_after == trainer.global_step > 0:
                stop.state, stop.signal = JobState.PREEMPTED, "SIGTERM"

    built = built_of(case, stop)
    built.trainer.callbacks.insert(0, Watch())
    if case.fit:
        with suppress(stopping.Stopped):
            seen.metrics = tasks.train(built)
    if case.validate:
        seen.validated = tasks.validate(built, "last")
    return seen


def built_of(case: Case, stop: Any = None) -> Built:
    """A case from the command line's words on, as the worker builds it."""
    from distdl.checkpoint import fetching
    from distdl.config import compose, resources
    from distdl.config import recipe as configs
    from distdl.ranks import environment, stopping
    from distdl.runs.directory import Attempt, RunDirectory
    from distdl.worker.build import build

    here = environment.resolve()
    config = compose.compose([*case.overrides, f"trainer.devices={here.local_world_size}"])
    size = resources.resolve(configs.plain(config.trainer), local=True)
    folder = Path(case.folder)
    run = RunDirectory(folder)
    folder.mkdir(parents=True, exist_ok=True)
    chosen = fetching.provide(str(case.resume) if case.resume else None, folder, here)
    attempt = Attempt(run.path / "attempts/001")
    stop = stopping.StopRequest() if stop is None else stop  # one that is not asked is false
    return build(config, run, attempt, here, size, stop, [], chosen)


def main(train: Callable[[Case], Seen] = train, accelerator: str = "cpu") -> None:
    import warnings

    import torch

    from distdl.distributed import process_group
    from distdl.ranks import environment
    from distdl.worker import allocator

    warnings.filterwarnings("ignore")
    if accelerator == "cpu":
        allocator.keep_freed_memory()  # as a worker does
    torch.set_num_threads(1)
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print
    here = environment.resolve()
    process_group.connect(here, accelerator)
    for line in sys.stdin:
        case = json.loads(line)
        try:
            seen = train(Case(**case))
        except BaseException:
            seen = Seen(error=traceback.format_exc())
        if here.rank == 0:
            answer.write("SEEN " + json.dumps(vars(seen)) + "\n")
            answer.flush()
        elif seen.error:
            print(seen.error, file=sys.stderr, flush=True)
    process_group.disconnect()


if __name__ == "__main__":
    main()
