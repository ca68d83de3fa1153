"""What ranks print, on its way into their files; tests/cli/test_secrets.py shows its redaction."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from distdl.worker.rank_output import RankOutput


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
def test_a_full_disk_stops_no_rank(tmp_path: Path) -> None:
    """Its pipe, and those of the others, are emptied on."""
    with RankOutput(tmp_path, 2) as output:
        full = os.open(output.pipe_to("/dev/full"), os.O_WRONLY)
        os.write(full, b"lost\n")
        other = os.open(output.pipe_to(str(tmp_path / "there")), os.O_WRONLY)
        for number in range(2000):  # more than a pipe holds
            os.write(full, b"x" * 99 + b"\n")
            os.write(other, b"%d\n" % number)
        os.close(full)
        os.close(other)
    assert (tmp_path / "there").read_text().split()[-1] == "1999"
