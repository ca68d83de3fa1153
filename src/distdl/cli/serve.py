"""`python -m distdl serve RUN|MODEL [serve.key=value ...]`: answers over HTTP on this machine.

MODEL is a folder that `distdl export` wrote. Of a RUN the best checkpoint is served; it is exported
first if necessary. Settings: docs/serve.md.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from distdl.cli.arguments import Parser
from distdl.ranks import stopping
from distdl.runs import checkpoints
from distdl.runs.directory import RunDirectory, read_json, shown
from distdl.util.errors import UserError


def main(argv: Sequence[str]) -> int:
    """Serves until Ctrl-C or SIGTERM."""
    parser = Parser("python -m distdl serve", description=__doc__)
    parser.add_argument("source", metavar="RUN|MODEL", help="a run directory, or a model folder")
    parser.add_argument(
        "settings", nargs="*", default=[], help="e.g. serve.port=8081 serve.max_batch=16"
    )
    from distdl.tools.serving.settings import TOKEN, Settings, values_of

    parser.settings = [f"serve.{name}" for name in Settings.model_fields]
    options = parser.parse_args(argv)

    from pydantic import ValidationError

    from distdl.tools.serving import server
    from distdl.tools.serving.scorer import Scorer
    from distdl.util.typed import problems

    values = values_of(options.settings)
    try:
        settings = Settings.model_validate(values)
        folder = model(Path(options.source))
        images = Path(str(read_json(folder / "model.json").get("data")))  # of the validation
        photo = next(images.glob("val/*/*"), "photo.jpg")

        def ready(url: str, scorer: Scorer) -> None:
            print(f"model   {shown(folder)}  ({len(scorer.classes)} classes)")
            print(f"serve   {url}  (POST /score, GET /health)")
            token = f' -H "Authorization: Bearer ${TOKEN}"' if settings.token else ""
            kind = "Content-Type: application/octet-stream"
            body = shlex.quote(f"@{photo}")
            print(f'try     curl -H "{kind}"{token} --data-binary {body} {url}/score')
            print("stop    Ctrl-C", flush=True)

        counts = server.run(str(folder), settings, ready)
    except ValidationError as error:
        known = [f"serve.{name}" for name in Settings.model_fields]
        raise UserError(*problems(error, values, known)) from None
    except ValueError as error:
        raise UserError.at("", str(error), code="unreadable") from None
    print(f"done    {counts['requests']} answered  {counts['rejected']} refused")
    return 0


def model(source: Path) -> Path:
    """The model folder of a run (exported now if it has none), of an MLflow model, or itself."""
    from distdl.tools.serving.model_folder import export_of

    for folder in (source, source / "artifacts" / "model"):
        if (folder / "model.json").is_file():
            if read_json(folder / "model.json").get("kind") == "weights":
                what = "holds weights, which distdl serve does not run"
                raise UserError.at(
                    shown(folder), what, "python -m distdl export RUN --to pt2", code="unsupported"
                )
            return folder
    run = RunDirectory.open(source).path
    checkpoint = checkpoints.best_or_last(run / "checkpoints")
    if not (checkpoint.exists() and export_of(run, checkpoint, "pt2").exists()):
        from distdl.cli import export

        print(f"export  python -m distdl export {shlex.quote(shown(run))} --to pt2", flush=True)
        with stopping.raise_on_signal():
            export.main([str(source), "--to", "pt2"])
    return export_of(run, checkpoint, "pt2")
