"""The codes of problems: the kind of each in a word, which stays when its sentence is reworded.

`Problem.code` holds one. It is shown at the end of the problem's line (`lrr: unknown key in the
config [unknown-key]`), and docs/troubleshooting.md shows the table. Whoever makes a problem and
knows its kind passes the code; any other problem gets the one that its own words say.
"""

from __future__ import annotations

import re

# What each one means.
CODES = {
    "unknown-key": "there is no such key, setting, argument or option",
    "missing-key": "a value that is needed was not given",
    "wrong-type": "another type of value belongs there",
    "wrong-choice": "only some words are accepted there",
    "out-of-range": "a number is too large or too small, or a text too long or too short",
    "conflict": "it does not go together with another value, or has no effect beside it",
    "not-found": "there is no such file, folder, run, checkpoint or job",
    "not-writable": "a file or folder cannot be written",
    "damaged-file": "a file is not what was written, or cannot be read as what it should be",
    "not-installed": "a package or program is missing on this machine",
    "unreachable": "a server, a host or a platform does not answer",
    "platform-refuses": "a platform or a server answers, and refuses",
    "not-trusted": "it would run code that you have not said you trust",
    "hidden-module": "a file of yours has the name of a module that other code imports",
    "refused": "any other reason: the sentence says it",
}
OTHER = "refused"

# What the words of a problem say; the first pattern that is found counts.
_FORMATS = "JSON|YAML|text in UTF-8|an index|a checkpoint"
_TYPES = "list|mapping|number|string|whole number|name of|valid|text"
_WORDS = {
    "damaged-file": rf"\bdamaged\b|is truncated|is not (?:{_FORMATS})\b",
    "not-writable": r"cannot be written|cannot write|may not write|No space left",
    "not-installed": r"not installed|needs the package|this machine has no |none on PATH",
    "not-trusted": r"outside the allowed packages|without running code|may run code",
    "unreachable": r"does not answer|did not answer|cannot be reached|no answer",
    "platform-refuses": r"(?:AWS|Azure|SageMaker|sbatch|Slurm|SDK) refuses|cannot sign you in",
    "hidden-module": r"^hides ",
    "unknown-key": (
        r"^unknown\b|^no option|no such (?:key|setting)|\bnot a setting\b|takes no argument"
        r"|is not an option|is neither a command nor"
    ),
    "not-found": r"^no such |there is no (?:such )?(?:file|folder|attempt|checkpoint)|^has no runs",
    "missing-key": r"^(?:is )?missing\b|needs a value|names no class",
    "out-of-range": (
        r"must be (?:\d|more|less|at most|at least|above|below)|is (?:less|more) than|below 0"
        r"|is not (?:from )?\d+ to"
    ),
    "wrong-choice": r"^no '|is not a mode|is not a kind of",
    "wrong-type": rf"^must be |is not (?:an? )?(?:{_TYPES})|not a mapping|is not true or false",
    "conflict": r"has no effect|is set too|contradicts|chosen twice|, but [a-z_]+\.[a-z_.]+",
}
_PATTERNS = {code: re.compile(pattern) for code, pattern in _WORDS.items()}


def of_words(what: str) -> str:
    """The code that a problem's sentence says, without its path."""
    return next((code for code, found in _PATTERNS.items() if found.search(what)), OTHER)
