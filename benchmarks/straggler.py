"""Which rank slows a job down, and in which part of a step: distdl's verdicts beside TraceML's.

Two gloo ranks of distdl's worker train a small network. In each run, one rank is made slower in one
part of its steps by 50 ms; for the link, the rate of what the rank sends is limited, in a network
namespace of its own (as root, on Linux). Other runs are undisturbed. A verdict is right if it names
the rank and the part, and if nothing else was warned of. It is read where a user reads it: in
status.json and in the log. The ranks compare their steps every 2 s instead of every 10 s. Runs are
in memory where the machine allows: on a disk that needs longer for a checkpoint than 4 steps take,
rank 0 waits for it, is slow in truth, and is named as well.

If TraceML is installed (`make .servers/traceml`), `traceml run` starts the same ranks, and its
final summary is read too. It has no verdict for links.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import pair, runs
from benchmarks.slow import Slow
from benchmarks.table import Goal
from distdl.health.straggler import WORDS
from tests.cluster.hosts import why_not

PARTS = ("data", "copy", "forward", "backward", "optimizer", "checkpoint", "link")
SECONDS = 0.05
SAVE_EVERY = 4  # steps
# The slow rank of each repeat, and whether the network has batch norm.
REPEATS = ((1, False), (0, False), (1, True))
UNDISTURBED = 10
STEPS = dict.fromkeys(PARTS, 100) | {"checkpoint": 200, "": 320}  # about 8 s each
EXCHANGE_S = 2.0
COMMON = (
    "model=slow",
    "data=slow",
    "optimizer=none",
    "schedule=none",
    "strategy=ddp",
    "trainer.accelerator=cpu",
    f"trainer.devices={pair.RANKS}",
    "trainer.max_epochs=1",
    "tracking=none",
    f"checkpoint.every_n_steps={SAVE_EVERY}",
)
ROOT = Path(__file__).resolve().parents[1]
TRACEML = ROOT / ".servers/traceml/bin/traceml"
READY = ROOT / ".servers/traceml/.ready"
# Kinds of its diagnoses: docs/developer_guide/rank-straggler-policy.md of traceopt-ai/traceml
THEIR_PARTS = {"INPUT_STRAGGLER": "data", "H2D_STRAGGLER": "copy", "COMPUTE_STRAGGLER": "forward"}
WARNING = re.compile(r"rank (\d+) \(\S+\) is slow: (.+?) takes (\d+) ms")
LINK = re.compile(r"the link between the ranks is slow: (\d+) ms")
MEMORY = Path("/dev/shm")
NEW_NETWORK = 0x40000000  # CLONE_NEWNET of linux/sched.h

Named = tuple[int | None, str]  # a rank, or None for the link; and a part


@dataclass
class Run:
    """A run, and what was said about it."""

    part: str  # "" if nothing is slow
    rank: int | None
    batch_norm: bool
    path: Path
    ours: dict[Named, int] = field(default_factory=dict)  # with milliseconds
    theirs: list[str] | None = None  # kinds with ranks; None: TraceML took no part
    their_part: bool = False  # whether they name the rank and the part, and nothing else
    their_rank: bool = False  # whether they name the rank

    @property
    def expected(self) -> Named:
        return (None if self.part == "link" else self.rank), self.part

    @property
    def right(self) -> bool:
        return set(self.ours) == ({self.expected} if self.part else set())


def create(folder: Path, part: str, rank: int, batch_norm: bool) -> Run:
    options = [f"data.steps={STEPS[part]}", f"data.late={part == 'data'}"]
    slow = part if part not in ("data", "link") else ""
    options += [f"{node}.{key}" for node in ("model", "data") for key in (f"rank={rank}",)]
    options += [f"model.part={slow}", f"model.batch_norm={batch_norm}"]
    options += [f"{node}.seconds={SECONDS}" for node in ("model", "data")]
    return Run(part, rank, batch_norm, runs.create_run(folder, *COMMON, *options).path)


def rank_main(plan: str) -> None:
    """A rank of one or more runs."""
    from distdl.health import peers

    peers.EXCHANGE_S = EXCHANGE_S
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # of `traceml run`
    os.environ |= {"DISTDL_LAUNCHER": "local", "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
    if hosts := json.loads(Path(plan).read_text(encoding="utf-8")).get("hosts"):
        os.environ |= {"MASTER_ADDR": address(0), "GLOO_SOCKET_IFNAME": "eth0"}
        with open(f"/run/netns/{hosts[int(os.environ['RANK'])]}", encoding="utf-8") as network:
            if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), NEW_NETWORK):
                raise OSError(ctypes.get_errno(), "setns")
    pair.rank_main(plan)


def address(rank: int) -> str:
    return f"10.77.0.{rank + 1}"


@contextlib.contextmanager
def two_hosts() -> Iterator[list[str]]:
    """The names of two network namespaces with a cable between them; none without permission."""
    names = [f"distdl-{os.getpid()}-{rank}" for rank in range(pair.RANKS)]
    commands = [["netns", "add", name] for name in names]
    commands += [f"link add eth0 netns {names[0]} type veth peer eth0 netns {names[1]}".split()]
    for rank, name in enumerate(names):
        commands += [["-n", name, "addr", "add", f"{address(rank)}/24", "dev", "eth0"]]
        commands += [["-n", name, "link", "set", device, "up"] for device in ("lo", "eth0")]
    try:
        try:
            for command in commands:
                subprocess.run(["ip", *command], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            names = []
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=True)


def work(chosen: Sequence[Run], hosts: Sequence[str] = ()) -> None:
    """Both ranks execute these runs, one after the other."""
    code = "import sys; from benchmarks import straggler; straggler.rank_main(sys.argv[1])"
    pair.start(code, plan_of(chosen, hosts))


def plan_of(chosen: Sequence[Run], hosts: Sequence[str] = ()) -> dict[str, Any]:
    ports = pair.free_ports(len(chosen))
    return {"runs": [str(run.path) for run in chosen], "ports": ports, "hosts": [*hosts]}


def work_over_slow_links(chosen: Sequence[Run], hosts: Sequence[str]) -> None:
    """Limits what the slow rank sends so that the gradients of a step take SECONDS."""
    rate = 4 * sum(parameter.numel() for parameter in Slow().parameters()) / SECONDS
    for run in chosen:
        limit = [
            "tc",
            "-n",
            hosts[run.rank or 0],
            "qdisc",
            "add",
            "dev",
            "eth0",
            "root",
            "tbf",
            "rate",
            f"{rate:.0f}bps",
            "burst",
            "256kb",
            "latency",
            "1s",
        ]
        subprocess.run(limit, check=True)
        work([run], hosts)
        subprocess.run([*limit[:4], "del", *limit[5:8]], check=True)


def work_with_traceml(run: Run) -> None:
    """As `work`, and TraceML watches."""
    with tempfile.TemporaryDirectory() as name:
        plan, folder = Path(name, "plan.json"), Path(name, "traceml")
        plan.write_text(json.dumps(plan_of([run])), encoding="utf-8")
        command = [
            str(TRACEML),
            "run",
            __file__,
            f"--nproc-per-node={pair.RANKS}",
            "--mode=summary",
            "--logs-dir",
            str(folder),
            "--run-name",
            "run",
            "--no-save-training-output",
            "--args",
            str(plan),
        ]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        if done.returncode:
            raise RuntimeError(f"traceml run: {done.stdout[-3000:]}{done.stderr[-3000:]}")
        summary = json.loads((folder / "run" / "final_summary.json").read_text())
    issues = [i for i in summary["step_time"]["issues"] if i["kind"].endswith("STRAGGLER")]
    run.theirs = [f"{i['kind']} {','.join(map(str, i['ranks']))}" for i in issues]
    named = {(rank, THEIR_PARTS.get(i["kind"], "")) for i in issues for rank in i["ranks"]}
    run.their_part = named == ({run.expected} if run.part else set())
    run.their_rank = {rank for rank, _ in named} == ({run.rank} if run.part else set())


def read(run: Run) -> None:
    """What distdl has warned of."""
    attempt = run.path / "attempts/001"
    status = json.loads((attempt / "status.json").read_text()).get("straggler") or ""
    parts = {words: part for part, words in WORDS.items()}
    for text in (status, (attempt / "logs/rank_0.log").read_text()):
        for rank, words, ms in WARNING.findall(text):
            run.ours[int(rank), parts[words]] = int(ms)
        for ms in LINK.findall(text):
            run.ours[None, "link"] = int(ms)


@dataclass(frozen=True)
class Verdicts:
    """The verdicts on all runs."""

    runs: Sequence[Run]

    @property
    def goals(self) -> list[Goal]:
        slow = [run.right for run in self.runs if run.part]
        wrong = [not run.right for run in self.runs if not run.part]
        what = f"right verdicts on a rank that is 50 ms slower in one part, {len(slow)} runs"
        return [
            Goal(what, "at least 1", sum(slow) / len(slow)),
            Goal(f"verdicts on {len(wrong)} undisturbed runs", "at most 0", float(sum(wrong))),
        ]

    def markdown(self) -> str:
        rows = "\n".join(
            row(name or "none (undisturbed)", [run for run in self.runs if run.part == name])
            for name in (*PARTS, "")
        )
        in_memory = all(run.path.is_relative_to(MEMORY) for run in self.runs)
        where = "in memory" if in_memory else "on a disk, which may slow rank 0 down as well"
        return (
            "## Which rank is slow, and in which part of a step\n\n"
            "Competitor: traceml-ai, which watches the same runs. Two gloo ranks, an MLP of 3 MB; "
            "in each run one rank is slower by 50 ms in one part of its steps, first rank 1, then "
            "rank 0, then rank 1 with batch norm. Right: the rank and the part are named, and "
            "nothing else. The milliseconds are those that distdl reports; checkpoints are saved "
            f"every {SAVE_EVERY} steps, {where}.\n\n"
            "| slow part | distdl, right | ms per step | traceml-ai, right | only the rank | "
            f"it reports |\n|---|---|---|---|---|---|\n{rows}\n\n"
            "`python -m benchmarks.run straggler`"
        )


def row(name: str, chosen: Sequence[Run]) -> str:
    if not chosen:
        return f"| {name} | not run: needs root, `ip` and `tc` | | | | |"
    right = f"{sum(run.right for run in chosen)} of {len(chosen)}"
    ms = ", ".join(str(ms) for run in chosen for ms in run.ours.values())
    wrong = {f"{rank} {part}" for run in chosen if not run.right for rank, part in run.ours}
    seen = [run for run in chosen if run.theirs is not None]
    kinds = sorted({kind for run in seen for kind in run.theirs or ()})
    exact = sum(run.their_part for run in seen)
    rank = sum(run.their_rank and not run.their_part for run in seen)
    theirs = f"{exact} of {len(seen)} | {rank or ''}" if seen else "not run | "
    extra = f" (wrong: {', '.join(sorted(wrong))})" if wrong else ""
    return f"| {name} | {right}{extra} | {ms} | {theirs} | {', '.join(kinds)} |"


def absent() -> dict[str, str]:
    """What is not here of the competitor and the slow link, each with what is to be done."""
    missing = {} if READY.exists() else {"traceml-ai": "make .servers/traceml"}
    if reason := why_not():
        missing["a slow link"] = reason
    return missing


def main(parts: Sequence[str] = PARTS, undisturbed: int = UNDISTURBED) -> Verdicts:
    folder = MEMORY if MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(dir=folder) as name, two_hosts() as hosts:
        chosen = [
            create(Path(name), part, rank, batch_norm)
            for part in parts
            for rank, batch_norm in REPEATS
            if hosts or part != "link"
        ]
        chosen += [create(Path(name), "", 0, number % 3 == 2) for number in range(undisturbed)]
        local = [run for run in chosen if run.part != "link"]
        if READY.exists():
            for run in local:
                work_with_traceml(run)
        else:
            print("no traceml-ai: make .servers/traceml", flush=True)
            work(local)
        work_over_slow_links([run for run in chosen if run.part == "link"], hosts)
        for run in chosen:
            read(run)
    return Verdicts(chosen)


if __name__ == "__main__":  # started by `traceml run`
    import sys

    rank_main(sys.argv[1])
