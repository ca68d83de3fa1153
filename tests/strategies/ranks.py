"""Ranks that stay: one process group per topology runs case after case, since a start is slow.

A case is what the command line would be given. Each rank builds and trains it as a worker does,
from the composed config on; what comes back is what rank 0 saw.
"""

import atexit
import functools
import json
import os
import pkgutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.conftest import ROOT, environment, free_port
from tests.warm import Popen

MOST_MEMORY = 3 << 30  # bytes of a rank
# What keeps its process groups for the next training: DeepSpeed in variables of its modules, and
# torch's DTensor in what it remembers of operations on a mesh of several dimensions.
KEEPS_GROUPS = ("strategy=deepspeed", "strategy=model_parallel")


@dataclass
class Case:
    """One training."""

    overrides: Sequence[str]  # as on the command line
    folder: Path  # the run's directory; checkpoints lie below it
    resume: Path | None = None  # a checkpoint
    fit: bool = True  # False: no training, only what follows
    validate: bool = False  # afterwards, the checkpoint that was written last
    stop_after: int = 0  # step after which the last rank is asked to end, as by a signal; 0: none
    call: str = ""  # "module:function" to call instead, with the folder and the overrides


@dataclass
class Seen:
    """What rank 0 saw."""

    losses: list[float] = field(default_factory=list)  # of each micro-batch, the mean of the ranks
    metrics: dict[str, float] = field(default_factory=dict)  # the last value of each
    validated: dict[str, float] = field(default_factory=dict)  # those of the validation afterwards
    ranks: list[Any] = field(default_factory=list)  # results of `call`, or what a pipeline has
    error: str = ""  # a traceback


class Ranks:
    """A process group of `size` ranks on this machine; `more`: variables of their environment."""

    def __init__(self, size, folder, accelerator="cpu", **more):
        self.log = folder / f"ranks-{size}.log"
        self.size = size
        self.accelerator = accelerator
        sizes = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        self.more = {**more, **sizes, "MASTER_ADDR": "127.0.0.1", "DISTDL_LAUNCHER": "local"}
        self._start()

    def _start(self):
        port = str(free_port())
        self._output = self.log.open("a")
        options = {"cwd": ROOT, "stdin": subprocess.PIPE, "stderr": self._output, "text": True}
        self._ranks = [
            Popen(
                [sys.executable, "-m", __name__, self.accelerator],
                env=environment(
                    RANK=str(rank), LOCAL_RANK=str(rank), MASTER_PORT=port, **self.more
                ),
                stdout=self._output if rank else subprocess.PIPE,
                **options,
            )
            for rank in range(self.size)
        ]

    def _refresh(self):
        """Starts them anew if a training before has ended them, or many have filled their memory:
        engines and graphs of a hundred trainings stay in it."""
        used = [memory_of(rank.pid) for rank in self._ranks]
        if min(used) == 0 or max(used) > MOST_MEMORY:
            self.close()
            self._start()

    def train(self, case, timeout=120):
        """Trains it on all ranks, and fails with the ranks' own traceback."""
        self._refresh()
        line = json.dumps(vars(case), default=str) + "\n"
        for rank in self._ranks:
            rank.stdin.write(line)
            rank.stdin.flush()
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and (answer := self._ranks[0].stdout.readline()):
            if answer.startswith("SEEN "):
                seen = Seen(**json.loads(answer.removeprefix("SEEN ")))
                assert not seen.error, f"{case}\n{seen.error}"
                return seen
        raise AssertionError(f"the ranks ended:\n{self.log.read_text()[-6000:]}")

    def close(self):
        for rank in self._ranks:
            with suppress(BrokenPipeError):
                rank.stdin.close()
        for rank in self._ranks:
            with suppress(subprocess.TimeoutExpired):
                rank.wait(20)
            rank.kill()
        self._output.close()


def memory_of(pid):
    """The bytes in memory of a process; 0: it has ended."""
    with suppress(psutil.Error):
        return int(psutil.Process(pid).memory_info().rss)
    return 0


@functools.cache
def shared(size):
    """The ranks that all tests of this process share; they end with it."""
    folder = tempfile.TemporaryDirectory(prefix="ranks-")
    ranks = Ranks(size, Path(folder.name))
    atexit.register(lambda: (ranks.close(), folder.cleanup()))
    return ranks


def called(case):
    """The results of `case.call` on every rank, and the errors of a check that fails on one."""
    from distdl.distributed import process_group

    results = {}
    error = ""
    try:
        results = dict(pkgutil.resolve_name(case.call)(Path(case.folder), *case.overrides) or {})
    except Exception:  # every rank tells its own, whatever it is
        error = traceback.format_exc()
    errors = "".join(process_group.gather(error))
    return Seen(ranks=process_group.gather(results), error=errors)


def trained(case):
    """A training on this rank."""
    from lightning.pytorch import Callback

    from distdl import tasks
    from distdl.distributed import process_group
    from distdl.job import JobState
    from distdl.ranks.stopping import Stopped, StopRequest
    from distdl.worker import performing

    seen = Seen()
    mine = {}
    stop = StopRequest()

    class Watch(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, index):
            loss = outputs["loss"] if isinstance(outputs, dict) else outputs
            losses = process_group.gather(float(loss))
            seen.losses.append(sum(losses) / len(losses))
            mine["device"] = batch["image"][0].device.type  # of a tensor or of a list
            last = trainer.global_rank == trainer.world_size - 1
            if last and case.stop_after == trainer.global_step > 0:
                stop.state = JobState.PREEMPTED
                stop.signal = "SIGTERM"

    built = None

    def build(again=False):
        nonlocal built
        built = built_of(case, stop, again)
        built.trainer.callbacks.insert(0, Watch())
        return built

    if case.fit:
        with suppress(Stopped):
            _, seen.metrics = performing.built_and_performed(tasks.train(), build)
    else:
        build()
    if case.validate:
        mine["validated"] = seen.validated = tasks.validate("last").run(built)
    seen.ranks = process_group.gather(mine)
    return seen


def built_of(case, stop=None, again=False):
    """A case from the command line's words on, as the worker builds it; `again`: once its fit was
    left."""
    from distdl.checkpoint import fetching
    from distdl.config import compose, resources
    from distdl.config import recipe as configs
    from distdl.config.schema import Size
    from distdl.ranks import environment
    from distdl.ranks.stopping import StopRequest
    from distdl.runs.directory import Attempt, RunDirectory
    from distdl.worker import performing
    from distdl.worker.build import build

    here = environment.resolve()
    config = compose.compose([*case.overrides, f"trainer.devices={here.local_world_size}"])
    size = resources.resolve(Size.of(configs.plain(config.trainer)), local=True)
    run = RunDirectory(Path(case.folder))
    run.path.mkdir(parents=True, exist_ok=True)
    resumed = case.resume
    if again:
        resumed = performing.newest_checkpoint(config, run) or case.resume
    chosen = fetching.provide(str(resumed) if resumed else None, run.path, here)
    attempt = Attempt(run.path / "attempts/001")
    stop = StopRequest() if stop is None else stop  # one that is not asked is false
    return build(config, run, attempt, here, size, stop, [], chosen, again=again)


def end_groups(lasting, case):
    """Ends the process groups that a case has made, since each of gloo's has a thread that wakes
    100 times a second.

    Args:
        lasting: The groups that stay; those of `KEEPS_GROUPS` are added.
    """
    import torch.distributed as dist

    made = [group for group in groups() if group not in lasting]
    if any(word.startswith(KEEPS_GROUPS) for word in case.overrides):
        lasting += made
        return
    for group in reversed(made):
        dist.destroy_process_group(group)


def groups():
    """Those of this process, oldest first."""
    from torch.distributed import distributed_c10d

    return list(distributed_c10d._world.pg_map)


def main(accelerator):
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
    lasting = groups()
    for line in sys.stdin:
        case = Case(**json.loads(line))
        try:
            seen = called(case) if case.call else trained(case)
        except BaseException:  # a training may raise anything
            seen = Seen(error=traceback.format_exc())
        end_groups(lasting, case)
        if here.rank == 0:
            print("SEEN", json.dumps(vars(seen)), file=answer, flush=True)
        elif seen.error:
            print(seen.error, file=sys.stderr, flush=True)
    process_group.disconnect()


if __name__ == "__main__":
    main(sys.argv[1])
