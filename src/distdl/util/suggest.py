"""Suggestions for misspelt names: decides what is close enough to mention."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from difflib import SequenceMatcher

_CLOSE = 0.65  # "lrr" and "lr" score 0.8, "epochs" and "max_epochs" 0.75, unrelated words below 0.6
_SWAPPED = 0.95  # of words in which two letters have changed places
_NUMBERS = 0.3  # the most that numbers reduce the similarity
_NUMBER = re.compile(r"[0-9]{1,9}")
_WILDCARD = re.compile(r"[*?\[]")
_OTHER_SECTION = 0.05  # of equal names, that in the section that the user wrote is preferred


def _ratio(left: str, right: str) -> float:
    """How similar two names are, from 0 to 1. Of names that differ in numbers only, those with near
    numbers are: resnet51 is more like resnet50 than like resnet18."""
    left = left.lower()
    right = right.lower()
    spelt = max(SequenceMatcher(None, left, right).ratio(), _SWAPPED * _is_swapped(left, right))
    words = _NUMBER.sub("#", left)
    numbers = [[*map(int, _NUMBER.findall(each))] for each in (left, right)]
    if words != _NUMBER.sub("#", right) or not numbers[0] or len(words.replace("#", "")) < 3:
        return spelt
    apart = max(abs(a - b) / max(a, b, 1) for a, b in zip(*numbers, strict=True))
    return max(spelt, 1 - _NUMBERS * apart)


def _is_swapped(left: str, right: str) -> bool:
    """Whether two neighbouring letters have changed places: modle, model."""
    apart = [at for at, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]]
    if len(left) != len(right) or len(apart) != 2 or apart[1] - apart[0] != 1:
        return False
    return left[apart[0]] == right[apart[1]] and left[apart[1]] == right[apart[0]]


def closest(word: str, choices: Iterable[str], least: float = _CLOSE) -> str:
    """The choice that is most similar to `word`, or "" if none is close: `least`, from 0 to 1."""
    scored = [(_ratio(word, choice), choice) for choice in choices if choice != word]
    score, choice = max(scored, key=lambda pair: pair[0], default=(0.0, ""))
    return choice if score >= least else ""


def did_you_mean_word(word: object, known: Iterable[str]) -> str:
    """`did you mean X?` for a word that is no path; "" if nothing is close."""
    near = closest(str(word), known)
    return f"did you mean {near}?" if near else ""


def closest_pattern(pattern: str, names: Iterable[str]) -> str:
    """The pattern of `fnmatch` that the user may have meant by one that fits none of the names, or
    "" if nothing is close: `layr[34].*` for `layer[34].*`, `layer1` for `network.layer1`, or the
    other way round."""
    known = [*names]
    outermost = {name.partition(".")[0] for name in known}
    _, _, within = pattern.partition(".")
    for moved in (within, *(f"{part}.{pattern}" for part in sorted(outermost))):
        if moved and not _WILDCARD.match(moved) and fnmatch.filter(known, moved):
            return moved
    literal = _WILDCARD.split(pattern)[0]
    wild = pattern[len(literal) :]
    if not wild:
        return closest(pattern, known)
    fits = re.compile(fnmatch.translate(wild)).match
    heads = {name[:end] for name in known for end in range(len(name)) if fits(name[end:])}
    near = closest(literal, heads)
    return f"{near}{wild}" if near else closest(pattern, known)


def did_you_mean(path: str, known: Iterable[str]) -> str:
    """Suggests the known config paths (at most two) that the user may have meant by `lrr` or
    `optimiser.lr`: "did you mean optimizer.lr?", or "" if nothing is close."""
    names = nearest(path, known)
    return f"did you mean {' or '.join(names)}?" if names else ""


def nearest(path: str, known: Iterable[str]) -> list[str]:
    """The paths of `did_you_mean` as a list, the nearest first; empty if nothing is close."""
    section, _, leaf = path.rpartition(".")
    scored: list[tuple[float, str]] = []
    for candidate in dict.fromkeys(name for name in known if name != path):
        candidate_section, _, candidate_leaf = candidate.rpartition(".")
        same = candidate_section == section
        score = _ratio(leaf, candidate_leaf) - (0 if same else _OTHER_SECTION)
        if section and not same:
            # The leaf alone would let `optimiser.lr` find any other section's `lr`.
            score = (score + _ratio(section, candidate_section)) / 2 + score / 10
        scored.append((score, candidate))
    best = max((score for score, _ in scored), default=0.0)
    if best < _CLOSE - _OTHER_SECTION:
        return []
    return [name for score, name in scored if best - score < 0.01][:2]


_SPELT = {
    **dict.fromkeys(("none", "null", "nil"), None),
    **dict.fromkeys(("yes", "on", "true"), True),
    **dict.fromkeys(("no", "off", "false"), False),
}


def respelt(value: object) -> object:
    """The value that a user probably meant by 3.0, '3', 'None' or 'yes'; else the value itself. The
    caller checks whether it is valid."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str):
        word = value.strip().strip("'\"").lower()
        if word in _SPELT:
            return _SPELT[word]
        with suppress(ValueError, OverflowError):
            number = float(word)
            return respelt(number) if number % 1 == 0 else number
    return value


_NAME = re.compile(r"[A-Za-z_][\w./-]*")


def meanings(value: object) -> Iterator[object]:
    """Other values that a user may have meant: `respelt`, then a list with a name in it."""
    meant = respelt(value)
    if repr(meant) != repr(value):
        yield meant
    elif isinstance(value, str) and _NAME.fullmatch(value):
        yield [value]


def plain_text(value: object) -> str:
    """A plain value in YAML, or a list of such."""
    if isinstance(value, list):
        return f"[{', '.join(map(plain_text, value))}]"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def written(path: str, value: object) -> str:
    """The override that sets a plain value."""
    return f"{path}={plain_text(value)}"
