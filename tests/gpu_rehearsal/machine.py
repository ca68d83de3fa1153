"""A machine with simulated GPUs: what is compiled for it, and the environment of its processes."""

import importlib.metadata
import os
import subprocess
from pathlib import Path

from tests.conftest import ROOT, environment
from tests.written import program, write

RUNTIME = Path(__file__).parent / "runtime"
# Answers `nvidia-smi -L`, with the UUIDs of runtime/devices.cpp.
NVIDIA_SMI = """card=0
while [ $card -lt "${SIMULATED_GPUS:-1}" ]; do
    printf 'GPU %d: Simulated GPU %d ' $card $card
    printf '(UUID: GPU-%08x-0000-0000-0000-000000000000)\\n' $((card + 1))
    card=$((card + 1))
done
"""
METADATA = "Metadata-Version: 2.1\nName: gpu-rehearsal\nVersion: 1\n"
ENTRY_POINT = "[torch.backends]\ngpu_rehearsal = tests.gpu_rehearsal.simulation:install\n"


class Machine:
    """Compiles the runtime into `folder`, in about 2 s.

    Raises:
        ImportError, OSError, RuntimeError: No headers, no compiler, or another torch.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if tuple(map(int, importlib.metadata.version("torch").split(".")[:2])) < (2, 15):
            raise RuntimeError("needs torch 2.15, whose way to NCCL it takes")
        sources = ["-std=c++17", *include_folders(), *sorted(map(str, RUNTIME.glob("*.cpp")))]
        compile_shared("g++", sources, folder / "librehearsal.so")
        # The driver's name is what torch and Triton open; it is found by LD_LIBRARY_PATH.
        compile_shared("gcc", [str(RUNTIME / "driver.c")], folder / "libcuda.so.1")
        info = "gpu_rehearsal-1.dist-info"
        write(folder, {f"{info}/METADATA": METADATA, f"{info}/entry_points.txt": ENTRY_POINT})
        program(folder / "nvidia-smi", NVIDIA_SMI)

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
        files = importlib.metadata.files(package) or []
        headers = [file.locate() for file in files if file.name == "cuda_runtime_api.h"]
        folders += [f"-I{Path(str(header)).parent}" for header in headers]
    return folders


def compile_shared(compiler: str, arguments: list[str], output: Path) -> None:
    options = ["-O1", "-Wall", "-Wextra", "-shared", "-fPIC", "-o", str(output)]
    done = subprocess.run([compiler, *options, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
