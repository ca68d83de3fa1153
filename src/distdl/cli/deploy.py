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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distdl.util.errors import UserError

# Platform -> the classes of its endpoints, and of what answers for many files at once.
PLATFORMS = {
    "azureml": ("azureml.endpoints", "OnlineEndpoint", "BatchEndpoint"),
    "sagemaker": ("sagemaker.sagemaker_endpoints", "HostedEndpoint", "Transform"),
}


def main(argv: Sequence[str]) -> int:
    """Creates, changes or deletes one endpoint."""
    parser = argparse.ArgumentParser("python -m distdl deploy", description=__doc__)
    add = parser.add_argument
    add("platform", choices=PLATFORMS)
    add("words", nargs="*", metavar="RUN|MODEL, launcher.key=value, dry_run=true")
    add("--name", required=True, help="of the endpoint: 3 to 23 letters, digits and hyphens")
    add("--instance-type", help="a VM size of Azure, or an instance type of SageMaker")
    add("--instances", type=int, default=1, help="how many of them (default: 1)")
    add("--image", help="the image that answers")
    add("--batch", action="store_true", help="many files at once, as a job")
    add("--input", help="SageMaker, --batch: s3://BUCKET/FOLDER with images")
    add("--output", help="SageMaker, --batch: s3://BUCKET/FOLDER for the answers")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--rollback", action="store_true", help="back to the model before")
    only.add_argument("--delete", action="store_true", help="delete the endpoint")
    options = parser.parse_intermixed_args(argv)
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9-]{1,21}[A-Za-z0-9]", options.name):
        raise UserError.at("--name", f"{options.name} is not a name for an endpoint", "see --help")
    if options.instances < 1:
        raise UserError.at("--instances", f"{options.instances} is less than 1")

    from distdl.cli import serve
    from distdl.launchers import deploying
    from distdl.serving.model_folder import refuse_damaged

    sources = [word for word in options.words if "=" not in word or Path(word).exists()]
    platform, dry_run = read(options, [word for word in options.words if word not in sources])
    changes = options.rollback or options.delete
    if len(sources) != (not changes) or (changes and dry_run):
        remedy = "name one RUN or MODEL; with --rollback and --delete none, and no dry_run"
        raise UserError.at("RUN", f"{len(sources)} folders", remedy)
    with platform.errors():
        if options.rollback:
            deploying.roll_back(platform)
        elif options.delete:
            deploying.delete(platform)
        else:
            folder = serve.model(Path(sources[0]))
            refuse_damaged(folder)
            request = deploying.render(platform, folder)
            print(request) if dry_run else deploying.deploy(platform, folder, *example(folder))
    return 0


def read(options: argparse.Namespace, words: Sequence[str]) -> tuple[Any, bool]:
    """The platform with the user's launcher, and whether this is a dry run."""
    from omegaconf import OmegaConf

    from distdl.config import compose
    from distdl.validation.kinds import locate

    for word in words:
        if not re.match(r"\+*launcher\.|dry_run=", word):
            raise UserError.at(word, "is not a setting of deploy", "see --help")
    config = compose.compose([f"launcher={options.platform}", *words])
    node: Any = OmegaConf.to_container(config.launcher, resolve=True)
    launcher = locate(node.pop("_target_"))(**node)
    module, *kinds = PLATFORMS[options.platform]
    kind = getattr(importlib.import_module(f"distdl.launchers.{module}"), kinds[options.batch])
    options.instance_type = options.instance_type or kind.default_type
    return kind(launcher, options), bool(config.dry_run)


def example(folder: Path) -> tuple[str, dict[str, Any]]:
    """The body of a test request with a drawn image, and this machine's answer."""
    from PIL import Image, ImageOps

    from distdl.serving.scorer import Scorer

    image = ImageOps.colorize(Image.linear_gradient("L"), "darkgreen", "orange")
    image.save(file := io.BytesIO(), "JPEG")
    try:
        (answer,) = Scorer(folder).score([file.getvalue()], top_k=1)
    except ValueError as error:
        raise UserError.at(str(folder), str(error), "export the model again") from None
    body = {"images": [base64.b64encode(file.getvalue()).decode()], "top_k": 1}
    return json.dumps(body), {key: answer[key] for key in ("class", "probability")}
