"""Composing a config with Hydra, through its compose API: no file is written."""

from __future__ import annotations

import functools
import itertools
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf

from distdl.config import programs, user_conf
from distdl.config.hints import words
from distdl.config.recipe import LAYERS, is_own
from distdl.util.errors import Problem, UserError
from distdl.util.names import kept_apart
from distdl.util.redact import redact
from distdl.util.suggest import closest

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

PRIMARY = "distdl"
# Of these, distdl's own files of `debug` set only the keys that are there.
DEBUGGED = ("data", "model", "optimizer")


@dataclass(frozen=True)
class Composed:
    """A composed config, which also has the node `hydra`, and what it was composed with: the
    overrides of the command line, parsed, with their texts as Hydra takes them."""

    config: DictConfig
    typed: tuple[Override, ...]


@contextmanager
def hydra_session(config_dirs: Sequence[str] = ()) -> Iterator[None]:
    """Initialises Hydra. It searches the user's `./conf` (or $DISTDL_CONF), then distdl's options,
    then the directories of `--config-dir`."""
    from hydra import initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    user_conf.register(config_dirs)
    GlobalHydra.instance().clear()
    with initialize_config_module("distdl.conf", version_base="1.3", job_name=PRIMARY):
        yield


def typed(config: DictConfig) -> list[Override]:
    """The overrides of the command line that a config was composed with, parsed again: a caller
    that has them (`Composed`) passes them on."""
    written = OmegaConf.select(config, "hydra.overrides.task") or OmegaConf.create([])
    texts = OmegaConf.to_container(written, resolve=False) or ()
    return parse_overrides([str(each) for each in texts])


def texts_of(overrides: Iterable[Override]) -> list[str]:
    return [str(override.input_line) for override in overrides]


def compose(overrides: Sequence[str], config_dirs: Sequence[str] = ()) -> DictConfig:
    """One composed config; see `composed`. Raises a UserError, too, if an override cannot be
    parsed."""
    return composed(parse_overrides(overrides), config_dirs).config


def composed(overrides: Sequence[Override], config_dirs: Sequence[str] = ()) -> Composed:
    """Composes a config.

    Unknown keys are accepted: every value override is added by `++`, so that validation reports
    all of them at once, each with a suggestion.

    Raises:
        UserError: An option does not exist, or a file is broken.
    """
    from hydra import compose as hydra_compose
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    with hydra_session(config_dirs):
        try:
            typed = prepare_overrides(overrides)
            prepared = texts_of(typed)
            config = hydra_compose(PRIMARY, overrides=prepared, return_hydra_config=True)
            flat = group_options("experiment")
            if config.hydra.runtime.choices.get("debug"):
                _remove_debug_keys(config, prepared)
            if programs.is_program(config):
                OmegaConf.set_struct(config, False)
                _reduce_to_program(config, overrides, prepared)
        except (HydraException, OmegaConfBaseException, YAMLError) as error:
            raise UserError(_file_problem(first_lines(error))) from error
        except (RecursionError, UnicodeDecodeError):
            if not (broken := user_conf.broken()):
                raise
            raise UserError(*broken) from None
    OmegaConf.set_readonly(config.hydra, None)
    # Hydra adds them to what a file may have written there, in the user's name.
    config.hydra.overrides.task = prepared
    HydraConfig.instance().set_config(config)
    OmegaConf.set_struct(config, False)
    chosen = _chosen(prepared, "experiment")
    named = "-".join(each.replace("/", "_") for each in chosen) or "default"
    if named in flat and chosen != [named]:  # experiment=a_b exists beside experiment=a/b
        named = kept_apart(",".join(chosen), named)
    empty = {"experiment_name": named, "tracking": {}, "callbacks": {}}
    if programs.is_program(config):
        del empty["callbacks"]
    for key, value in empty.items():
        # Interpolations are not resolved here: validation reports a broken one with the others.
        if not OmegaConf.is_interpolation(config, key) and config.get(key) is None:
            config[key] = value
    if not OmegaConf.is_interpolation(config, "trainer"):
        _normalise_trainer(config.get("trainer"))
    return Composed(config, tuple(typed))


def _reduce_to_program(
    config: DictConfig, overrides: Sequence[Override], prepared: Sequence[str]
) -> None:
    """Leaves in a config only what concerns its program. Raises a UserError if the user sets more,
    or gives a parameter that no file declares."""
    from hydra import compose as hydra_compose

    given = [str(o.input_line) for o in overrides if o.key_or_group.startswith(programs.PARAMS)]
    if given:
        declaring = [each for each in prepared if not each.startswith(f"++{programs.PARAMS}")]
        files_alone = hydra_compose(PRIMARY, overrides=declaring)
        if problems := [*programs.undeclared(files_alone, given)]:
            raise UserError(*problems)
    programs.reduce(config, hydra_compose(PRIMARY), [o.key_or_group for o in overrides])


def _chosen(prepared: Sequence[str], group: str) -> list[str]:
    """The options that a command line chooses of a group that has none by default. Hydra's own
    record of choices lacks those of a list."""
    for line in prepared:
        if line.startswith(f"+{group}="):
            value = _parsed(line).value()
            return [str(each) for each in (value if isinstance(value, list) else [value])]
    return []


def _remove_debug_keys(config: DictConfig, overrides: Sequence[str]) -> None:
    """Removes what `debug=` adds to data, a model or an optimizer that have no such key: each kind
    has other ones, and their classes would refuse it.

    distdl's own files of `debug` may add to all three. A user's file is meant for the user's own
    model, but data that are not distdl's may have no `num_workers`.
    """
    from hydra import compose as hydra_compose

    plain = [each for each in overrides if not each.startswith("+debug=")]
    before = hydra_compose(PRIMARY, overrides=plain)
    for path in _shipped_debug_keys(str(config.hydra.runtime.choices.debug)):
        above, _, key = path.rpartition(".")
        node, was = (OmegaConf.select(each, above) for each in (config, before))
        if isinstance(node, DictConfig) and key not in (was or {}):
            OmegaConf.set_struct(node, False)
            node.pop(key, None)
    data = config.get("data")
    if isinstance(data, DictConfig) and not is_own(data.get("_target_")):
        OmegaConf.set_struct(data, False)
        for name in [each for each in data if each not in (before.get("data") or {})]:
            data.pop(name)


def _shipped_debug_keys(option: str) -> list[str]:
    """The keys of DEBUGGED sections that distdl's own file of an option has, the innermost first:
    `model.network.max_size`, then `model.network`."""
    import yaml

    file = files("distdl.conf").joinpath(f"debug/{option}.yaml")
    if not file.is_file():
        return []
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    return [key for section in DEBUGGED for key in _keys(section, content.get(section))]


def _keys(path: str, node: object) -> Iterator[str]:
    """The dotted paths below a node, the innermost first."""
    for key, value in node.items() if isinstance(node, dict) else ():
        yield from _keys(f"{path}.{key}", value)
        yield f"{path}.{key}"


def _normalise_trainer(trainer: object) -> None:
    """Converts texts that Lightning reads as numbers ("2", "0,1"), and short precisions ("16")."""
    if not isinstance(trainer, DictConfig):
        return
    devices, precision = (
        None if OmegaConf.is_interpolation(trainer, key) else trainer.get(key)
        for key in ("devices", "precision")
    )
    if isinstance(devices, str) and re.fullmatch(r"\s*(-1|\d+|(\d+\s*,\s*)+\d*)\s*", devices):
        numbers = [int(part) for part in devices.split(",") if part.strip()]
        trainer.devices = numbers if "," in devices else numbers[0]
    if str(precision) in ("16", "bf16", "32", "64"):
        trainer.precision = f"{precision}-{'mixed' if '16' in str(precision) else 'true'}"


def prepare_overrides(overrides: Sequence[Override]) -> list[Override]:
    """Converts the texts of typed overrides into the form that Hydra takes, in a `hydra_session`.

    `experiment=x` and `debug=x` become additions, in this order and after all other options;
    `key=value` becomes `++key=value`. All wrong options are reported at once.
    """
    from hydra import compose as hydra_compose

    problems: list[Problem] = []
    layers: dict[str, list[Override]] = {layer: [] for layer in LAYERS}
    options: list[Override] = []
    inner: list[Override] = []
    values: list[Override] = []
    with_default = defaults()
    for override in overrides:
        line = str(override.input_line)
        key = override.key_or_group
        body = re.sub(r"^(\+\+|\+|~)", "", line)
        if key.startswith("hydra") and not key.startswith("hydra.searchpath"):
            what = "distdl chooses the folders of its runs: Hydra's setting would have no effect"
            problems.append(Problem(key, what, words.for_key(key), code="reserved"))
        elif override.is_delete() or key.startswith("hydra"):
            options.append(override)
        elif not is_group(key) or isinstance(override.value(), dict):
            values.append(replace(override, input_line=f"++{body}"))
        else:
            problems += _unknown_options(override)
            named = replace(override, input_line=f"{body.partition('=')[0]}={_named(override)}")
            if key in LAYERS:
                layers[key].append(_added(named))
            elif "/" in key:
                inner.append(named)
            else:
                options.append(named if key in with_default else _added(named))
    for layer, chosen in layers.items():
        if len(chosen) > 1:
            names = [text.partition("=")[2] for text in texts_of(chosen)]
            remedy = f"choose one; a file builds on another by `- {names[0]}` under its defaults"
            problems.append(
                Problem(layer, f"chosen twice: {', '.join(names)}", remedy, code="conflict")
            )
    if problems:
        raise UserError(*problems)
    layered = [*layers["experiment"], *layers["debug"]]
    if inner:  # overrides like `model/net=wide`, with a `+` if no defaults list has that group
        outer = texts_of([*options, *layered])
        config = hydra_compose(PRIMARY, overrides=outer, return_hydra_config=True)
        known = config.hydra.runtime.choices
        inner = [
            each if str(each.input_line).partition("=")[0] in known else _added(each)
            for each in inner
        ]
    return [*options, *inner, *layered, *values]


def _added(override: Override) -> Override:
    """An override whose text adds its group to the defaults list."""
    return replace(override, input_line=f"+{override.input_line}")


def parse_overrides(overrides: Sequence[str]) -> list[Override]:
    """Parses overrides by Hydra's own grammar. Words that are not overrides are refused by a
    UserError."""
    words.check(overrides)
    return parse_checked(overrides)


def parse_checked(overrides: Sequence[str]) -> list[Override]:
    """As `parse_overrides`, for words that `words.check` has seen. Each text is parsed only once in
    a process, so the members of a sweep share what they have in common."""
    from hydra.errors import HydraException

    parsed, problems = [], []
    for text in overrides:
        try:
            parsed.append(_parsed(text))
        except HydraException as error:
            remedy = words.for_override(text, first_lines(error))
            wrong = f"{redact(repr(text))} is not an override"
            problems.append(
                Problem(text.partition("=")[0].strip(), wrong, remedy, code="wrong-kind")
            )
    if problems:
        raise UserError(*problems)
    return parsed


@functools.cache
def _parsed(text: str) -> Override:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create().parse_override(quoted(programs.full(text)))


def quoted(text: str) -> str:
    """An override with quotes around its non-ASCII words, as Hydra needs them."""
    key, equals, value = text.partition("=")
    if value.isascii() or words.is_quoted(value):
        return text
    return key + equals + re.sub(r"[\w./:-]*[^\W\x00-\x7f][\w./:-]*", r'"\g<0>"', value)


def is_group(key: str) -> bool:
    return bool(group_options(key)) or key in LAYERS


def group_options(group: str) -> list[str]:
    """The options of a config group, distdl's and the user's; needs a `hydra_session`."""
    from hydra.core.global_hydra import GlobalHydra

    loader = GlobalHydra.instance().config_loader()
    return sorted(o for o in loader.get_group_options(group) if o != "__init__")


def defaults() -> dict[str, list[str]]:
    """The groups in the primary defaults list, each with its default options."""
    primary = OmegaConf.create(files("distdl.conf").joinpath("distdl.yaml").read_text())
    entries = [entry for entry in primary.defaults if isinstance(entry, DictConfig)]
    chosen = {str(group): option for entry in entries for group, option in entry.items()}
    groups = {group: o for group, o in chosen.items() if not group.startswith("override")}
    return {group: [o] if isinstance(o, str) else [*(o or ())] for group, o in groups.items()}


def sweep(overrides: Sequence[Override], config_dirs: Sequence[str] = ()) -> list[list[str]]:
    """The jobs of a sweep: the product of all `a=1,2`, `a=range(3)`, `a=choice(x,y)`, in order.
    Values that cannot be listed, such as `a=interval(0,1)`, are refused by a UserError."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException

    choices: list[list[str]] = []
    with hydra_session(config_dirs):
        for each in overrides:
            text = str(each.input_line)
            key = each.get_key_element()
            # For model=glob(*).
            override = replace(each, config_loader=GlobalHydra.instance().config_loader())
            try:
                swept = override.is_sweep_override()
                jobs = [f"{key}={v}" for v in override.sweep_string_iterator()] if swept else [text]
            except HydraException as error:
                what = f"the values of {text} cannot be listed: {first_lines(error)}"
                remedy = f"list them: {key}=a,b or {key}=range(1,4)"
                raise UserError.at(
                    override.key_or_group, what, remedy, code="unreadable"
                ) from error
            if not jobs:
                raise UserError.at(
                    override.key_or_group, f"{text} matches nothing", code="not-found"
                )
            choices.append(jobs)
    return [list(job) for job in itertools.product(*choices)]


def sweep_keys(overrides: Sequence[Override]) -> list[str]:
    return [o.key_or_group for o in overrides if o.is_sweep_override()]


def _named(override: Override) -> str:
    """The options that an override of a group chooses, as Hydra takes them: a text, not a number
    such as 2024."""
    value = override.value()
    text = str(override.input_line).partition("=")[2]
    if isinstance(value, list) and not all(isinstance(each, str) for each in value):
        return "[" + ",".join(f'"{option_name(each)}"' for each in value) + "]"
    return f'"{text}"' if isinstance(value, bool | int | float) else text


def option_name(value: object) -> str:
    """The name of an option, as it was typed, for a value that Hydra's grammar has read."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _unknown_options(override: Override) -> Iterable[Problem]:
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
            yield _no_option(group, option)


def _no_option(group: str, option: str, where: str = "") -> Problem:
    """The problem of an option that a group does not have, with a suggestion."""
    known = group_options(group)
    named = re.sub(rf"^(.*/)?{group}/|\.ya?ml$", "", option)  # a path: conf/experiment/ours.yaml
    close = "none" if option == "null" and "none" in known else closest(named, known)
    close = named if named in known else close
    if remedy := words.for_choice(group, option):
        return Problem(group, f"no option {option!r}{where}", remedy, code="unknown-key")
    hint = f"did you mean {group}={close}? " if close else user_conf.why_not_read(group, named)
    if parent := user_conf.parent_with(group, named):
        hint = f"{parent}/conf has it: cd {shlex.quote(str(parent))}; "
    return Problem(
        group,
        f"no option {option!r}{where}",
        f"{hint}available: {', '.join(known)}",
        code="unknown-key",
    )


def _file_problem(text: str) -> Problem:
    """Hydra's error about a file's defaults list, in distdl's words if it is a known one."""
    if lists := re.match(r"In '([\w/]+)': .*\s.* with ListConfig", text):
        remedy = "callbacks and tracking are mappings: callbacks: {NAME: {_target_: package.Class}}"
        return Problem(
            f"{lists[1]}.yaml", "a list where distdl has a mapping", remedy, code="wrong-type"
        )
    several = r"Multiple values for ([\w/]+)\S*\. .*'override [^:]+: (.+)'"
    if twice := re.match(rf"{several}|([\w/]+)\S* appears more than once", text):
        group = (twice[1] or twice[3]).rpartition("/")[2]
        remedy = f"in the file: - override /{group}: {twice[2] or 'NAME'}"
        return Problem(group, "a file's defaults choose it a second time", remedy, code="ambiguous")
    unknown = re.match(r"(?:In '([\w/]+)': )?Could not (find|load|override) '([\w/.@-]+)'", text)
    if unknown is None:
        return Problem("", text, code="unreadable")
    file, verb, asked = unknown.groups()
    asked, _, package = asked.partition("@")
    if file and package.startswith(f"{file.partition('/')[0]}."):
        return words.not_global(f"{file}.yaml")
    where = f", in {file}.yaml" if file and file != PRIMARY else ""
    group, _, option = asked.rpartition("/") if verb != "override" else (asked, "", "")
    last = group.rpartition("/")[2]
    hydras = group.startswith("hydra")
    if verb != "override" and is_group(group) and not hydras:
        return _no_option(group, option, where)
    remedy = words.for_choice(last, option) or words.for_key(group if hydras else last, option)
    groups = [*defaults()]
    near = last if last in groups else closest(last, groups)
    if where and near:
        remedy = f"in the file: - override /{near}: {option or 'NAME'}"
    if not remedy:
        return Problem("", text, code="unreadable")
    return Problem(last, f"no group of that name{where}", remedy, code="unknown-key")


def first_lines(error: Exception) -> str:
    """Hydra's message without its tail of search paths."""
    text = str(error).strip() or type(error).__name__
    text = text.split("\nConfig search path:")[0].split("\nSet the environment variable")[0]
    return re.split(r"\n\s*full_key:", text)[0].strip()
