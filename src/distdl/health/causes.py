"""Which rank failed or did not come first, and why: tables of known causes, tried in order."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from distdl.health.evidence import MISMATCH, STOPPED, Evidence, Sight
from distdl.runs import failures

STEP = ("data", "copy", "forward", "backward", "optimizer")  # the phases of a training step
MANY = 4  # ranks that a sentence names
LITTLE = 2**28  # bytes of memory of a host that is left
Suspects = dict[int, str]  # rank -> what speaks for a cause, as a sentence


class Cause(NamedTuple):
    rank: int
    name: str
    evidence: str
    remedy: str


def find(evidence: Evidence) -> Cause | None:
    """The likely cause of a failure; None if no rank failed. The clocks of two hosts are compared
    only if nothing else decides."""
    free = [rank for rank in evidence.ranks if not evidence.waits(rank) and evidence.text(rank)]
    if recorded := [evidence.errors[rank] for rank in free if rank in evidence.errors]:
        return _of_message(evidence, int(failures.earliest(recorded)["rank"]))
    if free:
        return _of_message(evidence, free[0])
    for name, suspects_of, remedy in HANGS:
        for rank, why in suspects_of(evidence).items():
            return Cause(rank, name, why, remedy)
    return None


def _of_message(evidence: Evidence, rank: int) -> Cause:
    lines, memory = evidence.text(rank).splitlines(), _little_memory(evidence, rank)
    for name, pattern, remedy in MESSAGES:
        searched = re.compile(pattern, re.IGNORECASE)
        if line := next(filter(searched.search, lines), ""):
            if name == "data worker killed" and memory:
                line += f"; {memory}"
            if name != "out of memory (killed)" or memory:
                return Cause(rank, name, memory if "(killed)" in name else line, remedy)
    return Cause(rank, "exception", lines[0], "correct the code; the log has the traceback")


def _little_memory(evidence: Evidence, rank: int) -> str:
    """What speaks for a lack of memory on a rank's host; "" if nothing does."""
    seen = [each for each in evidence.sights.values() if each.host == evidence.host(rank)]
    for memory in (each.memory for each in sorted(seen, key=lambda each: each.rank != rank)):
        if kills := memory.get("oom_kills"):
            return f"the kernel ended {kills} process(es) of its control group for lack of memory"
        if (free := memory.get("available")) is not None and free < LITTLE:
            return f"its host had {size_text(free)} of memory left"
    return ""


def size_text(count: float) -> str:
    """Bytes as text."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 0, 1, 2, 4 and 11 more`."""
    more = f" and {len(ranks) - MANY} more" if len(ranks) > MANY else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:MANY]))}{more}"


def _uneven(evidence: Evidence) -> Suspects:
    """The ranks that had ended their epoch while another one was in a step of it."""
    waiting = [s for s in map(evidence.seen, evidence.waiting()) if s.phase in STEP]
    other = max(waiting, key=lambda s: s.step or 0, default=Sight())

    def ended(rank: int, seen: Sight) -> bool:
        if seen.step is None or other.step is None or seen.step > other.step:
            return False
        if seen.phase == "end" or seen.epoch is None or other.epoch is None:
            return seen.phase == "end" and not evidence.text(rank)
        after = seen.phase in ("validation", "checkpoint") or "epoch_end" in seen.action
        fewer = after and 0 < (seen.batch or 0) < (other.batch or 0)
        idle = evidence.waits(rank) or rank not in evidence.ranks
        return idle and (seen.epoch > other.epoch or (seen.epoch == other.epoch and fewer))

    seen = {rank: evidence.seen(rank) for rank in range(evidence.size)}
    its = f"rank {other.rank} was in step {other.step}, batch {other.batch}"
    return {
        rank: f"it had ended its epoch at step {s.step}, batch {s.batch}, while {its}"
        for rank, s in seen.items()
        if ended(rank, s)
    }


def _lost(early: bool) -> Callable[[Evidence], Suspects]:
    """The ranks of which nobody heard any more: those that left nothing, else those that waited
    themselves, cut off. `early`: those that had already ended; otherwise the others."""

    def suspects(evidence: Evidence) -> Suspects:
        def heard(sight: Sight) -> tuple[int, int]:
            return sum(peer.fresh for peer in sight.peers.values()), -sight.rank

        peers = max(evidence.sights.values(), key=heard, default=Sight()).peers
        silent = {int(r) for r, peer in peers.items() if r.isdecimal() and not peer.fresh}
        fresh = {*map(int, filter(str.isdecimal, peers))} - silent
        known = {*evidence.ranks, *fresh} if evidence.sights else {*range(evidence.size)}
        gone = [rank for rank in range(evidence.size) if rank not in known]
        lost = gone or sorted(silent & {*evidence.sights} & {*evidence.waiting()})
        lost = [rank for rank in lost if (evidence.seen(rank).phase == "end") == early]
        why = f"nobody heard of {ranks_text(lost)} any more: the host or its network has failed"
        return dict.fromkeys(lost, "it had ended, while others waited for it" if early else why)

    return suspects


def _differs(same_place: bool) -> Callable[[Evidence], Suspects]:
    """The rank whose collective differs from that of most others; of two ranks the one that is
    further on, else the second. `same_place`: they are in the same phase of the same step."""

    def suspects(evidence: Evidence) -> Suspects:
        inside = evidence.inside()
        seen = {rank: evidence.seen(rank) for rank in inside}
        phases = {r: STEP.index(s.phase) if s.phase in STEP else len(STEP) for r, s in seen.items()}
        at = {rank: (s.step or 0, phases[rank]) for rank, s in seen.items()}
        calls = {rank: (at[rank], each.op, str(each.sizes)) for rank, each in inside.items()}
        times = Counter(calls.values())
        odd = max(inside, key=lambda r: (-times[calls[r]], at[r], r), default=0)
        other = next((rank for rank in inside if calls[rank] != calls[odd]), None)
        if other is None or (at[odd] == at[other]) != same_place:
            return {}
        what = [f"rank {r} is in {inside[r]} in {seen[r].phase}" for r in (odd, other)]
        return {odd: f"in step {seen[odd].step} {what[0]}; in step {seen[other].step} {what[1]}"}

    return suspects


def _says(pattern: str) -> Callable[[Evidence], Suspects]:
    """The ranks whose messages have the pattern."""
    texts = re.compile(f"^.*(?:{pattern}).*", re.IGNORECASE | re.MULTILINE)
    return lambda e: {rank: m[0] for rank in e.ranks if (m := texts.search(e.text(rank)))}


def _hangs(test: Callable[[Sight, float], str]) -> Callable[[Evidence], Suspects]:
    """The rank that did not come, by how it was seen; of several, a stopped one, then the one that
    has started the fewest collectives. The test also gets the age of the ranks that waited."""

    def suspects(evidence: Evidence) -> Suspects:
        free = [evidence.seen(rank) for rank in evidence.ranks if not evidence.waits(rank)]
        age = max((evidence.seen(rank).age for rank in evidence.waiting()), default=0.0)
        free.sort(
            key=lambda s: (s.process not in STOPPED, -1 if s.enqueued is None else s.enqueued)
        )
        return {s.rank: why for s in free[:1] if (why := test(s, age))}

    return suspects


def _slow(seen: Sight, age: float) -> str:
    why = f"it made progress {seen.age:.0f} s ago, while others had waited for {age:.0f} s"
    return why if seen.age < age / 2 else ""


def _worker(seen: Sight, age: float) -> str:
    busy = next((w for w in seen.workers if w.where and seen.phase == "data"), None)
    return f"its loader's worker {busy.pid} gave no batch: {busy.where}" if busy else ""


def _sleeps(seen: Sight, age: float) -> str:
    if seen.process == "D":
        return "its main thread waited for a disk or a network file system"
    return f"its main thread slept ({seen.wchan})" if seen.wchan else "it made no progress"


def _connection(evidence: Evidence) -> Suspects:
    if not evidence.ranks:
        return {}
    inside, rank = evidence.inside(), evidence.ranks[0]
    if errors := [*evidence.errors.values()]:
        rank = int(failures.earliest(errors)["rank"])
    same = f"all ranks waited in the same {inside[rank]}" if rank in inside else "it only waited"
    return {rank: evidence.text(rank).partition("\n")[0] or same}


STOPPED_WHY = "its process was stopped (SIGSTOP, or Ctrl-Z in its terminal)"
LOCK_WHY = "its main thread waited for a lock, or for another thread"
LOOP_WHY = "its main thread was running, and started no collective"
LESS = "fewer data.num_workers, or a smaller batch"
CALLS = "let all ranks make the same collective calls, with the same sizes, in the same order"
LONGER = "the stacks show the line; if it needs that long: watchdog.timeout=SECONDS"
# The name, a pattern of the messages of an exception, and the remedy.
MESSAGES = (
    ("/dev/shm is full", r"shared memory|/dev/shm|</?torch_\d|Bus error", f"{LESS}; --shm-size=8g"),
    (
        "disk is full",
        r"No space left|Disk quota exceeded|disk is full|file write failed|unexpected pos",
        "free space, or another disk: output_dir=FOLDER",
    ),
    ("out of memory (GPU)", r"OutOfMemoryError|CUDA.*out of memory", "data.batch_size= half"),
    ("data worker killed", r"DataLoader worker \(pid", f"{LESS}; dmesg on that host"),
    ("out of memory (killed)", r"^Killed: (?!.* SIG(?!KILL))", f"{LESS}; or more memory"),
    ("out of memory (host)", r"MemoryError|n't allocate memory|cannot allocate memory", LESS),
    ("killed", r"^Killed: ", "dmesg on that host; the platform's log"),
    ("not a number", r"\bnans?\b|non-?finite|not finite", "trainer.detect_anomaly=true"),
    ("CUDA error", r"CUDA error:|device-side assert|CU\w+_STATUS", "CUDA_LAUNCH_BLOCKING=1"),
    ("NCCL transport", "nccl", "NCCL_DEBUG=INFO names the link"),
    ("exit", r"^(Ended|SystemExit): ", "raise an exception instead of ending the process"),
)
# The name, which ranks it may be, and the remedy.
HANGS = (
    ("uneven batches", _uneven, "give every rank the same number of batches per epoch"),
    ("skipped collective", _lost(early=True), CALLS),
    ("lost host", _lost(early=False), "resume without that host, or once it is back"),
    (
        "stopped",
        _hangs(lambda s, _: STOPPED_WHY * (s.process in STOPPED)),
        "kill -CONT continues it",
    ),
    ("data worker blocked", _hangs(_worker), "the stacks show the line; data.num_workers=0"),
    ("slow rank", _hangs(_slow), "more time for it: watchdog.timeout=SECONDS"),
    ("lock", _hangs(lambda s, _: LOCK_WHY * s.wchan.startswith("futex")), "see its stacks"),
    ("endless loop", _hangs(lambda s, _: LOOP_WHY * (s.process == "R")), LONGER),
    ("blocked", _hangs(_sleeps), LONGER),
    ("mismatched collective", _differs(same_place=True), CALLS),
    ("skipped collective", _differs(same_place=False), CALLS),
    ("mismatched collective", _says(MISMATCH.pattern), CALLS),
    ("NCCL transport", _says("nccl"), "NCCL_DEBUG=INFO names the link"),
    ("connection", _connection, "check the network between the hosts, and resume"),
)
