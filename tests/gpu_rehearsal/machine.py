"""A machine with simulated GPUs: what is compiled for it, and the environment of its processes."""

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
METADATA = "Metadata-Version: 2.1\nName: gpu-rehearsal\nVersion: 1\n"
ENTRY_POINT = "[torch.backends]\ngpu_rehearsal = tests.gpu_rehearsal.simulation:install\n"


class CannotBeCompiled(Exception):
    """With what is missing."""


class Machine:
    """Compiles the runtime into `folder`, in about 2 s.

    Raises:
        CannotBeCompiled: No compiler, no headers, or another torch.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if tuple(map(int, importlib.metadata.version("torch").split(".")[:2])) < (2, 15):
            raise CannotBeCompiled("needs torch 2.15, whose way to NCCL it takes")
        sources = ["-std=c++17", *include_folders(), *sorted(map(str, RUNTIME.glob("*.cpp")))]
        compile_shared("g++", sources, folder / "librehearsal.so")
        # The driver's name is what torch and Triton open; it is found by LD_LIBRARY_PATH.
        compile_shared("gcc", [str(RUNTIME / "driver.c")], folder / "libcuda.so.1")
        (folder / "gpu_rehearsal-1.dist-info").mkdir()
        (folder / "gpu_rehearsal-1.dist-info/METADATA").write_text(METADATA)
        (folder / "gpu_rehearsal-1.dist-info/entry_points.txt").write_text(ENTRY_POINT)
        (folder / "nvidia-smi").write_text(NVIDIA_SMI)
        (folder / "nvidia-smi").chmod(0o755)

    def environment(self, cards: int = 1, **more: str) -> dict[str, str]:
        """Of a process on this machine with so many cards, all of which it sees."""
        inherited = {k: v for k, v in environment().items() if k != "CUDA_VISIBLE_DEVICES"}
        return {
            **inherited,
            "LD_PRELOAD": str(self.folder / "librehearsal.so"),
            "LD_LIBRARY_PATH": str(self.folder),
            "PATH": f"{self.folder}{os.pathsep}{inherited['PATH']}",
            "PYTHONPATH": f"{self.folder}{os.pathsep}{ROOT}",
            "SIMULATED_GPUS": str(cards),
            # Memory is fresh, which is to say 0, in the place of what a kernel would have written:
            # DeepSpeed reads from its gradients whether one is infinite, and ranks must agree.
            "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
            **more,
        }


def include_folders() -> list[str]:
    """CUDA's headers, which come with torch's own dependencies (part of them with Triton)."""
    folders = []
    for package in ("nvidia-cuda-runtime", "triton"):
        try:
            files = importlib.metadata.files(package) or []
            header = next(f for f in files if f.name == "cuda_runtime_api.h")
        except (importlib.metadata.PackageNotFoundError, StopIteration) as error:
            raise CannotBeCompiled(f"{package} has no cuda_runtime_api.h") from error
        folders.append(f"-I{Path(str(header.locate())).parent}")
    return folders


def compile_shared(compiler: str, arguments: list[str], output: Path) -> None:
    if shutil.which(compiler) is None:
        raise CannotBeCompiled(f"no {compiler} (Debian, Ubuntu: apt-get install g++)")
    options = ["-O1", "-Wall", "-Wextra", "-shared", "-fPIC", "-o", str(output)]
    done = subprocess.run([compiler, *options, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise CannotBeCompiled(done.stderr)
