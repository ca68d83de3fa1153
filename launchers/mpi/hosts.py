"""The hosts of a job: parses them, checks that ssh reaches them, and copies the bundle to them."""

from __future__ import annotations

import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from distdl.launchers.mpi.flavours import LOCALHOST, Host
from distdl.util.errors import Problem, UserError

# ssh must not prompt, because nobody would answer. It detects a vanished host after 3 x 3 seconds.
# Options in the user's own ssh command come first, so they take precedence.
OPTIONS = "-o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=3 -o ServerAliveCountMax=3"
ENTRY = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.-]*)(?::([1-9]\d*))?")  # a host, and its slots
AT_A_TIME = 16  # ssh connections
REPLY_SECONDS = 30.0  # for a host to answer; copying has no time limit

# 255 means that ssh itself failed, but hydra's proxies also exit with 255. So the supervisor uses
# the file only if mpirun does not end, or if no rank reported its end.
SSH_SCRIPT = """\
#!/bin/sh
# mpirun calls this instead of ssh to reach a host. Written by distdl.
{ssh} "$@"
code=$?
if [ $code -eq 255 ]; then
    for host; do case $host in -*) ;; *) break ;; esac; done
    echo "$host" >>{lost}
fi
exit $code
"""


def parse_hosts(entries: Sequence[str], slots: int) -> tuple[Host, ...]:
    """Parses hosts (`node1`, or `node1:4` for 4 slots instead of `slots`), in rank order."""
    hosts: dict[str, int] = {}
    for entry in entries:
        match = ENTRY.fullmatch(str(entry).strip())
        if match is None:
            what, remedy = f"{entry!r} is not a host", "write node1 or node1:4"
            raise UserError.at("launcher.hosts", what, remedy)
        hosts[match[1]] = hosts.get(match[1], 0) + int(match[2] or slots)
    return tuple(Host(*pair) for pair in hosts.items())


def read_hostfile(path: str, slots: int) -> tuple[Host, ...]:
    """Reads a hostfile of Open MPI (`node1 slots=4`) or MPICH (`node1:4`); see `parse_hosts`."""
    try:
        lines = Path(path).expanduser().read_text().splitlines()
    except OSError as error:
        remedy = "write one line per host, node1 slots=4; or set launcher.hosts=[node1:4,node2:4]"
        raise UserError.at("launcher.hostfile", f"{path}: {error.strerror}", remedy) from None
    entries, problems = [], []
    for number, line in enumerate(lines, 1):
        name, *options = line.partition("#")[0].split() or [""]
        counts = [word.removeprefix("slots=") for word in options if word.startswith("slots=")]
        entry = ":".join([name, *counts[:1]])
        known = all(re.match(r"(max_?)?[-_]?slots=", word) for word in options)
        if known and ENTRY.fullmatch(entry):
            entries.append(entry)
        elif name:
            what = f"{path}, line {number}: {line.strip()!r} is not a host"
            problems.append(Problem("launcher.hostfile", what, "write node1 slots=4, or node1:4"))
    if not entries and not problems:
        problems = [Problem("launcher.hostfile", f"{path} names no host")]
    if problems:
        raise UserError(*problems)
    return parse_hosts(entries, slots)


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


@dataclass(frozen=True)
class Setup:
    """Checks and prepares the hosts, in parallel. Each host needs the interpreter and the bundle.
    With `copy` hosts that lack the bundle get it. `bundle` is empty before there is one."""

    ssh: str
    bundle: str
    python: str
    copy: bool

    def prepare(self, hosts: Sequence[Host]) -> None:
        others = [host.name for host in hosts if not is_local(host.name)]
        problems = [*self.problems(others).values()]
        if len(others) < len(hosts) and shutil.which(self.python) is None:
            problems.append(Problem("launcher.python", f"this machine has no {self.python}"))
        if problems:
            raise UserError(*problems)

    def problems(self, hosts: Sequence[str]) -> dict[str, Problem]:
        """The hosts that cannot be used, and why."""
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            each = zip(hosts, pool.map(self.problem, hosts), strict=True)
            return {host: problem for host, problem in each if problem}

    def problem(self, host: str) -> Problem | None:
        """Why a host cannot be used, or None. With `copy` the bundle is copied to it first."""
        query = f"command -v {shlex.quote(self.python)} >/dev/null || echo no python"
        if self.bundle:
            query += f"; test -e {shlex.quote(f'{self.bundle}/config.yaml')} || echo no code"
        try:
            done = self.run(host, query, timeout=REPLY_SECONDS)
        except subprocess.TimeoutExpired:
            return Problem("launcher.hosts", f"{host} does not answer within {REPLY_SECONDS:.0f} s")
        if done.returncode:
            why = done.stderr.strip() or f"exit code {done.returncode}"
            remedy = f"this must work without a password: {self.ssh} {host} true"
            return Problem("launcher.hosts", f"{host} cannot be reached: {why}", remedy)
        lacks = done.stdout.splitlines()
        if "no python" in lacks:
            remedy = "install the same environment there, or write launcher.python=<its path>"
            return Problem("launcher.python", f"{host} has no {self.python}", remedy)
        if "no code" not in lacks:
            return None
        if self.copy:
            return self.copy_bundle(host)
        what = f"{host} does not see {self.bundle}: this folder is not on a shared file system"
        remedy = "choose another output_dir, or write launcher.copy_bundle=true"
        return Problem("launcher.copy_bundle", what, remedy)

    def copy_bundle(self, host: str) -> Problem | None:
        """Copies the bundle to the same path on a host, completely or not at all."""
        target, part = shlex.quote(self.bundle), shlex.quote(f"{self.bundle}.part")
        unpack = f"mkdir -p {part} && tar -xf - -C {part} && mv {part} {target}"
        pack = ["tar", "-cf", "-", "-C", self.bundle, "."]
        with subprocess.Popen(pack, stdout=subprocess.PIPE) as tar:
            done = self.run(host, unpack, stdin=tar.stdout)
        if not done.returncode and not tar.returncode:
            return None
        what = f"the bundle could not be copied to {host}: {done.stderr.strip()}"
        return Problem("launcher.copy_bundle", what)

    def run(self, host: str, script: str, **options: object) -> subprocess.CompletedProcess[str]:
        """Runs a line of sh on a host, whatever the login shell is there."""
        options.setdefault("stdin", subprocess.DEVNULL)
        command = [*shlex.split(self.ssh), host, f"sh -c {shlex.quote(script)}"]
        return subprocess.run(command, capture_output=True, text=True, **options)  # type: ignore[call-overload]
