"""`make bench`: measures what fits this machine, and writes benchmarks/RESULTS.md.

    python -m benchmarks.run                     # prints all parts; that for a GPU if there is one
    python -m benchmarks.run overhead startup    # prints these
    python -m benchmarks.run --keep [PART ...]   # also keeps what they measured
    python -m benchmarks.run --page              # measures nothing, and makes the page anew

A part that is kept is written when it ends, to a file of its own in benchmarks/results, and
RESULTS.md is made anew from all of them: whatever cuts the time off loses one part. Parts whose
results are oldest come first, so the same command goes on where it was cut off. Of several parts,
each has a process of its own. If a part fails, or lacks a competitor that its kept result has, the
others still run, that result stays, and the exit code is 1; after Ctrl-C it is 130.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from benchmarks.ctrl_c import INTERRUPTED
from benchmarks.keeping import not_writable
from benchmarks.table import HEADER, ROOT, Goal, commit, machine
from distdl.util import atomic_files
from distdl.util.suggest import did_you_mean_word
from distdl.util.wording import plural

# The short ones first; each has `main() -> Part`, and those with competitors that may be missing
# `absent()`: their names, each with what installs it.
CPU = (
    "startup",
    "search",
    "listing",
    "secrets_in_files",
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
KEPT = Path(__file__).with_name("results")
ISO_8601 = "%Y-%m-%dT%H:%M:%S"
# Parts whose competitors are in an environment of their own.
ENVIRONMENTS = {"loader": ROOT / ".servers/loaders"}


class Part(Protocol):
    """The result of a benchmark's `main`."""

    @property
    def goals(self) -> Sequence[Goal]: ...

    def markdown(self) -> str: ...


@dataclass(frozen=True)
class Kept:
    """What a part measured, when, where, and with which distdl.

    Args:
        ended: Local time, as ISO 8601 writes it, to the second.
        seconds: None where it was not written down.
        text: Its section of the page, without the title.
        absent: Competitors that were not installed.
        remark: What a person adds, such as what else the machine did; gone with the next result.
    """

    name: str
    title: str
    ended: str
    commit: str
    machine: str
    seconds: float | None
    goals: Sequence[Goal]
    text: str
    absent: Sequence[str] = ()
    remark: str = ""

    @classmethod
    def of(cls, name: str, part: Part, seconds: float, commit: str) -> Kept:
        title, _, text = part.markdown().removeprefix("## ").partition("\n")
        return cls(
            name,
            title=title,
            ended=time.strftime(ISO_8601),
            commit=commit,
            machine=machine(),
            seconds=seconds,
            goals=tuple(part.goals),
            text=text.strip(),
            absent=tuple(absent(name)),
        )

    @classmethod
    def read(cls, name: str) -> Kept | None:
        """None without a result, and where its file is damaged, which is said."""
        file = KEPT / f"{name}.json"
        if not file.exists():
            return None
        try:
            fields: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            goals = [_goal(**each) for each in fields.pop("goals")]
            text = "\n".join(fields.pop("text"))
            kept = cls(name, goals=goals, text=text, **fields)
            time.strptime(kept.ended, ISO_8601)
            if not isinstance(kept.seconds, int | float | None):
                raise ValueError(f"seconds is {kept.seconds!r}")
            return kept
        except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
            print(f"{file.name} is damaged, so this part counts as not measured: {error}")
            return None

    def write(self) -> None:
        """The text is a list of lines, so that a difference between two results can be read."""
        fields = dataclasses.asdict(self) | {"text": self.text.splitlines()}
        del fields["name"]
        text = json.dumps(fields, indent=1, ensure_ascii=False) + "\n"
        atomic_files.write_bytes(KEPT / f"{self.name}.json", text.encode())

    def section(self) -> str:
        minutes = "" if self.seconds is None else f", in {self.seconds / 60:.1f} minutes"
        measured = f"Measured on {self.ended[:10]} with distdl at {self.commit}{minutes}."
        if self.absent:
            measured += f" Not installed: {', '.join(self.absent)}."
        paragraphs = [f"## {self.title}", measured, self.remark, self.text]
        return "\n\n".join(paragraph for paragraph in paragraphs if paragraph)


def _goal(same: Sequence[float] | None, **fields: Any) -> Goal:
    return Goal(same=None if same is None else (same[0], same[1]), **fields)


def absent(name: str) -> dict[str, str]:
    """The competitors of a part that are not installed here, each with what installs it."""
    of_part: Callable[[], dict[str, str]] = getattr(module_of(name), "absent", dict)
    return of_part()


def module_of(name: str) -> ModuleType:
    return importlib.import_module(f"benchmarks.{name}")


def with_less(name: str) -> str:
    """Why a new result of a part would say less than the one that is kept; "" if it would not."""
    kept = Kept.read(name)
    missing = {} if kept is None else absent(name)
    lost = {each: how for each, how in missing.items() if kept and each not in kept.absent}
    if not lost:
        return ""
    return (
        f"{name}: not measured, as its result in {KEPT.name}/ compares with "
        f"{'; '.join(lost)}. Not installed here: {', '.join(dict.fromkeys(lost.values()))}"
    )


def not_kept(names: Sequence[str]) -> str:
    """Why the results of these parts could not be kept; "" if they can."""
    reasons = (not_writable(file) for file in (PAGE, *(KEPT / f"{name}.json" for name in names)))
    return next(filter(None, reasons), "")


def last_time(names: Sequence[str]) -> str:
    """How long these parts took, as far as it was written down; "" if it never was."""
    seconds = {}
    for name in names:
        kept = Kept.read(name)
        if kept is not None and kept.seconds is not None:
            seconds[name] = kept.seconds
    if not seconds:
        return ""
    unknown = [name for name in names if name not in seconds]
    without = f" without {', '.join(unknown)}" if unknown else ""
    return f" (the last time {sum(seconds.values()) / 60:.1f} minutes{without})"


def is_here(name: str) -> bool:
    """Whether this process can import the competitors of a part, as far as they are installed."""
    folder = ENVIRONMENTS.get(name)
    return folder is None or not (folder / ".ready").exists() or sys.prefix == str(folder)


def torch_sees_a_gpu() -> bool:
    """Asked of another process: in this one torch would take half a GB as long as parts run."""
    question = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", question], check=False).returncode == 0


def in_own_process(name: str, keep: bool) -> int:
    """The exit code of a part that is measured by a new process: memory and threads that other
    parts have left behind cost it nothing, and what kills it (no memory left) ends it alone."""
    python = sys.executable if is_here(name) else str(ENVIRONMENTS[name] / "bin/python")
    words = ["--keep"] if keep else []
    command = [python, "-m", "benchmarks.run", *words, name]
    with subprocess.Popen(command, cwd=ROOT) as process:
        try:
            code = process.wait()
        except KeyboardInterrupt:
            process.wait()  # Ctrl-C reached it as well: it ends its ranks, and removes its files
            raise
    if code < 0:
        print(f"{name}: killed by {signal.Signals(-code).name}\n", flush=True)
    return code


def in_this_process(name: str, keep: bool) -> int:
    """The exit code of a part, whose goals are printed."""
    result = measured(name, keep)
    if result is None:
        return 1
    if keep:
        try:
            result.write()
        except OSError as error:
            print(f"{name}: its result, above, is not kept: {error}\n", flush=True)
            return 1
        try:
            atomic_files.write_bytes(PAGE, page().encode())
        except OSError as error:
            print(f"{name} is kept in {KEPT.name}/, and {PAGE.name} lacks it: {error}", flush=True)
            print("once that is repaired: python -m benchmarks.run --page\n", flush=True)
            return 0
        print(f"{name} is kept in {KEPT.name}/, and {PAGE.name} has it\n", flush=True)
    print(f"{goal_table(result.goals)}\n", flush=True)
    return 0


def measured(name: str, keep: bool) -> Kept | None:
    """Runs one part and prints its result; None, with its error, if it failed, and where it is to
    be kept and would say less than what is kept."""
    started = time.monotonic()
    begun_at = commit()  # somebody may commit while it is measured
    print(f"{name} ...{last_time([name])}", flush=True)
    try:
        why_not = with_less(name) if keep else ""
        if why_not:
            print(f"{why_not}\n", flush=True)
            return None
        part: Part = module_of(name).main()
        result = Kept.of(name, part, time.monotonic() - started, begun_at)
    except SystemExit as end:  # what Lightning makes of Ctrl-C
        raise KeyboardInterrupt from end
    # Whatever ends a benchmark, the others shall run.
    except Exception:
        traceback.print_exc()
        print(f"{name}: failed in {time.monotonic() - started:.0f} s\n", flush=True)
        return None
    print(f"{result.section()}\n\n{name}: done\n", flush=True)
    return result


def goal_table(goals: Sequence[Goal]) -> str:
    return "\n".join([HEADER, *(goal.row() for goal in goals)])


def page() -> str:
    """The text of RESULTS.md, from all results that are kept."""
    from benchmarks import gpu

    found = {name: Kept.read(name) for name in ALL}
    kept = [each for each in found.values() if each is not None]
    machines = dict.fromkeys(each.machine for each in kept)
    where = [
        f"- {place}: " + ", ".join(each.name for each in kept if each.machine == place)
        for place in machines
    ]
    goals = [goal for each in kept for goal in each.goals]
    if found["gpu"] is None:
        goals += gpu.not_run()
    sections = [
        "# Results",
        "`make bench` writes this page. Each part says when it was measured, and was measured on:",
        "\n".join(where),
        "Interleaved: A, B, C, A, B, C. Ratios are "
        "those of the medians; where trainings take turns (MLflow, DDP, pipeline), the median of "
        "the rounds' ratios. A/A is the range of the competitor's ratio to itself in the same run, "
        "with 95 % confidence. A goal within 2 % of 1 is also reached inside this range. If the "
        "range is wider than 0.1, the machine was not idle, and the goal stays undecided.",
        goal_table(goals),
        *(each.section() for each in kept),
    ]
    missing = [name for name in CPU if found[name] is None]
    if missing:
        sections.append(
            "## Without a result\n\n"
            f"{', '.join(missing)}: `python -m benchmarks.run --keep {' '.join(missing)}`"
        )
    if found["gpu"] is None:
        sections.append(
            "## Not run\n\nThis machine has no NVIDIA GPU. On a machine with one, "
            "`python -m benchmarks.run gpu` measures:\n\n"
            + "\n".join(f"- {goal.what}: {goal.goal}" for goal in gpu.not_run())
            + "\n\n[RESULTS_GPU.md](RESULTS_GPU.md) is what was measured on one once."
        )
    return "\n\n".join(sections) + "\n"


def oldest_first(names: Sequence[str]) -> list[str]:
    """Those without a result before all others."""

    def ended(name: str) -> str:
        kept = Kept.read(name)
        return "" if kept is None else kept.ended

    return sorted(names, key=ended)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(ALL))
    parser.add_argument("--keep", action="store_true", help=f"writes {KEPT.name}/ and {PAGE.name}")
    parser.add_argument("--page", action="store_true", help=f"only writes {PAGE.name}")
    options = parser.parse_args(words)
    for name in options.parts:
        if name not in ALL:
            near = did_you_mean_word(name, ALL) or f"choose from: {' '.join(ALL)}"
            print(f"{name}: unknown benchmark; {near}")
            return 2
    if options.page:
        return page_made(options.parts)
    begun = time.time()
    try:
        return chosen_measured(options.parts, options.keep)
    except KeyboardInterrupt:
        print(f"\ninterrupted; kept: {', '.join(kept_since(begun)) or 'nothing'}", flush=True)
        return INTERRUPTED


def chosen_measured(parts: Sequence[str], keep: bool) -> int:
    """Measures these parts, or without a name all that fit this machine; the exit code."""
    chosen = list(parts or ALL)
    if "gpu" in chosen and not torch_sees_a_gpu():
        if parts:
            print("gpu: needs an NVIDIA GPU, and torch sees none on this machine")
            return 2
        chosen.remove("gpu")
    if keep:
        if reason := not_kept(chosen):
            print(f"{reason}; nothing was measured")
            return 2
        chosen = oldest_first(chosen)
    if len(chosen) == 1 and is_here(chosen[0]):
        return in_this_process(chosen[0], keep)
    print(f"{len(chosen)} {plural('part', len(chosen))}{last_time(chosen)}\n", flush=True)
    without = [name for name in chosen if in_own_process(name, keep)]
    if keep:
        results = [Kept.read(name) for name in chosen if name not in without]
        print(goal_table([goal for each in results if each is not None for goal in each.goals]))
    if without:
        print(f"without a new result (see above): {', '.join(without)}")
    return 1 if without else 0


def kept_since(begun: float) -> list[str]:
    """The parts whose results were written after this time (seconds since 1970)."""
    files = {name: KEPT / f"{name}.json" for name in ALL}
    return [n for n, file in files.items() if file.exists() and file.stat().st_mtime >= begun]


def page_made(parts: Sequence[str]) -> int:
    """Makes the page anew, of all results; the exit code."""
    if parts:
        print(f"--page is made of all results: leave {', '.join(parts)} away")
        return 2
    if reason := not_writable(PAGE):
        print(reason)
        return 2
    atomic_files.write_bytes(PAGE, page().encode())
    print(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
