"""How many ranks, and on what; decided without torch, before anything is submitted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from distdl.config import resources
from distdl.job import JobSpec, Resources
from distdl.launchers.local import LocalLauncher
from distdl.util.errors import UserError

VISIBLE = "CUDA_VISIBLE_DEVICES"


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Lets this machine show so many GPUs, by an nvidia-smi of our own."""

    def show(count: int, migs: int = 0, visible: str | None = None) -> None:
        lines = [f"GPU {n}: NVIDIA H100 (UUID: GPU-{n})\n" for n in range(count)]
        lines += [f"  MIG 1g.10gb Device {n}: (UUID: MIG-{count - 1}{n})\n" for n in range(migs)]
        (tmp_path / "listed").write_text("".join(lines))
        smi = tmp_path / "nvidia-smi"
        smi.write_text(f'#!/bin/sh\n[ "$1" = -L ] && cat {tmp_path}/listed\n')
        smi.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin:/usr/bin")
        if visible is not None:
            monkeypatch.setenv(VISIBLE, visible)

    monkeypatch.delenv(VISIBLE, raising=False)
    monkeypatch.setattr("platform.system", lambda: "Linux")
    show(0)
    return show


def resolved(local: bool = True, **trainer) -> Resources:
    return resources.resolve({"accelerator": "auto", "devices": "auto", **trainer}, local=local)


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, "0 1 2 3"),
        ("", ""),
        ("NoDevFiles", ""),  # what Slurm writes for a job without GPUs
        ("0, 2", "0 2"),
        ("0,-1,1", "0"),
        ("0,9,1", "0"),
        ("1,GPU-2", "1"),
        ("GPU-3,GPU-1,2", "GPU-3 GPU-1"),
        ("MIG-31,MIG-30", "MIG-31 MIG-30"),
    ],
)
def test_visible(gpus, visible, names) -> None:
    """CUDA's own meaning of its variable."""
    gpus(4, migs=2 if visible and "MIG" in visible else 0, visible=visible)
    assert resources.visible() == names.split()
    if visible is None:  # of several MIG instances CUDA shows one
        gpus(2, migs=3)
        assert resources.visible() == ["MIG-10"]


@pytest.mark.parametrize("visible", ["1,1", "9", "GPU-7a", "MIG-0"])
def test_a_list_of_which_cuda_shows_nothing(gpus, visible) -> None:
    """It was written to choose GPUs: not a night on the CPU."""
    gpus(2, visible=visible)
    with pytest.raises(UserError, match="CUDA shows none"):
        resolved()
    assert resolved(accelerator="cpu") == Resources(1, 1, "cpu")


@pytest.mark.parametrize(
    ("visible", "devices", "cards"),
    [
        ("4,5,6,7", [1, 2], ("5", "6")),
        ("4,5,6,7", 2, None),
        ("GPU-6,GPU-4", [1, 0], ("GPU-4", "GPU-6")),
        ("MIG-71,MIG-70", [1], ("MIG-70",)),
        (None, [1, 2], ("1", "2")),
    ],
)
def test_ids_are_indices_into_what_is_visible(gpus, visible, devices, cards) -> None:
    gpus(8, migs=2 if visible and "MIG" in visible else 0, visible=visible)
    size = resolved(devices=devices)
    assert size.device_ids == cards
    # And that is what the ranks get to see, here and in the record of the attempt.
    started = LocalLauncher().request(JobSpec("a/b", "/run", "/run", 1, size)).env
    assert started.get(VISIBLE) == (cards and ",".join(cards))


@pytest.mark.parametrize(
    ("count", "trainer", "expected"),
    [
        (0, {}, (1, 1, "cpu")),
        (0, {"devices": 3}, (1, 3, "cpu")),
        (4, {}, (1, 4, "gpu")),
        (4, {"devices": -1}, (1, 4, "gpu")),
        (4, {"devices": None}, (1, 4, "gpu")),
        (4, {"devices": [0, 3]}, (1, 2, "gpu", ("0", "3"))),
        (4, {"accelerator": "cuda", "devices": 1}, (1, 1, "gpu")),
        (4, {"accelerator": "cpu", "devices": 2}, (1, 2, "cpu")),
        # On a cluster `auto` must be a GPU or an error there; nothing is counted here.
        (4, {"local": False, "devices": 8, "num_nodes": 2}, (2, 8, "gpu")),
        (4, {"local": False, "devices": 8, "accelerator": "cpu"}, (1, 8, "cpu")),
    ],
)
def test_what_a_run_gets(gpus, count, trainer, expected) -> None:
    gpus(count)
    assert (size := resolved(**trainer)) == Resources(*expected)
    assert size.world_size == expected[0] * expected[1]


def test_on_a_mac_and_without_a_driver(gpus, tmp_path, monkeypatch) -> None:
    (tmp_path / "nvidia-smi").unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert resources.visible_gpus() == 0
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    assert resolved() == Resources(1, 1, "mps")


@pytest.mark.parametrize(
    ("count", "trainer", "path", "text"),
    [
        (0, {"accelerator": "gpu"}, "trainer.accelerator", "debug=cpu"),
        (2, {"devices": 4}, "trainer.devices", "trainer.devices=2"),
        (2, {"devices": [0, 2]}, "trainer.devices", "trainer.devices=2"),
        (2, {"devices": [1, 1]}, "trainer.devices", "write trainer.devices=[1]"),
        (0, {"devices": [0]}, "trainer.devices", "trainer.devices=1"),
        (2, {"accelerator": "cpu", "devices": [0, 1]}, "trainer.devices", "trainer.devices=2"),
        (2, {"num_nodes": 2}, "trainer.num_nodes", "trainer.num_nodes=1"),
        *(
            (4, {"local": False, "devices": devices}, "trainer.devices", "counted from here")
            for devices in ("auto", -1, [0, 1], None)
        ),
    ],
)
def test_what_is_refused(gpus, count, trainer, path, text) -> None:
    gpus(count)
    with pytest.raises(UserError) as error:
        resolved(**trainer)
    (problem,) = error.value.problems
    assert problem.path == path and text in f"{problem.what} {problem.remedy}"
