"""JAX over several processes, which saves and continues."""

import os
import signal
import sys

import jax
import numpy as np
from jax.experimental import multihost_utils

address = os.environ["JAX_COORDINATOR_ADDRESS"]
count, number = (int(os.environ[f"JAX_{name}"]) for name in ("NUM_PROCESSES", "PROCESS_ID"))
jax.distributed.initialize(address, count, number)
# After it: it has a handler of its own.
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(True))

file = os.path.join(os.environ["DISTDL_CHECKPOINTS"], "state.npz")
first, weight = 0, 1.0
if os.path.exists(file):
    with np.load(file) as saved:
        first, weight = int(saved["step"]), float(saved["weight"])
print("from step", first, flush=True)
for step in range(first, int(sys.argv[1])):
    told = multihost_utils.process_allgather(np.array([weight, float(bool(asked))]))
    weight = 0.9 * float(told[:, 0].mean())
    if number == 0:
        np.savez(f"{file}.new.npz", step=step + 1, weight=weight)
        os.replace(f"{file}.new.npz", file)
    if told[:, 1].any():
        os._exit(75)
print("done", flush=True)
