"""What `distdl deploy` does on every platform: traffic moves to a new model only after it has
answered a test request as it does on this machine."""

from __future__ import annotations

import json
import re
import sys
from argparse import Namespace
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

from distdl.util.errors import UserError

TOLERANCE = 1e-3  # the largest difference between two machines' probabilities of an image


class NotDeployed(UserError):
    """A new model did not start, or did not answer as it does on this machine."""

    exit_code = 1
    outcome = "traffic stays where it was"


class Platform(Protocol):
    """An endpoint with at most two deployments: the one that answers, and the one before it.

    Args:
        launcher: The launcher with the user's settings: account, workspace, region.
        options: Of the command line.
    """

    launcher: Any
    options: Namespace

    def __init__(self, launcher: Any, options: Namespace) -> None:
        self.launcher, self.options = launcher, options

    @staticmethod
    def errors() -> AbstractContextManager[None]:
        """Turns the SDK's errors into UserErrors."""

    def documents(self, name: str, folder: Path) -> dict[str, dict[str, Any]]:
        """What would be sent for a deployment, checked by the SDK. Contacts nothing."""

    def price(self) -> str:
        """Per hour."""

    def deployments(self) -> dict[str, bool]:
        """The name of every deployment of the endpoint, and whether it answers."""

    def create(self, name: str, folder: Path) -> None:
        """Creates a deployment without traffic, and what it needs."""

    def ask(self, name: str, body: str) -> str | None:
        """A deployment's answer, whoever has the traffic; None if it cannot be tested."""

    def move(self, name: str) -> None:
        """Moves all traffic to a deployment."""

    def remove(self, name: str) -> None:
        """Removes a deployment without traffic, or the rest of one that was not created."""

    def delete(self) -> None:
        """Deletes the endpoint with its deployments."""


def files(folder: Path) -> list[Path]:
    return [p for p in sorted(folder.rglob("*")) if p.is_file() and "__pycache__" not in p.parts]


def name_of(platform: Platform, folder: Path) -> str:
    """A deployment's name: the same for the same model on the same machines."""
    options = platform.options
    settings = (options.instance_type, options.instances, options.image, platform.launcher)
    whole = sha256(repr(settings).encode())
    for path in files(folder):
        whole.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return f"{options.name}-{whole.hexdigest()[:8]}"


def render(platform: Platform, folder: Path) -> str:
    """What would be sent and uploaded, and the price."""
    from yaml import safe_dump

    documents = platform.documents(name_of(platform, folder), folder)
    text = "".join(f"# {k}\n{safe_dump(v, sort_keys=False)}\n" for k, v in documents.items())
    for path in files(folder):
        text += f"# upload {path.stat().st_size:>13,}  {path.relative_to(folder)}\n"
    return f"{text}# price per hour: {platform.price()}\n# nothing was sent"


def deploy(platform: Platform, folder: Path, body: str, expected: Mapping[str, Any]) -> None:
    """Creates, tests, moves the traffic, and removes what is older than the one before.

    Args:
        body: Of the test request.
        expected: The class and probability in this machine's answer.
    """
    name, existing = name_of(platform, folder), deployments(platform)
    if not existing.get(name):
        try:
            with platform.errors():
                if name not in existing:
                    platform.create(name, folder)
                check(platform.ask(name, body), expected)
        except BaseException as error:
            if name not in existing:
                report(f"{error}\nremoving {name}")
                platform.remove(name)
            if isinstance(error, UserError):
                raise NotDeployed(*error.problems) from error
            raise
        platform.move(name)
        for older in existing.keys() - {name}:
            if not existing[older]:
                platform.remove(older)
    print(f"{name} answers")


def deployments(platform: Platform) -> dict[str, bool]:
    """Those that distdl created; refuses an endpoint with others."""
    existing = platform.deployments()
    for name in existing:
        if not is_ours(name, platform.options.name):
            what = f"the endpoint has {name}, which distdl did not create"
            raise UserError.at("--name", what, "choose another name")
    return existing


def is_ours(deployment: str, endpoint: str) -> bool:
    return bool(re.fullmatch(rf"{endpoint}-[0-9a-f]{{8}}", deployment))


def check(answer: str | None, expected: Mapping[str, Any]) -> None:
    """Raises NotDeployed unless the platform's answer is the expected one."""
    with suppress(ValueError, KeyError, TypeError, IndexError):
        best = json.loads(answer)["predictions"][0] if answer is not None else expected
        difference = abs(best["probability"] - expected["probability"])
        if best["class"] == expected["class"] and difference <= TOLERANCE:
            return
    what = f"the answer was {str(answer)[:300]}, and on this machine it is {expected}"
    raise NotDeployed.at("the test request", what)


def roll_back(platform: Platform) -> None:
    """Moves the traffic to the deployment before."""
    others = [name for name, answers in deployments(platform).items() if not answers]
    if len(others) != 1:
        what = f"{platform.options.name} has {len(others) or 'no'} other models"
        raise UserError.at("--rollback", what, "deploy the model that should answer")
    platform.move(others[0])
    print(f"{others[0]} answers")


def delete(platform: Platform) -> None:
    """Deletes the endpoint, but no model that was uploaded."""
    deployments(platform)
    platform.delete()
    print(f"{platform.options.name} was deleted")


def report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
