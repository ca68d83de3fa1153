"""The docstrings that stand below the attributes of a class, which Python itself does not keep."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import textwrap


def attribute_docs(kind: type, root: type) -> dict[str, str]:
    """The text below each annotated attribute of a class and of its bases up to `root`, by name.

    Each paragraph is one line. An attribute without a text is absent, as are all of a class whose
    source is not installed.
    """
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if issubclass(base, root):
            found |= _of_class(base)
    return found


def _of_class(kind: type) -> dict[str, str]:
    try:
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    except OSError:  # there is no source
        return {}
    assert isinstance(node, ast.ClassDef)
    found = {}
    for statement, following in itertools.pairwise(node.body):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            found[statement.target.id] = _one_line_each(str(following.value.value))
    return found


def _one_line_each(text: str) -> str:
    return "\n".join(" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
