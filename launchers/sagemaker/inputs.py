"""`launcher.inputs`: what a job reads, as channels of SageMaker.

s3://bucket/folder               mode: File (copied before the start), FastFile, Pipe
efs://fs-0123456789abcdef0/dir   mode: ro or rw
fsx://fs-0123456789abcdef0/mount/dir
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from distdl.errors import Problem

BUNDLE = "bundle"  # our own channel
MOST = 19  # SageMaker allows 20 channels, and the bundle is one
S3_MODES, DISK_MODES = ("File", "FastFile", "Pipe"), ("ro", "rw")
FILE_SYSTEMS = {"efs": "EFS", "fsx": "FSxLustre"}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_FILE_SYSTEM = re.compile(r"(efs|fsx)://(fs-[0-9a-f]{8,})(/.*)?")


@dataclass(frozen=True)
class Input:
    """One of them. `mode` is what the user wrote, or the default of its kind."""

    name: str
    path: str
    mode: str

    @property
    def on_disk(self) -> bool:
        """A file system that is mounted; it is reached inside a VPC only."""
        return self.path.startswith(tuple(f"{scheme}://" for scheme in FILE_SYSTEMS))

    def channel(self) -> dict[str, Any]:
        """It as an element of InputDataConfig."""
        if match := _FILE_SYSTEM.fullmatch(self.path):
            scheme, identity, directory = match.groups()
            source = {
                "FileSystemId": identity,
                "FileSystemAccessMode": self.mode,
                "FileSystemType": FILE_SYSTEMS[scheme],
                "DirectoryPath": directory or "/",
            }
            return {"ChannelName": self.name, "DataSource": {"FileSystemDataSource": source}}
        return s3_channel(self.name, self.path, self.mode)


def s3_channel(name: str, uri: str, mode: str) -> dict[str, Any]:
    # Every host sees all of it: which rank reads what is for the data module to say.
    source = {
        "S3DataType": "S3Prefix",
        "S3Uri": uri,
        "S3DataDistributionType": "FullyReplicated",
    }
    return {"ChannelName": name, "DataSource": {"S3DataSource": source}, "InputMode": mode}


def parse(given: Mapping[str, Any]) -> list[Input]:
    """The inputs as written; `problems_of` has looked at them before."""
    found = []
    for name, value in given.items():
        fields = value if isinstance(value, Mapping) else {"path": value}
        path = str(fields.get("path") or "")
        default = "ro" if path.startswith(("efs:", "fsx:")) else "File"
        found.append(Input(str(name), path, str(fields.get("mode") or default)))
    return found


def problems_of(given: Mapping[str, Any], in_vpc: bool) -> Iterator[Problem]:
    """What SageMaker would refuse, or not find.

    Args:
        given: The node `launcher.inputs`.
        in_vpc: Whether subnets and security groups are given.
    """
    from distdl.suggest import closest

    if len(given) > MOST:
        yield Problem("inputs", f"{len(given)} inputs, and SageMaker takes {MOST} beside the code")
    for name, value in given.items():
        for key in sorted(set(value) - {"path", "mode"}) if isinstance(value, Mapping) else ():
            near = closest(str(key), ("path", "mode"))
            hint = f"did you mean {near}?" if near else "an input has a path and a mode"
            yield Problem(f"inputs.{name}.{key}", "no such setting of an input", hint)
    for each in parse(given):
        at = f"inputs.{each.name}"
        if not _NAME.fullmatch(each.name) or each.name == BUNDLE:
            what = "is the channel of the code" if each.name == BUNDLE else "is no name of an input"
            yield Problem(at, what, "use letters, digits and _, and another word than bundle")
        modes = DISK_MODES if each.on_disk else S3_MODES
        if each.on_disk and not _FILE_SYSTEM.fullmatch(each.path):
            yield Problem(at, f"{each.path} names no file system", "write efs://fs-0123456789/dir")
            continue
        if not each.on_disk and not re.fullmatch(r"s3://[^/]+/?.*", each.path):
            yield Problem(
                at,
                f"{each.path or 'nothing'} is not where a SageMaker job can read",
                f"aws s3 sync {each.path or 'FOLDER'} s3://BUCKET/FOLDER, and name that",
            )
            continue
        if each.mode not in modes:
            near = closest(each.mode, modes)
            hint = f"did you mean {near}? one of" if near else "one of"
            yield Problem(f"{at}.mode", f"no mode {each.mode!r}", f"{hint} {', '.join(modes)}")
        if each.on_disk and not in_vpc:
            what = f"{each.path} is reached inside its VPC only"
            yield Problem(
                at, what, "launcher.subnets=[subnet-...] launcher.security_groups=[sg-...]"
            )
