"""Which options a text sets, read as sbatch and srun read it themselves: by getopt_long, with
abbreviations (`--arr=0-3`), other names (`--tasks-per-node`) and bundled letters (`-vN2`)."""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from distdl.util.errors import Refused
from distdl.util.suggest import closest

# How similar an unknown option is to a known one of which it is a misspelling: `--partion` and
# `--partition` score 0.9, and `--image`, of a plugin, and `--time` 0.77.
MISSPELT = 0.83
HELP_S = 10.0


@dataclass(frozen=True)
class Option:
    """An option by the first of its long names, without dashes. `value`: "=" needs one, "[=]" may
    have one (`--nice=5`, `-k1`), "" has none."""

    name: str
    value: str


def options(text: str) -> dict[str, Option]:
    """Every name of the options of a table, with its dashes, and its option. Entries are separated
    by commas, and the names of one option by blanks."""
    named: dict[str, Option] = {}
    for entry in text.split(","):
        names = re.findall(r"--?[\w-]+", entry)
        value = re.search(r"[\[=\]]*$", entry.strip())
        first = next(name for name in names if name.startswith("--"))
        named |= dict.fromkeys(names, Option(first[2:], value[0] if value else ""))
    return named


@dataclass(frozen=True)
class Table:
    """The options of a program: sbatch or srun."""

    program: str
    always: Mapping[str, Option]  # of every version of Slurm in use
    sometimes: Mapping[str, Option]  # that only newer versions or plugins know

    def read(self, words: Sequence[str]) -> Iterator[Option]:
        """The options that words set, or may set (see `possible`). An unknown option is left to the
        program, which may know it from a plugin, unless it is a known one that is misspelt.

        Raises:
            Refused: The program would refuse the words, too.
        """
        unknown = ""  # the option before this word, if only a plugin may have it
        rest = iter(words)
        for word in rest:
            if not re.match(r"-[^-]|--.", word):
                what = f"{word!r} is not an option"
                remedy = 'a value with blanks is quoted: --comment="my job"'
                if unknown:
                    remedy = f"if it is the value of {unknown}, write {unknown}={word}"
                raise Refused(what=what, remedy=remedy, code="unknown-key")
            unknown = ""
            if word.startswith("--"):
                name, equals, _ = word.partition("=")
                found = self.possible(name)
                needs_next = not equals and any(option.value == "=" for option in found)
                if not (found or equals):
                    unknown = name
            else:
                found, needs_next = self.bundle(word[1:])
            yield from found
            if needs_next and next(rest, None) is None:
                raise Refused(
                    what=f"{word} needs a value",
                    remedy=f"--{found[-1].name}=...",
                    code="missing-key",
                )

    def possible(self, name: str) -> list[Option]:
        """What a long name or its abbreviation means: one option, or none. If only options of
        newer versions or of plugins begin with an abbreviation, all of them: which ones the cluster
        knows is not known here.

        Raises:
            Refused: It is ambiguous, or misspelt.
        """
        for names in (self.always, self.sometimes):
            if name in names:
                return [names[name]]
        if known := distinct(self.always, name):
            if len(known) > 1:
                these = " or ".join(f"--{option.name}" for option in known)
                raise Refused(
                    what=f"{name} is ambiguous", remedy=f"write {these}", code="ambiguous"
                )
            return known
        found = distinct(self.sometimes, name)
        if not found:
            self.refuse_misspelt(name)
        return found

    def unknown(self, words: Sequence[str]) -> list[str]:
        """The long options that only a plugin or a newer version may have."""
        names = (word.partition("=")[0] for word in words if word.startswith("--"))
        return [name for name in names if not self.possible(name)]

    def refuse_misspelt(self, name: str) -> None:
        near = closest(name, [*self.always, *self.sometimes], least=MISSPELT)
        if near and not any(each.startswith(name) for each in shown_by(self.program)):
            raise Refused(
                what=f"{name} is not an option of {self.program}",
                remedy=f"did you mean {near}?",
                code="unknown-key",
            )

    def bundle(self, letters: str) -> tuple[list[Option], bool]:
        """The options of `-vN2`, without the dash, and whether the next word is the last one's
        value."""
        found = []
        for position, letter in enumerate(letters, start=1):
            option = self.always.get(f"-{letter}")
            if option is None:
                continue
            found.append(option)
            if option.value:
                return found, option.value == "=" and position == len(letters)
        return found, False


@functools.cache
def shown_by(program: str) -> frozenset[str]:
    """The long options that a program has on this machine, those of its plugins too; none if it is
    not installed, or has no cluster."""
    try:
        done = subprocess.run(
            [program, "--help"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=HELP_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return frozenset()
    return frozenset(re.findall(r"--[A-Za-z][\w-]*", done.stdout))


def distinct(names: Mapping[str, Option], start: str) -> list[Option]:
    """The options with a name that begins so; other names of one option count once."""
    return list(dict.fromkeys(names[name] for name in names if name.startswith(start)))


# A backslash and a character, a quoted text, or what needs no quotes. Outside quotes a backslash
# does not keep a blank from ending the word.
_PIECE = r"""\\(\S|(?=\s|$))|"((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)'|([^\s"'\\#]+)"""
_WORD = re.compile(rf"\s*((?:{_PIECE})+)")


def words(line: str) -> list[str]:
    """The words of a #SBATCH line, as sbatch splits it. A comment (` # ...`) may follow.

    Raises:
        Refused: A quotation mark is missing, or sbatch would cut a word at #.
    """
    found = []
    position = 0
    while match := _WORD.match(line, position):
        pieces = (piece for groups in re.findall(_PIECE, match[1]) for piece in groups)
        found.append("".join(re.sub(r"\\(.)", r"\1", piece) for piece in pieces))
        position = match.end()
    rest = line[position:]
    if rest.startswith("#"):
        raise Refused(
            what=f"{line}: for sbatch {rest!r} is a comment",
            remedy="put the value in quotes",
            code="wrong-kind",
        )
    if rest.strip() and not rest.lstrip().startswith("#"):
        raise Refused(
            what=f"{line}: {rest.strip()!r} has no end",
            remedy="close the quotation mark",
            code="incomplete",
        )
    return found


# From the programs' own tables of Slurm 22.05, which are the arguments of their getopt_long.
_BOTH = """
-A --account=, --acctg-freq=, -b --begin=, --bb=, --bbf=, --cluster-constraint=, -D --chdir=,
-M --clusters= --cluster=, --comment=, --container=, --context=, --contiguous, -C --constraint=,
-S --core-spec=, --cores-per-socket=, --cpu-freq=, --cpus-per-gpu=, -c --cpus-per-task=,
--deadline=, --delay-boot=, -d --dependency=, -m --distribution=, -e --error=, -x --exclude=,
--exclusive[=], --export=, -B --extra-node-info=, --gid=, --gpu-bind=, --gpu-freq=, -G --gpus=,
--gpus-per-node=, --gpus-per-socket=, --gpus-per-task=, --gres=, --gres-flags=, -h --help, --hint=,
-H --hold, -i --input=, -J --job-name=, -L --licenses=, --mail-type=, --mail-user=, --mcs-label=,
--mem=, --mem-bind=, --mem-per-cpu=, --mem-per-gpu=, --mincpus=, --network=, --nice[=],
-k --no-kill[=], -F --nodefile=, -w --nodelist=, -N --nodes=, -n --ntasks=, --ntasks-per-core=,
--ntasks-per-gpu=, --ntasks-per-node= --tasks-per-node=, --ntasks-per-socket=, --ntasks-per-tres=,
--open-mode=, -o --output=, -O --overcommit, -s --oversubscribe, -p --partition=, --power=,
--prefer=, --priority=, --profile=, --propagate[=], -q --qos=, -Q --quiet, --reboot, --reservation=,
--signal=, --sockets-per-node=, --spread-job, --switches=, --test-only, --thread-spec=,
--threads-per-core=, -t --time=, --time-min=, --tmp=, --uid=, --use-min-nodes, -v --verbose,
-V --version, --usage, --wckey="""
_SBATCH = """
-a --array=, --batch=, --export-file=, --get-user-env[=], --ignore-pbs, --kill-on-invalid-dep=,
--no-requeue, --parsable, --requeue, -W --wait, --wait-all-nodes=, --wrap="""
_SRUN = """
--accel-bind=, --bcast[=], --bcast-exclude=, --compress[=], --cpu-bind= --cpu_bind=,
--debugger-test, -X --disable-status, --epilog=, --exact, --het-group= --pack-group=,
-I --immediate[=], --interactive, --jobid=, -K --kill-on-bad-exit[=], -l --label, -T --threads=,
--mpi=, --msg-timeout=, --multi-prog, -Z --no-allocate, --overlap[=], -E --preserve-env, --prolog=,
--pty, --quit-on-interrupt, -r --relative=, --resv-ports[=], --send-libs[=], --slurmd-debug=,
--task-epilog=, --task-prolog=, -u --unbuffered, -W --wait=, --whole, --x11[=]"""
# Of Slurm 23.02 to 26.05, and of the plugin pyxis.
_SOMETIMES = """
--container-id=, --container-type=, --consolidate-segments, --extra=, --external-launcher[=],
--mem-update=, --oom-kill-step[=], --resources=, --resv-ports[=], --segment=, --spread-segments,
--stepmgr, --tres-bind=, --tres-per-task=, --tree-width=,
--container-image=, --container-mounts=, --container-env=, --container-workdir=, --container-name=,
--container-save=, --container-mount-home, --no-container-mount-home, --container-remap-root,
--no-container-remap-root, --container-entrypoint, --no-container-entrypoint,
--container-entrypoint-log, --container-writable, --container-readonly"""
SBATCH = Table("sbatch", options(f"{_BOTH},{_SBATCH}"), options(_SOMETIMES))
SRUN = Table("srun", options(f"{_BOTH},{_SRUN}"), options(_SOMETIMES))

# Variables by which sbatch and srun take an option (SBATCH_TIMELIMIT, SLURM_NTASKS), without their
# beginning. Only those of options that the launcher writes.
_VARIABLES = """
ACCOUNT account, ARRAY_INX array, CLUSTERS clusters, CONSTRAINT constraint,
CPUS_PER_TASK cpus-per-task, ERROR error, EXPORT export, EXPORT_ENV export,
GPUS_PER_NODE gpus-per-node, GRES gres, JOB_ID jobid, JOB_NAME job-name, JOB_NUM_NODES nodes,
KILL_BAD_EXIT kill-on-bad-exit, MEM_PER_NODE mem, NNODES nodes, NO_REQUEUE no-requeue,
NPROCS ntasks, NTASKS ntasks, NTASKS_PER_NODE ntasks-per-node, OPEN_MODE open-mode, OUTPUT output,
PARTITION partition, QOS qos, REQUEUE requeue, SIGNAL signal, STDERRMODE error, STDOUTMODE output,
STEP_GRES gres, TIMELIMIT time, WAIT wait"""
VARIABLES = dict(entry.split() for entry in _VARIABLES.split(","))


def of_variable(name: str) -> str:
    """The option of the launcher's that a variable would set; empty if it sets none."""
    match = re.fullmatch(r"(SBATCH|SLURM|SRUN)_(\w+)", name)
    return VARIABLES.get(match[2], "") if match else ""
