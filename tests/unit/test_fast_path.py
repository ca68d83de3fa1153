"""The fast path as far as a CPU shows it: no reads of the device in a step, modes of compile."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging as LightningEMA
from omegaconf import OmegaConf
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from distdl.callbacks import Checkpointer, EMAWeightAveraging, StepMetrics
from distdl.callbacks.progress import Progress
from distdl.data import SyntheticImages, images
from distdl.data.loading import distribute
from distdl.data.nvjpeg import EncodedBatch
from distdl.data.sampling import TrainPosition
from distdl.data.side_stream import Lead
from distdl.job import JobState
from distdl.models import ImageClassifier, compilers
from distdl.optim import optimizers
from distdl.ranks.stopping import Stopped, StopRequest
from distdl.runs.checkpoints import CheckpointStore
from distdl.util.errors import UserError
from distdl.worker import autotune, compiling
from tests.conftest import UNCHECKED, distdl
from tests.prepared import quiet_trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")

LOG_EVERY = 4
# What waits for a GPU, by the name of the tensor's method. `.item()` and bool() end in
# aten::_local_scalar_dense, which is counted below Python, where torch's own code calls it too.
READS = ("tolist", "numpy", "cpu")


class Reads:
    """Steps (numbers of batches) in which somebody read a value from a tensor."""

    def __init__(self) -> None:
        self.step = -1
        self.found: list[tuple[int, str]] = []

    def note(self, what: str) -> None:
        self.found.append((self.step, what))

    @contextmanager
    def watched(self) -> Iterator[None]:
        reads = self

        class Below(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
                if func is torch.ops.aten._local_scalar_dense.default:
                    reads.note("item")
                return func(*args, **(kwargs or {}))

        class Above(TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
                name = getattr(func, "__name__", "")
                if name in READS:
                    reads.note(name)
                if name == "one_hot":  # looks at the range of labels on a CPU, and not on CUDA
                    with torch._C._DisableTorchDispatch():
                        return func(*args, **(kwargs or {}))
                return func(*args, **(kwargs or {}))

        with Below(), Above():
            yield


class Counting(Callback):
    """Tells the number of the batch: what is read after it belongs to its step."""

    def __init__(self, reads: Reads) -> None:
        self.reads = reads

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, number: int):
        self.reads.step = number


def fit(tmp_path: Path, reads: Reads, *more: Callback, optimizer: str = "torch.optim.SGD") -> None:
    torch.manual_seed(0)
    network = nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        nn.Linear(8, 7),
    )
    module = ImageClassifier(network, num_classes=7, mixup=0.2)
    schedule = {"_target_": "distdl.optim.warmup_cosine", "warmup_epochs": 0}

    def configure_optimizers() -> Any:
        made = optimizers.build_optimizer(
            module, {"_target_": optimizer, "lr": 0.1}, global_batch=4
        )
        steps = {"steps_per_epoch": 12, "max_epochs": 1}
        return {
            "optimizer": made,
            "lr_scheduler": optimizers.build_schedule(made, schedule, **steps),
        }

    module.configure_optimizers = configure_optimizers  # type: ignore[method-assign]
    data = SyntheticImages(
        4, num_classes=7, image_size=8, pool_size=16, train_samples=48, val_samples=4
    )
    position = TrainPosition()
    distribute(data, rank=0, world_size=1, seed=0, position=position)
    store = CheckpointStore(tmp_path / "checkpoints")
    kept = Checkpointer(store, StopRequest(), position, global_batch_size=4)
    trainer = quiet_trainer(
        tmp_path,
        max_epochs=1,
        limit_val_batches=0,
        log_every_n_steps=LOG_EVERY,
        gradient_clip_val=1.0,
        callbacks=[Counting(reads), StepMetrics(4), Progress(bar=False), *more, kept],
    )
    with reads.watched():
        trainer.fit(module, data)
    assert reads.step == 11 and position.epoch == 1


@pytest.mark.parametrize("optimizer", ["torch.optim.SGD", "torch.optim.AdamW"])
def test_nothing_is_read_from_the_device_between_two_log_steps(tmp_path, optimizer):
    reads = Reads()
    fit(tmp_path, reads, EMAWeightAveraging(decay=0.5), optimizer=optimizer)
    logging_steps = {step for step in range(12) if (step + 1) % LOG_EVERY == 0}
    assert {step for step, _ in reads.found if step >= 0} == logging_steps, (
        "the loss is read there, and nothing elsewhere"
    )


def test_a_callback_that_reads_is_seen(tmp_path):
    class Reader(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 5:
                outputs["loss"].item()
            if batch_idx == 6:
                batch["label"].tolist()

    reads = Reads()
    fit(tmp_path, reads, Reader())
    assert {(5, "item"), (6, "tolist")} <= set(reads.found)


@pytest.mark.parametrize("use_buffers", [True, False])
def test_the_average_is_lightnings_and_goes_on_where_it_was(use_buffers):
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
    expected = theirs.state_dict()
    assert ours.state_dict().keys() == expected.keys()
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(value, expected[name])


class Beside:
    """In the place of the side stream: says whether work is under way on it."""

    at_work = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, work: Any, *args: Any) -> Any:
        Beside.at_work = True
        try:
            return work(*args)
        finally:
            Beside.at_work = False


@pytest.mark.parametrize("side_stream", [True, False])
def test_the_gpu_decodes_beside_the_step(monkeypatch, side_stream):
    """nvJPEG waits for the stream that it is called on: on the step's, for the step before."""
    found = []

    def decoded(self: EncodedBatch, device: torch.device) -> torch.Tensor:
        found.append((device.type, Beside.at_work))
        return torch.zeros(1, 3, 4, 4, dtype=torch.uint8)

    monkeypatch.setattr(EncodedBatch, "decoded", decoded)
    monkeypatch.setattr(images, "SideStream", Beside)
    monkeypatch.setattr(images.ImageData, "_device", torch.device("cuda", 0))
    data = images.ImageData(1, 0)
    data.side_stream = side_stream
    sample = {"image": torch.zeros(1), "crop": torch.zeros(8)}
    batch = data.on_before_batch_transfer({"image": EncodedBatch([sample])}, 0)
    assert batch["image"].shape == (1, 3, 4, 4) and found == [("cuda", side_stream)]


def test_the_host_sleeps_while_the_gpu_works(monkeypatch):
    """An event that does not block spins, and takes a core from the workers that load."""
    made = []
    monkeypatch.setattr(torch.cuda, "Event", lambda **given: made.append(given))
    Lead(torch.device("cuda", 0))
    assert made == [{"blocking": True}] * 2
    Lead(torch.device("cpu"))
    assert len(made) == 2


# ---------------------------------------------------------------------------------- torch.compile


def found(seconds: dict[str | bool, float | None]) -> list[autotune.Measured]:
    return [autotune.Measured(compiling.way(mode), s, 0, "broken") for mode, s in seconds.items()]


def test_the_fastest_way_wins_unless_the_gain_is_noise():
    def choose(seconds: dict[str | bool, float | None]) -> str | bool:
        return compiling.fastest(found(seconds)).changes["model.compile"]

    assert choose({False: 1.0, "default": 0.9, "max-autotune": 0.8}) == "max-autotune"
    assert choose({False: 1.0, "default": 0.98}) is False
    assert choose({False: 1.0, "default": None}) is False
    assert choose({False: None, "default": 5.0}) == "default"
    with pytest.raises(UserError, match="broken"):
        choose({False: None, "default": None})


def test_a_signal_while_it_measures_decides_nothing(monkeypatch):
    """The compiler may have got it, too: that it failed then says nothing about the mode."""
    stop = StopRequest()

    def killed(*_):
        stop._note(signal.SIGTERM, None)
        raise RuntimeError("CppCompileError: C++ compile error")

    monkeypatch.setattr(autotune, "build", killed)
    monkeypatch.setattr(autotune.configs, "merge", lambda *_: OmegaConf.create({}))
    with pytest.raises(Stopped, match="SIGTERM before training began") as ended:
        way = compiling.way("default")
        autotune.measure({}, way, None, None, stop, survivable=Exception)
    assert ended.value.state is JobState.PREEMPTED


def test_cuda_graphs_are_left_out_where_gradients_accumulate():
    def tried(accelerator: str, accumulate: int) -> list[str | bool]:
        config = OmegaConf.create({"trainer": {"accumulate_grad_batches": accumulate}})
        return compiling.modes(config, accelerator)

    assert tried("gpu", 1) == [False, "default", "reduce-overhead", "max-autotune"]
    assert tried("gpu", 2) == [False, "default"]
    assert tried("cpu", 1) == [False, "default"]


def test_without_a_compiler_it_is_refused(monkeypatch, tmp_path):
    compilers.refuse_without_compiler("cpu")
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    for device in ("cpu", "gpu"):
        with pytest.raises(UserError, match=r"(?s)compiler.*model.compile=false"):
            compilers.refuse_without_compiler(device)
    monkeypatch.setenv("CXX", sys.executable)  # there is one, of another name, and no Python.h
    monkeypatch.setattr(compilers.sysconfig, "get_path", lambda *_: str(tmp_path))
    with pytest.raises(UserError, match=r"Python\.h(?s:.*)python3-dev"):
        compilers.refuse_without_compiler("cpu")
    monkeypatch.setenv("CPATH", f"{os.pathsep}{tmp_path / 'include'}")
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "Python.h").touch()
    compilers.refuse_without_compiler("cpu")
    monkeypatch.delenv("CXX")
    module = ImageClassifier(nn.Flatten(), compile="max-autotune")
    with pytest.raises(UserError, match=r"C\+\+ compiler"):
        module.configure_model()


@pytest.mark.parametrize("given", [None, "torchs", "users"])
def test_results_are_kept_where_the_user_wants_them(monkeypatch, tmp_path, given):
    import tempfile

    monkeypatch.setenv("DISTDL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(compilers.FOLDER, raising=False)
    if given is not None:
        torchs = Path(tempfile.gettempdir(), "torchinductor_me")
        place = torchs if given == "torchs" else tmp_path / "mine"
        monkeypatch.setenv(compilers.FOLDER, str(place))
    compilers.keep_results()
    expected = "mine" if given == "users" else "cache/inductor"
    assert os.environ[compilers.FOLDER] == str(tmp_path / expected)


NETWORK = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self, num_classes):
        layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
        super().__init__(*layers, nn.Flatten(), nn.Linear(8, num_classes))
"""


def test_the_measured_way_is_frozen_in_the_run(tmp_path):
    import yaml

    (tmp_path / "tiny.py").write_text(NETWORK)
    done = distdl(
        *("model=classifier", "+model.network._target_=tiny.Net", "project.allow=[tiny]"),
        *("+model.network.num_classes=10", "model.compile=measured", "data=synthetic"),
        *("data.image_size=16", "data.num_classes=10", "data.train_samples=64"),
        *("data.val_samples=8", "data.batch_size=4", "data.num_workers=0", "tracking=none"),
        *("schedule.warmup_epochs=0", "trainer.accelerator=cpu", "trainer.max_steps=2", "name=c"),
        cwd=tmp_path,
        module=UNCHECKED,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    launch = yaml.safe_load((tmp_path / "outputs/default/c/attempts/001/launch.yaml").read_text())
    said = launch["compile"]
    assert [line.split()[0] for line in said] == ["model.compile=false", "model.compile=default"]
    assert all("ms a step" in line for line in said), "both trained"
    assert launch["changes"]["model.compile"] in (False, "default")


# ------------------------------------------------------------------------------------------- DDP


@pytest.mark.parametrize("given, first_mb", [({}, 1), ({"first_bucket_mb": 25}, 25)])
def test_the_first_bucket_of_ddp_is_small(given, first_mb):
    import torch.distributed as dist
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from torchvision.models import resnet18

    from distdl.strategies import DDPStrategy

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        strategy = DDPStrategy(
            parallel_devices=[torch.device("cpu")],
            cluster_environment=LightningEnvironment(),
            gradient_as_bucket_view=True,
            **given,
        )
        model = strategy._setup_model(resnet18(num_classes=10))
        for _ in range(3):  # DDP makes its buckets anew after the first step
            model(torch.randn(2, 3, 32, 32)).sum().backward()
        sizes = model._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    finally:
        dist.destroy_process_group()
    # A bucket is full with the parameter that reaches its size: 9 MB are layer4's convolution.
    first = int(str(sizes).split(",")[0]) / 2**20
    assert first_mb <= first < first_mb + 9.1
