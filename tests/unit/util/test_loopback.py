"""A machine whose loopback interface has no IPv4 address: a network namespace, for one thread."""

import ctypes
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from distdl.agent import rendezvous
from distdl.ranks import environment
from distdl.util import loopback
from distdl.util.errors import UserError

CLONE_NEWNET = 0x40000000  # linux/sched.h


def elsewhere(commands, function):
    """What a function returns on a new network, after some commands there."""

    def work():
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
            pytest.skip(f"network namespaces: {os.strerror(ctypes.get_errno())}")
        for command in commands:
            subprocess.run(command.split(), check=True)
        return function()

    with ThreadPoolExecutor(1) as thread:  # the others stay on this machine's network
        return thread.submit(work).result()


IPV6_ALONE = ("ip link set lo up", "ip addr delete 127.0.0.1/8 dev lo")
NEITHER = (*IPV6_ALONE, "ip addr delete ::1/128 dev lo")


def test_ranks_meet_where_the_loopback_is_ipv6_alone():
    def meet():
        parameters = RendezvousParameters(rendezvous.NAME, "", "run", 1, 1)
        found = rendezvous.Loopback(parameters).next_rendezvous()
        found.store.set("who", "rank 0")
        one = environment.resolve({})
        return found.bootstrap_store_info.master_addr, found.store.get("who"), one.main_address

    assert elsewhere(IPV6_ALONE, meet) == ("::1", b"rank 0", "::1")
    assert meet() == ("127.0.0.1", b"rank 0", "127.0.0.1")


def test_a_machine_without_a_loopback_address_is_told_so():
    with pytest.raises(UserError, match=r"neither 127.0.0.1 nor ::1.*") as told:
        elsewhere(NEITHER, loopback.address)
    assert "ip link set lo up" in str(told.value)
