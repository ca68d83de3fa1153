"""`python -m distdl convert`: every form that a checkpoint can have, into a file that is equal."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distdl.checkpoint import convert as parts
from distdl.cli import convert
from distdl.util.errors import UserError
from tests.strategies.matrix import (
    HALF,
    SAME_TO,
    STEPS,
    TOPOLOGIES,
    Runs,
    difference,
    read_by_lightning,
    step,
)

# With test_equality: they share the runs.
pytestmark = pytest.mark.xdist_group("strategies")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["fsdp x2", "zero1 x2", "zero3 x2"])
def test_a_folder_becomes_the_file_of_the_same_training(
    name: str, runs: Runs, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = runs.whole(name)
    sharded = runs.train(f"sharded {name}", TOPOLOGIES[name], "checkpoint.sharded=true")
    folder = step(sharded, HALF)
    assert folder.is_dir()
    code = convert.main([str(folder), "--to", "ddp", "--world-size", "4", "--output", "whole.ckpt"])
    said = capsys.readouterr().out
    assert code == 0 and "equal: weights, 62 tensors" in said
    assert "equal: optimizer state, 62 tensors" in said
    assert "strategy=ddp trainer.devices=4 checkpoint.resume_from=whole.ckpt" in said
    assert difference(step(whole, HALF), here / "whole.ckpt") == 0
    read_by_lightning(here / "whole.ckpt", step(whole, HALF))
    # It is read without conversion, too.
    on_the_fly = runs.train(f"sharded {name} then single", TOPOLOGIES["single"], resume=folder)
    assert difference(step(whole, STEPS), step(on_the_fly, STEPS)) < SAME_TO


def test_weights_for_others_and_back(
    runs: Runs, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from torchvision.models import resnet18

    from distdl.models import ImageClassifier
    from distdl.models.classifier import with_group_norm

    source = step(runs.whole("single"), STEPS)
    for target in ("weights.pth", "weights.safetensors"):
        assert convert.main([str(source), "--to", "weights", "--output", target]) == 0
        assert "equal: weights, 62 tensors" in capsys.readouterr().out
        network = with_group_norm(resnet18(num_classes=10))
        again = ImageClassifier(network, num_classes=10, weights=target)
        trained = torch.load(source, weights_only=True)["state_dict"]
        assert all(torch.equal(value, trained[k]) for k, value in again.state_dict().items())


def test_refusals(runs: Runs, here: Path) -> None:
    source = str(step(runs.whole("single"), STEPS))
    (here / "there.ckpt").touch()
    with pytest.raises(UserError, match=r"there\.ckpt exists"):
        convert.main([source, "--to", "fsdp", "--output", "there.ckpt"])
    with pytest.raises(UserError, match="batch of 8 does not divide by 3"):
        convert.main([source, "--to", "fsdp", "--world-size", "3"])
    (here / "folder").mkdir()
    with pytest.raises(UserError, match="folder: is not a checkpoint"):
        convert.main(["folder", "--to", "ddp"])
    torch.save({"fc.weight": torch.ones(1)}, "weights.pth")
    with pytest.raises(UserError, match=r"model\.weights=weights\.pth"):
        convert.main(["weights.pth", "--to", "ddp"])
    for typed, said in (
        ("--to zero3", "did you mean --to deepspeed_zero3"),
        ("--to weights --output z.bin", r"--output z\.pth"),
        ("--to ddp --output z.pth", r"--output z\.ckpt"),
    ):
        with pytest.raises(UserError, match=said):
            convert.main(["weights.pth", *typed.split()])


def test_what_is_no_checkpoint(runs: Runs, here: Path) -> None:
    """One line that names the file, and no advice to let it run code."""
    whole = step(runs.whole("single"), STEPS).read_bytes()
    files = {
        "README.md": b"# A title\n\ntext\n",
        "notes.ckpt": b"hello world\n",
        "empty.ckpt": b"",
        "half.ckpt": whole[: len(whole) // 2],
        "end.ckpt": whole[:-10],
        "bad.safetensors": b"garbage" * 10,
    }
    for name, content in files.items():
        (here / name).write_bytes(content)
        with pytest.raises(
            UserError, match=f"{name}: is not a checkpoint, or not all of one"
        ) as told:
            convert.main([name, "--to", "ddp"])
        assert "weights_only" not in str(told.value)
    torch.save({"state_dict": {}, "hparams": Path("x")}, "objects.ckpt")
    with pytest.raises(UserError, match=r"holds an object of pathlib\."):
        convert.main(["objects.ckpt", "--to", "ddp"])


def test_what_is_said_of_an_average(
    runs: Runs, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = step(runs.whole("single"), STEPS)
    convert.main([str(source), "--to", "fsdp"])
    said = capsys.readouterr().out
    assert f"-> {here / f'{source.stem}-fsdp.ckpt'}\n" in said
    assert "EMA" not in said and "equal: state of the callbacks" in said
    saved = torch.load(source, weights_only=True)
    torch.save({**saved, "current_model_state": saved["state_dict"]}, "ema.ckpt")
    convert.main(["ema.ckpt", "--to", "ddp"])
    assert "equal: weights behind the average (EMA), 62 tensors" in capsys.readouterr().out
    convert.main(["ema.ckpt", "--to", "weights"])
    assert "these are the averaged weights (EMA)" in capsys.readouterr().out


def test_a_difference_is_found() -> None:
    one = {"a": [torch.tensor([1.0, float("nan")])], "b": 0.5}
    assert parts.compare(one, {"a": [torch.tensor([1.0, float("nan")])], "b": 0.5}, "") == 1
    for other in (
        {"a": [torch.tensor([1.0, 2.0])], "b": 0.5},
        {"a": [torch.tensor([1.0, float("nan")])], "b": 0.25},
        {"a": [], "b": 0.5},
        {"a": [torch.tensor([1.0, float("nan")])]},
        {"a": [torch.tensor([1.0, float("nan")], dtype=torch.float64)], "b": 0.5},
    ):
        with pytest.raises(RuntimeError, match="what was written"):
            parts.compare(one, other, "checkpoint")


def test_weights_of_another_network(here: Path) -> None:
    from torchvision.models import resnet18

    from distdl.models import ImageClassifier

    torch.save(resnet18(num_classes=10).state_dict(), "ten.pth")
    three = ImageClassifier(resnet18(num_classes=3), num_classes=3, weights="ten.pth")
    saved = torch.load("ten.pth")
    assert torch.equal(three.network.conv1.weight, saved["conv1.weight"])
    with pytest.raises(UserError, match="another network than Sequential"):
        ImageClassifier(torch.nn.Sequential(torch.nn.Linear(2, 2)), weights="ten.pth")
