"""Everything that is checked of a search before it starts, and what it needs to run."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from distdl.config import programs
from distdl.config import recipe as configs
from distdl.launch import planning, sweeps
from distdl.launch.planning import Plan
from distdl.tools.search import files, objectives, pruning, slots, spaces
from distdl.tools.search.engine import sampler_problems
from distdl.tools.search.objectives import Objective
from distdl.tools.search.slots import Slot
from distdl.tools.search.spaces import Searched, Space
from distdl.util.errors import Problem, UserError

MAX_TIME = "trainer.max_time"
FREE_DEVICES = ("auto", -1, None)  # of trainer.devices: as many as there are


@dataclass(frozen=True)
class PreparedSearch:
    """A search that may start.

    Args:
        own: The words that the user has typed, without the spaces.
        trial_seconds: Of each trial's training, if `--trial-budget` gives them.
        first: The plan of some trial, whose classes were checked.
    """

    searched: Searched
    own: Sequence[str]
    first: Plan
    objectives: Sequence[Objective]
    slots: Sequence[Slot]
    trial_seconds: int | None = None


def prepare(
    words: Sequence[str],
    *,
    sampler: str,
    pruner: str | None,
    metrics: Sequence[str],
    parallel: int | None,
    trial_seconds: int | None = None,
    discards: bool = False,
) -> PreparedSearch:
    """
    Args:
        words: Of the command line: overrides, spaces, and `tune=NAME`.
        metrics: Of `--metric`.
        parallel: How many trials run at once; None: as many as the devices allow.
        trial_seconds: Of each trial's training (`trainer.max_time`); None: as the words say.
        discards: Whether pruned trials lose their checkpoints.

    Raises:
        UserError: What is wrong with any of it.
    """
    if problems := [*objectives.problems_of(metrics), *pruning.problems_of(pruner, metrics)]:
        raise UserError(*problems)
    searched = spaces.parsed(files.expanded(words))
    own = searched.fixed
    typed = {_key(word) for word in own}
    more = [*objectives.of_words(metrics, typed), *_time_words(trial_seconds, searched, typed)]
    searched = replace(searched, fixed=(*own, *more))
    searched = _named(searched)
    if problems := [*sampler_problems(sampler, searched.spaces)]:
        raise UserError(*problems)
    plans = _planned(searched)
    programs.refuse(plans[0].config, "tune")
    _refuse_hidden(plans[0])
    if plans[0].launch.is_local and plans[0].config.trainer.get("devices") in FREE_DEVICES:
        # More devices make a training faster, and a search slower: they would exchange gradients.
        searched = replace(searched, fixed=(*searched.fixed, "trainer.devices=1"))
        plans = [sweeps.plan(words, searched.keys, ()) for words in _options_of(searched)]
    first = plans[0]
    for plan in plans[: len(_options_of(searched))]:
        planning.check_classes(plan, apart=True)
    found = objectives.chosen(metrics, first, typed)
    if problems := pruning.problems(pruner, found, first, searched.keys, discards=discards):
        raise UserError(*problems)
    places = slots.slots_of(first, parallel)
    return PreparedSearch(searched, own, first, found, places, trial_seconds)


def _time_words(seconds: int | None, searched: Searched, typed: Collection[str]) -> Iterator[str]:
    """The time of a trial as an override.

    Raises:
        UserError: It is typed, or searched, as well.
    """
    if seconds is None:
        return
    if MAX_TIME in typed or MAX_TIME in searched.keys:
        raise UserError.at(
            "--trial-budget",
            what=f"is {MAX_TIME} of each trial, which is given as well",
            remedy="one of the two",
            code="conflict",
        )
    yield f"{MAX_TIME}={configs.time_text(seconds)}"


def _refuse_hidden(plan: Plan) -> None:
    """Refuses a place for runs from which the results of trials cannot be read."""
    launcher = plan.launch.launcher
    remedy = launcher.hides_files(configs.plain(plan.config.launcher)) if launcher else ""
    if remedy:
        raise UserError.at(
            "launcher.store",
            what="a search reads what its trials have logged, and cannot read what is in a volume",
            remedy=remedy,
            code="unsupported",
        )


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


def _named(searched: Searched) -> Searched:
    """With a name that the same command has again."""
    if any(_key(word) == "name" for word in searched.fixed):
        return searched
    common = (word for word in searched.fixed if not sweeps.is_where(_key(word)))
    parts = (*sorted(common), *sorted(repr(space) for space in searched.spaces))
    name = f"tune-{configs.hash_of(chr(10).join(parts), 6)}"
    return replace(searched, fixed=(*searched.fixed, f"name={name}"))


def _planned(searched: Searched) -> list[Plan]:
    """Trials at each corner of the spaces, after the first stage of validation; those of
    `_options_of` come first.

    Raises:
        UserError: All problems, each once.
    """
    swept = searched.keys
    parsed = {space.key: space for space in searched.spaces}

    def plan(words: Sequence[str]) -> Plan:
        try:
            return sweeps.plan(words, swept, ())
        except UserError as error:
            raise type(error)(*_with_spaces(error.problems, parsed)) from error

    corners = [searched.overrides(values) for values in searched.corners()]
    options = _options_of(searched)
    others = [words for words in corners if words not in options]

    def varied(words: Sequence[str]) -> str:
        return " ".join(word for word in words if _key(word) in swept)

    return sweeps.map_all(plan, [*options, *others], UserError, varied, "trial")


def _options_of(searched: Searched) -> list[list[str]]:
    """The overrides of some trial, and of one with each other option of the spaces that choose
    something, rather than a number: their classes may be others."""
    first = searched.first()
    chosen = [first]
    for space in searched.spaces:
        others = [] if space.is_numeric else space.others
        chosen += [{**first, space.key: value} for value in others]
    return [searched.overrides(values) for values in chosen]


def _with_spaces(problems: Sequence[Problem], known: Mapping[str, Space]) -> Iterator[Problem]:
    """Problems with a remedy for a space, where they are about one of its values."""
    for problem in problems:
        space = known.get(problem.path)
        if space is not None and not space.choices and problem.code == "wrong-type":
            whole = f"int(interval({space.low:g},{space.high:g}))"
            remedy = f"{space.key}={whole}, or {space.key}=choice(a,b)"
            yield replace(problem, remedy=remedy)
        else:
            yield problem
