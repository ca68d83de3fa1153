"""`python -m distdl serve RUN|MODEL [serve.key=value ...]`: answers over HTTP on this machine.

MODEL is a folder that `distdl export` wrote. Of a RUN the best checkpoint is served; it is exported
first if necessary. Settings: docs/serve.md.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distdl.ranks import stopping
from distdl.runs.directory import RunDirectory, shown
from distdl.util.errors import Problem, UserError
from distdl.util.suggest import did_you_mean


def main(argv: Sequence[str]) -> int:
    """Serves until Ctrl-C or SIGTERM."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m distdl serve", description=__doc__, formatter_class=form
    )
    parser.add_argument("source", metavar="RUN|MODEL", help="a run directory, or a model folder")
    parser.add_argument("settings", nargs="*", help="e.g. serve.port=8081 serve.max_batch=16")
    options = parser.parse_args(argv)

    from distdl.serving import server
    from distdl.serving.settings import TOKEN, Settings, WrongSettings, settings_of

    try:
        settings = settings_of(options.settings)
        folder = model(Path(options.source))
        photo = photograph(Path(options.source))

        def load() -> Any:
            from distdl.serving.scorer import Scorer

            return Scorer(folder)

        def ready(url: str, scorer: Any) -> None:
            print(f"model   {shown(folder)}  ({len(scorer.classes)} classes)")
            print(f"serve   {url}  (POST /score, GET /health)")
            token = f' -H "Authorization: Bearer ${TOKEN}"' if settings.token else ""
            kind = "Content-Type: application/octet-stream"
            body = shlex.quote(f"@{photo}")
            print(f'try     curl -H "{kind}"{token} --data-binary {body} {url}/score')
            print("stop    Ctrl-C", flush=True)

        counts = server.run(load, settings, ready)
    except WrongSettings as error:
        known = [f"serve.{key}" for key in Settings.model_fields]

        def remedy(name: str, what: str) -> str:
            return did_you_mean(name, known) if "is not a setting" in what else ""

        raise UserError(
            *(Problem(name, what, remedy(name, what)) for name, what in error.problems)
        ) from None
    except ValueError as error:
        raise UserError.at(options.source, str(error)) from None
    p95 = counts["latency_ms"]["p95"]
    latency = "" if p95 is None else f"  p95 {p95:.1f} ms"
    print(f"done    {counts['requests']} answered  {counts['rejected']} refused{latency}")
    return 0


def model(source: Path) -> Path:
    """The model folder of a run (exported now if it has none), of an MLflow model, or itself."""
    from distdl.serving.model_folder import SERVED, exported, read

    for folder in (source, source / "artifacts" / "model"):
        if (folder / "model.json").is_file():
            if (kind := read(folder).get("kind")) not in SERVED:
                what = f"holds {kind}, which distdl serve does not run"
                raise UserError.at(shown(folder), what, "python -m distdl export RUN --to pt2")
            return folder
    if not (source / "config.yaml").is_file():
        what = "is neither a run (with config.yaml) nor a model folder (with model.json)"
        raise UserError.at(str(source), what, "python -m distdl serve RUN, a run's own folder")
    run = RunDirectory.open(source).path
    if exported(run) is None:
        from distdl.cli import export

        try:
            with stopping.raise_on_signal():
                export.main([str(source), "--to", "pt2"])
        except UserError as error:
            again = f"python -m distdl export {shown(run)} --to pt2 KEY=VALUE"
            hint = Problem("", "the run has no export to serve yet", again)
            raise type(error)(*error.problems, hint) from None
    if (written := exported(run)) is None:
        raise UserError.at(str(source), "could not be exported", "its log says why")
    return written


def photograph(source: Path) -> str:
    """An image of a run's validation split, to try the server with, or the name of none."""
    if (source / "config.yaml").is_file():
        root = Path(str((RunDirectory.open(source).recipe().get("data") or {}).get("root")))
        for file in (root / "val").glob("*/*"):
            return str(file)
    return "photo.jpg"
