"""The time limit of a job: `launcher.walltime` means the same for every launcher.

A number is hours. Text with `:` or `-` is read as Slurm's --time, but never as minutes: a bare
number is hours, and `1:30` is refused (https://slurm.schedmd.com/sbatch.html).
"""

from __future__ import annotations

import math
import re

FORMS = 'hours (12, 0.5), or in quotes "1:30:00", "2-12" (days-hours), "1-12:00:00"'
# YAML 1.1 reads 1:30:00 without quotes as a number of seconds: 5400.
MISREAD = 1000  # hours


def seconds(walltime: object) -> int:
    """The limit in seconds, at least 1, of hours (`12`, `0.5`, "12"), `h:mm:ss`, `d-h`, `d-h:mm` or
    `d-h:mm:ss`. Other values, and likely mistakes, raise a ValueError, to whose text the caller
    adds the valid forms (`FORMS`)."""
    text = str(walltime).strip()
    if isinstance(walltime, bool) or not isinstance(walltime, (int, float, str)):
        raise ValueError(f"{walltime!r} is not a time")
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text, re.ASCII)
    if match is None or text.isdigit():
        return _hours(text, walltime)
    days, hours, minutes, rest = match.groups()
    if days is None and rest is None:
        both = "minutes and seconds for Slurm, and hours and minutes for others"
        raise ValueError(f"{walltime!r} is {both}")
    if any(len(part) != 2 or int(part) > 59 for part in (minutes, rest) if part is not None):
        raise ValueError(f"{walltime!r} is not a time: minutes and seconds go from 00 to 59")
    if days is not None and int(hours) > 23:
        raise ValueError(f"{walltime!r} is not a time: after days, hours go from 0 to 23")
    total = (int(days or 0) * 24 + int(hours)) * 3600 + int(minutes or 0) * 60 + int(rest or 0)
    if not total:
        raise ValueError(f"{walltime!r} is not a time above 0")
    return total


def _hours(text: str, walltime: object) -> int:
    plain = not isinstance(walltime, str) or re.fullmatch(r"\d+\.?\d*|\.\d+", text, re.ASCII)
    hours = float(text) if plain else math.nan
    if not math.isfinite(hours):
        raise ValueError(f"{walltime!r} is not a time")
    if round(hours * 3600) < 1:
        raise ValueError(f"{walltime!r} is not a time above 0")
    if hours >= MISREAD:
        misread = "did YAML read 1:30:00 as a number (5400)? Then put it in quotes"
        raise ValueError(f"{walltime!r} would be {hours:g} hours; {misread}")
    return round(hours * 3600)
