"""Start-up: `python -m distdl --help` against `import lightning.pytorch`, whole processes."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from benchmarks.table import Result, row

REPEATS = 5
ARMS = {
    "import lightning.pytorch": ("-c", "import lightning.pytorch"),
    "python -m distdl --help": ("-m", "distdl", "--help"),
    "python -m distdl --cfg job": ("-m", "distdl", "+experiment=resnet50_ddp", "--cfg", "job"),
}


def main(repeats: int = REPEATS) -> Result:
    times: dict[str, list[float]] = {name: [] for name in ARMS}
    for repeat in range(repeats + 1):
        for name, arguments in ARMS.items():
            started = time.perf_counter()
            subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
            if repeat:  # the first fills the file cache
                times[name].append(time.perf_counter() - started)
    competitor, ours, composed = (statistics.median(times[name]) for name in ARMS)
    return Result(
        title="Start-up (s), whole process",
        what="`--help` wall time against `import lightning.pytorch`",
        competitor="python -c 'import lightning.pytorch'",
        goal="at most 0.10",
        ratio=ours / competitor,
        rows=[row(name, values, "s") for name, values in times.items()],
        command="python -m benchmarks.run startup",
        notes=f"`--cfg job` composes as well: ratio {composed / competitor:.3f}",
    )
