"""A machine with simulated GPUs: what is compiled for it, and the environment of its processes."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
from pathlib import Path

from tests.conftest import ROOT, environment

RUNTIME = Path(__file__).parent / "runtime"
# Answers `nvidia-smi -L`, with the UUIDs of runtime/devices.cpp.
NVIDIA_SMI = """#!/bin/sh
card=0
while [ $card -lt "${SIMULATED_GPUS:-1}" ]; do
    printf 'GPU %d: Simulated GPU %d ' $card $card
    printf '(UUID: GPU-%08x-0000-0000-0000-000000000000)\\n' $((card + 1))
    card=$((card + 1))
done
"""


class CannotBeCompiled(Exception):
    """With what is missing."""


class Machine:
    """Compiles the runtime into `folder`, in about 2 s.

    Raises:
        CannotBeCompiled: No compiler, no headers, or another torch.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if torch_version() < (2, 15):
            raise CannotBeCompiled("needs torch 2.15, whose way to NCCL it takes")
        headers = include_folders()
        sources = sorted(map(str, RUNTIME.glob("*.cpp")))
        # The driver's name is what torch and Triton open; it is found by LD_LIBRARY_PATH.
        driver, self.runtime = folder / "libcuda.so.1", folder / "librehearsal.so"
        compile_shared("g++", ["-std=c++17", *headers, *sources], self.runtime)
        compile_shared("gcc", [str(RUNTIME / "driver.c")], driver)
        script = folder / "nvidia-smi"
        script.write_text(NVIDIA_SMI)
        script.chmod(0o755)
        about = folder / "gpu_rehearsal-1.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: gpu-rehearsal\nVersion: 1\n")
        (about / "entry_points.txt").write_text(
            "[torch.backends]\ngpu_rehearsal = tests.gpu_rehearsal.simulation:install\n"
        )

    def environment(self, cards: int = 1, **more: str) -> dict[str, str]:
        """Of a process on this machine with so many cards, all of which it sees."""
        inherited = environment()
        inherited.pop("CUDA_VISIBLE_DEVICES", None)
        paths = [str(self.folder), str(ROOT)]
        return {
            **inherited,
            "LD_PRELOAD": str(self.runtime),
            "LD_LIBRARY_PATH": str(self.folder),
            "PATH": f"{self.folder}{os.pathsep}{inherited['PATH']}",
            "PYTHONPATH": os.pathsep.join(paths),
            "SIMULATED_GPUS": str(cards),
            # Memory is fresh, which is to say 0, in the place of what a kernel would have written:
            # DeepSpeed reads from its gradients whether one is infinite, and ranks must agree.
            "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
            **more,
        }


def torch_version() -> tuple[int, ...]:
    return tuple(int(part) for part in importlib.metadata.version("torch").split(".")[:2])


def include_folders() -> list[str]:
    """CUDA's headers, which come with torch's own dependencies (part of them with Triton)."""
    found = []
    for package in ("nvidia-cuda-runtime", "triton"):
        try:
            files = importlib.metadata.files(package) or []
        except importlib.metadata.PackageNotFoundError as error:
            raise CannotBeCompiled(f"{package} is not installed: torch without CUDA") from error
        headers = [f for f in files if f.name == "cuda_runtime_api.h"]
        if not headers:
            raise CannotBeCompiled(f"{package} has no cuda_runtime_api.h")
        found.append(f"-I{Path(str(headers[0].locate())).parent}")
    return found


def compile_shared(compiler: str, arguments: list[str], output: Path) -> None:
    if shutil.which(compiler) is None:
        raise CannotBeCompiled(f"no {compiler} (Debian, Ubuntu: apt-get install g++)")
    done = subprocess.run(
        [compiler, "-O1", "-Wall", "-Wextra", "-shared", "-fPIC", *arguments, "-o", str(output)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise CannotBeCompiled(done.stderr)
