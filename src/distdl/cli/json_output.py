"""`--json`: what a command says on stdout, once for all of them (`util/answers.py`)."""

from __future__ import annotations

import itertools
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence

from distdl.cli.endings import CommandEnd, ending_of
from distdl.cli.schemas import ANSWERS
from distdl.ranks import environment
from distdl.util.answers import Answer, as_json, document
from distdl.util.errors import Problem, UserError
from distdl.util.exit_codes import EXIT_FAILURE

OPTION = "--json"
INSTEAD = ("-h", "--help", "--version")  # which print a text for people


def asked(arguments: Sequence[str]) -> bool:
    """Whether the command is to answer in JSON. What follows `--` is a program's own."""
    own = [*itertools.takewhile(lambda word: word != "--", arguments)]
    return OPTION in own and not {*INSTEAD} & {*own}


def without(arguments: Sequence[str]) -> list[str]:
    """The arguments without the first `--json`."""
    left = [*arguments]
    left.remove(OPTION)
    return left


def name_of(arguments: Sequence[str], verbs: Sequence[str]) -> str:
    """The command: a verb, `train`, or `sweep`."""
    first = arguments[0] if arguments else ""
    if first in verbs:
        both = " ".join(arguments[:2])
        return both if both in ANSWERS else first
    return "sweep" if {"-m", "--multirun"} & {*arguments} else "train"


def _unanswered(command: str) -> UserError:
    return UserError.at(
        OPTION,
        what=f"{command} has no answer for programs",
        remedy=f"leave {OPTION} out",
        code="unsupported",
    )


def main(arguments: Sequence[str], name: str, run: Callable[[list[str]], Answer | int]) -> int:
    """Runs a command, writes its answer, and returns its exit code.

    Args:
        arguments: Without `--json`.
        run: Runs the command, and prints for people.
    """
    with as_json() as output:
        try:
            if name not in ANSWERS:
                raise _unanswered(name)
            if started_by := environment.detect():
                raise UserError.at(
                    OPTION,
                    what=f"{started_by} has started several processes, of which one would answer",
                    remedy=f"python -m distdl ... {OPTION}",
                    code="unsupported",
                )
            answer = run([*arguments])
            if not isinstance(answer, Answer):  # it printed a help, or was Hydra's own
                raise _unanswered(shlex.join(("distdl", *arguments)))
            output.write(document(name, answer, answer.exit_code))
            return answer.exit_code
        except (UserError, KeyboardInterrupt) as error:
            ending = ending_of(error)
            print(ending.text, file=sys.stderr)
        except Exception as error:  # a program gets an answer, whatever happens
            traceback.print_exc()
            what = f"{type(error).__name__}: {error}"
            problems = (Problem("", what=what, code="failed"),)
            ending = CommandEnd(EXIT_FAILURE, what, "failed", problems)
        output.write(document(name, None, ending.exit_code, ending.outcome, ending.problems))
        return ending.exit_code
