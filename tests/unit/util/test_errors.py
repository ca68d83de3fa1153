"""The tree of exceptions at the top of util/errors.py, compared with the classes that there are."""

from __future__ import annotations

import ast
import builtins
import re

from distdl.util import errors
from tests.house import FILES, ROOT, SOURCE, trees

LINE = re.compile(r" *[*+] (?P<name>\w+)(?:: .*?)?(?: \((?P<place>\S+\.py): .+\))?")
HERE = "distdl/util/errors.py"


def drawn():
    """Name -> its parent's name and its place, of each line of the tree."""
    found = {}
    above = []
    for line in errors.__doc__.splitlines():
        if match := LINE.fullmatch(line):
            depth = (len(line) - len(line.lstrip())) // 2
            parent = above[depth - 1] if depth else ""
            above[depth:] = [match["name"]]
            found[match["name"]] = (parent, match["place"] or HERE)
    return found


def written():
    """The same of each exception class in the code; the parent is the first base."""
    classes = {}
    for path in FILES.values():
        place = path.relative_to(SOURCE.parent if path.is_relative_to(SOURCE) else ROOT).as_posix()
        for node in ast.walk(trees()[path]):
            if isinstance(node, ast.ClassDef) and node.bases:
                classes[node.name] = (ast.unparse(node.bases[0]).split(".")[-1], place)

    def is_exception(name):
        thing = getattr(builtins, name, None)
        if isinstance(thing, type) and issubclass(thing, BaseException):
            return True
        if name not in classes:
            return name.endswith(("Exception", "Error"))  # of a library
        parent = classes[name][0]
        return parent != name and is_exception(parent)

    return {name: entry for name, entry in classes.items() if is_exception(name)}


def test_the_tree_draws_every_exception_where_it_is():
    tree = drawn()
    code = written()
    assert {name: entry for name, entry in tree.items() if entry[0]} == code
    assert [name for name, (parent, _) in tree.items() if not parent and name in code] == []
