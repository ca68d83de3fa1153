"""What `distdl deploy` does on every platform: traffic moves to a new model only after it has
answered test requests as it does on this machine."""

from __future__ import annotations

import base64
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from distdl.launchers.common import Positive, digest, matching, problems
from distdl.util.errors import Problem, UserError

TAG = "distdl"  # on what distdl created: nothing else is changed or deleted
TOLERANCE = 1e-3  # the largest difference between two machines' probabilities of an image
NAME = matching(
    r"[A-Za-z](?=.{2,31}$)[A-Za-z0-9-]*[A-Za-z0-9]",
    "a name for an endpoint",
    "deploy.name=NAME: 3 to 32 letters, digits and hyphens, a letter first, no hyphen last",
)


class NotDeployed(UserError):
    """A new model did not start, or did not answer as it does on this machine."""

    exit_code = 1
    outcome = "traffic stays where it was"


class DeploySettings(BaseModel):
    """The keys `deploy.*` of every platform; docs/deploy.md explains them."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, validate_default=True)

    name: Annotated[str, NAME]
    instances: Positive = 1
    keep: Literal[0, 1] = 1
    rollback: bool = False


@dataclass(frozen=True)
class Example:
    """A test request: an encoded image, and this machine's answer for it."""

    image: bytes
    label: str
    probability: float

    @property
    def body(self) -> str:
        return json.dumps({"images": [base64.b64encode(self.image).decode()], "top_k": 1})

    def check(self, answer: str) -> None:
        """Raises NotDeployed unless the platform's answer is this machine's."""
        what = f"the answer was {answer[:300]!r}"
        with suppress(ValueError, KeyError, TypeError):
            (best,) = json.loads(answer)["predictions"]
            label, probability = best["class"], float(best["probability"])
            if label == self.label and abs(probability - self.probability) <= TOLERANCE:
                return
            what = f"the answer was {label} ({probability:.4f})"
        what += f", and on this machine it is {self.label} ({self.probability:.4f})"
        raise NotDeployed.at("the test request", what)


@dataclass(frozen=True)
class ExportedModel:
    """A model folder, and requests that test it."""

    folder: Path
    examples: tuple[Example, ...] = ()

    @property
    def files(self) -> dict[str, Path]:
        """Relative name -> path."""
        paths = (path for path in sorted(self.folder.rglob("*")) if path.is_file())
        names = {path.relative_to(self.folder).as_posix(): path for path in paths}
        return {name: path for name, path in names.items() if "__pycache__" not in name}

    @cached_property
    def version(self) -> str:
        """A hash of the names and contents of all files."""
        hashes = {name: sha256(path.read_bytes()).hexdigest() for name, path in self.files.items()}
        return digest(json.dumps(hashes), 12)

    @property
    def uploads(self) -> str:
        """What is uploaded, a line per file."""
        sizes = {name: path.stat().st_size for name, path in self.files.items()}
        lines = (f"\n#   {size:>13,}  {name}" for name, size in sizes.items())
        return f"# upload {sum(sizes.values()):,} bytes of {self.folder}:{''.join(lines)}\n"


class Endpoint(ABC):
    """An endpoint with at most two deployments: the one that answers, and the one before it.

    Args:
        launcher: The launcher with the user's settings: account, workspace, region.
        values: The keys `deploy.*`, without the prefix.

    Raises:
        UserError: With all problems of the settings.
    """

    settings_type: ClassVar[type[DeploySettings]]
    tested: ClassVar[bool] = True

    def __init__(self, launcher: Any, values: Mapping[str, Any]) -> None:
        self.launcher = launcher
        try:
            self.settings: Any = self.settings_type(**values)
        except ValidationError as error:
            wrong = problems(error, values, self.settings_type.model_fields)
            named = [replace(p, path=f"deploy.{p.path}") for p in wrong]
            text = {p.path: f"{p.path}=..." if p.what == "missing" else p.remedy for p in named}
            raise UserError(*(replace(p, remedy=text[p.path]) for p in named)) from None

    @abstractmethod
    def misfits(self) -> Iterable[Problem]:
        """Problems of settings that only a new deployment needs."""

    @abstractmethod
    def render(self, model: ExportedModel) -> str:
        """What would be sent, and the price. Contacts nothing."""

    @abstractmethod
    def name_of(self, model: ExportedModel) -> str:
        """The deployment's name: the same model with the same settings has the same name."""

    @abstractmethod
    def weights(self) -> dict[str, float]:
        """Deployment -> its share of the traffic; UserError if the endpoint is somebody else's."""

    @abstractmethod
    def create(self, name: str, model: ExportedModel) -> None:
        """Creates a deployment without traffic, and what it needs."""

    @abstractmethod
    def ask(self, name: str, example: Example) -> str: ...

    @abstractmethod
    def move(self, name: str) -> None:
        """Moves all traffic to a deployment."""

    @abstractmethod
    def log(self, name: str) -> str: ...

    @abstractmethod
    def remove(self, name: str) -> None: ...

    @abstractmethod
    def usage(self) -> str:
        """How to send a request, in one line."""

    @abstractmethod
    def delete(self) -> None:
        """Deletes the endpoint with all its deployments."""

    def deploy(self, model: ExportedModel) -> None:
        """Creates, tests, moves the traffic, and removes deployments older than the one before."""
        name, weights = self.name_of(model), self.weights()
        serving = max(weights, key=weights.__getitem__, default=None)
        try:
            if name not in weights:
                self.create(name, model)
            for example in model.examples if self.tested else ():
                example.check(self.ask(name, example))
            if name != serving:
                self.move(name)
        except BaseException as error:
            notes = self._give_up(name) if name not in weights else f"{name} stays"
            if isinstance(error, UserError):
                raise NotDeployed.at(name, f"{error}\n{notes}") from error
            report(notes)
            raise
        kept = {name} if not self.settings.keep else weights if name == serving else {name, serving}
        for other in weights.keys() - kept:
            self.remove(other)
        print(f"{self.settings.name}: {name} answers{' already' if name == serving else ''}")
        print(self.usage())

    def _give_up(self, name: str) -> str:
        """Removes a deployment that was just created. Returns its log, and the result."""
        report(f"removing {name}")
        notes = ""
        with suppress(UserError):  # it may not exist
            notes = f"{self.log(name)}\n"
        try:
            self.remove(name)
        except UserError as error:
            return f"{notes}{name} may still exist and cost money: {error}"
        return f"{notes}{name} was removed"

    def roll_back(self) -> None:
        """Moves the traffic to the deployment before."""
        weights = self.weights()
        serving = max(weights, key=weights.__getitem__, default=None)
        others = list(weights.keys() - {serving})
        if len(others) != 1:
            what = f"{self.settings.name} has {len(others) or 'no'} other models"
            raise UserError.at("deploy.rollback", what, "deploy the model that should answer")
        self.move(others[0])
        print(f"{self.settings.name}: {others[0]} answers, and {serving} no more")


def report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
