"""The packages of distdl and the arrows between them: `python -m tests.house` prints the table of
docs/architecture.md, and tests/unit/test_imports.py compares the two."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "distdl"

# Lowest first. A file imports from its own package and from lower ones, at the top and inside
# functions alike. Only those in WITH_TORCH import torch, Lightning or MLflow at the top.

# What a rank runs, and what starts ranks.
WORKERS_HALF = [
    "distributed",
    "images",
    "domains",
    "optim",
    "checkpoint",
    "tracking",
    "models",
    "data",
    "strategies",
    "loops",
    "callbacks",
    "worker",
    "tasks",
    "agent",
]
CORE = [
    "util",
    "job",
    "stores",
    "ranks",
    "config",
    "datasets",
    "runs",
    "incident",
    "health",
    "validation",
    "program",
    *WORKERS_HALF,
    "launchers",
    "launch",
]
# No training needs these, and the core never imports them.
TOOLS = [
    "tools",
    "tools.prepare",
    "tools.data_check",
    "tools.doctor",
    "tools.measure",
    "tools.serving",
    "tools.pages",
    "tools.report",
    "tools.compare",
    "tools.scaling",
    "tools.search",
    "tools.drill",
    "tools.torchx",
    "tools.editor",
    "tools.project",
]
LAYERS = [*CORE, *TOOLS, "cli"]
WITH_TORCH = [
    *WORKERS_HALF,
    "tools.doctor",
    "tools.measure",
    "tools.serving",
]
# Files of no package: the way in, and the names that stay valid.
TOP = ("__main__", "moved_names")


def name_of(path):
    """The dotted name of a file; a package's `__init__` has the name of its package."""
    below = path.relative_to(SOURCE if path.is_relative_to(SOURCE) else ROOT)
    return ".".join(["distdl", *below.with_suffix("").parts]).removesuffix(".__init__")


def package(name):
    """The package of a module, of which each tool is one: `util`, `tools.doctor`."""
    parts = name.split(".")[1:]
    if parts[:1] == ["tools"]:
        return ".".join(parts[:2])
    return parts[0] if parts else ""


FILES = {name_of(p): p for f in (SOURCE, ROOT / "launchers") for p in sorted(f.rglob("*.py"))}
INNER = [name for name in FILES if package(name) not in ("", *TOP)]


@cache
def trees():
    """The syntax tree of each file. Read when it is asked for: most tests need no tree."""
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES.values()}


def imports(tree, lazy=True):
    """Dotted names that a file imports; `from a import b` gives `a` and `a.b`. `lazy`: also those
    inside functions. Blocks under `if TYPE_CHECKING` never count."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            yield from (str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names))
        elif lazy or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from imports(node, lazy=lazy)


def files_imported(name):
    """Our own files that a file imports, without the packages that these lie in."""
    named = {n for n in imports(trees()[FILES[name]]) if n in FILES}
    return {n for n in named if not any(m.startswith(f"{n}.") for m in named)} - {name}


@cache
def imported():
    """What each file imports, without TOP: whoever may, imports those."""
    return {n: {o for o in files_imported(n) if package(o) not in TOP} for n in FILES}


def arrows():
    """Pairs of packages, of which the first imports from the second."""
    pairs = {(package(name), package(other)) for name in INNER for other in imported()[name]}
    return sorted((one, other) for one, other in pairs if other and one != other)


def core_to_tools():
    """Imports of a tool by a file of the core; the command line may import tools."""
    core = [name for name in INNER if package(name) in CORE]
    return [(a, b) for a in core for b in imported()[a] if package(b) in TOOLS]


def tools_by_name():
    """Tools that a file of the core calls by their names, each with the file."""
    found = set()
    for name in INNER:
        if package(name) in CORE:
            for node in ast.walk(trees()[FILES[name]]):
                text = node.value if isinstance(node, ast.Constant) else None
                if isinstance(text, str) and text in FILES and package(text) in TOOLS:
                    found.add((name, text))
    return found


def sentence(layer):
    """The first line of a package's docstring."""
    text = ast.get_docstring(trees()[FILES[f"distdl.{layer}"]]) or ""
    return text.splitlines()[0].rstrip(".:")


def table():
    """Markdown: what is in each package, and what it imports from, lowest first."""
    pairs = arrows()
    rows = ["| package | what is in it | imports from |", "|---|---|---|"]
    for layer in LAYERS:
        below = ", ".join(other for other in LAYERS if (layer, other) in pairs)
        rows.append(f"| `{layer}` | {sentence(layer)} | {below or 'nothing'} |")
    within = [pair for pair in pairs if {*pair} <= {*CORE}]
    total = (
        f"{len(LAYERS)} packages, {len(pairs)} arrows; "
        f"the core: {len(CORE)} packages, {len(within)} arrows; "
        f"imports of a tool by the core: {len(core_to_tools())}, "
        f"calls of one by its name: {len(tools_by_name())}"
    )
    return "\n".join([*rows, "", total + "."])


if __name__ == "__main__":
    print(table())
