"""`python -m distdl serve RUN|MODEL [serve.key=value ...]`: answers over HTTP on this machine.

MODEL is a folder that `distdl export` wrote. Of a RUN the best checkpoint is served; it is exported
first if necessary. Code in a MODEL runs only with --trust; the network of a RUN is built by this
project. Settings: docs/serve.md.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from distdl.cli.arguments import Parser
from distdl.config.recipe import export_formats, exportable_instead, not_exportable
from distdl.ranks import stopping
from distdl.runs import checkpoints
from distdl.runs.directory import RunDirectory, read_json, shown
from distdl.util.answers import Answer, emit
from distdl.util.errors import UserError
from distdl.util.screen import say

if TYPE_CHECKING:
    from torch import nn

    from distdl.tools.serving.scorer import Scorer


@dataclass(frozen=True)
class Served:
    """A server that has ended. An event `ready` came before, with its `url`, `model`, `classes`."""

    SCHEMA: ClassVar[str] = "serve/1"

    model: str
    """Its folder."""
    answered: int
    """Requests."""
    refused: int
    """Requests that were refused."""


def main(argv: Sequence[str]) -> Answer:
    """Serves until Ctrl-C or SIGTERM."""
    parser = Parser("python -m distdl serve", description=__doc__)
    parser.add_argument("source", metavar="RUN|MODEL", help="a run directory, or a model folder")
    parser.add_argument(
        "settings", nargs="*", default=[], help="e.g. serve.port=8081 serve.max_batch=16"
    )
    parser.add_argument(
        "--trust", action="store_true", help="run the code in the folder, whoever wrote it"
    )
    from distdl.tools.serving.settings import TOKEN, Settings, values_of

    parser.settings = [f"serve.{name}" for name in Settings.model_fields]
    options = parser.parse_intermixed_args(argv)

    from pydantic import ValidationError

    from distdl.tools.serving import server
    from distdl.util.typed import problems

    values = values_of(options.settings)
    try:
        settings = Settings.model_validate(values)
        folder = model(Path(options.source))
        load = loader(folder, trust=options.trust)
        images = Path(str(read_json(folder / "model.json").get("data")))  # of the validation
        photos = (path for pattern in ("val/*/*", "val2017/*") for path in images.glob(pattern))
        photo = next(photos, "photo.jpg")

        def ready(url: str, scorer: Scorer) -> None:
            say(f"model   {shown(folder)}  ({len(scorer.classes)} classes)")
            say(f"serve   {url}  (POST /score, GET /health)")
            token = f' -H "Authorization: Bearer ${TOKEN}"' if settings.token else ""
            kind = "Content-Type: application/octet-stream"
            body = shlex.quote(f"@{photo}")
            say(f'try     curl -H "{kind}"{token} --data-binary {body} {url}/score')
            say("stop    Ctrl-C")
            emit("ready", url=url, model=shown(folder), classes=len(scorer.classes))

        counts = server.run(load, settings, ready)
    except ValidationError as error:
        known = [f"serve.{name}" for name in Settings.model_fields]
        raise UserError(*problems(error, values, known)) from None
    except ValueError as error:
        raise UserError.at("", what=str(error), code="unreadable") from None
    say(f"done    {counts['requests']} answered  {counts['rejected']} refused")
    return Answer(Served(shown(folder), counts["requests"], counts["rejected"]))


def model(source: Path) -> Path:
    """The model folder of a run (exported now if it has none), of an MLflow model, or itself."""
    from distdl.tools.serving.model_folder import export_of

    for folder in (source, source / "artifacts" / "model"):
        if (folder / "model.json").is_file():
            if read_json(folder / "model.json").get("kind") == "weights":
                raise UserError.at(
                    shown(folder),
                    what="holds weights, which distdl serve does not run",
                    remedy="python -m distdl serve RUN",
                    code="unsupported",
                )
            return folder
    run = RunDirectory.open(source)
    recipe = run.recipe()
    refusal = not_exportable(recipe)
    format = "pt2" if refusal else export_formats(recipe).formats[0]
    checkpoint = checkpoints.best_or_last(run.checkpoints)
    if not (checkpoint.exists() and export_of(run.path, checkpoint, format).exists()):
        if refusal:
            raise UserError.at(
                str(source),
                what=refusal,
                remedy=exportable_instead(recipe, shlex.quote(shown(run.path))),
                code="mismatch",
            )
        from distdl.cli import export

        command = f"python -m distdl export {shlex.quote(shown(run.path))} --to {format}"
        say(f"export  {command}")
        with stopping.raise_on_signal():
            export.main([str(source), "--to", format])
    return export_of(run.path, checkpoint, format)


def loader(folder: Path, *, trust: bool = False) -> Callable[[], Scorer]:
    """What loads a model folder. The network's code, if it needs any, is that of this project, if
    the folder is in one of its runs; the folder's own code runs with `trust` alone.

    Raises:
        UserError: It needs code that is not trusted.
    """

    def load() -> Scorer:
        from distdl.tools.serving.scorer import Scorer

        return Scorer(folder, trust=trust)

    if trust or not needs_code(folder):
        return load
    run = run_of(folder)
    if run is None:
        raise UserError.at(
            shown(folder),
            what="holds the code of its network, which would run here",
            remedy="--trust, if you would run code of whoever wrote it",
            code="not-trusted",
        )

    def load_ours() -> Scorer:
        from distdl.tools.serving.scorer import Scorer

        return Scorer(folder, network=network)

    network = network_of(run)
    return load_ours


def needs_code(folder: Path) -> bool:
    """Whether the model is weights and code. What model.json says of that is not asked."""
    return "model.safetensors" in (read_json(folder / "model.json").get("files") or {})


def run_of(folder: Path) -> RunDirectory | None:
    """The run that a model folder was exported from, if it lies in it: RUN/exports/FOLDER, or in
    the MLflow model there."""
    inside = folder.resolve()
    for path in (inside, inside.parents[1]):
        if path.parent.name == "exports" and (path.parents[1] / "config.yaml").is_file():
            return RunDirectory.open(path.parents[1])
    return None


def network_of(run: RunDirectory) -> nn.Module:
    """The network of a run, with any weights, by the code of this project: a run that names other
    code is refused, as by a resume."""
    from distdl.cli.export import here
    from distdl.launch import resuming
    from distdl.tools.serving.export import random_network

    config = resuming.plan(run, [*here(run), "task.checkpoint=none", "tracking=none"]).config
    return random_network(config)
