"""Ranks that stay, each with a simulated GPU: `python -m tests.gpu_rehearsal.ranks`."""

from __future__ import annotations

import sys

from tests.gpu_rehearsal.counting import Counting
from tests.strategies import ranks


def main() -> None:
    import torch.distributed as dist

    from distdl import tasks
    from distdl.distributed import process_group

    def train(case: ranks.Case) -> ranks.Seen:
        alone = not dist.is_initialized()
        built = ranks.built_of(case)
        counting = Counting()
        built.trainer.callbacks.insert(0, counting)
        try:
            metrics = tasks.train(built)
            counts = process_group.gather(counting.steps)
            return ranks.Seen(metrics=metrics, counts=counts)
        finally:
            # What one rank opened for itself is not for the next case; but DeepSpeed keeps its
            # first group for good.
            if alone and "deepspeed" not in sys.modules:
                process_group.disconnect()

    ranks.main(train, "gpu")


if __name__ == "__main__":
    main()
