"""Several "hosts" on one machine: a network of namespaces, each with a name and a real sshd.

    pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")

    with Hosts("node1", "node2") as hosts:                             # in a fixture of the module
        done = hosts.run("node1", ["hostname"], cwd=tmp_path)          # a finished process, text
        running = hosts.popen("node2", ["sleep", "9"], cwd=tmp_path)   # one that is under way
        hosts.ssh                            # "ssh -F <config>": how one host reaches the other
        hosts.cut("node2")                   # it vanishes from the network without a word
        hosts.mend("node2")
        hosts.hide("node2", tmp_path)        # there, the folder is empty: no shared file system
        hosts.bind("node1", tmp_path, "/opt/ml")    # there, /opt/ml is this folder
        hosts.unmount("node2", tmp_path)
        hosts.pids("node2")                  # everything that runs there

A host has its own network, host name, /etc/hosts and mounts; files and process ids are shared with
this machine. Nothing on this machine is changed: addresses and host names exist inside only, and
the namespaces carry the pid of the test process in their names, so that two pytest workers do not
meet. All of it ends with the test process, even with kill -9: a reaper, which waits for the end of
a pipe, kills what runs on the hosts and removes them. It takes about 0.3 s to set up.

It needs root, iproute2, util-linux and openssh-server; `why_not()` says what is missing.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PREFIX = "distdl-test"  # of the namespaces: distdl-test-<pid>-<number>-<host>
SWITCH = "switch"
_NUMBERS = itertools.count(1)

SSHD_CONFIG = """\
Port 22
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
AcceptEnv *
UsePAM no
StrictModes no
PidFile none
UseDNS no
MaxStartups 100
"""
SSH_CONFIG = """\
Host *
  User root
  IdentityFile {folder}/key
  IdentitiesOnly yes
  BatchMode yes
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
"""
# $1: /etc/hosts, $2: the host's name; the rest is what then runs there.
ENTER = 'mount --bind "$1" /etc/hosts; hostname "$2"; shift 2; exec "$@"'


def why_not() -> str:
    """Why there can be no hosts here; empty if there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    packages = {"ip": "iproute2", "nsenter": "util-linux", "sshd": "openssh-server"}
    missing = [package for tool, package in packages.items() if not shutil.which(tool, path=path)]
    if missing:
        return f"not installed: apt-get install {' '.join(missing)}"
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "ip", "link", "add", "type", "veth"],
        capture_output=True,
        text=True,
    )
    return f"namespaces are not allowed here: {tried.stderr.strip()}" if tried.returncode else ""


class Hosts:
    """A network of hosts, from `with Hosts("node1", "node2") as hosts` until its end.

    Args:
        names: What the hosts are called, by themselves and in /etc/hosts.
    """

    def __init__(self, *names: str) -> None:
        self.names = names
        self._id = f"{PREFIX}-{os.getpid()}-{next(_NUMBERS)}"
        self._sshd: dict[str, subprocess.Popen[bytes]] = {}
        self._made: list[Path] = []
        self._reaper: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Hosts:
        remove_orphans()
        self.folder = Path(tempfile.mkdtemp(prefix=f"{self._id}-"))
        self.ssh = f"ssh -F {self.folder / 'ssh_config'}"
        # Before there is anything to remove, so that whatever fails from here on is removed.
        self._reaper = subprocess.Popen(
            [sys.executable, __file__, self._id, str(self.folder)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            self._lay_out()
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Kills what runs on the hosts and removes them."""
        if self._reaper is not None and self._reaper.stdin is not None:
            self._reaper.stdin.close()
            self._reaper.wait(30)
        for process in self._sshd.values():
            process.wait(10)
        for folder in reversed(self._made):
            with contextlib.suppress(OSError):  # somebody else uses it by now
                folder.rmdir()

    def address(self, name: str) -> str:
        """Of the host, on the network that they share (10.77.0.0/24)."""
        return f"10.77.0.{self.names.index(name) + 1}"

    def command(self, name: str, argv: Sequence[str], cwd: str | Path = "/") -> list[str]:
        """The command line that runs `argv` on a host, in the folder `cwd` as it is there."""
        enter = ["nsenter", "-t", str(self._sshd[name].pid), "--net", "--uts", "--mount"]
        return [*enter, "env", "-C", str(cwd), *argv]

    def run(
        self,
        name: str,
        argv: Sequence[str],
        cwd: str | Path = "/",
        env: Mapping[str, str] | None = None,
        timeout: float = 60,
        **options: Any,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on a host to its end; `env` replaces the environment."""
        options = {"capture_output": True, "text": True, "timeout": timeout, **options}
        return subprocess.run(self.command(name, argv, cwd), env=env, **options)

    def popen(
        self,
        name: str,
        argv: Sequence[str],
        cwd: str | Path = "/",
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> subprocess.Popen[str]:
        """Starts a command on a host, in a session of its own. The reaper ends it if nobody does.

        The process is the command itself (no shell around it): its pid, signals and exit code are.
        """
        options = {"text": True, "start_new_session": True, **options}
        return subprocess.Popen(self.command(name, argv, cwd), env=env, **options)

    def pids(self, name: str) -> list[int]:
        """Every process on the host."""
        return _pids(f"{self._id}-{name}")

    def cut(self, name: str) -> None:
        """Pulls the host's cable at the switch: packets vanish, and neither end is told."""
        _ip("-n", f"{self._id}-{SWITCH}", "link", "set", "dev", name, "nomaster")

    def mend(self, name: str) -> None:
        _ip("-n", f"{self._id}-{SWITCH}", "link", "set", "dev", name, "master", "bridge")

    def hide(self, name: str, folder: str | Path) -> None:
        """On that host an empty folder in memory lies over `folder`."""
        self._mount(name, "-t", "tmpfs", "distdl-test", str(folder))

    def bind(self, name: str, source: str | Path, target: str | Path) -> None:
        """On that host `target` is the folder `source`. A target that is missing is made, on this
        machine, and removed at the end."""
        self._make(Path(target))
        self._mount(name, "--bind", str(source), str(target))

    def unmount(self, name: str, folder: str | Path) -> None:
        """Takes back `hide` or `bind`."""
        self.run(name, ["umount", "--lazy", str(folder)], check=True)

    def _mount(self, name: str, *arguments: str) -> None:
        self.run(name, ["mount", *arguments], check=True)

    def _make(self, folder: Path) -> None:
        if not folder.exists():
            self._make(folder.parent)
            folder.mkdir(exist_ok=True)
            self._made.append(folder)

    def _lay_out(self) -> None:
        switch = f"{self._id}-{SWITCH}"
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for name in self.names:
            host = f"{self._id}-{name}"
            _ip("netns", "add", host)
            pair = (
                "link",
                "add",
                "name",
                name,
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                host,
            )
            _ip("-n", switch, *pair)
            _ip("-n", switch, "link", "set", "dev", name, "master", "bridge", "up")
            _ip("-n", host, "link", "set", "lo", "up")
            _ip("-n", host, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            _ip("-n", host, "link", "set", "eth0", "up")

    def _start(self) -> None:
        folder = self.folder
        for key in ("host_key", "key"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
            subprocess.run(command, check=True)
        (folder / "sshd_config").write_text(SSHD_CONFIG.format(folder=folder))
        (folder / "ssh_config").write_text(SSH_CONFIG.format(folder=folder))
        addresses = "".join(f"{self.address(name)} {name}\n" for name in self.names)
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{addresses}")
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd's separation of privileges wants it
        sshd = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/sbin") or "sshd"
        for name in self.names:
            # nsenter and not `ip netns exec`, which hides /sys/fs/cgroup: slurmd would exit.
            net = f"--net=/run/netns/{self._id}-{name}"
            enter = ["nsenter", net, "unshare", "--uts", "--mount", "sh", "-ec", ENTER, "sh"]
            daemon = [sshd, "-D", "-e", "-f", str(folder / "sshd_config")]
            with (folder / f"sshd-{name}.log").open("wb") as log:
                self._sshd[name] = subprocess.Popen(
                    [*enter, str(folder / "hosts"), name, *daemon],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        for name in self.names:
            self._await(name)

    def _await(self, name: str) -> None:
        """Until its sshd listens."""
        log, deadline = self.folder / f"sshd-{name}.log", time.monotonic() + 20
        while "Server listening on 0.0.0.0" not in log.read_text():
            if self._sshd[name].poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"sshd on {name} does not start:\n{log.read_text()}")
            time.sleep(0.01)


def remove_orphans() -> None:
    """Removes hosts whose test process is gone, should their reaper have been killed as well."""
    for name in _namespaces():
        if name.startswith(f"{PREFIX}-"):
            owner, number = name.removeprefix(f"{PREFIX}-").split("-")[:2]
            if not Path("/proc", owner).exists():
                remove(f"{PREFIX}-{owner}-{number}")


def remove(identity: str) -> None:
    """Kills what runs in the namespaces of this name, and deletes them."""
    found = [name for name in _namespaces() if name.startswith(f"{identity}-")]
    for _ in range(20):  # what is forked meanwhile is met in the next round
        pids = [pid for name in found for pid in _pids(name) if pid != os.getpid()]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not pids:
            break
        time.sleep(0.05)
    for name in found:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _namespaces() -> list[str]:
    folder = Path("/run/netns")
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def _pids(namespace: str) -> list[int]:
    found = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True)
    # A zombie still is in its namespace, and has ended.
    return [pid for pid in map(int, found.stdout.split()) if not _zombie(pid)]


def _zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


if __name__ == "__main__":  # the reaper
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.read()  # until the test process is gone, whatever it died of
    remove(sys.argv[1])
    shutil.rmtree(sys.argv[2], ignore_errors=True)
