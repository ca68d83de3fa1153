"""A user's own file of DeepSpeed's settings (https://www.deepspeed.ai/docs/config-json/)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from distdl.util.errors import Problem, UserError

INSTALL = "pip install 'distdl[deepspeed]'"
# Keys that a settings file must leave to the run. DeepSpeed's own optimizers would ignore
# `optimizer.*`, and compile for minutes at the start, if they compile at all.
SET_BY_THE_RUN = {
    "gradient_accumulation_steps": "trainer.accumulate_grad_batches=...",
    "train_batch_size": "data.batch_size=...",
    "train_micro_batch_size_per_gpu": "data.batch_size=...",
    "optimizer": "optimizer=adamw (--help lists others)",
    "scheduler": "schedule=cosine (--help lists others)",
}


def find(config: str) -> Path:
    """A file of DeepSpeed's settings, relative to the current folder or to one in `sys.path`.

    Raises:
        UserError: The file does not exist.
    """
    for folder in ("", *sys.path):
        path = Path(folder, config)
        if path.is_file():
            return path
    raise UserError.at(
        "config",
        what=f"no such file: {config}",
        remedy="write the path of a JSON file of DeepSpeed's settings",
        code="not-found",
    )


def settings_of(path: Path) -> dict[str, Any]:
    """The settings in a file, without those that are "auto".

    Raises:
        UserError: The file is not JSON, or sets keys that belong to the run. Paths of problems are
            relative to the node.
    """
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError.at(
            "config", what=f"{path} is not JSON: {error}", code="damaged-file"
        ) from error
    if not isinstance(settings, dict):
        raise UserError.at("config", what=f"{path} is not a JSON object", code="wrong-kind")
    settings = without_auto(settings)
    problems = [
        Problem(
            "config",
            what=f"{path} sets {key}",
            remedy=f"leave it out, and write {remedy}",
            code="reserved",
        )
        for key, remedy in SET_BY_THE_RUN.items()
        if key in settings
    ]
    if problems:
        raise UserError(*problems)
    return settings


def without_auto(node: dict[str, Any]) -> dict[str, Any]:
    """Drops values that are "auto", as in files for Hugging Face's Trainer."""
    kept = {
        key: without_auto(value) if isinstance(value, dict) else value
        for key, value in node.items()
        if value != "auto"
    }
    return {key: value for key, value in kept.items() if value != {} or node[key] == {}}
