"""The ranks of a program tell each other where they are."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from distdl.job import JobState
from distdl.program import meeting
from distdl.ranks.environment import Environment
from distdl.ranks.stopping import Stopped, StopRequest
from tests.conftest import free_port


def places(count, port):
    return [
        Environment("mpi", rank, count, rank, count, main_address="127.0.0.1", main_port=port)
        for rank in range(count)
    ]


def met(count, port, **more):
    def meet(place):
        return meeting.meet(place, {"rank": place.rank}, "job", StopRequest(), patience=20, **more)

    with ThreadPoolExecutor(count) as pool:
        return [*pool.map(meet, places(count, port))]


def test_each_rank_gets_what_all_have_told():
    port = free_port()
    expected = [{"rank": rank} for rank in range(3)]
    assert [each.told for each in met(3, port)] == [expected] * 3
    with socket.create_server(("127.0.0.1", port)):  # the program's first rank opens it next
        pass


def test_the_others_hear_of_rank_0s_end():
    first, second = met(2, free_port(), keep=True)
    assert not second.has_ended()
    first.end()
    assert second.has_ended()
    first.close()
    second.close()


def test_a_stranger_is_turned_away():
    port = free_port()

    def strange():
        for text in (b"GET / HTTP/1.0\r\n\r\n", b'{"job": "other", "rank": 1, "told": {}}\n', b""):
            while True:
                try:
                    with socket.create_connection(("127.0.0.1", port), 1) as connection:
                        connection.sendall(text)
                        break
                except ConnectionRefusedError:
                    continue

    threading.Thread(target=strange, daemon=True).start()
    first, *_ = places(2, port)
    with pytest.raises(meeting.NotMet, match=f"1 of 2 ranks have not come to 127.0.0.1:{port}: 1"):
        meeting.meet(first, {}, "job", StopRequest(), patience=1.5)


def test_a_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(meeting.NotMet, match=f"port {port} of .* cannot be used"):
            meeting.meet(places(2, port)[0], {}, "job", StopRequest())


def test_a_host_that_nobody_knows_is_named():
    place = replace(places(2, free_port())[1], main_address="no-such-host.invalid")
    with pytest.raises(meeting.NotMet, match=r"does not know no-such-host\.invalid, the host of"):
        meeting.own_address(place)


def test_a_signal_ends_the_wait():
    stop = StopRequest()
    stop.state = JobState.PREEMPTED
    with pytest.raises(Stopped):
        meeting.meet(places(2, free_port())[0], {}, "job", stop)
