"""What tests share: the real command line in a process of its own, on a tiny model."""

from __future__ import annotations

import atexit
import copy
import difflib
import functools
import gc
import io
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections import namedtuple
from collections.abc import Callable, Generator, Iterator, Set
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

import psutil
import pytest
from omegaconf import OmegaConf

from tests.warm import Popen, start_distdl

ROOT = Path(__file__).resolve().parents[1]
TESTS = Path(__file__).resolve().parent

# A shell without job control starts what is in the background with Ctrl-C ignored, and everything
# below it inherits that: a test of Ctrl-C would wait for what cannot come.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# `nohup` starts it with SIGHUP ignored. A handler that does nothing keeps the suite alive as well,
# and the commands that it starts get the default.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)

# What chooses a processor's kernels (`ATEN_CPU_CAPABILITY=avx2 make test`). The ranks of another
# host have it only if it is forwarded, and equal bits need equal kernels.
KERNELS = [name for name in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA") if name in os.environ]

# For a test that takes long, and of whose kind CI has another one.
matrix_only = pytest.mark.skipif("DISTDL_MATRIX" not in os.environ, reason="make matrix")

# A small ResNet: a step on 8 images of 32 pixels takes 18 ms of a core, and 100 ms with
# torchvision's ResNet-18. It has GroupNorm, since SyncBatchNorm does not run on a CPU, and one and
# two ranks agree. Its last layer still has several pixels: norms of few values multiply what ranks
# round.
NETWORK = (
    "model=timm",
    "model.network.model_name=resnet10t",
    "+model.network.channels=[16,32,64,128]",
    "+model.network.output_stride=8",
    "model.norm=group",
)
SETTINGS = (
    "data=synthetic",
    "data.image_size=32",
    "data.num_classes=10",
    "data.train_samples=160",
    "data.val_samples=21",
    "data.batch_size=8",
    "schedule.warmup_epochs=0",
    "trainer.accelerator=cpu",
    "trainer.max_epochs=3",
    "trainer.log_every_n_steps=1",
    "tracking=none",
    "callbacks=[default,record_samples]",
)
TINY = (*NETWORK, *SETTINGS)
# For tests that know the layers of torchvision's ResNet-18, or its size.
RESNET18 = ("model=resnet18", "model.norm=group", *SETTINGS)
NO_PROBLEMS: dict[str, Any] = {"problems": [], "notes": [], "facts": {}}
# What is run with `python`: the command line, and the same without the child process that imports
# torch to validate (6 s of a core), which tests of something else do not need.
DISTDL = ("-m", "distdl")
UNCHECKED = (
    "-c",
    "import sys\n"
    "from distdl.cli import main as command_line; from distdl.validation import validate\n"
    f"validate._check_in_child = lambda request: {NO_PROBLEMS}\n"
    "sys.argv[0] = command_line.__file__\n"
    "sys.exit(command_line.main())\n",
)
Done = subprocess.CompletedProcess[str]
# These wait for their processes, for minutes: they come first. Those of a cluster, which wait for
# its servers as well, come in turn with the others, which keep both cores busy.
WAITING = "cluster"
FIRST = ("strategies", "multiprocess", "adoption", "cli", "packaging")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--refresh-golden", action="store_true", help="write tests/golden/*.yaml")


def pytest_configure(config: pytest.Config) -> None:
    """Temporary files of the session, also of processes that it starts, are in one folder, which is
    removed at its end: a rank or a loader worker that is killed leaves its own."""
    gc.disable()  # while the tests are imported, and with them everything that they need
    if hasattr(config, "workerinput"):  # of pytest-xdist: it has the folder of its session
        return
    # pytest keeps `tmp_path` of the last sessions, for whoever looks for a cause.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    folder = tempfile.mkdtemp(prefix="t-")  # short: a socket's path has 107 bytes
    os.chmod(folder, 0o1777)  # as /tmp has it: some tests run processes of another user
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    # Registered first, so after what the tests register, and after the ends of their processes.
    atexit.register(_remove, folder, os.getpid())


def pytest_collection_finish() -> None:
    """From here on garbage collection ignores the half million objects of the imports, at which it
    would look time and again, for a sixth of a unit test's time. And torch computes in one thread,
    as in the ranks: those of two test processes wait for each other in loops that take as much
    again of a core. A loader's worker that does not end is killed after half a second, not 5."""
    gc.enable()
    gc.freeze()
    atexit.register(gc.unfreeze)  # some libraries look for uncollected objects at exit
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
        torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.5
    _parse_each_yaml_once()


def _parse_each_yaml_once() -> None:
    """A test process composes hundreds of configs from the same files, and parsing these is a
    quarter of it."""
    load = OmegaConf.load
    parsed = functools.cache(lambda text: load(io.StringIO(text)))

    def loaded(file: Any) -> Any:
        if isinstance(file, (str, Path)):  # of a test itself
            return load(file)
        text = file.read()
        try:
            return copy.deepcopy(parsed(text))
        except Exception:  # whatever it is, it shall name the file
            file.seek(0)
            return load(file)

    OmegaConf.load = staticmethod(loaded)  # type: ignore[method-assign]


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


def check_golden(config: pytest.Config, file: Path, text: str) -> None:
    """Compares what was rendered with what was meant; `--refresh-golden` makes it meant."""
    if config.getoption("--refresh-golden"):
        file.write_text(text, encoding="utf-8")
    golden = file.read_text(encoding="utf-8") if file.exists() else ""
    changed = "\n".join(difflib.unified_diff(golden.splitlines(), text.splitlines(), "was", "is"))
    assert golden == text, f"{file.name}; to accept: pytest ... --refresh-golden\n{changed}"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None]:
    """A file is run by one process, which then makes its fixtures once; so is a group of tests that
    shares host names or ports (`xdist_group`). The slow ones are started first, for which
    pytest-xdist must be told to keep the order (`--no-loadscope-reorder`)."""
    order = _in_turn({item.path for item in items})
    items.sort(key=lambda item: order.index(item.path))  # the order within a file stays
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
    yield
    if config.getoption("loadgroup", False) and not all("@" in item.nodeid for item in items):
        pytest.exit("this pytest-xdist does not group tests: install pytest<9.2", returncode=4)


def _in_turn(paths: Set[Path]) -> list[Path]:
    def folder(path: Path) -> str:
        return path.relative_to(TESTS).parts[0] if path.is_relative_to(TESTS) else ""

    ordered = sorted(paths, key=lambda path: ([*FIRST, folder(path)].index(folder(path)), path))
    waiting = [path for path in ordered if folder(path) == WAITING]
    others = [path for path in ordered if folder(path) != WAITING]
    return [path for pair in zip_longest(waiting, others) for path in pair if path]


def environment(**more: str) -> dict[str, str]:
    """The variables of a test process: no rank variables, one thread, loopback."""
    drop = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "MASTER_",
        "DISTDL_",
        "TORCHELASTIC",
        "MLFLOW_",
        # Lightning sets these two in the process of a test.
        "NODE_RANK",
        "PL_GLOBAL_SEED",
    )
    kept = {k: v for k, v in os.environ.items() if not k.startswith(drop)}
    ours = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "COLUMNS": "200"}
    return {**kept, **ours, "XDG_STATE_HOME": state_home(), **more}


def state_home() -> str:
    """Where a command remembers the programs that it has started."""
    return os.path.join(tempfile.gettempdir(), "state")


def _start(
    words: tuple[str, ...], env: dict[str, str] | None = None, fresh: bool = False, **options: Any
) -> Any:
    """`python ...` in a fork of a process that has imported torch (tests/warm.py), or `fresh`, for
    tests of the start-up itself."""
    kind = subprocess.Popen if fresh else Popen
    variables = environment(**(env or {}))
    return kind([sys.executable, *words], env=variables, text=True, **options)


def python(*words: str, cwd: Path, timeout: float = 240, **options: Any) -> Done:
    """Runs `python ...` to its end; `options`: `env` and `fresh`, see `_start`."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with _start(words, cwd=cwd, **pipes, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:  # Ctrl-C, too, leaves no process behind
            process.kill()
            raise
    return Done(process.args, process.returncode, out, err)


def distdl(*arguments: str, cwd: Path, module: tuple[str, ...] = DISTDL, **more: Any) -> Done:
    """Runs `python -m distdl ...`, or what else `module` says; `more` is for `python`."""
    return python(*module, *arguments, cwd=cwd, **more)


def trained(*arguments: str, cwd: Path) -> str:
    """Runs a training that must succeed, unchecked, and returns what it printed."""
    done = distdl(*TINY, *arguments, cwd=cwd, module=UNCHECKED)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def free_port() -> int:
    """A port that is free, and so is the next one, where ranks without a store agree. No outgoing
    connection takes it before it is used: Linux gives those the ports from 32768 on."""
    while True:
        # Not by a seed that a test has set: another process would draw the same.
        port = random.SystemRandom().randrange(25000, 32000)
        with socket.socket() as one, socket.socket() as two, suppress(OSError):
            one.bind(("", port))
            two.bind(("", port + 1))
            return port


def filled(value: Any, words: dict[str, str]) -> Any:
    """A config with `{name}` replaced by words[name] in each of its texts."""
    if isinstance(value, dict):
        return {key: filled(item, words) for key, item in value.items()}
    if isinstance(value, list):
        return [filled(item, words) for item in value]
    return value.format(**words) if isinstance(value, str) else value


Said = namedtuple("Said", "code out err")  # of a command that ran in this process


@pytest.fixture(autouse=True)
def rank_0_again() -> Iterator[None]:
    """A test that is rank 1 sets that in Lightning for the complete process, whose loggers then
    write nothing in the tests after it."""
    yield
    if lightning := sys.modules.get("lightning_utilities.core.rank_zero"):
        lightning.rank_zero_only.rank = 0


@pytest.fixture(scope="module", autouse=True)
def projects_forgotten(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Code of a project that a test wrote, and that distdl imported in this process, is not there
    for the next file, whose project may have modules of the same names."""
    before = {*sys.modules}
    yield
    projects = str(tmp_path_factory.getbasetemp())
    for name in sys.modules.keys() - before:
        known = vars(sys.modules[name])
        places = [known.get("__file__"), *(known.get("__path__") or ())]
        if any(str(place).startswith(projects) for place in places):
            del sys.modules[name]
    sys.path[:] = [place for place in sys.path if not place.startswith(projects)]


@pytest.fixture(scope="module", autouse=True)
def imports_not_collected() -> Iterator[None]:
    """What a file imported at last is ignored as well (`pytest_collection_finish`)."""
    yield
    gc.collect()
    gc.freeze()


def python_of(environment: str) -> str:
    """The Python of an environment beside .venv; where it was not made to its end, a test skips."""
    folder = ROOT / ".servers" / environment
    if not (folder / ".ready").exists():
        pytest.skip(f"make .servers/{environment}")
    return str(folder / "bin/python")


@pytest.fixture
def own_name() -> str:
    """What a test calls its own in a store or a cluster that tests share. The name of its folder
    would not do: pytest uses that again once the folder is deleted (`make matrix`)."""
    return uuid.uuid4().hex[:12]


@pytest.fixture
def command(tmp_path, monkeypatch, capsys) -> Callable[..., Said]:
    """The command line in this process, in an empty folder: quick, where no worker is started."""
    from distdl.cli.main import main

    monkeypatch.setattr(subprocess.Popen, "_execute_child", start_distdl)
    for name in os.environ.keys() - environment().keys():
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", state_home())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the user's own code is put before it

    def run(*arguments: str) -> Said:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["distdl", *arguments])
        try:
            code = main(arguments)
        except SystemExit as end:  # argparse
            code = int(end.code or 0)
        return Said(code, *capsys.readouterr())

    return run


def _answer(monkeypatch: pytest.MonkeyPatch, reply: Callable[[str], Any]) -> None:
    for ask in ("_check_in_child", "_check_in_process"):
        monkeypatch.setattr(f"distdl.validation.validate.{ask}", reply)


@pytest.fixture
def without_stage_2(monkeypatch) -> None:
    """Leaves out the child process that imports torch, for tests of something else (6 s each)."""
    _answer(monkeypatch, lambda request: NO_PROBLEMS)
    monkeypatch.setattr("distdl.launch.planning.suppressed_import", lambda module: None)


@pytest.fixture
def no_child(monkeypatch) -> None:
    """The second stage must not be reached."""
    _answer(monkeypatch, lambda request: pytest.fail("something was imported to find this out"))


@pytest.fixture
def without_worker(without_stage_2: None, monkeypatch) -> None:
    """Runs are created and "succeed", and no worker starts."""
    from distdl.job import JobState

    def wait(job: Any) -> JobState:
        job._attempt.end(JobState.SUCCEEDED, metrics={"val/acc1": 0.5})
        return JobState.SUCCEEDED

    monkeypatch.setattr("distdl.launchers.local.LocalJob.wait", wait)


class Background:
    """A command that is under way, to be signalled."""

    def __init__(self, *arguments: str, module: tuple[str, ...] = DISTDL, **options: Any) -> None:
        # Not in its folder, which a test may copy.
        self.log = tempfile.NamedTemporaryFile("w+", encoding="utf-8", prefix="background-")  # noqa: SIM115
        streams = {"stdout": self.log, "stderr": subprocess.STDOUT, "start_new_session": True}
        self.process = _start((*module, *arguments), **streams, **options)

    def until(self, condition: Callable[[], bool], timeout: float = 120) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            assert self.process.poll() is None, f"it ended before: {self.output()}"
            assert time.monotonic() < deadline, f"not within {timeout} s: {self.output()}"
            time.sleep(0.01)

    def kill_all(self) -> None:
        """kill -9, and waits until nothing writes any more. The workers end with the launcher,
        though each leads a session of its own, and a rank's monitor when it has written why."""
        tree = psutil.Process(self.process.pid).children(recursive=True)
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        deadline = time.monotonic() + 60
        while left := [each for each in tree if not _has_ended(each)]:
            assert time.monotonic() < deadline, f"still there: {left}"
            time.sleep(0.01)

    def wait(self, timeout: float = 120) -> int:
        return self.process.wait(timeout)

    def output(self) -> str:
        self.log.flush()
        return Path(self.log.name).read_text(encoding="utf-8")


def _has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def background() -> Iterator[Callable[..., Background]]:
    """Starts commands and leaves none of them behind."""
    started: list[Background] = []

    def start(*arguments: str, **options: Any) -> Background:
        started.append(Background(*arguments, **options))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            each.kill_all()


def losses(run: Path) -> dict[int, float]:
    """step -> train/loss of the surviving history: a later attempt's value wins."""
    values: dict[int, float] = {}
    for line in (run / "logs" / "metrics.jsonl").read_text().splitlines():
        try:
            record = json.loads(line)
        except ValueError:  # torn by a kill
            continue
        if "train/loss" in record["metrics"]:
            values[record["step"]] = record["metrics"]["train/loss"]
    return values


def _recorded(path: Path) -> Iterator[tuple[int, int, int, list[int]]]:
    """attempt, epoch, step and ids of each complete line that a rank has recorded."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        if line.count(",") == 3:
            attempt, epoch, step, ids = line.split(",")
            yield int(attempt), int(epoch), int(step), [*map(int, ids.split())]


def samples(run: Path) -> dict[int, dict[tuple[int, int], list[int]]]:
    """attempt -> (epoch, step) -> the ids of that step, over all ranks."""
    steps: dict[int, dict[tuple[int, int], list[int]]] = {}
    for path in sorted((run / "logs").glob("samples-rank*.csv")):
        for attempt, epoch, step, ids in _recorded(path):
            if ids:
                steps.setdefault(attempt, {}).setdefault((epoch, step), []).extend(ids)
    return steps


def last_step(run: Path, attempt: int = 1) -> int:
    """The newest step that rank 0 has recorded, 0 before the first."""
    rows = _recorded(run / "logs" / "samples-rank0.csv")
    return max((step for number, _, step, _ in rows if number == attempt), default=0)


def status(run: Path, attempt: int = 1) -> dict:
    try:
        return json.loads((run / "attempts" / f"{attempt:03d}" / "status.json").read_text())
    except (OSError, ValueError):
        return {}
