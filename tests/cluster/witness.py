"""The user's own code, which travels with a job: shows what a rank was given; fails if asked to.

Tests copy this file into a project, and read from its output with `seen`.
"""

import hashlib
import json
import os
import re
import time

from lightning.pytorch import Callback

import distdl


class Witness(Callback):
    def __init__(self, token: str = "", data: str = "", pause: float = 0.0) -> None:
        self.token = token or os.environ.get("CANARY", "")
        self.data = data
        self.pause = pause

    def on_train_start(self, trainer, module):
        facts = {
            "rank": trainer.global_rank,
            "secret": digest(self.token),
            "data": self.data,
            "distdl": distdl.__file__,
            "code": __file__,
            "stale": "STALE" in os.environ,
        }
        print("saw", json.dumps(facts), flush=True)

    def on_train_batch_end(self, trainer, *_):
        time.sleep(self.pause)
        if os.environ.get("FAILING_RANK") == str(trainer.global_rank):
            raise ValueError("as the test wishes")
        if os.environ.get("KILLED_RANK") == str(trainer.global_rank):
            os.kill(os.getpid(), 9)


def digest(text):
    return hashlib.sha256(text.encode()).hexdigest()


def seen(output):
    """What the ranks have shown, by rank."""
    facts = [json.loads(text) for text in re.findall(r"saw (\{.*\})", output)]
    return {each["rank"]: each for each in facts}
