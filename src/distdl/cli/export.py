"""`python -m distdl export RUN --to FORMAT`: the model in a form that answers without distdl."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from distdl.cli.arguments import Parser
from distdl.config.recipe import exportable_instead, not_exportable
from distdl.runs import checkpoints
from distdl.runs.directory import RunDirectory, shown
from distdl.util.errors import UserError
from distdl.util.suggest import written

FORMATS = ("pt2", "onnx", "mlflow", "weights")
# On this machine's CPU.
HERE = (
    "task=predict",
    "launcher=local",
    "strategy=single",
    "trainer.devices=1",
    "trainer.num_nodes=1",
    "trainer.accelerator=cpu",
    "trainer.precision=32-true",
    "model.compile=false",
    "data.decoder=auto",
)


def main(argv: Sequence[str]) -> int:
    """Exports in this process, with the run's config as `resume RUN task=predict` has it."""
    parser = Parser("python -m distdl export", description=__doc__)
    parser.add_argument(
        "source", metavar="RUN|CHECKPOINT", help="a run directory, or a checkpoint inside one"
    )
    parser.add_argument(
        "overrides", nargs="*", default=[], help="e.g. data.root=/where/the/validation/images/are"
    )
    parser.add_argument(
        "--to", required=True, choices=FORMATS, help="pt2: torch.export; weights: safetensors"
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
        instead = exportable_instead(run.recipe(), shlex.quote(shown(run.path)))
        raise UserError.at(options.source, refusal, instead, code="mismatch")
    words = [*HERE, written("task.checkpoint", checkpoint)]
    if options.to != "mlflow":  # nothing is sent to the run's server, which may be somebody else's
        words.append("tracking=none")
    if options.register:
        if options.to != "mlflow":
            raise UserError.at(
                "--register", "takes MLflow models", "--to mlflow", code="unsupported"
            )
        if "mlflow" not in (run.recipe().get("tracking") or {}):
            what = "takes models of runs that MLflow tracks, and this one was not"
            raise UserError.at(
                "--register",
                what,
                "train with tracking=mlflow, or omit --register",
                code="unsupported",
            )
        words.append(written("tracking.mlflow.register", f"'{options.register}'"))

    from distdl.launch import resuming
    from distdl.tools.serving.export import export

    config = resuming.plan(run, [*words, *options.overrides]).config
    export(config, run, checkpoint, options.to)
    return 0
