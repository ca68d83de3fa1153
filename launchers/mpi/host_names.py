"""How users write the hosts of a job, in `launcher.hosts` and in hostfiles, and what they mean."""

from __future__ import annotations

import ipaddress
import math
import re
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from distdl.util.errors import Problem, UserError

LOCALHOST = "localhost"  # used if no host is named
MOST_HOSTS = 4096
ELSE = "a port, a key or a jump host goes into ~/.ssh/config or launcher.ssh"
FORMS = f"write node1, node1:4, me@node1, 'node[1-4]' or '[fd00::1]:4'; {ELSE}"
LINES = f"write node1 slots=4, or node1:4; {ELSE}"
ENTRY = re.compile(
    r"(?:(?P<user>\w[\w.-]*)@)?"
    r"(?:\[(?P<address>[^\]]*:[^\]]*)\]|(?P<bare>[\da-fA-F.]*:[\da-fA-F.]*:[\da-fA-F.:]*(?:%.*)?)"
    r"|(?P<name>\w[\w.,[\]-]*))"
    r"(?::(?P<slots>[1-9]\d*))?",
    re.ASCII,
)
RANGES = re.compile(r"\[([^][]*)\]")  # the brackets in node[1-4]
RANGE = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)
# What a line of a hostfile sets, as Open MPI and MPICH name it.
OPTION = re.compile(r"(slots|count|cpu|max_slots|slots_max)=([1-9]\d*)|user(?:_?name)?=(\w[\w.-]*)")


@dataclass(frozen=True)
class Host:
    """A host of a job. `name` is a host name or an address. Without a `user`, ssh takes that of its
    own settings."""

    name: str
    slots: int
    user: str = ""

    @property
    def has_ipv6_address(self) -> bool:
        return ":" in self.name

    @property
    def destination(self) -> str:
        """The host, as ssh takes it."""
        return f"{self.user}@{self.name}" if self.user else self.name

    @property
    def entry(self) -> str:
        """The host with its slots, as `launcher.hosts` takes it."""
        name = f"[{self.name}]" if self.has_ipv6_address else self.name
        return f"{self.user}@{name}:{self.slots}" if self.user else f"{name}:{self.slots}"

    @property
    def word(self) -> str:
        """The host, as mpirun takes it. It would cut an IPv6 address at the colons, so it is told a
        name that only our ssh script knows."""
        if not self.has_ipv6_address:
            return self.name
        return (
            socket.gethostname() if is_local(self.name) else f"ipv6-{self.name.replace(':', '-')}"
        )


def parse_hosts(entries: Sequence[str], slots: int) -> tuple[Host, ...]:
    """Parses hosts, in rank order.

    Args:
        entries: Each in one of the `FORMS`. A host that is named twice has the slots of both.
        slots: Of hosts without a number.

    Raises:
        UserError: An entry has none of the `FORMS`, or a host has two users.
    """
    hosts: list[Host] = []
    for entry in entries:
        try:
            hosts += _parse(str(entry).strip(), slots)
        except ValueError as error:
            raise UserError.at(
                "launcher.hosts", what=str(error), remedy=FORMS, code="wrong-kind"
            ) from None
    return _merged(hosts, "launcher.hosts")


def read_hostfile(path: str, slots: int) -> tuple[Host, ...]:
    """Reads a hostfile of Open MPI (`node1 slots=4`) or MPICH (`node1:4`); see `parse_hosts`."""
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError.at(
            "launcher.hostfile",
            what=f"{path}: {error.strerror}",
            remedy=(
                "write one line per host, node1 slots=4; or set launcher.hosts=[node1:4,node2:4]"
            ),
            code="unreadable",
        ) from None
    except UnicodeDecodeError:
        raise UserError.at(
            "launcher.hostfile",
            what=f"{path} is not text in UTF-8",
            remedy=LINES,
            code="damaged-file",
        ) from None
    hosts: list[Host] = []
    problems: list[Problem] = []
    for number, line in enumerate(lines, 1):
        try:
            hosts += _parse_line(line.partition("#")[0].strip(), slots)
        except ValueError as error:
            problems.append(
                Problem(
                    "launcher.hostfile",
                    what=f"{path}, line {number}: {error}",
                    remedy=LINES,
                    code="wrong-kind",
                )
            )
    if not hosts and not problems:
        problems = [
            Problem(
                "launcher.hostfile", what=f"{path} names no host", remedy=LINES, code="wrong-kind"
            )
        ]
    if problems:
        raise UserError(*problems)
    return _merged(hosts, "launcher.hostfile")


def _parse_line(line: str, slots: int) -> list[Host]:
    """The hosts of a line of a hostfile. Raises ValueError if it names none."""
    if not line:
        return []
    name, *options = re.sub(r"\s*=\s*", "=", line).split()
    hosts = _parse(name, slots)
    for option in options:
        key, _, value = option.partition("=")
        match = OPTION.fullmatch(f"{key.replace('-', '_').lower()}={value}")
        if match is None:
            raise ValueError(f"{line!r} is not a host: what is {option}?")
        if match[3]:
            hosts = [replace(host, user=match[3]) for host in hosts]
        elif "max" not in match[1]:  # a limit beyond `slots` changes nothing
            hosts = [replace(host, slots=int(match[2])) for host in hosts]
    return hosts


def _parse(entry: str, slots: int) -> list[Host]:
    """The hosts of one entry. Raises ValueError, which says why, if it names none."""
    match = ENTRY.fullmatch(entry)
    if match is None:
        raise ValueError(f"{entry!r} is not a host")
    address = match["address"] or match["bare"]
    names = [_address(address)] if address else _names(match["name"])
    return [Host(name, int(match["slots"] or slots), match["user"] or "") for name in names]


def _address(text: str) -> str:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        raise ValueError(f"{text!r} is not an address") from None
    if address.is_link_local:
        raise ValueError(f"{text} is an address of one link: name one that every host reaches")
    return str(address)


def _names(text: str) -> list[str]:
    """`node1` and `node2` of `node[1-2]`."""
    parts = RANGES.split(text)  # by turns a text, and what is in brackets
    if {"[", "]", ","} & {*"".join(parts[::2])}:
        raise ValueError(f"{text!r} is not a host")
    numbers = [_numbers(inside, text) for inside in parts[1::2]]
    if math.prod(map(len, numbers)) > MOST_HOSTS:
        raise ValueError(f"{text!r} is more than {MOST_HOSTS} hosts")
    texts = [[each] for each in parts]
    texts[1::2] = numbers
    return ["".join(words) for words in product(*texts)]


def _numbers(inside: str, text: str) -> list[str]:
    """`08`, `09` and `12` of `08-09,12`."""
    numbers: list[str] = []
    for part in inside.split(","):
        match = RANGE.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if match is None or last < first:
            raise ValueError(f"{text!r}: {part!r} is not a range such as 1-4")
        if last - first >= MOST_HOSTS:
            raise ValueError(f"{text!r} is more than {MOST_HOSTS} hosts")
        numbers += [f"{number:0{len(match[1])}d}" for number in range(first, last + 1)]
    return numbers


def _merged(hosts: Iterable[Host], key: str) -> tuple[Host, ...]:
    """Each host once, with all its slots."""
    merged: dict[str, Host] = {}
    for host in hosts:
        before = merged.get(host.name, replace(host, slots=0))
        if before.user != host.user:
            raise UserError.at(
                key,
                what=f"{before.destination} and {host.destination} are one host with two users",
                remedy="name one of them",
                code="ambiguous",
            )
        merged[host.name] = replace(host, slots=before.slots + host.slots)
    return tuple(merged.values())


def is_local(name: str) -> bool:
    """Whether a host name refers to this machine, by name or by an address of this machine."""
    this = socket.gethostname()
    if name in (LOCALHOST, this, this.partition(".")[0]):
        return True
    try:
        addresses = {info[4] for info in socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    for address in addresses:
        family = socket.AF_INET6 if ":" in str(address[0]) else socket.AF_INET
        with suppress(OSError), socket.socket(family) as probe:
            probe.bind(address)
            return True
    return False
