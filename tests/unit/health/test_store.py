"""A run's folder on a store that hangs: who guards a rank notices it, and is not blocked."""

import os
import queue
import threading
import time

import pytest

from distdl.health import store as stores
from distdl.health import watchdog as watchdogs
from distdl.health.watchdog import Watchdog
from distdl.ranks.environment import Environment
from distdl.runs import failures
from distdl.runs.directory import Attempt
from distdl.runs.records import find_run
from distdl.util import answering
from distdl.util.errors import UserError
from tests.limits import hanging_store
from tests.waiting import until

SOON_S = 30.0


def asked(store, until_away):
    """Asks twice in a second until the store is away, or answers; the seconds that do not count."""
    lost = 0.0

    def ask():
        nonlocal lost
        lost += store.ask()
        time.sleep(0.2)
        return store.away if until_away else not store.silent

    until(ask, SOON_S)
    return lost


def test_no_time_counts_while_a_store_does_not_answer(tmp_path):
    with hanging_store(tmp_path) as mount:
        (mount.path / "file").write_text("")
        store = stores.RunStore(mount.path, mount.path / "file")
        asked(store, until_away=False)
        until(lambda: store.free.get("run"), SOON_S)
        assert not store.away
        mount.hang()
        begin = time.monotonic()
        lost = asked(store, until_away=True)
        assert stores.AWAY_S < lost <= time.monotonic() - begin
        assert not stores.within(0.1, lambda: (mount.path / "file").stat()), "it is blocked"
        mount.answer()
        asked(store, until_away=False)
        assert not store.away


def test_a_store_that_refuses_or_forgets_a_file_answers(tmp_path):
    store = stores.RunStore(tmp_path / "gone", tmp_path / "gone/file")
    asked(store, until_away=False)
    until(lambda: not store._asks.is_set(), SOON_S)
    store.ask()
    assert not store.away
    assert "run" not in store.free


def test_the_watchdog_waits_and_tells_the_user_once(tmp_path, capfd, monkeypatch):
    """Its main thread is blocked by the store for longer than it may make no progress. What the
    watchdog works itself is none."""

    def limit(short, files):
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            pass
        return 2.0

    monkeypatch.setattr(watchdogs, "TELL_S", 1.0)
    with hanging_store(tmp_path) as mount:
        attempt = Attempt(mount.path / "r/attempts/001")
        attempt.path.mkdir(parents=True)
        failures.reserve(attempt.errors, 0)
        watchdog = Watchdog(attempt, Environment("local", 0, 1), timeout=2.0)
        said = queue.SimpleQueue()  # to wait without working, which would count as progress
        watchdog._tell_user = said.put
        watchdog._hang = lambda: said.put("hang")
        watchdog._tell = lambda message: None
        watchdog._limit = limit
        watchdog._announce()
        mount.hang()
        threading.Thread(target=watchdog._watch, daemon=True).start()
        assert "has not answered for" in said.get(timeout=SOON_S)
        mount.answer()
        assert "answers again" in said.get(timeout=SOON_S)
        watchdog._stop.set()


def test_a_command_refuses_a_folder_that_does_not_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(answering, "ANSWER_S", 0.5)
    with hanging_store(tmp_path) as mount:
        (mount.path / "run").mkdir()
        os.stat(mount.path / "run")
        mount.hang()
        with pytest.raises(UserError, match="has not answered"):
            find_run(str(mount.path / "run/other"))
