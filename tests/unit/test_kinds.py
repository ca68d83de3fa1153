"""What a `_target_` may lead to: gadgets of allowed packages by which a config would run a command,
and what must stay possible."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from sample_config import sample

from distdl import kinds, validate
from distdl.binding import Binding
from distdl.errors import UserError
from distdl.resolve import resolve
from distdl.targets import Trust, problem_of
from tests.conftest import filled

RUN = "torch.utils.collect_env.run"
CLOUD_IO = "lightning.fabric.utilities.cloud_io._load"
CHECKPOINT_IO = "lightning.fabric.plugins.TorchCheckpointIO.load_checkpoint"
LAMBDA = "lightning.pytorch.callbacks.LambdaCallback"
# {command} makes the file {file}; {pickle} makes it when it is unpickled; {hub} when imported.
PICKLED = {"checkpoint_path": "{pickle}", "weights_only": False}
SHELL = {"_target_": RUN, "command": "{command}"}
LATER = {**SHELL, "_partial_": True}
CREATED = "{{_target_: " + RUN + ", command: '{command}'}}"

GADGETS: dict[str, tuple[str, Any]] = {
    # The nine of the inspection.
    "collect_env.run": ("model.x", SHELL),
    "run_and_read_all": (
        "callbacks.x",
        {"_target_": f"{RUN}_and_read_all", "run_lambda": LATER, "command": "{command}"},
    ),
    "controller": (
        "tracking.x",
        {"_target_": "distdl.launchers.slurm.commands.run", "_args_": ["touch", "{file}"]},
    ),
    "torchrun": (
        "callbacks.x",
        {"_target_": "torch.distributed.run.main", "args": ["--no-python", "touch", "{file}"]},
    ),
    "agent": ("task", {"_target_": "distdl.agent.run", "_args_": [["-c", "{command}"]]}),
    "timm helpers": ("model.x", {"_target_": "timm.models.helpers.load_state_dict", **PICKLED}),
    "timm _helpers": ("model.x", {"_target_": "timm.models._helpers.load_state_dict", **PICKLED}),
    "cloud_io": (
        "model.x",
        {"_target_": CLOUD_IO, "path_or_url": "{pickle}", "weights_only": False},
    ),
    "TorchCheckpointIO": (
        "strategy.x",
        {"_target_": CHECKPOINT_IO, "_args_": [None, "{pickle}"], "weights_only": False},
    ),
    # What a function may be reached by, whatever the section.
    "optimizer": ("optimizer", SHELL),
    "schedule": ("schedule", SHELL),
    "strategy": ("strategy", SHELL),
    "data": ("data", SHELL),
    "profiler": ("trainer.profiler", SHELL),
    "launcher": ("launcher", {"_target_": "distdl.launchers.slurm.commands.run"}),
    "within a launcher": (
        "launcher.env",
        {"X": {"_target_": "distdl.launchers.slurm.commands.run", "_args_": ["touch", "{file}"]}},
    ),
    "load": ("model.x", {"_target_": "torch.load", "f": "{pickle}", "weights_only": False}),
    "hub": (
        "model.x",
        {"_target_": "torch.hub.load", "repo_or_dir": "{hub}", "model": "m", "source": "local"},
    ),
    "a module's module": ("model.x", {"_target_": "torch.hub.os.system", "_args_": ["{command}"]}),
    "a module of one's own": ("model.x", {"_target_": "own_kinds.os.system", "_args_": ["x"]}),
    "re-exported": ("model.x", {"_target_": "own_kinds.run", "command": "{command}"}),
    "class method": (
        "model",
        {
            "_target_": "lightning.pytorch.LightningModule.load_from_checkpoint",
            "checkpoint_path": "{pickle}",
            "weights_only": False,
        },
    ),
    "a callback's function": ("callbacks.x", {"_target_": LAMBDA, "on_fit_start": LATER}),
    "not built by Hydra": (
        "model.x",
        {"_target_": "torch.nn.Identity", "_recursive_": False, "inner": [1, {"deep": SHELL}]},
    ),
    "hydra": ("model.x", {"_target_": "hydra.utils.get_method", "path": "os.system"}),
    "interpolated": ("model.x", "${{oc.create:" + CREATED + "}}"),
    "interpolated twice": (
        "model.x",
        {"_target_": "torchvision.models.resnet18", "y": r"\${{oc.create:" + CREATED + "}}"},
    ),
    "create_model": (
        "model.x",
        {"_target_": "timm.create_model", "model_name": "resnet10t", "checkpoint_path": "{pickle}"},
    ),
    "timm by position": (
        "model.x",
        {"_target_": "timm.create_model", "_args_": ["resnet10t", False, None, None, "{pickle}"]},
    ),
    "a folder's model": (
        "model.x",
        {"_target_": "timm.create_model", "model_name": "local-dir:{hub}"},
    ),
    "a cache": ("data.x", {"_target_": "torchvision.datasets.LSUNClass", "root": "{hub}"}),
    "a graph's code": ("model.x", {"_target_": "torch.fx.GraphModule", "root": {}, "graph": "x"}),
}


class Gadget:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


@pytest.fixture
def traps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What the gadgets use, in a project whose own module imports much."""
    file, pickled = tmp_path / "it_ran", tmp_path / "weights.pth"
    pickled.write_bytes(pickle.dumps(Gadget(file)))
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub/hubconf.py").write_text(f"open({str(file)!r}, 'w')\ndef m(): ...\n")
    (tmp_path / "own_kinds.py").write_text(
        "import os\nfrom torch.utils.collect_env import run\nfrom torch.nn import Linear\n"
        "class Thing:\n    @classmethod\n    def make(cls): ...\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_kinds", raising=False)
    return {
        "file": str(file),
        "command": f"touch {file}",
        "pickle": str(pickled),
        "hub": str(tmp_path / "hub"),
    }


def asked(config: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Both stages of validation, the child's work in this process."""

    def answer(request: str) -> dict[str, Any]:
        import json

        binding = Binding(json.loads(request))
        binding.run()
        return {"problems": binding.problems, "notes": binding.notes, "facts": binding.facts}

    monkeypatch.setattr(validate, "_ask_child", answer)
    try:
        validate.validate(config, None, local=True)
    except UserError as error:
        return [str(problem) for problem in error.problems]
    return []


@pytest.mark.parametrize(("path", "node"), GADGETS.values(), ids=GADGETS)
def test_no_gadget_runs(
    path: str, node: Any, traps: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = sample({path: filled(node, traps)})
    problems = asked(config, monkeypatch)
    assert any(problem.startswith(path.partition(".")[0]) for problem in problems), problems
    if not path.startswith("launcher"):  # no worker builds that
        with pytest.raises(UserError):
            kinds.refuse(resolve(config).values, Trust((str(Path.cwd()),)))
    assert not Path(traps["file"]).exists()


def test_the_gadgets_are_real(traps: dict[str, str]) -> None:
    kinds.locate(RUN)(traps["command"])
    assert Path(traps["file"]).exists()
    Path(traps["file"]).unlink()
    with pytest.raises(RuntimeError):  # afterwards: it holds no weights
        kinds.locate("torch.load")(traps["pickle"], weights_only=False)
    assert Path(traps["file"]).exists()


GOOD: list[tuple[str, Any]] = [
    ("model.x", {"_target_": "torch.nn.CrossEntropyLoss", "weight": {"_target_": "torch.ones"}}),
    ("model.x", {"_target_": "torch.optim.Adam", "_partial_": True}),
    ("model.x", {"_target_": "torch.optim.lr_scheduler.ReduceLROnPlateau", "_partial_": True}),
    ("model.x", {"_target_": "torchvision.models.get_model", "_partial_": True}),
    ("model.x", {"_target_": "torchvision.models.detection.ssd300_vgg16", "_partial_": True}),
    ("model.x", {"_target_": "timm.models.resnet18"}),
    ("model.x", {"_target_": "timm.layers.SelectAdaptivePool2d"}),
    ("data.x", {"_target_": "torchvision.transforms.v2.RandomHorizontalFlip"}),
    ("data.x", {"_target_": "torchvision.transforms.Compose", "transforms": []}),
    ("data.x", {"_target_": "torchvision.datasets.FakeData"}),
    ("data.x", {"_target_": "timm.data.Mixup"}),
    ("strategy.x", {"_target_": "datetime.timedelta", "hours": 1}),
    ("strategy.x", {"_target_": "lightning.pytorch.plugins.precision.MixedPrecision"}),
    ("strategy.x", {"_target_": "torch.distributed.fsdp.CPUOffload"}),
    ("trainer.profiler", {"_target_": "lightning.pytorch.profilers.PyTorchProfiler"}),
    ("callbacks.x", {"_target_": "lightning.pytorch.callbacks.ModelCheckpoint"}),
    ("callbacks.x", {"_target_": "own_kinds.Thing.make"}),
    ("callbacks.x", {"_target_": "own_kinds.Thing"}),
    ("model.x", {"_target_": "own_kinds.Linear", "in_features": 1, "out_features": 1}),
    ("tracking.x", {"_target_": "distdl.tracking.mlflow.MLflowLogger"}),
    ("optimizer", {"_target_": "timm.optim.Lars"}),
    ("schedule", {"_target_": "distdl.optim.warmup_cosine"}),
    ("strategy", {"_target_": "distdl.strategies.single"}),
    ("launcher", {"_target_": "distdl.launchers.azureml.launcher.AzureMLLauncher"}),
]


@pytest.mark.parametrize(("path", "node"), GOOD, ids=lambda value: str(value)[:70])
def test_what_stays_possible(path: str, node: Any, traps: dict[str, str]) -> None:
    kinds.refuse({path.split(".")[0]: _nested(path, node)}, Trust((str(Path.cwd()),)))
    assert problem_of(node["_target_"], Trust((str(Path.cwd()),)), tuple(path.split("."))) is None


def _nested(path: str, node: Any) -> Any:
    config = OmegaConf.create({})
    OmegaConf.update(config, path, node, force_add=True)
    return OmegaConf.to_container(config)[path.split(".")[0]]  # type: ignore[index,call-overload]


def test_a_refusal_says_what_to_write(
    traps: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (message,) = asked(sample({"callbacks.x": {"_target_": RUN, "command": "x"}}), monkeypatch)
    assert message == (
        f"callbacks.x._target_: {RUN} is not a Callback of Lightning's, and callbacks takes nothing"
        " else\n    such as lightning.pytorch.callbacks.EarlyStopping; if you trust it: "
        f"project.allow=[{RUN}]"
    )
    node = {"_target_": "torch.hub.os.system"}
    message = asked(sample({"callbacks.x": {"_target_": LAMBDA, "setup": node}}), monkeypatch)[0]
    assert "torch.hub.os.system is Python's own posix.system, and not a layer" in message
    assert "project.allow" not in message


def test_what_is_allowed_may_be_anything(traps: dict[str, str]) -> None:
    values = {"model": {"x": {"_target_": RUN, "command": "x"}}}
    kinds.refuse(values, Trust(allow=(RUN,)))
    kinds.refuse(values, Trust(allow=("torch",)))
    with pytest.raises(UserError, match="model"):
        kinds.refuse(values, Trust(allow=("torch.nn",)))
