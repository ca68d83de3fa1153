"""What a search varies, read from Hydra's own sweep syntax: `key=interval(0.01,1)`, `key=a,b`."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distdl.config import grammar, groups
from distdl.config.recipe import WHERE
from distdl.util.errors import Problem, UserError
from distdl.util.redact import redact

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from optuna.distributions import BaseDistribution

LEAST = 2  # values of a space
SPAN = 1000  # the factor between the ends of a proposed space by the logarithm
CALL = re.compile(r"[+]{0,2}([^=]+)=\s*(\w+)\(.*\)\s*", re.DOTALL)
OF_SPACES = ("choice", "range", "interval", "log", "tag")
# What other tools call a space, and Hydra's word for it.
OTHER_WORDS = {
    "loguniform": "log(0.01,1)",
    "log_uniform": "log(0.01,1)",
    "uniform": "interval(0,1)",
    "quniform": "range(0,1,0.1)",
    "randint": "range(1,9)",
    "categorical": "choice(a,b)",
}
LOG = re.compile(r"([^=]+)=\s*log\((.*)\)\s*", re.DOTALL)
FORMS = "a,b, choice(a,b), range(1,9), interval(0,1), int(interval(1,9)) or log(0.01,1)"
DIGITS = 6  # of a number, as a run gets it: no result depends on more
JUDGES = ("checkpoint.monitor", "checkpoint.mode")
Value = str | int | float


@dataclass(frozen=True)
class Space:
    """The values of one key.

    Args:
        key: The dotted path, or the group of options.
        typed: The same as an override has it, such as `+model.network.drop_rate`.
        choices: The values as they are typed; empty for a range.
        low, high: Of a range, both included.
        step: Between the values of a range; None: every value in between.
        log: Whether values are drawn evenly by their logarithm.
        whole: Whether the values are whole numbers.
    """

    key: str
    typed: str
    choices: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    step: float | None = None
    log: bool = False
    whole: bool = False

    @property
    def first(self) -> Value:
        """Some value of it."""
        return self.choices[0] if self.choices else self._number(self.low)

    @property
    def others(self) -> list[Value]:
        """The other choices, or the other end of a range."""
        return [*self.choices[1:]] if self.choices else [self._number(self.high)]

    @property
    def listed(self) -> list[Value] | None:
        """All values; None if they cannot be listed."""
        if self.choices:
            return [*self.choices]
        if self.step is None:
            return None
        count = math.floor((self.high - self.low) / self.step + 1e-9) + 1
        return [self._number(self.low + number * self.step) for number in range(count)]

    @property
    def is_numeric(self) -> bool:
        """Whether all values are numbers, which choose no class and no option."""
        return not self.choices or all(_is_number(text) for text in self.choices)

    def _number(self, value: float) -> Value:
        return int(value) if self.whole else value

    def distribution(self) -> BaseDistribution:
        """As Optuna knows it."""
        from optuna import distributions

        if self.choices:
            return distributions.CategoricalDistribution(self.choices)
        if self.whole:
            step = int(self.step or 1)
            return distributions.IntDistribution(int(self.low), int(self.high), self.log, step)
        return distributions.FloatDistribution(self.low, self.high, self.log, self.step)

    def text(self, value: object) -> str:
        """A value as it is typed."""
        if isinstance(value, float):
            return repr(float(f"{value:.{DIGITS}g}"))
        return str(value)

    def __str__(self) -> str:
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        low, high = self._number(self.low), self._number(self.high)
        kind = "a whole number" if self.whole else "a number"
        step = f" in steps of {self.step:g}" if self.step is not None else ""
        return f"{kind} from {low:g} to {high:g}{step}{', by its logarithm' if self.log else ''}"


@dataclass(frozen=True)
class Searched:
    """The overrides of a search: those that all trials share, and the spaces."""

    fixed: tuple[str, ...]
    spaces: tuple[Space, ...]
    rewritten: Mapping[str, str]  # a short form, and what it means

    @property
    def keys(self) -> list[str]:
        return [space.key for space in self.spaces]

    def overrides(self, values: Mapping[str, object]) -> list[str]:
        """Those of one trial."""
        varied = (f"{space.typed}={space.text(values[space.key])}" for space in self.spaces)
        return [*self.fixed, *varied]

    def text(self, values: Mapping[str, object]) -> str:
        """What tells one trial apart: `optimizer.lr=0.1 data.batch_size=64`."""
        return " ".join(f"{each.key}={each.text(values[each.key])}" for each in self.spaces)

    def first(self) -> dict[str, Value]:
        """The values of some trial."""
        return {space.key: space.first for space in self.spaces}

    def corners(self) -> Iterator[dict[str, Value]]:
        """The values of `first`, then the same with each choice and each end of a range."""
        first = self.first()
        yield first
        for space in self.spaces:
            yield from ({**first, space.key: value} for value in space.others)


def parsed(words: Sequence[str]) -> Searched:
    """Separates spaces from other overrides.

    Raises:
        UserError: All words that are no overrides, and all spaces that are none.
    """
    if unreadable := [*_unreadable(words)]:
        raise UserError(*unreadable)
    full = [in_full(word) for word in words]
    rewritten = {short: long for short, long in zip(words, full, strict=True) if long != short}
    overrides = grammar.parse_overrides(full)
    spaces: list[Space] = []
    problems: list[Problem] = []
    given = [each.key_or_group for each in overrides]
    with groups.hydra_session():
        for override in (each for each in overrides if each.is_sweep_override()):
            found = [*_problems(override, given)]
            problems += found
            if not found:
                spaces.append(_space(override))
    for key in dict.fromkeys(grammar.sweep_keys(overrides)):
        if given.count(key) > 1:
            problems.append(
                Problem(
                    key,
                    what="is given twice, and once as a space",
                    remedy=f"one of them: {key}=...",
                    code="ambiguous",
                )
            )
    if not grammar.sweep_keys(overrides):
        problems.append(
            Problem(
                "tune",
                what="there is nothing to search: no key has a space",
                remedy=f"KEY={FORMS}",
                code="missing-key",
            )
        )
    if problems:
        raise UserError(*problems)
    fixed = (each for each in overrides if not each.is_sweep_override())
    return Searched(tuple(grammar.texts_of(fixed)), tuple(spaces), rewritten)


def in_full(word: str) -> str:
    """A word with the short form `log(a,b)` as Hydra's grammar writes it."""
    short = LOG.fullmatch(word)
    return f"{short[1]}=tag(log, interval({short[2]}))" if short else word


def _unreadable(words: Sequence[str]) -> Iterator[Problem]:
    """Words that are meant as spaces, and that Hydra cannot read: quoted, as is advised for other
    words, they would be texts."""
    from hydra.errors import HydraException

    for word in words:
        call = CALL.fullmatch(word)
        if call is None or call[2].lower() not in (*OF_SPACES, *OTHER_WORDS):
            continue
        try:
            grammar.parsed(in_full(word))
        except HydraException as error:
            key, name = call.groups()
            reason = grammar.first_lines(error).partition("\n")[0]
            meant = OTHER_WORDS.get(name.lower())
            yield Problem(
                key,
                what=redact(f"{word!r} is no space: {reason}"),
                remedy=f"{key}={FORMS}" if meant is None else _typed(key, meant),
                code="wrong-kind",
            )


def _typed(key: str, space: str) -> str:
    """A space as a shell takes it."""
    return shlex.quote(f"{key}={space}")


def _problems(override: Override, given: Sequence[str]) -> Iterator[Problem]:
    from hydra.core.override_parser.types import Glob, IntervalSweep, RangeSweep

    key = override.key_or_group
    value = override.value()
    if reserved := _reserved(key, given):
        yield reserved
    elif isinstance(value, Glob):
        yield Problem(
            key,
            what="a pattern is no space",
            remedy=f"list them: {_typed(key, 'choice(a,b)')}",
            code="unsupported",
        )
    elif isinstance(value, IntervalSweep | RangeSweep) and groups.is_group(key):
        options = ",".join(groups.group_options(key)[:4])
        yield Problem(
            key,
            what="is a group of options, and a range holds numbers",
            remedy=_typed(key, f"choice({options})"),
            code="wrong-type",
        )
    elif isinstance(value, IntervalSweep):
        yield from _of_interval(key, value)
    elif getattr(value, "tags", None):
        yield Problem(
            key,
            what="only an interval has a tag",
            remedy=_typed(key, "log(0.01,1)"),
            code="conflict",
        )
    elif isinstance(value, RangeSweep) and not [*value.range()]:
        start, stop = float(value.start or 0), float(value.stop or 0)
        yield Problem(
            key,
            what=f"the range from {start:g} to {stop:g} holds no values",
            remedy=_typed(key, f"range({stop:g},{start:g})" if stop < start else "range(1,9)"),
            code="out-of-range",
        )
    else:
        values = [*map(str, override.sweep_string_iterator())]
        if len({*values}) < len(values):
            yield Problem(key, what="lists a value twice", remedy=f"{key}=a,b", code="ambiguous")
        elif len(values) < LEAST:
            yield Problem(
                key,
                what="has one value: there is nothing to choose",
                remedy=f"{key}={FORMS}",
                code="not-enough",
            )


def _reserved(key: str, given: Sequence[str]) -> Problem | None:
    """The problem of a key that a search must not vary."""
    if key == "name":
        return Problem(
            key,
            what="names the study, and cannot be searched",
            remedy="name=STUDY",
            code="reserved",
        )
    if key in JUDGES:
        return Problem(
            key,
            what="judges the trials, and cannot be searched",
            remedy="--metric NAME:max",
            code="reserved",
        )
    if any(key == where or key.startswith(f"{where}.") for where in WHERE):
        return Problem(
            key,
            what="says where a run runs, and cannot be searched",
            remedy=f"{key}=VALUE for all trials",
            code="reserved",
        )
    if key in ("experiment", "experiment_name") and given.count("experiment_name") != 1:
        return Problem(
            key,
            what="names the folder and the experiment of the study, which is one",
            remedy="experiment_name=NAME for all trials",
            code="reserved",
        )
    if key == "experiment_name":
        return Problem(key, what="names the study's folder, which is one", code="reserved")
    return None


def _of_interval(key: str, interval: object) -> Iterator[Problem]:
    start, end = float(interval.start), float(interval.end)  # type: ignore[attr-defined]
    tags = {*interval.tags}  # type: ignore[attr-defined]
    if not (math.isfinite(start) and math.isfinite(end) and start < end):
        what = f"the interval from {start:g} to {end:g} holds no values"
        low, high = sorted((start, end)) if end < start else (0.01, 1.0)
        name = "log" if "log" in tags else "interval"
        yield Problem(
            key, what=what, remedy=_typed(key, f"{name}({low:g},{high:g})"), code="out-of-range"
        )
    elif "log" in tags and start <= 0:
        what = f"begins at {start:g}, which has no logarithm"
        low, high = (end / SPAN, end) if end > 0 else (0.01, 1.0)
        yield Problem(
            key, what=what, remedy=_typed(key, f"log({low:g},{high:g})"), code="out-of-range"
        )
    if unknown := tags - {"log"}:
        yield Problem(
            key,
            what=f"there is no tag {min(map(str, unknown))!r}",
            remedy=_typed(key, "log(0.01,1)"),
            code="wrong-choice",
        )


def _space(override: Override) -> Space:
    from hydra.core.override_parser.types import IntervalSweep, RangeSweep

    names = (override.key_or_group, override.get_key_element())
    value = override.value()
    if isinstance(value, IntervalSweep):
        assert value.start is not None
        assert value.end is not None
        whole = isinstance(value.start, int) and isinstance(value.end, int)
        log = "log" in value.tags
        return Space(*names, (), float(value.start), float(value.end), None, log, whole)
    if isinstance(value, RangeSweep):
        numbers = [*value.range()]
        whole = all(isinstance(number, int) for number in numbers)
        low, high = float(min(numbers)), float(max(numbers))
        return Space(*names, (), low, high, abs(float(value.step)), False, whole)
    return Space(*names, tuple(map(str, override.sweep_string_iterator())))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
