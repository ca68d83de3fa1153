"""What distdl replaces in objects of Lightning's and of the user's, and which private names of
Lightning's loops it uses, is in one table: docs/architecture.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import lightning.pytorch as pl
import pytest
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import Strategy

from distdl.loops.trainer import Trainer
from tests.conftest import ROOT

SOURCE = ROOT / "src/distdl"
ROW = re.compile(r"^\| `(?P<file>\S+\.py)` \| (?P<what>.+?) \| .+ \| `(?P<test>\S+)` \|$", re.M)
CLASSES = (Strategy, Logger, Profiler, Precision, pl.LightningModule, pl.LightningDataModule)
# Whatever `setattr` sets there is a value, not a method.
VALUES = {
    "tools/measure/step_profile.py": "setattr(large, name)",
    "callbacks/module_state.py": "setattr(layers[name], attribute)",
    "callbacks/resume_state.py": "setattr(part, count)",
    "loops/epoch_metrics.py": "setattr(metric, name)",
    "models/classifier.py": "setattr(module, name)",  # a layer
    "models/lora.py": "setattr(module.get_submodule(parent), attribute)",  # a layer
    "cli/completion_index.py": "setattr(argparse.ArgumentParser, name)",  # of no object of theirs
    "tracking/outbox.py": "setattr(self.state, kind)",
}
OF_ARGPARSE = ("tools/prepare/prepare.py", "options.to")


def table() -> dict[tuple[str, str], str]:
    """(file, what it replaces or uses) -> its test."""
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    return {
        (row["file"], what): row["test"]
        for row in ROW.finditer(text)
        for what in re.findall(r"`([^`]+)`", row["what"])
    }


def names_of(*owners: object) -> tuple[set[str], set[str]]:
    """The private names of some objects, and the names of their methods."""
    private, methods = set(), set()
    for owner in owners:
        kind = owner if isinstance(owner, type) else type(owner)
        names = {name for name in dir(owner) if not name.startswith("__")}
        private |= {name for name in names if name.startswith("_")}
        methods |= {name for name in names if callable(getattr(kind, name, None))}
    return private, methods


@pytest.fixture(scope="module")
def names() -> tuple[set[str], set[str]]:
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = Trainer(accelerator="cpu", **off)
    connectors = [
        value for value in vars(trainer).values() if "connector" in type(value).__name__.lower()
    ]
    fit = trainer.fit_loop
    loops = [fit, fit.epoch_loop, fit.epoch_loop.val_loop, trainer.predict_loop]
    private, methods = names_of(trainer, *connectors, *loops)
    return private, methods | names_of(*CLASSES)[1]


def found(tree: ast.AST, private: set[str], methods: set[str]) -> Iterator[str]:
    """What a file replaces or uses, as the table has it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                    if isinstance(each, ast.Attribute) and each.attr in methods:
                        yield "" if of_self(each) else ast.unparse(each)
        elif isinstance(node, ast.Attribute) and node.attr in private:
            yield "" if of_self(node) else ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
            owner, name = map(ast.unparse, node.args[:2])
            yield f"setattr({owner}, {name})"
        if isinstance(node, ast.Assign):
            yield from by_the_dictionary(node, methods)


def by_the_dictionary(node: ast.Assign, methods: set[str]) -> Iterator[str]:
    """The methods that `vars(x)["name"] = f` or `x.__dict__["name"] = f` replaces."""
    for target in node.targets:
        if not isinstance(target, ast.Subscript) or not isinstance(target.slice, ast.Constant):
            continue
        written = ast.unparse(target.value)
        into = re.fullmatch(r"vars\((.+)\)|(.+)\.__dict__", written)
        if into and target.slice.value in methods:
            yield f"{into[1] or into[2]}.{target.slice.value}"


def of_self(attribute: ast.Attribute) -> bool:
    return isinstance(attribute.value, ast.Name) and attribute.value.id in ("self", "cls")


def files() -> Iterator[tuple[str, ast.AST]]:
    for path in sorted(SOURCE.rglob("*.py")):
        yield path.relative_to(SOURCE).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def test_what_is_replaced_is_in_the_table(names) -> None:
    private, methods = names
    everywhere = set()
    for file, tree in files():
        used = set[str]() if file.startswith("loops/") else private
        everywhere |= {(file, what) for what in found(tree, used, methods) if what}
    everywhere -= {*VALUES.items(), OF_ARGPARSE}
    assert everywhere == table().keys()


def test_each_row_has_its_test() -> None:
    rows = table()
    assert len(rows) > 15
    missing = {test for test in rows.values() if not (ROOT / test).is_file()}
    assert not missing


def test_no_method_of_loops_or_connectors_is_replaced(names) -> None:
    """Not by what mypy would be told to ignore either."""
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    parts = names_of(trainer, trainer.fit_loop, trainer.fit_loop.epoch_loop)[1]
    of_parts = {what for _, what in table() if re.search(r"(trainer|loop|connector)\.\w+$", what)}
    assert {what.rpartition(".")[2] for what in of_parts} & parts == set()


def test_the_scan_sees_what_it_looks_for() -> None:
    text = "trainer.fit_loop.on_advance_end = f\nsetattr(x, 'y', f)\na = loop._skip_next_val\n"
    text += "vars(loop)['on_advance_end'] = f\nfit.__dict__['on_advance_end'] = f\n"
    seen = [*found(ast.parse(text), {"_skip_next_val"}, {"on_advance_end"})]
    assert sorted(seen) == [
        "fit.on_advance_end",
        "loop._skip_next_val",
        "loop.on_advance_end",
        "setattr(x, 'y')",
        "trainer.fit_loop.on_advance_end",
    ]
