"""What one GPU, lent for a quarter of an hour, can still show: `make gpu-proof MINUTES=14`.

    python -m benchmarks.gpu_proof --minutes 14 --to build/gpu-proof

The arms run in the order of their value, each in a process of its own, and each writes its result
to a file of its own when it ends: whatever cuts the time off loses one arm. The same command goes
on where it stopped. First come the tests that no GPU has shown, then three rounds of the goals that
are open, then the rest of tests/gpu, and last the loop under max-autotune, which compiles for
minutes. Each card, with its versions of torch and CUDA, has a folder of its own, for the results
and for what Inductor and Triton have compiled: carry it to the next machine of its kind.

After each arm that card's section of RESULTS_GPU.md is written anew. `--rehearse` goes through all
of it with small sizes and without compiling, for tests on simulated GPUs; its results say so, and
are kept apart.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks import gpu
from benchmarks.ctrl_c import one_line
from benchmarks.gpu import BYTES_PER_IMAGE, Loop, Size, by_distdl, rate_of
from benchmarks.keeping import not_writable
from benchmarks.table import Goal, commit, paired
from distdl.util import atomic_files

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/RESULTS_GPU.md"
ROUNDS = 3
SMALL = Size(batch=2, pixels=32, classes=10, warm_up=2, steps=6, model="resnet18")
# RESULTS_GPU.md says what was not seen: these come first.
UNSEEN = (
    "test_fast_path_gpu.py::test_the_side_stream_changes_no_bit_and_an_average_waits_for_nothing",
    "test_strategies.py::test_faster_than_a_hand_written_loop",
    "test_fast_path_gpu.py::test_the_training_thread_does_not_wait_for_the_copy",
    "test_fast_path_gpu.py::test_a_copy_is_of_its_moment_and_keeps_sharing",
)
COPY, LOOP, AGAIN = "copy bandwidth", "timm, bare loop", "timm, bare loop, again"
PLAIN, AUTO, TUNED = "distdl", "distdl, model.compile=auto", "timm, max-autotune"
COMPILES = (AUTO, TUNED)
UNITS = {COPY: "GB/s"}
REST = "the rest of tests/gpu"


@dataclass(frozen=True)
class ArmResult:
    """What one arm has shown: a rate (`value` in `unit`), or how tests ended (`outcome`), with the
    commit of distdl."""

    arm: str
    seconds: float
    commit: str
    value: float = 0.0
    unit: str = ""
    outcome: str = ""
    note: str = ""


@dataclass(frozen=True)
class ProofArm:
    """One arm: `name` is that of its file; `seconds` is the least that is worth a start."""

    name: str
    kind: str
    seconds: float = 30.0


def arms(devices: int, rounds: int) -> list[ProofArm]:
    """All arms, the most valuable first."""
    found = [ProofArm(f"test {number + 1}", test, 40) for number, test in enumerate(UNSEEN)]
    several = [several_devices(count) for count in (2, devices) if count <= devices]
    for number in range(rounds):
        kinds = [COPY, LOOP, PLAIN, AUTO, AGAIN, *dict.fromkeys(several)]
        found += [ProofArm(f"round {number + 1}, {kind}", kind) for kind in kinds]
    found.append(ProofArm(REST, REST, 60))
    return [*found, *(ProofArm(f"round {n + 1}, {TUNED}", TUNED, 120) for n in range(rounds))]


def several_devices(count: int) -> str:
    return f"distdl, strategy=ddp, {count} devices"


@dataclass(frozen=True)
class Place:
    """Where an arm runs: its device, its sizes, and whether it only rehearses."""

    device: torch.device
    size: Size
    rehearsal: bool = False

    def perform(self, arm: ProofArm) -> ArmResult:
        started = time.monotonic()
        if arm.kind in UNSEEN or arm.kind == REST:
            outcome, note = tested(arm.kind, self.rehearsal)
            seconds = time.monotonic() - started
            return ArmResult(arm.name, seconds, commit(), outcome=outcome, note=note)
        value = self._rate(arm.kind)
        note = "replaced: nothing was compiled" if self.rehearsal and arm.kind in COMPILES else ""
        seconds = time.monotonic() - started
        unit = UNITS.get(arm.kind, "img/s")
        return ArmResult(arm.name, seconds, commit(), value, unit, note=note)

    def _rate(self, kind: str) -> float:
        from distdl.tools.measure import limits

        compiled = not self.rehearsal
        rates: Mapping[str, Callable[[], float]] = {
            COPY: lambda: limits.measure(self.device, "bf16-mixed").copy_bytes / 1e9,
            LOOP: lambda: Loop(self.device, self.size).rate(),
            AGAIN: lambda: Loop(self.device, self.size).rate(),
            TUNED: lambda: Loop(self.device, self.size, compiled=compiled).rate(),
            PLAIN: lambda: self._by_distdl("strategy=single"),
            AUTO: lambda: self._by_distdl(
                "strategy=single", f"model.compile={'auto' if compiled else 'false'}"
            ),
        }
        if kind in rates:
            return rates[kind]()
        (count,) = re.findall(r"(\d+) devices", kind)
        return self._by_distdl("strategy=ddp", f"trainer.devices={count}")

    def _by_distdl(self, *overrides: str) -> float:
        with tempfile.TemporaryDirectory() as folder:
            run = by_distdl(Path(folder), self.device, self.size, *overrides)
            return rate_of(run, self.size)


def tested(which: str, rehearsal: bool) -> tuple[str, str]:
    """How tests ended, and the line in which pytest counts them. A rehearsal only finds them."""
    words = [f"tests/gpu/{which}"]
    if which == REST:
        words = ["tests/gpu", *(f"--deselect=tests/gpu/{test}" for test in UNSEEN)]
    words += ["--collect-only"] if rehearsal else []
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if re.search(r"\d+ \w+.* in [\d.]+s", line)]
    last = lines[-1].strip("= ") if lines else (done.stdout + done.stderr)[-300:]
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    outcome = "failed"
    if done.returncode == 0:
        outcome = "found, not run" if rehearsal else "passed"
    return outcome, "; ".join([last, *failed])


def kind_of_machine(rehearsal: bool) -> str:
    """The card and the versions, as a file's name: results of others are no results of it."""
    card = re.sub(r"[^A-Za-z0-9]+", "-", torch.cuda.get_device_name())
    start = "rehearsal-" if rehearsal else ""
    return f"{start}{card}-torch{torch.__version__}-cuda{torch.version.cuda}"


@dataclass(frozen=True)
class ProofFolder:
    """The results of all tries on a kind of machine, a file each, and what was compiled there."""

    path: Path
    rounds: int = ROUNDS

    @property
    def arms(self) -> list[ProofArm]:
        return arms(torch.cuda.device_count(), self.rounds)

    def file(self, arm: ProofArm) -> Path:
        return self.path / f"{re.sub(r'[^a-z0-9]+', '-', arm.name.lower()).strip('-')}.json"

    def result(self, arm: ProofArm) -> ArmResult | None:
        """None: it has not ended, or its file is half written."""
        with suppress(OSError, ValueError, TypeError):
            return ArmResult(**json.loads(self.file(arm).read_text(encoding="utf-8")))
        return None

    def keep(self, arm: ProofArm, result: ArmResult) -> None:
        part = self.file(arm).with_suffix(".part")
        part.write_text(json.dumps(asdict(result), indent=1), encoding="utf-8")
        part.replace(self.file(arm))

    def caches(self) -> dict[str, str]:
        """Variables that keep what Inductor and Triton compile."""
        kept = self.path / "compiled"
        folders = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
        return {variable: str(kept / name) for variable, name in folders.items()}


def prove(folder: ProofFolder, minutes: float, results: Path, rehearse: bool) -> None:
    """Runs the arms that have no result yet, as long as there is time."""
    deadline = time.monotonic() + 60 * minutes
    waiting = [arm for arm in folder.arms if folder.result(arm) is None]
    for arm in waiting:
        left = deadline - time.monotonic()
        if left < arm.seconds and not rehearse:
            print(f"no time   {arm.name}: {left:.0f} s are left", flush=True)
            continue
        command = [
            sys.executable,
            "-m",
            "benchmarks.gpu_proof",
            "--to",
            str(folder.path.parent),
            "--arm",
            arm.name,
        ]
        if rehearse:
            command.append("--rehearse")
        print(f"running   {arm.name}", flush=True)
        if not ended(command, {**os.environ, **folder.caches()}, left):
            print(f"lost      {arm.name}", flush=True)
        write(folder, results, rehearse)
    print(f"results   {results}\nagain     the same command goes on, if an arm is missing")


def ended(command: Sequence[str], env: Mapping[str, str], seconds: float) -> bool:
    """Whether a command came to its end in time; with its processes it is ended otherwise."""
    process = subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True)
    try:
        return process.wait(max(1.0, seconds)) == 0
    except BaseException as error:  # Ctrl-C, too, leaves no process behind
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return False


def write(folder: ProofFolder, results: Path, rehearsal: bool) -> None:
    """Replaces the section of a document that holds these results; the rest of it stays, also the
    sections of other cards."""
    begin, end = (f"<!-- gpu-proof {folder.path.name}: {edge} -->" for edge in ("begin", "end"))
    text = results.read_text(encoding="utf-8") if results.exists() else "# Results on a GPU\n"
    section = "\n".join([begin, *lines(folder, rehearsal), end])
    if begin in text:
        before, _, rest = text.partition(begin)
        text = before + section + rest.partition(end)[2]
    else:
        text = f"{text.rstrip()}\n\n{section}\n"
    atomic_files.write_bytes(results, text.encode())  # what others have written in it stays


def lines(folder: ProofFolder, rehearsal: bool) -> Iterator[str]:
    known = folder.arms
    results = {arm: folder.result(arm) for arm in known}
    shown = {arm: result for arm, result in results.items() if result is not None}
    yield f"## make gpu-proof, {torch.cuda.get_device_name()}"
    yield ""
    if rehearsal:
        yield "**A rehearsal: simulated GPUs, small sizes. No number here is one of a GPU.**"
        yield ""
    commits = ", ".join(sorted({result.commit for result in shown.values()}))
    yield f"{machine()}. {len(shown)} of {len(known)} arms have ended, of distdl at {commits}."
    yield ""
    rates: dict[str, list[float]] = {}
    for arm, result in shown.items():
        if result.unit:
            rates.setdefault(arm.kind, []).append(result.value)
    yield "| where | ratio | goal | measured | reached |"
    yield "|---|---|---|---|---|"
    for goal in goals(rates):
        yield goal.row()
    yield ""
    yield "| arm | median | min | max | rounds | |"
    yield "|---|---|---|---|---|---|"
    notes = {arm.kind: result.note for arm, result in shown.items()}
    for kind, values in rates.items():
        low, high = min(values), max(values)
        middle = statistics.median(values)
        unit = UNITS.get(kind, "img/s")
        spread = f"{low:,.0f} | {high:,.0f} | {len(values)}"
        yield f"| {kind} | {middle:,.0f} {unit} | {spread} | {notes[kind]} |"
    yield ""
    yield "| test | ended | |"
    yield "|---|---|---|"
    for arm, result in shown.items():
        if result.outcome:
            yield f"| {arm.kind} | {result.outcome} | {result.note} |"


def goals(rates: Mapping[str, list[float]]) -> list[Goal]:
    """The goals of `benchmarks.gpu` that are still open, from the rounds that all arms have."""
    pairs = {
        gpu.AGAINST_LOOP: (AUTO, LOOP, 1.0),
        gpu.AGAINST_COMPILED: (AUTO, TUNED, 1.0),
        gpu.OF_MEMORY: (AUTO, COPY, BYTES_PER_IMAGE / 1e9),
    }
    ratios = {}
    for what, (ours, theirs, factor) in pairs.items():
        count = min(len(rates.get(ours, ())), len(rates.get(theirs, ())))
        if count:
            ratios[what] = factor * paired(rates[ours][:count], rates[theirs][:count])
    return [goal for goal in gpu.goals(ratios) if goal.what in pairs]


def machine() -> str:
    """The cards and the versions."""
    import lightning

    count = torch.cuda.device_count()
    memory = torch.cuda.get_device_properties(0).total_memory / 2**20
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    card = torch.cuda.get_device_name()
    return (
        f"{time.strftime('%Y-%m-%d')}, {count} x {card} ({memory:,.0f} MiB, "
        f"driver {driver()}), {os.cpu_count()} CPU cores, {versions} with CUDA "
        f"{torch.version.cuda}, lightning {lightning.__version__}"
    )


def driver() -> str:
    """NVIDIA's driver, as its library names it; "unknown" without one."""
    import pynvml

    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    return "unknown"


def main() -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.gpu_proof", description=__doc__)
    parser.add_argument("--minutes", type=float, default=14.0, help="of the machine (default: 14)")
    parser.add_argument("--to", type=Path, default=ROOT / "build/gpu-proof", metavar="FOLDER")
    parser.add_argument("--results", type=Path, metavar="FILE", help=f"default: {RESULTS.name}")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"default: {ROUNDS}")
    parser.add_argument("--rehearse", action="store_true", help="small sizes, nothing compiled")
    parser.add_argument("--arm", help=argparse.SUPPRESS)  # runs one, in this process
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu-proof needs an NVIDIA GPU, and torch sees none on this machine", file=sys.stderr)
        return 2
    folder = ProofFolder(options.to.absolute() / kind_of_machine(options.rehearse), options.rounds)
    folder.path.mkdir(parents=True, exist_ok=True)
    if options.arm:
        (arm,) = (each for each in folder.arms if each.name == options.arm)
        place = Place(torch.device("cuda"), SMALL if options.rehearse else Size(), options.rehearse)
        folder.keep(arm, place.perform(arm))
        return 0
    own = folder.path / RESULTS.name if options.rehearse else RESULTS
    results = options.results or own
    if reason := not_writable(results):
        print(f"{reason}; nothing was measured", file=sys.stderr)
        return 2
    with one_line("gpu-proof", "what has ended is kept: the same command goes on"):
        prove(folder, options.minutes, results, options.rehearse)
    return 0


if __name__ == "__main__":
    sys.exit(main())
