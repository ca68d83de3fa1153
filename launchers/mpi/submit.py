"""The only side effect: the ssh script, the record, and the keeper in the background."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from distdl.job import JobState
from distdl.launchers.mpi import keeper
from distdl.launchers.mpi.hosts import SSH_SCRIPT
from distdl.launchers.mpi.job import MpiJob
from distdl.launchers.mpi.request import MpiRequest

# What mpirun and ssh themselves need. Of this shell's other variables a rank sees those that are
# forwarded by name and no others: then it is the same on this machine and on the others.
KEPT = {"HOME", "USER", "LOGNAME", "SHELL", "PATH", "LD_LIBRARY_PATH", "LANG", "TZ", "TMPDIR"}
KEPT |= {"SSH_AUTH_SOCK", "KRB5CCNAME", "OPAL_PREFIX"}
KEPT_PREFIXES = ("LC_", "OMPI_MCA_", "PRTE_MCA_", "PMIX_MCA_", "I_MPI_", "HYDRA_")


def free_port(wanted: int) -> int:
    """The first port from `wanted` on that nobody listens on."""
    for port in range(wanted, wanted + 100):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
                return port
            except OSError:
                continue
    return wanted


def kept_environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k in KEPT or k.startswith(KEPT_PREFIXES)}


def start_keeper(request: MpiRequest, env: Mapping[str, str]) -> MpiJob:
    """Starts mpirun's keeper in a session of its own, and returns once mpirun is under way.

    Args:
        request: What it is to start.
        env: What every rank gets, secret values among it.
    """
    folder, hosts = request.spec.folder, request.start.hosts
    devices = request.spec.resources.devices
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    script = Path(request.start.ssh)
    lost = shlex.quote(str(folder / keeper.LOST))
    ssh = shlex.join(shlex.split(request.ssh))  # as `Reach` reads it
    script.write_text(SSH_SCRIPT.format(ssh=ssh, lost=lost), encoding="utf-8")
    script.chmod(0o755)
    keeper.write_json(
        folder / keeper.RECORD,
        {
            "host": socket.gethostname(),
            "command": request.command,
            "grace_seconds": request.grace_seconds,
            "hosts": [host.name for host in hosts],
            "ranks_per_host": devices,
            "ranks_per_process": devices if request.agent else 1,
            "agent": request.agent,
        },
    )
    with (folder / keeper.LOG).open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, keeper.__file__, str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # MPICH 4.0's -genvlist loses the last variable there is on the other hosts.
            env={**kept_environment(), **env, "DISTDL_END": ""},
            start_new_session=True,
        )
    job = MpiJob(folder)
    while job.state() is JobState.PENDING and process.poll() is None:
        time.sleep(0.01)
    return job
