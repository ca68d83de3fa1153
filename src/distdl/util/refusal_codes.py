"""The codes of problems: the kind of each in a word, which stays when its sentence is reworded.

`Problem.code` holds one. It is shown at the end of the problem's line (`lrr: unknown key in the
config [unknown-key]`), and docs/troubleshooting.md shows the table. Whoever refuses something names
the code. A problem without one, as code of users may make it, gets the one that its words say.
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
    "exists-already": "something is there already, and would be lost",
    "under-way": "an attempt, a job or another command is still at work there",
    "ambiguous": "it can mean more than one thing, or is named twice",
    "indivisible": "a batch, or a number of devices, cannot be shared out evenly",
    "not-enough": "there is too little of it: disk, memory, samples, blocks or devices",
    "mismatch": "two things that belong together differ: data and model, weights and network",
    "unsupported": "this strategy, platform, task or machine cannot do it",
    "reserved": "distdl or the launcher sets it itself",
    "unreadable": "a file, a folder or a value cannot be read, resolved or counted",
    "wrong-kind": "it is something else than what belongs there: no run, job, address or number",
    "incomplete": "a part is missing in what was named: a folder, a file, a method, a setting",
    "private": "a secret, or what belongs to somebody else, would be used or sent",
    "unfit": "a rank, a host or a link of the job is not as it must be",
    "failed": "code of yours, or another program, was tried and failed",
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
        r"|is not (?:from )?\d+ to|, not (?:from|after|a probability|a number (?:from|of))"
    ),
    "wrong-choice": r"^no '|is not a mode|is not a kind of",
    "wrong-type": rf"^must be |is not (?:an? )?(?:{_TYPES})|not a mapping|not (?:true or|a whole)",
    "conflict": r"has no effect|is set too|contradicts|chosen twice|, but [a-z_]+\.[a-z_.]+",
    # What follows never changes the code of a sentence that the patterns above find.
    "exists-already": (
        r"\bexists\b|is not empty|holds (?:something else|another|other)|is not replaced"
        r"|would write to the same"
    ),
    "under-way": r"under way|is running|has not (?:ended|started)|at this moment|has taken over",
    "ambiguous": (
        r"\btwice\b|which one is meant|do they count|have the id|several values|choose one of them"
        r"|two (?:categories|labels)|each choose|names itself|a second time"
    ),
    "indivisible": r"does not divide|not divisible|cannot be divided|do not fill nodes",
    "not-enough": (
        r"fewer than|too few|too small|too short|has room for|are needed|needs at least"
        r"|at least two|has no GPU|lack of memory|are more than the|more than the|only one value"
    ),
    "unsupported": (
        r"does not (?:run|train|synchronise|mount|take)|needs a GPU|is for NVIDIA|applies only"
        r"|cannot (?:be (?:combined|split|swept|drilled|kept|gathered|saved|named|measured)|compile"
        r"|change|have another|choose|keep)|\bonly (?:for|stage|a|to|inside|when)\b"
        r"|is one (?:device|machine)|this one machine|trains on one device|takes (?:MLflow )?models"
        r"|returns several optimizers|wrong gradients|is lost under|slices|the ranks would"
        r"|would (?:send|change) |but the job runs|and the job runs|ends by itself|no longer has it"
    ),
    "reserved": r"is set by|is reserved|would replace distdl|distdl chooses|has its own",
    "unreadable": (
        r"cannot be (?:read|resolved|counted|listed|decoded|loaded)|cannot decode|is unknown"
        r"|(?:do|does) not see"
    ),
    "wrong-kind": (
        r"\b(?:is|are) not (?:an?|the|that of)\b|not the address|names no\b|of an unknown form"
        r"|is an? (?:file|link|section|strategy|datastore)\b"
    ),
    "incomplete": (
        r"\b(?:has|have|holds?) (?:no\b|none|neither|weights only)|is gone|\blacks?\b|has neither"
        r"|there (?:is|are) no\b|name the |does not (?:define|have)|is undefined|not set in"
        r"|(?:is|are) missing|will not have|must (?:return|set) one|is not (?:on|in) the"
    ),
    "private": (
        r"would leave this machine|refers to a secret|to another server|another user|cannot agree"
    ),
    "failed": (
        r"\bfails?\b|cannot (?:import|start|reach|use)|was killed|does not start|could not be"
        r"|Lightning refuses|can train; the last|--version"
    ),
    "mismatch": (
        r"another (?:network|run\b|result|config)|\bdiffer|was prepared (?:for|by)|do not fit"
        r"|here it is|on this machine it is|answers otherwise|has changed|was changed|wrote them"
        r"|see different|agrees with|\bis [^ ,]+, (?:but|and) |would make it another"
    ),
}
_PATTERNS = {code: re.compile(pattern) for code, pattern in _WORDS.items()}


def of_words(what: str) -> str:
    """The code that a problem's sentence says, without its path."""
    return next((code for code, found in _PATTERNS.items() if found.search(what)), OTHER)
