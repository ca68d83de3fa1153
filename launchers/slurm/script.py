"""Fills in job.sh.template."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from distdl.job import JobSpec, unprintable, variables
from distdl.util.names import kept_apart

if TYPE_CHECKING:
    from distdl.launchers.slurm.slurm_settings import SlurmSettings

TEMPLATE = Path(__file__).with_name("job.sh.template")
PLACEHOLDER = re.compile(r"@(\w+)@")
# Escapes inside $'...'
ESCAPES = {"\\": "\\\\", "'": "\\'", "\n": "\\n", "\t": "\\t"}
MODULES = """# The command `module` comes with a login shell.
type module > /dev/null 2>&1 || source /etc/profile
module load {} || exit 1"""
# requeue, requeue_at_time_limit -> the value in the template
REQUEUE = {(False, False): "never", (True, False): "preempted", (True, True): "always"}
# Variables that a container runtime must pass on, even if the image sets them too.
CONTAINER_ENV = ("DISTDL_LAUNCHER", "PYTHONPATH", "PYTHONUNBUFFERED", "MASTER_ADDR")


def render(settings: SlurmSettings, specs: Sequence[JobSpec], array: bool) -> str:
    """The batch script of one run, or (`array`) of a sweep, whose members have the same size and
    are the tasks of a job array."""
    values = {
        "directives": "\n".join(f"#SBATCH {line}" for line in directives(settings, specs, array)),
        "name": specs[0].name if not array else f"{sweep_name(specs)}, {len(specs)} runs",
        "forwarded": " ".join(specs[0].forward_env) or "none",
        "members": "\n".join(cases(specs) if array else member(specs[0])),
        "env": "\n".join(exports(variables(settings.env))),
        "modules": MODULES.format(" ".join(map(quote, settings.modules)))
        if settings.modules
        else "",
        "before_srun": "\n".join(settings.before_srun),
        "srun_args": " \\\n    ".join(map(quote, srun_args(settings, specs[0]))),
        "program": " ".join(map(quote, program(settings, specs[0]))),
        "requeue": REQUEUE[settings.requeue, settings.requeue_at_time_limit],
    }
    lines = TEMPLATE.read_text(encoding="utf-8").splitlines()
    filled = []
    for line in lines:
        match = PLACEHOLDER.fullmatch(line)
        if match is None or values[match[1]]:  # not one placeholder alone whose value is empty
            filled.append(line)
    text = re.sub(r"\n{3,}", "\n\n", "\n".join([*filled, ""]))
    return PLACEHOLDER.sub(lambda match: values[match[1]], text)


def quote(text: str) -> str:
    """Quotes text for bash, on one line: unprintable characters are escaped byte by byte."""
    return f"$'{''.join(map(escaped, text))}'" if unprintable(text) else shlex.quote(text)


def escaped(character: str) -> str:
    if character in ESCAPES or not unprintable(character):
        return ESCAPES.get(character, character)
    return "".join(f"\\x{byte:02x}" for byte in character.encode("utf-8", "surrogateescape"))


def sweep_name(specs: Sequence[JobSpec]) -> str:
    """`<experiment>/<sweep>`, from `<experiment>/<sweep>/<member>`."""
    return specs[0].name.rpartition("/")[0] or specs[0].name


def directives(settings: SlurmSettings, specs: Sequence[JobSpec], array: bool) -> Iterator[str]:
    """Options of sbatch, from https://slurm.schedmd.com/sbatch.html."""
    size = specs[0].resources
    name = sweep_name(specs) if array else specs[0].name
    accepted = kept_apart(name, re.sub(r"[^\w./+=-]", "_", name))
    yield f"--job-name={accepted}"
    yield f"--nodes={size.num_nodes}"
    yield f"--ntasks-per-node={size.devices}"
    if settings.cpus_per_task:
        yield f"--cpus-per-task={settings.cpus_per_task}"
    if size.accelerator == "gpu" and settings.gpus != "none":
        kind = f"{settings.gpu_type}:" if settings.gpu_type else ""
        option = "--gres=gpu:" if settings.gpus == "gres" else "--gpus-per-node="
        yield f"{option}{kind}{size.devices}"
    if settings.walltime is not None:
        yield f"--time={limit(settings.walltime)}"
    for key in ("mem", "partition", "account", "qos", "constraint"):
        if (value := getattr(settings, key)) is not None:
            yield f"--{key}={value}"
    if array:
        at_a_time = f"%{settings.max_parallel}" if settings.max_parallel else ""
        yield f"--array=0-{len(specs) - 1}{at_a_time}"
    yield "--requeue" if settings.requeue else "--no-requeue"
    # Without the prefix "B:" the ranks get the signal, but the script does not.
    yield f"--signal=USR1@{settings.grace_seconds}"
    yield f"--output={output(specs, array)}"
    yield "--open-mode=append"
    yield from settings.sbatch


def limit(seconds: int) -> str:
    """A time limit as `days-hours:minutes:seconds`, Slurm's only unambiguous form."""
    days, rest = divmod(seconds, 86400)
    return f"{days}-{rest // 3600:02}:{rest % 3600 // 60:02}:{rest % 60:02}"


def output(specs: Sequence[JobSpec], array: bool) -> str:
    """The log's path, with Slurm's placeholders; per cent signs in the folder are doubled."""
    folder = array_folder(specs) if array else specs[0].folder / "logs"
    name = "/%a/slurm-%A_%a.log" if array else "/slurm-%j.log"
    path = str(folder).replace("%", "%%") + name
    return f'"{path}"' if re.search(r"[\s#']", path) else path


def array_folder(specs: Sequence[JobSpec]) -> Path:
    """A folder of links, named by task number, to the log folders of an array's runs. They are
    needed because `--output` has one pattern for all tasks, but each run has its own log."""
    return specs[0].folder / "array"


def link_logs(specs: Sequence[JobSpec]) -> None:
    """Creates the links that an array's `--output` pattern uses (see `array_folder`)."""
    folder = array_folder(specs)
    folder.mkdir(exist_ok=True)
    for number, spec in enumerate(specs):
        link = folder / str(number)
        link.unlink(missing_ok=True)
        link.symlink_to(os.path.relpath(spec.folder / "logs", folder))


def member(spec: JobSpec) -> Iterator[str]:
    """The lines of the script that differ from run to run."""
    yield f"attempt={quote(str(spec.folder))}"
    yield f"bundle={quote(spec.bundle)}"
    yield f"worker=({' '.join(map(quote, spec.worker()))})"
    yield from exports(spec.env)


def exports(variables: Mapping[str, str]) -> Iterator[str]:
    return (f"export {name}={quote(value)}" for name, value in variables.items())


def cases(specs: Sequence[JobSpec]) -> Iterator[str]:
    yield 'case "$SLURM_ARRAY_TASK_ID" in'
    for number, spec in enumerate(specs):
        yield f"{number})"
        yield from (f"    {line}" for line in member(spec))
        yield "    ;;"
    yield "esac"


def srun_args(settings: SlurmSettings, spec: JobSpec) -> Iterator[str]:
    """Options of srun, from https://slurm.schedmd.com/srun.html."""
    # Since Slurm 22.05 srun does not inherit the number of cores from sbatch. Without either option
    # each rank and all its data loader workers would be bound to one core.
    cpus = settings.cpus_per_task
    yield f"--cpus-per-task={cpus}" if cpus else "--cpu-bind=none"
    if settings.container and settings.container_runtime == "pyxis":
        yield f"--container-image={settings.container}"
        yield f"--container-mounts={','.join(mounts(settings, spec))}"
        names = (*CONTAINER_ENV, *spec.env, *settings.env, *spec.forward_env)
        yield f"--container-env={','.join(dict.fromkeys(names))}"
    yield from settings.srun_args


def program(settings: SlurmSettings, spec: JobSpec) -> Iterator[str]:
    """The interpreter, after the command of its container if there is one."""
    if settings.container and settings.container_runtime == "apptainer":
        yield from ("apptainer", "exec")
        if spec.resources.accelerator == "gpu":
            yield "--nv"
        yield from ("--bind", ",".join(mounts(settings, spec)), settings.container)
    yield settings.python or ("python" if settings.container else sys.executable)


def mounts(settings: SlurmSettings, spec: JobSpec) -> Iterator[str]:
    """Host folders to mount in the container, by default at the same path as on the host."""
    # The folder of all runs, because the tracking database is next to them.
    runs = spec.store.removesuffix(f"/{spec.name}")
    inputs = [str(entry.get("path", "")) for entry in settings.inputs.values()]
    folders = [runs, *(path for path in inputs if path.startswith("/")), *settings.container_mounts]
    yield from dict.fromkeys(f if ":" in f else f"{f}:{f}" for f in folders)
