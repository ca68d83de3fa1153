"""The peak memory of a real training step on a rank, as torch's trackers count it."""

from lightning.pytorch import Callback
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker

from distdl.tools.measure.sharded_step import NoNames
from tests.strategies import ranks

MEASURED = 2  # the number of the step, before which optimizer states have been made


class Peak(Callback):
    def __init__(self, of_fsdp):
        self.of_fsdp = of_fsdp
        self.tracker = None
        self.total = 0

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx != MEASURED:
            return
        if self.of_fsdp:
            self.tracker = FSDPMemTracker(module, trainer.optimizers[0])
            self.tracker.track_inputs((batch,))
        else:
            self.tracker = MemTracker()
            self.tracker._mod_tracker = NoNames()
            self.tracker.track_external(module, *trainer.optimizers, *batch.values())
        self.tracker.__enter__()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if self.tracker is None or batch_idx != MEASURED:
            return
        self.tracker.__exit__(None, None, None)
        (snapshot,) = (
            each
            for d, each in self.tracker.get_tracker_snapshot("peak").items()
            if d.type != "meta"
        )
        self.total = snapshot["Total"]
        self.tracker = None


def measured(folder, *overrides):
    """Called on each rank: the bytes at the peak of a step."""
    built = ranks.built_of(ranks.Case(overrides, folder))
    peak = Peak(of_fsdp="strategy=fsdp" in overrides)
    built.trainer.callbacks.append(peak)
    built.trainer.fit(built.module, datamodule=built.datamodule)
    return {"total": peak.total}
