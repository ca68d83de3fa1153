"""`distdl prepare`: from a source to a prepared data set, checked, in parallel, resumable."""

from __future__ import annotations

import argparse
import math
import shlex
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from distdl.datasets.format import SPLITS, Manifest
from distdl.datasets.reading import open_data_set
from distdl.stores.files import readable
from distdl.tools.prepare import shard_plan as plans
from distdl.tools.prepare.images import Treatment
from distdl.tools.prepare.next_steps import NAMES, how_to_provide, print_next
from distdl.tools.prepare.shard_plan import Part, ShardPlan
from distdl.tools.prepare.source import Source
from distdl.tools.prepare.work import Preparation
from distdl.tools.prepare.writers import Result, Writer
from distdl.util.errors import UserError
from distdl.util.progress_bar import Bar, duration, size
from distdl.util.screen import escaped, say
from distdl.util.wording import first_few


def run(options: argparse.Namespace, module: ModuleType) -> None:
    """Prepares one data set, or continues an interrupted preparation, and prints what to type next.

    Args:
        options: Of the command line; see `distdl.cli.prepare`.
        module: Opens the source; see `distdl.tools.prepare.source`.

    Raises:
        UserError: The options, the source or the folder cannot be used.
    """
    treatment = Treatment(
        options.max_side,
        options.short_side,
        options.quality,
        options.max_pixels,
        options.subsampling,
        options.raw_fraction,
    )
    check(options, treatment)
    with readable("--source"):
        source: Source = module.open_source(options)
        described = source.describe()
    settings = {
        "source": described,
        "images": treatment.settings(),
        "format": options.format,
        "seed": options.seed,
        "shard_mb": options.shard_mb,
    }
    work = Preparation(options.to, settings, options.append)
    if options.upload and (options.dry_run or not work.complete):
        from distdl.tools.prepare.upload import check_target

        check_target(options.upload, options.to if work.complete else None)
    if work.complete and not options.dry_run:
        work.tidy_leftovers()
        say(f"{options.to} is prepared already" + (", with these images" * options.append))
    else:
        if work.begun:
            plan = ShardPlan.load(work.plan_file)
        else:
            with Bar("reading headers") as bar:
                plan = plans.make(source, work.settings, bar)
            if options.append:
                data = open_data_set(str(options.to))
                try:
                    plan = plans.continued(plan, data)
                    if refuse_known := getattr(source, "refuse_known", None):
                        refuse_known(options.to)
                except UserError:
                    work.tidy()  # what the scan has kept there
                    raise
                say(escaped(f"{options.to} has {appended_to(data.manifest)}; to these are added:"))
            # A source of the user's may lack it.
            left_out, notes = getattr(source, "left_out", None), getattr(source, "notes", [])
            for line in [*(left_out.lines() if left_out else ()), *notes]:
                say(escaped(f"note: {line}"))
        describe(plan, options, treatment)
        if options.dry_run:
            say("nothing was written (--dry-run)")
            return
        with resumable(), work.locked():
            prepare(work, plan, source, options, treatment)
    if options.upload:
        with resumable():
            send(options.to, options.upload)
    print_next(options, source.kind, work)


@contextmanager
def resumable() -> Iterator[None]:
    """Adds a hint to an interruption: the same command resumes the work."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt("the same command resumes where it stopped") from None


def check(options: argparse.Namespace, treatment: Treatment) -> None:
    """Raises UserError for everything that the options alone show to be wrong."""
    if "://" in options.to:
        raise UserError.at(
            "--to",
            what=f"{options.to} is not a folder",
            remedy=f"--to DIR --upload {shlex.quote(options.to)}",
            code="wrong-kind",
        )
    options.to = Path(options.to).expanduser()
    for name, least in (("workers", 1), ("seed", 0), ("shard_mb", 0.001)):
        if getattr(options, name) < least:
            raise UserError.at(
                f"--{name.replace('_', '-')}",
                what=f"{getattr(options, name)} is less than {least}",
                code="out-of-range",
            )
    if not math.isfinite(options.shard_mb):
        raise UserError.at(
            "--shard-mb",
            what=f"{options.shard_mb} is not a size",
            remedy="--shard-mb 128",
            code="out-of-range",
        )
    treatment.check()
    if options.append and options.format != "shards":
        raise UserError.at(
            "--append",
            what="appends shards, and a folder of images needs none",
            remedy="copy the images into the folder",
            code="conflict",
        )
    if options.upload:
        from distdl.stores import open_store

        if options.format != "shards":
            raise UserError.at(
                "--upload",
                what="many small files are slow to read from a store",
                remedy="--format shards",
                code="conflict",
            )
        open_store(options.upload)  # refuses a wrong address now, not after hours
    if options.to.resolve().is_relative_to(options.source.resolve()):
        raise UserError.at(
            "--to",
            what=f"{options.to} is inside the source, {options.source}",
            remedy="name a folder outside of it: --to DIR",
            code="conflict",
        )


def appended_to(manifest: Manifest) -> str:
    """What a data set holds."""
    splits = [f"{counted(s.samples, 'image')} in {n}" for n, s in manifest.splits.items()]
    return f"{counted(len(manifest.classes), 'class', 'classes')}, {', '.join(splits)}"


def describe(plan: ShardPlan, options: argparse.Namespace, treatment: Treatment) -> None:
    """Prints what will be written."""
    kind = plan.settings["source"]["kind"]
    one, several = ("category", "categories") if plan.contents else ("class", "classes")
    say(f"{kind}: {options.source}, {counted(len(plan.classes), one, several)}")
    empty = []
    for split in SPLITS:
        parts = [part for part in plan.parts if part.split == split]
        if not parts and split == "test":
            continue
        images = sum(len(part.samples) for part in parts)
        shards = f"  {counted(len(parts), 'shard')}" if options.format == "shards" else ""
        length = size(sum(part.bytes for part in parts))
        say(f"  {split:5}  {counted(images, 'image'):>16}  {length:>8}{shards}")
        if not parts:
            empty.append(f"no {NAMES[split]} images: {how_to_provide(split, kind)}")
    say("\n".join([*empty, f"images: {treatment}"]))
    workers = counted(options.workers, "process", "processes")
    say(f"to {options.to} ({options.format}), by {workers}")


def counted(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def prepare(
    work: Preparation,
    plan: ShardPlan,
    source: Source,
    options: argparse.Namespace,
    treatment: Treatment,
) -> None:
    missing = work.missing(plan, options.skip_damaged)
    total = sum(part.bytes for part in plan.parts)
    done = total - sum(part.bytes for part in missing)
    check_space(options.to, missing, treatment)
    if work.begun:
        noun = "shards" if options.format == "shards" else "parts"
        left = len(missing)
        total_parts = len(plan.parts)
        say(f"resuming: {total_parts - left:,} of {total_parts:,} {noun} are done")
    else:
        plan.save(work.plan_file)
    writer = Writer(source, plan.classes, treatment, options.to, options.format)
    with Bar("preparing", start=done) as bar:
        images = 0

        def advance(count: int, length: int) -> None:
            nonlocal images, done
            images, done = images + count, done + length
            rate = images / max(bar.seconds, 1e-9)
            bar(done, total, f"{size(done)} of {size(total)}  {rate:,.0f} img/s")

        work.write(missing, writer, min(options.workers, max(1, len(missing))), advance)
        seconds = bar.seconds
    result = work.finish(plan, options.skip_damaged)
    print_result(result, options.to, images, seconds)


def check_space(out: Path, missing: Sequence[Part], treatment: Treatment) -> None:
    """Raises UserError if the disk is too small, unless images shrink by an unknown amount."""
    free = shutil.disk_usage(out).free
    needed = sum(plans.in_tar(sample.bytes) for part in missing for _, sample in part.samples)
    if needed > free and not treatment.lossy:
        raise UserError.at(
            "--to",
            what=f"the disk of {out} has {size(free)}, and {size(needed)} are needed",
            remedy="free some space, or choose another disk: --to DIR",
            code="not-enough",
        )


def print_result(result: Result, out: Path, images: int, seconds: float) -> None:
    for kind, count in sorted(Counter(kind for kind, _ in result.mended).items()):
        names = [name for each, name in result.mended if each == kind]
        say(f"repaired: {kind}: {count:,} ({first_few(names)})")
    for name, reason in result.damaged[:20]:
        say(f"left out: {name} ({reason})")
    if len(result.damaged) > 20:
        say(f"left out: {len(result.damaged) - 20:,} more; all are named in the manifest")
    rate = f", {images / seconds:,.0f} img/s" if images else ""
    say(f"{out}: {result.samples:,} images, {size(result.bytes)}, in {duration(seconds)}{rate}")


def send(out: Path, url: str) -> None:
    from distdl.tools.prepare.upload import upload

    shown = url.partition("?")[0]  # the query may hold a secret
    with Bar(f"uploading to {shown}") as bar:
        upload(out, url, lambda done, total: bar(done, total, f"{size(done)} of {size(total)}"))
    say(f"uploaded to {shown}")
