"""A process of tests/warm.py is, to whoever started it, as one that Python started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import environment
from tests.warm import Popen, Server

KINDS = [Popen, subprocess.Popen]
TELL = """
import json, os, signal, sys
told = {
    "argv": sys.argv, "path": sys.path[0], "cwd": os.getcwd(), "parent": os.getppid(),
    "main": sorted(vars(sys.modules["__main__"])), "canary": os.environ.get("CANARY"),
    "born": "CANARY=a b" in open("/proc/self/environ").read().split("\\0"),
    "group": os.getpgid(0) == os.getpid(), "interrupt": str(signal.getsignal(signal.SIGINT)),
    "threads": len(os.listdir("/proc/self/task")), "files": len(os.listdir("/proc/self/fd")),
}
print(json.dumps(told)); print(sys.stdin.read(), file=sys.stderr, end="")
sys.exit(int(sys.argv[1]))
"""


def started(kind: type, *words: str, cwd: Path, **more: object) -> subprocess.Popen[str]:
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    env = environment(CANARY="a b")
    return kind([sys.executable, *words], cwd=cwd, env=env, text=True, **pipes, **more)


def test_it_is_as_a_fresh_one(tmp_path: Path) -> None:
    told = []
    for kind in KINDS:
        process = started(kind, "-c", TELL, "3", "x y", cwd=tmp_path, start_new_session=True)
        out, err = process.communicate("asked", timeout=60)
        assert (process.returncode, err) == (3, "asked")
        told.append(json.loads(out))
    warm, fresh = told
    files = warm.pop("files") - fresh.pop("files")
    assert files == 1, "the connection to its own server"
    assert warm == fresh and fresh["parent"] == os.getpid() and fresh["born"] and fresh["group"]


def test_a_module_of_a_users_project(tmp_path: Path) -> None:
    """By `-m`, from its folder, with the folders of $PYTHONPATH; without one that shadows."""
    (tmp_path / "mine.py").write_text("import more, sys\nprint(__name__, __file__, sys.argv[0])\n")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/more.py").touch()
    env = environment(PYTHONPATH=str(tmp_path / "other"))
    words = [sys.executable, "-m", "mine"]
    assert Popen.server is None or Popen.server.serves(env)
    shown = [kind(words, cwd=tmp_path, env=env, stdout=subprocess.PIPE) for kind in KINDS]
    (warm, _), (fresh, _) = (process.communicate(timeout=60) for process in shown)
    assert warm == fresh == f"__main__ {tmp_path}/mine.py {tmp_path}/mine.py\n".encode()
    assert Popen.server is not None
    for name in ("torch.py", "sitecustomize.py"):
        (tmp_path / "other" / name).touch()
        assert not Popen.server.serves(env), name
        (tmp_path / "other" / name).unlink()


def test_a_server_that_ended_is_named(tmp_path: Path) -> None:
    server = Server.start({**environment(), "PYTHONHOME": str(tmp_path)})
    with pytest.raises(AssertionError, match=r"the server ended:(.|\n)*No module named"):
        server.clone({}, command=[], cwd="/", env={}, new_session=False)
