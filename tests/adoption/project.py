"""A project of one idiom in a folder of its own, what became of its runs, and Lightning's control.

Commands run in forks of a process that has imported everything (tests/warm.py), on several ranks.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.adoption.table import IDIOMS
from tests.conftest import ROOT, distdl, free_port, python

TASKS = ["validate", "test"]
KILLED_AT = 13  # of batches, of which an epoch has eight: in the middle of the second
CALL = "import sys; sys.path.append({!r}); from {} import {} as run; sys.exit(run(*{!r}))"


def command(*arguments: str, cwd: Path, ranks: int = 1, code: int = 0, **variables: str) -> str:
    """Runs `distdl ...` in a folder, on so many ranks, as torchrun starts them; what it printed.

    Args:
        code: With which the last rank must end, negative after a signal.
    """
    each: list[dict[str, str]] = [variables]
    if ranks > 1:
        world = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        world |= {"TORCHELASTIC_RUN_ID": "adoption", **variables}
        each = [{**world, "RANK": str(n), "LOCAL_RANK": str(n)} for n in range(ranks)]
    with ThreadPoolExecutor() as pool:
        ended = list(pool.map(lambda env: distdl(*arguments, cwd=cwd, env=env), each))
    printed = "".join(each.stdout + each.stderr for each in ended)
    assert ended[-1].returncode == code and (code or not any(e.returncode for e in ended)), printed
    return printed


def call(function: str, *arguments: Any, cwd: Path, **variables: str) -> None:
    """Calls `module:function` with these arguments, as a script in this folder would."""
    module, _, name = function.partition(":")
    ended = python("-c", CALL.format(str(ROOT), module, name, arguments), cwd=cwd, env=variables)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@dataclass(frozen=True)
class Project:
    """`distdl experiment=ours`, from the folder that holds the code."""

    name: str
    folder: Path

    def __post_init__(self) -> None:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(Path(__file__).parent / "projects", self.folder, ignore=ignored)
        groups = {"model": None, "data": None, "optimizer": "none", "schedule": "none"}
        groups["tracking"] = [self.idiom.tracking]
        defaults = [{f"override /{group}": option} for group, option in groups.items()]
        text = yaml.safe_dump({"defaults": defaults, **self.idiom.experiment}, sort_keys=False)
        (self.folder / "conf/experiment").mkdir(parents=True)
        (self.folder / "conf/experiment/ours.yaml").write_text(f"# @package _global_\n{text}")

    @property
    def idiom(self) -> Any:
        return IDIOMS[self.name]

    def killed_and_resumed(self, run: str, *more: str, ranks: int = 1) -> None:
        """Starts a run whose last rank is killed with -9 when it begins a batch; resumes it."""
        self.start(run, *more, ranks=ranks, kill=f"{ranks - 1} {KILLED_AT}")
        before = len(self._lines(run))
        assert before == KILLED_AT - 1
        printed = self.resume(run, ranks=ranks)
        first = self._lines(run)[before]["batch"]
        assert first == (11 if self.idiom.every else 9), "after the newest checkpoint"
        assert "not resumable" not in printed and "anew" not in printed

    def start(self, run: str, *more: str, ranks: int = 1, kill: str = "") -> str:
        return self._command(run, "experiment=ours", f"name={run}", *more, ranks=ranks, kill=kill)

    def resume(self, run: str, *more: str, ranks: int = 1) -> str:
        return self._command(run, "resume", f"outputs/ours/{run}", *more, ranks=ranks)

    def _command(self, run: str, *arguments: str, ranks: int, kill: str = "") -> str:
        seen = self.folder / f"seen-{run}"
        seen.mkdir(exist_ok=True)
        variables = {"SEEN": str(seen), "KILL_AT": kill}
        code = -9 if kill else 0
        return command(*arguments, cwd=self.folder, ranks=ranks, code=code, **variables)

    def control(self) -> None:
        """Plain Lightning: the same project, trained without distdl."""
        (self.folder / "seen-control").mkdir()
        order = self.order("one") if self.idiom.random_order else None
        seen = str(self.folder / "seen-control")
        call("tests.adoption.project:train", self.name, order, cwd=self.folder, SEEN=seen)

    def control_results(self) -> dict[str, Any]:
        """The metrics of its training, its validation and its test."""
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


def train(name: str, order: Sequence[Sequence[Sequence[int]]] | None = None) -> int:
    """Trains an idiom in the current folder with plain Lightning, validates and tests it.

    Args:
        order: The samples of each batch of each epoch; None: in the order of the project's loaders.
    """
    import lightning
    import lightning.pytorch as pl
    from hydra.utils import instantiate
    from lightning.pytorch.loggers import TensorBoardLogger

    # As if Lightning's other package were installed.
    sys.modules["pytorch_lightning"] = sys.modules["lightning.pytorch"]
    sys.modules["lightning_fabric"] = lightning.fabric
    sys.path.insert(0, str(Path.cwd()))
    sections = IDIOMS[name].experiment
    pl.seed_everything(sections["seed"], workers=True, verbose=False)
    module = instantiate(sections["model"], _convert_="all")
    data = instantiate(sections["data"], _convert_="all") if "data" in sections else None
    source = data or module
    if order is not None:
        loader = source.train_dataloader()
        source.train_dataloader = lambda: ordered(loader, order, trainer)
    shown = dict.fromkeys(("checkpointing", "progress_bar", "model_summary"), False)
    trainer = pl.Trainer(
        **sections["trainer"],
        **{f"enable_{name}": value for name, value in shown.items()},
        callbacks=[instantiate(node) for node in sections["callbacks"].values()],
        logger=TensorBoardLogger(".") if IDIOMS[name].tracking != "none" else False,
    )
    trainer.fit(module, data)
    metrics = {
        "fit": {k: float(v) for k, v in trainer.callback_metrics.items()},
        "validate": trainer.validate(module, data, verbose=False),
        "test": trainer.test(module, data, verbose=False),
    }
    Path("control.json").write_text(json.dumps(metrics))
    return 0


def ordered(loader: Any, order: Sequence[Sequence[Sequence[int]]], trainer: Any) -> Any:
    """The same loader, whose samples come in a given order."""
    from torch.utils.data import DataLoader, Sampler

    class Ordered(Sampler[list[int]]):
        def __len__(self) -> int:
            return len(order[0])

        def __iter__(self) -> Iterator[list[int]]:
            return iter(order[trainer.current_epoch])

    if loader.batch_sampler is None:
        return DataLoader(loader.dataset, sampler=Ordered(), batch_size=None)
    kept = {"collate_fn": loader.collate_fn, "num_workers": loader.num_workers}
    return DataLoader(loader.dataset, batch_sampler=Ordered(), **kept)
