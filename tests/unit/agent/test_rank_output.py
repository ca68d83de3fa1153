"""What ranks print is read, on a full disk and during a signal; tests/cli/test_secrets.py shows
that it is redacted."""

from __future__ import annotations

import os
import signal
import sys
import threading

import pytest

from distdl.agent.rank_output import RankOutput
from distdl.ranks.stopping import Ended, raise_on_signal


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
def test_a_full_disk_stops_no_rank(tmp_path):
    """Its pipe, and those of the others, are still emptied."""
    with RankOutput(tmp_path, 2) as output:
        paths = ("/dev/full", tmp_path / "there")
        full, other = (os.open(output.pipe_to(str(path)), os.O_WRONLY) for path in paths)
        for number in range(2000):  # more than a pipe holds
            os.write(full, b"x" * 99 + b"\n")
            os.write(other, b"%d\n" % number)
        os.close(full)
        os.close(other)
    assert (tmp_path / "there").read_text().split()[-1] == "1999"


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_signal_while_an_output_is_set_up_still_reads_what_came(moment, tmp_path, monkeypatch):
    """The start of a thread is such a moment: the job must end as PREEMPTED, with no traceback."""
    start = threading.Thread.start

    def with_signal(thread):
        if moment == "before":
            os.kill(os.getpid(), signal.SIGUSR1)
        start(thread)
        if moment == "after":
            os.kill(os.getpid(), signal.SIGUSR1)

    with pytest.raises(Ended), raise_on_signal(), RankOutput(tmp_path, 2) as output:
        first = os.open(output.pipe_to(str(tmp_path / "first")), os.O_WRONLY)
        os.write(first, b"what came\n")
        os.close(first)
        monkeypatch.setattr(threading.Thread, "start", with_signal)
        output.pipe_to(str(tmp_path / "second"))
    assert (tmp_path / "first").read_text() == "what came\n"
