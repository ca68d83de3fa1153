"""The code at the end of each problem: the table, its page, and which problem has which."""

from __future__ import annotations

import ast
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils.data import DataLoader, Dataset

import distdl.launchers.slurm.commands  # noqa: F401 - it has two classes of its own
from distdl.util import refusal_codes, typed
from distdl.util.errors import Absent, Damaged, NotSignedIn, Problem, Short, StoreError, UserError
from distdl.util.refusal_codes import CODES
from tests.house import ROOT, trees


def test_the_documents_show_the_table():
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    section = page.split("## Codes of refusals")[1].split("\n## ")[0]
    assert dict(re.findall(r"^\| `\[([a-z-]+)\]` \| (.+) \|$", section, flags=re.M)) == CODES


def classes(of: type[UserError] = UserError) -> dict[str, str]:
    """A class of refusals and those derived from it, with the code of all that each refuses; "" if
    each problem has its own."""
    found = {of.__name__: of.code}
    for derived in of.__subclasses__():
        found |= classes(derived)
    return found


CLASSES = {"Problem": "", "Refused": "", **classes()}
TEXTS = (ast.Constant, ast.JoinedStr)


def unnamed(tree: ast.AST, of_class: str = "") -> Iterator[ast.Call]:
    """The calls that make a refusal without naming its code, or by a text alone."""
    for node in ast.iter_child_nodes(tree):
        inner = of_class
        if isinstance(node, ast.Call):
            name, _, method = ast.unparse(node.func).partition(".")
            # `kind.at(...)`: a class that is chosen by what a platform has answered.
            chosen = method == "at" and isinstance(getattr(node.func, "value", None), ast.Name)
            inner = inner or CLASSES.get(name, "")
            code = CLASSES.get(name) or inner or "code" in {k.arg for k in node.keywords}
            makes = name in ("Problem", "Refused") or method == "at"
            text = [a for a in node.args if isinstance(a, TEXTS) or ast.unparse(a)[:4] == "str("]
            if (chosen or name in CLASSES) and not code and (makes or text):
                yield node
        yield from unnamed(node, inner)


def test_every_refusal_names_its_code():
    assert {name for name, code in CLASSES.items() if code} >= {"Damaged", "NoRight", "NotSignedIn"}
    calls = 0
    for path, tree in trees().items():
        where = path.relative_to(ROOT).as_posix()
        if where == "src/distdl/util/errors.py":
            continue
        missing = [f"{where}:{call.lineno}: {ast.unparse(call)}" for call in unnamed(tree)]
        assert not missing, "\n".join(missing)
        calls += sum(isinstance(node, ast.Call) for node in ast.walk(tree))
    assert calls > 10_000


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("raise UserError.at('a', 'is 3', 'write 4')", 1),
        ("raise UserError.at('a', 'is 3', 'write 4', code='out-of-range')", 0),
        ("yield Problem('a', what)", 1),
        ("raise Unfinished(Problem('a', what))", 1),
        ("raise UserError(f'{a} is wrong')", 1),
        ("raise UserError(str(error))", 1),
        ("raise kind.at('a', what)", 1),
        ("raise UserError(*problems)", 0),
        ("raise Unfit(*(Problem(a, b) for a, b in found))", 0),
        ("raise Refused('is 3', 'write 4')", 1),
    ],
)
def test_a_refusal_without_a_code_is_found(text, found):
    assert len([*unnamed(ast.parse(text))]) == found


def codes(value: ast.expr) -> Iterator[str]:
    """The codes that an expression may have: itself, or both branches of a conditional one."""
    if isinstance(value, ast.IfExp):
        yield from codes(value.body)
        yield from codes(value.orelse)
    elif isinstance(value, ast.Constant) and isinstance(value.value, str):
        yield value.value


def test_every_code_in_the_code_is_one_of_the_table():
    known = {*CLASSES.values(), *typed.CODE_OF_KIND.values(), refusal_codes.OTHER} - {""}
    for tree in trees().values():
        for node in ast.walk(tree):
            named = []
            if isinstance(node, ast.Call):
                named = [k.value for k in node.keywords if k.arg == "code"]
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "code":
                named = [node.value]
            known.update(code for value in named for code in codes(value))
    assert known <= {*CODES}
    assert {*CODES} <= known, "a code that no problem has"


def test_a_refusal_in_somebody_elses_code_needs_no_code():
    assert Problem("a.b", "no such folder").code == "refused"
    assert UserError("no such folder").problems[0].code == "refused"
    assert UserError.at("a.b", "no such folder").problems[0].code == "refused"


def test_a_desk_and_a_class_know_better():
    assert Problem("a", "is 3", code="out-of-range").code == "out-of-range"
    damaged = Damaged(Path("status.json"), "no such folder", "")
    assert [problem.code for problem in damaged.problems] == ["damaged-file"]
    assert NotSignedIn("nobody knows you").problems[0].code == "platform-refuses"


class Refusing(Dataset[int]):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        raise UserError.at("data.root", "is 3", "write 4", code="mismatch")


def test_a_refusal_in_a_loader_worker_keeps_its_code():
    with pytest.raises(UserError) as raised:
        next(iter(DataLoader(Refusing(), num_workers=1)))
    assert str(raised.value) == "data.root: is 3\n    write 4"
    assert [problem.code for problem in raised.value.problems] == ["mismatch"]
    assert pickle.loads(pickle.dumps(raised.value)).problems[0].code == "mismatch"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (StoreError("503", transient=True), "unreachable"),
        (StoreError("403", remedy="sign in"), "platform-refuses"),
        (StoreError("is odd"), "unreadable"),
        (Absent("has no a"), "not-found"),
        (Short("3 of 4 bytes", transient=True), "unreachable"),
    ],
)
def test_a_stores_error_has_a_code(error, code):
    assert error.code == code


def test_how_it_is_shown():
    remedy = "did you mean optimizer.lr?"
    error = UserError(Problem("lrr", "unknown key in the config", remedy, code="unknown-key"))
    assert str(error) == "lrr: unknown key in the config\n    did you mean optimizer.lr?"
    assert error.shown().splitlines() == [
        "distdl: 1 problem, nothing was started",
        "  lrr: unknown key in the config [unknown-key]",
        "      did you mean optimizer.lr?",
    ]
