"""`data.order=auto`: what is measured, what is chosen by it, and that a resume keeps it."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from distdl.data.reading_order import Choice, NodeRates, choose, measure
from distdl.datasets import read_rates
from distdl.worker import performing
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

    def slow(*arguments):
        read_rates.time.sleep(0.05)
        return honest(*arguments)

    monkeypatch.setattr(read_rates.os, "pread", slow)
    slower = measure(node, ranks=2)
    assert 20 < slower.at_random <= 80
    assert choose([slower]).order == "windows"
    write_photographs(tmp_path / "photographs", ["a"], train=1, val=1)
    assert "files of their own" in measure({"root": str(tmp_path / "photographs")}, 1).why
    elsewhere = {"root": str(tmp_path / "far"), "cache_dir": str(tmp_path / "cache")}
    assert "no shard" in measure(elsewhere, 1).why


def test_what_was_chosen_is_frozen_into_the_run(monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr("distdl.worker.reading_order.measure", lambda node, ranks: SLOW)
    written = {}
    environment = SimpleNamespace(rank=0, local_rank=0, local_world_size=1)
    attempt = SimpleNamespace(write_launch=written.update)
    context = SimpleNamespace(environment=environment, attempt=attempt, launch={"changes": {}})
    data = {"_target_": "distdl.data.StoredImages", "root": "x", "order": "auto"}
    task = {"_target_": "distdl.tasks.train"}
    config = OmegaConf.create({"data": data, "task": task, "model": {}})
    tuned = performing.tune(config, context)
    assert (tuned.data.order, tuned.data.shuffle_window) == ("windows", 7)
    assert written["changes"] == {"data.order": "windows", "data.shuffle_window": 7}
    assert "at random 120 img/s" in written["order"][0]
    assert "this attempt and its resumes train with data.order=windows" in caplog.text
    # A class of the user's may mean something else by it.
    config.data._target_ = "mine.Data"
    assert performing.tune(config, context).data.order == "auto"
