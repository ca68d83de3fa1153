"""A disk and a control group that are soon full, and a store that hangs. A test is skipped where
there can be none."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.waiting import until

GROUPS = Path("/sys/fs/cgroup")
MEMORY = 64 << 20  # bytes


@contextmanager
def small_disk(folder: Path, megabytes: int = 2) -> Iterator[None]:
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "distdl-test", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted: {done.stderr}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


class HangingStore(NamedTuple):
    """A mounted folder, `path`, that shows another one, `behind`."""

    path: Path
    behind: Path
    process: subprocess.Popen[bytes]

    def hang(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def answer(self) -> None:
        self.process.send_signal(signal.SIGCONT)


@contextmanager
def hanging_store(folder: Path) -> Iterator[HangingStore]:
    """A store that can be made to hang, as a network mount does: each access blocks in the
    kernel."""
    if not shutil.which("bindfs"):
        pytest.skip("bindfs is not installed (make servers)")
    path, behind = folder / "store", folder / "behind"
    path.mkdir(), behind.mkdir()
    process = subprocess.Popen(["bindfs", "-f", str(behind), str(path)], stderr=subprocess.DEVNULL)
    store = HangingStore(path, behind, process)
    try:
        until(lambda: os.path.ismount(path) or process.poll() is not None, 20)
        if process.poll() is not None:
            pytest.skip("bindfs cannot mount: no FUSE here")
        yield store
    finally:
        store.answer()
        subprocess.run(["umount", "--lazy", str(path)], check=False)
        process.kill()
        process.wait()


@contextmanager
def little_memory() -> Iterator[Path]:
    """A control group of MEMORY bytes: below that of this process, or with version 2 beside it,
    since there a group with processes has no other groups."""
    rows = [
        line.split(":")
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    ]
    version_1 = next((path for _, names, path in rows if "memory" in names.split(",")), None)
    version_2 = next((path for number, _, path in rows if number == "0"), "/")
    if version_1 is not None:
        parent = GROUPS / f"memory{version_1}"
        limit = "memory.limit_in_bytes"
    else:
        parent = (GROUPS / version_2.lstrip("/")).parent
        limit = "memory.max"
    group = parent / f"distdl-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(MEMORY))
    except OSError as error:
        if group.exists():
            group.rmdir()
        pytest.skip(f"no control group can be made: {error}")
    try:
        yield group
    finally:
        until(lambda: not (group / "cgroup.procs").read_text(), 10)
        group.rmdir()
