"""The codes of problems: the kind of each in a word, which stays when its sentence is reworded.

`Problem.code` holds one. It is shown at the end of the problem's line (`lrr: unknown key in the
config [unknown-key]`), and docs/troubleshooting.md shows the table. Whoever refuses something names
the code. A problem without one, as code of users may make it, has `OTHER`.
"""

from __future__ import annotations

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
