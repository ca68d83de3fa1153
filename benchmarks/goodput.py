"""How much of the time a training keeps if a rank of two is killed again and again.

`launcher.max_attempts` against `torchrun --max-restarts` with Lightning's `ckpt_path="last"`: the
same network, data, checkpoints and kills. Goodput is the number of steps that count, times the
median time of a step, divided by the time from the first step to the last. A second run, without
kills and pauses, has the weights that are expected.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.killed import SAVE_EVERY
from benchmarks.table import Goal, Result, row
from tests.cluster.hosts import Hosts, why_not

RANKS = 2
BATCH = 4
WAIT_S = 0.05
EVERY_S, MINUTES = 60.0, 10.0
SHRUNK_STEPS = 200
MPIRUN = "mpirun.openmpi"
KILLED = Path(__file__).with_name("killed.py")
NODES = {
    "model/net": "_target_: killed.Net\nfolder: ???\nwait: 0.0\n",
    "data/rows": f"_target_: killed.Rows\nrows: ???\nbatch_size: {BATCH}\n",
}


@dataclass
class Training:
    """A training, and what its ranks have noted."""

    folder: Path
    steps: int
    ended: float = 0.0  # when its time was over; 0: it trained to the end
    kills: list[float] = field(default_factory=list)  # times
    done: list[tuple[float, int]] = field(default_factory=list)  # time and step of rank 0
    samples: dict[int, dict[int, str]] = field(default_factory=dict)  # step -> rank -> ids

    def read(self) -> None:
        """Reads the notes: what a later attempt did in a step replaces what an earlier one did."""
        rows = []
        for path in self.folder.glob("[0-9]*-*.txt"):
            for line in path.read_text().splitlines():
                moment, step, world, ids = line.split(" ", 3)
                rows.append((float(moment), int(step), int(world), int(path.name[0]), ids))
        for moment, step, world, rank, ids in sorted(rows):
            self.samples[step] = {r: i for r, i in self.samples.get(step, {}).items() if r < world}
            self.samples[step][rank] = ids
            if rank == 0:
                self.done.append((moment, step))

    @property
    def goodput(self) -> float:
        start = self.done[0][0]
        end = self.ended or self.done[-1][0]
        steps = pairwise(moment for moment, _ in self.done)
        usual = statistics.median(after - before for before, after in steps)
        return len(self.samples) * usual / (end - start)

    @property
    def healing(self) -> list[float]:
        """Seconds from each kill to the next step that had not been done before."""
        best = 0
        seconds = []
        kills = [*self.kills]
        for moment, step in self.done:
            if step > best:
                best = step
                while kills and moment > kills[0]:
                    seconds.append(moment - kills.pop(0))
        return seconds

    @property
    def wrong_samples(self) -> int:
        """How many samples of the epoch were lost or are counted more than once."""
        ids = Counter(
            i for ranks in self.samples.values() for i in " ".join(ranks.values()).split()
        )
        return sum(ids[str(number)] != 1 for number in range(self.steps * RANKS * BATCH))


def ours(folder: Path, steps: int, wait: float) -> list[str]:
    for path, text in NODES.items():
        (folder / "conf" / path).parent.mkdir(parents=True)
        (folder / "conf" / f"{path}.yaml").write_text(text)
    shutil.copy(KILLED, folder)
    return [
        sys.executable,
        "-m",
        "distdl",
        "model=net",
        f"model.folder={folder}",
        "data=rows",
        f"model.wait={wait}",
        f"data.rows={steps * RANKS * BATCH}",
        "~optimizer",
        "~schedule",
        "trainer.accelerator=cpu",
        f"trainer.devices={RANKS}",
        "trainer.max_epochs=1",
        "strategy=ddp",
        "tracking=none",
        "checkpoint.monitor=null",
        "name=run",
        f"checkpoint.every_n_steps={SAVE_EVERY}",
        "experiment_name=goodput",
        f"output_dir={folder}",
        "launcher.max_attempts=1000",
    ]


def theirs(folder: Path, steps: int, wait: float) -> list[str]:
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--max-restarts=1000",
        f"--nproc-per-node={RANKS}",
        str(KILLED),
        str(folder),
        str(wait),
        str(steps * RANKS * BATCH),
        str(BATCH),
    ]


def trained(command: Any, folder: Path, steps: int, wait: float, every: float = 0.0) -> Training:
    """Trains, and kills a random rank every `every` seconds. Ends after twice the time that
    the steps would take without kills: some restarts never come to train."""
    folder.mkdir()
    training = Training(folder, steps)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    chosen = random.Random(0)
    due = math.inf
    limit = time.time() + 2 * steps * WAIT_S + 60
    with open(folder / "output.log", "w", encoding="utf-8") as log:
        options: dict[str, Any] = {"cwd": folder, "env": env, "stdout": log, "stderr": log}
        process = subprocess.Popen(command(folder, steps, wait), **options)
        try:
            while process.poll() is None:
                time.sleep(0.05)
                files = [*folder.glob(f"{chosen.randrange(RANKS)}-*.txt")]
                if files and every:
                    due = min(due, time.time() + every)
                if time.time() > limit:
                    training.ended = time.time()
                    break
                if files and time.time() > due:
                    pid = int(max(files, key=lambda f: f.stat().st_mtime).stem.partition("-")[2])
                    with suppress(ProcessLookupError):  # it starts again: the kill comes later
                        os.kill(pid, signal.SIGKILL)
                        training.kills.append(time.time())
                        due += every
        finally:
            process.terminate()
            process.wait()
    if process.returncode and not training.ended:
        text = (folder / "output.log").read_text()
        raise RuntimeError(f"the training ended with {process.returncode}: {text[-2000:]}")
    training.read()
    return training


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Of the newest checkpoint."""
    files = [*folder.glob("checkpoints/*.ckpt"), *folder.glob("goodput/run/checkpoints/*.ckpt")]
    newest = max(files, key=lambda file: file.stat().st_mtime)
    values: dict[str, torch.Tensor] = torch.load(newest, weights_only=False)["state_dict"]
    return values


def difference(one: Training, other: Training) -> float:
    """The largest one between two weights."""
    first, second = weights(one.folder), weights(other.folder)
    return max(float((first[name] - value).abs().max()) for name, value in second.items())


def shrunk(folder: Path, steps: int) -> Training:
    """A training on two hosts, of which one is lost in the middle; it is resumed on the other."""
    training = Training(folder, steps)
    folder.mkdir()
    words = [word for word in ours(folder, steps, WAIT_S) if "launcher." not in word]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (
        Hosts("node1", "node2") as hosts,
        open(folder / "output.log", "w", encoding="utf-8") as log,
    ):
        # Programs that only the user's own words name: a resume needs them again.
        programs = [f"launcher.mpirun={MPIRUN}", f"launcher.ssh={hosts.ssh}"]
        where = [
            "launcher=mpi",
            *programs,
            "launcher.hosts=[node1,node2]",
            "trainer.num_nodes=2",
            "trainer.devices=1",
        ]
        options: dict[str, Any] = {"cwd": folder, "env": env, "stdout": log, "stderr": log}
        job = hosts.popen("node1", [*words, *where], **options)
        while not any(f.read_text().count("\n") > steps / 2 for f in folder.glob("0-*.txt")):
            if job.poll() is not None:
                raise RuntimeError((folder / "output.log").read_text()[-2000:])
            time.sleep(0.1)
        hosts.cut("node2")
        for pid in hosts.pids("node2"):
            os.kill(pid, signal.SIGKILL)
        job.wait()
        again = [
            *words[:3],
            "resume",
            "goodput/run",
            *programs,
            "trainer.num_nodes=1",
            "launcher.hosts=[node1]",
        ]
        options["capture_output"] = False
        done = hosts.run("node1", again, timeout=None, **options)
        if done.returncode:
            raise RuntimeError((folder / "output.log").read_text()[-2000:])
    training.read()
    return training


def compared(command: Any, folder: Path, steps: int, every: float) -> tuple[Training, float]:
    """A training with kills, and the largest difference to the weights of one without."""
    folder.mkdir()
    killed = trained(command, folder / "killed", steps, WAIT_S, every)
    return killed, difference(killed, trained(command, folder / "whole", steps, 0.0))


def absent() -> dict[str, str]:
    """The host that is lost, where there can be none, with the reason."""
    reason = why_not()
    if not reason and not shutil.which(MPIRUN):
        reason = f"no {MPIRUN}"
    return {"a host that is lost": reason} if reason else {}


def after_a_lost_host(folder: Path) -> list[Goal]:
    if missing := absent():
        print(f"no case of a lost host: {', '.join(missing.values())}", flush=True)
        return []
    lost = shrunk(folder / "lost", SHRUNK_STEPS)
    apart = difference(lost, trained(ours, folder / "whole", SHRUNK_STEPS, 0.0))
    what = "a host of two is lost: "
    return [
        Goal(f"{what}samples lost or repeated", "at most 0", float(lost.wrong_samples)),
        Goal(f"{what}difference of the final weights", "at most 0.00001", apart),
    ]


def main(minutes: float = MINUTES, every: float = EVERY_S) -> Result:
    steps = int(60 * minutes / (WAIT_S + 0.01))
    with tempfile.TemporaryDirectory() as name:
        own, apart = compared(ours, Path(name, "ours"), steps, every)
        other, other_apart = compared(theirs, Path(name, "theirs"), steps, every)
        lost_host = after_a_lost_host(Path(name))
    rows = []
    for arm, killed, moved in (("distdl", own, apart), ("torchrun", other, other_apart)):
        rows.append(row(f"{arm}: from a kill to the next new step", killed.healing, "s"))
        rows.append(f"| {arm}: kills | {len(killed.kills)} | | | | 1 |")
        rows.append(f"| {arm}: goodput | {killed.goodput:.3f} | | | | 1 |")
        rows.append(f"| {arm}: samples lost or repeated | {killed.wrong_samples} | | | | 1 |")
        rows.append(f"| {arm}: difference of the final weights | {moved:.1g} | | | | 1 |")
    what = f"goodput, a rank of two killed every {every:.0f} s for {minutes:g} minutes"
    healing = max(own.healing)
    return Result(
        title=what,
        what=what,
        competitor=f"torchrun --max-restarts, ckpt_path='last': {other.goodput:.3f}",
        goal="at least 0.90",
        ratio=own.goodput,
        more=[
            Goal("the same: samples lost or repeated", "at most 0", float(own.wrong_samples)),
            Goal(
                "the same: difference of the final weights to those without kills",
                "at most 0",
                apart,
            ),
            Goal(
                "the same: from a kill to the next new step, at the most (s)",
                "at most 5",
                healing,
            ),
            *lost_host,
        ],
        rows=rows,
        notes=f"A step waits {1000 * WAIT_S:.0f} ms, as if for a device; a checkpoint every "
        f"{SAVE_EVERY} steps. The host is lost after {SHRUNK_STEPS // 2} of {SHRUNK_STEPS} steps "
        "(network namespaces, Open MPI), and `distdl resume` goes on with the other one.",
        command="python -m benchmarks.run goodput",
    )
