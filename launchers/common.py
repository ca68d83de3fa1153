"""Code shared by several launchers: typed settings, job names, and copying a run's files.

It imports neither torch nor any SDK. A launcher imports this module, `queried_job`, `distdl.job`
and its own package, but no other launcher.
"""

from __future__ import annotations

import gzip
import hashlib
import inspect
import os
import re
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from distdl.job import JobSpec
from distdl.util import walltime
from distdl.util.attribute_docs import attribute_docs
from distdl.util.errors import Problem, Refused, StoreError, UserError
from distdl.util.ranges import AboveZero, Count, Positive
from distdl.util.suggest import did_you_mean_word
from distdl.util.typed import problems

if TYPE_CHECKING:
    from distdl.runs.attempt import Attempt
    from distdl.stores import Store

__all__ = ["AboveZero", "Count", "Positive"]  # for the launchers' settings

# ---- settings -----------------------------------------------------------------------------------


def _seconds(value: object) -> int:
    try:
        return walltime.seconds(value)
    except ValueError as error:
        raise Refused(what=str(error), remedy=walltime.FORMS, code="wrong-kind") from None


def with_paths(inputs: object) -> object:
    if not isinstance(inputs, Mapping):
        return {} if inputs is None else inputs
    return {k: v if isinstance(v, Mapping) else {"path": v} for k, v in inputs.items()}


T = TypeVar("T")
# The user's walltime, converted to whole seconds (see `distdl.util.walltime`).
Walltime = Annotated[Any, BeforeValidator(_seconds)]
# null becomes an empty list or an empty mapping.
ListOf = Annotated[list[T], BeforeValidator(lambda value: [] if value is None else value)]
Values = Annotated[dict[str, Any], BeforeValidator(lambda value: {} if value is None else value)]
# Name -> {path: ..., other keys of the launcher}; `name: text` is short for `name: {path: text}`.
Inputs = Annotated[dict[str, dict[str, Any]], BeforeValidator(with_paths)]


def matching(pattern: str, what: str, remedy: str = "") -> BeforeValidator:
    """A validator that accepts one-line strings that match the whole pattern, and rejects others by
    `'x' is not {what}`."""

    def validate(value: object) -> object:
        is_line = isinstance(value, str) and value.isprintable()
        if not (is_line and re.fullmatch(pattern, str(value))):
            raise Refused(what=f"{value!r} is not {what}", remedy=remedy, code="wrong-kind")
        return value

    return BeforeValidator(validate)


class LauncherSettings(BaseModel):
    """The typed keys of `launcher.*`: a launcher is a subclass with one field per key, which
    conf/launcher/ repeats with its default.

    The docstring below a field says what it does: its first paragraph is one sentence, which a dry
    run shows; `--help` and the documents show all of it.

    Raises:
        UserError: A value has the wrong type or range, or a key is unknown.
    """

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False
    )

    inputs: Inputs = {}
    """Paths of the data sets that a recipe only names.

    data.root='${input:imagenet}' is launcher.inputs.imagenet."""

    forward_env: ListOf[str] = []
    """Names of environment variables that workers need; launchers pass these and no others."""

    def __init__(self, **values: object) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            refuse(problems(error, values, type(self).model_fields, "launcher."))

    @classmethod
    def __pydantic_init_subclass__(cls, **_: object) -> None:
        # The config's validation compares its keys with this signature. Types and ranges are left
        # to `check`, which reports all of them at once.
        signature = inspect.signature(cls)
        untyped = [p.replace(annotation=Any) for p in signature.parameters.values()]
        cls.__signature__ = signature.replace(parameters=untyped)

    @classmethod
    def about_settings(cls) -> dict[str, str]:
        """What each key does, also each key of a mapping with typed keys (`sweep_job.metric`), and
        of each of several (`inputs.NAME.mode`)."""
        about: dict[str, str] = {}
        for key, text in attribute_docs(cls, LauncherSettings).items():
            about[key] = text
            if entry := _entry_of(cls.model_fields[key].annotation):
                sentences = attribute_docs(entry, entry)
                about |= {f"{cls._inside(key)}.{name}": each for name, each in sentences.items()}
        return about

    def changed_settings(self) -> list[str]:
        """The keys that differ from their defaults, as `about_settings` names them."""
        defaults = dict(type(self)())
        changed: list[str] = []
        for key, value in self:
            if value == defaults[key]:
                continue
            changed.append(key)
            inside = self._inside(key)
            for entry in value.values() if isinstance(value, dict) else [value]:
                if isinstance(entry, BaseModel):
                    given = entry.model_fields_set
                    names = type(entry).model_fields
                    changed += [f"{inside}.{name}" for name in names if name in given]
        return list(dict.fromkeys(changed))

    @classmethod
    def _inside(cls, key: str) -> str:
        """How the keys inside a typed mapping begin, or inside several of them."""
        several = get_origin(cls.model_fields[key].annotation) is dict
        return f"{key}.NAME" if several else key

    @classmethod
    def check(cls, node: Mapping[str, Any], context: Mapping[str, Any]) -> Iterator[Problem]:
        """Yields every problem of a `launcher` node, with paths relative to it. The context has the
        size of the run: `num_nodes`, `devices` (per node), `accelerator`."""
        values = {key: value for key, value in node.items() if key in cls.model_fields}
        wrong: list[Problem] = []
        try:
            settings = cls(**values)
        except UserError as error:
            about = cls.about_settings()
            for problem in relative(error.problems):
                sentence = about.get(problem.path, "").partition("\n")[0]
                wrong.append(replace(problem, remedy=problem.remedy or sentence))
            keys = {problem.path.partition(".")[0] for problem in wrong}
            settings = cls(**{key: values[key] for key in values if key not in keys})
        reported = {problem.path for problem in wrong}
        yield from wrong
        yield from (p for p in settings.misfits(context) if p.path not in reported)

    def misfits(self, context: Mapping[str, Any]) -> Iterator[Problem]:
        """Problems of settings that are valid separately, but not together, for this size of run,
        or on this machine; see `check`."""
        return iter(())


def _entry_of(annotation: object) -> type[BaseModel] | None:
    """The class of the typed mapping that a field holds, or holds several of; None for others."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_entry_of, get_args(annotation))), None)


def relative(problems: Iterable[Problem]) -> list[Problem]:
    """Problems with paths relative to `launcher`."""
    return [replace(p, path=p.path.removeprefix("launcher.")) for p in problems]


def refuse(problems: Iterable[Problem]) -> None:
    """Raises the problems if there are any; their paths are relative to `launcher`."""
    if wrong := [replace(p, path=f"launcher.{p.path}".rstrip(".")) for p in problems]:
        raise UserError(*wrong)


def unknown_keys(
    inputs: Mapping[str, Mapping[str, Any]], known: Sequence[str]
) -> Iterator[Problem]:
    """One Problem for each key of an input that the launcher does not know."""
    for name, entry in inputs.items():
        for key in sorted(set(entry) - set(known)):
            yield Problem(
                f"inputs.{name}.{key}",
                what="not a setting of an input",
                remedy=did_you_mean_word(key, known) or f"an input has {' and '.join(known)}",
                code="unknown-key",
            )


# ---- parts of a request -------------------------------------------------------------------------

# For the `python -c` of an image that unpacks what was sent: tarfile's filters are of that version.
# Any Python runs it, also one of another major version.
PYTHON_CHECK = (
    "import sys; sys.version_info >= (3, 11, 4) or "
    "sys.exit('python is %d.%d.%d, and distdl needs 3.11.4 or later' % sys.version_info[:3])"
)


def newest_checkpoint(store: Path) -> Sequence[Path]:
    """A run's newest complete checkpoint and its manifest; empty if there is no checkpoint."""
    from distdl.runs.checkpoints import CheckpointStore, manifest_of

    newest = CheckpointStore(store / "checkpoints").newest()
    return (newest, manifest_of(newest)) if newest else ()


def attempt_at(folder: Path) -> Attempt:
    """The attempt in a folder, to read what its ranks have recorded."""
    from distdl.runs.attempt import Attempt

    return Attempt(folder)


def forwarded(spec: JobSpec) -> dict[str, str]:
    """The variables of `forward_env` with their values in this shell, which must not be written to
    any request, file, command line or log."""
    return {name: os.environ[name] for name in spec.forward_env}


def slug(text: str) -> str:
    """The text as letters, digits and single hyphens, which every platform accepts in a name."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-")


def digest(text: str, length: int) -> str:
    """Hexadecimal digits that distinguish different texts with the same slug."""
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def pack(folder: Path, archive: Path, is_sent: Callable[[str], bool] = lambda name: True) -> None:
    """Packs the files of a folder whose names, relative to it, `is_sent` accepts. The same files
    always give the same bytes."""
    with (
        archive.open("wb") as raw,
        gzip.GzipFile(fileobj=raw, mode="wb", filename="", mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            if not is_sent(path.relative_to(folder).as_posix()):
                continue
            entry = tar.gettarinfo(path, str(path.relative_to(folder)))
            entry.mtime = entry.uid = entry.gid = 0
            entry.uname = entry.gname = ""
            entry.mode = 0o755 if entry.mode & 0o100 else 0o644
            with path.open("rb") as file:
                tar.addfile(entry, file)


# ---- a run's files in another store -------------------------------------------------------------

PART = 8 << 20  # bytes of a growing file that are read at once


@contextmanager
def store_errors(where: str = "") -> Iterator[None]:
    """Turns a StoreError in the block into a UserError with the path `where`."""
    try:
        yield
    except StoreError as error:
        raise UserError.at(where, what=str(error), remedy=error.remedy, code=error.code) from error


def read_on(store: Store, name: str, start: int) -> bytes | None:
    """`JobBase.read_on`, of a job whose run is in this store. Raises a StoreError."""
    size = store.size(name) or 0
    if size < start:
        return None
    count = min(size - start, PART)
    return store.read_part(name, start, count) if count else b""


def leave(store: Store, name: str, content: bytes) -> None:
    """`JobBase.leave`, to this store. Raises a StoreError."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "content")
        file.write_bytes(content)
        store.replace(file, name)


@dataclass(frozen=True)
class RemoteFile:
    """A file in a remote store: its size in bytes, and the time of its last change (Unix time)."""

    size: int
    modified: float


def manifests_last(names: Iterable[str]) -> list[str]:
    """File names in copying order. Manifests are last: one marks its checkpoint as complete."""
    return sorted(names, key=lambda name: (name.endswith(".manifest.json"), name))


def fetch_files(
    to: Path, files: Mapping[str, RemoteFile], download: Callable[[str, Path], object]
) -> int:
    """Copies a run's files, named relative to its store, into a folder; returns how many. Skips
    existing files of the same size that are not older, and the files that only this machine writes
    (`OWN` in `distdl.util.safe_paths`)."""
    from distdl.util.safe_paths import local_paths

    copied = 0
    for name, path in local_paths(to, manifests_last(files)).items():
        remote = files[name]
        local = path.stat() if path.is_file() else None
        if local and local.st_size == remote.size and local.st_mtime >= remote.modified:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.part")
        temporary.unlink(missing_ok=True)
        download(name, temporary)
        temporary.replace(path)
        os.utime(path, (remote.modified, remote.modified))
        copied += 1
    return copied
