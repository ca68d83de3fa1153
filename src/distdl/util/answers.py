"""What a command says to a program, with `--json`: JSON documents on stdout, one a line.

A verb returns an `Answer`. Its value is an instance of a dataclass, which is the schema, too: its
name and version are `SCHEMA`, and the texts below its fields are their descriptions. What the verb
prints for people goes to stderr then, and so does what its processes print.

The last line is the answer (`document`). Lines before it are events of what takes long.
"""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, TextIO

from distdl.util.errors import Problem
from distdl.util.strict_json import dumps

ANSWER = "answer/1"
EVENT = "event/1"


@dataclass(frozen=True)
class Answer:
    """What a verb found or did."""

    # An instance of a dataclass with a SCHEMA; or a function that makes it, which is called only if
    # a program listens.
    value: Any
    exit_code: int = 0
    problems: Sequence[Problem] = ()  # why a rank of the run has refused its input


class JsonStdout:
    """The stdout of this process, which has JSON alone until `close`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._replaced: TextIO | None = None
        sys.stdout.flush()
        try:
            number = sys.stdout.fileno()
        except io.UnsupportedOperation:  # a test has replaced it
            self._stream = self._replaced = sys.stdout
            sys.stdout = sys.stderr
            return
        self._number = number
        self._stream = os.fdopen(os.dup(number), "w", encoding="utf-8")
        os.dup2(sys.stderr.fileno(), number)  # also for the processes that this one starts

    def write(self, value: Mapping[str, object]) -> None:
        with self._lock:
            print(dumps(value, default=str), file=self._stream, flush=True)

    def close(self) -> None:
        if self._replaced is not None:
            sys.stdout = self._replaced
            return
        sys.stdout.flush()
        os.dup2(self._stream.fileno(), self._number)
        self._stream.close()


_output: JsonStdout | None = None


@contextmanager
def as_json() -> Iterator[JsonStdout]:
    """Within it, stdout has JSON alone, and `emit` writes events."""
    global _output
    _output = JsonStdout()
    try:
        yield _output
    finally:
        _output.close()
        _output = None


def listened() -> bool:
    """Whether a program reads what this command says."""
    return _output is not None


def emit(event: str, **fields: object) -> None:
    """Writes an event, if a program reads them."""
    if _output is not None:
        _output.write({"schema": EVENT, "event": event, **fields})


def document(
    command: str,
    answer: Answer | None,
    exit_code: int,
    outcome: str = "",
    problems: Sequence[Problem] = (),
) -> dict[str, object]:
    """The last line.

    Args:
        command: The verb, such as `jobs list`; `train` without one, `sweep` with -m.
        answer: None if the command was refused, or ended early.
        outcome: What became of a command that gives no answer: "nothing was started".
        problems: Why.
    """
    value = None
    if answer is not None:
        found = answer.value() if callable(answer.value) else answer.value
        value = {"schema": found.SCHEMA, **asdict(found)}
        problems = answer.problems
    return {
        "schema": ANSWER,
        "command": command,
        "exit_code": exit_code,
        "outcome": outcome,
        "problems": [each.record() for each in problems],
        "answer": value,
    }
