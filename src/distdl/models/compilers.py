"""Checks what torch.compile needs on a machine, and keeps its results."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import sysconfig
import tempfile

import torch
from torch import nn

from distdl.util.cache_folder import default_root
from distdl.util.errors import UserError

log = logging.getLogger(__name__)

FOLDER = "TORCHINDUCTOR_CACHE_DIR"


def keep_results() -> None:
    """Keeps Inductor's and Triton's results for the next run of the same model: in
    TORCHINDUCTOR_CACHE_DIR if the user has set it, else below `default_root`, not in /tmp."""
    # Importing Lightning makes torch set the variable itself, to a folder in /tmp.
    torchs_own = os.path.join(tempfile.gettempdir(), "torchinductor_")
    if os.environ.get(FOLDER, torchs_own).startswith(torchs_own):
        os.environ[FOLDER] = str(default_root() / "inductor")


def compile_in_place(network: nn.Module, mode: str) -> None:
    """`nn.Module.compile`, so that names in checkpoints do not change."""
    network.compile(mode=mode)
    if type(network).forward.__module__.startswith("torch.nn."):
        # torch 2.11 compiles nothing of a network whose forward is torch's own, such as that of
        # nn.Sequential, unless it is called by another function (pytorch#150915).
        call = network._call_impl
        network._compiled_call_impl = torch.compile(lambda *a, **kw: call(*a, **kw), mode=mode)


def mode_of(setting: bool | str, device: str, why_not: str = "") -> str | None:
    """The mode in which `model.compile` wants the network on a device; None: uncompiled.

    `auto` compiles on a GPU where a compiler is found. `measured` has been replaced by a mode
    before a training or a benchmark, and compiles nothing elsewhere.

    Args:
        why_not: Why `auto` compiles nothing here, whatever the device.

    Raises:
        UserError: A mode is asked for, and there is no compiler.
    """
    if setting == "auto":
        why_not = why_not or (missing(device) if device == "cuda" else "this is no GPU")
        told = f"is off: {why_not}" if why_not else "compiles the network, in the default mode"
        log.info("model.compile=auto %s", told)
        return None if why_not else "default"
    if setting in (False, "measured"):
        return None
    refuse_without_compiler(device)
    return "default" if setting is True else str(setting)


def refuse_without_compiler(device: str) -> None:
    """Raises UserError if this machine lacks what torch.compile needs."""
    if what := missing(device):
        packages = "apt-get install g++ python3-dev"
        raise UserError.at(
            "model.compile",
            what=what,
            remedy=f"install it (Debian, Ubuntu: {packages}), or model.compile=false",
            code="not-installed",
        )


def missing(device: str) -> str:
    """What torch.compile needs and this machine lacks, as a sentence; empty: nothing. It generates
    C++ for a CPU, and Triton kernels with a launcher in C for a GPU."""
    what = ""
    if device == "cpu" and not _on_path(os.environ.get("CXX"), "g++", "clang++"):
        what = "needs a C++ compiler (g++), and there is none on PATH"
    elif device in ("gpu", "cuda") and importlib.util.find_spec("triton") is None:
        what = "needs the package triton, which is not installed"
    elif device in ("gpu", "cuda") and not _on_path(os.environ.get("CC"), "gcc", "clang", "cc"):
        what = "needs a C compiler (gcc) for Triton, and there is none on PATH"
    elif device in ("cpu", "gpu", "cuda") and not _has_python_headers():
        folder = sysconfig.get_path("include")
        what = f"needs Python's headers (Python.h), which are not in {folder}"
    return what


def _has_python_headers() -> bool:
    """Whether Python.h exists: Triton's launchers and Inductor's C++ are Python extensions."""
    # Debian's default scheme names an empty folder; both compilers also search the other one.
    schemes = sysconfig.get_default_scheme(), "posix_prefix"
    folders = [sysconfig.get_path("include", scheme) for scheme in schemes]
    for variable in ("CPATH", "C_INCLUDE_PATH"):
        folders += filter(None, os.environ.get(variable, "").split(os.pathsep))
    return any(os.path.exists(os.path.join(folder, "Python.h")) for folder in folders)


def _on_path(*programs: str | None) -> bool:
    return any(shutil.which(program) for program in programs if program)
