"""Waiting for what another process does."""

import time


def until(condition, seconds=120, state=str):
    """The first true result of `condition`; `state()` is reported if there is none in time."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {state()}"
        time.sleep(0.02)
    return result
