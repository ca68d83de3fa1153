"""What the terminal shows of a rank's log."""

import logging

from distdl.worker.rank_logging import ScreenHandler


def test_a_warning_begins_with_the_part_of_its_path_that_tells():
    path = "/home/anna/a/project/.venv/lib/python3.11/site-packages/lightning/pytorch/trainer.py"
    record = logging.makeLogRecord({"name": "py.warnings", "msg": f"{path}:7: few workers"})
    assert ScreenHandler().format(record) == "lightning/pytorch/trainer.py:7: few workers"
    other = logging.makeLogRecord({"name": "distdl", "msg": f"see {path}"})
    assert ScreenHandler().format(other) == f"see {path}"
