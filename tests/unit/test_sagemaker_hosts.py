"""launcher=sagemaker in the container: who takes part, and that hosts end together."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from distdl.launchers.sagemaker.entry import Hosts
from distdl.launchers.sagemaker.heartbeat import VANISHED, Heartbeat, HostEnd


def resource_config(root: Path, **fields: Any) -> None:
    (root / "input/config").mkdir(parents=True, exist_ok=True)
    values = {"current_host": "algo-2", "hosts": ["algo-10", "algo-2", "algo-1"], **fields}
    (root / "input/config/resourceconfig.json").write_text(json.dumps(values))


def test_hosts_are_counted_the_same_everywhere(tmp_path) -> None:
    resource_config(tmp_path, network_interface_name="eth0")
    here = Hosts.read(tmp_path)
    assert here.names == ("algo-1", "algo-2", "algo-10")
    assert (here.number, here.primary) == (1, "algo-1")
    assert here.environment() == {"NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth0"}
    resource_config(tmp_path, current_instance_type="ml.p4d.24xlarge")
    assert Hosts.read(tmp_path).environment() == {"FI_PROVIDER": "efa"}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def until(condition: Any, timeout: float = 240) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def both(monkeypatch: pytest.MonkeyPatch) -> tuple[Heartbeat, Heartbeat]:
    monkeypatch.setattr("distdl.launchers.sagemaker.heartbeat.BEAT_SECONDS", 0.05)
    monkeypatch.setattr("distdl.launchers.sagemaker.heartbeat.PATIENCE_SECONDS", 0.5)
    port, names = free_port(), ("localhost", "other")
    second = Heartbeat(names, "other", port)  # it may be there before the primary one
    time.sleep(0.1)
    first = Heartbeat(names, "localhost", port)
    until(lambda: first._links and second._links)
    return first, second


def test_hosts_hear_how_the_others_end(monkeypatch) -> None:
    first, second = both(monkeypatch)
    time.sleep(0.7)  # longer than the patience: the beats keep it
    assert first.ends() == second.ends() == {}
    second.report_end(HostEnd(0))
    until(lambda: first.ends() == {"other": HostEnd(0)})
    first.report_end(HostEnd(1, "rank 0: it's \u00e4rgerlich\nvery", 1.5))
    until(
        lambda: second.ends() == {"localhost": HostEnd(1, "rank 0: it's \u00e4rgerlich\nvery", 1.5)}
    )


def test_hosts_notice_silence(monkeypatch) -> None:
    first, second = both(monkeypatch)
    monkeypatch.setattr(first._over, "wait", lambda _: time.sleep(60))  # its beats stop
    until(lambda: second.ends() == {"localhost": HostEnd(VANISHED, "localhost vanished")})


def test_a_stranger_who_knocks_is_no_host(monkeypatch) -> None:
    first, _ = both(monkeypatch)
    with socket.create_connection(("localhost", first.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert stranger.recv(10) == b""
    assert first.ends() == {}
