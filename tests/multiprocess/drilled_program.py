"""What test_drill_ranks disturbs as a program of the user's own: two ranks count in step with each
other, and one of them saves. It imports only the standard library."""

import json
import os
import signal
import socket
import sys
import time

STEPS, SAVER = int(sys.argv[1]), int(sys.argv[2])
rank = int(os.environ["RANK"])
file = os.path.join(os.environ["DISTDL_CHECKPOINTS"], "count.json")
address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))


def peer():
    """A connection to the other rank."""
    if rank == 0:
        return socket.create_server(address).accept()[0]
    while True:
        try:
            return socket.create_connection(address)
        except ConnectionRefusedError:
            time.sleep(0.02)


def exchange(connection, word):
    connection.sendall(word)
    answer = connection.recv(1)
    if not answer:
        raise ConnectionError("connection closed by peer")
    return answer


asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
connection = peer()
first = 0
if os.path.exists(file):
    with open(file, encoding="utf-8") as saved:
        first = json.load(saved)["step"]
print("from step", first, flush=True)
for step in range(first, STEPS):
    time.sleep(0.05)
    ends = b"1" in (exchange(connection, b"1" if asked else b"0"), b"1" if asked else b"0")
    if rank == SAVER:
        with open(f"{file}.new", "w", encoding="utf-8") as new:
            json.dump({"step": step + 1, "weights": "0" * 4096}, new)
        os.replace(f"{file}.new", file)
    exchange(connection, b".")  # saved
    if ends:
        sys.exit(75)
