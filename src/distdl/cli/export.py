"""`python -m distdl export RUN --to FORMAT`: the model in a form that answers without distdl."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from distdl.cli.arguments import Parser
from distdl.config.recipe import export_formats, exportable_instead, not_exportable
from distdl.runs import checkpoints
from distdl.runs.directory import RunDirectory, shown
from distdl.util.answers import Answer
from distdl.util.errors import Problem, UserError
from distdl.util.suggest import written

FORMATS = ("pt2", "onnx", "package", "mlflow", "weights")
SIZE = re.compile(r"([1-9]\d{0,4})x([1-9]\d{0,4})")
CHECKPOINT = "task.checkpoint"
# On this machine's CPU.
HERE = (
    "task=predict",
    "launcher=local",
    "strategy=single",
    "trainer.devices=1",
    "trainer.num_nodes=1",
    "trainer.accelerator=cpu",
    "trainer.precision=32-true",
    "data.decoder=auto",
)
# What of this a model has.
OF_MODEL = {"compile": "model.compile=false"}


@dataclass(frozen=True)
class ExportedModel:
    """A model that answers as its network does."""

    SCHEMA: ClassVar[str] = "export/1"

    folder: str
    format: str
    verification: Mapping[str, Any]
    """How far its answers are from the network's, with a `summary` in words."""


def main(argv: Sequence[str]) -> Answer:
    """Exports in this process, with the run's config as `resume RUN task=predict` has it."""
    parser = Parser("python -m distdl export", description=__doc__)
    parser.add_argument(
        "source", metavar="RUN|CHECKPOINT", help="a run directory, or a checkpoint inside one"
    )
    parser.add_argument(
        "overrides", nargs="*", default=[], help="e.g. data.root=/where/the/validation/images/are"
    )
    parser.add_argument(
        "--to",
        required=True,
        choices=FORMATS,
        help="pt2: torch.export; package: weights and the network's code; weights: safetensors",
    )
    parser.add_argument(
        "--size",
        metavar="HEIGHTxWIDTH",
        help="of a detector's --to onnx, in pixels: the images that it takes",
    )
    parser.add_argument(
        "--register", metavar="NAME", help="with --to mlflow: its name in MLflow's registry"
    )
    options = parser.parse_intermixed_args(argv)
    path = Path(options.source).absolute()
    named = path.suffix == ".ckpt"  # RUN/checkpoints/NAME.ckpt
    run = RunDirectory.open(path.parents[1] if named else options.source)
    checkpoint = path if named else checkpoints.best_or_last(run.checkpoints)
    if refusal := not_exportable(run.recipe()):
        raise UserError.at(
            options.source,
            what=refusal,
            remedy=exportable_instead(run.recipe(), shlex.quote(shown(run.path))),
            code="mismatch",
        )
    why_not = export_formats(run.recipe()).refused.get(options.to)
    if why_not is not None:
        raise UserError.at("--to", what=f"{options.to}: {why_not}", code="unsupported")
    if not checkpoint.exists():
        raise UserError.at(
            options.source,
            what="there is no such checkpoint" if named else "this run has no checkpoint",
            remedy=f"python -m distdl resume {shlex.quote(shown(run.path))} writes one",
            code="not-found",
        )
    words = [*here(run), written(CHECKPOINT, checkpoint)]
    if options.to != "mlflow":  # nothing is sent to the run's server, which may be somebody else's
        words.append("tracking=none")
    if options.register:
        if options.to != "mlflow":
            raise UserError.at(
                "--register", what="takes MLflow models", remedy="--to mlflow", code="unsupported"
            )
        if "mlflow" not in (run.recipe().get("tracking") or {}):
            raise UserError.at(
                "--register",
                what="takes models of runs that MLflow tracks, and this one was not",
                remedy="train with tracking=mlflow, or omit --register",
                code="unsupported",
            )
        words.append(written("tracking.mlflow.register", f"'{options.register}'"))

    size = size_of(options.size, options.to)

    from distdl.launch import resuming
    from distdl.tools.serving.export import export

    try:
        config = resuming.plan(run, [*words, *options.overrides]).config
    except UserError as error:
        raise type(error)(*(_as_typed(each, options.source) for each in error.problems)) from error
    folder, verified = export(config, run, checkpoint, options.to, size)
    return Answer(ExportedModel(shown(folder), options.to, verified))


def _as_typed(problem: Problem, source: str) -> Problem:
    """A problem of the checkpoint names what was typed, and not the key that has it here."""
    return replace(problem, path=source) if problem.path.startswith(CHECKPOINT) else problem


def here(run: RunDirectory) -> list[str]:
    """The overrides that evaluate a run on this machine's CPU."""
    model = run.recipe().get("model") or {}
    return [*HERE, *(word for key, word in OF_MODEL.items() if key in model)]


def size_of(text: str | None, format: str) -> tuple[int, int] | None:
    """Height and width of `--size`."""
    if text is None:
        return None
    found = SIZE.fullmatch(text)
    if found is None:
        raise UserError.at(
            "--size",
            what=f"{text} is not a size",
            remedy="--size 800x1333: height x width",
            code="wrong-type",
        )
    if format != "onnx":
        raise UserError.at(
            "--size",
            what=f"{format} takes images as the validation does",
            remedy="omit it",
            code="unsupported",
        )
    return int(found[1]), int(found[2])
