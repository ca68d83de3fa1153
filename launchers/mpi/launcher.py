"""mpirun over ssh, in the background: the request, and how it is started."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import sys
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from distdl.errors import Problem, UserError
from distdl.job import JobSpec, variables
from distdl.launchers.mpi import flavours, keeper, submit
from distdl.launchers.mpi.flavours import FLAVOURS, LOCALHOST, Host, Start
from distdl.launchers.mpi.hosts import OPTIONS, Reach, is_here, parse, read_hostfile
from distdl.launchers.mpi.job import MpiJob
from distdl.launchers.mpi.request import MpiRequest

# Below the ports that Linux gives to outgoing connections (32768 and up).
FIRST_PORT, PORTS = 15000, 10000


@dataclass(frozen=True)
class MpiLauncher:
    """Starts a job on machines that ssh reaches, with whichever mpirun is installed.

    Args:
        hosts: `[node1:4, node2:4]` in the order of the ranks; without a number, as many ranks as
            trainer.devices. Empty: this machine.
        hostfile: The same as a file.
        mpirun: The program.
        flavour: "auto" asks it; openmpi4, openmpi5, mpich or intel need no mpirun to be rendered.
        agent: One agent per host, which starts the host's ranks as torchrun does.
        copy_bundle: Copy the code to hosts that do not see this machine's files.
        ssh: The ssh command line, with options.
        python: The interpreter on every host; None: the path of this one.
        interface: The network interface between the hosts (eth0).
        infiniband: False forbids it to NCCL.
        port: Of rank 0; None derives one from the run's name.
        grace_seconds: From a cancel until what is left is killed.
        max_attempts: How often a failed or preempted run is started again; the command line counts.
        env: Variables that every rank gets, none of them secret.
        forward_env: Names of the variables that every rank gets with this shell's values.
        inputs: Read by the workers.
        extra_args: More arguments for mpirun.
    """

    in_turn = True
    # Settings that name what a dry run starts, to ask which mpirun it is; and their defaults.
    programs: ClassVar = {"mpirun": "mpirun"}

    hosts: list[str] | None = None
    hostfile: str | None = None
    mpirun: str = "mpirun"
    flavour: str = "auto"
    agent: bool = False
    copy_bundle: bool = False
    ssh: str = "ssh"
    python: str | None = None
    interface: str | None = None
    infiniband: bool = True
    port: int | None = None
    grace_seconds: int = 30
    max_attempts: int = 0
    env: dict[str, Any] | None = None
    forward_env: list[str] | None = None
    inputs: dict[str, Any] | None = None
    extra_args: list[str] | None = None

    @staticmethod
    def check(node: Mapping[str, Any], context: Mapping[str, Any]) -> Iterator[Problem]:
        """What is wrong with the settings, before anything is started."""
        nodes, devices = context["num_nodes"], context["devices"]
        flavour = node.get("flavour", "auto")
        if flavour not in ("auto", *FLAVOURS):
            known = ", ".join(("auto", *FLAVOURS))
            yield Problem("flavour", f"no flavour {flavour!r}", f"one of: {known}")
        elif flavour == "auto":
            try:
                flavours.find(node.get("mpirun", "mpirun"))
            except UserError as error:
                yield replace(error.problems[0], path="mpirun")
        yield from settings(node)
        if node.get("hosts") and node.get("hostfile"):
            yield Problem("hostfile", "hosts= says where already", "write only one of the two")
            return
        try:
            hosts = chosen_hosts(node.get("hosts") or [], node.get("hostfile"), devices)
        except UserError as error:
            yield from error.problems
            return
        key = "hostfile" if node.get("hostfile") else "hosts"
        if len(hosts) != nodes and not node.get(key):
            remedy = f"launcher.hosts=[{','.join(f'node{i + 1}' for i in range(min(nodes, 3)))}]"
            yield Problem(key, f"trainer.num_nodes={nodes}, and no hosts are named", remedy)
        elif len(hosts) != nodes:
            yield Problem(
                key,
                f"names {len(hosts)} hosts, and trainer.num_nodes is {nodes}",
                f"trainer.num_nodes={len(hosts)}",
            )
        odd = [f"{host.name}:{host.slots}" for host in hosts if host.slots != devices]
        if odd:
            what = f"{', '.join(odd)}, and trainer.devices is {devices}"
            yield Problem(key, what, "one rank per device: make the two equal on every host")

    def request(self, spec: JobSpec) -> MpiRequest:
        size, python = spec.resources, self.python or sys.executable
        spec.refuse(r"\s:", "mpirun splits it there")
        flavour = flavours.ask(self.mpirun) if self.flavour == "auto" else self.flavour
        hosts = chosen_hosts(self.hosts or [], self.hostfile, size.devices)
        if self.agent:  # one process on each, which starts the others
            hosts = tuple(replace(host, slots=1) for host in hosts)
        env = {
            "DISTDL_LAUNCHER": "mpi",
            "PYTHONPATH": f"{spec.bundle}/code",
            "MASTER_ADDR": hosts[0].name,
            "MASTER_PORT": str(self.port or derived_port(spec)),
            "OMP_NUM_THREADS": "1",  # unless asked: what torchrun does
            **flavours.environment(flavour),
            **(sockets(self.interface) if self.interface else {}),
            **({} if self.infiniband else {"NCCL_IB_DISABLE": "1"}),
            **spec.env,
            **variables(self.env or {}),
        }
        env = {name: value for name, value in env.items() if name not in spec.forward_env}
        start = Start(
            mpirun=flavours.program(self.mpirun, flavour),
            hosts=hosts,
            ssh=str(spec.folder / "mpirun-ssh"),
            variables=(*env, *spec.forward_env, keeper.PORT),
            interface=self.interface,
            as_root=os.geteuid() == 0,
            extra=tuple(self.extra_args or ()),
        )
        return MpiRequest(
            spec=spec,
            flavour=flavour,
            start=start,
            processes=self.processes(spec, python),
            env=env,
            ssh=f"{self.ssh} {OPTIONS}",
            agent=self.agent,
            copy_bundle=self.copy_bundle,
            grace_seconds=self.grace_seconds,
            python=python,
        )

    def processes(self, spec: JobSpec, python: str) -> tuple[tuple[str, ...], ...]:
        """What mpirun starts: a parent for each rank, or for each host's agent."""
        parent = f"{spec.bundle}/code/distdl/launchers/mpi/rank.py"
        errors = f"{spec.folder}/errors"
        worker = spec.worker()
        if self.agent:
            size = f"--nodes {spec.resources.num_nodes} --devices {spec.resources.devices}"
            options = [*size.split(), "--grace-seconds", str(self.grace_seconds)]
            worker = ("-m", "distdl.agent", *options, "--", *worker[2:])
            errors = "-"
        return (python, parent, errors), (python, *worker)

    def reach(self, request: MpiRequest) -> None:
        flavours.find(request.start.mpirun)
        Reach(request.ssh, "", request.python, copy=False).prepare(request.start.hosts)

    def submit(self, request: MpiRequest) -> MpiJob:
        spec, hosts = request.spec, request.start.hosts
        Reach(request.ssh, spec.bundle, request.python, request.copy_bundle).prepare(hosts)
        env = dict(request.env)
        if self.port is None and is_here(hosts[0].name):
            env["MASTER_PORT"] = str(submit.free_port(int(env["MASTER_PORT"])))
        values = {name: os.environ[name] for name in spec.forward_env}
        return submit.start_keeper(request, {**values, **env})

    def attach(self, handle: str) -> MpiJob:
        return MpiJob.attach(handle)


def settings(node: Mapping[str, Any]) -> Iterator[Problem]:
    """What is wrong with numbers and names, whatever the hosts."""
    port, interface = node.get("port"), node.get("interface")
    if port is not None and not 1024 <= port <= 65535:
        yield Problem("port", f"{port} is not 1024 to 65535", "launcher.port=null derives one")
    for key in ("max_attempts", "grace_seconds"):
        if node.get(key, 0) < 0:
            yield Problem(key, f"is {node[key]}", f"launcher.{key}=0")
    here = sorted(name for _, name in socket.if_nameindex())
    if interface and interface not in here:
        yield Problem("interface", f"this machine has no {interface}", f"one of {', '.join(here)}")
    for key in ("hosts", "extra_args"):
        if isinstance(given := node.get(key) or [], str):
            yield Problem(key, f"{given!r} is no list", f"launcher.{key}=[{given}]")
    try:
        program = (shlex.split(node.get("ssh") or "ssh") or [""])[0]
    except ValueError as error:
        yield Problem("ssh", f"{node['ssh']!r}: {error}", "launcher.ssh=ssh")
        return
    if (node.get("hosts") or node.get("hostfile")) and shutil.which(program) is None:
        yield Problem("ssh", f"there is no {program} here", "launcher.ssh=ssh")


def chosen_hosts(hosts: list[str], hostfile: str | None, devices: int) -> tuple[Host, ...]:
    """Where a job runs, in the order of its ranks.

    Raises:
        UserError: What is written names no hosts.
    """
    if hostfile:
        return read_hostfile(hostfile, devices)
    return parse(hosts, devices) or (Host(LOCALHOST, devices),)


def derived_port(spec: JobSpec) -> int:
    """The same for the same attempt, and different for another run: two jobs do not meet."""
    return FIRST_PORT + zlib.crc32(str(spec.folder).encode()) % PORTS


def sockets(interface: str) -> dict[str, str]:
    return {"NCCL_SOCKET_IFNAME": interface, "GLOO_SOCKET_IFNAME": interface}
