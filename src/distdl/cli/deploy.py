"""`python -m distdl deploy`: an exported model answers on Azure ML or SageMaker.

Traffic moves to a new model only after it has answered a test request as it does on this machine.
"""

from __future__ import annotations

import argparse
import base64
import importlib
import io
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from distdl.cli.arguments import Parser
from distdl.launchers import deploying
from distdl.util.answers import Answer
from distdl.util.errors import Problem, UserError
from distdl.util.screen import escaped
from distdl.util.suggest import did_you_mean

# Platform -> its module below `launchers`. KINDS there: an endpoint, and what `--batch` makes.
PLATFORMS = {"azureml": "azureml.endpoints", "sagemaker": "sagemaker.sagemaker_endpoints"}


@dataclass(frozen=True)
class DeployedModel:
    """What became of an endpoint."""

    SCHEMA: ClassVar[str] = "deploy/1"

    platform: str
    name: str
    dry_run: bool
    """Whether nothing was sent to the platform."""
    text: str
    """What people are shown: the address, and how to ask it; or the request."""


def main(argv: Sequence[str]) -> Answer:
    """Creates, changes or deletes one endpoint."""
    parser = Parser("python -m distdl deploy", description=__doc__)
    parser.add_argument("platform", choices=PLATFORMS)
    parser.add_argument(
        "words", nargs="*", default=[], metavar="RUN|MODEL, launcher.key=value, dry_run=true"
    )
    parser.add_argument(
        "--name", required=True, help="of the endpoint: 3 to 23 letters, digits and hyphens"
    )
    parser.add_argument(
        "--instance-type", help="a VM size of Azure, or an instance type of SageMaker"
    )
    parser.add_argument("--instances", type=int, default=1, help="how many of them (default: 1)")
    parser.add_argument("--image", help="the image that answers")
    parser.add_argument("--batch", action="store_true", help="many files at once, as a job")
    parser.add_argument("--input", help="SageMaker, --batch: s3://BUCKET/FOLDER with images")
    parser.add_argument("--output", help="SageMaker, --batch: s3://BUCKET/FOLDER for the answers")
    parser.add_argument(
        "--trust", action="store_true", help="run the code in the folder, whoever wrote it"
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--rollback",
        dest="change",
        action="store_const",
        const=deploying.roll_back,
        help="back to the model before",
    )
    instead.add_argument(
        "--delete",
        dest="change",
        action="store_const",
        const=deploying.delete,
        help="delete the endpoint",
    )
    options = parser.parse_intermixed_args(argv)
    words = vars(options).pop("words")
    trust = vars(options).pop("trust")
    if problems := [*_problems(options, words)]:
        raise UserError(*problems)
    source = None if options.change else Path(words.pop(0))
    platform, dry_run = read(options, words)

    from distdl.cli import serve

    # The SDKs print their progress: standard output has the result alone.
    with platform.errors(), redirect_stdout(sys.stderr), tempfile.TemporaryDirectory() as temporary:
        if source is None:
            text = options.change(platform)
        else:
            folder = serve.model(source)
            request = Path(temporary, "request.json")
            text = deploying.render(platform, folder)
            expected = example(folder, request, trust=trust)
            if not dry_run:
                text = deploying.deploy(platform, folder, request, expected)
    print(escaped(text))
    return Answer(DeployedModel(options.platform, options.name, dry_run, escaped(text)))


def _problems(options: argparse.Namespace, words: Sequence[str]) -> Iterator[Problem]:
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9-]{1,21}[A-Za-z0-9]", options.name):
        yield Problem(
            "--name",
            what=f"{options.name} is not a name for an endpoint",
            remedy="3 to 23 letters, digits and hyphens",
            code="wrong-kind",
        )
    if options.instances < 1:
        yield Problem(
            "--instances",
            what=f"{options.instances} is less than 1",
            remedy="--instances 1",
            code="out-of-range",
        )
    if not (words or options.change):
        yield Problem(
            "RUN", what="missing: the folder of a run, or of an exported model", code="missing-key"
        )


def read(options: argparse.Namespace, words: Sequence[str]) -> tuple[deploying.Platform, bool]:
    """The platform with the user's launcher, and whether this is a dry run."""
    from omegaconf import OmegaConf

    from distdl.config import consent
    from distdl.config.compose import compose, typed
    from distdl.launch.jobs import instantiate

    chosen = f"launcher={options.platform}"
    settings = r"\+*launcher\." if options.change else r"\+*launcher\.|dry_run="
    for word in words:
        if not re.match(settings, word):
            known = ["dry_run", *(f"launcher.{key}" for key in compose([chosen]).launcher)]
            raise UserError.at(
                word,
                what="is not a setting of deploy",
                remedy=did_you_mean(word.partition("=")[0], known) or "see --help",
                code="unknown-key",
            )
    config = compose([chosen, *words])
    consent.refuse(config, typed(config))
    node = OmegaConf.to_container(config.launcher, resolve=True)
    assert isinstance(node, dict)
    launcher = instantiate(node)
    endpoints = importlib.import_module(f"distdl.launchers.{PLATFORMS[options.platform]}")
    kind = endpoints.KINDS[options.batch]
    options.instance_type = options.instance_type or kind.default_type
    return kind(launcher, options), bool(config.dry_run)


def example(folder: Path, request: Path, *, trust: bool = False) -> dict[str, Any]:
    """Writes the body of a test request, with a drawn image, and returns of this machine's answer
    what that of any other must agree with. `trust`: as of `distdl serve`."""
    from PIL import Image, ImageOps

    from distdl.cli import serve

    image = ImageOps.colorize(Image.linear_gradient("L"), "darkgreen", "orange")
    file = io.BytesIO()
    image.save(file, "JPEG")
    try:
        scorer = serve.loader(folder, trust=trust)()
        (answer,) = scorer.score([file.getvalue()], top_k=1)
    except ValueError as error:
        raise UserError.at(str(folder), what=str(error), code="unreadable") from None
    encoded = base64.b64encode(file.getvalue()).decode()
    request.write_text(json.dumps({"images": [encoded], "top_k": 1}), encoding="utf-8")
    return scorer.kind.gist(answer)
