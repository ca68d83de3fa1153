"""One training by the command line, as a user starts it: how accurate it is, and its CPU time.

Its result is a file of its own, written when it ends. What is already there is not trained again,
so an interrupted series loses one training and goes on.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from omegaconf import OmegaConf

from benchmarks.speedrun import whole_tree
from distdl.config.compose import compose
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
LAST_LINES = 12  # of a training that failed
AGAIN = "the same command begins this training again"


def add_seeds(parser: argparse.ArgumentParser) -> None:
    """The arguments that say how often a recipe is trained, and where the results are kept."""
    parser.add_argument("--seeds", type=at_least(1), default=SEEDS, help=f"default: {SEEDS}")
    where = Path("outputs/speedrun/measure")
    parser.add_argument("--results", type=Path, default=where, help=f"default: {where}")


def at_least(least: int) -> Callable[[str], int]:
    """A type of argparse: whole numbers from `least` on."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} on")
        return int(text)

    return number


@contextmanager
def one_message(parser: argparse.ArgumentParser) -> Iterator[None]:
    """Ends the command with one message: exit code 2 for what was typed or found, 1 for a training
    that failed (RuntimeError), 130 for Ctrl-C."""
    try:
        yield
    except OSError as error:
        # A full disk has no file's name, and an error of a library may have only a text.
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        parser.exit(2, f"{parser.prog}: error: {what}\n")
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    except RuntimeError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    except KeyboardInterrupt:
        stopped = "stopped; the same command begins the training that was cut off again"
        parser.exit(130, f"{parser.prog}: {stopped}\n")


@dataclass(frozen=True)
class Trained:
    """What a training gave.

    Args:
        accuracy: Top-1 on the photographs that were held out, from 0 to 1.
        cpu: CPU seconds of the command and of every process below it.
        samples: How many photographs were validated.
        arguments: Of the command, without those that say where it is written and read.
        recipe: `recipe_of` these arguments; empty: not recorded, as before 2026-11-30.
        photographs: `folds.together` of the digests of those that it was trained and measured on;
            empty as above.
    """

    accuracy: float
    cpu: float
    samples: int
    arguments: list[str]
    recipe: str = ""
    photographs: str = ""


def recipe_of(said: Sequence[str]) -> str:
    """The sha256 of the config that arguments stand for: it changes with each file of a recipe, and
    with distdl's defaults."""
    config = compose([*said, "data.root=photographs"], [str(CONF)])
    return hashlib.sha256(OmegaConf.to_yaml(config).encode()).hexdigest()


def read(at: Path) -> Trained:
    """The result in a file.

    Raises:
        ValueError: The file is damaged.
    """
    try:
        return Trained(**json.loads(at.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{at} is damaged: remove it to train again ({error})") from error


def said_of(arguments: Sequence[str], seed: int) -> list[str]:
    """All arguments of a training, without those that say where it is written and read."""
    return [*arguments, *MEASURED, f"seed={seed}"]


def known(at: Path, said: Sequence[str], recipe: str = "", photographs: str = "") -> Trained | None:
    """The result of an earlier training; None: there is none.

    Args:
        said: The arguments that it must be of.
        recipe: What these stand for now; empty: not compared.
        photographs: The digest of those that it must be of; empty: not compared.

    Raises:
        ValueError: `at` is damaged, or has the result of other arguments, of another recipe or of
            other photographs.
    """
    if not at.is_file():
        return None
    result = read(at)
    if result.arguments != [*said]:
        raise ValueError(
            f"{at} is of a training with other arguments: rename the idea, or remove the file"
        )
    if recipe and result.recipe != recipe:
        raise ValueError(
            f"{at} is not of this recipe as it is now (its file, or distdl, has changed since): "
            "remove it to train again"
        )
    if photographs and result.photographs != photographs:
        raise ValueError(
            f"{at} is not of these photographs, or does not say of which: remove it to train "
            "again, or keep the results of these in another folder"
        )
    return result


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Holds a folder of results while something is trained for it.

    Raises:
        ValueError: Another command does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            busy = f"another command trains for {folder} now: wait until it ends"
            raise ValueError(busy) from error
        yield
    finally:
        os.close(descriptor)


def trained(
    at: Path,
    root: Path,
    arguments: Sequence[str],
    seed: int,
    *,
    photographs: str = "",
    keep: bool = False,
) -> Trained:
    """Trains, unless `at` has the result.

    Args:
        at: The file of the result, .json. The run and its output lie beside it, in the folder
            `run_folder(at)`.
        root: `data.root`.
        arguments: Of `python -m distdl`, for instance ["+experiment=first"].
        photographs: The digest of what is below `root`; empty: a result of any will do.
        keep: Whether the run's checkpoints stay.

    Raises:
        ValueError: `at` is damaged, or has the result of another recipe or of other photographs;
            or another command trains beside it.
        OSError: `at` cannot be written.
        RuntimeError: The training failed; the message has the end of its output.
    """
    said = said_of(arguments, seed)
    recipe = recipe_of(said)
    if (before := known(at, said, recipe, photographs)) is not None:
        return before
    outputs = run_folder(at)
    command = [
        sys.executable,
        "-m",
        "distdl",
        "--config-dir",
        str(CONF),
        *said,
        f"data.root={root}",
        f"output_dir={outputs}",
        "name=run",
        "experiment_name=speedrun",
    ]
    with alone_in(at.parent):
        shutil.rmtree(outputs, ignore_errors=True)  # of a training that was cut off
        outputs.mkdir()
        cpu = cpu_of(command, outputs)
        run = RunDirectory(outputs / "speedrun" / "run")
        attempt = run.last_attempt()
        if attempt is None:
            raise RuntimeError(f"{outputs} has no attempt: the command started no run")
        metrics = attempt.status()["metrics"]
        result = Trained(
            accuracy=metrics["val/acc1"],
            cpu=round(cpu, 1),
            samples=int(metrics["val/samples"]),
            arguments=said,
            recipe=recipe,
            photographs=photographs,
        )
        write(at, result)
        if not keep:
            shutil.rmtree(run.path / "checkpoints", ignore_errors=True)
    return result


def run_folder(at: Path) -> Path:
    """Where the training of a result writes: its output, output.txt, and its run, speedrun/run."""
    return at.with_suffix(".run")


def write(at: Path, result: Trained) -> None:
    """Keeps a result."""
    atomic_files.write_bytes(at, json.dumps(asdict(result), indent=1).encode())


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
        process = subprocess.Popen(
            [sys.executable, whole_tree.__file__, str(seconds), *command],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    try:
        code = process.wait()
    except KeyboardInterrupt:
        process.terminate()  # a Ctrl-C of the terminal ends the training too, any other only this
        process.wait()
        raise
    if code:
        last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
        raise RuntimeError(
            "\n".join([f"a training ended with {code}; the end of {log}:", *last, AGAIN])
        )
    return float(seconds.read_text(encoding="utf-8"))
