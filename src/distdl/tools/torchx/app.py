"""From an app of torchx's to the overrides of `distdl run`: the same program, once per node.

What an app is: https://meta-pytorch.org/torchx/main/specs.html. This file imports no torchx.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from distdl.config import programs
from distdl.util.errors import Problem, UserError

EXPERIMENT = "torchx"  # the experiment whose runs the apps are
REPLICA = "distdl.tools.torchx.replica"
RANK0 = "TORCHX_RANK0_HOST"  # a variable of every replica: where the first one is
CPUS, MEMORY, IMAGE, RETRIES, PORT = "cpus", "memory", "image", "retries", "port"
DEVICES, LABELS = "resources", "node_selector"
LOWEST_PORT = 1025


class ReplicaSize(Protocol):
    """What a replica needs of its machine."""

    cpu: int
    gpu: int
    memMB: int
    capabilities: dict[str, Any]
    devices: dict[str, int]


class ReplicaRole(Protocol):
    """A kind of node. Its macros are already replaced."""

    name: str
    image: str
    min_replicas: int | None
    entrypoint: str
    args: list[str]
    env: dict[str, str]
    num_replicas: int
    max_retries: int
    resource: ReplicaSize
    port_map: dict[str, int]
    mounts: list[Any]


@dataclass(frozen=True)
class LauncherFacts:
    """A launcher, as far as an app is concerned.

    Args:
        name: Of `launcher=NAME`.
        settings: Its settings, and their defaults.
        chosen: Those that the user gives (`-cfg`), as the texts of overrides.
        no_image: The image of a role that names none.
    """

    name: str
    settings: Mapping[str, object]
    chosen: Mapping[str, str]
    no_image: str = ""


@dataclass(frozen=True)
class Translated:
    """`overrides`: of `distdl run`. `notes`: what of the app has no effect."""

    overrides: list[str]
    notes: list[str]


def translated(
    roles: Sequence[ReplicaRole], target: LauncherFacts, app_id: str, mark: str
) -> Translated:
    """The overrides that start an app's only role as a program per node.

    Args:
        app_id: The name of the run.
        mark: A text in the role that stands for the number of the replica.

    Raises:
        UserError: The app asks for something that the launcher does not have.
    """
    if len(roles) != 1:
        raise UserError.at(
            "roles",
            what=f"the app has {len(roles)} roles, and a job of distdl's has nodes of one kind",
            remedy="an app with one role, such as dist.torchrun",
            code="unsupported",
        )
    (role,) = roles
    if problems := [*_problems(role, target)]:
        raise UserError(*problems)
    settings = _settings(role, target)
    size = role.resource
    overrides = [
        f"launcher={target.name}",
        f"experiment_name={EXPERIMENT}",
        f"name={app_id}",
        "follow=false",
        "program.per=node",
        f"trainer.num_nodes={role.num_replicas}",
        f"trainer.devices={size.gpu if size.gpu > 0 else 1}",
        f"trainer.accelerator={'gpu' if size.gpu > 0 else 'cpu'}",
        *(f"launcher.{key}={written(value)}" for key, value in settings.items()),
        *(f"launcher.{key}={text}" for key, text in target.chosen.items()),
        *(f"launcher.env.{name}={written(text)}" for name, text in role.env.items()),
        programs.command_override(_command(role, mark)),
    ]
    return Translated(overrides, [*_notes(role, target)])


def role_of(command: Sequence[str]) -> str:
    """The role's name in the command of such a run; "" if it is none."""
    options = command[2 : [*command].index("--")] if "--" in command else []
    return options[-1] if list(command[:2]) == ["-m", REPLICA] and options else ""


def _command(role: ReplicaRole, mark: str) -> list[str]:
    texts = [role.entrypoint, *role.args, *role.env.values()]
    marked = [f"--mark={mark}"] if any(mark in text for text in texts) else []
    return ["-m", REPLICA, *marked, role.name, "--", role.entrypoint, *role.args]


def written(value: object) -> str:
    """A value as Hydra's overrides write it; each text stays exactly that text."""
    if isinstance(value, Mapping):
        entries = (f"{_key(key)}:{written(each)}" for key, each in value.items())
        return f"{{{','.join(entries)}}}"
    return programs.quoted(value) if isinstance(value, str) else str(value)


def _key(key: object) -> str:
    """A key of a mapping, with a backslash where Hydra's grammar needs one."""
    return "".join(f"\\{c}" if c in "\\()[]{}:=, \t" else c for c in str(key))


def _problems(role: ReplicaRole, target: LauncherFacts) -> Iterator[Problem]:
    """What the app asks for, and the launcher does not have."""
    if role.min_replicas not in (None, role.num_replicas):
        what = f"{role.min_replicas} to {role.num_replicas} nodes: distdl starts all nodes, or none"
        yield Problem(
            "min_replicas", what=what, remedy=f"-j {role.num_replicas}x...", code="unsupported"
        )
    if role.mounts:
        what = f"launcher={target.name} does not mount what an app names"
        remedy = "-cfg volumes={NAME:{claim:CLAIM,path:/data}}"
        if "volumes" not in target.settings:
            remedy = "-cfg inputs={NAME:PATH}" if "inputs" in target.settings else ""
        yield Problem("mounts", what=what, remedy=remedy, code="unsupported")
    if role.max_retries and RETRIES not in target.settings:
        yield Problem(
            "max_retries",
            what=f"launcher={target.name} starts nothing again by itself",
            remedy="leave it out; then: distdl jobs resubmit RUN",
            code="unsupported",
        )
    if (port := target.chosen.get(PORT)) and {port, str(_number(port) - 1)} & _ports(role):
        yield Problem(
            "port",
            what=f"{port} and the port below it are distdl's, and the app's role uses one of them",
            remedy="leave it out, or --rdzv_port=...",
            code="conflict",
        )


def _settings(role: ReplicaRole, target: LauncherFacts) -> dict[str, object]:
    """Settings of the launcher that the app's role says, for those that the launcher has and the
    user does not give."""
    size = role.resource
    said: dict[str, object] = {
        IMAGE: role.image if role.image != target.no_image else "",
        CPUS: size.cpu if size.cpu > 0 else 0,
        MEMORY: f"{size.memMB}Mi" if size.memMB > 0 else "",
        DEVICES: dict(size.devices),
        LABELS: {key: str(value) for key, value in size.capabilities.items()},
        RETRIES: role.max_retries,
        PORT: _other_port(role, target.settings.get(PORT)),
    }
    open_ones = target.settings.keys() - target.chosen.keys()
    return {key: value for key, value in said.items() if value and key in open_ones}


def _other_port(role: ReplicaRole, default: object) -> int:
    """A port instead of the launcher's, if the app uses that one or the one below; 0: no need."""
    taken = _ports(role)
    if not isinstance(default, int) or not {str(default), str(default - 1)} & taken:
        return 0
    lower = range(default - 2, LOWEST_PORT, -2)
    return next((p for p in lower if not {str(p), str(p - 1)} & taken), 0)


def _ports(role: ReplicaRole) -> set[str]:
    return {str(port) for port in role.port_map.values()}


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0


def _notes(role: ReplicaRole, target: LauncherFacts) -> Iterator[str]:
    """What of the app has no effect with this launcher."""
    size = role.resource
    image = role.image if role.image not in ("", target.no_image) else ""
    said = {
        f"the image {image}": (IMAGE, image),
        f"cpu={size.cpu}": (CPUS, size.cpu > 0),
        f"memMB={size.memMB}": (MEMORY, size.memMB > 0),
        f"devices={size.devices}": (DEVICES, size.devices),
        f"capabilities={size.capabilities}": (LABELS, size.capabilities),
    }
    for text, (key, is_said) in said.items():
        if is_said and key not in target.settings:
            yield f"{text} has no effect: launcher={target.name} has no setting for it"
