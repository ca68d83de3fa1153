"""The architecture as rules: who may import whom, what loads no torch, which names stay, and where
tests are."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
import tomllib
from collections import Counter

from distdl.validation.kinds import locate
from tests import house
from tests.house import (
    CORE,
    FILES,
    INNER,
    LAYERS,
    ROOT,
    WITH_TORCH,
    imported,
    imports,
    package,
    trees,
)

LONGEST_CHAIN = {"core": 12, "all": 15}
HEAVY = ("torch", "torchvision", "lightning", "torchmetrics", "timm", "mlflow", "deepspeed")
FOR_LAUNCHERS = (
    "distdl.job",
    "distdl.util",
    "distdl.stores",
    "distdl.launchers.common",
    "distdl.launchers.queried_job",
    "distdl.launchers.deploying",
    "distdl.launchers.heartbeat",
)
# This machine's launcher runs the worker, or torch's agent, in its own process.
MORE_FOR_LAUNCHERS = {
    "distdl.launchers.local": ("distdl.ranks", "distdl.runs", "distdl.worker", "distdl.agent"),
    "distdl.launchers.common": ("distdl.runs",),
}
# Test files of `tests/unit` that prove no module, with what they prove.
OF_NO_MODULE = {
    "test_benchmarks": "the folder benchmarks/",
    "test_going_on": "tests/going_on.py",
    "test_docs": "the documents",
    "test_imports": "the rules of the house",
    "test_lightning_assumptions": "what Lightning does, for which distdl has no code",
    "test_lightnings_inside": "all packages: where each replaces something in Lightning",
    "test_makefile": "the Makefile",
    "test_speedrun": "the folder benchmarks/speedrun/",
    "test_website": "the folder website/",
}
# Written into the config.yaml and the requests of runs: a run of any age must find them.
PUBLIC = """
distdl.callbacks: EMAWeightAveraging Progress RecordSamples count_traffic.CountTraffic trace.Trace
distdl.data: StoredImages StoredObjects SyntheticImages SyntheticJpegs
distdl.launchers: azureml.launcher.AzureMLLauncher kubernetes.KubernetesLauncher
distdl.launchers: local.LocalLauncher mpi.MpiLauncher
distdl.launchers: sagemaker.SageMakerLauncher slurm.SlurmLauncher
distdl.models: Detector ImageClassifier torchvision_detector
distdl.optim: constant warmup_cosine warmup_linear warmup_step
distdl.strategies: DDPStrategy DeepSpeedStrategy FSDPStrategy LocalSGDStrategy PipelineStrategy
distdl.strategies: ModelParallelStrategy auto single
distdl.tasks: benchmark doctor predict test train validate
distdl.tracking: clearml.ClearMLLogger mlflow.MLflowLogger
"""


def test_imports_point_downwards():
    pairs = [(name, other) for name in INNER for other in imported()[name] if package(other)]
    order = LAYERS.index
    assert [(a, b) for a, b in pairs if order(package(b)) > order(package(a))] == []


def test_the_core_imports_no_tool():
    assert house.core_to_tools() == []
    callers = {name for name, _ in house.tools_by_name()}
    assert callers == {"distdl.worker.named_tools", "distdl.launch.would_fit"}


def test_the_documents_show_the_table_of_packages():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert house.table() in text, "put the output of `python -m tests.house` there"


def test_every_package_has_a_layer_and_one_sentence():
    assert {package(name) for name in INNER} == set(LAYERS)
    assert len(LAYERS) == len(set(LAYERS))
    packages = [path for path in FILES.values() if path.name == "__init__.py"]
    assert [path for path in packages if not ast.get_docstring(trees()[path])] == []


def test_every_package_is_in_the_wheel():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = {name for name, path in FILES.items() if path.name == "__init__.py"}
    assert packages - {*project["tool"]["setuptools"]["packages"]} == set()


def test_the_longest_chain_of_packages():
    lengths = {}
    for layer in LAYERS:  # lowest first
        below = {package(n) for name in INNER if package(name) == layer for n in imported()[name]}
        lengths[layer] = 1 + max((lengths[other] for other in below - {"", layer}), default=0)
    assert max(lengths[layer] for layer in CORE) <= LONGEST_CHAIN["core"], lengths
    assert max(lengths.values()) <= LONGEST_CHAIN["all"], lengths


def test_no_file_imports_itself_by_way_of_others():
    graphlib.TopologicalSorter(imported()).prepare()  # raises a CycleError


def test_light_packages_load_nothing_heavy():
    light = [name for name in FILES if package(name) in {"", *LAYERS} - {*WITH_TORCH}]
    light.remove("distdl.tools.torchx.scheduler")  # only torchx imports it, which is not here
    code = f"import importlib, sys\nfor name in {light}:\n    importlib.import_module(name)\n"
    command = [sys.executable, "-c", f"{code}print(sorted(set({HEAVY}) & set(sys.modules)))"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_launchers_stand_alone():
    plain = {*sys.stdlib_module_names, "distdl", "pydantic"}
    wrong = []
    for name in (n for n in FILES if package(n) == "launchers"):
        own = ".".join(name.split(".")[:3])  # `distdl.launchers.azureml` for all of its folder
        allowed = (*FOR_LAUNCHERS, own, *MORE_FOR_LAUNCHERS.get(own, ()))
        for other in imported()[name] - {"distdl", "distdl.launchers"}:
            if not any(f"{other}.".startswith(f"{each}.") for each in allowed):
                wrong.append(f"{name} imports {other}")
        at_the_top = imports(trees()[FILES[name]], lazy=False)
        wrong += [f"{name}: {other}" for other in at_the_top if other.split(".")[0] not in plain]
    assert wrong == []


def test_the_workers_half_never_composes():
    composing = {"distdl.config.compose", "distdl.config.groups"}
    composing |= {"hydra.main", "hydra.compose", "hydra.initialize"}
    heavy = [name for name in INNER if package(name) in house.WORKERS_HALF]
    assert [name for name in heavy if composing & set(imports(trees()[FILES[name]]))] == []


def test_contributing_draws_the_tree_as_it_is():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    source = text.split("src/distdl/\n")[1].split("\ntests/")[0]
    drawn = re.findall(r"^ {2,4}([a-z_]+)/(?= |$)", source, flags=re.M)
    rooms = {name.removeprefix("tools.") for name in LAYERS}
    assert sorted(drawn) == sorted(rooms - {"launchers"})


def test_the_readmes_tree_names_every_room():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    tree = text.split("## The tree\n")[1].split("## Examples")[0]
    rooms = {name.removeprefix("tools.") for name in LAYERS}
    assert rooms - {*re.findall(r"[a-z_]+", tree)} == set()


def test_names_in_the_configs_of_runs_stay():
    target = re.compile(r"_target_: (distdl\.\S+)")
    written = {n for p in ROOT.glob("conf/**/*.yaml") for n in target.findall(p.read_text())}
    lines = [line.split(": ") for line in PUBLIC.strip().splitlines()]
    public = {f"{package}.{name}" for package, names in lines for name in names.split()}
    assert written == public, "a run of any age must find what its config names"
    assert all(callable(locate(name)) for name in public)


def test_a_test_file_is_named_after_the_module_or_package_that_it_proves():
    unit = ROOT / "tests" / "unit"
    files = [path.relative_to(unit).with_suffix("") for path in unit.rglob("test_*.py")]
    named = {path: (*path.parts[:-1], path.name.removeprefix("test_")) for path in files}
    lost = [str(path) for path in files if ".".join(("distdl", *named[path])) not in FILES]
    assert sorted(lost) == sorted(OF_NO_MODULE), "tests/unit/<package>/test_<module>.py"


def test_a_class_name_occurs_once():
    nodes = [node for tree in trees().values() for node in ast.walk(tree)]
    names = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert [name for name, times in names.items() if times > 1] == []
