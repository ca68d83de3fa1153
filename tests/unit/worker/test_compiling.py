"""The mode of compile that is the fastest here, by measurement."""

from __future__ import annotations

import os

import pytest
import yaml
from omegaconf import OmegaConf

from distdl.job import JobState
from distdl.ranks.stopping import Stopped, StopRequest
from distdl.worker import autotune, compiling
from tests.conftest import UNCHECKED, distdl
from tests.prepared import refusal


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

    monkeypatch.setattr(autotune, "train_briefly", killed)
    monkeypatch.setattr(autotune.configs, "merge", lambda *_: OmegaConf.create({}))
    with pytest.raises(Stopped, match="SIGTERM before training began") as error:
        autotune.measure({}, compiling.candidate("default"), None, None, stop, survivable=Exception)
    assert error.value.state is JobState.PREEMPTED


NETWORK = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(3 * 16 * 16, 10))
"""


@pytest.mark.skipif("DISTDL_MATRIX" not in os.environ, reason="make matrix")
def test_the_measured_way_is_frozen_in_the_run(tmp_path, monkeypatch):
    # A test before, in the same process, may have compiled.
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
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
