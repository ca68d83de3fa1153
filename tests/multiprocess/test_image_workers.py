"""Photographs by the native path, in threads and in processes, on one and two ranks: a run that is
killed (-9), whose worker is killed, or that is signalled ends, resumed, with the weights and the
samples of one that nobody disturbed. Validation counts each sample once.

`make matrix`; CI has the same of loaders alone (unit/data/test_threads.py).
"""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from distdl.images import decoding
from distdl.util.exit_codes import EXIT_PREEMPTED
from tests.conftest import UNCHECKED, Background, distdl, last_step, matrix_only, status
from tests.multiprocess import fed
from tests.multiprocess.test_campaign import differing, last_checkpoint, surviving
from tests.prepared import prepare
from tests.unit.data.test_threads import FILES

pytestmark = [
    matrix_only,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(decoding.native_library() is None, reason="no distdl-native"),
]

SAMPLES, GLOBAL_BATCH, EPOCHS = 96, 8, 3
MORE = 32  # of another set
STEPS = SAMPLES // GLOBAL_BATCH
MODEL = """
defaults:
  - classifier
  - _self_
network:
  _target_: mine.Small
  num_classes: ${data.num_classes}
"""
COMMON = (
    "model=ours",
    "data=imagenet",
    "data.root=photographs",
    "data.num_classes=10",
    "data.image_size=24",
    "data.num_workers=2",
    "data.augment={random_erasing: {p: 0.5, fill: noise}}",
    "schedule.warmup_epochs=0",
    "optimizer.lr=0.5",
    "trainer.accelerator=cpu",
    f"trainer.max_epochs={EPOCHS}",
    "tracking=none",
    "experiment_name=e",
    "checkpoint.every_n_steps=3",
    "callbacks=[default,record_samples]",
    "+callbacks.workers._target_=mine.Workers",
)
RANKS = {
    1: ("trainer.devices=1", f"data.batch_size={GLOBAL_BATCH}"),
    2: ("trainer.devices=2", f"data.batch_size={GLOBAL_BATCH // 2}", "strategy=ddp"),
}
KINDS = ("threads", "processes")
EQUAL = ("state_dict", "optimizer_states", "global_step", "epoch")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared set of intact images, and class folders with odd and damaged ones."""
    folder = tmp_path_factory.mktemp("project")
    shutil.copy(fed.__file__, folder / "mine.py")
    (folder / "conf/model").mkdir(parents=True)
    (folder / "conf/model/ours.yaml").write_text(MODEL)
    prepare(folder / "photographs", train=SAMPLES, val=21)
    prepare(folder / "more", train=MORE, val=8)
    for split in ("train", "val"):
        for number, data in enumerate(FILES * 3):
            of_class = folder / "odd" / split / f"class{number % 2}"
            of_class.mkdir(parents=True, exist_ok=True)
            (of_class / f"{number:02d}.jpg").write_bytes(data)
    return folder


def run(folder: Path, *words: str) -> str:
    done = distdl(*words, cwd=folder, module=UNCHECKED)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def undisturbed(project: Path) -> Callable[[int], Path]:
    """The run that nobody disturbs, by the number of its ranks."""
    made: dict[int, Path] = {}

    def of(ranks: int) -> Path:
        if ranks not in made:
            run(project, *COMMON, *RANKS[ranks], "data.worker_kind=threads", f"name=whole{ranks}")
            made[ranks] = project / f"outputs/e/whole{ranks}"
        return made[ranks]

    return of


def workers(path: Path, rank: int) -> list[tuple[int, list[int], list[int]]]:
    """The rank, its processes and its threads that load, once in each epoch."""
    file = path / f"logs/workers-{rank}"
    lines = file.read_text().splitlines() if file.exists() else []
    return [tuple(map(json.loads, line.split(";"))) for line in lines]  # type: ignore[misc]


def assert_equal(one: Path, other: Path, steps: int = STEPS) -> None:
    first, second = ({k: last_checkpoint(each)[k] for k in EQUAL} for each in (one, other))
    assert first["global_step"] == EPOCHS * steps
    assert differing(first, second) == []
    assert surviving(one) == surviving(other)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(
    "words",
    [
        ("data.worker_kind=processes",),
        ("data.worker_kind=processes", "data.decoder=simplejpeg"),
        ("data.worker_kind=threads", "data.num_workers=3"),
        ("data.num_workers=0",),
    ],
)
def test_every_way_trains_the_same_weights(ranks, words, project, undisturbed):
    name = f"way{ranks}{sum(map(len, words))}"
    run(project, *COMMON, *RANKS[ranks], *words, f"name={name}")
    assert_equal(project / "outputs/e" / name, undisturbed(ranks))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("kind", KINDS)
def test_workers_live_through_all_epochs(ranks, kind, project, undisturbed):
    path = undisturbed(ranks)
    if kind == "processes":
        path = project / f"outputs/e/kept{ranks}"
        words = ("data.worker_kind=processes", f"name={path.name}")
        run(project, *COMMON, *RANKS[ranks], *words)
    for rank in range(ranks):
        seen = workers(path, rank)
        assert len(seen) == EPOCHS
        load = [processes if kind == "processes" else threads for _, processes, threads in seen]
        other = [threads if kind == "processes" else processes for _, processes, threads in seen]
        assert other == [[]] * EPOCHS
        assert len(load[0]) == 2
        # Those of the validation come once.
        assert all({*load[0]} <= {*each} for each in load)
        assert load[1] == load[2]
        assert len(load[2]) == 4


def kill_everything(job: Background, path: Path, ranks: int) -> list[int]:
    job.kill_all()
    return [job.process.returncode]


def kill_a_worker(job: Background, path: Path, ranks: int) -> list[int]:
    """A process that loads; a thread ends with its rank."""
    rank, processes, _ = workers(path, ranks - 1)[-1]
    os.kill(random.choice(processes) if processes else rank, signal.SIGKILL)
    return [job.wait()]


def interrupt(job: Background, path: Path, ranks: int) -> list[int]:
    """Ctrl-C: to each process of the terminal's group."""
    os.killpg(job.process.pid, signal.SIGINT)
    return [job.wait()]


def terminate(job: Background, path: Path, ranks: int) -> list[int]:
    """As a node's end: to each process, also to those that load."""
    command = psutil.Process(job.process.pid)
    for each in [command, *command.children(recursive=True)]:
        each.send_signal(signal.SIGTERM)
    return [job.wait()]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("end", [kill_everything, kill_a_worker, interrupt, terminate])
def test_a_run_that_ends_early_is_resumed_exactly(
    end: Any, kind, ranks, project, undisturbed, background
):
    whole = undisturbed(ranks)
    path = project / f"outputs/e/{end.__name__.replace('_', '')}{kind}{ranks}"
    words = (f"data.worker_kind={kind}", f"name={path.name}")
    slowly = "callbacks.record_samples.step_seconds=0.05"
    job = background(*COMMON, *RANKS[ranks], *words, slowly, cwd=project, module=UNCHECKED)
    at = random.Random(path.name).randint(STEPS + 4, 2 * STEPS + 4)
    job.until(lambda: last_step(path) >= at)
    everyone = psutil.Process(job.process.pid).children(recursive=True)
    (code,) = end(job, path, ranks)
    assert code != 0, job.output()
    if end is terminate:
        assert status(path)["state"] == "PREEMPTED"
        assert code == EXIT_PREEMPTED
    _, alive = psutil.wait_procs(everyone, 20)
    assert not alive, [each.cmdline() for each in alive]
    run(project, "resume", str(path))
    assert_equal(path, whole)


@pytest.mark.parametrize("ranks", RANKS)
def test_a_mixture_is_resumed_exactly(ranks, project, background):
    word = "data.mix=[{root: more, weight: 0.4}]"
    steps = (SAMPLES + MORE) // GLOBAL_BATCH
    path = project / f"outputs/e/mix{ranks}"
    whole = path.with_name(f"{path.name}whole")
    run(project, *COMMON, *RANKS[ranks], word, f"name={whole.name}")
    words = (word, f"name={path.name}", "callbacks.record_samples.step_seconds=0.05")
    job = background(*COMMON, *RANKS[ranks], *words, cwd=project, module=UNCHECKED)
    job.until(lambda: last_step(path) >= steps + 5)
    kill_everything(job, path, ranks)
    run(project, "resume", str(path))
    assert_equal(path, whole, steps)


@pytest.fixture(scope="module")
def in_windows(project: Path) -> Callable[[int], Path]:
    """The run in windows of two shards that nobody disturbs, by the number of its ranks."""

    @functools.cache
    def of(ranks: int) -> Path:
        words = ("data.order=windows", "data.shuffle_window=2", f"name=windows{ranks}")
        run(project, *COMMON, *RANKS[ranks], *words)
        return project / f"outputs/e/windows{ranks}"

    return of


# What a killed run is resumed with -> on how many ranks.
RESUMED = {(): 0, ("trainer.devices=1", "strategy=single"): 1, RANKS[2][::2]: 2}


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("resumed", RESUMED)
def test_a_resume_keeps_the_order_that_was_chosen(
    resumed, ranks, project, in_windows, background, tmp_path
):
    """It would choose the other one, if it measured again (fed.py)."""
    if RESUMED[resumed] == ranks:
        pytest.skip("the same as without a word")
    path = project / f"outputs/e/chosen{ranks}{RESUMED[resumed]}"
    env = {"MEASURED": str(tmp_path / "measured")}
    words = ("data.order=auto", f"name={path.name}", "callbacks.record_samples.step_seconds=0.05")
    job = background(*COMMON, *RANKS[ranks], *words, cwd=project, module=UNCHECKED, env=env)
    job.until(lambda: last_step(path) >= STEPS + 5)
    kill_everything(job, path, ranks)
    assert "order: auto" in (path / "config.yaml").read_text()
    done = distdl("resume", str(path), *resumed, cwd=project, module=UNCHECKED, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "measured").read_text() == "measured\n"
    assert surviving(path) == surviving(in_windows(ranks))
    if not resumed:  # another number of ranks adds up gradients in another order
        assert_equal(path, in_windows(ranks))


def test_the_next_start_of_a_command_keeps_the_order(project, in_windows, tmp_path):
    path = project / "outputs/e/chosenagain"
    words = ("data.order=auto", f"name={path.name}", "launcher.max_attempts=1")
    slowly = "callbacks.record_samples.step_seconds=0.05"
    env = {"MEASURED": str(tmp_path / "measured")}
    job = Background(*COMMON, *RANKS[2], *words, slowly, cwd=project, module=UNCHECKED, env=env)
    job.until(lambda: last_step(path) >= STEPS + 4)
    os.kill(workers(path, 1)[-1][0], signal.SIGKILL)
    assert job.wait() == 0, job.output()
    assert len(list((path / "attempts").iterdir())) == 2
    assert (tmp_path / "measured").read_text() == "measured\n"
    assert_equal(path, in_windows(2))


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_is_killed_is_started_again_beside_the_others(kind, project, undisturbed):
    """By launcher.max_attempts, as forks of the standby process."""
    path = project / f"outputs/e/again{kind}"
    words = (f"data.worker_kind={kind}", f"name={path.name}", "launcher.max_attempts=1")
    slowly = "callbacks.record_samples.step_seconds=0.05"
    job = Background(*COMMON, *RANKS[2], *words, slowly, cwd=project, module=UNCHECKED)
    job.until(lambda: last_step(path) >= STEPS + 4)
    os.kill(workers(path, 1)[-1][0], signal.SIGKILL)
    assert job.wait() == 0, job.output()
    assert len(list((path / "attempts").iterdir())) == 2
    assert_equal(path, undisturbed(2))


def test_a_validation_counts_each_intact_image_once(project):
    """Odd and damaged files, one rank and two, each kind of worker and the usual decoder."""
    odd = ("data.root=odd", "data.num_classes=2", "trainer.max_epochs=1")
    run(project, *COMMON, *RANKS[1], *odd, "name=odd")
    path = project / "outputs/e/odd"
    seen = []
    ways = [("data.worker_kind=threads",), ("data.worker_kind=processes",)]
    ways += [("data.decoder=simplejpeg",), ("data.num_workers=0",)]
    for ranks in RANKS:
        for way in ways:
            run(project, "resume", str(path), "task=validate", *RANKS[ranks], *way)
            attempt = len(list((path / "attempts").iterdir()))
            seen.append(status(path, attempt)["metrics"])
    intact = 3 * len(FILES) - 9
    assert {each["val/samples"] for each in seen} == {intact}
    assert {each["val/acc1"] for each in seen} == {seen[0]["val/acc1"]}
    losses = [each["val/loss"] for each in seen]
    assert losses == pytest.approx(losses[:1] * len(losses), rel=1e-6)
