"""Shows what `dry_run=true` would run: the request as text and, with `launcher.files`, as files."""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from distdl.config import batches, degrees, programs, task_facts
from distdl.config.recipe import plain
from distdl.job import LauncherBase, blamed
from distdl.launch import program_checks, submitting
from distdl.launch.answers import ShownRequest
from distdl.launch.planning import Plan
from distdl.runs.bundle import Bundle
from distdl.runs.directory import RunDirectory, shown
from distdl.runs.snapshot import Snapshot
from distdl.util.answers import Answer
from distdl.util.errors import UserError
from distdl.util.redact import redact
from distdl.util.screen import escaped, say

BY_CLOCK = ("distdl.optim.warmup_cosine", "distdl.optim.warmup_linear")


def answer(planned: Plan) -> Answer:
    """Prints what one run would be."""
    return Answer(ShownRequest([shown(planned.run.path)], show(planned)))


def show(planned: Plan) -> str:
    """Prints what one run would be: sentences fitted to the terminal, the request as it is. Returns
    the same as text."""
    head, request = _parts(planned)
    say(head)
    print(f"\n{request}", flush=True)
    return f"{head}\n\n{request}"


def render(planned: Plan) -> str:
    """One run as text, without control characters. Starts nothing, and writes only the files of
    `launcher.files`."""
    return "\n\n".join(_parts(planned))


def _parts(planned: Plan) -> tuple[str, str]:
    """Sentences about a run, and its request."""
    attempt = submitting.next_attempt(planned)
    unset = submitting.unset_names(planned)
    code = submitting.snapshot_of(planned)
    launcher = _launcher(planned)
    request = submitting.request_for(launcher, submitting.specs_of([planned], [attempt]))
    assert request is not None  # it is for one run
    files = write_files(planned, launcher, code)
    size = planned.resources
    batch = ""
    if not programs.is_program(planned.config):
        batch = batches.describe(planned.config, planned.resources)
    lines = [
        f"run        {shown(planned.run.path)}" + (" (resumes)" if attempt.number > 1 else ""),
        f"resources  {size.num_nodes} x {size.devices} {size.accelerator}",
        *(f"mesh       {words}" for words in degrees.described(planned.config, size)),
        *([f"batch      {batch}"] if batch else []),
        *time_lines(planned),
        *program_lines(planned),
        *([f"code       {code.describe()}"] if code else []),
        *(f"left out   {line}" for line in (code.lines_left_out() if code else ())),
        *(f"note       {note}" for note in planned.notes),
        *(f"note       ${name} is not set: submitting needs it" for name in unset),
        *settings(launcher),
        *(f"file       {shown(file)}" for file in files),
    ]
    return escaped("\n".join(lines)), escaped(request.render())


def time_lines(planned: Plan) -> Iterator[str]:
    """When a training with `trainer.max_time` ends, and what its rate does."""
    if programs.is_program(planned.config) or not task_facts.of(planned.config).trains:
        return
    trainer = plain(planned.config.trainer)
    limit = trainer.get("max_time")
    if limit is None:
        return
    if isinstance(limit, dict):  # {hours: 12}, maybe of a timedelta's node
        limit = " ".join(f"{value} {key}" for key, value in limit.items() if key != "_target_")
    limits = {key: trainer.get(key) for key in ("max_epochs", "max_steps")}
    ends = [f"trainer.{key}={value}" for key, value in limits.items() if value not in (None, -1)]
    text = f"time       {limit} for the training" + "".join(f", or less by {end}" for end in ends)
    schedule = plain(planned.config.get("schedule"))
    if schedule.get("_target_") in BY_CLOCK and not {"max_epochs", "total_steps"} & schedule.keys():
        text += f"; the learning rate falls to its end with {'the first' if ends else 'it'}"
    yield text


def program_lines(planned: Plan) -> Iterator[str]:
    """What a program's ranks start, and where."""
    program = program_checks.section_of(planned.config)
    if program is not None:
        yield f"program    {redact(shlex.join(program.command))}"
        extra = f", framework {program.framework}" if program.framework else ""
        yield f"started    once per {program.per}, in {planned.launch.folder}{extra}"


def show_sweep(planned: Sequence[Plan], names: Sequence[str]) -> str:
    """Prints all members of a sweep, as one request if the launcher supports that. The names are
    what each member varies, such as "seed=1 optimizer.lr=0.1". Returns the same as text."""
    if submitting.same_launcher(planned):
        launcher = _launcher(planned[0])
        attempts = [submitting.next_attempt(each) for each in planned]
        specs = submitting.specs_of(planned, attempts)
        request = submitting.request_for(launcher, specs, sweep=True)
        if request is not None:
            numbered = (f"# {i}: {n}" for i, n in enumerate(names))
            text = escaped("\n".join([*numbered, request.render()]))
            print(text, flush=True)
            return text
    texts = []
    for name, each in zip(names, planned, strict=True):
        title = f"\n# {escaped(name)}"
        say(title)
        texts += [title, show(each)]
    return "\n".join(texts)


def settings(launcher: LauncherBase[Any]) -> Iterator[str]:
    """What each setting does that differs from its default, as far as the launcher says so."""
    with blamed(type(launcher), "about_settings"):
        about = launcher.about_settings()
    for key in launcher.changed_settings():
        if sentence := about.get(key, "").partition("\n")[0]:
            yield f"setting    launcher.{key}: {sentence}"


def _launcher(planned: Plan) -> LauncherBase[Any]:
    """The launcher. Raises a UserError if its request needs a program that the config names."""
    launcher = planned.launch.build_launcher()
    if problems := [*launcher.starts_to_know()]:
        raise UserError(*problems)
    return launcher


def write_files(planned: Plan, launcher: LauncherBase[Any], code: Snapshot | None) -> list[Path]:
    """Writes the request as files for the platform's own tools, with the bundle beside them."""
    if code is None or not planned.config.launcher.get("files"):
        return []
    target = Path(planned.config.launcher.files).expanduser().absolute() / planned.run_id
    if target.exists():
        raise UserError.at(
            "launcher.files",
            what=f"{shown(target)} exists already",
            remedy="remove it, or name another folder",
            code="exists-already",
        )
    (spec,) = submitting.specs_of([planned], [submitting.next_attempt(planned)])
    request: Any = submitting.request_for(launcher, [replace(spec, bundle="bundle")])
    with ExitStack() as stack:
        stack.enter_context(submitting.must_be_written("launcher.files", target.parent))
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = stack.enter_context(
            tempfile.TemporaryDirectory(dir=target.parent, prefix=".", ignore_cleanup_errors=True)
        )
        run = RunDirectory(Path(temporary, "run"))
        folder = Path(temporary, "files")
        attempt = submitting.begin_attempt(replace(planned, run=run), sys.argv)
        Bundle.write(run, attempt, code)
        folder.mkdir()
        (attempt.path / "bundle").rename(folder / "bundle")
        for name, text in request.files().items():
            (folder / name).write_text(text, encoding="utf-8")
        folder.rename(target)
    return [target / name for name in request.files()]
