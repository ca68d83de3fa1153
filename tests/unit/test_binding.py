"""Stage 2: targets that cannot be imported, arguments that do not bind, by message.

The child's work runs in this process here, so that Lightning is imported once; two tests start the
real child.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hydra.utils
import pytest
import torch
from omegaconf import OmegaConf
from sample_config import in_process, refusals, sample

from distdl.job import Resources
from distdl.util.errors import Problem
from distdl.validation import validate as validation
from distdl.validation.meta import misfit
from distdl.validation.validate import check_bindings, problems_of
from distdl.worker import build

DEMOS = "lightning.pytorch.demos.boring_classes"


@pytest.fixture(autouse=True)
def second_stage(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "real_child" not in request.fixturenames:
        in_process(monkeypatch)


@pytest.fixture
def real_child() -> None:
    """Marks the tests that start the child."""


MINE = """
from typing import Literal

import lightning.pytorch as pl
from distdl.util.errors import Problem

class Plain:
    def __init__(self, width: int, mode: Literal["a", "b"] = "a", *, rate: float = 1.0): ...

class Model(pl.LightningModule):
    def __init__(self, width: int = 3, note: str | None = None, inner=None, **kwargs):
        super().__init__()
        self.kept = kwargs

    def training_step(self, batch): ...

    def configure_optimizers(self): ...

class Bare(pl.LightningModule): ...

class Stop(pl.callbacks.EarlyStopping):
    def __init__(self, extra: int = 1, **kwargs):
        super().__init__(monitor="x", **kwargs)

class Data(pl.LightningDataModule):
    def __init__(self, root: str, batch_size: int = 1, size=8):
        super().__init__()

    def train_dataloader(self): ...

    @staticmethod
    def check(config):
        assert config.get("size", 8) > 0
        yield Problem("root", f"no folder {config['root']}", "data.root=x")

def schedule(optimizer, steps_per_epoch: int, max_epochs: int, warmup: int = 0): ...

def sized(context_free: int = 0): ...

def _check(config, context):
    if context["world_size"] > 1:
        yield Problem("", f"one device, not {context['world_size']}", "strategy=ddp")

sized.check = _check

def broken_check(): ...

broken_check.check = lambda config: 1 / 0
"""


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    """A user's project with modules good and bad."""
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "failing.py").write_text("raise RuntimeError('no licence')\n")
    (tmp_path / "needy.py").write_text("import package_that_is_absent\n")
    yield tmp_path
    for name in ("mine", "failing", "needy"):
        sys.modules.pop(name, None)


LINEAR = {"_target_": "torch.nn.Linear", "in_features": 1, "out_features": 1}


def messages(
    changes: dict[str, Any], root: Path | None = None, size: Any = None, local: bool = True
) -> list[str]:
    found, _, _ = check_bindings(sample(changes), size, str(root) if root else None, local=local)
    return [str(problem) for problem in found]


def only(changes: dict[str, Any], root: Path | None = None, **options: Any) -> str:
    (message,) = messages(changes, root, **options)
    return message


def test_the_arguments_of_a_default_that_a_target_stands_on_are_one_problem() -> None:
    model = {"_target_": "lightning.pytorch.demos.BoringModel", **dict.fromkeys("abcd", 1)}
    assert only({"model": model}) == (
        "model: lightning.pytorch.demos.BoringModel takes no argument a, b, c, d\n"
        "    those of the default? under defaults in your file: - override /model: null"
    )


STEP_LR = {"_target_": "torch.optim.lr_scheduler.StepLR"}
CSV = {"_target_": "lightning.pytorch.loggers.CSVLogger"}
UNBOUND: list[tuple[str, Any, str]] = [
    ("optimizer.momentun", 0.9, "optimizer.momentun: torch.optim.SGD takes no argument"),
    ("optimizer.momentun", 0.9, "did you mean optimizer.momentum?"),
    ("optimizer.params", [], "optimizer.params: is passed by distdl or by position already"),
    ("optimizer.nesterov", "yes", "optimizer.nesterov: must be true or false, not 'yes'"),
    ("optimizer._args_", [0.1], "optimizer.lr: is passed by distdl or by position already"),
    ("trainer.max_epoch", 3, "trainer.max_epoch: lightning's Trainer takes no argument"),
    ("trainer.max_epoch", 3, "did you mean trainer.max_epochs?"),
    ("trainer.benchmark", "y", "trainer.benchmark: must be true or false or null, not 'y'"),
    ("strategy.find_unused", True, "did you mean strategy.find_unused_parameters?"),
    ("strategy.start_method", "x", "strategy.start_method: must be 'popen' or 'spawn'"),
    ("callbacks.early_stopping.patience", "3", "must be an integer, not '3'"),
    ("tracking.csv", CSV, "save_dir: missing"),
    ("schedule", STEP_LR, "step_size: missing"),
    ("model.width", 3, "model.width: "),
    ("model._target_", f"{DEMOS}.BorinModel", f"{DEMOS} has no 'BorinModel'"),
    ("model._target_", f"{DEMOS}.BorinModel", f"did you mean {DEMOS}.BoringModel?"),
    ("model._target_", "torch.optim.lr_scheduler", "is a module, no class or function"),
    ("model.x", {"_target_": "torch.nn.Linear"}, "missing, torch.nn.Linear needs it"),
    ("model._target_", "torch.nn.ReLU", "torch.nn.ReLU is not a LightningModule, and model"),
    ("data._target_", f"{DEMOS}.BoringModel", "BoringModel is not a LightningDataModule"),
    (
        "tracking.mine",
        {"_target_": "lightning.pytorch.loggers.Logger"},
        "Logger is abstract: it does not define log_hyperparams, log_metrics, name, version",
    ),
    ("model._target_", "timm.utils.jit.nosuch", "timm.utils.jit has no 'nosuch'"),
]


@pytest.mark.parametrize(("path", "value", "expected"), UNBOUND)
def test_what_does_not_bind(path: str, value: Any, expected: str) -> None:
    assert expected in "\n".join(messages({path: value}))


def test_kwargs_that_lightning_hands_to_ddp() -> None:
    assert messages({}) == []
    assert messages({"strategy.gradient_as_bucket_view": True, "strategy.bucket_cap_mb": 25}) == []


BUILT = [
    ("torchvision.models.resnet18", {"num_classes": 10}, ""),
    ("torchvision.models.resnet18", {"weights": "DEFAULT"}, ""),
    ("torchvision.models.resnet18", {"_partial_": True, "progress": False}, ""),
    (
        "torchvision.models.resnet18",
        {"num_clases": 10},
        "model.inner.num_clases: torchvision.models.resnet18: takes no argument 'num_clases'\n"
        "    did you mean model.inner.num_classes?",
    ),
    (
        "torchvision.models.resnet18",
        {"num_classes": "ten"},
        "model.inner: torchvision.models.resnet18: cannot be built: TypeError",
    ),
    ("timm.create_model", {"model_name": "resnet10t", "pretrained": True}, ""),
    ("timm.create_model", {"model_name": "vit_tiny_patch16_224"}, ""),
    (
        "timm.create_model",
        {"model_name": "resnet10t", "num_clases": 3},
        "did you mean model.inner.num_classes?",
    ),
    (
        "timm.create_model",
        {"model_name": "resnet10tt"},
        "model.inner.model_name: timm.create_model: timm has no model 'resnet10tt'\n"
        "    did you mean model.inner.model_name=resnet10t?",
    ),
]


@pytest.mark.parametrize(("target", "arguments", "expected"), BUILT)
def test_models_that_take_kwargs_are_built_without_memory(
    target: str, arguments: dict[str, Any], expected: str, project: Path
) -> None:
    inner = {"_target_": target, **arguments}
    found = messages({"model": {"_target_": "mine.Model", "inner": inner}}, project)
    assert expected in "\n".join(found) if expected else found == []


def test_models_are_built_on_the_meta_device(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Any] = []
    real = hydra.utils.instantiate
    monkeypatch.setattr(hydra.utils, "instantiate", lambda node: built.append(real(node)))
    assert misfit({"_target_": "torchvision.models.resnet18"}) is None
    assert {parameter.device.type for parameter in built[0].parameters()} == {"meta"}


def test_types_of_simple_annotations(project: Path) -> None:
    node = {"_target_": "mine.Plain", "width": 3}
    for good in ({}, {"rate": 1}, {"mode": "b"}):
        assert messages({"callbacks.x": {**node, **good}}, project) == []
    for bad, expected in (
        ({"width": 1.5}, "callbacks.x.width: must be an integer, not 1.5"),
        ({"width": True}, "callbacks.x.width: must be an integer, not true"),
        ({"rate": "1"}, "callbacks.x.rate: must be a number, not '1'"),
        ({"mode": "c"}, "callbacks.x.mode: must be 'a' or 'b', not 'c'"),
        ({"height": 3}, "it takes width, mode, rate"),
    ):
        assert expected in only({"callbacks.x": {**node, **bad}}, project)


def test_values_of_the_environment_are_not_printed(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAMPLE_WIDTH", "very-private")
    node = {"_target_": "mine.Plain", "width": "${oc.env:SAMPLE_WIDTH}"}
    message = only({"callbacks.x": node}, project)
    assert message == "callbacks.x.width: must be an integer, not ${oc.env:SAMPLE_WIDTH}"


def test_what_names_a_dtype_is_one(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "typed.py").write_text(
        "from __future__ import annotations\n"
        "import torch\n"
        "class Typed(torch.nn.Linear):\n"
        "    def __init__(self, kind: torch.dtype, other: torch.dtype | None = None,\n"
        "        name: str = '', loose=torch.half, either: torch.dtype | str = '', inner=None):\n"
        "        super().__init__(1, 1)\n"
        "        self.given = [kind, other, name, loose, either, inner and inner.weight.dtype]\n"
    )
    node: dict[str, Any] = {
        "_target_": "typed.Typed",
        "kind": "torch.float64",
        "other": "bfloat16",
        "name": "float32",
        "loose": "float64",
        "either": "float16",
        "inner": {**LINEAR, "dtype": "torch.float64"},
    }
    monkeypatch.syspath_prepend(project)
    double = torch.float64
    made = build.make(OmegaConf.create(node)).given
    assert made == [double, torch.bfloat16, "float32", double, "float16", double]
    wrong = {**node, "kind": "float23", "other": 32, "inner": None}
    text = "\n".join(messages({"callbacks.typed": wrong}, root=project))
    assert "callbacks.typed.kind: must be a dtype of torch, not 'float23'" in text
    assert "did you mean torch.float32?" in text and "callbacks.typed.other: must be" in text


def test_partial_and_unbuilt_nodes(project: Path) -> None:
    partial = {"_target_": "mine.Plain", "_partial_": True}
    assert messages({"callbacks.x": partial}, project) == []
    assert "takes no argument 'z'" in only({"callbacks.x": {**partial, "z": 1}}, project)
    inner = {"_target_": "mine.Plain"}
    outer = {"_target_": "mine.Model", "inner": inner}
    assert "model.inner.width: missing" in only({"model": outer}, project)
    assert messages({"model": {**outer, "_recursive_": False}}, project) == []
    inner["_target_"] = "mine.Plan"
    message = only({"model": {**outer, "_recursive_": False}}, project)
    assert "model.inner._target_: mine has no 'Plan'" in message
    assert "did you mean mine.Plain?" in message


def test_kwargs_follow_super_but_not_elsewhere(project: Path) -> None:
    assert messages({"model": {"_target_": "mine.Model", "whatever": 1}}, project) == []
    stop = {"_target_": "mine.Stop", "patience": 3}
    assert messages({"callbacks.x": stop}, project) == []
    message = only({"callbacks.x": {**stop, "pateince": 3}}, project)
    assert "did you mean callbacks.x.patience?" in message


def test_what_the_builder_supplies(project: Path) -> None:
    node = {"_target_": "mine.schedule"}
    assert messages({"schedule": node}, project) == []
    assert messages({"schedule": {**node, "interval": "step", "warmup": 1}}, project) == []
    found = "\n".join(messages({"callbacks.x": {**node, "interval": 1}}, project))
    assert "mine.schedule takes no argument 'interval'" in found
    assert "optimizer: is passed by distdl" in only({"schedule": {**node, "optimizer": 1}}, project)


UNIMPORTABLE = {
    "broken": ("def f(:\n", "SyntaxError", "broken.py, line 1"),
    "failing": ("raise RuntimeError('no licence')\n", "no licence", "failing.py, line 1"),
    "leaves": ("import sys\nsys.exit(0)\n", "SystemExit", "leaves.py, line 2"),
    # Which shows no traceback.
    "ends": ("import os\n\nos._exit(0)\n", "os._exit(0) would end Python", "ends.py, line 3"),
}


@pytest.mark.parametrize("name", UNIMPORTABLE)
def test_modules_that_cannot_be_imported(project: Path, name: str) -> None:
    text, error, line = UNIMPORTABLE[name]
    (project / f"{name}.py").write_text(text)
    message = only({"callbacks.x": {"_target_": f"{name}.f"}}, project)
    assert message.startswith(f"callbacks.x._target_: {name}.f cannot be imported: ")
    assert error in message and line in message


def test_absent_packages(project: Path) -> None:
    callbacks = {"x": {"_target_": "absent_package.Thing"}, "y": {"_target_": "needy.Thing"}}
    changes = {"project.allow": ["absent_package"], "callbacks": callbacks}
    first, second = messages(changes, project)
    assert "callbacks.x._target_: needs the package absent_package, which is not" in first
    assert "callbacks.y._target_: needs the package package_that_is_absent" in second
    problems, notes, _ = check_bindings(sample(changes), None, str(project), local=False)
    assert problems == []
    assert notes[0].startswith("not checked: callbacks.x._target_: package absent_package is not")


def test_what_no_job_takes_along_is_noted(
    project: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "helpers").mkdir()
    (elsewhere / "helpers/deep.py").write_text("")
    (project / "uses.py").write_text("import helpers.deep, wave\nclass Thing: ...\n")
    monkeypatch.syspath_prepend(str(elsewhere))  # as a package in editable mode is found
    what = f"helpers is imported from {elsewhere}, which no job takes along"

    def found(**launcher: Any) -> tuple[list[Problem], list[str]]:
        for name in ("uses", "helpers", "helpers.deep"):
            sys.modules.pop(name, None)
        changes = {f"launcher.{key}": value for key, value in launcher.items()}
        config = sample({"callbacks.x": {"_target_": "uses.Thing"}, **changes})
        problems, notes, _ = check_bindings(config, None, str(project), local=False)
        return [p for p in problems if p.path == "project.root"], notes

    noted = ([], [f"{what}: install it there, or choose project.root above both"])
    assert found() == noted
    # What only this shell's $PYTHONPATH leads to: a job has the bundle's.
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path_factory.mktemp('x')}{os.pathsep}{elsewhere}")
    (problem,), notes = found()
    assert problem.what.startswith(what) and notes == []
    assert found(before_srun=["export PYTHONPATH=/shared"]) == noted
    assert found(modules=["helpers"]) == noted
    package = elsewhere / "helpers-1.dist-info"
    package.mkdir()
    (package / "direct_url.json").write_text(json.dumps({"url": elsewhere.as_uri()}))
    assert found() == noted
    sys.modules.pop("uses")


def test_refused_targets_are_never_imported(project: Path) -> None:
    changes = {"callbacks.x": {"_target_": "failing.f"}, "model": {"_target_": "os.system"}}
    assert messages(changes, root=project.parent) == []
    assert "failing" not in sys.modules


def test_names_that_lead_to_pythons_own_modules() -> None:
    message = only({"callbacks.x": {"_target_": "torch.utils.data.dataloader.threading.Thread"}})
    assert "is Python's own threading.Thread" in message


def test_facts(project: Path) -> None:
    def fact(target: str) -> Any:
        return check_bindings(sample({"model": {"_target_": target}}), None, str(project))[2]

    assert fact("mine.Model") == {"model_configures_optimizers": True}
    assert fact("mine.Bare") == {"model_configures_optimizers": False}
    assert fact("mine.schedule") == {"model_configures_optimizers": None}


def test_checks_of_the_targets_themselves(project: Path) -> None:
    data = {"data": {"_target_": "mine.Data", "root": "nowhere"}}
    assert only(data, project) == "data.root: no folder nowhere\n    data.root=x"
    assert messages(data, project, local=False) == []
    strategy = {"strategy": {"_target_": "mine.sized"}}
    assert messages(strategy, project) == []
    message = only(strategy, project, size=Resources(devices=2))
    assert message == "strategy: one device, not 2\n    strategy=ddp"
    message = only({"strategy": {"_target_": "mine.broken_check"}}, project)
    assert "strategy: its own check failed: ZeroDivisionError" in message


def test_a_check_is_not_run_on_values_known_to_be_wrong(project: Path) -> None:
    data = {"data": {"_target_": "mine.Data", "root": "x", "size": "???"}}
    assert refusals(sample(data), project) == ["data.size: missing\n    write data.size=..."]


def _shipped() -> list[list[str]]:
    conf = Path(__file__).resolve().parents[2] / "conf"
    further = {
        "model/timm": ["model.network.model_name=resnet10t"],
        "data/imagenet": ["data.root={root}", "data.num_classes=2"],
        "experiment/resnet50_imagenet": ["data.root={root}", "data.num_classes=2"],
        "experiment/imagenette_cpu": ["data.root={root}", "data.num_classes=2"],
    }
    groups = ("callbacks", "data", "debug", "experiment", "model", "optimizer", "schedule")
    needy = ("model=classifier", "optimizer=none", "task=test")  # a network, or code of one's own
    options = [
        p for g in (*groups, "strategy", "task", "tracking") for p in (conf / g).glob("*.yaml")
    ]
    return [
        [f"{p.parent.name}={p.stem}", *further.get(f"{p.parent.name}/{p.stem}", [])]
        for p in sorted(options)
        if f"{p.parent.name}={p.stem}" not in needy
    ]


@pytest.mark.parametrize("overrides", _shipped(), ids=lambda overrides: overrides[0])
def test_every_shipped_option_binds(overrides: list[str], tmp_path: Path) -> None:
    from distdl.config.compose import compose

    for folder in ("train/a", "train/b", "val/a", "val/b"):
        (tmp_path / folder).mkdir(parents=True)
    config = compose([text.replace("{root}", str(tmp_path)) for text in overrides])
    stage_1 = problems_of(config, local=True)
    size = Resources(1, 2) if "pipeline" in overrides[0] else None
    stage_2, notes, _ = check_bindings(config, size, None, local=True)
    problems = [*map(str, stage_1), *map(str, stage_2)]
    # What is not a part of `all`, such as wandb, may be missing here.
    assert ([p for p in problems if "not installed" not in p], notes) == ([], [])


@pytest.mark.usefixtures("real_child")
def test_the_real_child_answers_through_noise(
    project: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (project / "noisy.py").write_text(
        "import os\nprint('noise')\nos.system('echo noise')\n\n\ndef f(x): ...\n"
    )
    answer = _child_of(project, "noisy.f", monkeypatch)
    assert [problem[:2] for problem in answer["problems"]] == [
        ["callbacks.x.x", "missing, noisy.f needs it"]
    ]
    assert "noise" not in capfd.readouterr().out


@pytest.mark.usefixtures("real_child")
def test_the_real_child_may_die(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "deadly.py").write_text("import os\nos.abort()\n")
    answer = _child_of(project, "deadly.f", monkeypatch)
    assert "ended Python (exit code -6)" in answer["problems"][0][1]


def _child_of(
    project: Path, target: str, monkeypatch: pytest.MonkeyPatch, of: str = "_ask_child"
) -> dict[str, Any]:
    """The real child, or this process itself, over a config of one callback without torch."""
    requests: list[str] = []
    empty: dict[str, Any] = {"problems": [], "notes": [], "facts": {}}
    ask = getattr(validation, of)
    with monkeypatch.context() as patch:
        patch.setattr(validation, "_ask_child", lambda text: requests.append(text) or empty)
        check_bindings(sample(), None, str(project))
    config = {"callbacks": {"x": {"_target_": target}}}
    return ask(json.dumps({**json.loads(requests[0]), "config": config}))  # type: ignore[no-any-return]


def test_an_optimizer_without_fused_kernels_takes_the_presets_null() -> None:
    node = {"_target_": "torch.optim.Rprop", "lr": 0.1, "fused": None}
    assert messages({"optimizer": node}) == []
    assert "optimizer.fused" in only({"optimizer": {**node, "fused": True}})


def test_an_import_that_goes_elsewhere(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "moves.py").write_text("import os\nos.chdir('/')\n\n\ndef f(): ...\n")
    monkeypatch.chdir(project)
    assert _child_of(project, "moves.f", monkeypatch, "_ask_here")["problems"] == []
    assert Path.cwd() == project
