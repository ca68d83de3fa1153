"""A project of one idiom in a folder of its own: what a user has, and what became of its runs."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.adoption import warm
from tests.adoption.table import IDIOMS, Idiom, experiment
from tests.adoption.warm import Ended

TASKS = ["validate", "test"]
CODE = Path(__file__).parent / "projects"
KILLED_AT = 13  # of batches, of which an epoch has eight: in the middle of the second


@dataclass(frozen=True)
class Project:
    """`distdl experiment=ours`, from the folder that holds the code."""

    name: str
    folder: Path

    @classmethod
    def make(cls, name: str, folder: Path) -> Project:
        shutil.copytree(CODE, folder, ignore=shutil.ignore_patterns("__pycache__"))
        idiom = IDIOMS[name]
        groups = {"model": None, "data": None, "optimizer": "none", "schedule": "none"}
        defaults = [{f"override /{k}": v} for k, v in groups.items()]
        defaults.append({"override /tracking": [idiom.tracking]})
        text = yaml.safe_dump({"defaults": defaults, **experiment(idiom)}, sort_keys=False)
        (folder / "conf/experiment").mkdir(parents=True)
        (folder / "conf/experiment/ours.yaml").write_text(f"# @package _global_\n{text}")
        return cls(name, folder)

    @property
    def idiom(self) -> Idiom:
        return IDIOMS[self.name]

    def killed_and_resumed(self, run: str, *more: str, ranks: int = 1, at: int = KILLED_AT) -> None:
        """Starts a run whose last rank is killed with -9 when it begins a batch; resumes it."""
        last = ranks - 1
        ended = self.start(run, *more, ranks=ranks, kill=f"{last} {at}")
        assert ended.codes[last] == -9, ended.output
        before = len(self._lines(run))
        assert before == at - 1
        ended = self.resume(run, ranks=ranks)
        assert ended.well, ended.output
        first = self._lines(run)[before]["batch"]
        assert first == (11 if self.idiom.every else 9), "after the newest checkpoint"
        assert "not resumable" not in ended.output and "anew" not in ended.output

    def start(self, run: str, *more: str, ranks: int = 1, kill: str = "") -> Ended:
        return self._command(run, "experiment=ours", f"name={run}", *more, ranks=ranks, kill=kill)

    def resume(self, run: str, *more: str, ranks: int = 1) -> Ended:
        return self._command(run, "resume", f"outputs/ours/{run}", *more, ranks=ranks)

    def _command(self, run: str, *arguments: str, ranks: int, kill: str = "") -> Ended:
        seen = self.folder / f"seen-{run}"
        seen.mkdir(exist_ok=True)
        variables = {"SEEN": str(seen), "KILL_AT": kill}
        return warm.command(*arguments, cwd=self.folder, ranks=ranks, **variables)

    def control(self, order: list[list[list[int]]] | None = None) -> Ended:
        seen = self.folder / "seen-control"
        seen.mkdir()
        function = "tests.adoption.control:train"
        return warm.call(function, self.name, order, cwd=self.folder, SEEN=str(seen))

    def found_by_control(self) -> dict[str, Any]:
        """What its training, its validation and its test came to."""
        return json.loads((self.folder / "control.json").read_text())

    def seen(self, run: str, rank: int = 0) -> dict[int, dict[str, Any]]:
        """batch (from 1, over all epochs) -> what was seen of it; a later attempt's counts."""
        return {line["batch"]: line for line in self._lines(run, rank)}

    def _lines(self, run: str, rank: int = 0) -> list[dict[str, Any]]:
        text = (self.folder / f"seen-{run}" / f"rank{rank}.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def order(self, run: str, ranks: int = 1) -> list[list[list[int]]]:
        """epoch -> batch -> the ids in it, over the ranks."""
        seen = [self.seen(run, rank) for rank in range(ranks)]
        found: dict[int, list[list[int]]] = {}
        for batch in sorted(seen[0]):
            ids = [i for each in seen for i in each[batch]["ids"]]
            found.setdefault(seen[0][batch]["epoch"], []).append(ids)
        return list(found.values())

    def metrics(self, run: str) -> dict[str, float]:
        return metrics_of(self.folder / "outputs/ours" / run)


def metrics_of(run: Path) -> dict[str, float]:
    """What the newest attempt of a run came to."""
    last = sorted((run / "attempts").glob("[0-9]*"))[-1]
    return json.loads((last / "status.json").read_text())["metrics"]
