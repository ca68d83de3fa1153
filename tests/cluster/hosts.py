"""Several "hosts" on one machine: a network of namespaces, each with a name and a real sshd.

    with Hosts("node1", "node2") as hosts:          # in a fixture; `why_not()` says what is missing
        hosts.run("node1", ["hostname"], cwd=folder)     # a finished process; `popen` only starts
        hosts.ssh                                # "ssh -F <config>": how one host reaches the other
        hosts.cut("node2"), hosts.mend("node2")  # packets vanish without a word; and come again
        hosts.bind("node1", folder, "/opt/ml")   # there /opt/ml is this folder
        hosts.unmount("node2", folder)           # undoes `bind`

A host has its own network, host name, /etc/hosts and mounts; files and process ids are shared with
this machine, on which nothing is changed. All of it ends with the test process, even with kill -9:
a reaper, which waits for the end of a pipe, kills what runs on the hosts and removes them.
"""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.waiting import until

NUMBERS = itertools.count(1)
SSHD_OPTIONS = "AcceptEnv=* UsePAM=no StrictModes=no PidFile=none UseDNS=no MaxStartups=100 Port=22"
SSH_CONFIG = """\
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
PATH = os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin:/sbin"


def why_not() -> str:
    """Why there can be no hosts here; empty if there can."""
    missing = [tool for tool in ("ip", "nsenter", "sshd") if not shutil.which(tool, path=PATH)]
    if missing:
        return f"{' and '.join(missing)} not found: make servers"
    probe = "unshare --net --uts --mount ip link add type veth"
    done = subprocess.run(probe.split(), capture_output=True, text=True)
    return f"network namespaces need root: {done.stderr.strip()}" if done.returncode else ""


class Hosts:
    """A network of hosts, named as given, from `with Hosts("node1", "node2")` until its end."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.id = f"distdl-test-{os.getpid()}-{next(NUMBERS)}"
        self.switch = f"{self.id}-switch"
        self.sshd: dict[str, subprocess.Popen] = {}
        self.created: list[Path] = []

    def __enter__(self):
        self.folder = Path(tempfile.mkdtemp(prefix=f"{self.id}-"))
        self.ssh = f"ssh -F {self.folder / 'ssh_config'}"
        # Before there is anything to remove, so that whatever fails from here on is removed.
        reaper = [sys.executable, "-m", "tests.cluster.hosts", self.id, str(self.folder)]
        where = {"start_new_session": True, "cwd": Path(__file__).parents[2]}
        self.reaper = subprocess.Popen(reaper, stdin=subprocess.PIPE, **where)
        try:
            self.connect()
            self.start()
        except BaseException:  # Ctrl-C, too, leaves no host behind
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.reaper.stdin.close()
        self.reaper.wait(30)
        for process in self.sshd.values():
            process.wait(10)
        for folder in reversed(self.created):
            with contextlib.suppress(OSError):  # somebody else uses it by now
                folder.rmdir()

    def address(self, name: str) -> str:
        """Of the host, on the network that they share (10.77.0.0/24)."""
        return f"10.77.0.{self.names.index(name) + 1}"

    def ipv6(self, name: str) -> str:
        """The same of IPv6 (fd77::/64), to which no name leads."""
        return f"fd77::{self.names.index(name) + 1}"

    def run(self, name: str, argv, cwd="/", env=None, timeout=60.0, **options):
        """Runs a command on a host to its end; `env` replaces the environment."""
        options = {"capture_output": True, "text": True, "timeout": timeout, **options}
        return subprocess.run(self.command(name, argv, cwd), env=env, **options)

    def popen(self, name: str, argv, cwd="/", env=None, **options):
        """Starts a command on a host, in its own session; the reaper ends it if nobody does. The
        process is the command itself (no shell around it): its pid, signals and exit code are."""
        options = {"text": True, "start_new_session": True, **options}
        return subprocess.Popen(self.command(name, argv, cwd), env=env, **options)

    def command(self, name: str, argv, cwd) -> list[str]:
        enter = ["nsenter", "-t", str(self.sshd[name].pid), "--net", "--uts", "--mount"]
        return [*enter, "env", "-C", str(cwd), *argv]

    def pids(self, name: str) -> list[int]:
        """Every process on the host."""
        return pids(f"{self.id}-{name}")

    def cut(self, name: str) -> None:
        """Pulls the host's cable at the switch: packets vanish, and neither end is told."""
        ip("-n", self.switch, "link", "set", "dev", name, "nomaster")

    def mend(self, name: str) -> None:
        """Undoes `cut`."""
        ip("-n", self.switch, "link", "set", "dev", name, "master", "bridge")

    def bind(self, name: str, source: str | Path, target: str | Path) -> None:
        """A target that is missing is created, on this machine, and removed at the end."""
        folders = (*reversed(Path(target).parents), Path(target))
        self.created += [folder for folder in folders if not folder.exists()]
        Path(target).mkdir(parents=True, exist_ok=True)
        self.run(name, ["mount", "--bind", str(source), str(target)], check=True)

    def unmount(self, name: str, folder: str | Path) -> None:
        self.run(name, ["umount", "--lazy", str(folder)], check=True)

    def connect(self) -> None:
        ip("netns", "add", self.switch)
        ip("-n", self.switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", self.switch, "link", "set", "bridge", "up")
        for name in self.names:
            host = f"{self.id}-{name}"
            ip("netns", "add", host)
            link = f"link add name {name} type veth peer name eth0 netns {host}"
            ip("-n", self.switch, *link.split())
            ip("-n", self.switch, "link", "set", "dev", name, "master", "bridge", "up")
            ip("-n", host, "link", "set", "lo", "up")
            ip("-n", host, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            # nodad: usable at once, without a search for another host with this address
            ip("-n", host, *f"addr add {self.ipv6(name)}/64 dev eth0 nodad".split())
            ip("-n", host, "link", "set", "eth0", "up")

    def start(self) -> None:
        folder = self.folder
        for key in ("host_key", "key"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
            subprocess.run(command, check=True)
        (folder / "ssh_config").write_text(SSH_CONFIG.format(folder=folder))
        addresses = "".join(f"{self.address(name)} {name}\n" for name in self.names)
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{addresses}")
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd's separation of privileges needs it
        keys = (f"HostKey={folder}/host_key", f"AuthorizedKeysFile={folder}/key.pub")
        options = [f"-o{option}" for option in (*SSHD_OPTIONS.split(), *keys)]
        daemon = [shutil.which("sshd", path=PATH), "-D", "-e", "-f", "/dev/null", *options]
        for name in self.names:
            # nsenter and not `ip netns exec`, which hides /sys/fs/cgroup: slurmd would exit.
            enter = ["nsenter", f"--net=/run/netns/{self.id}-{name}", "unshare", "--uts", "--mount"]
            shell = ["sh", "-ec", ENTER, "sh", str(folder / "hosts"), name, *daemon]
            with (folder / f"sshd-{name}.log").open("wb") as log:
                pipes = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
                process = subprocess.Popen([*enter, *shell], start_new_session=True, **pipes)
            self.sshd[name] = process
        for name in self.names:
            log = (folder / f"sshd-{name}.log").read_text
            until(lambda log=log: "Server listening on 0.0.0.0" in log(), 20, log)


def remove(identity: str) -> None:
    """Kills what runs in the namespaces of this name, and deletes them."""
    namespaces = [path.name for path in Path("/run/netns").glob(f"{identity}-*")]
    for _ in range(20):  # what is forked meanwhile is found in the next round
        running = [pid for name in namespaces for pid in pids(name)]
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not running:
            break
        time.sleep(0.05)
    for name in namespaces:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def pids(namespace: str) -> list[int]:
    done = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True)
    # A zombie still is in its namespace, and has ended.
    return [pid for pid in map(int, done.stdout.split()) if not is_zombie(pid)]


def is_zombie(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
            == "Z"
        )
    return True


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


if __name__ == "__main__":  # the reaper
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.read()  # until the test process is gone, however it ended
    remove(sys.argv[1])
    shutil.rmtree(sys.argv[2], ignore_errors=True)
