"""How a rank's process ends, and what does not end it."""

import os
import subprocess
import sys
import time

import pytest

from distdl.ranks import process_exit

EXITS = [
    (75, "slurm", 0),  # srun would kill the others, who may still write
    (130, "mpi", 0),
    (75, "local", 75),
    (7, "mpi", 7),  # launchers/mpi/rank.py tells hydra to end the others
]


@pytest.mark.parametrize("code, launcher, ends", EXITS)
def test_how_a_rank_exits(monkeypatch, code, launcher, ends):
    """In a fork of this process; an evicted rank waits for its node to go."""
    monkeypatch.setenv("DISTDL_LINGER_SECONDS", "0.2")
    started = time.monotonic()
    if not (child := os.fork()):
        process_exit.exit_process(code, launcher)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == ends
    assert time.monotonic() - started > (0.2 if code == 75 else 0)


def test_a_reader_that_has_ended_does_not_end_the_training(monkeypatch):
    """`distdl ... | head -3`."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        process_exit.survive_closed_pipes()
        print("seen", flush=True)
        assert os.read(reading, 100) == b"seen\n"
        os.close(reading)
        for _ in range(2):
            print("not seen", flush=True)
        monkeypatch.undo()


STAYS = """
import threading, time; from distdl.ranks import process_exit
process_exit.report_waiting_threads(0.05)
threading.Thread(target=time.sleep, args=(0.4,), name='my-pump').start()
"""


def test_a_thread_that_keeps_the_process_is_named():
    done = subprocess.run([sys.executable, "-c", STAYS], capture_output=True, text=True)
    assert done.returncode == 0
    assert "waits for threads of your code: my-pump (" in done.stderr
