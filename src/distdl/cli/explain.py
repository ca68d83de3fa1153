"""`python -m distdl explain CODE`: what the code of a refusal means, what causes it, what helps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from distdl.cli.arguments import Parser
from distdl.util import table
from distdl.util.answers import Answer
from distdl.util.errors import UserError
from distdl.util.refusal_codes import CODES
from distdl.util.screen import say
from distdl.util.suggest import closest

RUN = "outputs/default/x"
LIST = "python -m distdl explain, which lists all of them"


@dataclass(frozen=True)
class Example:
    """A command that is refused so, where it is typed, and what to do about it.

    Args:
        command: Without `python -m distdl`.
        remedy: For all refusals with this code; the refusal itself names the words to type.
        where: What must be so before; empty: nothing.
    """

    command: str
    remedy: str
    where: str = ""


# tests/cli/test_explain.py runs all of them.
EXAMPLES = {
    "unknown-key": Example(
        "trainer.max_epoch=2", "type the name that is suggested; --cfg job prints all keys"
    ),
    "missing-key": Example("jobs status", "add what is named; --help of the command lists it"),
    "wrong-type": Example("trainer.devices=x", "write a value of the type that is named"),
    "wrong-choice": Example("jobs lst", "take one of the words that are listed"),
    "out-of-range": Example("doctor --expect 0", "choose a value inside the limits that are named"),
    "conflict": Example(
        "model.head=new dry_run=true", "leave one of the two out, or add what the first one needs"
    ),
    "not-found": Example("report outputs/nowhere", "check the path; jobs list shows all runs"),
    "not-writable": Example(
        "output_dir=/proc/runs", "choose another folder, or ask for the right to write there"
    ),
    "damaged-file": Example(
        f"jobs status {RUN}",
        "restore the file from a copy, or do what the refusal says to go on without it",
        f"somebody has changed {RUN}/config.yaml",
    ),
    "not-installed": Example(
        "tracking=comet dry_run=true", "install what is named: pip install 'distdl[comet]'"
    ),
    "unreachable": Example(
        "jobs cancel slurm://1",
        "try again where the platform can be reached: its own command says why it does not answer",
        "no Slurm answers",
    ),
    "platform-refuses": Example(
        "data check s3://nowhere-at-all/x",
        "sign in, or get the right that is named, and try again",
        "nobody is signed in to AWS",
    ),
    "not-trusted": Example(
        "model._target_=os.system dry_run=true",
        "type project.allow=[PACKAGE], if you would run code of whoever wrote that package",
    ),
    "hidden-module": Example(
        "dry_run=true", "rename your file", "a file random.py lies in the current folder"
    ),
    "exists-already": Example(
        f"report {RUN} --output notes.html",
        "choose another name, or remove what is there",
        "there is a file notes.html, which no report wrote",
    ),
    "under-way": Example(
        f"jobs ended {RUN}",
        "wait for it, or end it: python -m distdl jobs cancel RUN",
        f"{RUN} trains",
    ),
    "ambiguous": Example("seed=1,2", "say which one you mean; -m runs all of them"),
    "indivisible": Example(
        "strategy=pipeline trainer.devices=3 strategy.stages=2 trainer.accelerator=cpu",
        "choose one of the numbers that are listed",
    ),
    "not-enough": Example(
        "strategy=pipeline trainer.devices=1 trainer.accelerator=cpu",
        "give more of what is named, or ask for less",
    ),
    "mismatch": Example(
        "trainer.accelerator=cpu trainer.devices=4 +data.global_batch_size=98",
        "change one of the two so that they fit",
    ),
    "unsupported": Example(
        "strategy=single trainer.devices=2 trainer.accelerator=cpu", "choose what is suggested"
    ),
    "reserved": Example("doctor task=train", "leave it out, or set the key that is named"),
    "unreadable": Example(
        "--cfg job --resolve name=${nope}", "correct the value, or the file that is named"
    ),
    "wrong-kind": Example("output_dir=/dev/null/runs dry_run=true", "name what belongs there"),
    "incomplete": Example("--cfg job -p modle", "add the part that is missing, or name another"),
    "private": Example(
        "launcher=slurm data.root=https://me:secret@host/x dry_run=true",
        "keep the secret in an environment variable: ${oc.env:NAME} and launcher.forward_env",
    ),
    "unfit": Example(
        "doctor", "do what the row of the host says, then start again", "after `ulimit -n 200`"
    ),
    "failed": Example(
        "prepare my.images --source . --to out",
        "correct the error that is shown: it is one of your code, or of another program",
        "there is no module my.images",
    ),
    "refused": Example(
        "model=mine dry_run=true",
        "read the sentence: it is the only one that knows",
        "the class of model=mine has a check of its own, which names no code",
    ),
}


@dataclass(frozen=True)
class ExplainedCode:
    """A code of refusals."""

    code: str
    meaning: str
    example: str
    """A command that is refused so."""
    where: str
    """What must be so before the example is typed; empty: nothing."""
    remedy: str


@dataclass(frozen=True)
class ExplainedCodes:
    """What codes of refusals mean."""

    SCHEMA: ClassVar[str] = "explain/1"

    codes: Sequence[ExplainedCode]


def main(argv: Sequence[str]) -> Answer:
    """Explains one code, or lists all of them."""
    parser = Parser("python -m distdl explain", description=__doc__)
    parser.add_argument("code", nargs="?", metavar="CODE", help="as in `... [unknown-key]`; all")
    typed = parser.parse_args(argv).code
    if typed is None:
        table.show(("code", "means"), [*CODES.items()])
        return Answer(ExplainedCodes([explained(code) for code in CODES]))
    code = typed.strip("[]")
    if code not in CODES:
        near = closest(code, CODES)
        raise UserError.at(
            code,
            what="is not a code",
            remedy=f"did you mean: python -m distdl explain {near}" if near else LIST,
            code="wrong-choice",
        )
    found = explained(code)
    say(f"code     {found.code}: {found.meaning}")
    say(f"example  {found.example}")
    if found.where:
        say(f"where    {found.where}")
    say(f"remedy   {found.remedy}")
    return Answer(ExplainedCodes([found]))


def explained(code: str) -> ExplainedCode:
    example = EXAMPLES[code]
    command = f"python -m distdl {example.command}"
    return ExplainedCode(code, CODES[code], command, example.where, example.remedy)
