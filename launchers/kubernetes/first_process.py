"""What the first process of a container has to do: a signal does nothing there by default, and
orphans become its children."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


class Stop:
    """Whether a signal has asked this pod to end; passes it on to the agent. A process that is the
    first of its container gets only signals that it handles."""

    def __init__(self) -> None:
        self.asked = False
        self.agent: subprocess.Popen[bytes] | None = None
        for number in SIGNALS:
            signal.signal(number, self._note)

    def __call__(self) -> bool:
        return self.asked

    def _note(self, number: int, frame: object) -> None:
        self.asked = True
        if self.agent is not None and self.agent.poll() is None:
            self.agent.send_signal(number)


def reap(agent: int = 0) -> None:
    """Waits for processes that have ended and whose parents are gone: the first process of a
    container inherits them. Popen waits for the agent itself."""
    with suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid == agent:
                return
            os.waitpid(ended.si_pid, 0)
