"""Whether the results of hours can be written, asked before they are measured."""

from __future__ import annotations

import os
from pathlib import Path


def not_writable(file: Path) -> str:
    """Why a file could not be written, or replaced; "" if it can. Its folder may be absent."""
    if file.exists() and not (file.is_file() and os.access(file, os.W_OK)):
        return f"{file}: cannot be written"
    folder = file.parent if file.parent.exists() else file.parent.parent
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        return f"{folder}: nothing can be written there"
    return ""
