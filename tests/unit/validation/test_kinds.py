"""What a `_target_` may lead to: whose code, gadgets of allowed packages by which a config would
run a command, and what must stay possible."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest
import torch
import torchvision
from omegaconf import OmegaConf

from distdl.config.own_code import own_folders
from distdl.util.errors import UserError
from distdl.validation import kinds
from distdl.validation.resolve import resolve
from distdl.validation.targets import Trust, problem_of
from distdl.validation.validate import problems_of
from tests.conftest import filled
from tests.prepared import Gadget
from tests.unit.sample_config import node, problems, sample

RUN = "torch.utils.collect_env.run"
CONTROLLER = "distdl.launchers.slurm.commands.run"
LAMBDA = "lightning.pytorch.callbacks.LambdaCallback"
# {command} makes the file {file}; {pickle} makes it when it is unpickled; {hub} when imported.
PICKLED = {"checkpoint_path": "{pickle}", "weights_only": False}
SHELL = node(RUN, command="{command}")
LATER = {**SHELL, "_partial_": True}
CREATED = "{{_target_: " + RUN + ", command: '{command}'}}"
TOUCH = node(CONTROLLER, "touch", "{file}")
TIMM = "timm.create_model"
IO = "lightning.fabric.plugins.TorchCheckpointIO.load_checkpoint"
OUTSIDE = """
builtins.eval subprocess.Popen distdl_evil.Thing resnet50 torch.nn. a/b.c foobar.Baz
torch.nn.Module.__subclasses__
"""
GADGETS = [
    *(("model.x", node(name)) for name in [*OUTSIDE.split(), "a b", 7]),
    ("callbacks.x", node(f"{RUN}_and_read_all", run_lambda=LATER, command="{command}")),
    ("callbacks.x", node("torch.distributed.run.main", args=["--no-python", "touch", "{file}"])),
    ("callbacks.x", node(LAMBDA, on_fit_start=LATER)),
    ("tracking.x", TOUCH),
    ("task", node("distdl.agent.agent.run", ["-c", "{command}"])),
    ("model.x", node("timm.models._helpers.load_state_dict", **PICKLED)),
    ("strategy.x", node(IO, None, "{pickle}", weights_only=False)),
    # What a function may be reached by, whatever the section.
    *((key, SHELL) for key in ("model.x", "optimizer", "schedule", "strategy", "data")),
    ("trainer.profiler", SHELL),
    ("launcher", node(CONTROLLER)),
    ("launcher.env", {"X": TOUCH}),
    ("model.x", node("torch.load", f="{pickle}", weights_only=False)),
    ("model.x", node("torch.hub.load", repo_or_dir="{hub}", model="m", source="local")),
    ("model.x", node("torch.hub.os.system", "{command}")),
    ("model.x", node("own_kinds.os.system", "x")),
    ("model.x", node("own_kinds.run", command="{command}")),
    ("model", node("lightning.pytorch.LightningModule.load_from_checkpoint", **PICKLED)),
    ("model.x", node("torch.nn.Identity", _recursive_=False, inner=[1, {"deep": SHELL}])),
    ("model.x", node("hydra.utils.get_method", path="os.system")),
    ("model.x", "${{oc.create:" + CREATED + "}}"),
    ("model.x", node("torchvision.models.resnet18", y=r"\${{oc.create:" + CREATED + "}}")),
    ("model.x", node(TIMM, model_name="resnet10t", checkpoint_path="{pickle}")),
    ("model.x", node(TIMM, "resnet10t", False, None, None, "{pickle}")),
    ("model.x", node(TIMM, model_name="resnet10t", pretrained=True, cache_dir="{pickle}")),
    ("model.x", node(TIMM, model_name="local-dir:{hub}")),
    ("data.x", node("torchvision.datasets.LSUNClass", root="{hub}")),
    ("model.x", node("torch.fx.GraphModule", root={}, graph="x")),
]


@pytest.fixture
def traps(tmp_path, monkeypatch):
    """What the gadgets use, in a project whose own module imports much."""
    names = {"file": "it_ran", "pickle": "weights.pth", "hub": "hub"}
    traps = {key: str(tmp_path / name) for key, name in names.items()}
    file = tmp_path / "it_ran"
    (tmp_path / "weights.pth").write_bytes(pickle.dumps(Gadget(file)))
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub/hubconf.py").write_text(f"open({str(file)!r}, 'w')\ndef m(): ...\n")
    (tmp_path / "own_kinds.py").write_text(
        "import os\nfrom torch.utils.collect_env import run\nfrom torch.nn import Linear\n"
        "class Thing:\n    @classmethod\n    def make(cls): ...\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_kinds", raising=False)
    return {**traps, "command": f"touch {file}"}


@pytest.mark.parametrize(("path", "value"), GADGETS, ids=lambda value: str(value)[:70])
def test_no_gadget_runs(path, value, traps):
    changes = {path: filled(value, traps)}
    assert any(p.path.startswith(path.partition(".")[0]) for p in problems(changes))
    if not path.startswith("launcher"):  # no worker builds that
        with pytest.raises(UserError):
            kinds.refuse(resolve(sample(changes)).values, Trust((str(Path.cwd()),)))
    assert not Path(traps["file"]).exists()


# Beside what distdl's own options name.
GOOD = """
model.x=timm.layers.SelectAdaptivePool2d data.x=timm.data.Mixup data.x=torchvision.datasets.FakeData
data.x=torchvision.transforms.v2.RandomHorizontalFlip optimizer=timm.optim.Lars
strategy.x=lightning.pytorch.plugins.precision.MixedPrecision strategy.x=datetime.timedelta
strategy.x=torch.distributed.fsdp.CPUOffload callbacks.x=own_kinds.Thing.make
trainer.profiler=lightning.pytorch.profilers.PyTorchProfiler model.x=own_kinds.Linear
model.x=torch.optim.lr_scheduler.ReduceLROnPlateau model.x=torchvision.models.get_model
model.x=torchvision.models.detection.ssd300_vgg16 model.x=torch.ones
launcher=distdl.launchers.azureml.launcher.AzureMLLauncher
""".split()  # noqa: SIM905


@pytest.mark.parametrize("typed", GOOD)
def test_what_stays_possible(typed, traps):
    path, _, target = typed.partition("=")
    section = path.split(".")[0]
    trust = Trust((str(Path.cwd()),))
    config = OmegaConf.create({})
    OmegaConf.update(config, path, node(target), force_add=True)
    kinds.refuse({section: OmegaConf.to_container(config[section])}, trust)
    assert problem_of(target, trust, tuple(path.split("."))) is None


def test_a_refusal_says_what_to_write_and_what_is_allowed_may_be_anything(traps):
    (problem,) = problems({"callbacks.x": node(RUN, command="x")})
    assert problem.path == "callbacks.x._target_"
    assert f"{RUN} is not a Callback of Lightning's, and callbacks takes nothing" in problem.what
    allow = f"if you trust it: project.allow=[{RUN}]"
    assert problem.remedy == f"such as lightning.pytorch.callbacks.EarlyStopping; {allow}"
    problem = problems({"callbacks.x": node(LAMBDA, setup=node("torch.hub.os.system"))})[0]
    assert "torch.hub.os.system is Python's own posix.system, and not a layer" in problem.what
    assert "project.allow" not in problem.remedy
    values = {"model": {"x": node(RUN, command="x")}}
    kinds.refuse(values, Trust(allow=(RUN,)))
    kinds.refuse(values, Trust(allow=("torch",)))
    with pytest.raises(UserError, match="model"):
        kinds.refuse(values, Trust(allow=("torch.nn",)))


def test_allowed_by_name_or_in_the_users_project(tmp_path, monkeypatch):
    def refused(target, root=None, **changes):
        folders = own_folders(root) if root else None
        return problems_of(sample({"model._target_": target, **changes}), folders=folders)

    assert not refused("foo.bar.Baz", **{"project.allow": ["foo"]})
    (tmp_path / "package").mkdir()
    for name in ("mine.py", "package/net.py", "subprocess.py"):
        (tmp_path / name).touch()
    for target in ("mine.Model", "package.net.Model"):
        assert refused(target)
        assert not refused(target, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert not refused("mine.Model")
    assert refused("subprocess.Popen")


def test_published_weights_are_read_without_running_code(tmp_path, monkeypatch):
    """torchvision unpickles what has their name in $TORCH_HOME, and looks at no hash."""
    from distdl.worker.build import make

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    (tmp_path / "hub/checkpoints").mkdir(parents=True)
    file, ran = tmp_path / "hub/checkpoints/resnet18-f37072fd.pth", tmp_path / "ran"
    torch.save(Gadget(ran), file)
    network = node("torchvision.models.resnet18", weights="IMAGENET1K_V1")
    assert kinds.locate(network["_target_"])  # as the check of the targets does
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        make(OmegaConf.create(network))
    assert not ran.exists()
    torch.save(torchvision.models.resnet18().state_dict(), file)
    assert isinstance(make(OmegaConf.create(network)), torch.nn.Module)
