"""The fast path as far as a CPU shows it: no reads of the device in a step, modes of compile."""

from __future__ import annotations

import os
import sys
import tempfile

import pytest
import torch
import torch.distributed as dist
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging as LightningEMA
from lightning.pytorch.plugins.environments import LightningEnvironment
from omegaconf import OmegaConf
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.models import resnet18

from distdl.callbacks import Checkpointer, EMAWeightAveraging, StepMetrics
from distdl.callbacks.progress import Progress
from distdl.data import images
from distdl.data.nvjpeg import EncodedBatch
from distdl.data.sampling import TrainPosition
from distdl.data.side_stream import QueueLimit
from distdl.job import JobState
from distdl.models import compilers
from distdl.optim import optimizers
from distdl.ranks.stopping import Stopped, StopRequest
from distdl.runs.checkpoints import CheckpointStore
from distdl.strategies import DDPStrategy
from distdl.util.errors import UserError
from distdl.worker import autotune, compiling
from tests.conftest import UNCHECKED, distdl
from tests.prepared import quiet_trainer
from tests.unit.sample_data import classifier, share, synthetic

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")
STEPS, LOG_EVERY = 12, 4


class Reads(Callback):
    """(step, how) of each time that somebody read a value from a tensor, for which a GPU waits.

    `.item()` and bool() end in aten::_local_scalar_dense, which is counted below Python, where
    torch's own code calls it too.
    """

    def __init__(self, read_at=-1):
        self.step, self.found, self.read_at = -1, [], read_at

    def on_train_batch_start(self, trainer, pl_module, batch, number):
        self.step = number

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, number):
        if number == self.read_at:
            outputs["loss"].item(), batch["label"].tolist()

    def fit(self, *arguments, trainer):
        reads = self

        class Below(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                if func is torch.ops.aten._local_scalar_dense.default:
                    reads.found.append((reads.step, "item"))
                return func(*args, **(kwargs or {}))

        class Above(TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                name = getattr(func, "__name__", "")
                if name in ("tolist", "numpy", "cpu"):
                    reads.found.append((reads.step, name))
                if name == "one_hot":  # looks at the range of labels on a CPU, and not on CUDA
                    with torch._C._DisableTorchDispatch():
                        return func(*args, **(kwargs or {}))
                return func(*args, **(kwargs or {}))

        with Below(), Above():
            trainer.fit(*arguments)


@pytest.mark.parametrize(
    "optimizer, read_at",
    [("torch.optim.SGD", 5), ("torch.optim.SGD", -1), ("torch.optim.AdamW", -1)],
)
def test_nothing_is_read_from_the_device_between_two_log_steps(tmp_path, optimizer, read_at):
    module, position, reads = classifier(mixup=0.2), TrainPosition(), Reads(read_at)

    def configure_optimizers():
        node = {"_target_": optimizer, "lr": 0.1}
        made = optimizers.build_optimizer(module, node, global_batch=4)
        node = {"_target_": "distdl.optim.warmup_cosine", "warmup_epochs": 0}
        schedule = optimizers.build_schedule(made, node, steps_per_epoch=STEPS, max_epochs=1)
        return {"optimizer": made, "lr_scheduler": schedule}

    module.configure_optimizers = configure_optimizers
    store = CheckpointStore(tmp_path / "checkpoints")
    kept = Checkpointer(store, StopRequest(), position, global_batch_size=4)
    callbacks = [reads, StepMetrics(4), Progress(bar=False), EMAWeightAveraging(decay=0.5), kept]
    options = {"log_every_n_steps": LOG_EVERY, "gradient_clip_val": 1.0, "callbacks": callbacks}
    trainer = quiet_trainer(tmp_path, max_epochs=1, limit_val_batches=0, **options)
    data = share(synthetic(train_samples=4 * STEPS), position=position)
    reads.fit(module, data, trainer=trainer)
    assert reads.step == STEPS - 1 and position.epoch == 1
    expected = {step for step in range(STEPS) if (step + 1) % LOG_EVERY == 0}  # it reads the loss
    if read_at >= 0:
        expected.add(read_at)
        assert {(read_at, "item"), (read_at, "tolist")} <= set(reads.found)
    assert {step for step, _ in reads.found if step >= 0} == expected


@pytest.mark.parametrize("use_buffers", [True, False])
def test_the_average_is_lightnings_and_resumes(use_buffers):
    """Also from a checkpoint that Lightning's own callback wrote."""
    module = LightningModule()
    module.layers = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    kinds = LightningEMA, EMAWeightAveraging
    callbacks = [kind(decay=0.5, use_buffers=use_buffers) for kind in kinds]
    assert callbacks[0].state_key == callbacks[1].state_key
    for callback in callbacks:
        callback.setup(Trainer(logger=False, accelerator="cpu"), module, "fit")
    theirs, ours = (callback._average_model for callback in callbacks)
    for step in range(6):
        if step == 3:
            ours.load_state_dict(theirs.state_dict())
            assert ours.updates == 3
        with torch.no_grad():
            for parameter in module.parameters():
                parameter += torch.randn_like(parameter)
        module.layers(torch.randn(5, 4))
        for average in theirs, ours:
            average.update_parameters(module)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())


@pytest.mark.parametrize("side_stream", [True, False])
def test_the_gpu_decodes_beside_the_step(monkeypatch, side_stream):
    """nvJPEG waits for the stream that it is called on: on the step's, for the step before."""
    active, calls = [], []

    class SideStream:
        def __init__(self, device):
            self.device = device

        def __call__(self, work, *args):
            active.append(True)
            return work(*args), active.pop()

    def decoded(self, device):
        calls.append((device.type, bool(active)))

    monkeypatch.setattr(EncodedBatch, "decoded", decoded)
    monkeypatch.setattr(images, "SideStream", SideStream)
    monkeypatch.setattr(images.ImageData, "_device", torch.device("cuda", 0))
    data = images.ImageData(1, 0)
    data.side_stream = side_stream
    sample = {"image": torch.zeros(1), "crop": torch.zeros(8)}
    data.on_before_batch_transfer({"image": EncodedBatch([sample])}, 0)
    assert calls == [("cuda", side_stream)]


def test_the_host_sleeps_while_the_gpu_works(monkeypatch):
    """An event that does not block spins, and takes a core from the workers that load."""
    made = []
    monkeypatch.setattr(torch.cuda, "Event", lambda **options: made.append(options))
    QueueLimit(torch.device("cuda", 0)), QueueLimit(torch.device("cpu"))
    assert made == [{"blocking": True}] * 2


def test_the_fastest_way_is_chosen():
    def fastest(**seconds):
        modes = {"off": False, "max": "max-autotune"}
        ways = [compiling.candidate(modes.get(name, name)) for name in seconds]
        times = zip(ways, seconds.values(), strict=True)
        measured = [autotune.Measured(way, s, 0, "broken") for way, s in times]
        return compiling.fastest(measured).changes["model.compile"]

    assert fastest(off=1.0, default=0.9, max=0.8) == "max-autotune"
    assert fastest(off=1.0, default=0.98) is False, "the gain is noise"
    assert fastest(off=1.0, default=None) is False
    assert fastest(off=None, default=5.0) == "default"
    with pytest.raises(UserError, match="broken"):
        fastest(off=None, default=None)


def test_a_signal_while_it_measures_decides_nothing(monkeypatch):
    """The compiler may have received it, too: its failure then says nothing about the mode."""
    stop = StopRequest()

    def killed(*_):
        stop.state, stop.signal = JobState.PREEMPTED, "SIGTERM"
        raise RuntimeError("CppCompileError: C++ compile error")

    monkeypatch.setattr(autotune, "build", killed)
    monkeypatch.setattr(autotune.configs, "merge", lambda *_: OmegaConf.create({}))
    with pytest.raises(Stopped, match="SIGTERM before training began") as error:
        autotune.measure({}, compiling.candidate("default"), None, None, stop, survivable=Exception)
    assert error.value.state is JobState.PREEMPTED


def test_cuda_graphs_are_left_out_where_gradients_accumulate():
    modes = [False, "default", "reduce-overhead", "max-autotune"]
    for accelerator, accumulate, tried in (("gpu", 1, 4), ("gpu", 2, 2), ("cpu", 1, 2)):
        config = OmegaConf.create({"trainer": {"accumulate_grad_batches": accumulate}})
        assert compiling.modes(config, accelerator) == modes[:tried]


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


@pytest.mark.parametrize("user, kept", [(None, ""), ("torchinductor_me", ""), ("mine", "mine")])
def test_results_are_kept_where_the_user_wants_them(monkeypatch, tmp_path, user, kept):
    """The default of torch, a folder in /tmp, is not what the user wants."""
    monkeypatch.setenv("DISTDL_CACHE", str(tmp_path))
    monkeypatch.delenv(compilers.FOLDER, raising=False)
    folder = tempfile.gettempdir() if user == "torchinductor_me" else tmp_path
    if user:
        monkeypatch.setenv(compilers.FOLDER, f"{folder}/{user}")
    compilers.keep_results()
    assert os.environ[compilers.FOLDER] == str(tmp_path / (kept or "inductor"))


NETWORK = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self):
        layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
        super().__init__(*layers, nn.Flatten(), nn.Linear(8, 10))
"""


def test_the_measured_way_is_frozen_in_the_run(tmp_path):
    (tmp_path / "tiny.py").write_text(NETWORK)
    done = distdl(
        *("model=classifier", "+model.network._target_=tiny.Net", "project.allow=[tiny]"),
        *("model.compile=measured", "data=synthetic", "data.image_size=16", "data.num_classes=10"),
        *("data.train_samples=64", "data.val_samples=8", "data.batch_size=4", "tracking=none"),
        *("schedule.warmup_epochs=0", "trainer.accelerator=cpu", "trainer.max_steps=2", "name=c"),
        cwd=tmp_path,
        module=UNCHECKED,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    launch = yaml.safe_load((tmp_path / "outputs/default/c/attempts/001/launch.yaml").read_text())
    lines = launch["compile"]
    assert [line.split()[0] for line in lines] == ["model.compile=false", "model.compile=default"]
    assert all("ms a step" in line for line in lines), "both trained"
    assert launch["changes"]["model.compile"] in (False, "default")


@pytest.mark.parametrize("options, first_mb", [({}, 1), ({"first_bucket_mb": 25}, 25)])
def test_the_first_bucket_of_ddp_is_small(options, first_mb):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        devices, cluster = [torch.device("cpu")], LightningEnvironment()
        strategy = DDPStrategy(
            parallel_devices=devices,
            cluster_environment=cluster,
            gradient_as_bucket_view=True,
            **options,
        )
        model = strategy._setup_model(resnet18(num_classes=10))
        for _ in range(3):  # DDP makes its buckets anew after the first step
            model(torch.randn(2, 3, 32, 32)).sum().backward()
        sizes = model._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    finally:
        dist.destroy_process_group()
    # A bucket is full with the parameter that reaches its size: 9 MB are layer4's convolution.
    assert first_mb <= int(str(sizes).split(",")[0]) / 2**20 < first_mb + 9.1
