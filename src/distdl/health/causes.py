"""Which rank failed or did not come first, and why: known causes, tried in order."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from distdl.health.evidence import MISMATCH, STOPPED, Rank, Sight
from distdl.runs import failures

STEP = ("data", "copy", "forward", "backward", "optimizer")  # the phases of a training step
MANY = 4  # ranks that a sentence names
LITTLE = 2**28  # bytes of memory of a host that is left
FOR_MEMORY = "out of memory (killed)"
LESS = "fewer data.num_workers, or a smaller batch"
CALLS = "let all ranks make the same collective calls, with the same sizes, in the same order"
LONGER = "the stacks show the line; if it needs that long: watchdog.timeout=SECONDS"
LINK = "NCCL_DEBUG=INFO names the link"
# The name, a pattern of the messages of an exception, and the remedy.
MESSAGES = (
    ("/dev/shm is full", r"shared memory|/dev/shm|</?torch_\d|Bus error", f"{LESS}; --shm-size=8g"),
    (
        "disk is full",
        r"No space left|quota exceeded|file write failed|unexpected pos",
        "free space",
    ),
    ("out of memory (GPU)", r"OutOfMemoryError|CUDA.*out of memory", "data.batch_size= half"),
    ("data worker killed", r"DataLoader worker \(pid", f"{LESS}; dmesg on that host"),
    (FOR_MEMORY, r"^Killed: (?!.* SIG(?!KILL))", f"{LESS}; or more memory"),
    ("out of memory (host)", r"MemoryError|n't allocate memory|cannot allocate memory", LESS),
    ("killed", r"^Killed: ", "dmesg on that host; the platform's log"),
    ("not a number", r"\bnans?\b|non-?finite|not finite", "trainer.detect_anomaly=true"),
    ("CUDA error", r"CUDA error:|device-side assert|CU\w+_STATUS", "CUDA_LAUNCH_BLOCKING=1"),
    ("NCCL transport", "nccl", LINK),
    ("exit", r"^(Ended|SystemExit): ", "raise an exception instead of ending the process"),
    ("exception", "", "correct the code; the log has the traceback"),
)


class Cause(NamedTuple):
    """`evidence` is what speaks for it, as a sentence."""

    rank: Rank
    name: str
    evidence: str
    remedy: str


def find(ranks: Sequence[Rank]) -> Cause | None:
    """The likely cause of a failure; None if no rank failed. The clocks of two hosts are compared
    only if nothing else decides."""
    tests = (_failed, _uneven, _lost, _did_not_come, _differs, _waited)
    return next(filter(None, (test(ranks) for test in tests)), None)


def _failed(ranks: Sequence[Rank]) -> Cause | None:
    """A rank with an exception of its own, or that was killed."""
    failed = [rank for rank in ranks if rank.text and not rank.waits]
    if not failed:
        return None
    first = _earliest(ranks, failed)
    memory, lines = _little_memory(ranks, first), first.text.splitlines()
    for name, pattern, remedy in MESSAGES:
        line = next(filter(re.compile(pattern, re.IGNORECASE).search, lines), "")
        if line and (memory or name != FOR_MEMORY):
            why = f"{line}; {memory}" if memory and "killed" in name else line
            return Cause(first, name, why, remedy)
    return None


def _earliest(ranks: Sequence[Rank], of: Sequence[Rank]) -> Rank:
    errors = [rank.error for rank in of if rank.error]
    return ranks[failures.earliest(errors)["rank"]] if errors else of[0]


def _little_memory(ranks: Sequence[Rank], of: Rank) -> str:
    """What speaks for a lack of memory on a rank's host; "" if nothing does."""
    on_host = [rank.sight.memory for rank in ranks if rank.sight.host == of.sight.host]
    for memory in (of.sight.memory, *on_host):
        if kills := memory.get("oom_kills"):
            return f"the kernel ended {kills} process(es) of its control group for lack of memory"
        if (free := memory.get("available")) is not None and free < LITTLE:
            return f"its host had {size_text(free)} of memory left"
    return ""


def size_text(count: float) -> str:
    """Bytes as text."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def ranks_text(ranks: Sequence[Rank]) -> str:
    """`rank 3`, or `ranks 0, 1, 2, 4 and 11 more`."""
    more = f" and {len(ranks) - MANY} more" if len(ranks) > MANY else ""
    numbers = ", ".join(str(rank.sight.rank) for rank in ranks[:MANY])
    return f"rank{'s' * (len(ranks) > 1)} {numbers}{more}"


def _uneven(ranks: Sequence[Rank]) -> Cause | None:
    """A rank that had ended its epoch while another one was in a step of it."""
    steps = [rank.sight for rank in ranks if rank.waits and rank.sight.phase in STEP]
    other = max(steps, key=lambda sight: sight.step or 0, default=Sight())
    for rank in ranks if steps else ():
        seen, ended = rank.sight, rank.sight.phase == "end" and not rank.text
        if seen.step is None or seen.step > (other.step or 0):
            continue
        if rank.waits or not rank.left:
            later = (seen.epoch or 0) - (other.epoch or 0)
            after = seen.phase in ("validation", "checkpoint") or "epoch_end" in seen.action
            fewer = 0 < (seen.batch or 0) < (other.batch or 0)
            ended = ended or later > 0 or (later == 0 and after and fewer)
        if ended:
            why = f"it had ended its epoch at step {seen.step}, batch {seen.batch}, while "
            why += f"rank {other.rank} was in step {other.step}, batch {other.batch}"
            return Cause(rank, "uneven batches", why, "as many batches per epoch on every rank")
    return None


def _lost(ranks: Sequence[Rank]) -> Cause | None:
    """A rank of which nobody heard any more: one that left nothing, else one that waited itself,
    cut off."""
    if not (sights := [rank.sight for rank in ranks if rank.seen]):
        return None
    listener = max(sights, key=lambda s: (sum(p.fresh for p in s.peers.values()), -s.rank))
    fresh = {key: peer.fresh for key, peer in listener.peers.items()}
    silent = [rank for rank in ranks if not fresh.get(str(rank.sight.rank), rank.left)]
    gone = [rank for rank in silent if not rank.left]
    lost = gone or [rank for rank in silent if rank.seen and rank.waits]
    if lost and lost[0].sight.phase == "end":
        return Cause(lost[0], "skipped collective", "it ended, and others waited for it", CALLS)
    why = f"nobody heard of {ranks_text(lost)} any more: the host or its network has failed"
    return Cause(lost[0], "lost host", why, "resume without that host") if lost else None


def _did_not_come(ranks: Sequence[Rank]) -> Cause | None:
    """A rank that waited for no other: a stopped one, else that with the fewest collectives."""
    free = [rank for rank in ranks if rank.left and not rank.waits]
    if not free:
        return None

    def order(rank: Rank) -> tuple[bool, int]:
        enqueued = rank.sight.enqueued
        return rank.sight.process not in STOPPED, -1 if enqueued is None else enqueued

    rank = min(free, key=order)
    seen, age = rank.sight, max((r.sight.age for r in ranks if r.waits), default=0.0)
    busy = next((w for w in seen.workers if w.where and seen.phase == "data"), Sight())
    slow = f"it made progress {seen.age:.0f} s ago, while others had waited for {age:.0f} s"
    slept = f"its main thread slept ({seen.wchan})" if seen.wchan else "it made no progress"
    table = (
        (seen.process in STOPPED, "stopped", "its process was stopped; kill -CONT continues it"),
        (busy.where, "data worker blocked", f"its loader's worker {busy.pid} was in {busy.where}"),
        (seen.age < age / 2, "slow rank", slow),
        (seen.wchan.startswith("futex"), "lock", "its main thread waited for a lock or a thread"),
        (seen.process == "R", "endless loop", "its main thread ran, and started no collective"),
        (seen.process == "D", "blocked", "its main thread waited for a disk"),
        (True, "blocked", slept),
    )
    return next(Cause(rank, name, why, LONGER) for fits, name, why in table if fits)


def _differs(ranks: Sequence[Rank]) -> Cause | None:
    """The rank whose collective is not that of most others; of two ranks the one that is further
    on, else the second."""
    inside = {rank.sight.rank: each for rank in ranks if (each := rank.inside)}
    at, calls = dict[int, tuple[int, int]](), dict[int, tuple[object, ...]]()
    for number, call in inside.items():
        seen = ranks[number].sight
        phase = STEP.index(seen.phase) if seen.phase in STEP else len(STEP)
        at[number] = (seen.step or 0, phase)
        calls[number] = (at[number], call.op, str(call.sizes))
    times = Counter(calls.values())
    odd = max(inside, key=lambda n: (-times[calls[n]], at[n], n), default=0)
    other = next((n for n in inside if calls[n] != calls[odd]), None)
    if other is None:
        return None
    name = "mismatched collective" if at[odd] == at[other] else "skipped collective"
    places = (f"rank {n} was in {inside[n]} in {ranks[n].sight.phase}" for n in (odd, other))
    return Cause(ranks[odd], name, ", and ".join(places), CALLS)


def _waited(ranks: Sequence[Rank]) -> Cause | None:
    """All that is left: ranks that waited for each other, or lost each other."""
    left = [rank for rank in ranks if rank.left]
    if not left:
        return None
    first = _earliest(ranks, left)
    why = first.text.partition("\n")[0] or f"all ranks waited in the same {first.inside or 'place'}"
    if MISMATCH.search(first.text):
        return Cause(first, "mismatched collective", why, CALLS)
    if "nccl" in first.text.lower():
        return Cause(first, "NCCL transport", why, LINK)
    return Cause(first, "connection", why, "check the network between the hosts, and resume")
