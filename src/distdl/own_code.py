"""Where the user's own code is. Standard library only: the command line asks before anything."""

from __future__ import annotations

from pathlib import Path


def own_folders(root: str | Path) -> tuple[str, ...]:
    """The folder that a command is typed in, then the root of its project.

    A run's folder is neither, although one may stand in it: it may come from somebody else.
    """
    folders = dict.fromkeys((Path.cwd(), Path(root).absolute()))
    return tuple(str(folder) for folder in folders if not in_a_run(folder))


def in_a_run(folder: Path) -> bool:
    """Whether a folder is a run's, or lies in one."""
    return any(
        (place / "config.yaml").is_file() and (place / "attempts").is_dir()
        for place in (folder, *folder.parents)
    )
