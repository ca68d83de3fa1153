"""The first process of every pod's container: `python -m distdl.launchers.kubernetes.entry`.

It runs this pod's ranks (`pod_ranks.py`). Its exit code tells the Job controller what to do: 2
fails the job, 75 and disruptions start the pod again without counting, anything else is a failure.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from distdl.launchers.heartbeat import HostEnd
from distdl.launchers.kubernetes.first_process import Stop
from distdl.launchers.kubernetes.mirror import say
from distdl.launchers.kubernetes.pod_ranks import Pod, PodRanks
from distdl.util.errors import StoreError, UserError
from distdl.util.exit_codes import EXIT_FAILURE, EXIT_REFUSED

INDEX = "JOB_COMPLETION_INDEX"  # the Job controller sets it
MESSAGE = "DISTDL_TERMINATION_LOG"  # a file to use instead of
TERMINATION_LOG = "/dev/termination-log"  # which the kubelet shows in the pod's status
LONGEST_MESSAGE = 4096  # bytes of it that the kubelet reads


class CannotStart(Exception):
    """The run cannot start so: exit code 2, which no other start would change."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs this pod's ranks of an attempt, and returns the container's exit code."""
    stop = Stop()
    try:
        pod = pod_of(argv)
        say(f"pod {pod.index + 1} of {pod.nodes}, {pod.devices} ranks, attempt {pod.attempt}")
        end = PodRanks(pod, stop).run()
    except (CannotStart, UserError) as error:
        end = HostEnd(EXIT_REFUSED, str(error), time.time())
    except (StoreError, OSError) as error:
        end = HostEnd(EXIT_FAILURE, f"the store: {error}", time.time())
    if end.code:
        say(f"exit code {end.code}: {end.why}")
        with suppress(OSError):
            file = Path(os.environ.get(MESSAGE, TERMINATION_LOG))
            file.write_bytes(end.why.encode(errors="replace")[:LONGEST_MESSAGE])
    return end.code


def pod_of(argv: Sequence[str] | None) -> Pod:
    parser = argparse.ArgumentParser("python -m distdl.launchers.kubernetes.entry")
    parser.add_argument("bundle", type=Path)
    for name in ("nodes", "devices", "attempt", "port", "grace", "wait", "sync"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("store", "first", "job"):
        parser.add_argument(f"--{name}", required=True)
    options = vars(parser.parse_args(argv))
    text = os.environ.get(INDEX, "")
    if not text.isdigit():
        raise CannotStart(f"{INDEX} is {text!r}: the pod does not belong to an Indexed Job")
    pod = Pod(index=int(text), address=os.environ.get("POD_IP", ""), **options)
    if pod.index >= pod.nodes:
        raise CannotStart(f"{INDEX} is {text}, but the job has {pod.nodes} pods")
    return pod


if __name__ == "__main__":
    sys.exit(main())
