"""The parser of every verb: what argparse refuses is reported like all other problems."""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn

from distdl.util.errors import Problem, UserError
from distdl.util.screen import fitted, terminal_width
from distdl.util.suggest import closest, did_you_mean_word

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

NO_OPTION = "unrecognized arguments: "
REQUIRED = "the following arguments are required: "
OF_ARGUMENT = re.compile(r"argument ([^:]+): (.*)", re.DOTALL)
CHOICE = re.compile(r"invalid choice: (.+?) \(choose from .*\)", re.DOTALL)
TYPE = re.compile(r"invalid (\w+) value: (.*)", re.DOTALL)
KINDS = {"int": "a whole number", "float": "a number"}


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises a UserError, with what to type instead, and prints no usage."""

    settings: Sequence[str] = ()  # names that the verb takes as words: serve.port=8081

    def format_help(self) -> str:
        """With the option of every verb, which `cli/main.py` takes away before a verb sees it."""
        return f"{super().format_help()}\nwith --json the answer is JSON, for programs\n"

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        """Fitted to the terminal, with the examples, which argparse prints as they are."""
        print(fitted(self.format_help(), terminal_width()), end="", file=file)

    def parse_known_args(  # type: ignore[override]  # argparse has overloads
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        self.words = [*(sys.argv[1:] if args is None else args)]
        return super().parse_known_args(self.words, namespace)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """As argparse's; the verb that was chosen tells which words it does not take."""
        parsed, rest = self.parse_known_args(args, namespace)
        if rest:
            self._chosen(parsed).error(NO_OPTION + " ".join(rest))
        return parsed

    def error(self, message: str) -> NoReturn:
        raise UserError(*self._problems(message))

    def _chosen(self, parsed: argparse.Namespace) -> Parser:
        """The parser of the verb that was typed; this one, if it has no verbs."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                verb: Parser = action.choices[getattr(parsed, action.dest)]
                return verb._chosen(parsed)
        return self

    def unknown(self, word: str) -> Problem:
        """The problem of a word that nothing here takes."""
        if not word.startswith("-"):
            return Problem(
                word,
                what=f"is one word too many for {self._verb()}",
                remedy=self.example(),
                code="unknown-key",
            )
        option = word.partition("=")[0]
        own = [n for n in self.settings if n.endswith(f".{option.strip('-').replace('-', '_')}")]
        near = f"{own[0]}=VALUE" if own else closest(option, self._options())
        return Problem(
            word,
            what=f"is not an option of {self._verb()}",
            remedy=f"did you mean: {near}" if near else f"{self.prog} --help",
            code="unknown-key",
        )

    def example(self) -> str:
        """What must be typed, and below it what may be."""
        required = [self.prog]
        optional = list[str]()
        for action in self._actions:
            if isinstance(action, argparse._HelpAction):
                continue
            named = "/".join(action.option_strings[:1])
            value = self._value(action)
            text = " ".join(part for part in (named, value) if part)
            (required if action.required else optional).append(text)
        lines = [" ".join(required)]
        if optional:
            lines.append(f"optional: {', '.join(optional)}")
        return "\n    ".join(lines)

    def _problems(self, message: str) -> Iterator[Problem]:
        if message.startswith(NO_OPTION):
            words = message.removeprefix(NO_OPTION).split()
            yield from (self.unknown(word) for word in self._without_values(words))
        elif message.startswith(REQUIRED):
            names = message.removeprefix(REQUIRED)
            before = itertools.takewhile(lambda word: word != "--", self.words)
            yield from (self.unknown(word) for word in before if self._is_unknown(word))
            yield Problem(
                self._verb(), what=f"missing: {names}", remedy=self.example(), code="missing-key"
            )
        elif found := OF_ARGUMENT.fullmatch(message):
            yield self._of_argument(found[1], found[2])
        else:
            # argparse has two others: one of several is required, or an option's beginning.
            code = "ambiguous" if message.startswith("ambiguous") else "missing-key"
            yield Problem(self._verb(), what=message, remedy=f"{self.prog} --help", code=code)

    def _of_argument(self, names: str, message: str) -> Problem:
        """The problem of one argument, which argparse names `-f/--follow`, or by its metavar."""
        name = names.split("/")[-1]
        action = next((a for a in self._actions if self._is_named(a, name)), None)
        choices = [str(choice) for choice in (action.choices if action else None) or ()]
        if (wrong := CHOICE.fullmatch(message)) and action:
            word = wrong[1].strip("'\"")
            path = name if name.startswith("-") else self._verb()
            return Problem(
                path,
                what=f"there is no {word!r}",
                remedy=did_you_mean_word(word, choices) or f"one of {', '.join(choices)}",
                code="wrong-choice",
            )
        if wrong := TYPE.fullmatch(message):
            return Problem(
                name,
                what=f"must be {KINDS.get(wrong[1], wrong[1])}, not {wrong[2]}",
                code="wrong-type",
            )
        if message.startswith("expected ") and action:
            value = self._value(action)
            return Problem(name, what="needs a value", remedy=f"{name} {value}", code="missing-key")
        return Problem(name, what=message, remedy=f"{self.prog} --help", code="conflict")

    def _is_unknown(self, word: str) -> bool:
        """Whether a word is an option that neither is nor begins the name of one."""
        option = word.partition("=")[0]
        known = any(name.startswith(option) for name in self._option_string_actions)
        return word.startswith("--") and not known

    def _is_named(self, action: argparse.Action, name: str) -> bool:
        return name in (*action.option_strings, action.metavar, action.dest)

    def _value(self, action: argparse.Action) -> str:
        """What stands for an argument's value; empty for a flag."""
        if action.nargs == 0:
            return ""
        verbs = isinstance(action, argparse._SubParsersAction)
        if action.metavar is not None and not verbs:
            return str(action.metavar)
        if action.choices is not None:
            return "|".join(str(choice) for choice in action.choices)
        return action.dest.upper()

    def _verb(self) -> str:
        """`jobs wait` for the program `python -m distdl jobs wait`."""
        return self.prog.partition("distdl ")[2] or "distdl"

    def _options(self) -> Iterable[str]:
        """The options of this parser and of its verbs."""
        yield "--json"
        yield from self._option_string_actions
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for verb in action.choices.values():
                    yield from verb._option_string_actions

    @staticmethod
    def _without_values(words: Sequence[str]) -> list[str]:
        """Without the values behind unknown options, which argparse lists as well."""
        options = [word for word in words if word.startswith("-")]
        return options or list(words)


def not_empty(text: str) -> str:
    """Refuses "", which an unset variable leaves and which Path takes for the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("is empty")
    return text
