"""What torch.compile needs on a machine, and where its results are kept."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile

from distdl.errors import Problem, UserError
from distdl.shards.cache import default_root

FOLDER = "TORCHINDUCTOR_CACHE_DIR"


def keep_results() -> None:
    """Inductor's and Triton's results outlive /tmp: the next run of the same model finds them.

    They go to TORCHINDUCTOR_CACHE_DIR where the user has set it, else below `default_root`.
    """
    # Importing Lightning makes torch set the variable itself, to a folder in /tmp.
    torchs_own = os.path.join(tempfile.gettempdir(), "torchinductor_")
    if os.environ.get(FOLDER, torchs_own).startswith(torchs_own):
        os.environ[FOLDER] = str(default_root() / "inductor")


def refuse_without_compiler(device: str) -> None:
    """torch.compile writes C++ for a CPU and Triton for a GPU, whose launcher is C.

    Raises:
        UserError: What it needs is not on this machine.
    """
    what = ""
    if device == "cpu":
        if not _on_path(os.environ.get("CXX"), "g++", "clang++"):
            what = "needs a C++ compiler (g++), and there is none on PATH"
    elif device in ("gpu", "cuda") and importlib.util.find_spec("triton") is None:
        what = "needs the package triton, which is not installed"
    elif device in ("gpu", "cuda") and not _on_path(os.environ.get("CC"), "gcc", "clang", "cc"):
        what = "needs a C compiler (gcc) for Triton, and there is none on PATH"
    if what:
        remedy = "install it (Debian, Ubuntu: apt-get install g++), or model.compile=false"
        raise UserError(Problem("model.compile", what, remedy))


def _on_path(*programs: str | None) -> bool:
    return any(shutil.which(program) for program in programs if program)
