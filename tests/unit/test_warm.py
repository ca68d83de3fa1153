"""A process of tests/warm.py is, to whoever started it, as one that Python started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.conftest import environment
from tests.warm import Popen, Server

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


def both(*words: str, input: str = "", **options: Any) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of a fork and of a fresh process."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    kinds = (Popen, subprocess.Popen)
    started = [kind([sys.executable, *words], text=True, **pipes, **options) for kind in kinds]
    outputs = [process.communicate(input, timeout=60) for process in started]
    return [(each.returncode, *output) for each, output in zip(started, outputs, strict=True)]


def test_it_is_as_a_fresh_one(tmp_path) -> None:
    options = {"cwd": tmp_path, "env": environment(CANARY="a b"), "start_new_session": True}
    outputs = both("-c", REPORT, "3", "x y", input="asked", **options)
    assert [(code, err) for code, _, err in outputs] == [(3, "asked")] * 2
    warm, fresh = (json.loads(out) for _, out, _ in outputs)
    assert warm.pop("files") - fresh.pop("files") == 1, "the connection to its own server"
    assert warm == fresh and fresh["parent"] == os.getpid() and fresh["born"] and fresh["group"]


def test_a_module_of_a_users_project(tmp_path) -> None:
    """By `-m`, from its folder, with the folders of $PYTHONPATH; without one that shadows."""
    (tmp_path / "mine.py").write_text("import more, sys\nprint(__name__, __file__, sys.argv[0])\n")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/more.py").touch()
    env = environment(PYTHONPATH=str(tmp_path / "other"))
    shown = f"__main__ {tmp_path}/mine.py {tmp_path}/mine.py\n"
    assert both("-m", "mine", cwd=tmp_path, env=env) == [(0, shown, "")] * 2
    assert Popen.server is not None and Popen.server.serves(env)
    for name in ("torch.py", "sitecustomize.py"):
        (tmp_path / "other" / name).touch()
        assert not Popen.server.serves(env), name
        (tmp_path / "other" / name).unlink()


def test_a_server_that_ended_is_named(tmp_path) -> None:
    server = Server.start({**environment(), "PYTHONHOME": str(tmp_path)})
    with pytest.raises(AssertionError, match=r"the server ended:(.|\n)*No module named"):
        server.clone({}, command=[], cwd="/", env={}, new_session=False)
