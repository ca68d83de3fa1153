"""Which rank failed or did not come first, and why: known causes, tried in order."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from distdl.incident.evidence import MISMATCH, STEP, Rank, Sight
from distdl.incident.words import BETWEEN_EPOCHS, OF_PROGRAM, ON_DISK, RUNNING, STOPPED
from distdl.runs import failures
from distdl.util.wording import plural

MANY = 4  # ranks that a sentence names
LITTLE = 2**28  # bytes of memory of a host that is left
LESS = "fewer data.num_workers, or a smaller batch"
CALLS = "let all ranks make the same collective calls, with the same sizes, in the same order"
LONGER = "the stacks show the line; if it needs that long: watchdog.timeout=SECONDS"
AWAKE = "find what stops it: a debugger, Ctrl-Z, a scheduler; if it must: watchdog.timeout=SECONDS"
# Of torch's DistributedDataParallel, and of Lightning, which replaces its text.
UNUSED = r"parameters that were not used in producing"
FIND = "strategy.find_unused_parameters=true"
# Names of causes.
DISK_FULL = "disk is full"
DEVICE_MEMORY = "out of memory (GPU)"
# Of the launchers' and the programs' start, and of torch's store.
PORT_IN_USE = (
    r"^(PodFailed|NotMet|OSError): .*port \d+ .*cannot be used|^DistNetworkError: .*EADDRINUSE"
)
# The name, a pattern of the messages of an exception, and the remedy. What speaks for a lack of
# memory follows the message about a kill.
MESSAGES = (
    ("too many open files", r"Too many open files|items of ancdata", f"ulimit -n 65536, or {LESS}"),
    ("unused parameters", UNUSED, "use each parameter in the loss, or strategy=ddp " + FIND),
    (
        "parameters used twice",
        r"mark a variable ready only once",
        "call each part once per step (checkpoint(..., use_reentrant=False)), or strategy=ddp "
        "strategy.static_graph=true",
    ),
    ("/dev/shm is full", r"shared memory|/dev/shm|</?torch_\d|Bus error", f"{LESS}; --shm-size=8g"),
    (
        DISK_FULL,
        r"No space left|quota exceeded|file write failed|unexpected pos|File too large|SIGXFSZ",
        "free space, or raise the limit (quota, ulimit -f)",
    ),
    (DEVICE_MEMORY, r"OutOfMemoryError|CUDA.*out of memory", "data.batch_size= half"),
    ("data worker killed", r"DataLoader worker \(pid", f"{LESS}; dmesg on that host"),
    ("out of memory (killed)", r"^Killed: .*(SIGKILL|gone).*; ", f"{LESS}; or more memory"),
    ("out of memory (host)", r"MemoryError|n't allocate memory|cannot allocate memory", LESS),
    ("image pull", r"image pull: ", "correct launcher.image, or get the right to pull it"),
    (
        "no Python",
        r"^PodFailed: .*(\bpython\d*: (command )?not found|exec: .sh.: |and distdl needs 3\.)",
        "an image with Python 3.11.4 or later as python: launcher.image",
    ),
    ("an image of root's", r"runAsNonRoot", "launcher.run_as=1000, or USER in the image"),
    ("port in use", PORT_IN_USE, "another launcher.port"),
    (
        "no PMI",
        r"PMI support",
        """'launcher.srun_args=["--mpi=pmix"]', or another one of srun --mpi=list""",
    ),
    ("not started", r"^NotStarted: ", "install the program on that host, or correct the command"),
    (
        "ranks missing",
        r"^NotMet: ",
        "their hosts, their logs, the network: distdl doctor",
    ),
    ("checkpoints not kept", r"^NotKept: ", "program.checkpoints=PLACE; credentials on the nodes"),
    ("refused by the host", r"^NotRun: ", "correct on that host what the message names"),
    ("out of memory (killed)", r"\(OOMKilled\)", f"{LESS}; or more launcher.memory"),
    ("lost host", r"^HostLost: ", "resume without that host"),
    ("killed", r"^Killed: ", "dmesg on that host; the platform's log"),
    ("not a number", r"\bnans?\b|non-?finite|not finite", "trainer.detect_anomaly=true"),
    ("CUDA error", r"CUDA error:|device-side assert|CU\w+_STATUS", "CUDA_LAUNCH_BLOCKING=1"),
    ("NCCL transport", "nccl", "NCCL_DEBUG=INFO names the link"),
    ("exit", r"^Ended: the program ended", "the last lines of its log say more"),
    ("exit", r"^(Ended|SystemExit): ", "raise an exception instead of ending the process"),
    ("mismatched collective", MISMATCH, CALLS),
)
# If there is none of these messages.
EXCEPTION = (
    "exception",
    "",
    "correct the code, or what the message names; the log has the traceback",
)
CONNECTION = ("connection", "", "check the network between the hosts, and resume")


# What a program of any language prints, so clear that a line of it among others says enough.
CLEAR = (
    DISK_FULL,
    "too many open files",
    DEVICE_MEMORY,
    "out of memory (host)",
    "no PMI",
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
    left = [rank for rank in ranks if rank.left]
    free = [rank for rank in left if not rank.waits]
    if asleep := [rank for rank in free if rank.sight.how == OF_PROGRAM]:
        return _asleep(asleep[0])
    if failed := [rank for rank in free if rank.text]:
        return _failed(ranks, _earliest(ranks, failed))
    if cause := _uneven(ranks) or _lost(ranks):
        return cause
    if free:
        return _did_not_come(ranks, free)
    return _differs(ranks) or (_waited(_earliest(ranks, left)) if left else None)


def vanished(ranks: Sequence[Rank]) -> Cause | None:
    """If the processes of a run are gone, and nobody was left to say why."""
    host = ranks[0].sight.host
    why = (
        f"all processes on {host} ended at once and left nothing: it restarted, or was switched off"
    )
    return Cause(ranks[0], "lost host", why, "resume the run") if host else None


def _asleep(rank: Rank) -> Cause:
    """A rank whose program was stopped. Whatever the other programs say, they waited for it."""
    return Cause(rank, "stopped", rank.sight.phase, AWAKE)


def _failed(ranks: Sequence[Rank], first: Rank) -> Cause:
    """A rank with an exception of its own, or that was killed."""
    memory = _little_memory(ranks, first)
    lines = first.text.splitlines()
    lines = [f"{line}{memory}" if "killed" in line.lower() else line for line in lines]
    return _by_message(first, lines, EXCEPTION)


def telling(lines: Sequence[str]) -> str:
    """The last of these lines that names a clear cause, else the last one; "" if there is none."""
    clear = [pattern for name, pattern, _ in MESSAGES if name in CLEAR]
    for line in reversed(lines):
        if any(re.search(pattern, line, re.IGNORECASE) for pattern in clear):
            return line
    return lines[-1] if lines else ""


def _waited(first: Rank) -> Cause:
    """All that is left: ranks that waited for each other, or lost each other."""
    text = first.text or f"all ranks waited in the same {first.inside or 'place'}"
    return _by_message(first, text.splitlines(), CONNECTION)


def _by_message(rank: Rank, lines: Sequence[str], otherwise: tuple[str, str, str]) -> Cause:
    """The first cause with a pattern that one of the lines has."""
    return next(
        Cause(rank, name, line, remedy)
        for name, pattern, remedy in (*MESSAGES, otherwise)
        for line in lines
        if re.search(pattern, line, re.IGNORECASE)
    )


def _earliest(ranks: Sequence[Rank], of: Sequence[Rank]) -> Rank:
    first = failures.earliest([rank.error for rank in of if rank.error])
    return ranks[first["rank"]] if first else of[0]


def _little_memory(ranks: Sequence[Rank], of: Rank) -> str:
    """What speaks for a lack of memory on a rank's host; "" if nothing does."""
    on_host = [rank.sight.memory for rank in ranks if rank.sight.host == of.sight.host]
    if kills := max(memory.get("oom_kills", 0) for memory in on_host):
        return f"; the kernel ended {kills} process(es) of its control group for lack of memory"
    free = min(memory.get("available", LITTLE) for memory in on_host)
    return f"; its host had {size_text(free)} of memory left" if free < LITTLE else ""


def size_text(count: float) -> str:
    """Bytes as text."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def ranks_text(ranks: Sequence[Rank]) -> str:
    """`rank 3`, or `ranks 0, 1, 2, 4 and 11 more`."""
    more = f" and {len(ranks) - MANY} more" if len(ranks) > MANY else ""
    numbers = ", ".join(str(rank.sight.rank) for rank in ranks[:MANY])
    return f"{plural('rank', len(ranks))} {numbers}{more}"


def _uneven(ranks: Sequence[Rank]) -> Cause | None:
    """A rank that had ended its epoch while another one was in a step of it."""
    steps = [rank.sight for rank in ranks if rank.waits and rank.sight.phase in STEP]
    if not steps:
        return None
    other = max(steps, key=lambda sight: sight.step or 0)
    for rank in ranks:
        seen = rank.sight
        if seen.step is None or seen.step > (other.step or 0):
            continue
        later = (seen.epoch or 0) - (other.epoch or 0)
        after = seen.phase in ("validation", "checkpoint") or seen.action.startswith(BETWEEN_EPOCHS)
        fewer = later == 0 and 0 < (seen.batch or 0) < (other.batch or 0)
        idle = rank.waits or not rank.left
        if seen.phase == "end" or (idle and (later > 0 or (after and fewer))):
            why = (
                f"it had ended its epoch at step {seen.step}, batch {seen.batch}, while "
                f"rank {other.rank} was in step {other.step}, batch {other.batch}"
            )
            return Cause(rank, "uneven batches", why, "as many batches per epoch on every rank")
    return None


def _lost(ranks: Sequence[Rank]) -> Cause | None:
    """A rank of which nobody heard any more: one that left nothing, else one that waited itself,
    cut off."""
    sights = [rank.sight for rank in ranks if rank.seen]
    if not sights:
        return None
    listener = max(sights, key=lambda s: (s.heard, len(s.peers), -s.rank))
    fresh = {key: peer.fresh for key, peer in listener.peers.items()}
    heard = listener.others > 0  # of those that are not named
    silent = [rank for rank in ranks if not fresh.get(str(rank.sight.rank), heard or rank.left)]
    gone = [rank for rank in silent if not rank.left]
    lost = gone or [rank for rank in silent if rank.seen and rank.waits]
    if lost and lost[0].sight.phase == "end":
        return Cause(lost[0], "skipped collective", "it ended, and others waited for it", CALLS)
    why = f"nobody heard of {ranks_text(lost)} any more: the host or its network has failed"
    return Cause(lost[0], "lost host", why, "resume without that host") if lost else None


def _did_not_come(ranks: Sequence[Rank], free: Sequence[Rank]) -> Cause:
    """Of the ranks that waited for no other: a stopped one, else that with the fewest
    collectives."""
    rank = min(
        free,
        key=lambda r: (
            r.sight.process not in STOPPED,
            r.sight.stopped_worker is None,
            r.sight.enqueued,
        ),
    )
    seen = rank.sight
    age = max((r.sight.age for r in ranks if r.waits), default=0.0)
    busy = seen.busy_worker
    stopped = seen.stopped_worker or Sight()
    asleep = f"its loader's worker {stopped.pid} was stopped; kill -CONT {stopped.pid} continues it"
    slow = f"it made progress {seen.age:.0f} s ago, while others had waited for {age:.0f} s"
    slept = f"its main thread slept ({seen.wchan})" if seen.wchan else "it made no progress"
    table = (
        (seen.process in STOPPED, "stopped", "its process was stopped; kill -CONT continues it"),
        (stopped.process, "stopped", asleep),
        (busy.where, "data worker blocked", f"its loader's worker {busy.pid} was in {busy.where}"),
        (seen.age < age / 2, "slow rank", slow),
        (seen.wchan.startswith("futex"), "lock", "its main thread waited for a lock or a thread"),
        (seen.process == RUNNING, "endless loop", "its main thread ran, and started no collective"),
        (seen.process == ON_DISK, "blocked", "its main thread waited for a disk"),
        (True, "blocked", slept),
    )
    return next(Cause(rank, name, why, LONGER) for fits, name, why in table if fits)


def _differs(ranks: Sequence[Rank]) -> Cause | None:
    """The rank whose collective is not that of most others; of two ranks the one that waits in a
    call of Lightning's which it alone made, else the one that is further on, else the second."""
    waiting = [rank for rank in ranks if rank.inside]
    times = Counter(rank.call for rank in waiting)
    # Ranks with different numbers are not at the same collective: the sender of a broadcast goes on
    # to the next one while others still receive. A rank that gloo has aborted has no number (None).
    numbers = {rank.inside.seq for rank in waiting if rank.inside} - {None}
    if len(times) < 2 or len(numbers) > 1:
        return None
    odd = max(
        waiting,
        key=lambda rank: (-times[rank.call], rank.sight.alone, rank.moment, rank.sight.rank),
    )
    other = next(rank for rank in waiting if rank.call != odd.call)
    name = "mismatched collective" if odd.moment == other.moment else "skipped collective"
    places = (f"rank {r.sight.rank} was in {r.inside} in {r.sight.phase}" for r in (odd, other))
    return Cause(odd, name, ", and ".join(places), CALLS)
