"""What a drill disturbs: a training of distdl's, or a program of the user's own."""

from __future__ import annotations

import copy
import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from distdl.runs.attempt import RANKS, RankProcess
from distdl.runs.checkpoints import parts_of
from distdl.runs.directory import Attempt, shown
from distdl.stores import is_remote
from distdl.tools.drill import samples, weights

if TYPE_CHECKING:
    from distdl.tools.drill.drilled_run import DrilledRun
    from distdl.tools.drill.trial import FaultRow

STEP_S = 0.05  # the shortest step of a drilled training, so that there is a moment for the fault
SAVED = 2  # checkpoints before the fault
# The watchdog's timeout in a trial: the longer of these two.
TIMEOUT_S = 5.0
TIMEOUT_STEPS = 4  # times the time of a step
NAMED = 3  # files that a cell names


class Subject(ABC):
    """What a drill needs to know of the runs that it disturbs."""

    columns: Sequence[str]
    """Of the table (`table.cells`)."""

    @abstractmethod
    def shortened(self, config: DictConfig) -> DictConfig:
        """The config of a copy, which reports to nobody."""

    @abstractmethod
    def length(self) -> str:
        """How long a copy is, in words; "" if nobody knows before."""

    def facts(self) -> dict[str, object]:
        """What the table says of a copy."""
        return {}

    @abstractmethod
    def progress(self, run: DrilledRun, attempt: int = 1) -> float:
        """How far an attempt has come; 0 before it has begun."""

    @abstractmethod
    def reached(self, progress: float) -> str:
        """The same in words."""

    @abstractmethod
    def moment(self, whole: float, random: Random) -> float:
        """When the fault strikes, by the progress of the twin."""

    @abstractmethod
    def has_saved(self, run: DrilledRun) -> bool:
        """Whether a run has saved enough that a fault may strike."""

    @abstractmethod
    def size_of_a_checkpoint(self, run: DrilledRun) -> int:
        """Bytes of the largest file of a checkpoint."""

    @abstractmethod
    def timeout(self, seconds: float, whole: float) -> float:
        """The watchdog's, if the twin took so many seconds for its whole progress."""

    @abstractmethod
    def lacking(self, fault: str, twin: DrilledRun) -> str:
        """Why a fault cannot be done to it; "" if it can."""

    @abstractmethod
    def signal(self, run: DrilledRun, action: str, ranks: Sequence[RankProcess]) -> None:
        """Does to ranks what happens to the process that computes."""

    @abstractmethod
    def compare(self, row: FaultRow, run: DrilledRun, twin: DrilledRun, tolerance: float) -> bool:
        """Whether a run that has come to its end has come to the same as the twin."""


class Training(Subject):
    """A training of so many optimizer steps."""

    columns = (
        "fault",
        "detected after",
        "named",
        "resumed after",
        "samples lost / repeated",
        "weights",
        "survived",
    )

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def shortened(self, config: DictConfig) -> DictConfig:
        recorder = {"_target_": "distdl.callbacks.RecordSamples", "unknown": True}
        return _with(
            config,
            {
                "trainer.max_steps": self.steps,
                "checkpoint.every_n_steps": max(1, self.steps // 10),
                "checkpoint.every_minutes": None,
                "callbacks.record_samples": recorder | {"step_seconds": STEP_S},
            },
        )

    def length(self) -> str:
        return f"{self.steps} steps"

    def facts(self) -> dict[str, object]:
        return {"steps": self.steps}

    def progress(self, run: DrilledRun, attempt: int = 1) -> float:
        """The last batch that an attempt has trained on."""
        batches = samples.read(run.run.path)
        return max((each.step for each in batches if each.attempt == attempt), default=0)

    def reached(self, progress: float) -> str:
        return f"batch {progress:.0f}"

    def moment(self, whole: float, random: Random) -> float:
        batches = round(whole)
        return random.randint(batches // 3, 3 * batches // 4)

    def has_saved(self, run: DrilledRun) -> bool:
        return len(run.checkpoints) >= SAVED

    def size_of_a_checkpoint(self, run: DrilledRun) -> int:
        return largest_file(run.checkpoints[0]).stat().st_size

    def timeout(self, seconds: float, whole: float) -> float:
        return max(TIMEOUT_S, TIMEOUT_STEPS * seconds / whole)

    def lacking(self, fault: str, twin: DrilledRun) -> str:
        return ""

    def signal(self, run: DrilledRun, action: str, ranks: Sequence[RankProcess]) -> None:
        run.act(action, [(each.host, each.process) for each in ranks])

    def compare(self, row: FaultRow, run: DrilledRun, twin: DrilledRun, tolerance: float) -> bool:
        counts = samples.lost_and_repeated(run.run.path, twin.run.path)
        row.lost, row.repeated = counts or (None, None)
        row.difference = weights.largest_difference(run.run.path, twin.run.path)
        return not any(counts or ()) and row.difference <= tolerance


class OwnProgram(Subject):
    """A program, of which only its process, its exit code and its checkpoints' files are known. Its
    progress is the time for which it has run."""

    columns = (
        "fault",
        "detected after",
        "named",
        "resumed after",
        "ran again",
        "files",
        "survived",
    )

    def __init__(self) -> None:
        self._largest = 0  # of the twin's files

    def shortened(self, config: DictConfig) -> DictConfig:
        place = config.program.get("checkpoints")
        own = {} if place and is_remote(str(place)) else {"program.checkpoints": None}
        return _with(config, own)

    def length(self) -> str:
        return ""

    def progress(self, run: DrilledRun, attempt: int = 1) -> float:
        """Seconds since the ranks have met, just before their programs started."""
        folder = Attempt(run.first.path.with_name(f"{attempt:03d}"))
        with suppress(FileNotFoundError):
            ended = folder.status().get("ended") or time.time()
            return max(0.001, float(ended) - (folder.path / RANKS).stat().st_mtime)
        return 0.0

    def reached(self, progress: float) -> str:
        return f"{progress:.1f} s of the program"

    def moment(self, whole: float, random: Random) -> float:
        return random.uniform(whole / 3, 3 * whole / 4)

    def has_saved(self, run: DrilledRun) -> bool:
        return True

    def size_of_a_checkpoint(self, run: DrilledRun) -> int:
        return self._largest

    def timeout(self, seconds: float, whole: float) -> float:
        return TIMEOUT_S

    def lacking(self, fault: str, twin: DrilledRun) -> str:
        reasons = {
            "corrupt_checkpoint": "which files are a checkpoint, only the program knows",
            "cut_link": "whether a program notices that is its own affair",
            "tracking_down": "a program talks to MLflow itself",
        }
        self._largest = max((path.stat().st_size for path in _files(twin)), default=0)
        if fault == "disk_full" and not self._largest:
            return "it leaves no files in DISTDL_CHECKPOINTS"
        return reasons.get(fault, "")

    def signal(self, run: DrilledRun, action: str, ranks: Sequence[RankProcess]) -> None:
        run.act(action, [(each.host, each.process) for each in ranks], programs=True)

    def compare(self, row: FaultRow, run: DrilledRun, twin: DrilledRun, tolerance: float) -> bool:
        row.again_s = self.progress(run, attempt=2)
        row.of_s = self.progress(twin)
        before, after = _digests(twin), _digests(run)
        names = sorted({*before, *after})
        differing = [name for name in names if before.get(name) != after.get(name)]
        few = ", ".join(differing[:NAMED]) + (", ..." if len(differing) > NAMED else "")
        row.files = "equal" if names else "none"
        if differing:
            row.files = f"differ: {few}"
        return True


def _with(config: DictConfig, settings: Mapping[str, Any]) -> DictConfig:
    """A copy with these settings, which is started again and reports to nobody."""
    short = copy.deepcopy(config)
    common: dict[str, Any] = {"tracking": {}, "follow": True, "name": None}
    if "max_attempts" in config.launcher:  # else its runs are started once
        common["launcher.max_attempts"] = max(1, config.launcher.max_attempts or 1)
    for path, value in {**settings, **common}.items():
        OmegaConf.update(short, path, value, force_add=True, merge=False)
    return short


def largest_file(checkpoint: Path) -> Path:
    return max(filter(Path.is_file, parts_of(checkpoint)), key=lambda path: path.stat().st_size)


def _files(run: DrilledRun) -> list[Path]:
    folder = run.run.checkpoints
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]


def _digests(run: DrilledRun) -> dict[str, str]:
    digests = {}
    for path in _files(run):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        digests[shown(path.relative_to(run.run.checkpoints))] = digest
    return digests
