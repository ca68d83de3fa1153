"""Processes that multiprocessing starts for a rank: who ends them, and who does not."""

import signal
import subprocess
import sys
from contextlib import suppress

import psutil
import pytest

from tests.conftest import matrix_only

# A rank, whose helpers get every signal that ends a job: from their birth on, on every thread.
RANK = """
import multiprocessing, os, signal, subprocess, sys, threading, time
from concurrent.futures import ProcessPoolExecutor
from distdl.util import helpers

NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)

def work(connection):
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    program = subprocess.Popen(["sleep", "60"])  # a helper's own program obeys
    program.terminate()
    connection.send(program.wait())
    while (asked := connection.recv()) != "stuck":
        connection.send(asked)
    time.sleep(60)

def tidy(connection):
    signal.signal(signal.SIGTERM, lambda *_: (connection.send("tidied"), os._exit(0)))
    work(connection)

def double(x):
    return 2 * x

def storm(pids):
    for _ in range(5):
        for number in NUMBERS:
            for pid in pids:
                os.kill(pid, number)
        time.sleep(0.02)

if __name__ == "__main__":
    for number in NUMBERS:
        signal.signal(number, lambda *_: None)
    helpers.outlived_by_helpers()
    context = multiprocessing.get_context(sys.argv[1])
    def begun(target, daemon):
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(theirs,), daemon=daemon)
        process.start()
        for number in NUMBERS if target is work else ():
            os.kill(process.pid, number)  # before it has begun
        return process, ours
    for target, daemon, code in ((work, True, -9), (work, False, -15), (tidy, False, 0)):
        process, connection = begun(target, daemon)
        assert connection.recv() == -signal.SIGTERM
        if target is work:
            storm([process.pid])
        connection.send("ping")
        assert connection.recv() == "ping"
        process.terminate()
        if target is tidy:
            assert connection.recv() == "tidied"
        process.join(20)
        assert process.exitcode == code, (target, daemon, process.exitcode)
    with context.Manager() as manager, context.Pool(2) as pool:
        shared = manager.dict(a=1)
        futures = ProcessPoolExecutor(2, context)
        assert [*futures.map(double, range(3))] == [0, 2, 4]
        storm([process.pid for process in multiprocessing.active_children()])
        assert pool.map(double, range(3)) == [*futures.map(double, range(3))] == [0, 2, 4]
        assert shared["a"] == 1
        futures.shutdown()
    process, connection = begun(work, True)
    connection.recv()
    print(process.pid, flush=True)
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("start", ["fork", "spawn", pytest.param("forkserver", marks=matrix_only)])
def test_a_helper_ends_when_its_rank_says_so(start, tmp_path):
    """By `terminate()`, or once the rank is gone: no signal that ends a job does it before."""
    (tmp_path / "rank.py").write_text(RANK)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    rank = subprocess.Popen([sys.executable, "rank.py", start], cwd=tmp_path, **pipes)
    helper = rank.stdout.readline().strip()
    rank.stdin.close()
    assert helper
    assert rank.wait(60) == -signal.SIGKILL
    with suppress(psutil.NoSuchProcess):  # its end of a pipe may have told it
        process = psutil.Process(int(helper))
        process.terminate()
        process.wait(20)


# A loader's worker: with torch, whose own handler of SIGTERM comes late, and ends it.
LOADER = """
import os, signal, sys, threading, time
import torch
from torch.utils.data import DataLoader, Dataset, _utils
from distdl.util import helpers

_utils.MP_STATUS_CHECK_INTERVAL = 60.0  # on a busy machine a worker may need more than 5 s to end
NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)

class Rows(Dataset):
    def __len__(self):
        return 100
    def __getitem__(self, index):
        return index

def slow(worker):  # the signals come before a worker_init_fn has ended
    time.sleep(0.3)

if __name__ == "__main__":
    for number in NUMBERS:
        signal.signal(number, lambda *_: None)
    helpers.outlived_by_helpers()
    more = {"multiprocessing_context": sys.argv[1], "worker_init_fn": slow}
    loader = DataLoader(Rows(), 10, num_workers=2, persistent_workers=True, **more)
    for epoch in range(2):
        seen = []
        batches = iter(loader)
        for batch in batches:
            for worker in batches._workers:
                for number in NUMBERS:
                    os.kill(worker.pid, number)
            seen += batch.tolist()
        assert sorted(seen) == [*range(100)]
    batches._shutdown_workers()
    assert [worker.exitcode for worker in batches._workers] == [0, 0]  # by themselves
    left = iter(DataLoader(Rows(), 10, num_workers=1, **more))  # alive at the end, which ends it
    next(left)
"""


OTHERS = [pytest.param(start, marks=matrix_only) for start in ("spawn", "forkserver")]


@pytest.mark.parametrize("start", ["fork", *OTHERS])
def test_a_loader_outlives_the_signals(start, tmp_path):
    (tmp_path / "rank.py").write_text(LOADER)
    # On one core torch warns of two workers.
    command = [sys.executable, "-W", "ignore::UserWarning", "rank.py", start]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")


# The first fork hangs where Python 3.11 does: before anything of the child's own.
HANGS = """
import multiprocessing, os, resource, time
from distdl.util import helpers

fork = os.fork
forks = []

def hanging():
    forks.append(1)
    pid = fork()
    if pid == 0 and len(forks) == 1:
        time.sleep(60)
    return pid

if __name__ == "__main__":
    helpers.outlived_by_helpers()
    helpers.BIRTH_S = 0.5
    resource.setrlimit(resource.RLIMIT_NOFILE, (2000, 2000))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]  # select takes 1024 files
    os.fork = hanging
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    def nested():
        child = context.Process(target=theirs.send, args=("begun",))
        child.start()
        child.join()
    process = context.Process(target=nested)
    process.start()
    process.join()
    print(len(forks), process.exitcode, ours.recv())
"""


def test_a_fork_that_hangs_is_repeated(tmp_path):
    (tmp_path / "hangs.py").write_text(HANGS)
    command = [sys.executable, str(tmp_path / "hangs.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["2", "0", "begun"], done
    assert "did not begin after its fork" in done.stderr


# A signal for the whole process would go to the other thread here; one for the main thread waits.
TAKEN = """
import multiprocessing, signal, threading, time
from distdl.util import helpers

def work(connection):
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, [helpers.END])
    connection.send("ready")
    connection.recv()
    connection.send(helpers.END in signal.sigpending())

if __name__ == "__main__":
    helpers.outlived_by_helpers()
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=work, args=(theirs,))
    process.start()
    ours.recv()
    process.terminate()
    ours.send("terminated")
    print(ours.recv())
    process.kill()
"""


def test_terminate_reaches_the_main_thread(tmp_path):
    """Only this one runs a handler of Python's: a main thread that waits would never end."""
    (tmp_path / "taken.py").write_text(TAKEN)
    command = [sys.executable, str(tmp_path / "taken.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == "True\n", done
