"""The architecture as rules: who may import whom, what loads no torch, and which names stay."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "distdl"

# Lowest first. A file imports from its own package and from lower ones, at the top and inside
# functions alike. True: no file of the package imports torch, Lightning or MLflow at its top.
LAYERS = {
    "util": True,
    "job": True,
    "stores": True,
    "ranks": True,
    "config": True,
    "datasets": True,
    "runs": True,
    "validation": True,
    "distributed": False,
    "optim": False,
    "checkpoint": False,
    "tracking": False,
    "models": False,
    "data": False,
    "strategies": False,
    "callbacks": False,
    "worker": False,
    "benchmark": False,
    "tasks": False,
    "launchers": True,
    "launch": True,
    "planner": False,
    "data_check": True,
    "report": True,
    "scaling": True,
    "cli": True,
}
LONGEST_CHAIN = 12
# Names that stay: `python -m distdl`, `python -m distdl.agent`, and what users' own code imports.
ALIASES = ("__main__", "agent", "build", "errors", "ranges", "tailing")
HEAVY = ("torch", "torchvision", "lightning", "torchmetrics", "timm", "mlflow", "deepspeed")
FOR_LAUNCHERS = ("distdl.job", "distdl.util", "distdl.stores", "distdl.launchers.common")
# This machine's launcher runs the worker, or torch's agent, in its own process.
MORE_FOR_LAUNCHERS = {
    "distdl.launchers.local": ("distdl.ranks", "distdl.runs", "distdl.worker"),
    "distdl.launchers.common": ("distdl.runs",),
}
# Written into the config.yaml and the requests of runs: a run of any age must find them.
PUBLIC = """
distdl.callbacks.EMAWeightAveraging distdl.callbacks.Progress distdl.callbacks.RecordSamples
distdl.callbacks.count_traffic.CountTraffic distdl.callbacks.trace.Trace
distdl.data.StoredImages distdl.data.SyntheticImages distdl.data.SyntheticJpegs
distdl.launchers.azureml.launcher.AzureMLLauncher distdl.launchers.local.LocalLauncher
distdl.launchers.mpi.MpiLauncher
distdl.launchers.sagemaker.SageMakerLauncher distdl.launchers.slurm.SlurmLauncher
distdl.models.ImageClassifier
distdl.optim.constant distdl.optim.warmup_cosine distdl.optim.warmup_step
distdl.strategies.DDPStrategy distdl.strategies.DeepSpeedStrategy distdl.strategies.FSDPStrategy
distdl.strategies.LocalSGDStrategy distdl.strategies.PipelineStrategy
distdl.strategies.auto distdl.strategies.single
distdl.tasks.benchmark distdl.tasks.test distdl.tasks.train distdl.tasks.validate
distdl.tracking.clearml.ClearMLLogger distdl.tracking.mlflow.MLflowLogger
""".split()  # noqa: SIM905


def name_of(path: Path) -> str:
    """The dotted name of a file; a package's `__init__` has the name of its package."""
    below = path.relative_to(SOURCE if path.is_relative_to(SOURCE) else ROOT)
    return ".".join(["distdl", *below.with_suffix("").parts]).removesuffix(".__init__")


FILES = {name_of(p): p for f in (SOURCE, ROOT / "launchers") for p in sorted(f.rglob("*.py"))}


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
            assert not node.level, f"{path}: imports are absolute"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def files_imported(name: str) -> set[str]:
    """Our own files that a file imports, without the packages that these lie in."""
    named = {n for n in imports(FILES[name]) if n in FILES}
    return {n for n in named if not any(m.startswith(f"{n}.") for m in named)} - {name}


def package(name: str) -> str:
    return name.split(".")[1] if "." in name else ""


IMPORTED = {name: files_imported(name) for name in FILES}
INNER = [name for name in FILES if package(name) not in ("", *ALIASES)]


def test_imports_point_downwards() -> None:
    order = {layer: number for number, layer in enumerate(LAYERS)}
    upwards = [
        f"{name} imports {other}"
        for name in INNER
        for other in IMPORTED[name]
        if package(other) and order[package(other)] > order[package(name)]
    ]
    assert upwards == []


def test_an_alias_is_a_name_and_no_more() -> None:
    lines = {name: len(FILES[f"distdl.{name}"].read_text().splitlines()) for name in ALIASES}
    assert max(lines.values()) <= 10, lines
    from distdl import errors
    from distdl.util.errors import UserError

    assert errors.UserError is UserError


def test_every_package_has_a_layer_and_one_sentence() -> None:
    assert {package(name) for name in INNER} == set(LAYERS)
    packages = [n for n, path in FILES.items() if path.name == "__init__.py"]
    for name in packages:
        sentence = ast.get_docstring(ast.parse(FILES[name].read_text(encoding="utf-8")))
        assert sentence, f"{name}: say what belongs there"


def test_no_file_imports_itself_by_way_of_others() -> None:
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " -> ".join((*way, name))
        if name not in done:
            for other in IMPORTED[name]:
                visit(other, (*way, name))
            done.add(name)

    for name in FILES:
        visit(name, ())


def test_the_longest_chain_of_packages() -> None:
    below: dict[str, set[str]] = {layer: set() for layer in LAYERS}
    for name in INNER:
        below[package(name)] |= {package(n) for n in IMPORTED[name]} - {"", package(name)}

    @functools.cache
    def chain(layer: str) -> tuple[str, ...]:
        return (layer, *max((chain(other) for other in below[layer]), key=len, default=()))

    longest = max(map(chain, LAYERS), key=len)
    assert len(longest) <= LONGEST_CHAIN, " -> ".join(longest)


def test_light_packages_load_nothing_heavy() -> None:
    light = [n for n in FILES if LAYERS.get(package(n), package(n) == "")]
    code = (
        f"import importlib, sys\nfor name in {light}:\n    importlib.import_module(name)\n"
        f"print(sorted(set({HEAVY}) & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_launchers_stand_alone() -> None:
    plain = {*sys.stdlib_module_names, "distdl", "pydantic"}
    wrong = []
    for name in (n for n in FILES if package(n) == "launchers"):
        own = ".".join(name.split(".")[:3])  # `distdl.launchers.azureml` for all of its folder
        allowed = (*FOR_LAUNCHERS, own, *MORE_FOR_LAUNCHERS.get(own, ()))
        for other in IMPORTED[name] - {"distdl", "distdl.launchers"}:
            if not any(f"{other}.".startswith(f"{each}.") for each in allowed):
                wrong.append(f"{name} imports {other}")
        for other in imports(FILES[name], lazy=False):
            if other.partition(".")[0] not in plain:
                wrong.append(f"{name} imports {other} before it is used")
    assert wrong == []


def test_the_workers_half_never_composes() -> None:
    composing = {"distdl.config.compose", "hydra.main", "hydra.compose", "hydra.initialize"}
    half = list(LAYERS)[: list(LAYERS).index("launchers")]
    heavy = [name for name in INNER if package(name) in half and not LAYERS[package(name)]]
    assert [name for name in heavy if composing & set(imports(FILES[name]))] == []


def test_contributing_draws_the_tree_as_it_is() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    tree = text.split("## The house")[1].split("```")[1]
    source = tree.split("src/distdl/")[1].split("\ntests/")[0]
    drawn = re.findall(r"^ {2}([a-z_]+)/ ", source, flags=re.M)
    assert sorted(drawn) == sorted({*LAYERS} - {"job", "launchers"})


def test_names_in_the_configs_of_runs_stay() -> None:
    target = re.compile(r"_target_: (distdl\.\S+)")
    written = {n for p in ROOT.glob("conf/**/*.yaml") for n in target.findall(p.read_text())}
    assert written == set(PUBLIC), "a run of any age must find what its config names"
    for name in PUBLIC:
        module, _, attribute = name.rpartition(".")
        assert callable(getattr(importlib.import_module(module), attribute))


def test_what_lightnings_import_leaves_is_not_collected_again() -> None:
    code = (
        "import gc\n"
        "from distdl.util.imports import uncollected\n"
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
    assert name_of(SOURCE / "models" / "__init__.py") == "distdl.models"
    sample = tmp_path / "sample.py"
    sample.write_text(
        "import a.b\n"
        "if TYPE_CHECKING:\n    import never\n"
        "class C:\n    import inner\n"
        "def f():\n    from torch import nn\n"
    )
    assert set(imports(sample)) == {"a.b", "inner", "torch", "torch.nn"}
    assert set(imports(sample, lazy=False)) == {"a.b", "inner"}


def test_a_class_name_occurs_once() -> None:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in FILES.values()]
    named = [n.name for tree in trees for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
    assert [name for name, times in Counter(named).items() if times > 1] == []
    files = Counter(path.name for path in FILES.values())
    assert {name: files[name] for name in ("checks.py", "job.py", "agreement.py")} == {
        "checks.py": 0,
        "job.py": 1,
        "agreement.py": 1,
    }
