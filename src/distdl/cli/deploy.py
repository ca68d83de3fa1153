"""`python -m distdl deploy`: an exported model answers on Azure ML or SageMaker.

Traffic moves to a new model only after it has answered a test request as it does on this machine.
"""

from __future__ import annotations

import argparse
import importlib
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distdl.cli.provision import values
from distdl.util.errors import Problem, UserError

if TYPE_CHECKING:
    from distdl.launchers.deploying import Endpoint, Example

# Platform -> module and class of its endpoints, and of what answers for many files at once.
PLATFORMS = {
    "azureml": ("distdl.launchers.azureml.endpoints", "OnlineEndpoint", "BatchEndpoint"),
    "sagemaker": ("distdl.launchers.sagemaker.sagemaker_endpoints", "HostedEndpoint", "Transform"),
}
NEEDED = ("score.py", "batch_score.py", "requirements.txt", "distdl_scoring/__init__.py")
EXAMPLES = """\
examples:
  python -m distdl deploy azureml RUN deploy.name=flowers dry_run=true
  python -m distdl deploy azureml RUN deploy.name=flowers launcher.workspace=space
  python -m distdl deploy azureml deploy.name=flowers deploy.rollback=true
  python -m distdl deploy azureml deploy.name=flowers --delete
"""


def main(argv: Sequence[str]) -> int:
    """Creates, changes or deletes one endpoint."""
    options = parse(argv)
    words = list(options.words)
    is_source = words and ("=" not in words[0] or Path(words[0]).exists())
    source = words.pop(0) if is_source else None
    endpoint, dry_run = read(options.platform, options.batch, words)
    if options.delete or endpoint.settings.rollback:
        if dry_run or source:
            what = "does not go with --delete or deploy.rollback=true"
            raise UserError.at(source or "dry_run", what, "leave it out")
        if options.delete and not options.yes and not confirmed(endpoint.settings.name):
            print("Nothing was deleted.")
            return 1
        endpoint.delete() if options.delete else endpoint.roll_back()
        return 0
    if source is None:
        remedy = f"python -m distdl deploy {options.platform} RUN deploy.name=NAME"
        raise UserError.at("RUN", "missing: the folder of a run, or of an exported model", remedy)
    if misfits := list(endpoint.misfits()):
        raise UserError(*misfits)
    from distdl.launchers.deploying import ExportedModel

    folder = folder_of(Path(source))
    if dry_run:
        print(endpoint.render(ExportedModel(folder)))
    else:
        endpoint.deploy(ExportedModel(folder, examples(folder)))
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m distdl deploy",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("platform", choices=PLATFORMS)
    parser.add_argument("words", nargs="*", metavar="RUN|MODEL or key=value")
    parser.add_argument("--batch", action="store_true", help="many files at once, as a job")
    parser.add_argument("--delete", action="store_true", help="delete the endpoint; asks first")
    parser.add_argument("--yes", action="store_true", help="delete without asking")
    return parser.parse_intermixed_args(argv)


def read(platform: str, batch: bool, words: Sequence[str]) -> tuple[Endpoint, bool]:
    """The endpoint with its settings and the user's launcher, and whether it is a dry run."""
    from omegaconf import OmegaConf

    from distdl.config import compose
    from distdl.validation.kinds import locate

    launchers = [word for word in words if word.lstrip("+").startswith("launcher.")]
    settings = values([word for word in words if word not in launchers])
    dry_run = settings.pop("dry_run", False)
    others = [key for key in settings if not key.startswith("deploy.")]
    problems = [Problem(key, "is not a setting of deploy", "deploy.KEY=VALUE") for key in others]
    if type(dry_run) is not bool:
        problems.append(Problem("dry_run", f"{dry_run!r} is not true or false"))
    if problems:
        raise UserError(*problems)
    config = compose.compose([f"launcher={platform}", *launchers])
    node: Any = OmegaConf.to_container(config.launcher, resolve=True)
    launcher = locate(node.pop("_target_"))(**node)
    module, *kinds = PLATFORMS[platform]
    kind = getattr(importlib.import_module(module), kinds[batch])
    return kind(launcher, {k.removeprefix("deploy."): v for k, v in settings.items()}), dry_run


def confirmed(name: str) -> bool:
    if not sys.stdin.isatty():
        raise UserError.at("--delete", "there is no terminal to ask for confirmation", "add --yes")
    return input(f"Delete {name} and its deployments? Type yes: ").strip().lower() == "yes"


def folder_of(source: Path) -> Path:
    """The model folder that a path names: itself, one in an MLflow model, or a run's export."""
    from distdl.serving.model_folder import DESCRIPTION, exported

    for folder in (source, source / "artifacts" / "model", exported(source)):
        if folder and (folder / DESCRIPTION).is_file():
            if absent := [name for name in NEEDED if not (folder / name).is_file()]:
                raise UserError.at(str(folder), f"has no {absent[0]}", "export the model again")
            return folder
    remedy = f"python -m distdl export {source} --to pt2"
    raise UserError.at(str(source), "holds no exported model", remedy)


def examples(folder: Path) -> tuple[Example, ...]:
    """Test requests, answered on this machine: images that the export kept, else a drawn one."""
    from distdl.launchers.deploying import Example
    from distdl.serving.scorer import Scorer

    try:
        scorer = Scorer(folder)
        kept = (scorer.description.get("verification") or {}).get("examples") or ()
        images = [(folder / each["file"]).read_bytes() for each in kept] or [drawn()]
        answers = [scorer.score([image], top_k=1)[0] for image in images]
    except (ValueError, OSError) as error:
        raise UserError.at(str(folder), str(error), "export the model again") from None
    for each, answer in zip(kept, answers, strict=False):
        if each["class"] != answer["class"]:
            what = f"{each['file']} was {each['class']}, and on this machine is {answer['class']}"
            raise UserError.at(str(folder), what, "export the model again")
    pairs = zip(images, answers, strict=True)
    return tuple(Example(image, best["class"], best["probability"]) for image, best in pairs)


def drawn() -> bytes:
    """A JPEG of colours that change over the image."""
    from PIL import Image

    ramp = Image.linear_gradient("L")
    bands = (ramp, ramp.rotate(90), ramp.rotate(180))
    file = io.BytesIO()
    Image.merge("RGB", bands).save(file, "JPEG", quality=95)
    return file.getvalue()
