"""An arm of benchmarks.turns that trains nothing, in a process of its own."""

from __future__ import annotations

import sys
import time

from benchmarks.turns import stop_before


def main(name: str, seconds: str, steps: str, file: str, dies: str) -> None:
    """Logs its steps, each of so many seconds."""
    for step in range(int(steps)):
        stop_before(step, 2, 3)
        if step == int(dies):
            sys.exit(f"broken in step {dies}")
        with open(file, "a") as log:
            print(name, step, file=log)
        time.sleep(float(seconds))
