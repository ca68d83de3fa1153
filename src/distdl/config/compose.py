"""Composing a config with Hydra, through its compose API: no file is written."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import TYPE_CHECKING

from omegaconf import MISSING, DictConfig, OmegaConf

from distdl.config import grammar, groups, programs, user_conf
from distdl.config.hints import words
from distdl.config.recipe import LAYERS, flat_paths, is_own, values_at
from distdl.util.errors import Problem, UserError
from distdl.util.names import kept_apart

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

# Of these, distdl's own files of `debug` set only the keys that are there.
DEBUGGED = ("data", "model", "optimizer")
# Short for Lightning's own words.
PRECISIONS = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true"}


@dataclass(frozen=True)
class Composed:
    """A composed config, which also has the node `hydra`, and what it was composed with: the
    overrides of the command line, parsed, with their texts as Hydra takes them."""

    config: DictConfig
    typed: tuple[Override, ...]


def typed(config: DictConfig) -> list[Override]:
    """The overrides of the command line that a config was composed with, parsed again: a caller
    that has them (`Composed`) passes them on."""
    written = OmegaConf.select(config, "hydra.overrides.task") or OmegaConf.create([])
    texts = OmegaConf.to_container(written, resolve=False) or ()
    return grammar.parse_overrides([str(each) for each in texts])


def compose(overrides: Sequence[str], config_dirs: Sequence[str] = ()) -> DictConfig:
    """One composed config; see `composed`. Raises a UserError, too, if an override cannot be
    parsed."""
    return composed(grammar.parse_overrides(overrides), config_dirs).config


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

    with groups.hydra_session(config_dirs):
        try:
            typed = prepare_overrides(overrides)
            prepared = grammar.texts_of(typed)
            config = hydra_compose(groups.PRIMARY, overrides=prepared, return_hydra_config=True)
            _mark_missing(config, prepared, overrides)
            flat = groups.group_options("experiment")
            if config.hydra.runtime.choices.get("debug"):
                _remove_debug_keys(config, prepared)
            if programs.is_program(config):
                OmegaConf.set_struct(config, False)
                _reduce_to_program(config, overrides, prepared)
        except (HydraException, OmegaConfBaseException, YAMLError) as error:
            raise UserError(groups.file_problem(grammar.first_lines(error))) from error
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
        files_alone = hydra_compose(groups.PRIMARY, overrides=declaring)
        if problems := [*programs.undeclared(files_alone, given)]:
            raise UserError(*problems)
    programs.reduce(config, hydra_compose(groups.PRIMARY), [o.key_or_group for o in overrides])


def _chosen(prepared: Sequence[str], group: str) -> list[str]:
    """The options that a command line chooses of a group that has none by default. Hydra's own
    record of choices lacks those of a list."""
    for line in prepared:
        if line.startswith(f"+{group}="):
            value = grammar.parsed(line).value()
            return [str(each) for each in (value if isinstance(value, list) else [value])]
    return []


def _mark_missing(
    config: DictConfig, prepared: Sequence[str], overrides: Sequence[Override]
) -> None:
    """Marks as missing what an experiment leaves to the user (`weights: ???`). Hydra keeps a value
    of the files below, and their null would then do without being asked for."""
    repository = groups.repository()
    needed: set[str] = set()
    for layer in LAYERS:
        for name in _chosen(prepared, layer):
            loaded = repository.load_config(f"{layer}/{name}")
            if loaded is None or loaded.header.get("package") != "_global_":
                continue
            assert isinstance(loaded.config, DictConfig)  # Hydra refuses other files
            content = OmegaConf.to_container(loaded.config, resolve=False)
            for path in flat_paths(loaded.config):
                (needed.add if MISSING in values_at(content, path) else needed.discard)(path)
    # An option of a group (model=resnet34) is no value for a key in it.
    values = (o for o in overrides if not groups.is_group(o.key_or_group) or _is_mapping(o))
    given = [each.key_or_group for each in values]
    for path in needed:
        if not any(path == key or path.startswith(f"{key}.") for key in given):
            OmegaConf.update(config, path, MISSING)


def _is_mapping(override: Override) -> bool:
    return isinstance(override.value(), dict)


def _remove_debug_keys(config: DictConfig, overrides: Sequence[str]) -> None:
    """Removes what `debug=` adds to data, a model or an optimizer that have no such key: each kind
    has other ones, and their classes would refuse it.

    distdl's own files of `debug` may add to all three. A user's file is meant for the user's own
    model, but data that are not distdl's may have no `num_workers`.
    """
    from hydra import compose as hydra_compose

    plain = [each for each in overrides if not each.startswith("+debug=")]
    before = hydra_compose(groups.PRIMARY, overrides=plain)
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
    devices = None if OmegaConf.is_interpolation(trainer, "devices") else trainer.get("devices")
    if isinstance(devices, str) and re.fullmatch(r"\s*(-1|\d+|(\d+\s*,\s*)+\d*)\s*", devices):
        numbers = [int(part) for part in devices.split(",") if part.strip()]
        trainer.devices = numbers if "," in devices else numbers[0]
    if OmegaConf.is_interpolation(trainer, "precision"):
        return
    precision = str(trainer.get("precision"))
    if precision in PRECISIONS:
        trainer.precision = PRECISIONS[precision]


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
    with_default = groups.defaults()
    for override in overrides:
        line = str(override.input_line)
        key = override.key_or_group
        body = re.sub(r"^(\+\+|\+|~)", "", line)
        if key.startswith("hydra") and not key.startswith("hydra.searchpath"):
            problems.append(
                Problem(
                    key,
                    what=(
                        "distdl chooses the folders of its runs: "
                        "Hydra's setting would have no effect"
                    ),
                    remedy=words.for_key(key),
                    code="reserved",
                )
            )
        elif override.is_delete() or key.startswith("hydra"):
            options.append(override)
        elif not groups.is_group(key) or _is_mapping(override):
            values.append(replace(override, input_line=f"++{body}"))
        else:
            problems += groups.unknown_options(override)
            named = replace(override, input_line=f"{body.partition('=')[0]}={_named(override)}")
            if key in LAYERS:
                layers[key].append(_added(named))
            elif "/" in key:
                inner.append(named)
            else:
                options.append(named if key in with_default else _added(named))
    for layer, chosen in layers.items():
        if len(chosen) > 1:
            names = [text.partition("=")[2] for text in grammar.texts_of(chosen)]
            problems.append(
                Problem(
                    layer,
                    what=f"chosen twice: {', '.join(names)}",
                    remedy=(
                        f"choose one; a file builds on another by `- {names[0]}` under its defaults"
                    ),
                    code="conflict",
                )
            )
    if problems:
        raise UserError(*problems)
    layered = [*layers["experiment"], *layers["debug"]]
    if inner:  # overrides like `model/net=wide`, with a `+` if no defaults list has that group
        outer = grammar.texts_of([*options, *layered])
        config = hydra_compose(groups.PRIMARY, overrides=outer, return_hydra_config=True)
        known = config.hydra.runtime.choices
        inner = [
            each if str(each.input_line).partition("=")[0] in known else _added(each)
            for each in inner
        ]
    return [*options, *inner, *layered, *values]


def _added(override: Override) -> Override:
    """An override whose text adds its group to the groups.defaults list."""
    return replace(override, input_line=f"+{override.input_line}")


def sweep(overrides: Sequence[Override], config_dirs: Sequence[str] = ()) -> list[list[str]]:
    """The jobs of a sweep: the product of all `a=1,2`, `a=range(3)`, `a=choice(x,y)`, in order.
    Values that cannot be listed, such as `a=interval(0,1)`, are refused by a UserError."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException

    choices: list[list[str]] = []
    with groups.hydra_session(config_dirs):
        for each in overrides:
            text = str(each.input_line)
            key = each.get_key_element()
            # For model=glob(*).
            override = replace(each, config_loader=GlobalHydra.instance().config_loader())
            try:
                swept = override.is_sweep_override()
                jobs = [f"{key}={v}" for v in override.sweep_string_iterator()] if swept else [text]
            except HydraException as error:
                raise UserError.at(
                    override.key_or_group,
                    what=f"the values of {text} cannot be listed: {grammar.first_lines(error)}",
                    remedy=f"list them: {key}=a,b or {key}=range(1,4)",
                    code="unreadable",
                ) from error
            if not jobs:
                raise UserError.at(
                    override.key_or_group, what=f"{text} matches nothing", code="not-found"
                )
            choices.append(jobs)
    return [list(job) for job in itertools.product(*choices)]


def _named(override: Override) -> str:
    """The options that an override of a group chooses, as Hydra takes them: a text, not a number
    such as 2024."""
    value = override.value()
    text = str(override.input_line).partition("=")[2]
    if isinstance(value, list) and not all(isinstance(each, str) for each in value):
        return "[" + ",".join(f'"{grammar.option_name(each)}"' for each in value) + "]"
    return f'"{text}"' if isinstance(value, bool | int | float) else text
