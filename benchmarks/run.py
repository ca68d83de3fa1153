"""`make bench`: runs what fits this machine and writes benchmarks/RESULTS.md.

    python -m benchmarks.run                     # all parts; that for a GPU only if there is one
    python -m benchmarks.run overhead startup    # prints these parts, and writes nothing

If a part fails, the others still run; the page shows its error, and the exit code is 1.
"""

from __future__ import annotations

import importlib
import sys
import time
import traceback
from pathlib import Path
from typing import Protocol

from benchmarks.table import HEADER, Goal, machine

# The short ones first; each has `main() -> Part`.
CPU = (
    "startup",
    "search",
    "listing",
    "secrets",
    "overhead",
    "watchdog",
    "tracking",
    "checkpoint",
    "predict",
    "ddp",
    "held_out",
    "traffic",
    "pipeline",
    "serving",
    "straggler",
    "goodput",
    "detection",
)
ALL = (*CPU, "loader", "gpu")
PAGE = Path(__file__).with_name("RESULTS.md")
GPU_COMMAND = "python -m benchmarks.run gpu"


class Part(Protocol):
    """The result of a benchmark's `main`."""

    @property
    def goals(self) -> list[Goal]: ...

    def markdown(self) -> str: ...


class Failed:
    """Stands for a part whose benchmark ended with an error."""

    def __init__(self, name: str, error: BaseException) -> None:
        self.name = name
        self.error = "".join(traceback.format_exception_only(error)).strip()

    goals: list[Goal] = []

    def markdown(self) -> str:
        return (
            f"## {self.name}: failed\n\n```\n{self.error[-2000:]}\n```\n\n"
            f"`python -m benchmarks.run {self.name}`"
        )


def measured(name: str) -> Part:
    """Runs one part; prints how long it took, and its error if it failed."""
    started = time.monotonic()
    print(f"{name} ...", flush=True)
    try:
        result: Part = importlib.import_module(f"benchmarks.{name}").main()
    except Exception as error:
        traceback.print_exc()
        result = Failed(name, error)
    how = "failed" if isinstance(result, Failed) else "done"
    print(result.markdown(), flush=True)
    print(f"{name}: {how} in {time.monotonic() - started:.0f} s\n", flush=True)
    return result


def page(parts: list[Part], missing: list[Goal], seconds: float) -> str:
    """The text of RESULTS.md."""
    goals = [goal for part in parts for goal in part.goals] + missing
    sections = [
        "# Results",
        f"{time.strftime('%Y-%m-%d')}, {machine()}.",
        f"`make bench`, {seconds / 60:.1f} minutes. Interleaved: A, B, C, A, B, C. Ratios are "
        "those of the medians; where trainings take turns (MLflow, DDP, pipeline), the median of "
        "the rounds' ratios. A/A is the range of the competitor's ratio to itself in the same run, "
        "with 95 % confidence. A goal within 2 % of 1 is also reached inside this range. If the "
        "range is wider than 0.1, the machine was not idle, and the goal stays undecided.",
        HEADER + "\n" + "\n".join(goal.row() for goal in goals),
        *(part.markdown() for part in parts),
    ]
    if missing:
        sections.append(
            "## Not run\n\nThis machine has no NVIDIA GPU. On a machine with one, "
            f"`{GPU_COMMAND}` measures:\n\n"
            + "\n".join(f"- {goal.what}: {goal.goal}" for goal in missing)
            + "\n\n[RESULTS_GPU.md](RESULTS_GPU.md) is what was measured on one once."
        )
    return "\n\n".join(sections) + "\n"


def main(names: list[str]) -> int:
    if {"-h", "--help"} & set(names):
        print(f"{__doc__}\nparts: {', '.join(ALL)}")
        return 0
    unknown = set(names) - set(ALL)
    if unknown:
        print(f"unknown benchmark {', '.join(sorted(unknown))}; choose from: {', '.join(ALL)}")
        return 2
    from benchmarks import gpu

    if "gpu" in names and not gpu.available():
        print("gpu: needs an NVIDIA GPU, and torch sees none on this machine")
        return 2
    chosen = names or [name for name in ALL if name != "gpu" or gpu.available()]
    started = time.monotonic()
    parts = [measured(name) for name in chosen]
    missing = [] if "gpu" in chosen else gpu.not_run()
    text = page(parts, missing if not names else [], time.monotonic() - started)
    if names:
        print("\n".join([HEADER, *(goal.row() for part in parts for goal in part.goals)]))
    else:
        PAGE.write_text(text)
        print(f"{PAGE.name}: {(time.monotonic() - started) / 60:.1f} minutes")
    failed = [part.name for part in parts if isinstance(part, Failed)]
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
