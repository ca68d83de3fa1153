"""What `distdl deploy` does on every platform: traffic moves to a new model only after it has
answered a test request as it does on this machine."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

from distdl.launchers.common import digest
from distdl.util.errors import NotDeployed, UserError

TOLERANCE = 1e-3  # the largest difference between two machines' numbers for an image


L = TypeVar("L")  # the class of a launcher


class Platform(Protocol[L]):
    """An endpoint with at most two deployments: the one that answers, and the one before it.

    Args:
        launcher: The launcher with the user's settings: account, workspace, region.
        options: Of the command line.
    """

    launcher: L
    options: Namespace
    errors: Callable[[], AbstractContextManager[None]]  # turns the SDK's errors into UserErrors
    done: str = "answers"  # what a deployment does when `deploy` has ended

    def __init__(self, launcher: L, options: Namespace) -> None:
        self.launcher = launcher
        self.options = options

    def documents(self, name: str, folder: Path) -> dict[str, dict[str, Any]]:
        """What would be sent for a deployment, checked by the SDK. Contacts nothing."""

    def price(self) -> str:
        """Per hour."""

    def deployments(self) -> dict[str, bool]:
        """The name of every deployment of the endpoint, and whether it answers."""

    def create(self, name: str, folder: Path) -> None:
        """Creates a deployment without traffic, and what it needs."""

    def ask(self, name: str, request: Path) -> str:
        """A deployment's answer, whoever has the traffic. Not called with --batch."""

    def move(self, name: str) -> None:
        """Moves all traffic to a deployment."""

    def remove(self, name: str) -> None:
        """Removes a deployment without traffic, or the rest of one that was not created."""

    def delete(self, names: Iterable[str]) -> None:
        """Deletes the endpoint with these deployments, which are all that it has."""


def name_of(platform: Platform, folder: Path) -> str:
    """A deployment's name: the same for the same model on the same machines."""
    model = [(folder / name).read_text() for name in ("model.json", "requirements.txt")]
    settings = repr((model, platform.options, platform.launcher))
    return f"{platform.options.name}-{digest(settings, 8)}"


def render(platform: Platform, folder: Path) -> str:
    """What would be sent and uploaded, and the price."""
    from yaml import safe_dump

    documents = platform.documents(name_of(platform, folder), folder)
    text = "".join(f"# {k}\n{safe_dump(v, sort_keys=False)}\n" for k, v in documents.items())
    for path in filter(Path.is_file, sorted(folder.rglob("*"))):
        text += f"# upload {path.stat().st_size:>13,}  {path.relative_to(folder)}\n"
    return f"{text}# price per hour: {platform.price()}\n# nothing was sent"


def deploy(platform: Platform, folder: Path, request: Path, expected: Mapping[str, Any]) -> str:
    """Creates, tests, moves the traffic, and removes what is older than the one before.

    Args:
        request: A file with the body of the test request.
        expected: The part of this machine's answer that any other's must agree with.
    """
    name = name_of(platform, folder)
    existing = deployments(platform)
    if existing.get(name):
        return f"{name} answers"
    print(f"creating {name}, which takes some minutes; Ctrl-C removes it")
    try:
        with ExitStack() as undo, platform.errors():
            if name not in existing:
                undo.callback(platform.remove, name)
                platform.create(name, folder)
            if not platform.options.batch:
                check(platform.ask(name, request), expected)
            undo.pop_all()
            platform.move(name)
    except UserError as error:
        raise NotDeployed(*error.problems) from error
    for older in {key for key, answers in existing.items() if not answers} - {name}:
        platform.remove(older)
    return f"{name} {platform.done}"


def deployments(platform: Platform) -> dict[str, bool]:
    """Those that distdl created; refuses an endpoint with others."""
    existing = platform.deployments()
    for name in existing:
        if not is_ours(name, platform.options.name):
            raise UserError.at(
                "--name",
                what=f"the endpoint has {name}, which distdl did not create",
                remedy="choose another name",
                code="exists-already",
            )
    return existing


def is_ours(deployment: str, endpoint: str) -> bool:
    return bool(re.fullmatch(rf"{endpoint}-[0-9a-f]{{8}}", deployment))


def check(answer: str, expected: Mapping[str, Any]) -> None:
    """Raises NotDeployed unless the platform's answer agrees with the expected one."""
    with suppress(ValueError, KeyError, TypeError, IndexError):
        if agrees(json.loads(answer)["predictions"][0], expected):
            return
    raise NotDeployed.at(
        "the test request",
        what=f"the answer was {answer[:300]}, and on this machine it is {expected}",
        code="mismatch",
    )


def agrees(answer: object, expected: object) -> bool:
    """Whether an answer says what is expected, and numbers within `TOLERANCE`; it may say more."""
    if isinstance(expected, Mapping):
        known = answer if isinstance(answer, Mapping) else {}
        return all(key in known and agrees(known[key], expected[key]) for key in expected)
    if isinstance(expected, list):
        if not isinstance(answer, list) or len(answer) != len(expected):
            return False
        return all(map(agrees, answer, expected))
    if isinstance(expected, float) and isinstance(answer, int | float):
        return abs(answer - expected) <= TOLERANCE
    return answer == expected


def roll_back(platform: Platform) -> str:
    """Moves the traffic to the deployment before."""
    others = [name for name, answers in deployments(platform).items() if not answers]
    if len(others) != 1:
        raise UserError.at(
            "--rollback",
            what=f"{platform.options.name} has {len(others) or 'no'} other models",
            remedy="deploy the model that should answer",
            code="not-found",
        )
    platform.move(others[0])
    return f"{others[0]} answers"


def delete(platform: Platform) -> str:
    """Deletes the endpoint, but no model that was uploaded."""
    platform.delete(deployments(platform))
    return f"{platform.options.name} was deleted"
