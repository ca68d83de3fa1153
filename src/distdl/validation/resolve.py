"""Resolves a composed config value by value, so that one bad interpolation does not hide the rest.

OmegaConf's own `resolve` stops at the first failure and prints values. Here each failure becomes a
Problem. Interpolations are recorded: their values may come from the environment, and are never
printed.
"""

from __future__ import annotations

import functools
import operator
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import (
    InterpolationKeyError,
    InterpolationToMissingValueError,
    OmegaConfBaseException,
    UnsupportedInterpolationType,
)

from distdl.config import choices, published
from distdl.config import recipe as configs  # (it registers ${input:NAME})
from distdl.config.hints import words
from distdl.config.paths import path_text
from distdl.util.errors import Problem
from distdl.util.redact import redact
from distdl.util.secret_names import looks_secret
from distdl.util.suggest import did_you_mean, plain_text
from distdl.util.typed import Path

# Behind an odd number of backslashes it is text.
_VARIABLE = re.compile(r"(?<!\\)(?:\\\\)*\$\{oc\.env:\s*[\"']?([A-Za-z_]\w*)[\"']?\s*(,?)")


# What to write for a missing key whose values are not obvious.
_VALUES = {
    published.KEY: f"{published.KEY}=FILE, or a name: {published.KEY}=torchvision:NAME or timm:NAME"
}


@dataclass
class Resolved:
    """A config as plain containers, both resolved and as written."""

    values: dict[str, Any] = field(default_factory=dict)  # None where resolving failed
    written: dict[str, Any] = field(default_factory=dict)
    batch_chosen_later: bool = False  # data.batch_size=auto; here it is 1, which any check takes
    expressions: dict[Path, str] = field(default_factory=dict)  # the interpolations, as written
    problems: list[Problem] = field(default_factory=list)

    def section(self, name: str) -> dict[str, Any]:
        """A top-level section; empty if it is absent or not a mapping."""
        value = self.values.get(name)
        return value if isinstance(value, dict) else {}

    def show(self, path: Path) -> str:
        """The value at `path` as text: an interpolation as written, a secret as `***`."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.expressions:
                return self.expressions[path[:end]]
        if any(looks_secret(str(part)) for part in path):
            return "***"
        value = functools.reduce(operator.getitem, path, self.values)  # type: ignore[arg-type]
        if isinstance(value, (dict, list)):
            return "a mapping" if isinstance(value, dict) else f"a list of {len(value)}"
        if value is None or isinstance(value, bool):
            return plain_text(value)
        text = redact(repr(value))
        return text if len(text) <= 60 else f"{text[:57]}..."

    def variables(self) -> Iterator[tuple[Path, str, bool]]:
        """The environment variables that the config reads: path, name, whether with a default."""
        for path, expression in self.expressions.items():
            for name, comma in _VARIABLE.findall(expression):
                yield path, name, bool(comma)

    def hide_environment(self, text: str) -> str:
        """Replaces the value of X by `${oc.env:X}` wherever a message repeats it."""
        for _, name, _ in self.variables():
            value = os.environ.get(name, "")
            if len(value) >= 4:  # shorter ones would garble the text and give nothing away
                as_word = rf"(?<!\w){re.escape(value)}(?!\w)"
                text = re.sub(as_word, f"${{oc.env:{name}}}", text)
        return text


# Of the last call: the config as written, the environment, the result.
_last: list[Any] = []


def resolve(config: DictConfig | Mapping[str, Any]) -> Resolved:
    """Resolves every value of a config and collects what cannot be resolved."""
    if not isinstance(config, DictConfig):
        config = OmegaConf.create(dict(config))
    written = OmegaConf.to_container(config, resolve=False)
    assert isinstance(written, dict)
    if _last and _last[:2] == [written, {**os.environ}]:
        return _last[2]  # both stages of validation resolve the same config
    resolved = Resolved(written={str(k): value for k, value in written.items() if k != "hydra"})
    deferred: dict[str, Problem] = {}
    for key in resolved.written:
        resolved.values[key] = _visit(config, key, (key,), resolved, deferred)
    # A value that refers to a broken one fails too: only the broken one is reported.
    reported = " ".join(problem.what for problem in resolved.problems)
    resolved.problems += [item for name, item in deferred.items() if name not in reported]
    data = resolved.section("data")
    if data.get("batch_size") == choices.CHOICES["batch_size"].word:
        data["batch_size"] = 1
        resolved.batch_chosen_later = True
    _last[:] = written, {**os.environ}, resolved
    return resolved


def _visit(
    parent: DictConfig | ListConfig,
    key: Any,  # noqa: ANN401 - as the parent has them: text, number, enum or index
    path: Path,
    resolved: Resolved,
    deferred: dict[str, Problem],
) -> object:
    text = path_text(path)
    if OmegaConf.is_missing(parent, key):
        resolved.problems.append(
            Problem(
                text,
                what="missing",
                remedy=f"write {_VALUES.get(text, f'{text}=...')}",
                code="missing-key",
            )
        )
        return None
    if OmegaConf.is_interpolation(parent, key):
        written = str(parent._get_node(key)._value())  # type: ignore[union-attr]
        resolved.expressions[path] = written
        try:
            value = parent[key]
            if isinstance(value, (DictConfig, ListConfig)):
                value = OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
            return value
        except InterpolationToMissingValueError:
            return None  # the missing value is a problem of its own
        except (OmegaConfBaseException, RecursionError, ValueError) as error:
            name, problem = _explain(error, written, text, resolved)
            if name in written:
                resolved.problems.append(problem)
            else:
                deferred.setdefault(name, problem)
            return None
    value = parent[key]
    if isinstance(value, DictConfig):
        return {str(k): _visit(value, k, (*path, str(k)), resolved, deferred) for k in value}
    if isinstance(value, ListConfig):
        return [_visit(value, i, (*path, i), resolved, deferred) for i in range(len(value))]
    return value


def _explain(error: Exception, written: str, text: str, resolved: Resolved) -> tuple[str, Problem]:
    """The name that fails to resolve, and the problem. OmegaConf's own messages repeat values."""
    message = str(error)
    name = written
    remedy = ""
    code = "unreadable"
    what = f"cannot be resolved: {written}"
    if match := re.search(r"Environment variable '(\w+)' not found", message):
        name = match[1]
        what = f"the environment variable {name} is not set"
        code = "missing-key"
        remedy = f"export {name}=... or give a default: ${{oc.env:{name},default}}"
    elif isinstance(error, InterpolationKeyError):
        key = re.search(r"Interpolation key '([^']*)'", message)
        name = key[1] if key else written
        what = f"refers to {name}, which is not in the config"
        code = "incomplete"
        others = (p for p in configs.flat_paths(resolved.written, leaves=False) if p != text)
        remedy = words.for_key(name) or did_you_mean(name, others)
    elif match := re.search(r"KeyError raised while resolving.*launcher\.inputs\.(\w+)", message):
        name = f"launcher.inputs.{match[1]}"
        what = f"reads the input {match[1]}, but {name}, its path, is not set"
        remedy = f"write +{name}=PATH"
        code = "missing-key"
    elif isinstance(error, UnsupportedInterpolationType):
        name = message.split("\n")[0].rpartition(" ")[2]  # values that refer to it fail too
        what = f"uses an unknown resolver: {written}"
        code = "unknown-key"
        if "${env:" in written:
            remedy = f"write {text}='{written.replace('${env:', '${oc.env:')}'"
    elif isinstance(error, RecursionError) or "ecursive" in message:
        name = "itself"  # one name for all keys of a cycle, so that it is one problem
        what = f"refers to itself: {written}"
        code = "conflict"
    return name, Problem(text, what=what, remedy=remedy, code=code)
