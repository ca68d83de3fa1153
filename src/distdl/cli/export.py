"""`python -m distdl export RUN --to FORMAT`: the model in a form that answers without distdl."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from distdl.runs.directory import RunDirectory
from distdl.util.errors import UserError

FORMATS = ("pt2", "onnx", "mlflow", "weights")


def main(argv: Sequence[str]) -> int:
    """Starts `task=export` on this machine's CPU, as an attempt of the run."""
    parser = argparse.ArgumentParser("python -m distdl export", description=__doc__)
    add = parser.add_argument
    add("source", metavar="RUN|CHECKPOINT", help="a run directory, or a checkpoint inside one")
    add("overrides", nargs="*", help="e.g. data.root=/where/the/validation/images/are")
    add("--to", required=True, choices=FORMATS, help="pt2: torch.export; weights: safetensors")
    add("--images", type=int, default=64, help="how many images it is compared on (default: 64)")
    add("--output", help="a folder in the run's directory (default: exports/FORMAT-DIGEST)")
    add("--register", metavar="NAME", help="with --to mlflow: its name in MLflow's registry")
    options = parser.parse_intermixed_args(argv)

    from distdl.cli import resume
    from distdl.serving import model_folder

    run, checkpoint = find(options.source)
    recipe = run.recipe()
    words = ["task=export", f"task.format={options.to}", f"task.images={options.images}"]
    words.append(f"task.checkpoint={checkpoint or model_folder.best_of(run.path)}")
    words += [f"task.output={options.output}"] if options.output else []
    words += [f"task.register={options.register}"] if options.register else []
    words += ["launcher=local", "strategy=single", "trainer.devices=1", "trainer.num_nodes=1"]
    words += ["trainer.accelerator=cpu", "trainer.precision=32-true"]
    words += ["model.compile=false"] if "compile" in (recipe.get("model") or {}) else []
    words += ["data.decoder=auto"] if "decoder" in (recipe.get("data") or {}) else []
    return resume.start(run, [*words, *options.overrides])


def find(source: str) -> tuple[RunDirectory, str]:
    """The run, and the checkpoint in it if `source` names one."""
    path = Path(source)
    if path.suffix != ".ckpt":
        return RunDirectory.open(source), ""
    if not path.exists():
        raise UserError.at(source, "no such checkpoint", "name a run or a checkpoint inside one")
    run = path.absolute().parent.parent
    if path.absolute().parent.name != "checkpoints" or not (run / "config.yaml").is_file():
        what = "lies in no run, whose config says what the network and its images are"
        remedy = "name the checkpoint in its run: RUN/checkpoints/best.ckpt"
        raise UserError.at(source, what, remedy)
    return RunDirectory.open(run), str(path.absolute())
