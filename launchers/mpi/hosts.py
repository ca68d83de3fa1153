"""The hosts of a job: checks that ssh reaches them, and copies the bundle to them."""

from __future__ import annotations

import os
import pwd
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from distdl.launchers.mpi.host_names import Host, is_local
from distdl.util.errors import Problem, UserError

# ssh must not prompt, because nobody would answer. It detects a vanished host after 3 x 3 seconds.
# Options in the user's own ssh command come first, so they take precedence.
OPTIONS = "-o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=3 -o ServerAliveCountMax=3"
AT_A_TIME = 16  # ssh connections
RESOLVES = "import socket, sys; socket.getaddrinfo(sys.argv[1], 0)"
REPLY_SECONDS = 30.0  # for a host to answer; copying has no time limit

# Some hosts have another name for mpirun than for ssh (`Host.word`). 255 means that ssh itself
# failed, but hydra's proxies also exit with 255. So the supervisor uses the file only if mpirun
# does not end, or if no rank reported its end.
SSH_SCRIPT = """\
#!/bin/sh
# mpirun calls this instead of ssh to reach a host. Written by distdl.
host=
for word; do
    shift
    if [ -z "$host" ] && [ "${{word#-}}" = "$word" ]; then
        host=$word
        case $word in
{words}        esac
    fi
    set -- "$@" "$word"
done
{ssh} "$@"
code=$?
if [ $code -eq 255 ]; then
    echo "$host" >>{lost}
fi
exit $code
"""


def _other_user(host: Host) -> Problem | None:
    """What is wrong if a host that is this machine has a user: mpirun uses no ssh here."""
    me = pwd.getpwuid(os.geteuid()).pw_name
    if host.user == me:
        return None
    return Problem(
        "launcher.hosts",
        what=f"{host.destination} is this machine, where mpirun starts the ranks as {me}",
        remedy=f"write {host.name}, or submit as {host.user}",
        code="mismatch",
    )


def ssh_script(ssh: str, hosts: Sequence[Host], lost: Path) -> str:
    """The script that mpirun calls instead of ssh. It adds the hosts that it loses to a file."""
    words = [
        f"        {host.word}) word={shlex.quote(host.destination)} ;;\n"
        for host in hosts
        if host.word != host.destination
    ]
    command = shlex.join(shlex.split(ssh))  # split as in `Setup`
    return SSH_SCRIPT.format(ssh=command, words="".join(words), lost=shlex.quote(str(lost)))


@dataclass(frozen=True)
class Setup:
    """Checks and prepares the hosts, in parallel. Each host needs the interpreter, the address of
    rank 0 if `main` names it, and the bundle. With `copy` hosts that lack the bundle get it.
    `bundle` is empty before there is one."""

    ssh: str
    bundle: str
    python: str
    copy: bool
    main: str = ""

    def prepare(self, hosts: Sequence[Host]) -> None:
        others = [host for host in hosts if not is_local(host.name)]
        problems = [*self.problems(others).values()]
        for host in hosts:
            if host.user and host not in others and (problem := _other_user(host)):
                problems.append(problem)
        if len(others) < len(hosts) and shutil.which(self.python) is None:
            problems.append(
                Problem(
                    "launcher.python",
                    what=f"this machine has no {self.python}",
                    code="not-installed",
                )
            )
        if problems:
            raise UserError(*problems)

    def problems(self, hosts: Sequence[Host]) -> dict[str, Problem]:
        """The names of the hosts that cannot be used, and why."""
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            found = pool.map(self.problem, [host.destination for host in hosts])
            each = zip(hosts, found, strict=True)
            return {host.name: problem for host, problem in each if problem}

    def problem(self, host: str) -> Problem | None:
        """Why a host cannot be used, or None. With `copy` the bundle is copied to it first."""
        query = f"command -v {shlex.quote(self.python)} >/dev/null || echo no python"
        if self.bundle:
            query += f"; test -e {shlex.quote(f'{self.bundle}/config.yaml')} || echo no code"
        if self.main:
            words = (self.python, "-c", RESOLVES, self.main)
            query += f"; {shlex.join(words)} 2>/dev/null || echo no address"
        try:
            done = self.run(host, query, timeout=REPLY_SECONDS)
        except subprocess.TimeoutExpired:
            return Problem(
                "launcher.hosts",
                what=f"{host} does not answer within {REPLY_SECONDS:.0f} s",
                code="unreachable",
            )
        if done.returncode:
            why = done.stderr.strip() or f"exit code {done.returncode}"
            return Problem(
                "launcher.hosts",
                what=f"{host} cannot be reached: {why}",
                remedy=f"this must work without a password: {self.ssh} {host} true",
                code="unreachable",
            )
        lacks = done.stdout.splitlines()
        if "no python" in lacks:
            return Problem(
                "launcher.python",
                what=f"{host} has no {self.python}",
                remedy="install the same environment there, or write launcher.python=PATH",
                code="not-installed",
            )
        if "no address" in lacks:
            return Problem(
                path="launcher.hosts",
                what=f"{host} finds no address of {self.main}, where rank 0 is (MASTER_ADDR)",
                remedy=(
                    "name that host by its address, or by a name that DNS or /etc/hosts knows; "
                    "ssh alone knows the names of ~/.ssh/config"
                ),
                code="unreachable",
            )
        if "no code" not in lacks:
            return None
        if self.copy:
            return self.copy_bundle(host)
        return Problem(
            "launcher.copy_bundle",
            what=f"{host} does not see {self.bundle}: this folder is not on a shared file system",
            remedy="choose another output_dir, or write launcher.copy_bundle=true",
            code="unreadable",
        )

    def copy_bundle(self, host: str) -> Problem | None:
        """Copies the bundle to the same path on a host, completely or not at all."""
        target = shlex.quote(self.bundle)
        part = shlex.quote(f"{self.bundle}.part")
        unpack = f"mkdir -p {part} && tar -xf - -C {part} && mv {part} {target}"
        pack = ["tar", "-cf", "-", "-C", self.bundle, "."]
        with subprocess.Popen(pack, stdout=subprocess.PIPE) as tar:
            done = self.run(host, unpack, stdin=tar.stdout)
        if not done.returncode and not tar.returncode:
            return None
        return Problem(
            "launcher.copy_bundle",
            what=f"the bundle could not be copied to {host}: {done.stderr.strip()}",
            code="failed",
        )

    def run(self, host: str, script: str, **options: object) -> subprocess.CompletedProcess[str]:
        """Runs a line of sh on a host, whatever the login shell is there."""
        options.setdefault("stdin", subprocess.DEVNULL)
        command = [*shlex.split(self.ssh), host, f"sh -c {shlex.quote(script)}"]
        return subprocess.run(command, capture_output=True, text=True, **options)  # type: ignore[call-overload]
