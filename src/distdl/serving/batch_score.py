"""Azure ML's batch scoring script. It goes into every model folder. Azure calls `init` once per
process and `run` for each mini-batch, and appends the rows to one file.
"""

from __future__ import annotations

import csv
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

scorer: Any = None


def init() -> None:
    """Loads the model of AZUREML_MODEL_DIR, or of the one folder in it."""
    global scorer
    root = Path(os.environ["AZUREML_MODEL_DIR"])
    folder = next(path.parent for depth in ("", "*/") for path in root.glob(f"{depth}model.json"))
    sys.path.insert(0, str(folder))
    from distdl.serving.scorer import Scorer

    scorer = Scorer(folder)


def run(mini_batch: Sequence[str]) -> list[str]:
    """A CSV row per file: name, class, probability, and what is wrong with it, if anything is."""
    rows = []
    for name in mini_batch:
        try:
            (answer,) = scorer.score([Path(name).read_bytes()], top_k=1)
            rows.append(_row(name, answer["class"], f"{answer['probability']:.6f}", ""))
        except (ValueError, OSError) as error:
            rows.append(_row(name, "", "", str(error)))
    return rows


def _row(*cells: str) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(cells)
    return line.getvalue()
