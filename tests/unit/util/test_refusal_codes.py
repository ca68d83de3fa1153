"""The code at the end of each problem: the table, its page, and which problem has which."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from distdl.util import errors, refusal_codes, typed
from distdl.util.errors import Damaged, NotSignedIn, Problem, UserError
from distdl.util.refusal_codes import CODES
from tests.house import ROOT, TREES


def test_the_documents_show_the_table():
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    section = page.split("## Codes of refusals")[1].split("\n## ")[0]
    assert dict(re.findall(r"^\| `\[([a-z-]+)\]` \| (.+) \|$", section, flags=re.M)) == CODES


def test_every_code_in_the_code_is_one_of_the_table():
    classes = [thing for thing in vars(errors).values() if isinstance(thing, type)]
    known = [c.code for c in classes if issubclass(c, UserError) and c.code]
    known += [code for code in typed.CODE_OF_KIND.values() if code]
    known += [*refusal_codes._WORDS, refusal_codes.OTHER]
    for tree in TREES.values():
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        keywords = [keyword for call in calls for keyword in call.keywords]
        named = [k.value for k in keywords if k.arg == "code" and isinstance(k.value, ast.Constant)]
        known += [value.value for value in named if isinstance(value.value, str) and value.value]
    assert {*known} <= {*CODES}
    assert {*CODES} <= {*known}, "a code that no problem has"


@pytest.mark.parametrize(
    ("what", "code"),
    [
        ("unknown key in the config", "unknown-key"),
        ("lightning's Trainer takes no argument 'lrr'", "unknown-key"),
        ("missing", "missing-key"),
        ("must be an integer, not 'abc'", "wrong-type"),
        ("must be 20 or more, not 3", "out-of-range"),
        ("20 is not 0 to 19", "out-of-range"),
        ("you may not write to /x", "not-writable"),
        ("is [1], not a mapping", "wrong-type"),
        ("no such folder", "not-found"),
        ("this checkpoint is damaged: it has 0 bytes", "damaged-file"),
        ("DeepSpeed is not installed", "not-installed"),
        ("Azure does not answer: timed out", "unreachable"),
        ("Azure refuses (403): no right", "platform-refuses"),
        ("os.system is outside the allowed packages (torch, your project's)", "not-trusted"),
        ("has no effect with strategy.outer=average", "conflict"),
        ("holds no optimizer states of ZeRO stage 1, 2 or 3", "incomplete"),
        ("e/r exists with another config:\n", "exists-already"),
        ("attempt 3 is running (node1, started 12:01)", "under-way"),
        ("has a.csv, b.csv: which one is meant?", "ambiguous"),
        ("data.batch_size=5 does not divide into 2 micro-batches", "indivisible"),
        ("20 training samples are fewer than one global batch", "not-enough"),
        ("/cache has room for 3 GB; the data needs 9 GB", "not-enough"),
        ("is 5, and the data have 10 classes (data.num_classes)", "mismatch"),
        ("w.pt holds the weights of another network than resnet50", "mismatch"),
        ("does not run on Apple's GPUs", "unsupported"),
        ("rank is reserved for the launcher", "reserved"),
        ("cannot be resolved: no key x", "unreadable"),
        ("is not a Slurm job", "wrong-kind"),
        ("keys.pem, and would leave this machine with the job", "private"),
        ("a training step fails here: shape", "failed"),
        ("crops each image to one size, and boxes are not cropped with it", "refused"),
    ],
)
def test_a_problem_without_a_code_has_that_of_its_words(what, code):
    assert Problem("a.b", what).code == code


def sentences() -> Iterator[str]:
    """What is written as the second argument of a Problem or of `at`, with X for values."""
    for tree in TREES.values():
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            named = ast.unparse(call.func)
            if (named == "Problem" or re.fullmatch(r"[A-Z]\w+\.at", named)) and len(call.args) > 1:
                text = call.args[1]
                parts = text.values if isinstance(text, ast.JoinedStr) else [text]
                words = [str(p.value) if isinstance(p, ast.Constant) else "X" for p in parts]
                if any(isinstance(part, ast.Constant) for part in parts):
                    yield "".join(words)


def test_few_sentences_say_only_that_they_refuse():
    written = [*sentences()]
    others = sorted({each for each in written if refusal_codes.of_words(each) == "refused"})
    assert len(written) > 300
    assert len(others) < len(written) / 5, "\n".join(others)


def test_a_desk_and_a_class_know_better():
    assert Problem("a", "is 3", code="out-of-range").code == "out-of-range"
    damaged = Damaged(Path("status.json"), "no such folder", "")
    assert [problem.code for problem in damaged.problems] == ["damaged-file"]
    assert NotSignedIn("nobody knows you").problems[0].code == "platform-refuses"


def test_how_it_is_shown():
    error = UserError(Problem("lrr", "unknown key in the config", "did you mean optimizer.lr?"))
    assert str(error) == "lrr: unknown key in the config\n    did you mean optimizer.lr?"
    assert error.shown().splitlines() == [
        "distdl: 1 problem, nothing was started",
        "  lrr: unknown key in the config [unknown-key]",
        "      did you mean optimizer.lr?",
    ]
