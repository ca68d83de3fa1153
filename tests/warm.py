"""Starts of distdl that cost 20 ms instead of 7 s: forks of a process that has imported torch.

`Popen` is `subprocess.Popen` for a command of `sys.executable`. What it starts is a real child of
the caller, with its own working directory, environment, standard streams, session, signals (of
which the caller's mask holds back some) and exit code; `ps` shows the command and
`/proc/PID/environ` its variables. Python processes that distdl starts from there (the child that
validates, the agent's ranks, the members of a sweep) are started the same way. What a fork cannot
show (what is imported when, signals during the start-up, modules that shadow others, a shell) needs
`fresh=True` in `tests.conftest.distdl` and `Background`.

This file is also the program of the server, `python -P warm.py SOCKET`. It imports torch, Lightning
and distdl, none of which starts a thread, and waits. For each request it clones itself with
CLONE_PARENT, so that the copy is a child of whoever asked. Each copy first forks a server of its
own, as long as it is untouched.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib.util
import inspect
import itertools
import json
import multiprocessing.util
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
ROOM = 1 << 16  # bytes: of the command line and of the environment that `ps` shows; of a request
CLONE_PARENT = 0x8000  # linux/sched.h
CLONE = {"x86_64": 56, "aarch64": 220}.get(os.uname().machine)  # its number as a system call
SET_PARENT_DEATH_SIGNAL = 1  # linux/prctl.h
# Of Python. A spawned process gets those of the one that starts it, and torchrun's ranks get `-u`.
FLAGS = ("-P", "-B", "-u")
# Read when Python or a library starts: with other values a fork would not be the same.
AT_START = ("PYTHON", "LD_", "OMP_", "MKL_", "HF_")
PATH = "PYTHONPATH"  # but these folders are added, unless something in them would be imported first
LATER = (PATH, "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
EXECUTE = subprocess.Popen._execute_child  # type: ignore[attr-defined]
SPAWN = multiprocessing.util.spawnv_passfds
LIBC = ctypes.PyDLL(None, use_errno=True)


class Server:
    """The server from the side of the process that asks."""

    def __init__(self, connection: socket.socket, log: str, env: Mapping[str, str]) -> None:
        self.connection = connection
        self.log = log
        self.owner = os.getpid()
        self.lock = threading.Lock()
        self.at_start = at_start(env)

    @classmethod
    def start(cls, env: Mapping[str, str]) -> Server:
        """A server for this process, which ends with it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, tempfile.NamedTemporaryFile(prefix="warm-", delete=False) as log:
            options: Any = {
                "stdin": subprocess.DEVNULL,
                "stdout": log,
                "stderr": log,
                "pass_fds": [theirs.fileno()],
                "cwd": ROOT,  # a test may remove its folder
            }
            # pyarrow's allocator would start a thread.
            more = {"ROOM": " " * ROOM, "JE_ARROW_MALLOC_CONF": "background_thread:false"}
            command = [sys.executable, "-P", __file__, str(theirs.fileno()), " " * ROOM]
            subprocess.Popen(command, env={**env, **more}, **options)
        atexit.register(os.unlink, log.name)
        return cls(ours, log.name, env)

    def serves(self, env: Mapping[str, str]) -> bool:
        return (
            os.getpid() == self.owner
            and at_start(env).items() <= self.at_start.items()
            and not any(shadows(folder) for folder in added(env))
        )

    def clone(self, files: Mapping[int, int], **request: Any) -> int:
        """The number of a new child, with open files: number there -> number here; see `become`."""
        request["mask"] = [*map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))]
        with self.lock:
            message = json.dumps({**request, "files": [*files]}).encode()
            try:
                socket.send_fds(self.connection, [message], [*files.values()])
                answer = self.connection.recv(ROOM)
            except ConnectionError:
                answer = b""
        assert answer, f"the server ended:\n{Path(self.log).read_text(encoding='utf-8')[-4000:]}"
        return int(answer)


def at_start(env: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in env.items() if k.startswith(AT_START) and k not in LATER}


def added(env: Mapping[str, str]) -> list[str]:
    return [folder for folder in env.get(PATH, "").split(os.pathsep) if folder]


def shadows(folder: str) -> bool:
    """Whether a folder has a module of the name of another one, or what Python imports first."""
    files = [*Path(folder).iterdir()] if Path(folder).is_dir() else []
    names = {path.stem for path in files if path.is_dir() or path.suffix in (".py", ".so")}
    # The server has none of the folders of tests, which pytest adds.
    ours = (ROOT, *(ROOT / "tests").iterdir())
    elsewhere = [path for path in sys.path if path not in (folder, "", *map(str, ours))]
    return any(
        name in ("sitecustomize", *sys.stdlib_module_names) or PathFinder.find_spec(name, elsewhere)
        for name in names - {"distdl"}
        if name.isidentifier()
    )


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """A command of `sys.executable` as a fork of the server, where that makes no difference."""

    server: Server | None = None  # started for the first command

    def _execute_child(self, args: Any, *more: Any) -> None:
        fits = args[0] == sys.executable and (args[1] in ("-m", "-c") or args[1][0] != "-")
        execute(self, (args, *more), fits)


def start_distdl(process: Any, args: Any, *more: Any) -> None:
    """Replaces `subprocess.Popen._execute_child`: what is a part of distdl is a fork."""
    execute(process, (args, *more), isinstance(args, (list, tuple)) and is_ours(args))


def spawn_distdl(path: Any, args: Sequence[Any], passfds: Sequence[int]) -> int:
    """Replaces `multiprocessing.util.spawnv_passfds`."""
    words = [os.fsdecode(word) for word in args]
    server = Popen.server
    if server is None or not is_ours(words) or not server.serves(os.environ):
        return SPAWN(path, args, passfds)
    more = {"cwd": os.getcwd(), "env": dict(os.environ), "new_session": False}
    return server.clone({n: n for n in (0, 1, 2, *passfds)}, command=words, **more)


def is_ours(command: Sequence[Any]) -> bool:
    """Whether Python runs a part of distdl, or a function of it in a spawned process."""
    words = [str(word) for word in command]
    if words[0] != sys.executable:
        return False
    words[1:] = itertools.dropwhile(FLAGS.__contains__, words[1:])
    spawned = words[1] == "-c" and words[2].startswith("from multiprocessing.spawn")
    return spawned or (words[1] == "-m" and words[2].partition(".")[0] == "distdl")


def execute(process: Any, arguments: Sequence[Any], fits: bool) -> None:
    """What `Popen._execute_child` does, with a fork if it `fits`: starts the process and closes its
    ends of the pipes."""
    values = inspect.signature(EXECUTE).bind(process, *arguments).arguments
    env = dict(os.environ if values["env"] is None else values["env"])
    fits = fits and values["preexec_fn"] is None
    # Whatever asked the driver for its GPUs before a fork would keep the fork from using them.
    if fits and CLONE and Popen.server is None and not Path("/dev/nvidiactl").exists():
        plain = {k: v for k, v in os.environ.items() if not k.startswith(PATH)}
        Popen.server = Server.start({**plain, "OMP_NUM_THREADS": "1"})
    if not fits or Popen.server is None or not Popen.server.serves(env):
        return EXECUTE(process, *arguments)
    pipes = enumerate(values[name] for name in ("p2cread", "c2pwrite", "errwrite"))
    process.pid = Popen.server.clone(
        {n: n if pipe < 0 else pipe for n, pipe in pipes} | {n: n for n in values["pass_fds"]},
        command=[str(word) for word in values["args"]],
        cwd=os.fspath(values["cwd"] or os.getcwd()),
        env=env,
        new_session=values["start_new_session"],
    )
    process._child_created = True
    ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    process._close_pipe_fds(*(values[name] for name in ends))


# The server


def main() -> NoReturn:
    connection = socket.socket(fileno=int(sys.argv[1]))
    # The program has no part in what the forks see.
    sys.modules["warm"] = sys.modules.pop("__main__")
    import hydra.core.override_parser.overrides_parser as hydras
    import mlflow  # noqa: F401
    import torchvision  # noqa: F401
    from hydra.core.plugins import Plugins

    for top, package in ((ROOT / "src/distdl", "distdl"), (ROOT / "launchers", "distdl.launchers")):
        for path in sorted(top.rglob("*.py")):
            words = [w for w in path.relative_to(top).with_suffix("").parts if w != "__init__"]
            name = ".".join([package, *words])
            with contextlib.suppress(ModuleNotFoundError):  # of an extra that is not installed
                importlib.import_module(name)
    Plugins.instance()
    # The parser learns its grammar from what it reads.
    examples = ["a=b", "a.b=1", "++a.b=[c,d]", "+a={b: 0.1, c: x/y}", "~a", "a=1,2"]
    hydras.OverridesParser.create().parse_overrides(examples)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"a fork would have none of {threads}"
    gc.freeze()
    serve(connection)


def serve(connection: socket.socket) -> NoReturn:
    """Clones this process for each request until nobody is left who could ask."""
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
    while True:
        message, files, _, _ = socket.recv_fds(connection, 1 << 20, 64)
        if not message:
            os._exit(0)
        pid = clone()
        if not pid:
            connection.close()
            request = json.loads(message)
            signal.pthread_sigmask(signal.SIG_SETMASK, request["mask"])
            for number, handler in handlers.items():
                signal.signal(number, handler)
            become(request, files)
        for number in files:
            os.close(number)
        connection.send(str(pid).encode())


def clone() -> int:
    """os.fork(), but the child is this process's sibling."""
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = LIBC.syscall(CLONE, ctypes.c_ulong(CLONE_PARENT | signal.SIGCHLD), None, None, None, None)
    after = "Parent" if pid else "Child"
    getattr(ctypes.pythonapi, f"PyOS_AfterFork_{after}")()
    return pid


def become(request: dict[str, Any], files: Sequence[int]) -> NoReturn:
    """Runs the command of a request (with `cwd`, `env`, `new_session` and `files`, the numbers that
    its files shall have) and ends with its exit code."""
    code = 1
    try:
        if request["new_session"]:
            os.setsid()
        Popen.server = own_server(files)
        # Out of the way of the numbers that they shall have.
        high = [os.dup2(number, 500 + index) for index, number in enumerate(files)]
        for old, new in zip(high, request["files"], strict=True):
            os.dup2(old, new, inheritable=True)
        for number in {*high, *files} - {*request["files"]}:
            os.close(number)
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["env"])
        show(request)
        flags = itertools.takewhile(FLAGS.__contains__, request["command"][1:])
        open_streams("-u" in flags or "PYTHONUNBUFFERED" in os.environ)
        subprocess.Popen._execute_child = start_distdl  # type: ignore[attr-defined]
        multiprocessing.util.spawnv_passfds = spawn_distdl
        code = exit_code(request["command"][1:])
    except BaseException:  # as Python itself ends
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def own_server(files: Sequence[int]) -> Server:
    """A fork of this process, which has not begun, for the processes that it will start."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    if not os.fork():
        for number in (ours.fileno(), *files):
            os.close(number)
        LIBC.prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)
        serve(theirs)
    theirs.close()
    # Out of the way as well, of the files that a spawned process gets.
    with ours:
        number = fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, 400)
    return Server(socket.socket(fileno=number), os.devnull, os.environ)


def show(request: Mapping[str, Any]) -> None:
    """Writes the command line and the variables where `ps` and psutil look for them."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    variables = [f"{k}={v}" for k, v in request["env"].items()]
    # arg_start and env_start in proc(5)
    for first, words in ((45, request["command"]), (47, variables)):
        start = int(fields[first])
        end = int(fields[first + 1])
        text = "\0".join(words).encode()[: end - start - 1]
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, text, len(text))


def open_streams(unbuffered: bool) -> None:
    """stdin, stdout and stderr for what is open there now."""
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        at_once = number == 2 or os.isatty(number) or unbuffered
        errors = "backslashreplace" if number == 2 else None
        stream = open(number, mode, 1 if at_once else -1, errors=errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def exit_code(words: list[str]) -> int:
    """Runs what stands after `python` on its command line."""
    sys.modules["__main__"] = main_module = types.ModuleType("__main__")
    main_module.__dict__.update(__builtins__=__builtins__, __annotations__={})
    sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in os.environ
    sys.path[:0] = added(os.environ)
    if any(Path(folder, "distdl").is_dir() for folder in added(os.environ)):  # the copy of a job
        for name in [name for name in sys.modules if name.partition(".")[0] == "distdl"]:
            del sys.modules[name]
    flags = [*itertools.takewhile(FLAGS.__contains__, words)]
    words = words[len(flags) :]
    if "-P" not in flags:
        sys.path.insert(0, os.getcwd() if words[0] == "-m" else "")
    if words[0] not in ("-c", "-m"):
        words.insert(0, "script")
    kind, what, *arguments = words
    sys.argv = ["-c" if kind == "-c" else what, *arguments]
    try:
        if kind == "-m":
            for name in {what, f"{what}.__main__"} & sys.modules.keys():
                if not hasattr(sys.modules[name], "__path__"):
                    del sys.modules[name]  # runpy would warn of it
            runpy._run_module_as_main(what)  # type: ignore[attr-defined]
        elif kind == "-c":
            exec(what, main_module.__dict__)
        else:
            sys.path[0] = str(Path(what).parent.absolute())
            main_module.__dict__["__file__"] = what
            exec(compile(Path(what).read_bytes(), what, "exec"), main_module.__dict__)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    main()
