"""Azure ML's batch scoring script. It goes into every model folder. Azure calls `init` once per
process and `run` for each mini-batch, and appends the rows to one file.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

scorer: Any = None


def init() -> None:
    """Loads the model of AZUREML_MODEL_DIR, or of a folder in it."""
    global scorer
    folder = next(Path(os.environ["AZUREML_MODEL_DIR"]).rglob("model.json")).parent
    sys.path.insert(0, str(folder))
    from distdl.tools.serving.scorer import Scorer

    scorer = Scorer(folder, trust=True)


def run(mini_batch: Sequence[str]) -> list[str]:
    """A line of JSON per file: `file`, and the answer or `error`."""
    return [json.dumps({"file": name, **_answer(Path(name))}) for name in mini_batch]


def _answer(path: Path) -> dict[str, Any]:
    try:
        return dict(scorer.score([path.read_bytes()], scorer.kind.in_rows)[0])
    except (ValueError, OSError) as error:
        return {"error": str(error)}
