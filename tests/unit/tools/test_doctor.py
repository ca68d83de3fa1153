"""What the doctor makes of measured facts; tests/multiprocess/test_examination.py measures."""

from itertools import combinations

import pytest

from distdl.images import decoding
from distdl.tools.doctor import findings, links, node, rows
from distdl.tools.doctor.links import Exchange, Speed
from distdl.tools.doctor.rows import FAIL, PASS, SKIP, WARN


def fabric(slow=(), nodes=4, rate=10e9):
    """The links between nodes, of which some are slow: pairs, or all of one node."""
    pairs = combinations([f"node{i}" for i in range(nodes)], 2)
    is_slow = {p: p in slow or any(place in slow for place in p) for p in pairs}
    return {p: Exchange(rate / 10 if s else rate, 1e-4) for p, s in is_slow.items()}


@pytest.mark.parametrize("places", [1, 2, 7, 8])
def test_every_pair_is_measured_once_and_no_place_twice_at_a_time(places):
    found = [*links.rounds(range(places))]
    assert sorted(pair for each in found for pair in each) == [*combinations(range(places), 2)]
    for each in found:
        busy = [place for pair in each for place in pair]
        assert len(busy) == len({*busy})


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        (fabric(), set()),
        (fabric(nodes=2, rate=1e8), set()),  # nothing to compare it with
        (fabric(slow=["node2"], nodes=3), {"every link of node2"}),
        (fabric(slow=[("node0", "node3")]), {"node0 - node3"}),
    ],
)
def test_what_is_slower_than_the_others_is_named(measured, expected):
    assert findings.slow_links(measured) == expected


def rank(number=0, host="node0", gpu=None, **more):
    facts = {"rank": number, "host": host, "versions": {"torch": "2.11"}, "gpu": gpu}
    facts["limits"] = {"nofile": 65536, "nproc": -1, "memlock": 8 << 20}
    return facts | more


def gpu(**more):
    facts = {"name": "H200", "cuda": "13.0", "driver": "580.1", "driver_cuda": 13000}
    return facts | {"ecc": 0, "remapped": (0, 0), "clocks": 0x1, "xid": []} | more


def limits(**more):
    return {"nofile": 65536, "nproc": 9999, "memlock": -1} | more


SHM = {"/dev/shm": 1 << 20}


def decoders(*names):
    return {f"node{i}": {"decoder": name} for i, name in enumerate(names)}


def host(**more):
    return {"n": {"run": 9e10, "write": 1e8, "/dev/shm": 1e9, "read": None} | more}


OLDER = [rank(), rank(1), rank(2, versions={"torch": "2.9"})]
MORE = [rank(), rank(1, versions={"torch": "2.11", "x": "1"})]
ETH0, LO = {"interface": "eth0", "gbits": 10}, {"interface": "lo", "gbits": 0}
NCCL = {"nccl": ["NET/Socket/0"], "adapters": ["mlx5_0 200 Gb/sec"]}
# What is judged, the worst state of it, and a part of the row's text.
CASES = {
    "link": (lambda: findings.links(fabric(), 4, None, set()), PASS, "10 GB/s"),
    "promised": (lambda: findings.links(fabric(), 4, 25e9, set()), FAIL, "GB/s of 25"),
    "slow link": (lambda: findings.links(fabric(), 4, None, {"a - b"}), FAIL, "a - b"),
    "no link": (lambda: findings.links({}, 3, None, set()), SKIP, "3 further"),
    "device": (lambda: findings.devices({"a": Speed(1e12, 0.5)}, {"a"}), FAIL, "50 % of a core"),
    "shm": (lambda: findings.hosts(host(**SHM), 64 << 20), FAIL, "1 MiB free, 64 needed"),
    "disk": (lambda: findings.hosts(host(run=1 << 20), 0), FAIL, "GiB free"),
    "store": (lambda: findings.hosts(host(read=5e6), 0), WARN, "5 MB/s"),
    "no store": (lambda: findings.hosts(host(read="no box"), 0), FAIL, "no box"),
    "all well": (lambda: findings.hosts(host(read=1e8), 1 << 20), PASS, "100 MB/s"),
    "decoder": (lambda: findings.decoders(decoders("native", "native")), PASS, "native"),
    "usual": (lambda: findings.decoders(decoders("pil", "simplejpeg")), PASS, "simplejpeg"),
    "slower": (lambda: findings.decoders(decoders("native", "pil")), WARN, "pil, elsewhere native"),
    "undecoded": (lambda: findings.decoders(decoders("native", "none")), FAIL, "none works"),
    "clock": (lambda: findings.clocks({"n": (-5.0, 0.1)}), WARN, "4.9 s beside"),
    "slow trip": (lambda: findings.clocks({"n": (0.3, 0.3)}), PASS, "0 s"),
    "files": (lambda: findings.processes([rank(limits=limits(nofile=99))], False), FAIL, "99 open"),
    "memlock": (lambda: findings.processes([rank()], True), FAIL, "locked memory"),
    "no memlock": (lambda: findings.processes([rank()], False), PASS, "torch 2.11"),
    "version": (lambda: findings.processes(OLDER, False), FAIL, "torch 2.9, elsewhere 2.11"),
    "numpy": (lambda: findings.processes(MORE, False), WARN, "x 1, elsewhere none"),
    "no GPU": (lambda: findings.gpus([rank()]), SKIP, "no GPU"),
    "GPU": (lambda: findings.gpus([rank(gpu=gpu())]), PASS, "H200"),
    "ECC": (lambda: findings.gpus([rank(gpu=gpu(ecc=3))]), FAIL, "3 uncorrected"),
    "remapped": (lambda: findings.gpus([rank(gpu=gpu(remapped=(1, 0)))]), FAIL, "remapped"),
    "Xid": (lambda: findings.gpus([rank(gpu=gpu(xid=["79"]))]), FAIL, "Xid 79"),
    "heat": (lambda: findings.gpus([rank(gpu=gpu(clocks=0x40))]), FAIL, "heat"),
    "old driver": (lambda: findings.gpus([rank(gpu=gpu(driver_cuda=12040))]), FAIL, "12.4"),
    "gloo": (lambda: findings.transports(dict.fromkeys("ab", ETH0), 2), PASS, "eth0, 10 Gb/s"),
    "loopback": (lambda: findings.transports(dict.fromkeys("ab", LO), 2), FAIL, "gloo: lo"),
    "sockets": (lambda: findings.transports(dict.fromkeys("ab", NCCL), 2), FAIL, "NET/Socket"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_row_says_what_was_measured_and_what_to_do(case):
    judge, state, text = CASES[case]
    found = [*judge()]
    worst = min((row.state for row in found), key=[FAIL, WARN, PASS, SKIP].index)
    assert worst == state, found
    assert any(text in str(row) and row.state == state for row in found), found
    assert all(bool(row.remedy) == (row.state in (FAIL, WARN)) for row in found)


@pytest.mark.parametrize(("data", "crops"), [("StoredImages", True), ("StoredObjects", False)])
def test_a_host_names_the_decoder_that_its_data_use(data, crops, tmp_path, monkeypatch):
    """An image of detection is decoded whole, which distdl-native does not."""
    monkeypatch.setattr(node, "DISK_S", 0)
    monkeypatch.setattr(decoding, "native_library", lambda: "a library")
    facts = node.host(tmp_path, {"_target_": f"distdl.data.{data}", "decoder": "auto"}, 0)
    assert (facts["decoder"] == "native") == crops
    assert facts["decoder"] in ("native", *decoding.CPU_DECODERS)


def test_nccls_own_words_for_what_it_uses():
    log = """\
node1:99:120 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/IB/0/GDRDMA
node1:99:120 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
node1:99:120 [0] NCCL INFO Channel 01 : 0[0] -> 1[1] via SHM/direct/direct
node1:99:120 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so
"""
    assert node.nccl_transports(log) == ["NET/IB/0/GDRDMA", "P2P", "SHM/direct/direct"]


def test_the_table_has_one_line_for_what_passes_everywhere():
    passed = [rows.Finding("writing", f"n{i}", PASS, float(i), "MB/s") for i in (3, 1, 2)]
    failed = rows.Finding("clock", "n1", WARN, 7.0, "s", "start chrony")
    lines = rows.table([*passed, failed]).splitlines()
    assert lines[1].split(maxsplit=4) == ["writing", "all", "3", "pass", "1 MB/s to 3 MB/s"]
    assert lines[-1] == "warn: clock of n1: 7 s; start chrony"
    assert len(lines) == 4
