"""How fast a step is, and why (docs/benchmark.md); what each strategy would need."""

FILE = "benchmark.json"
# Parts of a step.
DATA, FORWARD, BACKWARD, OPTIMIZER = "data", "forward", "backward", "optimizer"
COMMUNICATION, OTHER = "communication", "other"
PHASES = (DATA, FORWARD, BACKWARD, OPTIMIZER, COMMUNICATION, OTHER)
