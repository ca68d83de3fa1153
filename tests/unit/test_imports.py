"""Who may import whom (shared design, "Rooms"): what keeps start-up fast and the parts apart."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "distdl"
LAUNCHERS = ROOT / "launchers"

# Imported by the command line before anything runs: no torch and no Lightning, not even lazily.
LIGHT = [
    "atomic_files",
    "attempt",
    "checks",
    "compose",
    "config",
    "entry",
    "errors",
    "failures",
    "importing",
    "job",
    "lightning_1",
    "lightning_names",
    "own_code",
    "orphans",
    "processes",
    "ranges",
    "redact",
    "resolve",
    "resources",
    "run_directory",
    "run_files",
    "schema",
    "secret_shapes",
    "stopping",
    "suggest",
    "targets",
    "user_conf",
    "validate",
    "walltime",
    "words",
]
HEAVY = {
    "torch",
    "torchvision",
    "lightning",
    "pytorch_lightning",
    "lightning_fabric",
    "torchmetrics",
    "timm",
    "mlflow",
}
WORKER_SIDE = [
    "worker",
    "build",
    "environment",
    "optim",
    "tracking",
    "checkpoint",
    "tasks",
    "models",
    "data",
    "strategies",
    "callbacks",
]
HYDRA_MAIN = {"main", "compose", "initialize", "initialize_config_dir", "initialize_config_module"}


def imports(path: Path, *, lazy: bool = True) -> Iterator[str]:
    """Dotted names that a file imports; `from a import b` gives `a` and `a.b`.

    Args:
        lazy: Also those inside functions. Blocks under `if TYPE_CHECKING` never count.
    """

    def walk(node: ast.AST) -> Iterator[ast.AST]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if not lazy and isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            yield child
            yield from walk(child)

    for node in walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package_of(path)[: -node.level], *filter(None, [base])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def package_of(path: Path) -> list[str]:
    """The dotted name of a file as parts, with the file itself last (also for `__init__`)."""
    top = SOURCE if path.is_relative_to(SOURCE) else ROOT
    return ["distdl", *path.relative_to(top).with_suffix("").parts]


def name_of(path: Path) -> str:
    return ".".join(package_of(path)).removesuffix(".__init__")


def under(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def files_of(module: str) -> list[Path]:
    folder = SOURCE / module
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


def existing(modules: list[str]) -> list[Path]:
    return [path for module in modules for path in files_of(module) if path.is_file()]


def ids(path: Path) -> str:
    return name_of(path)


def test_the_modules_of_the_rules_exist() -> None:
    missing = [m for m in (*LIGHT, *WORKER_SIDE) if not any(p.is_file() for p in files_of(m))]
    assert missing == []


@pytest.mark.parametrize("path", existing(LIGHT), ids=ids)
def test_light_modules_import_nothing_heavy(path: Path) -> None:
    found = {name.partition(".")[0] for name in imports(path)} & HEAVY
    assert not found, f"{name_of(path)} imports {found}"


@pytest.mark.parametrize("path", existing(LIGHT), ids=ids)
def test_light_modules_import_only_light_ones_of_ours(path: Path) -> None:
    allowed = {f"distdl.{name}" for name in (*LIGHT, "conf")}
    ours = {".".join(name.split(".")[:2]) for name in imports(path, lazy=False)}
    modules = {name for name in ours if name.startswith("distdl.") and is_module(name)}
    assert modules <= allowed


def is_module(name: str) -> bool:
    return any(path.exists() for path in files_of(name.removeprefix("distdl.")))


@pytest.mark.parametrize("path", sorted(LAUNCHERS.rglob("*.py")), ids=ids)
def test_launchers_stand_alone(path: Path) -> None:
    for name in imports(path, lazy=False):
        plain = name.partition(".")[0] in {*sys.stdlib_module_names, "__future__", "pydantic"}
        own = under(name, place_of(path))
        ours = ("job", "errors", "processes", "walltime", "ranges", "stores", "launchers.common")
        allowed = any(under(name, f"distdl.{m}") for m in ours) or name == "distdl"
        assert plain or own or allowed, f"{name_of(path)} imports {name} at its top level"
    for name in imports(path):
        shared = name == "distdl.launchers" or under(name, "distdl.launchers.common")
        other = under(name, "distdl.launchers") and not shared
        assert not other or under(name, place_of(path)), f"{name_of(path)} imports {name}"
        # torchrun's agent is what "local" starts several ranks with.
        agent = path.stem == "local" and under(name, "torch.distributed")
        heavy = name.partition(".")[0] in {"torch", "lightning", "pytorch_lightning"}
        assert not heavy or agent or (path.stem == "local" and name == "torch"), name


def place_of(path: Path) -> str:
    """The launcher that a file belongs to: `distdl.launchers.azureml` for all of its folder."""
    return ".".join(name_of(path).split(".")[:3])


@pytest.mark.parametrize("path", existing(WORKER_SIDE), ids=ids)
def test_the_workers_side_never_launches_or_composes(path: Path) -> None:
    for name in imports(path):
        assert not under(name, "distdl.launchers"), f"{name_of(path)} imports {name}"
        assert name not in {f"hydra.{main}" for main in HYDRA_MAIN}, f"{name_of(path)}: {name}"
        assert not under(name, "distdl.compose"), f"{name_of(path)} imports {name}"


def test_only_the_command_line_knows_both_sides() -> None:
    both = []
    for path in sorted(SOURCE.rglob("*.py")):
        parts = package_of(path)
        if parts[1] in ("__main__", "commands", "launch"):
            continue
        names = set(imports(path))
        launches = any(under(name, "distdl.launchers") for name in names)
        works = any(under(n, f"distdl.{m}") for n in names for m in ("worker", "build", "tasks"))
        if launches and works:
            both.append(name_of(path))
    assert both == []


def test_validation_loads_neither_torch_nor_lightning() -> None:
    code = (
        "import sys, distdl.validate, distdl.schema, distdl.redact\n"
        "print(sorted({'torch', 'lightning', 'hydra', 'mlflow'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_what_lightnings_import_leaves_is_not_collected_again() -> None:
    code = (
        "import gc\n"
        "from distdl.importing import uncollected\n"
        "with uncollected():\n"
        "    assert not gc.isenabled()\n"
        "    import lightning.pytorch\n"
        "put_aside = gc.get_freeze_count()\n"
        "with uncollected():\n"
        "    assert gc.isenabled(), 'nothing is left to import'\n"
        "print(gc.isenabled(), put_aside > 100_000, gc.get_freeze_count() == put_aside)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "True True True"
    assert "leaked" not in shown.stderr, "libraries look for it when the process ends"


def test_the_walk_sees_what_it_should(tmp_path: Path) -> None:
    path = SOURCE / "models" / "__init__.py"
    assert name_of(path) == "distdl.models"
    assert place_of(LAUNCHERS / "azureml" / "cost.py") == "distdl.launchers.azureml"
    sample = tmp_path / "sample.py"
    sample.write_text(
        "import a.b\n"
        "if TYPE_CHECKING:\n    import never\n"
        "class C:\n    import inner\n"
        "def f():\n    from torch import nn\n"
    )
    found = set(imports(sample))
    assert found == {"a.b", "inner", "torch", "torch.nn"}
    assert set(imports(sample, lazy=False)) == {"a.b", "inner"}
