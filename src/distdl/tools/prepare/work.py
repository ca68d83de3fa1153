"""Prepares a data set: makes a plan, writes each part separately, then the manifest.

    OUT/.preparing/plan.jsonl          the plan; a later start continues it
    OUT/.preparing/train-00007.json    that part is complete (index rows: train-00007.npy)
    OUT/train-00007.tar
    OUT/dataset.json                   everything is complete; OUT/.preparing was removed

A folder of images (`format="folder"`) has OUT/prepared.json instead of the manifest.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from distdl import __version__
from distdl.datasets.format import (
    CLASSIFICATION,
    MANIFEST,
    SPLITS,
    Manifest,
    Split,
    load_index,
    write_index,
)
from distdl.tools.prepare import shard_plan as plans
from distdl.tools.prepare.processes import Advance, write_in_parallel
from distdl.tools.prepare.shard_plan import Part, ShardPlan
from distdl.tools.prepare.writers import WORK, Result, Writer, result_file, rows_of
from distdl.util.atomic_files import remove_leftovers, write_bytes
from distdl.util.errors import Problem, Unfinished, UserError
from distdl.util.wording import first_few

FOLDER_MANIFEST = "prepared.json"
# How many images per kind of oddity the manifest names.
NAMED = 100


class Preparation:
    """A data set's folder, from empty to complete; created on the first write.

    Args:
        settings: The source's description and the options, as JSON; "format" is one of them.
        appends: Whether a complete data set gets more samples. Its shards stay as they are. New
            ones follow them, with an index of all under another name; then the manifest is
            replaced, until which the set is what it was.

    Raises:
        UserError: The folder holds something else, or was prepared with other settings.
    """

    def __init__(self, out: Path, settings: dict[str, Any], appends: bool = False) -> None:
        self.out = out
        self.settings = settings
        self.appends = appends
        self.plan_file = out / WORK / "plan.jsonl"
        self.manifest = out / (MANIFEST if settings["format"] == "shards" else FOLDER_MANIFEST)
        self._check()

    @property
    def complete(self) -> bool:
        if not self.appends:
            return self.manifest.exists()
        return any(not one for one in self._differences(self._made().get("appended", ())))

    def _made(self) -> dict[str, Any]:
        """How a complete data set was made; {}: there is none."""
        if not self.manifest.exists():
            return {}
        made: dict[str, Any] = json.loads(self.manifest.read_bytes()).get("made", {})
        return made

    def _differences(self, made: Iterable[Mapping[str, Any]]) -> list[list[str]]:
        """How the settings differ from those of each of several preparations."""
        now = json.loads(json.dumps(self.settings))
        return [[*differences(each.get("settings", {}), now)] for each in made]

    @property
    def begun(self) -> bool:
        return self.plan_file.exists()

    def _check(self) -> None:
        out = self.out
        if out.exists() and not out.is_dir():
            raise UserError.at(
                "--to",
                what=f"{out} is not a folder",
                remedy="name another: --to DIR",
                code="wrong-kind",
            )
        if self.appends:
            return self._check_appending()
        for name in (MANIFEST, FOLDER_MANIFEST):
            if (out / name).exists():
                made = json.loads((out / name).read_bytes()).get("made", {})
                self._compare(made.get("settings", {}), "is prepared already, with other settings")
                return
        if self.begun:
            self._compare(plans.settings_of(self.plan_file), "was begun with other settings")
        elif out.exists():
            # A start that was killed during planning leaves only WORK.
            others = [path.name for path in out.iterdir() if path.name != WORK]
            if others:
                raise UserError.at(
                    "--to",
                    what=f"{out} is not empty: {first_few(sorted(others))}",
                    remedy="name a new folder: --to DIR",
                    code="exists-already",
                )

    def _check_appending(self) -> None:
        made = self._made()
        if not made:
            raise UserError.at(
                "--append",
                what=f"{self.out} is no prepared data set of shards",
                remedy="prepare the first part without --append",
                code="not-found",
            )
        for different in self._differences([made, *made.get("appended", ())]):
            if not any(one.startswith("source.") for one in different) and not self.complete:
                raise UserError.at(
                    "--append",
                    what=f"{self.out} holds the images of this source already",
                    remedy="name other images: --source DIR",
                    code="conflict",
                )
        if self.begun and plans.settings_of(self.plan_file) == made.get("settings"):
            self.tidy()  # a killed command left it, when the set was complete
        if self.begun and not self.complete:
            self._compare(plans.settings_of(self.plan_file), "was begun with other settings")

    def _compare(self, before: dict[str, Any], how: str) -> None:
        different = list(differences(before, json.loads(json.dumps(self.settings))))
        if different:
            remedy = "repeat the first command, name another folder (--to DIR), or remove this one"
            if all(one.startswith("source.") for one in different):
                remedy = (
                    "prepare the changed source into a new folder (--to DIR), or first rm -r "
                    f"{shlex.quote(str(self.out))}"
                )
            raise UserError.at(
                "--to",
                what=f"{self.out} {how}: {'; '.join(different)}",
                remedy=remedy,
                code="mismatch",
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Locks the folder, so that only one command at a time writes the data set.

        Raises:
            UserError: Another command is preparing the data set, or has written something else
                there meanwhile; or the folder cannot be written, or its disk is full.
        """
        lock = FileLock(self.out / WORK / "lock")
        try:
            (self.out / WORK).mkdir(parents=True, exist_ok=True)
            with lock.acquire(timeout=0):
                self._check()
                yield
        except Timeout:
            raise UserError.at(
                "--to",
                what=f"another command is preparing {self.out} at this moment",
                remedy="wait for it",
                code="under-way",
            ) from None
        except OSError as error:
            problem = Problem(
                "--to",
                what=f"cannot write {self.out}: {error}",
                remedy="fix that, and the same command resumes where it stopped",
                code="not-writable",
            )
            raise (Unfinished if self.begun else UserError)(problem) from error

    def missing(self, plan: ShardPlan, skip_damaged: bool) -> list[Part]:
        """Parts that are not written yet, or that lack images which may be readable by now."""
        return [part for part in plan.parts if not self._is_done(part, skip_damaged)]

    def _is_done(self, part: Part, skip_damaged: bool) -> bool:
        path = result_file(self.out, part)
        result = Result.load(path) if path.exists() else None
        if result is None or (result.damaged and not skip_damaged):
            return False
        tar = self.out / f"{part.name}.tar"
        return not result.shard or (tar.exists() and tar.stat().st_size == result.shard.bytes)

    def write(self, parts: list[Part], writer: Writer, workers: int, advance: Advance) -> None:
        """Writes parts in `workers` processes; UserError if one of them is killed."""
        remove_leftovers(self.out)
        try:
            if workers == 1:  # in this process, for debuggers
                for part in parts:
                    writer.write(part, lambda count: advance(1, count))
            else:
                write_in_parallel(parts, writer, workers, advance)
        except BrokenProcessPool as error:
            raise Unfinished.at(
                "--workers",
                what="a worker process was killed, perhaps for lack of memory",
                remedy=(
                    "the same command resumes where it stopped; with fewer processes: --workers N"
                ),
                code="not-enough",
            ) from error

    def finish(self, plan: ShardPlan, skip_damaged: bool) -> Result:
        """Writes the index and the manifest, once all parts are complete; returns their sum.

        Raises:
            UserError: Images are damaged, and `skip_damaged` is False.
        """
        results = {part.name: Result.load(result_file(self.out, part)) for part in plan.parts}
        total = Result()
        for result in results.values():
            total.samples += result.samples
            total.bytes += result.bytes
            total.mended += result.mended
            total.damaged += result.damaged
        if total.damaged and not skip_damaged:
            raise Unfinished(_too_damaged(total.damaged))
        made = {
            "by": f"distdl {__version__}",
            "settings": self.settings,
            "mended": _by_kind(total.mended),
            "damaged": [list(one) for one in total.damaged],
        }
        if self.settings["format"] == "shards":
            text = self._manifest(plan, results, made).to_json()
        else:
            contents = {"images": total.samples, "classes": plan.classes, "made": made}
            text = json.dumps(contents, indent=1)
        write_bytes(self.manifest, text.encode())
        self.tidy()
        return total

    def _manifest(
        self, plan: ShardPlan, results: dict[str, Result], made: dict[str, Any]
    ) -> Manifest:
        """Writes the indexes. Training and validation are in each manifest, also if empty."""
        about = plan.contents
        old = None
        if self.appends:
            old = Manifest.from_json(self.manifest.read_bytes(), str(self.manifest))
            made = {**old.made, "appended": [*old.made.get("appended", ()), made]}
        manifest = Manifest(
            tuple(plan.classes),
            {},
            made,
            about.get("domain", CLASSIFICATION),
            tuple(about.get("categories", ())),
            about.get("federated", False),
            tuple(about.get("holds") or ()),
        )
        for split in SPLITS:
            parts = [part for part in plan.parts if part.split == split]
            before = old.splits.get(split) if old is not None else None
            if before is not None and not parts:
                manifest.splits[split] = before
                continue
            if not parts and split == "test":
                continue
            written = [results[part.name].shard for part in parts]
            shards = [shard for shard in written if shard]
            rows = rows_of(self.out, parts, manifest.row)
            name = ""
            if before is not None:
                shards = [*before.shards, *shards]
                rows = np.concatenate([self._rows(before, manifest), rows])
                name = f"{split}.index-{len(made['appended'])}.npy"
            labelled = split not in about.get("unlabelled", ())
            manifest.splits[split] = write_index(self.out, split, shards, rows, labelled, name)
        return manifest

    def _rows(self, split: Split, manifest: Manifest) -> np.ndarray[Any, Any]:
        """The index of a split that is there already."""
        path = self.out / split.index.name
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != split.index.sha256:
            raise Unfinished.at(
                "--to",
                what=f"{path} is not the index that {MANIFEST} describes",
                remedy="copy it again",
                code="mismatch",
            )
        return load_index(data, str(path), manifest.row)

    def class_count(self) -> int:
        """Number of classes of a complete data set."""
        return len(self._contents()["classes"])

    def empty_splits(self) -> list[str]:
        """The splits without images in a complete data set."""
        splits = self._contents().get("splits")
        if splits is None:
            return [split for split in ("train", "val") if not (self.out / split).exists()]
        return [split for split in ("train", "val") if not splits[split]["samples"]]

    def has_test(self) -> bool:
        """Whether a complete data set has images of a test split."""
        return "test" in self._contents().get("splits", {})

    def damaged(self, split: str) -> int:
        """How many damaged images were left out of a split of a complete data set."""
        made = self._contents()["made"]
        left_out = [
            name for each in (made, *made.get("appended", ())) for name, _ in each["damaged"]
        ]
        return sum(name.startswith(f"{split}: ") for name in left_out)

    def _contents(self) -> dict[str, Any]:
        contents: dict[str, Any] = json.loads(self.manifest.read_bytes())
        return contents

    def tidy_leftovers(self) -> None:
        """Removes the work folder if a command with these settings left it: another one may be
        appending at this moment."""
        planned = [{"settings": plans.settings_of(self.plan_file)}] if self.begun else []
        if not any(self._differences(planned)):
            self.tidy()

    def tidy(self) -> None:
        """Removes the work folder of a complete data set, even if a killed command left it."""
        shutil.rmtree(self.out / WORK, ignore_errors=True)


def differences(before: dict[str, Any], now: dict[str, Any], path: str = "") -> Iterator[str]:
    """The differences between two settings, as "seed was 0, is 1"."""
    for key in sorted(before.keys() | now.keys()):
        old = before.get(key)
        new = now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from differences(old, new, f"{path}{key}.")
        elif old != new:
            yield f"{path}{key} was {json.dumps(old)}, is {json.dumps(new)}"


def _too_damaged(damaged: list[tuple[str, str]]) -> Problem:
    shown = [f"{name} ({reason})" for name, reason in damaged[:20]]
    if len(damaged) > len(shown):
        shown.append(f"and {len(damaged) - len(shown)} more")
    noun = "image is" if len(damaged) == 1 else "images are"
    return Problem(
        "--source",
        what=f"{len(damaged)} {noun} damaged: " + "\n    ".join(shown),
        remedy=(
            "everything else is done. To leave them out: the same command with --skip-damaged\n    "
            "If the same files can be read again: the same command\n    "
            "If you put other images in their place: the same command with another --to"
        ),
        code="damaged-file",
    )


def _by_kind(repaired: list[tuple[str, str]]) -> dict[str, Any]:
    kinds = defaultdict[str, list[str]](list)
    for kind, name in repaired:
        kinds[kind].append(name)
    return {k: {"images": len(v), "names": v[:NAMED]} for k, v in sorted(kinds.items())}
