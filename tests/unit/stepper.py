"""An arm of benchmarks.turns that trains nothing, in a process of its own."""

from __future__ import annotations

import sys
import time

from benchmarks.turns import stop_before


def main(name: str, seconds: str, steps: str, file: str, dies: str) -> None:
    """Says when it is its turn, and for how long."""
    for step in range(int(steps)):
        stop_before(step, 2, 3)
        if step == int(dies):
            sys.exit(f"broken in step {dies}")
        with open(file, "a") as said:
            print(name, step, file=said)
        time.sleep(float(seconds))
