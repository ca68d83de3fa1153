"""`python -m distdl convert CHECKPOINT --to STRATEGY|weights`: a checkpoint in another form.

Every strategy reads and writes one portable file (docs/strategies/checkpoints.md), so a resume
under another strategy needs no conversion. This command makes that file out of the folders that
FSDP and DeepSpeed write, or weights for other programs, and compares the result with its source.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from distdl.cli.arguments import Parser
from distdl.runs import checkpoints
from distdl.util.answers import Answer
from distdl.util.errors import UserError
from distdl.util.screen import say
from distdl.util.suggest import closest

WEIGHTS = "weights"
STRATEGIES = (
    "single",
    "ddp",
    "fsdp",
    "pipeline",
    "deepspeed_zero1",
    "deepspeed_zero2",
    "deepspeed_zero3",
    "deepspeed_offload",
    "local_sgd",
)


@dataclass(frozen=True)
class ConvertedFile:
    """A file that was written, and read again to compare it."""

    SCHEMA: ClassVar[str] = "convert/1"

    source: str
    target: str
    to: str
    """A strategy, or `weights`."""
    equal: Sequence[str]
    """The parts that are equal to the source's, bit by bit."""


def main(argv: Sequence[str]) -> Answer:
    """Writes one file, and prints which of its parts are equal to the source."""
    known = (*STRATEGIES, WEIGHTS)
    parser = Parser(
        "python -m distdl convert",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", help="a file, a run directory, FSDP's or DeepSpeed's folder")
    parser.add_argument("--to", required=True, help=f"one of {', '.join(known)}")
    parser.add_argument(
        "--world-size", type=int, help="check that the global batch is divisible by it"
    )
    parser.add_argument(
        "--output",
        type=Path,
        help=(
            "a .ckpt file; for weights .pth or .safetensors (by default in the current folder: "
            "epoch_002-fsdp.ckpt, epoch_002.pth)"
        ),
    )
    trust = "let the checkpoint run code while it is read: only for your own files"
    parser.add_argument("--trust-pickle", action="store_true", help=trust)
    options = parser.parse_args(argv)
    if options.to not in known:
        near = closest(options.to, known) or next((n for n in known if options.to in n), "")
        raise UserError.at(
            "--to",
            what=f"there is no {options.to!r}",
            remedy=f"did you mean --to {near}?" if near else f"one of {', '.join(known)}",
            code="wrong-choice",
        )
    source = checkpoints.find(options.checkpoint)
    # Not beside the source: there the file would be taken for a checkpoint of the run.
    stem = source.name.removesuffix(source.suffix) or source.name
    default = f"{stem}.pth" if options.to == WEIGHTS else f"{stem}-{options.to}.ckpt"
    target = options.output or Path(default)
    check_target(target, options.to)

    from distdl.checkpoint import convert as parts
    from distdl.checkpoint import formats
    from distdl.checkpoint.adapters import refuse_adapters
    from distdl.checkpoint.settled import refuse_unsettled

    checkpoint = formats.read(source) if not options.trust_pickle else parts.load_trusted(source)
    if options.to == WEIGHTS:
        refuse_adapters(checkpoint, str(source))
        refuse_unsettled(checkpoint, str(source))
        weights = parts.plain_weights(checkpoint["state_dict"])
        parts.write_weights(weights, target)
        written = formats.read(target)["state_dict"]
        compared = {"weights": parts.compare(weights, written, WEIGHTS)}
    else:
        check_resumable(checkpoint, source, options.world_size)
        parts.write_checkpoint(checkpoint, source, target)
        compared = parts.compare_all(checkpoint, formats.read(target))
    say(f"{source} -> {target.resolve()}")
    for part, count in compared.items():
        say(f"  equal: {part}{f', {count} tensors' if count else ''}")
    if options.to != WEIGHTS:
        print_use(checkpoint, target, options.to, options.world_size)
    else:
        print_missing(checkpoint)
    return Answer(ConvertedFile(str(source), str(target.resolve()), options.to, [*compared]))


def print_missing(checkpoint: Mapping[str, Any]) -> None:
    """What a validation of this checkpoint has and its weights alone have not."""
    from distdl.callbacks import module_state
    from distdl.checkpoint import convert as parts

    if parts.BEHIND_THE_AVERAGE in checkpoint:
        say("  note: these are the averaged weights (EMA), which validations have seen")
    if settings := module_state.for_inference(checkpoint):
        names = module_state.changed(settings)
        say(f"  note: weights lack settings that a callback changed: {names}")


def check_target(target: Path, to: str) -> None:
    """Refuses a target that exists or has the wrong suffix, by a UserError."""
    forms = (".pth", ".safetensors") if to == WEIGHTS else (".ckpt",)
    if target.suffix not in forms:
        raise UserError.at(
            "--output",
            what=f"{target} does not end in {' or '.join(forms)}",
            remedy=f"--output {target.with_suffix(forms[0])}",
            code="wrong-kind",
        )
    if target.exists():
        raise UserError.at(
            "--output",
            what=f"{target} exists",
            remedy="name another: --output FILE",
            code="exists-already",
        )


def check_resumable(checkpoint: Mapping[str, Any], source: Path, world_size: int | None) -> None:
    """Refuses a checkpoint that a training cannot resume from, by a UserError: one of weights only,
    or with a global batch that is not divisible by `world_size`."""
    if "optimizer_states" not in checkpoint:
        raise UserError.at(
            str(source),
            what="holds weights only, not a training's state",
            remedy=f"start a training from them: model.weights={source}",
            code="incomplete",
        )
    batch = (checkpoint.get("distdl") or {}).get("global_batch_size")
    if world_size is not None and (world_size < 1 or (batch and batch % world_size)):
        raise UserError.at(
            "--world-size",
            what=f"the global batch of {batch} is not divisible by {world_size}",
            remedy="choose one that divides it, or resume with another data.batch_size",
            code="indivisible",
        )


def print_use(checkpoint: Mapping[str, Any], target: Path, to: str, world_size: int | None) -> None:
    from distdl.checkpoint import portable

    if not all(map(portable.is_named, checkpoint["optimizer_states"])):
        say(
            "  note: its optimizer state is keyed by position, as distdl 0.1 and Lightning write "
            "it: it fits a model with the same parameter groups"
        )
    size = f" trainer.devices={world_size}" if world_size else ""
    say(f"  use: python -m distdl ... strategy={to}{size} checkpoint.resume_from={target}")
