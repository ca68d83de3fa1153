"""A training on a rank with a simulated GPU: what the runtime counted in each step."""

import ctypes
import faulthandler
import os
import signal
import sys

import torch.distributed as dist
from lightning.pytorch import Callback

from tests.strategies.ranks import Case, built_of


class Counting(Callback):
    """The first of the callbacks, for one training without accumulation.

    steps[k - 1]: counts of step k, of what follows it (reports, checkpoints) and of fetching the
    next batch.
    """

    def __init__(self):
        self._read = ctypes.CDLL(None).rehearsal_counter
        self._read.restype = ctypes.c_char_p
        self._before = None
        self.steps = []
        if "REHEARSAL_TRACE" in os.environ:  # streamsync, devicesync or pageable
            faulthandler.register(signal.SIGUSR2, all_threads=False)

    def on_train_batch_start(self, *_):
        now = dict(self._counters())
        before = self._before
        if before is not None:
            self.steps.append({name: now[name] - before[name] for name in now})
        self._before = now

    def _counters(self):
        value = ctypes.c_long()
        index = 0
        while name := self._read(index, ctypes.byref(value)):
            yield name.decode(), value.value
            index += 1


def train(folder, resume, *overrides):
    """A case of the ranks: its counts; `resume` is a checkpoint or empty."""
    from distdl import tasks
    from distdl.distributed import process_group

    alone = not dist.is_initialized()
    counting = Counting()
    built = built_of(Case(overrides, folder, resume=resume or None))
    built.trainer.callbacks.insert(0, counting)
    try:
        tasks.train().run(built)
        yield "steps", counting.steps
    finally:
        # What one rank opened for itself is not for the next case; but DeepSpeed keeps its first
        # group for good.
        if alone and "deepspeed" not in sys.modules:
            process_group.disconnect()
