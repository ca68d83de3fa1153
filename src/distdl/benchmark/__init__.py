"""The parts of `task=benchmark` (docs/benchmark.md): clock, device limits, verdict, table."""

FILE = "benchmark.json"
# Parts of a step.
DATA, FORWARD, BACKWARD, OPTIMIZER = "data", "forward", "backward", "optimizer"
COMMUNICATION, OTHER = "communication", "other"
PHASES = (DATA, FORWARD, BACKWARD, OPTIMIZER, COMMUNICATION, OTHER)
