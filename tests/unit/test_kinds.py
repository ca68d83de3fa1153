"""What a `_target_` may lead to: gadgets of allowed packages by which a config would run a command,
and what must stay possible."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from sample_config import in_process, refusals, sample

from distdl.util.errors import UserError
from distdl.validation import kinds
from distdl.validation.resolve import resolve
from distdl.validation.targets import Trust, problem_of
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


def node(target: str, *arguments: Any, **named: Any) -> dict[str, Any]:
    return {"_target_": target, **({"_args_": [*arguments]} if arguments else {}), **named}


CONTROLLER = "distdl.launchers.slurm.commands.run"
TOUCH = node(CONTROLLER, "touch", "{file}")
FROM_FILE = "lightning.pytorch.LightningModule.load_from_checkpoint"
GADGETS: dict[str, tuple[str, Any]] = {
    # The nine of the inspection.
    "collect_env.run": ("model.x", SHELL),
    "run_and_read_all": (
        "callbacks.x",
        node(f"{RUN}_and_read_all", run_lambda=LATER, command="{command}"),
    ),
    "controller": ("tracking.x", TOUCH),
    "torchrun": (
        "callbacks.x",
        node("torch.distributed.run.main", args=["--no-python", "touch", "{file}"]),
    ),
    "agent": ("task", node("distdl.worker.agent.run", ["-c", "{command}"])),
    "timm helpers": ("model.x", node("timm.models.helpers.load_state_dict", **PICKLED)),
    "timm _helpers": ("model.x", node("timm.models._helpers.load_state_dict", **PICKLED)),
    "cloud_io": ("model.x", node(CLOUD_IO, path_or_url="{pickle}", weights_only=False)),
    "TorchCheckpointIO": (
        "strategy.x",
        node(CHECKPOINT_IO, None, "{pickle}", weights_only=False),
    ),
    # What a function may be reached by, whatever the section.
    **{key: (key, SHELL) for key in ("optimizer", "schedule", "strategy", "data")},
    "profiler": ("trainer.profiler", SHELL),
    "launcher": ("launcher", node(CONTROLLER)),
    "within a launcher": ("launcher.env", {"X": TOUCH}),
    "load": ("model.x", node("torch.load", f="{pickle}", weights_only=False)),
    "hub": ("model.x", node("torch.hub.load", repo_or_dir="{hub}", model="m", source="local")),
    "a module's module": ("model.x", node("torch.hub.os.system", "{command}")),
    "a module of one's own": ("model.x", node("own_kinds.os.system", "x")),
    "re-exported": ("model.x", node("own_kinds.run", command="{command}")),
    "class method": ("model", node(FROM_FILE, **PICKLED)),
    "a callback's function": ("callbacks.x", node(LAMBDA, on_fit_start=LATER)),
    "not built by Hydra": (
        "model.x",
        node("torch.nn.Identity", _recursive_=False, inner=[1, {"deep": SHELL}]),
    ),
    "hydra": ("model.x", node("hydra.utils.get_method", path="os.system")),
    "interpolated": ("model.x", "${{oc.create:" + CREATED + "}}"),
    "interpolated twice": (
        "model.x",
        node("torchvision.models.resnet18", y=r"\${{oc.create:" + CREATED + "}}"),
    ),
    "create_model": (
        "model.x",
        node("timm.create_model", model_name="resnet10t", checkpoint_path="{pickle}"),
    ),
    "timm by position": (
        "model.x",
        node("timm.create_model", "resnet10t", False, None, None, "{pickle}"),
    ),
    "a folder's model": ("model.x", node("timm.create_model", model_name="local-dir:{hub}")),
    "a cache": ("data.x", node("torchvision.datasets.LSUNClass", root="{hub}")),
    "a graph's code": ("model.x", node("torch.fx.GraphModule", root={}, graph="x")),
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


@pytest.mark.parametrize(("path", "node"), GADGETS.values(), ids=GADGETS)
def test_no_gadget_runs(
    path: str, node: Any, traps: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = sample({path: filled(node, traps)})
    in_process(monkeypatch)
    problems = refusals(config)
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


PARTIAL = """
torch.optim.Adam torch.optim.lr_scheduler.ReduceLROnPlateau torchvision.models.get_model
torchvision.models.detection.ssd300_vgg16
"""
PLAIN = """
model.x=timm.models.resnet18 model.x=timm.layers.SelectAdaptivePool2d data.x=timm.data.Mixup
data.x=torchvision.transforms.v2.RandomHorizontalFlip data.x=torchvision.datasets.FakeData
strategy.x=lightning.pytorch.plugins.precision.MixedPrecision optimizer=timm.optim.Lars
strategy.x=torch.distributed.fsdp.CPUOffload schedule=distdl.optim.warmup_cosine
trainer.profiler=lightning.pytorch.profilers.PyTorchProfiler strategy=distdl.strategies.single
callbacks.x=lightning.pytorch.callbacks.ModelCheckpoint callbacks.x=own_kinds.Thing.make
callbacks.x=own_kinds.Thing tracking.x=distdl.tracking.mlflow.MLflowLogger
launcher=distdl.launchers.azureml.launcher.AzureMLLauncher
"""
GOOD: list[tuple[str, Any]] = [
    ("model.x", node("torch.nn.CrossEntropyLoss", weight={"_target_": "torch.ones"})),
    ("model.x", node("own_kinds.Linear", in_features=1, out_features=1)),
    ("data.x", node("torchvision.transforms.Compose", transforms=[])),
    ("strategy.x", node("datetime.timedelta", hours=1)),
    *(("model.x", node(target, _partial_=True)) for target in PARTIAL.split()),
    *((path, node(target)) for path, _, target in (row.partition("=") for row in PLAIN.split())),
]


@pytest.mark.parametrize(("path", "node"), GOOD, ids=lambda value: str(value)[:70])
def test_what_stays_possible(path: str, node: Any, traps: dict[str, str]) -> None:
    section, trust = path.split(".")[0], Trust((str(Path.cwd()),))
    config = OmegaConf.create({})
    OmegaConf.update(config, path, node, force_add=True)
    kinds.refuse({section: OmegaConf.to_container(config[section])}, trust)
    assert problem_of(node["_target_"], trust, tuple(path.split("."))) is None


def test_a_refusal_says_what_to_write(
    traps: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_process(monkeypatch)
    (message,) = refusals(sample({"callbacks.x": {"_target_": RUN, "command": "x"}}))
    assert message == (
        f"callbacks.x._target_: {RUN} is not a Callback of Lightning's, and callbacks takes nothing"
        " else\n    such as lightning.pytorch.callbacks.EarlyStopping; if you trust it: "
        f"project.allow=[{RUN}]"
    )
    node = {"_target_": "torch.hub.os.system"}
    message = refusals(sample({"callbacks.x": {"_target_": LAMBDA, "setup": node}}))[0]
    assert "torch.hub.os.system is Python's own posix.system, and not a layer" in message
    assert "project.allow" not in message


def test_what_is_allowed_may_be_anything(traps: dict[str, str]) -> None:
    values = {"model": {"x": {"_target_": RUN, "command": "x"}}}
    kinds.refuse(values, Trust(allow=(RUN,)))
    kinds.refuse(values, Trust(allow=("torch",)))
    with pytest.raises(UserError, match="model"):
        kinds.refuse(values, Trust(allow=("torch.nn",)))
