"""What it costs that the ranks of a large job hear of each other: `python -m benchmarks.listening`.

A thousand ranks' `Peers`, each with its own connection to torch's TCPStore, in a few processes, as
if all waited for one rank that may take longer. Every few seconds this is another rank, of which
each one has to hear. At times the rank that gathers what is heard is taken away. Printed is what
the store uses of a core, the longest time until all had heard of a rank, and how often one was not
excused, or taken for silent, without a reason.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import time
from multiprocessing.connection import Connection
from typing import Any

import psutil
import torch.distributed as dist

from benchmarks.ctrl_c import one_line
from distdl.health.heartbeat import RankHeartbeat
from distdl.health.peers import Peers
from distdl.ranks.environment import Environment

LIMIT_S = 300.0  # of a rank that waits; in turn number N, one rank may take N seconds more
TICK_S = 0.5  # between two looks of a rank's watchdog
POLL_S = 0.05  # between two requests to its peers
TURN_S = 5.0  # seconds of a turn
GONE_EVERY = 4  # turns until the rank that gathers is taken away
MOST_CORE, MOST_S = 0.1, 3.0
# As long as what a watchdog publishes.
PULSE = {
    "host": "node-with-a-name-0123.cluster",
    "pid": 123456,
    "time": 1764300000.123,
    "world_size": 1024,
    "local_world_size": 8,
    "in_step": True,
    "epoch": 12,
    "batch": 345,
    "phase": "backward",
    "action": "training_epoch_loop.advance",
    "step": 123456,
    "where": "project/models/net.py, line 123, in training_step",
    "samples": list(range(100000, 100064)),
}


def serve(connection: Connection, size: int) -> None:
    """The store, in a process of its own."""
    store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
    connection.send(store.port)
    connection.recv()


class Rank:
    """A rank that makes no progress; in the turn `turn` it may take longer, and else waits."""

    def __init__(self, number: int, size: int, store: Any) -> None:
        environment = Environment("local", number, size)
        self.peers = Peers(environment, RankHeartbeat(), lambda verdict: None)
        self.number = number
        self.count = 0
        self.turn = 0
        self.gone = False
        self.store = store

    def look(self) -> None:
        self.count += 1
        state = {"limit": LIMIT_S + self.turn, "waits": not self.turn, "age": LIMIT_S + 0.5}
        self.peers.pulse = {**PULSE, "rank": self.number, "number": self.count, **state}

    def leave(self) -> None:
        self.gone = True
        self.peers.stop()


def host(port: int, numbers: range, size: int, connection: Connection) -> None:
    """Some of the ranks. For each turn it answers when they had heard of the rank whose turn it
    is, and at the end how many false alarms there were."""
    store = dist.TCPStore("127.0.0.1", port, size, wait_for_workers=False)
    ranks = [Rank(number, size, store.clone()) for number in numbers]
    gone = set[int]()
    turn = 0
    told = True
    unexcused = 0
    silent = set[str]()
    looked = 0.0
    connection.send("connected")
    connection.recv()
    for rank in ranks:
        rank.look()
        rank.peers.start(rank.store)
    while True:
        here = [rank for rank in ranks if not rank.gone]
        if connection.poll(POLL_S):
            message = connection.recv()
            if message is None:
                break
            chosen, turn, gone = message
            told = False
            for rank in ranks:
                if rank.number == chosen:
                    rank.turn = turn
                elif rank.turn < turn - 1:  # the one before may go on until all have heard
                    rank.turn = 0
                if rank.number in gone and not rank.gone:
                    rank.leave()
        if time.monotonic() - looked > TICK_S:
            looked = time.monotonic()
            for rank in here:
                rank.look()
                # From the second turn on there is always one that may take longer.
                unexcused += turn > 2 and not rank.peers.excuse(LIMIT_S)
                heard = rank.peers.facts()["peers"].values()
                silent |= {each["rank"] for each in heard if not each["fresh"]} - gone
        if not told and all(rank.peers.excuse(LIMIT_S + turn - 0.5) for rank in here):
            gathers = [rank.number for rank in here if rank.peers.gathers]
            connection.send((time.monotonic(), gathers))
            told = True
    connection.send((unexcused, len(silent)))
    os._exit(0)  # hundreds of threads talk to the store


def measured(size: int, processes: int, seconds: float) -> dict[str, float]:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    server = spawn.Process(target=serve, args=(theirs, size), daemon=True)
    server.start()
    port = ours.recv()
    hosts = []
    for number in range(processes):
        mine, its = spawn.Pipe()
        numbers = range(number * size // processes, (number + 1) * size // processes)
        spawn.Process(target=host, args=(port, numbers, size, its), daemon=True).start()
        hosts.append(mine)
    for each in hosts:
        each.recv()
    for each in hosts:
        each.send("start")
    chance = random.Random(1)
    gone = set[int]()
    delays = list[float]()
    gathers = list[int]()
    begin = time.monotonic()
    used = sum(psutil.Process(server.pid).cpu_times()[:2])
    while time.monotonic() - begin < seconds:
        turn = len(delays) + 1
        if turn % GONE_EVERY == 0:
            gone |= {*gathers}
        chosen = chance.choice([rank for rank in range(size) if rank not in gone])
        start = time.monotonic()
        for each in hosts:
            each.send((chosen, turn, gone))
        answers = [each.recv() for each in hosts]
        delays.append(max(at for at, _ in answers) - start)
        gathers = [rank for _, numbers in answers for rank in numbers]
        time.sleep(max(0.0, TURN_S - (time.monotonic() - start)))
    passed = time.monotonic() - begin
    used = sum(psutil.Process(server.pid).cpu_times()[:2]) - used
    for each in hosts:
        each.send(None)
    alarms = [each.recv() for each in hosts]
    ours.send(None)
    return {
        "store, of a core": used / passed,
        "longest until all had heard, s": max(delays[1:]),
        "turns": len(delays),
        "ranks that gathered and were taken away": len(gone),
        "not excused": sum(unexcused for unexcused, _ in alarms),
        "taken for silent": max(silent for _, silent in alarms),
    }


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.listening", description=__doc__)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=300.0)
    options = parser.parse_args()
    result = measured(options.ranks, options.processes, options.seconds)
    for name, value in result.items():
        print(f"{name:42}{value:8.3f}" if isinstance(value, float) else f"{name:42}{value:8}")
    met = result["store, of a core"] <= MOST_CORE
    met &= result["longest until all had heard, s"] <= MOST_S
    met &= not result["not excused"] and not result["taken for silent"]
    raise SystemExit(not met)


if __name__ == "__main__":
    with one_line("listening"):
        main()
