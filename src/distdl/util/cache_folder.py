"""Where this machine keeps what can be made or downloaded again."""

from __future__ import annotations

import os
from pathlib import Path


def default_root() -> Path:
    """$DISTDL_CACHE; else on the local disk of an Azure VM; else in $XDG_CACHE_HOME or ~/.cache."""
    if folder := os.environ.get("DISTDL_CACHE"):
        return Path(folder).expanduser()
    for disk in ("/mnt/resource", "/mnt") if _on_azure() else ():  # waagent's, cloud-init's
        if os.path.ismount(disk) and os.access(disk, os.W_OK):
            return Path(disk, "distdl")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "distdl"


def _on_azure() -> bool:
    """Detects Azure by the chassis tag, like cloud-init (cloudinit/sources/DataSourceAzure.py)."""
    try:
        tag = Path("/sys/class/dmi/id/chassis_asset_tag").read_text(encoding="utf-8").strip()
    except OSError:
        return False
    return tag == "7783-7084-3265-9085-8269-3286-77"
