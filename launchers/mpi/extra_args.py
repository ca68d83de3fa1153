"""Further arguments of mpirun: which ones the launcher sets itself, and which are misspelt."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from distdl.util.errors import Problem
from distdl.util.suggest import closest

# Arguments that would start other ranks than a `Start`, or in another order -> what sets them. Open
# MPI takes the last of two; Hydra refuses a second one.
_SIZE = "trainer.devices and trainer.num_nodes"
_HOSTS = "launcher.hosts or launcher.hostfile"
RESERVED = {
    **dict.fromkeys(("n", "np", "c", "N", "npernode", "ppn", "perhost", "npersocket"), _SIZE),
    **dict.fromkeys(("pernode", "ppr", "grr", "rr"), _SIZE),
    **dict.fromkeys(("H", "host", "hosts", "hostfile", "machinefile", "machine", "f"), _HOSTS),
    **dict.fromkeys(("map-by", "rankfile", "rf", "rank-by"), _HOSTS),
    **dict.fromkeys(("add-host", "add-hostfile", "rankmap", "bynode"), _HOSTS),
    **dict.fromkeys(("app", "configfile"), "program or task"),
}
# The other names with a word in them: of Open MPI 4.1 and 5.0, MPICH 5.0 and Intel MPI 2021, from
# `mpirun --help`, and from what their programs hold.
_OTHERS = """
allow-run-as-root am app-pmix-prefix append-env bind-to bind-to-core bind-to-socket bootstrap
bootstrap-exec branch-count bycore byslot cartofile check cleanup continuous cpu-list cpu-set
cpus-per-proc cpus-per-rank debug debug-daemons debug-daemons-file debug-devel debugger
default-hostfile demux disable-auto-cleanup disable-hostname-propagation disable-recovery
disable-topolib display display-allocation display-comm display-comm-finalize
display-devel-allocation display-devel-map display-diffable-map display-map display-topo
do-not-connect do-not-launch do-not-resolve dvm dvm-master-uri dvm-uri enable-instant-on-support
enable-recovery enable-topolib env envall envlist envnone errfile-pattern forward-signals
fwd-environment fwd-mpirun-port genv genvall genvlist genvnone get-stack-traces gmca gpmixmca
gpu-support gpus-per-proc gtool gtoolfile help hetero-nodes hnp hybrid-hosts iface
index-argv-by-rank info keepalive label launch-agent launcher launcher-exec leave-session-attached
localhost map-devel max-restarts max-vm-size mca membind memory-alloc-kinds merge-stderr-to-stdout
mps nameserver no-app-prefix no-ready-msg noconf nolocal nooversubscribe noprefix novm ompi-server
order-nodes ordered-output outfile-pattern output output-directory output-filename output-proctable
oversubscribe parent-uri path personality pmi-port pmix-prefix pmixmca prefix preload-binary
preload-files prepend-env prepend-pattern prepend-rank print-all-exitcodes print-rank-map profile
prtemca pset quiet report-bindings report-child-jobs-separately report-events report-pid
report-state-on-timeout report-uri rmk runtime-options set-cwd-to-session-dir set-env set-sid
show-progress show-version singleton skip-launch-node spawn-timeout stdin stop-in-app stop-in-init
stop-on-exec stream-buffering system-server system-server-first system-server-only tag-output
timeout timestamp-output tmpdir topolib trace tune tv unset-env use-hwthread-cpus use-regexp usize
verbose version wait-to-connect wd wdir with-ft xml xml-file xterm"""
KNOWN = {*RESERVED, *_OTHERS.split()}
# `--mpa-by` and `--map-by` score 0.83. mpirun refuses what is none of its options.
MISSPELT = 0.8


def problems(extra: Sequence[str]) -> Iterator[Problem]:
    """Problems of the user's further arguments of mpirun."""
    for word in extra:
        name = re.sub("^--?", "", word).partition("=")[0]
        if not word.startswith("-") or not name:
            continue
        if meant := reserved(name):
            yield Problem(
                "extra_args",
                what=f"{word} is reserved for the launcher",
                remedy=f"leave it out, and set {RESERVED[meant]}",
                code="reserved",
            )
        elif near := misspelt(name):
            dashes = word[: len(word) - len(word.lstrip("-"))]
            yield Problem(
                "extra_args",
                what=f"{dashes}{name} is not an option of mpirun",
                remedy=f"did you mean {dashes}{near}?",
                code="unknown-key",
            )


def misspelt(name: str) -> str:
    """The option that is meant by what is none, nor the beginning of one; "" if none is near."""
    if any(each.startswith(name) for each in KNOWN):
        return ""
    return closest(name, KNOWN, least=MISSPELT)


def reserved(name: str) -> str:
    """The reserved option that a name means, for Open MPI 5 also by its beginning (`--hostf`); ""
    if it means none."""
    if name in KNOWN or len(name) == 1:
        return name if name in RESERVED else ""
    return next((each for each in sorted(RESERVED) if each.startswith(name)), "")
