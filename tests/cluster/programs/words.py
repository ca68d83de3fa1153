"""Writes down which words and variables it got."""

import json
import os
import sys

file = os.path.join(os.environ["DISTDL_CHECKPOINTS"], f"words-{os.environ['RANK']}.json")
values = {name: value for name, value in os.environ.items() if name.startswith("HOSTILE_")}
with open(file, "w", encoding="utf-8", errors="surrogateescape") as written:
    json.dump({"words": sys.argv[1:], "values": values}, written)
