"""`python -m distdl convert`: every form that a checkpoint can have, into a file that is equal."""

from pathlib import Path

import pytest
import torch

from distdl.checkpoint import convert as parts
from distdl.cli import convert
from distdl.models import ImageClassifier
from distdl.models.classifier import with_group_norm
from distdl.util.errors import UserError
from tests.conftest import matrix_only
from tests.strategies import matrix
from tests.strategies.matrix import HALF, SAME_TO, TOPOLOGIES, difference, read, step

# With test_equality: they share the runs.
pytestmark = pytest.mark.xdist_group("strategies")
TENSORS = len([*matrix.network().parameters()])


@pytest.fixture
def source(runs, tmp_path, monkeypatch):
    """A checkpoint of one process; the command runs in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return step(runs.train("single"))


@pytest.fixture
def converted(capsys, source):
    """What the command prints."""

    def convert_to(file, target, *more):
        assert convert.main([str(file), "--to", target, *more]).exit_code == 0
        return capsys.readouterr().out

    return convert_to


OTHERS = [pytest.param(name, marks=matrix_only) for name in ("zero1 x2", "zero3 x2")]


@pytest.mark.parametrize("name", ["fsdp x2", *OTHERS])
def test_a_folder_becomes_the_file_of_the_same_training(name, runs, converted):
    topology = TOPOLOGIES[name]
    whole = runs.train(name)
    folder = step(runs.train(f"sharded {name}", topology.plus("checkpoint.sharded=true")), HALF)
    assert folder.is_dir()
    output = converted(folder, "ddp", "--world-size", "4", "--output", "whole.ckpt")
    for part in ("weights", "optimizer state"):
        assert f"equal: {part}, {TENSORS} tensors" in output
    assert "strategy=ddp trainer.devices=4 checkpoint.resume_from=whole.ckpt" in output
    assert difference(step(whole, HALF), Path("whole.ckpt")) == 0
    # It is read without conversion, too.
    direct = runs.train(f"sharded {name} then single", TOPOLOGIES["single"], resume=folder)
    assert difference(step(whole), step(direct)) < SAME_TO


def test_weights_for_others_and_back_and_of_an_average(converted, source):
    trained = read(source)
    for target in ("weights.pth", "weights.safetensors"):
        assert f"equal: weights, {TENSORS} tensors" in converted(
            source, "weights", "--output", target
        )
        again = ImageClassifier(with_group_norm(matrix.network()), num_classes=10, weights=target)
        for name, value in again.state_dict().items():
            assert torch.equal(value, trained["state_dict"][name])
    output = converted(source, "fsdp")
    assert f"-> {Path(f'{source.stem}-fsdp.ckpt').absolute()}\n" in output
    assert "EMA" not in output
    assert "equal: state of the callbacks" in output
    torch.save({**trained, "current_model_state": trained["state_dict"]}, "ema.ckpt")
    average = f"equal: weights behind the average (EMA), {TENSORS} tensors"
    assert average in converted("ema.ckpt", "ddp")
    settings = {"distdl_modules": {"settings": {"0": {"eps": 0.1}, "1": {"training": False}}}}
    torch.save({**trained, **settings, "current_model_state": trained["state_dict"]}, "ema.ckpt")
    output = converted("ema.ckpt", "weights")
    assert "these are the averaged weights (EMA)" in output
    assert "weights lack settings that a callback changed: 0.eps\n" in output
    three = with_group_norm(matrix.network(classes=3))  # keeps its own last layer
    fine_tuned = ImageClassifier(three, num_classes=3, weights="weights.pth").state_dict()
    first = next(iter(fine_tuned))
    assert torch.equal(fine_tuned[first], trained["state_dict"][first])
    with pytest.raises(UserError, match="another network than Sequential"):
        ImageClassifier(torch.nn.Sequential(torch.nn.Linear(2, 2)), weights="weights.pth")


DAMAGED = ("empty.ckpt", "end.ckpt", "b.safetensors")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("{source} --to fsdp --output there.ckpt", r"there\.ckpt exists"),
        ("{source} --to fsdp --world-size 3", "batch of 8 is not divisible by 3"),
        ("folder --to ddp", "folder: is not a checkpoint"),
        ("weights.pth --to ddp", r"model\.weights=weights\.pth"),
        ("weights.pth --to weights --output z.bin", r"--output z\.pth"),
        ("weights.pth --to ddp --output z.pth", r"--output z\.ckpt"),
        ("objects.ckpt --to ddp", r"holds an object of pathlib\."),
        *((f"{name} --to ddp", f"{name}: is not a checkpoint, or an incompl") for name in DAMAGED),
    ],
)
def test_refused(words, message, source):
    """In one line that names the file, and with no advice to let it run code."""
    Path("there.ckpt").touch()
    Path("empty.ckpt").touch()
    Path("folder").mkdir()
    Path("end.ckpt").write_bytes(source.read_bytes()[:-10])
    Path("b.safetensors").write_bytes(b"garbage" * 10)
    torch.save({"fc.weight": torch.ones(1)}, "weights.pth")
    torch.save({"state_dict": {}, "hparams": Path("x")}, "objects.ckpt")
    with pytest.raises(UserError, match=message) as error:
        convert.main(words.format(source=source).split())
    assert "weights_only" not in str(error.value)


def test_a_difference_is_found():
    one, same = ({"a": [torch.tensor([1.0, float("nan")])], "b": 0.5} for _ in range(2))
    assert parts.compare(one, same, "") == 1
    for other in ({**one, "a": [torch.tensor([1.0, 2.0])]}, {**one, "b": 0.25}):
        with pytest.raises(RuntimeError, match="the written file"):
            parts.compare(one, other, "checkpoint")
