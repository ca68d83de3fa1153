"""Stage 2 of validation: what cannot be imported, arguments that do not bind, and what Lightning's
Trainer takes. Stage 1 refuses what tests/cli/test_refusals.py types."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torchvision
from omegaconf import OmegaConf

from distdl.config.compose import compose
from distdl.config.hints.words import TRAINER_OWNED
from distdl.job import Resources
from distdl.validation.resolve import resolve
from distdl.validation.validate import check_bindings, problems_of
from distdl.worker import build
from tests import drawn_coco
from tests.conftest import ROOT
from tests.unit.sample_config import change, check_parts, node, problems, rows, sample

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
def curious(): ...
curious.check = lambda config, context: [Problem("", f"{context['refused']} are refused")]
"""
TYPED = """
from __future__ import annotations
import torch
class Typed(torch.nn.Linear):
    def __init__(self, kind: torch.dtype, other: torch.dtype | None = None,
        name: str = '', loose=torch.half, either: torch.dtype | str = '', inner=None):
        super().__init__(1, 1)
        self.passed = [kind, other, name, loose, either, inner and inner.weight.dtype]
"""
FILES = {
    "mine": MINE,
    "typed": TYPED,
    "needy": "import package_that_is_absent\n",
    "broken": "def f(:\n",
    "leaves": "import sys\nsys.exit(0)\n",
    "ends": "import os\n\nos._exit(0)\n",
    "moves": "import os\nos.chdir('/')\n\n\ndef f(): ...\n",
    "noisy": "import os\nprint('noise')\nos.system('echo noise')\n\n\ndef f(x): ...\n",
    "deadly": "import os\nos.write(2, b'last words')\nos.abort()\n",
    "uses": "import helpers.deep, wave\nclass Thing: ...\n",
}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A user's project with modules good and bad."""
    folder = tmp_path_factory.mktemp("project")
    for name, text in FILES.items():
        (folder / f"{name}.py").write_text(text)
    yield folder
    for name in FILES:
        sys.modules.pop(name, None)


def inner(target, **arguments):
    """A model of the user's with a part."""
    return node("mine.Model", inner=node(target, **arguments))


NAMES = {
    "inner": inner,
    "plain": lambda **more: node("mine.Plain", **{"width": 3, **more}),
    "resnet": lambda **more: inner("torchvision.models.resnet18", **more),
    "ours": lambda **more: node(
        "distdl.models.ImageClassifier", network=node("torchvision.models.resnet18"), **more
    ),
    "timm": lambda name, **more: inner("timm.create_model", model_name=name, **more),
    "DEMOS": "lightning.pytorch.demos.boring_classes",
    "LOGGERS": "lightning.pytorch.loggers",
}
# A value | what is read, part after part; nothing, where it binds.
VALUES = """
optimizer.nesterov = "yes" | optimizer.nesterov: must be true or false, not 'yes'
optimizer.weight_decay = "1e-4x" | optimizer.weight_decay: must be a number or a tensor, not '1e-4x'
optimizer.class_path = "a.B" | optimizer.class_path: | LightningCLI's: write optimizer._target_=a.B
optimizer._args_ = [0.1] | optimizer.lr: is passed by distdl or by position already
optimizer = node("torch.optim.Rprop", lr=0.1, fused=True) | optimizer.fused
model = node("mine.Model", note=3) | model.note: must be a string or null, not 3
tracking.csv = node(f"{LOGGERS}.CSVLogger") | save_dir: missing | write tracking.csv.save_dir=...
tracking.x = node(f"{LOGGERS}.Logger") | is abstract: it does not define log_hyperparams, log_met
model = node(f"{DEMOS}.BoringModel", a=1, b=1, c=1, d=1) | model: | takes no argument a, b, c, d\
 | if the default adds them, write under defaults: - override /model: null
model._target_ = f"{DEMOS}.BorinModel" | demos.boring_classes has no 'BorinModel' | .BoringModel?
model._target_ = "torch.optim.lr_scheduler" | is a module, not a class or function
model._target_ = "torch.nn.ReLU" | torch.nn.ReLU is not a LightningModule, and model
# Functions that pass **kwargs on are called, without memory.
model = resnet(num_clases=10) | model.inner.num_clases: torchvision.models.resnet18: takes no arg\
 | did you mean model.inner.num_classes?
model = resnet(num_classes="ten") | model.inner: torchvision.models.resnet18: cannot be built: Type
model = timm("resnet10tt") | model.inner.model_name: timm.create_model: timm has no model 'resnet1\
 | did you mean model.inner.model_name=resnet10t?
# Types of annotations.
callbacks.x = plain(mode="c") | callbacks.x.mode: must be 'a' or 'b', not 'c'
callbacks.x = plain(height=3) | it takes width, mode, rate
callbacks.x = plain(width="${oc.env:SAMPLE_WIDTH}") | .width: must be an integer, not ${oc.env
optimizer = node("torch.optim.AdamW", lr=0.1, betas=0.9) | betas: must be a list, not 0.9
data = node("distdl.data.StoredObjects", root="x", batch_size=1, labels="a") | must be a list or nul
callbacks.x = node("typed.Typed", kind="float23") | kind: must be a dtype of | torch.float32?
# What is built later, by whom, with what.
callbacks.x = plain(_partial_=True, z=1) | takes no argument 'z'
model = {**inner("mine.Plan"), "_recursive_": False} | inner._target_: mine has no 'Plan' | Plain?
callbacks.x = node("mine.Stop", patience=3, pateince=3) | did you mean callbacks.x.patience?
callbacks.x = node("mine.schedule", optimizer=1, steps_per_epoch=1, max_epochs=1, interval=1)\
 | mine.schedule takes no argument 'interval'
schedule = node("mine.schedule", optimizer=1) | optimizer: is passed by distdl
# What cannot be imported.
callbacks.x = node("broken.f") | x._target_: broken.f cannot be imported: | SyntaxError | , line 1
callbacks.x = node("leaves.f") | cannot be imported: | SystemExit | leaves.py, line 2
callbacks.x = node("ends.f") | os._exit(0) would end Python | ends.py, line 3
callbacks.x = node("needy.f") | callbacks.x._target_: needs the package package_that_is_absent
# A target's own check, which is not called on a value that is known to be wrong.
data = node("mine.Data", root="nowhere") | data.root: no folder nowhere | data.root=x
data = node("mine.Data", root="x", size="???") | data.size: missing | write data.size=...
strategy = node("mine.broken_check") | strategy: its own check failed: ZeroDivisionError
# Lightning's Trainer.
trainer.precision = "transformer-engine" | needs the package transformer_engine
trainer.max_time = "12:00:00" | trainer.max_time: Lightning refuses it: MisconfigurationException
trainer.limit_train_batches = 1.5 | trainer.limit_train_batches: Lightning refuses it
trainer.strategy = "ddp_spawn" | trainer.strategy: is set by distdl itself | strategy=ddp
# Keys of the model that are distdl's own, whatever the model is.
model = node("mine.Model", recompute="al") | model.recompute: is 'al' | none, blocks
model = node("mine.Model", recompute="blocks") | model.recompute: Model has no blocks
model = ours(recompte="blocks") | 'recompte' | did you mean model.recompute?
model = ours(recompute=["network.layr1.*"]) | no layer of ImageClassifier has the name
model = resnet(recompute="blocks") | model.inner.recompute: torchvision.models.resnet18: takes no
model = ours(freeze="conv1") | model.freeze: must be a list, not 'conv1' | model.freeze=[conv1]
# What binds.
model = ours(recompute=["network.layer1.*"])
optimizer = node("torch.optim.Rprop", lr=0.1, fused=None)
model = resnet(_partial_=True, progress=False)
model = timm("resnet10t", pretrained=True)
model = {**inner("mine.Plain"), "_recursive_": False, "whatever": 1}
callbacks.x = node("mine.Stop", patience=3)
callbacks.x = node("moves.f")
schedule = node("mine.schedule", interval="step", warmup=1)
optimizer = {}
trainer.profiler = node("lightning.pytorch.profilers.SimpleProfiler")
model = node("mine.Model", root="${oc.env:NOT_SET,data}")
# No secrets.
model = node("mine.Model", tokenizer="bert", class_token=True, password="", token_length=77)
model = node("mine.Model", api_token="${oc.env:API_TOKEN,null}", secret_file="secrets/key.pem")
model = node("mine.Model", uri="https://${oc.env:API_TOKEN}:${oc.env:API_TOKEN}@host")
model = node("mine.Model", connection_string="AccountName=x;AccountKey=${oc.env:API_TOKEN}")
"""


@pytest.mark.parametrize(("typed", "parts"), rows(VALUES))
def test_what_does_not_bind_is_one_problem(typed, parts, project, monkeypatch):
    monkeypatch.setenv("SAMPLE_WIDTH", "very-private")
    monkeypatch.setenv("API_TOKEN", "another-value")
    monkeypatch.chdir(project)
    found = [str(problem) for problem in problems(change(typed, **NAMES), project)]
    assert len(found) == bool(parts), found
    assert Path.cwd() == project, found
    check_parts("".join(found), parts)
    assert "very-private" not in "".join(found)


def test_a_schedule_must_follow_the_clock_or_have_a_length_of_its_own(project):
    timed = {"trainer.max_time": "00:00:10:00"}
    found = problems({**timed, "schedule": node("mine.schedule")}, project)
    assert [problem.path for problem in found] == ["schedule"]
    check_parts(str(found[0]), ["takes the length of the training (max_epochs)", "max_time"])
    assert not problems({**timed, "schedule": node("mine.schedule", max_epochs=3)}, project)
    assert not problems({"schedule": node("mine.schedule")}, project)


# All that plain Lightning takes, and distdl does not own; the values of a line go together.
TAKEN = """
devices="2" precision=16 max_epochs=null max_time=00:12:00:00 limit_train_batches=3
devices=-1 precision="32" max_epochs=-1 max_time={hours:1} limit_train_batches=0.5
devices='-1' precision=bf16 val_check_interval=0.5 num_sanity_val_steps=-1 profiler=simple
devices=auto precision=64-true val_check_interval={minutes:10} overfit_batches=2 fast_dev_run=3
accelerator=auto num_nodes=1 precision=null fast_dev_run=true deterministic=warn profiler=pytorch
max_steps=5 min_epochs=2 min_steps=3 limit_val_batches=0 limit_test_batches=1.0 benchmark=true
limit_predict_batches=1 overfit_batches=0.1 val_check_interval=4 check_val_every_n_epoch=null
num_sanity_val_steps=2 log_every_n_steps=null enable_model_summary=true accumulate_grad_batches=4
gradient_clip_val=1 gradient_clip_algorithm=value deterministic=true inference_mode=false
detect_anomaly=true reload_dataloaders_every_n_epochs=1 use_distributed_sampler=false
enable_autolog_hparams=false max_time={_target_:datetime.timedelta,seconds:100}
""".strip().splitlines()


@pytest.mark.parametrize("typed", TAKEN)
def test_what_lightning_takes_is_taken(typed):
    overrides = ["trainer.accelerator=cpu", *(f"trainer.{word}" for word in typed.split())]
    assert problems({"trainer": compose(overrides).trainer}) == []
    assert not torch.are_deterministic_algorithms_enabled(), "asked about, and not done"


NOT_TAKEN = {
    "accelerator": "tpu",
    "precision": "fp8",
    "val_check_interval": 0,
    "profiler": True,
    "fast_dev_run": -1,
    "devices": 0,
    **TRAINER_OWNED,
}


@pytest.mark.parametrize(("key", "value"), NOT_TAKEN.items())
def test_what_is_not_taken(key, value):
    (problem,) = problems({f"trainer.{key}": value})
    assert problem.path == f"trainer.{key}"
    assert problem.remedy == TRAINER_OWNED.get(key, problem.remedy)


def test_every_argument_of_the_trainer_is_in_the_tables():
    known = {word.split("=")[0] for line in TAKEN for word in line.split()} | NOT_TAKEN.keys()
    known.add("sync_batchnorm")  # planning asks whether there is a GPU
    assert inspect.signature(pl.Trainer).parameters.keys() <= known


def test_texts_of_devices():
    for text, devices in {'"0,1"': [0, 1], '"3,"': [3], '"-1"': -1, "auto": "auto"}.items():
        assert compose([f"trainer.devices={text}"]).trainer.devices == devices


def test_a_check_gets_the_size_and_what_is_refused(project):
    (problem,) = problems({"strategy": node("mine.sized")}, project, Resources(devices=2))
    assert str(problem) == "strategy: one device, not 2\n    strategy=ddp"
    changes = {"callbacks.bad": node("broken.f"), "model.x": node("broken.f")}
    found = problems({**changes, "strategy": node("mine.curious")}, project)
    assert "strategy: ['model', 'callbacks.bad'] are refused" in [str(p) for p in found]


def test_whether_the_model_makes_its_optimizer_is_a_fact(project):
    for name, expected in {"Model": True, "Bare": False, "schedule": None}.items():
        config = sample({"model": node(f"mine.{name}")})
        facts = check_bindings(resolve(config), None, [str(project)], in_process=True)[2]
        assert facts["model_configures_optimizers"] is expected


def test_what_names_a_dtype_is_one(project, monkeypatch):
    monkeypatch.syspath_prepend(project)
    linear = node("torch.nn.Linear", in_features=1, out_features=1, dtype="torch.float64")
    values = {
        "kind": "torch.float64",
        "other": "bfloat16",
        "name": "float32",
        "loose": "float64",
        "either": "float16",
        "inner": linear,
    }
    made = build.make(OmegaConf.create(node("typed.Typed", **values)))
    double = torch.float64
    assert made.passed == [double, torch.bfloat16, "float32", double, "float16", double]


def remote(changes, project):
    """Problems and notes of a job elsewhere."""
    return check_bindings(
        resolve(sample(changes)), None, [str(project)], local=False, in_process=True
    )[:2]


def test_what_only_the_nodes_have_is_noted(project):
    absent = {"project.allow": ["absent"], "callbacks.x": node("absent.Thing")}
    (problem,) = problems(absent, project)
    assert problem.path == "callbacks.x._target_"
    (refused, (note,)) = remote(absent, project)
    assert refused == []
    assert note.startswith("not checked: callbacks.x._target_: package absent is")
    assert note.endswith("; to check it: pip install absent")
    assert remote({"data": node("mine.Data", root="nowhere")}, project) == ([], [])


def test_what_no_job_takes_along_is_noted(project, tmp_path, monkeypatch):
    (tmp_path / "helpers").mkdir()
    (tmp_path / "helpers/deep.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))  # as a package in editable mode is found

    def check(**launcher):
        for name in ("uses", "helpers", "helpers.deep"):
            sys.modules.pop(name, None)
        changes = {f"launcher.{key}": value for key, value in launcher.items()}
        refused, notes = remote({"callbacks.x": node("uses.Thing"), **changes}, project)
        return [p.path for p in refused if p.path == "project.root"], notes

    text = f"helpers is imported from {tmp_path}, which no job takes along: install it on the nodes"
    noted = ([], [f"{text}, or choose a project.root that contains it"])
    assert check() == noted
    # What only this shell's $PYTHONPATH leads to: a job has the bundle's.
    monkeypatch.setenv("PYTHONPATH", f"/nowhere{os.pathsep}{tmp_path}")
    assert check() == (["project.root"], [])
    assert check(before_srun=["export PYTHONPATH=/shared"]) == noted
    assert check(modules=["helpers"]) == noted
    (tmp_path / "helpers-1.dist-info").mkdir()
    url = tmp_path / "helpers-1.dist-info/direct_url.json"
    url.write_text(json.dumps({"url": tmp_path.as_uri()}))
    assert check() == noted


WHO = {"slurm.SlurmLauncher": "requeue=true", "azureml.launcher.AzureMLLauncher": "tier=spot"}
WHO["sagemaker.SageMakerLauncher"] = "retries=N"


@pytest.mark.parametrize(("launcher", "instead"), WHO.items())
def test_who_starts_a_job_again_where_distdl_does_not(launcher, instead, project):
    changes = {"launcher": {"_target_": f"distdl.launchers.{launcher}", "max_attempts": 2}}
    (problem,) = (p for p in remote(changes, project)[0] if p.path == "launcher.max_attempts")
    assert "restarts its jobs itself" in problem.remedy
    assert f"launcher.{instead}" in problem.remedy


COCO = ["data.root={root}/coco", f"data.num_classes={len(drawn_coco.CATEGORIES)}"]


WEIGHTS = "model.weights={root}/weights.pth"


def shipped():
    """Every option of ours, with what it needs besides."""
    stored = ["data.root={root}", "data.num_classes=2"]
    more = {"model=timm": ["model.network.model_name=resnet10t"], "data=imagenet": stored}
    more |= {f"task={name}": ["data=imagenet", *stored] for name in ("predict", "export")}
    more |= {f"experiment={name}": stored for name in ("resnet50_imagenet", "imagenette_cpu")}
    for epochs in (16, 40, 88):
        more[f"experiment=resnet50_{epochs}_epochs"] = [*stored, "data.batch_size=256"]
    more["experiment=finetune_cpu"] = [*stored, WEIGHTS]
    more["data=coco"] = ["model=retinanet", *COCO]
    detectors = ("fasterrcnn", "keypointrcnn", "maskrcnn", "maskrcnn_v2", "retinanet", "detector")
    more |= {f"model={name}": ["data=coco", *COCO] for name in detectors}
    more["model=detector"].append("model.network.name=fcos_resnet50_fpn")
    more["model=keypointrcnn"] += ["data.labels=[person_keypoints]", "data.keypoints=true"]
    more["model=keypointrcnn"] += ["data.num_classes=1", "data.masks=false"]
    more["optimizer=schedulefree"] = ["schedule=constant"]
    recipes = (ROOT / "conf/experiment").glob("*_coco.yaml")
    more |= {f"experiment={path.stem}": COCO for path in recipes}
    # A network, or code of one's own.
    needy = ("model=classifier", "optimizer=none", "strategy=model_parallel", "task=test")
    names = [f"{path.parent.name}={path.stem}" for path in sorted((ROOT / "conf").glob("*/*.yaml"))]
    # A launcher starts a run, and `tune` holds spaces for a search.
    names = [name for name in names if name not in needy]
    names = [name for name in names if not name.startswith(("launcher=", "tune="))]
    return [[name, *more.get(name, [])] for name in names]


@pytest.mark.parametrize("overrides", shipped(), ids=lambda overrides: overrides[0])
def test_every_shipped_option_binds(overrides, tmp_path):
    for folder in ("train/a", "train/b", "val/a", "val/b"):
        (tmp_path / folder).mkdir(parents=True)
    if "data.num_classes=2" in overrides:
        for number in range(256):  # one batch of the recipes
            (tmp_path / f"train/a/{number}.jpg").touch()
    if set(COCO) & set(overrides):
        keypoints = "data.keypoints=true" in overrides
        drawn_coco.draw(tmp_path / "coco", train=4, val=2, keypoints=keypoints)
    if WEIGHTS in overrides:
        torch.save(torchvision.models.resnet18().state_dict(), tmp_path / "weights.pth")
    config = compose([text.replace("{root}", str(tmp_path)) for text in overrides])
    size = Resources(1, 2) if "pipeline" in overrides[0] else None
    stage_2, notes, _ = check_bindings(resolve(config), size, local=True, in_process=True)
    found = [*problems_of(config, local=True), *stage_2]
    # What is not a part of `all`, such as wandb, may be missing here.
    assert ([p for p in found if "not installed" not in p.what], notes) == ([], [])


CHILDREN = """
noisy.f | callbacks.x.x: missing, noisy.f needs it
deadly.f | importing the config's targets ended Python (exit code -6) | last words
hangs.f | importing the config's targets took more than
"""


@pytest.mark.parametrize(("target", "parts"), rows(CHILDREN))
def test_a_real_child_answers_through_noise_and_may_die_or_hang(
    target, parts, project, monkeypatch, capfd
):
    if target == "hangs.f":
        expired = mock.Mock(side_effect=subprocess.TimeoutExpired("python", 1))
        monkeypatch.setattr(subprocess, "run", expired)
    config = {"callbacks": {"x": node(target)}}  # without torch
    (problem,), _, _ = check_bindings(resolve(config), None, [str(project)], local=True)
    check_parts(str(problem), parts)
    assert "noise" not in capfd.readouterr().out
