"""One training by the command line, as a user starts it: how accurate it is, and its CPU time.

Its result is a file of its own, written when it ends. What is already there is not trained again,
so an interrupted series loses one training and goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.speedrun import whole_tree
from distdl.runs.directory import RunDirectory
from distdl.util import atomic_files

CONF = Path(__file__).with_name("conf")
# One validation, after the last epoch, and no checkpoint before it: every arm is measured alike.
MEASURED = (
    "trainer.check_val_every_n_epoch=${trainer.max_epochs}",
    "checkpoint.every_n_epochs=${trainer.max_epochs}",
    "checkpoint.every_minutes=null",
    "checkpoint.monitor=null",
    "tracking=none",
)


SEEDS = 3


def add_seeds(parser: argparse.ArgumentParser) -> None:
    """The arguments that say how often a recipe is trained, and where the results are kept."""
    parser.add_argument("--seeds", type=at_least_one, default=SEEDS, help=f"default: {SEEDS}")
    where = Path("outputs/speedrun/measure")
    parser.add_argument("--results", type=Path, default=where, help=f"default: {where}")


def at_least_one(text: str) -> int:
    """A type of argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1 on")
    return int(text)


@contextmanager
def one_message(parser: argparse.ArgumentParser) -> Iterator[None]:
    """Ends the command with one message: exit code 2 for what was typed or found (ValueError), 1
    for a training that failed (RuntimeError)."""
    try:
        yield
    except ValueError as error:
        parser.error(str(error))
    except RuntimeError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")


@dataclass(frozen=True)
class Trained:
    """What a training gave.

    Args:
        accuracy: Top-1 on the photographs that were held out, from 0 to 1.
        cpu: CPU seconds of the command and of every process below it.
        samples: How many photographs were validated.
        arguments: Of the command, without those that say where it is written and read.
    """

    accuracy: float
    cpu: float
    samples: int
    arguments: list[str]


def read(at: Path) -> Trained:
    """The result in a file.

    Raises:
        ValueError: The file is damaged.
    """
    try:
        return Trained(**json.loads(at.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{at} is damaged: remove it to train again ({error})") from error


def known(at: Path, said: Sequence[str]) -> Trained | None:
    """The result of an earlier training; None: there is none.

    Args:
        said: The arguments that it must be of.

    Raises:
        ValueError: `at` is damaged, or has the result of other arguments.
    """
    if not at.is_file():
        return None
    result = read(at)
    if result.arguments != [*said]:
        raise ValueError(
            f"{at} is of a training with other arguments: rename the idea, or remove the file"
        )
    return result


def trained(
    at: Path, root: Path, arguments: Sequence[str], seed: int, *, keep: bool = False
) -> Trained:
    """Trains, unless `at` has the result.

    Args:
        at: The file of the result, .json. The run and its output lie beside it while it trains.
        root: `data.root`.
        arguments: Of `python -m distdl`, for instance ["+experiment=first"].
        keep: Whether the run's folder stays.

    Raises:
        ValueError: `at` is damaged, or has the result of other arguments.
        RuntimeError: The training failed; the message has the end of its output.
    """
    said = [*arguments, *MEASURED, f"seed={seed}"]
    if (before := known(at, said)) is not None:
        return before
    outputs = at.with_suffix(".run")
    shutil.rmtree(outputs, ignore_errors=True)  # of a training that was cut off
    outputs.mkdir(parents=True)
    command = [
        *(sys.executable, "-m", "distdl", "--config-dir", str(CONF)),
        *said,
        f"data.root={root}",
        f"output_dir={outputs}",
        "name=run",
        "experiment_name=speedrun",
    ]
    cpu = cpu_of(command, outputs)
    attempt = RunDirectory(outputs / "speedrun" / "run").last_attempt()
    if attempt is None:
        raise RuntimeError(f"{outputs} has no attempt: the command started no run")
    metrics = attempt.status()["metrics"]
    result = Trained(metrics["val/acc1"], round(cpu, 1), int(metrics["val/samples"]), said)
    atomic_files.write_bytes(at, json.dumps(asdict(result), indent=1).encode())
    if not keep:
        shutil.rmtree(outputs)
    return result


def cpu_of(command: Sequence[str], folder: Path) -> float:
    """CPU seconds of a command and of every process below it, until the last one has ended.

    Args:
        folder: Gets the command's output, output.txt.

    Raises:
        RuntimeError: The command failed; the message has the end of its output.
    """
    seconds = folder / "cpu_seconds.txt"
    log = folder / "output.txt"
    with open(log, "wb") as output:
        code = subprocess.call(
            [sys.executable, whole_tree.__file__, str(seconds), *command],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    if code:
        raise RuntimeError(f"{folder} ended with {code}: {log.read_text(encoding='utf-8')[-3000:]}")
    return float(seconds.read_text(encoding="utf-8"))
