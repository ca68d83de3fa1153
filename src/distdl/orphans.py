"""What becomes of the processes of a pool whose owner is gone."""

from __future__ import annotations

import multiprocessing
import os
import threading


def end_with_parent() -> None:
    """Ends this process with the one that spawned it: of a killed one (-9) it would wait for work
    for ever. For the initializer of a pool."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
