"""A process of tests/warm.py is, to whoever started it, as one that Python started."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.conftest import environment
from tests.warm import Popen

REPORT = """
import json, os, signal, sys
print(json.dumps({
    "argv": sys.argv, "path": sys.path[0], "cwd": os.getcwd(), "parent": os.getppid(),
    "main": sorted(vars(sys.modules["__main__"])), "canary": os.environ.get("CANARY"),
    "born": "CANARY=a b" in open("/proc/self/environ").read().split("\\0"),
    "group": os.getpgid(0) == os.getpid(), "interrupt": str(signal.getsignal(signal.SIGINT)),
    "threads": len(os.listdir("/proc/self/task")), "files": len(os.listdir("/proc/self/fd")),
}))
print(sys.stdin.read(), file=sys.stderr, end="")
sys.exit(int(sys.argv[1]))
"""


def both(*words, input="", **options):
    """Exit code, stdout and stderr of a fork and of a fresh process."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    kinds = (Popen, subprocess.Popen)
    started = [kind([sys.executable, *words], text=True, **pipes, **options) for kind in kinds]
    outputs = [process.communicate(input, timeout=60) for process in started]
    return [(each.returncode, *output) for each, output in zip(started, outputs, strict=True)]


def test_it_is_as_a_fresh_one(tmp_path):
    options = {"cwd": tmp_path, "env": environment(CANARY="a b"), "start_new_session": True}
    outputs = both("-c", REPORT, "3", "x y", input="asked", **options)
    assert [(code, err) for code, _, err in outputs] == [(3, "asked")] * 2
    warm, fresh = (json.loads(out) for _, out, _ in outputs)
    assert warm.pop("files") - fresh.pop("files") == 1, "the connection to its own server"
    assert warm == fresh and fresh["parent"] == os.getpid() and fresh["born"] and fresh["group"]
