"""Answers the TAB key, through argcomplete: verbs, options, groups, keys, values and runs.

A shell asks at each TAB, so this process imports neither Hydra nor torch, nor pydantic, and PyYAML
only if a config file has changed. What it knows is in an index (`cli/completion_index.py`), which
is read and not executed. Files are recognised by their times.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from argcomplete import CompletionFinder
from argcomplete.lexers import split_line

from distdl.cli import config_files

VARIABLE = "_ARGCOMPLETE"  # set by the code of `distdl completion SHELL`
_SIGNS = ("++", "+", "~")
_MOST_RUNS = 500


class Finder(CompletionFinder):
    """Has argcomplete's protocol and quoting, and the words of `candidates`."""

    def __init__(self, *arguments: object, words: Sequence[str] = (), **options: object) -> None:
        super().__init__(*arguments, **options)  # type: ignore[arg-type]
        if words:  # argcomplete calls it a second time
            self.words = words

    def collect_completions(
        self,
        active_parsers: list[argparse.ArgumentParser],
        parsed_args: argparse.Namespace,
        cword_prefix: str,
    ) -> list[str]:
        found = candidates(self.words[1:], cword_prefix, config_files.index())
        # A name may come from somebody else, and a terminal would obey it.
        return [each for each in found if each.startswith(cword_prefix) and each.isprintable()]


def main() -> None:
    """Writes the completions for the line that the shell has put into variables, and exits."""
    point = int(os.environ["COMP_POINT"])
    words = split_line(os.environ["COMP_LINE"], point)[3]
    # It shall parse nothing: the words are looked at here.
    nothing = argparse.ArgumentParser(add_help=False, prefix_chars="\0")
    Finder(words=words or ["distdl"])(nothing)


def candidates(words: Sequence[str], prefix: str, index: Mapping[str, Any]) -> Iterable[str]:
    """What may stand at the end of a line.

    Args:
        words: Those before it, without the name of the command.
        prefix: What is there of the word already.
        index: See `completion_index`.
    """
    if "--" in words:  # the rest is a program's own
        return ()
    verbs = index["verbs"]
    verb = verbs.get(words[0]) if words else None
    if verb is None:
        parts = [_overrides(words, prefix, index), *([] if words else [verbs])]
        return _options(verbs[""], words, prefix) or [each for part in parts for each in part]
    typed = [*words[1:]]
    if inner := verb.get("verbs"):
        chosen = inner.get(typed[0]) if typed else None
        if chosen is None:
            return () if typed else inner
        verb, typed = chosen, typed[1:]
    return _options(verb, typed, prefix) or _words(verb, typed, prefix, index)


def _options(verb: Mapping[str, Any], words: Sequence[str], prefix: str) -> list[str]:
    """The options of a verb, or the values of one; empty where none can stand."""
    options = verb["options"]
    before = options.get(words[-1]) if words else None
    if before is not None and before["value"]:
        # Files, where no choices are known: the shell completes them.
        return [*before["choices"]] or [""]
    if not prefix.startswith("-"):
        return []
    name, given, _ = prefix.partition("=")
    if given:
        return [f"{name}={choice}" for choice in options.get(name, {}).get("choices", ())]
    return [*options, "--json"]


def _words(
    verb: Mapping[str, Any], words: Sequence[str], prefix: str, index: Mapping[str, Any]
) -> Iterable[str]:
    """What a verb takes besides options, at this place."""
    options = verb["options"]
    places = [
        word
        for before, word in zip(["", *words], words, strict=False)
        if not word.startswith("-") and not options.get(before, {}).get("value")
    ]
    kinds = verb["words"]
    if not kinds:
        return ()
    kind = kinds[min(len(places), len(kinds) - 1)]
    if len(places) >= len(kinds) and not kind["more"]:
        return ()
    found = [*kind["choices"], *(f"{name}=" for name in kind["settings"])]
    found += _next_words(kind["phrases"], places)
    if kind["runs"]:
        found += runs(index["runs"])
    if kind["overrides"]:
        found += _overrides(places, prefix, index)
    return found


def _next_words(phrases: Iterable[str], before: Sequence[str]) -> Iterator[str]:
    """The words that go on with a phrase, once each."""
    place = len(before)
    split = (phrase.split() for phrase in phrases)
    fitting = (words for words in split if words[:place] == [*before] and len(words) > place)
    yield from dict.fromkeys(words[place] for words in fitting)


def runs(folder: str) -> Iterator[str]:
    """The folders of runs below the folder of all runs, and of sweeps and their members, the newest
    first."""
    found = list[tuple[float, str]]()
    for group in _folders(folder):
        for run in _folders(group):
            if _is_run(run):
                found.append((os.stat(run).st_mtime, run))
            elif members := [each for each in _folders(run) if _is_run(each)]:
                found += [(os.stat(each).st_mtime, each) for each in (run, *members)]
    yield from (run for _, run in sorted(found, reverse=True)[:_MOST_RUNS])


def _is_run(folder: str) -> bool:
    return os.path.isdir(os.path.join(folder, "attempts"))


def _folders(folder: str) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [each.path for each in entries if each.is_dir()]
    except OSError:
        return []


# ------------------------------------------------------------ overrides


def _overrides(words: Sequence[str], prefix: str, index: Mapping[str, Any]) -> list[str]:
    """Groups and keys; behind a `=` options and values."""
    sign = next((each for each in _SIGNS if prefix.startswith(each)), "")
    bare = prefix.removeprefix(sign)
    key, given, value = bare.partition("=")
    groups = config_files.groups(index)
    if given:
        known = groups[key] if key in groups else index["values"].get(key, ())
        # The last one of several: callbacks=[default,ema
        done = value[: max(value.rfind(","), value.rfind("[")) + 1]
        return [f"{sign}{key}={done}{each}" for each in known]
    chosen = config_files.chosen(words, index)
    keys = {*index["keys"], *config_files.keys(chosen, index)}
    names = {f"{group}=" for group in groups} | _next_parts(keys, bare)
    return sorted(f"{sign}{name}" for name in names)


def _next_parts(keys: Iterable[str], typed: str) -> set[str]:
    """The next part of each key that begins with what is typed: `trainer.`, then
    `trainer.max_epochs=`."""
    matching = [key for key in keys if key.startswith(typed)]
    inner = {key.rpartition(".")[0] for key in keys}
    parts = set[str]()
    for key in matching:
        rest, dot, _ = key[len(typed) :].partition(".")
        name = f"{typed}{rest}"
        parts.add(f"{name}." if dot or name in inner else f"{name}=")
    # The shell would put a space behind the only one.
    only = next(iter(parts)) if len(parts) == 1 else ""
    return _next_parts(keys, only) if only.endswith(".") and only != typed else parts


def complete_and_exit() -> None:
    """As `main`; a mistake here must not write into a line that somebody types."""
    try:
        main()
    except Exception:  # a bug, too, completes nothing
        if os.environ.get("_ARC_DEBUG"):  # argcomplete's own variable
            raise
        sys.stderr = None
        os._exit(1)
