"""A project of one idiom in a folder of its own, what became of its runs, and Lightning's control.

Commands run in forks of a process that has imported everything (tests/warm.py).
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.adoption.table import Idiom
from tests.conftest import distdl, python

KILLED_AT = 13  # of batches, of which an epoch has eight: in the middle of the second
KILLED = (-9, 137)  # the exit codes: of this process, and of one of several ranks
PROJECTS = Path(__file__).parent / "projects"


def command(*arguments: str, cwd: Path, code: int | tuple[int, ...] = 0, **variables: str) -> str:
    """Runs `distdl ...` in a folder, which must end with this code; what it printed."""
    done = distdl(*arguments, cwd=cwd, env=variables)
    printed = done.stdout + done.stderr
    assert done.returncode in (code if isinstance(code, tuple) else (code,)), printed
    return printed


@dataclass
class Project:
    """`distdl experiment=ours`, from the folder that holds the code."""

    idiom: Idiom
    folder: Path

    def __post_init__(self) -> None:
        shutil.copytree(PROJECTS, self.folder, ignore=shutil.ignore_patterns("__pycache__"))
        groups = {"model": None, "data": None, "optimizer": "none", "schedule": "none"}
        groups["tracking"] = [self.idiom.tracking]
        experiment = self.idiom.experiment
        experiment["defaults"] = [{f"override /{group}": groups[group]} for group in groups]
        experiment["callbacks"] |= self.idiom.beside
        (self.folder / "conf/experiment").mkdir(parents=True)
        text = f"# @package _global_\n{yaml.safe_dump(experiment)}"
        (self.folder / "conf/experiment/ours.yaml").write_text(text)

    def killed_and_resumed(self, run: str, *more: str, rank: int = 0) -> str:
        """Starts a run of which a rank is killed with -9 when it begins a batch, and resumes it."""
        printed = self.start(run, *more, kill=f"{rank} {KILLED_AT}")
        before = len(self._lines(run))
        assert before == KILLED_AT - 1
        printed += self.resume(run)
        first = self._lines(run)[before]["batch"]
        assert first == (11 if self.idiom.every else 9), "after the newest checkpoint"
        alarms = ("not resumable", "anew", "checkpoint holds", "does not hold", "came late")
        assert not [alarm for alarm in alarms if alarm in printed], printed
        return printed

    def start(self, run: str, *more: str, kill: str = "") -> str:
        return self._command(run, "experiment=ours", f"name={run}", *more, kill=kill)

    def resume(self, run: str, *more: str, kill: str = "") -> str:
        return self._command(run, "resume", f"outputs/ours/{run}", *more, kill=kill)

    def _command(self, run: str, *arguments: str, kill: str = "") -> str:
        variables = {"SEEN": str(self._seen(run)), "KILL_AT": kill}
        return command(*arguments, cwd=self.folder, code=KILLED if kill else 0, **variables)

    def control(self, run: str = "one") -> dict[str, Any]:
        """Plain Lightning trains the same project with the samples of a run, in that order; the
        metrics of its training, validation and test."""
        arguments = map(yaml.safe_dump, (self.idiom.experiment, self.order(run)))
        env = {"SEEN": str(self._seen("control"))}
        ended = python("control.py", *arguments, cwd=self.folder, env=env)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return json.loads((self.folder / "control.json").read_text())

    def seen(self, run: str, rank: int = 0) -> dict[int, dict[str, Any]]:
        """batch (from 1, over all epochs) -> what was seen of it; a later attempt's counts."""
        return {line["batch"]: line for line in self._lines(run, rank)}

    def _lines(self, run: str, rank: int = 0) -> list[dict[str, Any]]:
        text = (self._seen(run) / f"rank{rank}.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def _seen(self, run: str) -> Path:
        folder = self.folder / f"seen-{run}"
        folder.mkdir(exist_ok=True)
        return folder

    def order(self, run: str, ranks: int = 1) -> list[list[list[int]]]:
        """epoch -> batch -> the ids in it, over the ranks."""
        seen = [self.seen(run, rank) for rank in range(ranks)]
        epochs: dict[int, list[list[int]]] = {}
        for batch in sorted(seen[0]):
            ids = [i for each in seen for i in each[batch]["ids"]]
            epochs.setdefault(seen[0][batch]["epoch"], []).append(ids)
        return list(epochs.values())

    def metrics(self, run: str) -> dict[str, float]:
        return metrics_of(self.folder / "outputs/ours" / run)


def metrics_of(run: Path) -> dict[str, float]:
    """The metrics of the newest attempt of a run."""
    last = sorted((run / "attempts").glob("[0-9]*"))[-1]
    return json.loads((last / "status.json").read_text())["metrics"]
