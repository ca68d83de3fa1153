"""From measured facts to rows: what is right, what is not, and what to do about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from distdl.tools.doctor.links import Exchange, Pair, Speed
from distdl.tools.doctor.rows import FAIL, PASS, SKIP, WARN, Finding, Limit, slow

GB, MB = 1e9, 1e6
Facts = Mapping[str, Any]

EXPECTED_SHARE = 0.5  # of what was promised: protocols and encryption take their part
# Below this share of the median of the others.
SLOW_LINK = 0.4
SLOW_DEVICE = 0.7
CABLES = "a gigabit Ethernet is faster: which interface is used? cables? the VM's limit?"
TIME = "start chrony or ntpd: signatures, certificates and the order of logs need it"
LINK = Limit("GB/s", 0.0, 0.1, CABLES)
LATENCY = Limit("ms", 200.0, 10.0, "are all hosts in one region and zone?", most=True)
DISK = Limit("GiB free", 0.5, 2.0, "checkpoints need it: make room, or output_dir=FOLDER")
WRITE = Limit("MB/s", 0.5, 5.0, "checkpoints wait for it: output_dir=FOLDER on a faster disk")
READ = Limit("MB/s", 1.0, 20.0, "move the data to the job's region, or to a disk of the host")
CLOCK = Limit("s", 60.0, 0.1, TIME, most=True)
LIMITS = {
    "nofile": Limit("open files", 256, 1000, "ulimit -n 65536, or LimitNOFILE of the service"),
    "nproc": Limit("processes", 256, 2000, "ulimit -u 65536, or LimitNPROC of the service"),
}
MEMLOCK = Limit("GiB locked memory", 0.1, 1.0, "InfiniBand needs it: ulimit -l unlimited")
SHM_REMEDY = "start the container with --shm-size=8g, or lower data.num_workers"
SHM_PER_RANK = 32 << 20  # bytes: NCCL's and gloo's own buffers
MUST_AGREE = ("python", "torch", "lightning", "distdl", "CUDA", "NCCL")
# Bits of NVML that name a fault; others are power limits, or a GPU that has nothing to do.
# https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html
CLOCK_FAULTS = {0x8: "hardware slowdown", 0x20: "heat", 0x40: "heat", 0x80: "power brake"}
REPLACE = "reset the GPU or replace the host: docs.nvidia.com/deploy/xid-errors"


def slow_links(found: Mapping[Pair, Exchange]) -> set[str]:
    """The places whose links are all slow, and the single pairs that are, in words."""
    rates = {pair: each.rate for pair, each in found.items()}
    best = {p: max(r for pair, r in rates.items() if p in pair) for pair in rates for p in pair}
    places = slow(best, SLOW_LINK)
    pairs = {" - ".join(pair) for pair in slow(rates, SLOW_LINK) if not places & {*pair}}
    return {f"every link of {place}" for place in places} | pairs


def links(
    found: Mapping[Pair, Exchange], places: int, expected: float | None, still_slow: set[str]
) -> Iterator[Finding]:
    """The links, each against what was promised in bytes per second, and those that were slower
    than the others in every pass."""
    for pair, each in found.items():
        where = " - ".join(pair)
        gigabytes = each.rate / GB
        if expected and each.rate < EXPECTED_SHARE * expected:
            promised = f"GB/s of {expected / GB:.4g}"
            yield Finding("link", where, FAIL, gigabytes, promised, CABLES)
        else:
            yield LINK.row("link", where, gigabytes)
    if left := places * (places - 1) // 2 - len(found):
        yield Finding("link", f"{left} further pairs", SKIP, None, "no time left")
    for where in sorted(still_slow):
        what = f"below {100 * SLOW_LINK:.0f} % of the median of the others"
        yield Finding("link", where, FAIL, None, what, CABLES)
    for pair, each in found.items():
        yield LATENCY.row("latency", " - ".join(pair), 1000 * each.latency)


def devices(speeds: Mapping[str, Speed], still_slow: set[str]) -> Iterator[Finding]:
    """The matrix products of each rank's device."""
    for where, each in speeds.items():
        state = PASS
        less = ""
        remedy = ""
        if where in still_slow:
            state = FAIL
            less = f", below {100 * SLOW_DEVICE:.0f} % of the others"
            remedy = "leave the host out, or look for other programs, heat and limits on it"
            if each.cpu_share is not None:
                remedy += f" (the process had {100 * each.cpu_share:.0f} % of a core)"
        yield Finding("matrix product", where, state, each.flops / 1e9, f"GFLOP/s{less}", remedy)


def hosts(facts: Mapping[str, Facts], shm_needed: int) -> Iterator[Finding]:
    """Shared memory, disk and store of each host."""
    shm = Limit("MiB free", shm_needed / 2**20, 0.0, SHM_REMEDY)
    needed = f", {shm_needed / 2**20:.0f} needed"
    for name, each in facts.items():
        if "/dev/shm" in each:
            yield shm.row("/dev/shm", name, each["/dev/shm"] / 2**20, needed)
    yield from (DISK.row("disk of the run", n, f["run"] / 2**30) for n, f in facts.items())
    for check, key, limit in (("writing", "write", WRITE), ("store", "read", READ)):
        for name, each in facts.items():
            rate = each.get(key)
            if isinstance(rate, float):
                yield limit.row(check, name, rate / MB)
            elif rate is None:
                yield Finding(check, name, SKIP, None, "no data in a store")
            else:  # an error
                yield Finding(check, name, FAIL, None, rate, "the training would fail, too")


def decoders(facts: Mapping[str, Facts]) -> Iterator[Finding]:
    """What decodes images on each host, if the data are images."""
    has = {name: each["decoder"] for name, each in facts.items() if "decoder" in each}
    for name, decoder in has.items():
        if decoder == "none":
            yield Finding("decoder", name, FAIL, None, "none works", "data.decoder=auto")
        elif decoder != "native" and "native" in has.values():
            remedy = "install distdl-native there, too (docs/data/native.md)"
            yield Finding("decoder", name, WARN, None, f"{decoder}, elsewhere native", remedy)
        else:
            yield Finding("decoder", name, PASS, None, decoder)


def clocks(offsets: Mapping[str, tuple[float, float]]) -> Iterator[Finding]:
    """The clocks against that of rank 0's host; what the round trip leaves open is no offset."""
    if not offsets:
        yield Finding("clock", "all", SKIP, None, "there is one host")
    for name, (ahead, uncertain) in offsets.items():
        yield CLOCK.row("clock", name, max(abs(ahead) - uncertain, 0.0), " beside rank 0's")


def processes(ranks: Sequence[Facts], infiniband: bool) -> Iterator[Finding]:
    """The limits and versions of each rank."""
    for key, limit in LIMITS.items():
        yield from (_limit(key, limit, each, 1) for each in ranks)
    if infiniband:
        yield from (_limit("memlock", MEMLOCK, each, 2**30) for each in ranks)
    for name in dict.fromkeys(key for each in ranks for key in each["versions"]):
        has = {who(each): each["versions"].get(name, "none") for each in ranks}
        usual = Counter(has.values()).most_common(1)[0][0]
        others = {where: version for where, version in has.items() if version != usual}
        if not others:
            yield Finding("versions", f"all {len(ranks)}", PASS, None, f"{name} {usual}")
        for where, version in others.items():
            state = FAIL if name in MUST_AGREE else WARN
            what = f"{name} {version}, elsewhere {usual}"
            yield Finding("versions", where, state, None, what, "install the same everywhere")


def _limit(key: str, limit: Limit, rank: Facts, size: int) -> Finding:
    value = rank["limits"][key]
    if value < 0 or value >= 2**60:
        return Finding(f"ulimit {key}", who(rank), PASS, None, "unlimited")
    return limit.row(f"ulimit {key}", who(rank), value / size)


def who(rank: Facts) -> str:
    return f"rank {rank['rank']} ({rank['host']})"


def gpus(ranks: Sequence[Facts]) -> Iterator[Finding]:
    """What the driver tells of each GPU."""
    for each in ranks:
        where = who(each)
        gpu = each.get("gpu")
        if not gpu or "error" in gpu:
            what = gpu["error"] if gpu else "no GPU"
            yield Finding("GPU", where, SKIP, None, what)
            continue
        reasons = {text for bit, text in CLOCK_FAULTS.items() if gpu.get("clocks", 0) & bit}
        problems = {
            f"{gpu.get('ecc')} uncorrected memory errors": gpu.get("ecc"),
            "rows that wait to be remapped, or cannot be": any(gpu.get("remapped", ())),
            f"Xid {', '.join(gpu.get('xid', ()))}": gpu.get("xid"),
            f"lower clocks: {', '.join(sorted(reasons))}": reasons,
        }
        bad = [what for what, present in problems.items() if present]
        yield from (Finding("GPU", where, FAIL, None, what, REPLACE) for what in bad)
        if not bad:
            unread = [name for name in ("ecc", "remapped", "clocks", "xid") if name not in gpu]
            note = f"; not readable: {', '.join(unread)}" if unread else ""
            yield Finding("GPU", where, PASS, None, f"{gpu.get('name')}{note}")
        if gpu.get("driver_cuda") and gpu["cuda"]:
            newest = [gpu["driver_cuda"] // 1000, gpu["driver_cuda"] % 1000 // 10]
            needed = [*map(int, gpu["cuda"].split(".")[:2])]
            state = PASS
            if newest[0] < needed[0]:
                state = FAIL
            elif newest < needed:
                state = WARN
            what = f"{gpu['driver']} runs CUDA {newest[0]}.{newest[1]}, torch has {gpu['cuda']}"
            remedy = "" if state == PASS else "update NVIDIA's driver"
            yield Finding("driver", where, state, None, what, remedy)


def transports(ways: Mapping[str, Facts], nodes: int) -> Iterator[Finding]:
    """By what the gradients go."""
    for where, way in ways.items() if len(ways) > 1 else ():
        remedy = ""
        what = f"NCCL: {', '.join(way['nccl']) or 'not known'}" if "nccl" in way else ""
        if "NET/Socket" in what and way["adapters"]:
            remedy = "NCCL leaves InfiniBand aside: NCCL_IB_DISABLE? /dev/infiniband? drivers?"
        if not what:
            what = f"gloo: {way['interface']}"
            what += f", {way['gbits']:g} Gb/s" if way["gbits"] > 0 else ""
            if nodes > 1 and way["interface"] == "lo":
                remedy = "export GLOO_SOCKET_IFNAME=INTERFACE, the one between the hosts"
        yield Finding("transport", where, FAIL if remedy else PASS, None, what, remedy)
