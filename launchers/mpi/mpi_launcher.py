"""The launcher of mpirun over ssh, in the background: it builds the request and starts it."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from distdl.job import JobSpec, JobState, LauncherBase, Resources, variables
from distdl.launchers.common import Count, LauncherSettings, ListOf, Values, forwarded, relative
from distdl.launchers.mpi import extra_args, flavours, supervisor
from distdl.launchers.mpi import hosts as machines
from distdl.launchers.mpi.flavours import FLAVOURS, Start
from distdl.launchers.mpi.host_names import LOCALHOST, Host, is_local, parse_hosts, read_hostfile
from distdl.launchers.mpi.mpi_job import MpiJob
from distdl.util import loopback
from distdl.util.errors import Problem, UserError
from distdl.util.hosts import short

# Below the ports that Linux assigns to outgoing connections (32768 and up).
FIRST_PORT, PORTS = 15000, 10000
# Variables that mpirun and ssh need. Of the shell's other variables, ranks get only those that are
# forwarded by name, so that ranks on all machines have the same environment.
KEPT = {
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "PATH",
    "LD_LIBRARY_PATH",
    "LANG",
    "TZ",
    "TMPDIR",
    "SSH_AUTH_SOCK",
    "KRB5CCNAME",
    "OPAL_PREFIX",
}
MPIRUN = "mpirun"  # on the user's PATH
KEPT_PREFIXES = ("LC_", "OMPI_MCA_", "PRTE_MCA_", "PMIX_MCA_", "I_MPI_", "HYDRA_")


@dataclass(frozen=True)
class MpiRequest:
    """One mpirun of a flavour. `processes` is the command line of each process in groups of words;
    `env` has their variables, none of them secret. `python` is the interpreter on every
    host. With `copy_bundle` the bundle is copied to each host that lacks it."""

    spec: JobSpec
    flavour: str
    start: Start
    processes: tuple[tuple[str, ...], ...]
    env: Mapping[str, str]
    ssh: str
    python: str
    copy_bundle: bool

    @property
    def groups(self) -> list[list[str]]:
        return [*self.start.command(self.flavour), *map(list, self.processes)]

    @property
    def names(self) -> str:
        """How ssh reaches the hosts that mpirun knows by another name."""
        hosts = [host for host in self.start.hosts if host.word != host.destination]
        return ", ".join(f"{host.word} is {host.destination}" for host in hosts)

    @property
    def command(self) -> list[str]:
        return [word for group in self.groups for word in group]

    def render(self) -> str:
        spec = self.spec
        comments = {
            f"{self.flavour}, in the background; its output: {spec.folder / supervisor.LOG}": True,
            f"hosts are reached by: {self.ssh}": self.start.hosts[0].name != LOCALHOST,
            f"names for mpirun alone: {self.names}": self.names,
            f"copied first, to each host that lacks it: {spec.bundle}": self.copy_bundle,
            f"with their values in this shell: {', '.join(spec.forward_env)}": spec.forward_env,
        }
        lines = [f"# {text}" for text, applies in comments.items() if applies]
        assigned = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        return "\n".join([*lines, " \\\n  ".join([*assigned, *map(shlex.join, self.groups)])])


class MpiLauncher(LauncherSettings, LauncherBase[MpiRequest]):
    """Starts a job on machines reached over ssh, with the installed mpirun."""

    in_turn: ClassVar = True

    hosts: ListOf[Any] = []
    """The hosts, in the order of the ranks; empty: this machine.

    [node1:4,node2:4], or [node1,node2] with trainer.devices ranks each."""

    hostfile: str | None = None
    """The hosts as a file, with lines as for Open MPI (node1 slots=4) or MPICH (node1:4)."""

    mpirun: str = MPIRUN
    """The name of mpirun on PATH, or its path."""

    flavour: Literal["auto", "openmpi4", "openmpi5", "mpich", "intel"] = "auto"
    """Which mpirun it is; auto runs `mpirun --version`.

    With openmpi4, openmpi5, mpich or intel a dry run needs no mpirun."""

    agent: bool = False
    """Whether mpirun starts one agent per host, which starts the host's ranks, as torchrun does."""

    copy_bundle: bool = False
    """Whether the code and config are copied to each host by ssh, for hosts that share no file
    system."""

    ssh: str = "ssh"
    """The ssh command, with options: "ssh -p 2222 -i key". It must not ask for a password."""

    python: str | None = None
    """The Python interpreter on every host; null: the same path as here."""

    interface: str | None = None
    """The network interface between the hosts, such as eth0; null: the libraries choose."""

    infiniband: bool = True
    """Whether NCCL may use InfiniBand; false sets NCCL_IB_DISABLE=1, true sets nothing."""

    port: Annotated[int, Field(ge=1024, le=65535)] | None = None
    """The port of rank 0; null: derived from the run, or a free one if rank 0 is here."""

    grace_seconds: Count = 30
    """Seconds for a checkpoint after a cancel, before the remaining processes are killed."""

    max_attempts: Count = 0
    """How often a failed or preempted run is started again; a checkpoint gives all starts back."""

    env: Values = {}
    """More environment variables of every rank, e.g. {NCCL_DEBUG: INFO}.

    Never a secret, since they are printed and kept."""

    extra_args: ListOf[str] = []
    """More arguments for mpirun: ["--mca","coll","^hcoll"].

    Those that say how many ranks there are, and where, are refused."""

    def misfits(self, context: Mapping[str, Any]) -> Iterator[Problem]:
        """Hosts that do not fit the run's size, and programs or interfaces this machine lacks."""
        nodes, devices = context["num_nodes"], context["devices"]
        yield from extra_args.problems(self.extra_args)
        if self.flavour == "auto":
            try:
                flavours.find_mpirun(self.mpirun)
            except UserError as error:
                yield from relative(error.problems)
        interfaces = sorted(name for _, name in socket.if_nameindex())
        if self.interface and self.interface not in interfaces:
            yield Problem(
                "interface",
                what=f"this machine has no interface {self.interface}",
                remedy=f"one of {', '.join(interfaces)}",
                code="wrong-choice",
            )
        try:
            program = (shlex.split(self.ssh) or [""])[0]
            if (self.hosts or self.hostfile) and shutil.which(program) is None:
                yield Problem(
                    "ssh",
                    what=f"this machine has no {program}",
                    remedy="launcher.ssh=ssh",
                    code="not-installed",
                )
        except ValueError as error:
            yield Problem(
                "ssh", what=f"{self.ssh!r}: {error}", remedy="launcher.ssh=ssh", code="wrong-kind"
            )
        if self.hosts and self.hostfile:
            yield Problem(
                "hostfile",
                what="launcher.hosts is set too",
                remedy="set only one of the two",
                code="conflict",
            )
            return
        try:
            hosts = self.chosen_hosts(devices)
        except UserError as error:
            yield from relative(error.problems)
            return
        key = "hostfile" if self.hostfile else "hosts"
        if len(hosts) != nodes and (self.hosts or self.hostfile):
            yield Problem(
                key,
                what=f"names {len(hosts)} hosts, but trainer.num_nodes is {nodes}",
                remedy=f"trainer.num_nodes={len(hosts)}",
                code="conflict",
            )
        elif len(hosts) != nodes:
            yield Problem(
                key,
                what=f"missing, but trainer.num_nodes is {nodes}",
                remedy=f"launcher.hosts=[{','.join(f'node{i + 1}' for i in range(min(nodes, 3)))}]",
                code="missing-key",
            )
        main = {"MASTER_ADDR": hosts[0].name, **self.env}["MASTER_ADDR"]
        if len(hosts) > 1 and main == LOCALHOST:
            yield Problem(
                key,
                what=f"the first is {LOCALHOST}, which each of the others would take for itself",
                remedy=f"write its name, such as {socket.gethostname()}",
                code="conflict",
            )
        if odd := [host.entry for host in hosts if host.slots != devices]:
            yield Problem(
                key,
                what=f"{', '.join(odd)}, but trainer.devices is {devices}",
                remedy="every host needs one slot per device",
                code="conflict",
            )

    def starts_to_know(self) -> Iterator[Problem]:
        """What a request starts a program for that the config names, so that a dry run has none."""
        if self.flavour == "auto" and self.mpirun != MPIRUN:
            yield Problem(
                "launcher.flavour",
                what=f"a dry run does not start {self.mpirun} to see which kind of mpirun it is",
                remedy=f"write one of {', '.join(FLAVOURS)}",
                code="missing-key",
            )

    def chosen_hosts(self, devices: int) -> tuple[Host, ...]:
        """The hosts that a job runs on, in rank order."""
        if self.hostfile:
            return read_hostfile(self.hostfile, devices)
        return parse_hosts(self.hosts, devices) or (Host(LOCALHOST, devices),)

    def unreachable(self, resources: Resources) -> list[str]:
        """The hosts that a job of this size cannot use now."""
        hosts = self.chosen_hosts(resources.devices)
        others = [host for host in hosts if not is_local(host.name)]
        ssh = f"{self.ssh} {machines.OPTIONS}"
        python = self.python or sys.executable
        return [*machines.Setup(ssh, "", python, copy=False).problems(others)]

    def without(self, hosts: Sequence[str], resources: Resources) -> Iterator[dict[str, Any]]:
        """Settings for a job without some hosts, those with the most hosts first."""
        chosen = self.chosen_hosts(resources.devices)
        left = [host for host in chosen if not {host.name, short(host.name)} & {*hosts}]
        for count in range(len(left), 0, -1) if len(left) < len(chosen) else ():
            one_each = [replace(host, slots=resources.devices).entry for host in left[:count]]
            yield {
                "launcher.hosts": one_each,
                "launcher.hostfile": None,
                "trainer.num_nodes": count,
            }

    @staticmethod
    def splits_store(node: Mapping[str, Any]) -> str:
        shared = "launcher.copy_bundle=false, with output_dir in a folder that all hosts share"
        return shared if node.get("copy_bundle") else ""

    @staticmethod
    def without_mpi(node: Mapping[str, Any]) -> str:
        return "launcher.agent=false" if node.get("agent") else ""

    @staticmethod
    def loses_store(node: Mapping[str, Any]) -> str:
        """Hosts without a shared file system keep what their ranks have written, but the next
        attempt may be on other hosts, or give them other ranks."""
        several = node.get("hostfile") or len(node.get("hosts") or ()) > 1
        if not node.get("copy_bundle") or not several:
            return ""
        return "with launcher.copy_bundle=true each host has files of its own, and may be left out"

    def request(self, spec: JobSpec) -> MpiRequest:
        spec.refuse(r"\s:", "mpirun splits it there")
        flavour = flavours.detect(self.mpirun) if self.flavour == "auto" else self.flavour
        hosts = self.chosen_hosts(spec.resources.devices)
        if self.agent:  # one process per host, which starts the ranks of the host
            hosts = tuple(replace(host, slots=1) for host in hosts)
        sockets = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") if self.interface else ()
        env = {
            "DISTDL_LAUNCHER": "mpi",
            "PYTHONPATH": f"{spec.bundle}/code",
            "MASTER_ADDR": hosts[0].name,
            "MASTER_PORT": str(self.port or derived_port(spec)),
            "OMP_NUM_THREADS": "1",  # torchrun's default; the settings below override it
            **flavours.environment(flavour),
            **dict.fromkeys(sockets, str(self.interface)),
            **({} if self.infiniband else {"NCCL_IB_DISABLE": "1"}),
            **spec.env,
            **variables(self.env),
        }
        env = {name: value for name, value in env.items() if name not in spec.forward_env}
        start = Start(
            mpirun=flavours.program(self.mpirun, flavour),
            hosts=hosts,
            ssh=str(spec.folder / "mpirun-ssh"),
            variables=(*env, *spec.forward_env, supervisor.PORT),
            interface=self.interface,
            as_root=os.geteuid() == 0,
            extra=tuple(self.extra_args),
        )
        python = self.python or sys.executable
        ssh = f"{self.ssh} {machines.OPTIONS}"
        processes = self._processes(spec, python)
        return MpiRequest(spec, flavour, start, processes, env, ssh, python, self.copy_bundle)

    def _processes(self, spec: JobSpec, python: str) -> tuple[tuple[str, ...], ...]:
        """The command that mpirun starts: the parent process of a rank, or of a host's agent."""
        parent = f"{spec.bundle}/code/distdl/launchers/mpi/rank.py"
        if not self.agent:
            return (python, parent, f"{spec.folder}/errors"), (python, *spec.worker())
        options = (
            f"--nodes {spec.resources.num_nodes} --devices {spec.resources.devices}"
            f" --grace-seconds {self.grace_seconds} --"
        )
        agent = (python, "-m", "distdl.agent", *options.split(), *spec.worker()[2:])
        return (python, parent, "-"), agent

    def reach(self, request: MpiRequest) -> None:
        flavours.find_mpirun(request.start.mpirun)
        main = request.env.get("MASTER_ADDR", "")  # forward_env may have it
        setup = machines.Setup(request.ssh, "", request.python, copy=False, main=main)
        setup.prepare(request.start.hosts)

    def submit(self, request: MpiRequest) -> MpiJob:
        """Starts mpirun's supervisor in its own session, and returns once it runs."""
        spec = request.spec
        hosts = request.start.hosts
        setup = machines.Setup(request.ssh, spec.bundle, request.python, request.copy_bundle)
        setup.prepare(hosts)
        env = {**forwarded(spec), **request.env}
        if env["MASTER_ADDR"] == LOCALHOST:
            # The name may stand for an address that this machine lacks (::1).
            env["MASTER_ADDR"] = loopback.address()
        if self.port is None and is_local(hosts[0].name):
            env["MASTER_PORT"] = str(free_port(int(env["MASTER_PORT"])))

        folder = spec.folder
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        script = Path(request.start.ssh)
        text = machines.ssh_script(request.ssh, hosts, folder / supervisor.LOST)
        script.write_text(text, encoding="utf-8")
        script.chmod(0o755)
        record = {
            "host": socket.gethostname(),
            "command": request.command,
            "grace_seconds": self.grace_seconds,
            "hosts": {host.word: host.name for host in hosts},
            "ranks_per_host": spec.resources.devices,
            "ranks_per_process": spec.resources.devices if self.agent else 1,
            "agent": self.agent,
        }
        supervisor.write_json(folder / supervisor.RECORD, record)

        kept = {
            name: value
            for name, value in os.environ.items()
            if name in KEPT or name.startswith(KEPT_PREFIXES)
        }
        with (folder / supervisor.LOG).open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, supervisor.__file__, str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # MPICH 4.0's -genvlist drops the environment's last variable on other hosts.
                env={**kept, **env, "DISTDL_END": ""},
                start_new_session=True,
            )
        job = MpiJob(folder)
        while job.state() is JobState.PENDING and process.poll() is None:
            time.sleep(0.01)
        return job

    def attach(self, handle: str) -> MpiJob:
        return MpiJob.attach(handle)


def derived_port(spec: JobSpec) -> int:
    """A port that is always the same for an attempt, and most likely differs between runs."""
    return FIRST_PORT + zlib.crc32(str(spec.folder).encode()) % PORTS


def free_port(wanted: int) -> int:
    """The first free port of the 100 from `wanted` on; `wanted` itself if none is free."""
    for port in range(wanted, wanted + 100):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):
                probe.bind(("", port))
                return port
    return wanted
