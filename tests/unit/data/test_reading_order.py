"""`data.order=auto`: what is measured, what is chosen by it, and that a resume keeps it."""

from __future__ import annotations

import os
import threading
import time
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from distdl.data.reading_order import Choice, NodeRates, choose, measure
from distdl.datasets import read_rates
from distdl.job import JobState
from distdl.runs.directory import RunDirectory
from distdl.worker import performing
from distdl.worker.rank_context import RankContext
from tests.prepared import prepare
from tests.unit.sample_data import write_photographs

FAST = NodeRates(5000, 20000, 900, 32)
SLOW = NodeRates(120, 4000, 900, 7)
EVENLY_SLOW = NodeRates(120, 150, 900, 9)
UNKNOWN = NodeRates(why="no shard is in the cache of this node yet")


@pytest.mark.parametrize(
    ("nodes", "order", "window"),
    [
        ([FAST], "shuffled", 32),
        ([SLOW], "windows", 7),
        ([FAST, SLOW], "windows", 7),
        ([EVENLY_SLOW], "shuffled", 9),
        ([FAST, UNKNOWN], "shuffled", 32),
    ],
)
def test_windows_are_chosen_where_random_reads_are_slower_than_decoding(nodes, order, window):
    chosen = choose(nodes)
    assert chosen == Choice(order, window, chosen.reason)
    assert ("120" in chosen.reason) == (order == "windows" or nodes == [EVENLY_SLOW])


def test_a_storage_is_measured(tmp_path, monkeypatch):
    prepare(tmp_path / "far", train=40, padding=20_000)
    node = {"root": str(tmp_path / "far"), "num_workers": 2, "shuffle_window": 3}
    rates = measure(node, ranks=2)
    assert rates.why == ""
    assert rates.window == 3
    assert min(rates.at_random, rates.in_order, rates.decoded) > 10
    # Reads that take 50 ms, four at a time; nothing else has become slower.
    honest = os.pread
    reading = set()
    at_once = []

    def slow(*arguments):
        reading.add(threading.get_ident())
        at_once.append(len(reading))
        time.sleep(0.05)
        reading.remove(threading.get_ident())
        return honest(*arguments)

    monkeypatch.setattr(read_rates.os, "pread", slow)
    began = time.monotonic()
    slower = measure(node, ranks=2)
    spent = time.monotonic() - began  # also for the reads in order, and to decode
    assert max(at_once) == 4
    assert len(at_once) / spent < slower.at_random <= 80
    assert choose([slower]).order == "windows"
    write_photographs(tmp_path / "photographs", ["a"], train=1, val=1)
    assert "files of their own" in measure({"root": str(tmp_path / "photographs")}, 1).why
    elsewhere = {"root": str(tmp_path / "far"), "cache_dir": str(tmp_path / "cache")}
    assert "no shard" in measure(elsewhere, 1).why


ASKING = {
    "data": {"_target_": "distdl.data.StoredImages", "root": "x", "order": "auto"},
    "task": {"_target_": "distdl.tasks.train"},
    "model": {},
}


@pytest.fixture
def tuned(monkeypatch, tmp_path):
    """Makes another attempt of a run, and tunes it where the storage has these rates; returns the
    attempt's config and launch.yaml."""
    run = RunDirectory(tmp_path / "run")
    run.create("seed: 1\n", {})

    def attempted(rates=SLOW, config=ASKING, **launch):
        launch = {"run_id": "e/r", "where": {}, "changes": {}, **launch}
        attempt = run.begin_attempt(launch)
        monkeypatch.setattr("distdl.worker.reading_order.measure", lambda node, ranks: rates)
        environment = SimpleNamespace(rank=0, local_rank=0, local_world_size=1)
        context = RankContext(attempt, attempt.launch(), None, environment, None)
        made = performing.tune(OmegaConf.create(config), context)
        attempt.end(JobState.FAILED)
        return made, attempt.launch()

    return attempted


def test_what_was_chosen_is_frozen_into_the_run(tuned, caplog):
    caplog.set_level("INFO")
    config, launch = tuned()
    assert (config.data.order, config.data.shuffle_window) == ("windows", 7)
    assert launch["changes"] == {"data.order": "windows", "data.shuffle_window": 7}
    assert launch["chosen"] == {"order": launch["changes"]}
    assert "at random 120 img/s" in launch["order"][0]
    assert "this attempt and its resumes train with data.order=windows" in caplog.text


def test_a_class_of_the_users_may_mean_something_else_by_it(tuned):
    data = {**ASKING["data"], "_target_": "mine.Data"}
    config, launch = tuned(config={**ASKING, "data": data})
    assert config.data.order == "auto"
    assert "chosen" not in launch


def test_later_attempts_keep_it_though_the_submitting_side_does_not_know_it(tuned, caplog):
    """As for a job in a cloud: the next launch.yaml is written elsewhere."""
    caplog.set_level("INFO")
    first = tuned(EVENLY_SLOW)
    for number in range(2):
        caplog.clear()
        config, launch = tuned(SLOW)
        assert config.data == first[0].data
        assert launch["changes"] == first[1]["changes"]
        assert f"as attempt {number + 1} has chosen" in caplog.text
    # One that asks for it in this attempt gets a new measurement.
    config, _ = tuned(SLOW, changes={"data.order": "auto"})
    assert config.data.order == "windows"


STRANGE = [
    {"order": {"data.order": "windows", "data._target_": "mine.Data"}},
    {"order": {"data.order": "${oc.env:HOME}"}},
    {"order": "windows"},
    {"another": {"data.order": "windows"}},
    "windows",
]


@pytest.mark.parametrize("chosen", STRANGE)
def test_a_file_may_only_say_what_a_choice_can_set(tuned, chosen):
    """Also that of a run that somebody else has made."""
    tuned(config={**ASKING, "data": {}}, chosen=chosen)
    config, _ = tuned(EVENLY_SLOW)
    assert config.data == {**ASKING["data"], "order": "shuffled"}
