"""`distdl doctor` finds faults of hosts, links and devices, and none where all is well."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.cluster.hosts import Hosts, ip, why_not
from tests.conftest import DISTDL, TINY, distdl, environment, free_port

MATRIX = bool(os.environ.get("DISTDL_MATRIX"))
RUNS = int(os.environ.get("DISTDL_DOCTOR_RUNS", 10 if MATRIX else 1))
DOCTOR = ("doctor", "trainer.accelerator=cpu", "model=resnet18")
FEW_FILES = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))\n"
FEW = ("-c", f"{FEW_FILES}import sys\nfrom distdl.cli.main import main\nsys.exit(main())\n")
# On one of the hosts; `time` and versions are those of its own Python.
CLOCK = "import time\nnow = time.time\ntime.time = lambda: now() + 30\n"
SLOWEST_S = 20.0


def checks(folder: Path) -> list[dict[str, Any]]:
    """The rows of the newest examination."""
    files = sorted(folder.glob("outputs/*/*/attempts/001/doctor.json"))
    rows: list[dict[str, Any]] = json.loads(files[-1].read_text())["checks"]
    return rows


def wrong(rows: list[dict[str, Any]]) -> set[tuple[str, str]]:
    return {(r["check"], r["state"]) for r in rows if r["state"] in ("warn", "fail")}


def had_no_core(rows: list[dict[str, Any]]) -> bool:
    """Whether a rank was slow since another program, such as another test, had its core."""
    shares = (re.search(r"had (\d+) % of a core", row["remedy"]) for row in rows)
    return any(share is not None and int(share[1]) < 80 for share in shares)


@pytest.mark.parametrize("number", range(RUNS))
def test_nothing_is_wrong_with_two_healthy_ranks(number: int, tmp_path: Path) -> None:
    distdl("--help", cwd=tmp_path)  # what is started only once is no time of an examination
    for _ in range(3):
        started = time.monotonic()
        done = distdl(*DOCTOR, "trainer.devices=2", "--json", cwd=tmp_path)
        rows = json.loads(done.stdout)["answer"]["report"]["checks"]  # nothing else is there
        if not had_no_core(rows):
            break
    assert done.returncode == 0, done.stdout + done.stderr
    assert rows == checks(tmp_path), done.stderr
    assert wrong(rows) == set(), done.stderr
    names = {"link", "transport", "matrix product", "disk of the run", "writing", "versions"}
    assert names <= {row["check"] for row in rows if row["state"] == "pass"}
    assert time.monotonic() - started < SLOWEST_S


def test_a_training_does_not_begin_where_something_fails(tmp_path: Path) -> None:
    more = ("preflight=true", "trainer.max_epochs=1", "name=r")
    done = distdl(*TINY, *more, cwd=tmp_path, module=FEW)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    message = "ulimit nofile: rank 0"
    assert done.stderr.count(message) == 1, done.stderr
    assert "200 open files" in done.stderr, done.stderr
    assert not [*tmp_path.glob("outputs/*/r/checkpoints/*")]
    assert ("ulimit nofile", "fail") in wrong(checks(tmp_path))
    done = distdl(*DOCTOR, cwd=tmp_path, module=FEW)
    assert done.returncode == 1, done.stdout + done.stderr
    assert message in done.stderr, done.stdout + done.stderr


class Throttle:
    """A server before another one, which answers with few bytes per second."""

    def __init__(self, port: int, rate: int) -> None:
        self.target = port
        self.rate = rate
        self.lock = threading.Lock()
        self.server = socket.create_server(("127.0.0.1", 0))
        self.port = self.server.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.server.accept()
                behind = socket.create_connection(("127.0.0.1", self.target))
                for one, other, slow in ((client, behind, False), (behind, client, True)):
                    threading.Thread(target=self.pump, args=(one, other, slow), daemon=True).start()

    def pump(self, source: socket.socket, target: socket.socket, slow: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if slow and len(data) > 4096:
                    with self.lock:
                        time.sleep(len(data) / self.rate)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


@pytest.mark.skipif(not MATRIX, reason="make matrix")
@pytest.mark.parametrize("rate", [2_000_000, 0])
def test_a_slow_store_is_found_and_a_fast_one_passes(rate: int, tmp_path: Path) -> None:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    try:
        _, port = server.get_host_and_port()
        env = {
            "NO_PROXY": "127.0.0.1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
        }
        import boto3

        keys = dict(
            zip(("aws_access_key_id", "aws_secret_access_key"), ["testing"] * 2, strict=True)
        )
        url = f"http://127.0.0.1:{port}"
        client = boto3.client("s3", endpoint_url=url, region_name="us-east-1", **keys)
        client.create_bucket(Bucket="box")
        client.put_object(Bucket="box", Key="x/train-00000.tar", Body=os.urandom(64 << 20))
        front = Throttle(port, rate).port if rate else port
        env["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{front}"
        data = ("data=imagenet", "data.root=s3://box/x")
        done = distdl(*DOCTOR, *data, cwd=tmp_path, env=env)
    finally:
        server.stop()
    states = {row["state"] for row in checks(tmp_path) if row["check"] == "store"}
    assert states == ({"warn"} if rate else {"pass"}), done.stdout + done.stderr
    assert done.returncode == 0


class Fault(NamedTuple):
    """What is wrong with node2, and the row that says so.

    Args:
        prepare: Called with the hosts and the folder.
        prefix: Of node2's command.
        files: In a folder on node2's PYTHONPATH.
    """

    check: str
    where: str = "node2"
    prepare: Callable[[Hosts, Path], Any] = lambda hosts, folder: None
    prefix: tuple[str, ...] = ()
    files: dict[str, str] = {}
    arguments: tuple[str, ...] = ()
    seconds: float = SLOWEST_S


def limit_link(hosts: Hosts, folder: Path) -> None:
    command = "tc qdisc add dev eth0 root tbf rate 400mbit burst 64kb latency 100ms"
    hosts.run("node2", command.split(), check=True)


def keep_core_busy(hosts: Hosts, folder: Path) -> None:
    # Once the ranks have met: their imports on a part of a core take minutes.
    met = f"until grep -qs ^rank {folder}/log0; do sleep 0.1; done"
    loop = ["taskset", "-c", "0", "sh", "-c", f"{met}; while :; do :; done"]
    hosts.popen("node2", loop)  # no other test runs beside it: half of the core is left


def fill_shared_memory(hosts: Hosts, folder: Path) -> None:
    command = "mount -t tmpfs -o size=2m distdl-test /dev/shm"
    hosts.run("node2", command.split(), check=True)


METADATA = "Metadata-Version: 2.1\nName: lightning\nVersion: 9.9.9\n"
FAULTS = {
    "link": Fault("link", "node1 - node2", limit_link, arguments=("--expect", "0.3")),
    "slow node": Fault(
        "matrix product", prepare=keep_core_busy, prefix=("taskset", "-c", "0"), seconds=60
    ),
    "shared memory": Fault("/dev/shm", prepare=fill_shared_memory),
    "clock": Fault("clock", files={"sitecustomize.py": CLOCK}),
    "version": Fault("versions", files={"lightning-9.9.9.dist-info/METADATA": METADATA}),
    "ulimit": Fault("ulimit nofile", prefix=("prlimit", "--nofile=200:200")),
    "none": Fault(""),
}


@contextlib.contextmanager
def two_hosts() -> Iterator[Hosts]:
    with Hosts("node1", "node2") as hosts:
        yield hosts


def examined(hosts: Hosts, folder: Path, fault: Fault) -> tuple[list[int], str, float]:
    """The exit codes of a rank on each of two hosts, what they printed, and the seconds."""
    for name, text in fault.files.items():
        (folder / "more" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "more" / name).write_text(text)
    fault.prepare(hosts, folder)
    port = PORT
    jobs = []
    started = time.monotonic()
    for number, name in enumerate(hosts.names):
        env = environment(GLOO_SOCKET_IFNAME="eth0", MASTER_ADDR="node1", MASTER_PORT=str(port))
        env |= {"OMPI_COMM_WORLD_RANK": str(number), "OMPI_COMM_WORLD_SIZE": "2"}
        env |= {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
        prefix = ["taskset", "-c", "1"]
        if name == "node2":
            prefix = [*fault.prefix]
            env["PYTHONPATH"] = str(folder / "more") if fault.files else ""
        command = [*prefix, sys.executable, *DISTDL, *DOCTOR, *fault.arguments]
        log = {"stdout": (folder / f"log{number}").open("w"), "stderr": subprocess.STDOUT}
        jobs.append(hosts.popen(name, command, folder, env, **log))
    codes = [job.wait(100) for job in jobs]
    text = "".join((folder / f"log{number}").read_text() for number in range(2))
    return codes, text, time.monotonic() - started


PORT = free_port()
MISSING = why_not() or " ".join(t for t in ("tc", "taskset", "prlimit") if not shutil.which(t))


@pytest.mark.skipif(not MATRIX, reason="make matrix")
@pytest.mark.skipif(bool(MISSING), reason=MISSING or "-")
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_one_of_two_hosts_is_found(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    with two_hosts() as hosts:
        codes, text, seconds = examined(hosts, tmp_path, fault)
    print(f"{name}: {seconds:.1f} s\n{text}")
    rows = checks(tmp_path)
    found = {r["check"] for r in rows if r["state"] in ("warn", "fail")}
    assert found == {fault.check} - {""}, text
    places = [r["where"] for r in rows if r["state"] in ("warn", "fail")]
    assert all(fault.where in place for place in places), text
    failed = any(row["state"] == "fail" for row in rows)
    assert codes == [int(failed)] * 2, text
    assert seconds < fault.seconds, text


@pytest.mark.skipif(not MATRIX, reason="make matrix")
@pytest.mark.skipif(bool(MISSING), reason=MISSING or "-")
def test_a_blocked_rendezvous_port_is_named(tmp_path: Path) -> None:
    """What node1 answers from this port is dropped, as by a firewall."""
    block = Fault("", prepare=lambda hosts, folder: ip(
        "-n", f"{hosts.id}-node1", "rule", "add", "priority", "1", "ipproto", "tcp",
        "sport", str(PORT), "blackhole",
    ))  # fmt: skip
    with two_hosts() as hosts:
        ip("-n", f"{hosts.id}-node1", "rule", "del", "lookup", "local")
        ip("-n", f"{hosts.id}-node1", "rule", "add", "priority", "2", "lookup", "local")
        codes, text, _ = examined(hosts, tmp_path, block)
    assert codes[1] == 1, text
    assert f"rank 1 on node2 cannot reach rank 0 at node1:{PORT}: no answer" in text
