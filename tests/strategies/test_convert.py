"""`python -m distdl convert`: every form that a checkpoint can have, into a file that is equal."""

from pathlib import Path

import pytest
import torch
from torchvision.models import resnet18

from distdl.checkpoint import convert as parts
from distdl.cli import convert
from distdl.models import ImageClassifier
from distdl.models.classifier import with_group_norm
from distdl.util.errors import UserError
from tests.strategies.matrix import (
    HALF,
    SAME_TO,
    TOPOLOGIES,
    difference,
    read,
    read_by_lightning,
    step,
)

# With test_equality: they share the runs.
pytestmark = pytest.mark.xdist_group("strategies")


@pytest.fixture
def source(runs, tmp_path, monkeypatch):
    """A checkpoint of one process; the command runs in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return step(runs.train("single"))


@pytest.fixture
def converted(capsys, source):
    """What the command prints."""

    def convert_to(file, target, *more):
        assert convert.main([str(file), "--to", target, *more]) == 0
        return capsys.readouterr().out

    return convert_to


@pytest.mark.parametrize("name", ["fsdp x2", "zero1 x2", "zero3 x2"])
def test_a_folder_becomes_the_file_of_the_same_training(name, runs, converted):
    topology, whole = TOPOLOGIES[name], runs.train(name)
    folder = step(runs.train(f"sharded {name}", topology.plus("checkpoint.sharded=true")), HALF)
    assert folder.is_dir()
    output = converted(folder, "ddp", "--world-size", "4", "--output", "whole.ckpt")
    assert "equal: weights, 62 tensors" in output
    assert "equal: optimizer state, 62 tensors" in output
    assert "strategy=ddp trainer.devices=4 checkpoint.resume_from=whole.ckpt" in output
    assert difference(step(whole, HALF), Path("whole.ckpt")) == 0
    read_by_lightning(Path("whole.ckpt"), step(whole, HALF))
    # It is read without conversion, too.
    direct = runs.train(f"sharded {name} then single", TOPOLOGIES["single"], resume=folder)
    assert difference(step(whole), step(direct)) < SAME_TO


@pytest.mark.parametrize("target", ["weights.pth", "weights.safetensors"])
def test_weights_for_others_and_back(target, converted, source):
    assert "equal: weights, 62 tensors" in converted(source, "weights", "--output", target)
    network = with_group_norm(resnet18(num_classes=10))
    again = ImageClassifier(network, num_classes=10, weights=target).state_dict()
    trained = read(source)["state_dict"]
    assert all(torch.equal(value, trained[k]) for k, value in again.items())


BROKEN = {
    "README.md": lambda whole: b"# A title\n\ntext\n",
    "notes.ckpt": lambda whole: b"hello world\n",
    "empty.ckpt": lambda whole: b"",
    "half.ckpt": lambda whole: whole[: len(whole) // 2],
    "end.ckpt": lambda whole: whole[:-10],
    "bad.safetensors": lambda whole: b"garbage" * 10,
}
BAD = "is not a checkpoint, or an incomplete one"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("{source} --to fsdp --output there.ckpt", r"there\.ckpt exists"),
        ("{source} --to fsdp --world-size 3", "batch of 8 is not divisible by 3"),
        ("folder --to ddp", "folder: is not a checkpoint"),
        ("weights.pth --to ddp", r"model\.weights=weights\.pth"),
        ("weights.pth --to zero3", "did you mean --to deepspeed_zero3"),
        ("weights.pth --to weights --output z.bin", r"--output z\.pth"),
        ("weights.pth --to ddp --output z.pth", r"--output z\.ckpt"),
        ("objects.ckpt --to ddp", r"holds an object of pathlib\."),
        *((f"{name} --to ddp", f"{name}: {BAD}") for name in BROKEN),
    ],
)
def test_refused(words, message, source):
    """In one line that names the file, and with no advice to let it run code."""
    Path("there.ckpt").touch()
    Path("folder").mkdir()
    torch.save({"fc.weight": torch.ones(1)}, "weights.pth")
    torch.save({"state_dict": {}, "hparams": Path("x")}, "objects.ckpt")
    name = words.split()[0]
    if name in BROKEN:
        Path(name).write_bytes(BROKEN[name](source.read_bytes()))
    with pytest.raises(UserError, match=message) as error:
        convert.main(words.format(source=source).split())
    assert name not in BROKEN or "weights_only" not in str(error.value)


def test_an_average_is_reported(converted, source):
    output = converted(source, "fsdp")
    assert f"-> {Path(f'{source.stem}-fsdp.ckpt').absolute()}\n" in output
    assert "EMA" not in output and "equal: state of the callbacks" in output
    saved = read(source)
    torch.save({**saved, "current_model_state": saved["state_dict"]}, "ema.ckpt")
    assert "equal: weights behind the average (EMA), 62 tensors" in converted("ema.ckpt", "ddp")
    assert "these are the averaged weights (EMA)" in converted("ema.ckpt", "weights")


NAN = [1.0, float("nan")]


@pytest.mark.parametrize(
    "other",
    [
        {"a": [torch.tensor([1.0, 2.0])], "b": 0.5},
        {"a": [torch.tensor(NAN)], "b": 0.25},
        {"a": [], "b": 0.5},
        {"a": [torch.tensor(NAN)]},
        {"a": [torch.tensor(NAN, dtype=torch.float64)], "b": 0.5},
    ],
)
def test_a_difference_is_found(other):
    one, same = ({"a": [torch.tensor(NAN)], "b": 0.5} for _ in range(2))
    assert parts.compare(one, same, "") == 1
    with pytest.raises(RuntimeError, match="the written file"):
        parts.compare(one, other, "checkpoint")


def test_weights_of_another_network(tmp_path):
    file = tmp_path / "ten.pth"
    saved = resnet18(num_classes=10).state_dict()
    torch.save(saved, file)
    three = ImageClassifier(resnet18(num_classes=3), num_classes=3, weights=str(file))
    assert torch.equal(three.network.conv1.weight, saved["conv1.weight"])
    with pytest.raises(UserError, match="another network than Sequential"):
        ImageClassifier(torch.nn.Sequential(torch.nn.Linear(2, 2)), weights=str(file))
