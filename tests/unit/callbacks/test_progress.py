"""What a bar shows on a terminal of any width, and to what it gives way."""

import builtins
import io
import math
import sys
from types import SimpleNamespace

import pytest
from lightning.pytorch.callbacks import Timer
from omegaconf import OmegaConf
from rich.console import Console

from distdl.callbacks import progress
from distdl.callbacks.progress import Progress, described
from distdl.config.recipe import unit_of
from distdl.optim.budget import TimeBudget
from distdl.tasks.train import warn_of_time_limit
from distdl.util.progress_bar import Line

LONG = "train/mean_absolute_percentage_error_of_the_forecast"
SPEED = {"perf/images_per_second": 1234.5, "perf/data_wait": 0.01, "perf/memory_gib": 3.2}
METRICS = {"train/loss": 6.9123, "lr": 0.1, **SPEED}
PARTS = described(METRICS, unit=unit_of("distdl.data.x"))
USERS = described(METRICS, {LONG: 18.39, "mae": 3.065})
TITLE, UPLOAD = "epoch 12/90", "uploading to https://a.blob.core.windows.net/c/x"
# The width, the seconds so far, the title, its info, whether per cent, and what is shown.
LINES = [
    (40, 754, TITLE, PARTS, False, ["epoch 12/90 ", " 1234/5005 12:34<"]),
    (60, 754, TITLE, PARTS, False, [" 1234/5005 12:34<", "loss 6.9123  lr 0.1\n"]),
    (80, 3723, TITLE, PARTS, False, [" 1:02:03<", "loss 6.9123  lr 0.1  1,234 img/s"]),
    (80, 754, TITLE, USERS, False, ["loss 6.9123  train/me…forecast 18.39"]),
    (220, 754, TITLE, USERS, False, ["━", f"{LONG} 18.39  mae 3.065", "1,234 samples/s"]),
    (80, 754, TITLE, [], True, [" 25 % 12:34<"]),  # bytes of 140 GB say nothing
    (60, 754, UPLOAD, ["12 MB of 9 GB"], False, ["uploading to https:… 1234/5005 12:34<", "12 MB"]),
]


@pytest.mark.parametrize("width, seconds, title, info, percent, expected", LINES)
def test_count_and_time_stay_and_what_fits_is_complete(
    width, seconds, title, info, percent, expected
):
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    line = Line(console)
    line.add_task(title, total=5005)
    line.update(line.task_ids[0], completed=1234, info=info, percent=percent)
    line.tasks[0].start_time -= seconds
    with console.capture() as capture:
        console.print(line.get_renderable())
    (text,) = capture.get().splitlines()  # one line at any width
    assert len(text.rstrip()) <= width
    assert all(part in f"{text.rstrip()}\n" for part in expected), text
    assert ("loss" in text) == (width > 40 and len(info) > 1)


def test_a_question_is_not_painted_over(monkeypatch):
    """As a debugger's prompt is one: `breakpoint()` on one device."""
    screen = io.StringIO()
    terminal = Console(file=screen, width=80, force_terminal=True)
    monkeypatch.setattr(progress.console, "Console", lambda **_: terminal)
    bar = Progress(bar=True)
    counts = {"num_training_batches": math.inf, "num_val_batches": [3]}
    trainer = SimpleNamespace(is_global_zero=True, max_epochs=2, current_epoch=0, **counts)
    bar.on_train_epoch_start(trainer, None)
    assert "epoch 1/2" in screen.getvalue()
    bar.on_validation_start(trainer, None)
    bar.on_validation_batch_end()
    assert {bar} == progress.DRAWN
    monkeypatch.setattr(sys, "stdin", io.StringIO("n\n"))
    out = sys.stdout
    assert builtins.input("(Pdb) ") == "n"
    # It comes back with the next batch.
    assert not progress.DRAWN
    assert sys.stdout is out
    bar.on_validation_batch_end()


def test_an_end_by_time_is_reported(caplog, tmp_path):
    timer = Timer("00:00:00:03")
    module = SimpleNamespace(automatic_optimization=True)
    counts = {"should_stop": True, "current_epoch": 2, "global_step": 41, "callbacks": [timer]}
    trainer = SimpleNamespace(**counts, lightning_module=module)
    config = SimpleNamespace(trainer={"max_time": "00:00:00:04"})
    budget = TimeBudget(4.0)
    parts = {"run": SimpleNamespace(path=tmp_path), "checkpointer": SimpleNamespace(budget=budget)}
    built = SimpleNamespace(trainer=trainer, config=config, **parts)
    warn_of_time_limit(built)
    assert not caplog.text, "it was stopped by another one"
    timer.load_state_dict({"time_elapsed": {"train": 4}})
    warn_of_time_limit(built)
    assert "the Timer's time is used up" in caplog.text
    assert "distdl resume" not in caplog.text
    caplog.clear()
    budget.load({"used": 4_000_000})
    warn_of_time_limit(built)
    assert "trainer.max_time=00:00:00:04 is used up" in caplog.text
    assert "ended at step 41, in epoch 2" in caplog.text
    assert "distdl resume" in caplog.text
    config.trainer["max_time"] = OmegaConf.create({"minutes": 1.5})
    warn_of_time_limit(built)
    assert "trainer.max_time=00:00:01:30 is used up" in caplog.text
