"""A user's own file of DeepSpeed's settings (https://www.deepspeed.ai/docs/config-json/)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from distdl.util.errors import Problem, UserError

INSTALL = "pip install 'distdl[deepspeed]'"
# What a file of DeepSpeed's settings may not set, since the run sets it. Its optimizers would be
# compiled at the start, for minutes where that works at all, and know no `optimizer.*`.
SET_BY_THE_RUN = {
    "gradient_accumulation_steps": "trainer.accumulate_grad_batches=...",
    "train_batch_size": "data.batch_size=...",
    "train_micro_batch_size_per_gpu": "data.batch_size=...",
    "optimizer": "optimizer=adamw (--help lists others)",
    "scheduler": "schedule=cosine (--help lists others)",
}


def find(config: str) -> Path:
    """A file of DeepSpeed's settings: from the current folder, or where the user's code is.

    Raises:
        UserError: There is none.
    """
    for folder in ("", *sys.path):
        path = Path(folder, config)
        if path.is_file():
            return path
    raise UserError.at("config", f"no such file: {config}", "a JSON file of DeepSpeed's")


def settings_of(path: Path) -> dict[str, Any]:
    """The settings in a file, without those that are "auto".

    Raises:
        UserError: It is no JSON, or sets what the run sets; paths are relative to the node.
    """
    try:
        settings = json.loads(path.read_text())
    except ValueError as error:
        raise UserError.at("config", f"{path} is no JSON: {error}") from error
    if not isinstance(settings, dict):
        raise UserError.at("config", f"{path} is no JSON object")
    settings = without_auto(settings)
    problems = [
        Problem("config", f"{path} sets {key}", f"leave it out, and write {remedy}")
        for key, remedy in SET_BY_THE_RUN.items()
        if key in settings
    ]
    if problems:
        raise UserError(*problems)
    return settings


def without_auto(node: Any) -> Any:
    """Without what is "auto", as files written for Hugging Face's Trainer say it."""
    if not isinstance(node, dict):
        return node
    kept = {key: without_auto(value) for key, value in node.items() if value != "auto"}
    return {key: value for key, value in kept.items() if value != {} or node[key] == {}}
