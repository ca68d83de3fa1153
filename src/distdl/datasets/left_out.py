"""Counts the files that are passed over, by reason and ending, so that none is without a word."""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable

from distdl.datasets.image_files import is_image
from distdl.datasets.image_headers import FORMATS, DamagedImage, format_of
from distdl.stores.files import read_file
from distdl.util.wording import plural

NO_IMAGE = f"no {', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
BESIDE = "beside the class folders"
_TEXT = {
    ".txt",
    ".csv",
    ".tsv",
    ".json",
    ".jsonl",
    ".xml",
    ".yaml",
    ".yml",
    ".toml",
    ".ini",
    ".md",
    ".html",
    ".htm",
    ".log",
}
_OFFICE = {".pdf", ".doc", ".docx", ".xls", ".xlsx", ".db", ".lnk"}
_CODE = {".py", ".pyc", ".ipynb", ".sh", ".js", ".css", ".c", ".h", ".cpp", ".so", ".dll", ".exe"}
_ARRAYS = {
    ".npy",
    ".npz",
    ".pt",
    ".pth",
    ".ckpt",
    ".pkl",
    ".safetensors",
    ".onnx",
    ".h5",
    ".parquet",
    ".tfrecord",
}
_ARCHIVES = {".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".zst", ".7z"}
_MEDIA = {".mp4", ".mov", ".avi", ".mkv", ".webm", ".mp3", ".wav"}
# Files with these endings are no images; of the others the first bytes decide.
NO_IMAGES = _TEXT | _OFFICE | _CODE | _ARRAYS | _ARCHIVES | _MEDIA
HEAD = 64  # bytes that show a format
SHOWN = 8  # endings that a line names


class LeftOut:
    """Files that are left out of a data set. Hidden files do not count."""

    def __init__(self) -> None:
        self.counts: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def __bool__(self) -> bool:
        return bool(self.counts)

    def add(self, name: str, reason: str) -> None:
        """Counts one file."""
        self.counts[reason][ending(name)] += 1

    def images(self, folder: str, names: Iterable[str]) -> list[str]:
        """Those `names` in a folder that are images: by their ending, or else by their first bytes.

        Also one that cannot be read, which is reported when it is loaded. Counts the others.
        """
        found = []
        for name in names:
            if name.startswith("."):
                continue
            if is_image(name) or has_image(os.path.join(folder, name)):
                found.append(name)
            else:
                self.add(name, NO_IMAGE)
        return found

    def beside(self, folder: str | os.PathLike[str]) -> None:
        """Counts the files that lie beside the class folders in a split's folder."""
        for entry in os.scandir(folder):
            if not entry.is_dir() and not entry.name.startswith("."):
                self.add(entry.name, BESIDE)

    def of(self, reason: str) -> str:
        """The endings of a reason with their counts: ".gif 3, .heic 1"."""
        common = self.counts[reason].most_common()
        shown = [f"{name} {count:,}" for name, count in common[:SHOWN]]
        if rest := sum(count for _, count in common[SHOWN:]):
            shown.append(f"others {rest:,}")
        return ", ".join(shown)

    def lines(self) -> list[str]:
        """A line per reason, for the user."""
        lines = []
        for reason, counts in sorted(self.counts.items()):
            files = counts.total()
            lines.append(
                f"{files:,} {plural('file', files)} left out ({reason}): {self.of(reason)}"
            )
        return lines


def ending(name: str) -> str:
    """A file's ending in lower case, to be shown: ".gif", or "no ending"."""
    suffix = os.path.splitext(name)[1].lower()
    return suffix if re.fullmatch(r"\.[a-z0-9_+-]{1,12}", suffix) else "no ending"


def has_image(path: str) -> bool:
    """Whether a file without a usual ending is an image by its first bytes, or cannot be read."""
    if ending(path) in NO_IMAGES:
        return False
    try:
        format_of(read_file(path, HEAD))
    except DamagedImage:
        return False
    except OSError:
        return True
    return True
