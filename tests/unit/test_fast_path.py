"""The fast path as far as a CPU shows it: no reads of the device in a step, modes of compile."""

from __future__ import annotations

import os
import sys

import pytest
import torch
import yaml
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging as LightningEMA
from omegaconf import OmegaConf
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from distdl.callbacks import EMAWeightAveraging, Progress, StepMetrics
from distdl.job import JobState
from distdl.models import compilers
from distdl.optim.optimizers import build_optimizer
from distdl.ranks.stopping import Stopped, StopRequest
from distdl.util.errors import UserError
from distdl.worker import autotune, compiling
from tests.conftest import UNCHECKED, distdl
from tests.prepared import quiet_trainer, refusal
from tests.unit import checkpointing
from tests.unit.sample_data import classifier, share, synthetic


def test_nothing_is_read_from_the_device_between_two_log_steps(tmp_path):
    """A read makes the host wait for the device. Reads are found in two ways: `.item()` and bool()
    by the operator that they end in, also inside torch; the others by their names in Python."""
    batches = set()

    class OfOperators(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten._local_scalar_dense.default:
                batches.add(trainer.fit_loop.epoch_loop.batch_idx)
            return func(*args, **(kwargs or {}))

    class ByName(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if getattr(func, "__name__", "") in ("tolist", "numpy", "cpu"):
                batches.add(trainer.fit_loop.epoch_loop.batch_idx)
            return func(*args, **(kwargs or {}))

    module = classifier()
    node = {"_target_": "torch.optim.AdamW", "lr": 0.1}
    module.configure_optimizers = lambda: build_optimizer(module, node, global_batch=4)
    trainer = quiet_trainer(
        tmp_path,
        log_every_n_steps=4,
        gradient_clip_val=1.0,
        max_epochs=1,
        limit_val_batches=0,
        callbacks=[
            StepMetrics(4),
            Progress(bar=False),
            EMAWeightAveraging(decay=0.5),
            checkpointing.checkpointer(tmp_path),
        ],
    )
    with OfOperators(), ByName():
        trainer.fit(module, share(synthetic(train_samples=4 * 12)))
    assert trainer.global_step == 12
    # -1: before the first batch.
    assert batches - {-1} == {3, 7, 11}, "only where the loss is shown"


@pytest.mark.parametrize(
    "use_buffers, dtype", [(True, torch.float32), (False, torch.float32), (True, torch.bfloat16)]
)
def test_the_average_is_lightnings_and_resumes(use_buffers, dtype):
    """Also from a checkpoint that Lightning's own callback wrote."""
    module = LightningModule()
    module.layers = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    callbacks = [k(decay=0.5, use_buffers=use_buffers) for k in (LightningEMA, EMAWeightAveraging)]
    assert callbacks[0].state_key == callbacks[1].state_key
    for callback in callbacks:
        callback.setup(Trainer(logger=False, accelerator="cpu"), module, "fit")
    module.to(dtype)  # precision=bf16-true converts it after the setup
    theirs, ours = (callback._average_model for callback in callbacks)
    for step in range(6):
        if step == 3:
            ours.load_state_dict(theirs.state_dict())
        with torch.no_grad():
            for parameter in module.parameters():
                parameter += torch.randn_like(parameter)
        module.layers(torch.randn(5, 4, dtype=dtype))
        for average in theirs, ours:
            average.update_parameters(module)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())


def test_the_fastest_way_is_chosen():
    def fastest(*seconds):
        modes = (False, "default", "max-autotune")
        ways = zip(map(compiling.candidate, modes), seconds, strict=False)
        measured = [autotune.Measured(way, s, 0, "broken") for way, s in ways]
        return compiling.fastest(measured).changes["model.compile"]

    assert fastest(1.0, 0.9, 0.8) == "max-autotune"
    assert fastest(1.0, 0.98) is False, "the gain is noise"
    assert fastest(1.0, None) is False
    assert fastest(None, 5.0) == "default"
    assert "broken" in refusal(fastest, None, None).what
    # CUDA graphs are left out where gradients accumulate.
    modes = [False, "default", "reduce-overhead", "max-autotune"]
    for accelerator, accumulate, tried in (("gpu", 1, 4), ("gpu", 2, 2), ("cpu", 1, 2)):
        config = OmegaConf.create({"trainer": {"accumulate_grad_batches": accumulate}})
        assert compiling.modes(config, accelerator) == modes[:tried]


def test_a_signal_while_it_measures_decides_nothing(monkeypatch):
    """The compiler may have received it, too: its failure then says nothing about the mode."""
    stop = StopRequest()

    def killed(*_):
        stop.state = JobState.PREEMPTED
        stop.signal = "SIGTERM"
        raise RuntimeError("CppCompileError: C++ compile error")

    monkeypatch.setattr(autotune, "build", killed)
    monkeypatch.setattr(autotune.configs, "merge", lambda *_: OmegaConf.create({}))
    with pytest.raises(Stopped, match="SIGTERM before training began") as error:
        autotune.measure({}, compiling.candidate("default"), None, None, stop, survivable=Exception)
    assert error.value.state is JobState.PREEMPTED


def test_without_a_compiler_it_is_refused(monkeypatch, tmp_path):
    compilers.refuse_without_compiler("cpu")
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    for device in ("cpu", "gpu"):
        with pytest.raises(UserError, match=r"(?s)compiler.*model.compile=false"):
            compilers.refuse_without_compiler(device)
    with pytest.raises(UserError):
        classifier(compile="max-autotune").configure_model()
    monkeypatch.setenv("CXX", sys.executable)  # there is one, of another name, and no Python.h
    monkeypatch.setattr(compilers.sysconfig, "get_path", lambda *_: str(tmp_path))
    with pytest.raises(UserError, match=r"Python\.h(?s:.*)python3-dev"):
        compilers.refuse_without_compiler("cpu")
    monkeypatch.setenv("CPATH", f"{os.pathsep}{tmp_path}")
    (tmp_path / "Python.h").touch()
    compilers.refuse_without_compiler("cpu")
    monkeypatch.setenv(compilers.FOLDER, "/mine")  # for what it compiles
    compilers.keep_results()
    assert os.environ[compilers.FOLDER] == "/mine"


NETWORK = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(3 * 16 * 16, 10))
"""


@pytest.mark.skipif("DISTDL_MATRIX" not in os.environ, reason="make matrix")
def test_the_measured_way_is_frozen_in_the_run(tmp_path):
    (tmp_path / "tiny.py").write_text(NETWORK)
    done = distdl(
        "model=classifier",
        "+model.network._target_=tiny.Net",
        "project.allow=[tiny]",
        "model.compile=measured",
        "data=synthetic",
        "data.image_size=16",
        "data.num_classes=10",
        "data.train_samples=64",
        "data.val_samples=8",
        "data.batch_size=4",
        "tracking=none",
        "schedule.warmup_epochs=0",
        "trainer.accelerator=cpu",
        "trainer.max_steps=2",
        "name=c",
        cwd=tmp_path,
        module=UNCHECKED,
        env={"DISTDL_CACHE": str(tmp_path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert any((tmp_path / "inductor").iterdir()), "not in /tmp, which is torch's default"
    launch = yaml.safe_load((tmp_path / "outputs/default/c/attempts/001/launch.yaml").read_text())
    lines = launch["compile"]
    assert [line.split()[0] for line in lines] == ["model.compile=false", "model.compile=default"]
    assert all("ms a step" in line for line in lines), "both trained"
    assert launch["changes"]["model.compile"] in (False, "default")
