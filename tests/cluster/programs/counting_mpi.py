"""mpi4py, which saves and continues."""

import json
import os
import signal
import sys
import time

from mpi4py import MPI

asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
world = MPI.COMM_WORLD
file = os.path.join(os.environ["DISTDL_CHECKPOINTS"], "state.json")
first = 0
if os.path.exists(file):
    with open(file, encoding="utf-8") as saved:
        first = json.load(saved)["step"]
print("from step", first, "as", world.rank, "of", world.size, flush=True)
for step in range(first, int(sys.argv[1])):
    time.sleep(0.05)
    ends = world.allreduce(bool(asked), op=MPI.LOR)
    if world.rank == 0:
        with open(f"{file}.new", "w", encoding="utf-8") as new:
            json.dump({"step": step + 1}, new)
        os.replace(f"{file}.new", file)
    world.Barrier()
    if ends:
        sys.exit(75)
print("done", flush=True)
