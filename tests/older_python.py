"""The programs of a container's image whose `python` distdl cannot use."""

import shutil
import sys
from pathlib import Path


def put(folder: Path, version: tuple[int, int, int] | None) -> dict[str, str]:
    """The variables with which a shell finds a `python` that says it is of that version, or none,
    and no other programs but the shell's own."""
    for name in ("sh", "mkdir", "cat"):
        (folder / name).symlink_to(str(shutil.which(name)))
    if version:
        older = f"import sys; sys.version_info = {(*version, 'final', 0)}; "
        python = folder / "python"
        python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{older}$2"\n')
        python.chmod(0o755)
    return {"PATH": str(folder)}
