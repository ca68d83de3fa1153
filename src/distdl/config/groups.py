"""The groups of options, distdl's and the user's, and what is wrong with a choice of one."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf

from distdl.config import user_conf
from distdl.config.grammar import option_name
from distdl.config.hints import words
from distdl.config.recipe import LAYERS
from distdl.util.errors import Problem
from distdl.util.suggest import closest

if TYPE_CHECKING:
    from hydra._internal.config_repository import IConfigRepository
    from hydra.core.override_parser.types import Override

PRIMARY = "distdl"


@contextmanager
def hydra_session(config_dirs: Sequence[str] = ()) -> Iterator[None]:
    """Initialises Hydra. It searches the user's `./conf` (or $DISTDL_CONF), then distdl's options,
    then the directories of `--config-dir`."""
    from hydra import initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    user_conf.register(config_dirs)
    _options.cache_clear()
    GlobalHydra.instance().clear()
    with initialize_config_module("distdl.conf", version_base="1.3", job_name=PRIMARY):
        yield


def is_group(key: str) -> bool:
    return bool(group_options(key)) or key in LAYERS


def group_options(group: str) -> list[str]:
    """The options of a config group, distdl's and the user's; needs a `hydra_session`."""
    return [*_options(group)]


@functools.cache
def _options(group: str) -> tuple[str, ...]:
    """Asked of the files once a session: a start asks of some groups a dozen times."""
    return tuple(sorted(o for o in repository().get_group_options(group) if o != "__init__"))


def repository() -> IConfigRepository:
    """All files of options, distdl's and the user's; needs a `hydra_session`. Hydra's public
    functions copy it for each question."""
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra.core.global_hydra import GlobalHydra

    loader = GlobalHydra.instance().config_loader()
    assert isinstance(loader, ConfigLoaderImpl)  # the only one of Hydra
    return loader.repository


def defaults() -> dict[str, list[str]]:
    """The groups in the primary defaults list, each with its default options."""
    return {group: [*options] for group, options in _defaults().items()}


@functools.cache
def _defaults() -> dict[str, list[str]]:
    primary = OmegaConf.create(files("distdl.conf").joinpath("distdl.yaml").read_text())
    entries = [entry for entry in primary.defaults if isinstance(entry, DictConfig)]
    chosen = {str(group): option for entry in entries for group, option in entry.items()}
    groups = {group: o for group, o in chosen.items() if not group.startswith("override")}
    return {group: [o] if isinstance(o, str) else [*(o or ())] for group, o in groups.items()}


def unknown_options(override: Override) -> Iterable[Problem]:
    """A problem for each option that an override chooses and its group does not have."""
    group = override.key_or_group
    known = group_options(group)
    value = override.value()
    chosen = value if isinstance(value, list) else [value]
    if override.is_sweep_override():
        chosen = [*override.sweep_iterator()]
    for option in map(option_name, chosen):
        folder, _, name = option.rpartition("/")
        inner = folder and name in group_options(f"{group}/{folder}")
        if option not in known and not option.startswith("$") and not inner:
            yield no_option(group, option)


def no_option(group: str, option: str, where: str = "") -> Problem:
    """The problem of an option that a group does not have, with a suggestion."""
    known = group_options(group)
    named = re.sub(rf"^(.*/)?{group}/|\.ya?ml$", "", option)  # a path: conf/experiment/ours.yaml
    close = "none" if option == "null" and "none" in known else closest(named, known)
    close = named if named in known else close
    if remedy := words.for_choice(group, option):
        return Problem(
            group, what=f"no option {option!r}{where}", remedy=remedy, code="unknown-key"
        )
    hint = f"did you mean {group}={close}? " if close else user_conf.why_not_read(group, named)
    if parent := user_conf.parent_with(group, named):
        hint = f"{parent}/conf has it: cd {shlex.quote(str(parent))}; "
    return Problem(
        group,
        what=f"no option {option!r}{where}",
        remedy=f"{hint}available: {', '.join(known)}",
        code="unknown-key",
    )


def file_problem(text: str) -> Problem:
    """Hydra's error about a file's defaults list, in distdl's words if it is a known one."""
    if lists := re.match(r"In '([\w/]+)': .*\s.* with ListConfig", text):
        return Problem(
            f"{lists[1]}.yaml",
            what="a list where distdl has a mapping",
            remedy=(
                "callbacks and tracking are mappings: callbacks: {NAME: {_target_: package.Class}}"
            ),
            code="wrong-type",
        )
    several = r"Multiple values for ([\w/]+)\S*\. .*'override [^:]+: (.+)'"
    if twice := re.match(rf"{several}|([\w/]+)\S* appears more than once", text):
        group = (twice[1] or twice[3]).rpartition("/")[2]
        return Problem(
            group,
            what="a file's defaults choose it a second time",
            remedy=f"in the file: - override /{group}: {twice[2] or 'NAME'}",
            code="ambiguous",
        )
    unknown = re.match(r"(?:In '([\w/]+)': )?Could not (find|load|override) '([\w/.@-]+)'", text)
    if unknown is None:
        return Problem("", what=text, code="unreadable")
    file, verb, asked = unknown.groups()
    asked, _, package = asked.partition("@")
    if file and package.startswith(f"{file.partition('/')[0]}."):
        return words.not_global(f"{file}.yaml")
    where = f", in {file}.yaml" if file and file != PRIMARY else ""
    group, _, option = asked.rpartition("/") if verb != "override" else (asked, "", "")
    last = group.rpartition("/")[2]
    hydras = group.startswith("hydra")
    if verb != "override" and is_group(group) and not hydras:
        return no_option(group, option, where)
    remedy = words.for_choice(last, option) or words.for_key(group if hydras else last, option)
    groups = [*defaults()]
    near = last if last in groups else closest(last, groups)
    if where and near:
        remedy = f"in the file: - override /{near}: {option or 'NAME'}"
    if not remedy:
        return Problem("", what=text, code="unreadable")
    return Problem(last, what=f"no group of that name{where}", remedy=remedy, code="unknown-key")
