"""A thread that records the load of a node in the journal."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distdl.config.resources import listed
from distdl.tracking.journal import Journal

log = logging.getLogger(__name__)

GIB = float(1 << 30)


class SystemMetrics:
    """Records a sample of this node's load in the journal every `interval` seconds until `stop`.

    Keys are `system/cpu_percent`, `memory_percent`, `memory_gib`, `disk_percent` (of the disk with
    the path `disk`), `network_received_mb_per_second`, `network_sent_mb_per_second` and, for each
    NVIDIA GPU that this process may use, `gpu0_percent`, `gpu0_memory_gib`, `gpu0_power_watts`. On
    nodes other than 0 the prefix is `system/node<n>/`. The step is the last one that training
    logged. If a source fails, the sample lacks its values, and the next sample tries it again.
    """

    def __init__(self, journal: Journal, interval: float, node_rank: int, disk: Path) -> None:
        self.journal = journal
        self.interval = interval
        self.disk = disk
        self.prefix = "system/" if node_rank == 0 else f"system/node{node_rank}/"
        self.sources = [self._host, self._network, self._gpus]
        self._failed: set[str] = set()
        self._last: tuple[float, int, int] | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="system-metrics", daemon=True)
        self.start = self._thread.start

    def stop(self) -> None:
        """Takes the last sample and ends. Waits at most 2 s, as a call of a driver may hang."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(2.0)

    def sample(self) -> dict[str, float]:
        """The current values, with this node's prefix."""
        values: dict[str, float] = {}
        for source in self.sources:
            try:
                values.update(source())
            except Exception as error:  # drivers and the kernel; never ends a training
                name = source.__name__.strip("_")
                if name not in self._failed:
                    self._failed.add(name)
                    log.warning("system metrics: %s is left out for now (%s)", name, error)
        return {self.prefix + key: value for key, value in values.items()}

    def _run(self) -> None:
        self.sample()  # rates are computed from the second sample on
        while not self._stop.wait(self.interval):
            self.journal.put(self.sample(), self.journal.last_step)
        self.journal.put(self.sample(), self.journal.last_step)  # a short run has only this one

    def _host(self) -> dict[str, float]:
        import psutil

        memory = psutil.virtual_memory()
        return {
            "cpu_percent": psutil.cpu_percent(None),
            "memory_percent": memory.percent,
            "memory_gib": (memory.total - memory.available) / GIB,
            "disk_percent": psutil.disk_usage(str(self.disk)).percent,
        }

    def _network(self) -> dict[str, float]:
        import psutil

        count = psutil.net_io_counters()
        if count is None:
            return {}
        before = self._last
        self._last = (time.time(), count.bytes_recv, count.bytes_sent)
        if before is None:
            return {}
        seconds, *rates = (now - then for now, then in zip(self._last, before, strict=True))
        names = ("network_received_mb_per_second", "network_sent_mb_per_second")
        return {k: n / max(seconds, 1e-3) / 1e6 for k, n in zip(names, rates, strict=True)}

    @functools.cached_property
    def _handles(self) -> list[Any]:
        """The NVIDIA GPUs. A missing driver is not reported: a node may have no GPU."""
        import pynvml

        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return []
        by_index = pynvml.nvmlDeviceGetHandleByIndex
        by_uuid = pynvml.nvmlDeviceGetHandleByUUID
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            return [by_index(i) for i in range(pynvml.nvmlDeviceGetCount())]
        handles = []
        for name in listed(visible):
            with contextlib.suppress(pynvml.NVMLError):  # CUDA does not show an unknown GPU either
                handles.append(by_index(int(name)) if name.isdigit() else by_uuid(name))
        return handles

    def _gpus(self) -> dict[str, float]:
        import pynvml

        reads: dict[str, Callable[[Any], float]] = {
            "percent": lambda handle: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            "memory_gib": lambda handle: pynvml.nvmlDeviceGetMemoryInfo(handle).used / GIB,
            "power_watts": lambda handle: pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
        }
        values: dict[str, float] = {}
        for number, handle in enumerate(self._handles):
            for name, read in reads.items():
                # A virtual GPU may not report its power.
                with contextlib.suppress(pynvml.NVMLError):
                    values[f"gpu{number}_{name}"] = float(read(handle))
        return values
