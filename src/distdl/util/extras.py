"""Packages that are missing, and what installs them."""

from __future__ import annotations

import re
from importlib import metadata

# A requirement of distdl's metadata that an extra adds: `onnx>=1.18; extra == "onnx"`.
_ADDED = re.compile(r"""([\w.-]+).*;.*\bextra\s*==\s*["'](\w+)["']""")


def missing_module(error: BaseException) -> str:
    """The module that was not found, also if a library has raised another error from that; "" if it
    is no such error."""
    each: BaseException | None = error
    while each is not None:
        if isinstance(each, ModuleNotFoundError) and each.name:
            return each.name
        each = each.__cause__
    return ""


def install(module: str) -> str:
    """What to type for a missing module: the extra of distdl that brings its package, or the
    package itself."""
    package = module.partition(".")[0]
    extra = _extras().get(_normal(package))
    return f"pip install 'distdl[{extra}]'" if extra else f"pip install {package}"


def _extras() -> dict[str, str]:
    """Package -> the first extra that brings it; empty where distdl runs without its metadata."""
    try:
        requirements = metadata.requires("distdl") or []
    except metadata.PackageNotFoundError:
        return {}
    found: dict[str, str] = {}
    for text in requirements:
        if added := _ADDED.fullmatch(text):
            found.setdefault(_normal(added[1]), added[2])
    return found


def _normal(name: str) -> str:
    """A name as it is compared (https://peps.python.org/pep-0503/#normalized-names)."""
    return re.sub(r"[-_.]+", "-", name).lower()
