"""`make bench`: runs what fits this machine and writes benchmarks/RESULTS.md.

python -m benchmarks.run [startup] [overhead] [pipeline] [traffic] [loader]
"""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path

from benchmarks.table import machine

ALL = ("startup", "overhead", "pipeline", "traffic", "loader")


def main(names: list[str]) -> int:
    unknown = set(names) - set(ALL)
    if unknown:
        print(f"no benchmark {', '.join(sorted(unknown))}; there are: {', '.join(ALL)}")
        return 2
    chosen = names or list(ALL)
    parts = [
        "# Results",
        f"{time.strftime('%Y-%m-%d')}, {machine()}. Interleaved: A, B, C, A, B, C.",
    ]
    for name in chosen:
        print(f"{name} ...", flush=True)
        result = importlib.import_module(f"benchmarks.{name}").main()
        parts.append(result.markdown())
        print(result.markdown(), flush=True)
    parts.append(
        "## Not run here\n\nresnet50 at 224 px in bf16 against a hand-written loop needs a GPU: "
        "`python -m pytest tests/gpu -s`."
    )
    if set(chosen) == set(ALL):
        Path(__file__).with_name("RESULTS.md").write_text("\n\n".join(parts) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
