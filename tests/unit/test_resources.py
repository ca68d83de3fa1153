"""How many ranks, and on what; decided without torch, before anything is submitted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from distdl.config import resources
from distdl.job import JobSpec, Resources
from distdl.launchers.local import LocalLauncher
from distdl.util.errors import UserError


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Lets this machine show so many GPUs, by an nvidia-smi of our own."""

    def show(count: int, migs: int = 0) -> None:
        listed = "".join(f"GPU {n}: NVIDIA H100 (UUID: GPU-{n})\n" for n in range(count))
        listed += "".join(
            f"  MIG 1g.10gb Device {n}: (UUID: MIG-{count - 1}{n})\n" for n in range(migs)
        )
        (tmp_path / "listed").write_text(listed)
        smi = tmp_path / "nvidia-smi"
        smi.write_text(f'#!/bin/sh\n[ "$1" = -L ] && cat {tmp_path}/listed\n')
        smi.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin:/usr/bin")

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("platform.system", lambda: "Linux")
    show(0)
    return show


def local(**trainer) -> Resources:
    return resources.resolve({"accelerator": "auto", "devices": "auto", **trainer}, local=True)


def elsewhere(**trainer) -> Resources:
    return resources.resolve({"accelerator": "auto", "devices": "auto", **trainer}, local=False)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (None, ["0", "1", "2", "3"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),  # what Slurm says to a job without GPUs
        ("0, 2", ["0", "2"]),
        ("2,0", ["2", "0"]),
        ("0,-1,1", ["0"]),
        ("0,9,1", ["0"]),
        ("1,GPU-2", ["1"]),
        ("GPU-2", ["GPU-2"]),
        ("GPU-3,GPU-1,2", ["GPU-3", "GPU-1"]),
        ("MIG-31,MIG-30", ["MIG-31", "MIG-30"]),
    ],
)
def test_visible(gpus, monkeypatch, given, names) -> None:
    """CUDA's own meaning of its variable."""
    gpus(4)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    if given and given.startswith("MIG"):
        gpus(4, migs=2)
    assert resources.visible() == names
    if given is None:  # of several MIG instances CUDA shows one
        gpus(2, migs=3)
        assert resources.visible() == ["MIG-10"]


@pytest.mark.parametrize("given", ["1,1", "9", "GPU-7a", "MIG-0"])
def test_a_list_of_which_cuda_shows_nothing(gpus, monkeypatch, given) -> None:
    """It was written to choose GPUs: not a night on the CPU."""
    gpus(2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    with pytest.raises(UserError, match="CUDA shows none"):
        local()
    assert local(accelerator="cpu") == Resources(1, 1, "cpu")


@pytest.mark.parametrize(
    ("given", "devices", "cards"),
    [
        ("4,5,6,7", [1, 2], ("5", "6")),
        ("4,5,6,7", [3], ("7",)),
        ("4,5,6,7", 2, None),
        ("GPU-6,GPU-4", [1, 0], ("GPU-4", "GPU-6")),
        ("MIG-71,MIG-70", [1], ("MIG-70",)),
        (None, [1, 2], ("1", "2")),
    ],
)
def test_ids_are_indices_into_what_is_visible(gpus, monkeypatch, given, devices, cards) -> None:
    gpus(8, migs=2 if given and "MIG" in given else 0)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    size = local(devices=devices)
    assert size.device_ids == cards
    # And that is what the ranks get to see, here and in the record of the attempt.
    started = LocalLauncher().request(JobSpec("a/b", "/run", "/run", 1, size)).env
    assert started.get("CUDA_VISIBLE_DEVICES") == (cards and ",".join(cards))


@pytest.mark.parametrize(
    ("count", "trainer", "expected"),
    [
        (0, {}, Resources(1, 1, "cpu")),
        (0, {"devices": -1}, Resources(1, 1, "cpu")),
        (0, {"devices": 3}, Resources(1, 3, "cpu")),
        (4, {}, Resources(1, 4, "gpu")),
        (4, {"devices": -1}, Resources(1, 4, "gpu")),
        (4, {"devices": None}, Resources(1, 4, "gpu")),
        (4, {"devices": 2}, Resources(1, 2, "gpu")),
        (4, {"devices": [0, 3]}, Resources(1, 2, "gpu", ("0", "3"))),
        (4, {"accelerator": "cuda", "devices": 1}, Resources(1, 1, "gpu")),
        (4, {"accelerator": "cpu"}, Resources(1, 1, "cpu")),
        (4, {"accelerator": "cpu", "devices": 2}, Resources(1, 2, "cpu")),
    ],
)
def test_on_this_machine(gpus, count, trainer, expected) -> None:
    gpus(count)
    assert local(**trainer) == expected


def test_on_a_mac_and_without_a_driver(gpus, tmp_path, monkeypatch) -> None:
    (tmp_path / "nvidia-smi").unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert resources.visible_gpus() == 0
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    assert local() == Resources(1, 1, "mps")


@pytest.mark.parametrize(
    ("count", "trainer", "path", "remedy"),
    [
        (0, {"accelerator": "gpu"}, "trainer.accelerator", "debug=cpu"),
        (2, {"devices": 4}, "trainer.devices", "trainer.devices=2"),
        (2, {"devices": [0, 2]}, "trainer.devices", "trainer.devices=2"),
        (2, {"devices": [1, 1]}, "trainer.devices", "write trainer.devices=[1]"),
        (2, {"devices": [-1]}, "trainer.devices", "trainer.devices=2"),
        (0, {"devices": [0]}, "trainer.devices", "trainer.devices=1"),
        (2, {"accelerator": "cpu", "devices": [0, 1]}, "trainer.devices", "trainer.devices=2"),
        (2, {"num_nodes": 2}, "trainer.num_nodes", "trainer.num_nodes=1"),
    ],
)
def test_what_this_machine_does_not_have(gpus, count, trainer, path, remedy) -> None:
    gpus(count)
    with pytest.raises(UserError) as refused:
        local(**trainer)
    (problem,) = refused.value.problems
    assert problem.path == path and remedy in problem.remedy


def test_elsewhere_nothing_is_counted_here(gpus) -> None:
    gpus(4)
    # On a cluster `auto` must be a GPU or an error there, never a night on the CPU.
    assert elsewhere(devices=8, num_nodes=2) == Resources(2, 8, "gpu")
    assert Resources(2, 8).world_size == 16
    assert elsewhere(devices=8, accelerator="cpu") == Resources(1, 8, "cpu")
    for devices in ("auto", -1, [0, 1], None):
        with pytest.raises(UserError, match="cannot be counted from here"):
            elsewhere(devices=devices)
