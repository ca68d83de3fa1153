"""What a bar shows on a terminal of any width, and to what it gives way."""

from __future__ import annotations

import builtins
import io
import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.callbacks import Timer
from rich.console import Console

from distdl.callbacks import progress
from distdl.callbacks.progress import Progress, described
from distdl.config.recipe import unit_of
from distdl.tasks.train import warn_of_time_limit
from distdl.util.progress_bar import Line, duration

LONG = "train/mean_absolute_percentage_error_of_the_forecast"
SPEED = {"perf/images_per_second": 1234.5, "perf/data_wait": 0.01, "perf/memory_gib": 3.2}
METRICS = {"train/loss": 6.9123, "lr": 0.1, **SPEED}
PARTS = described(METRICS, unit=unit_of("distdl.data.x"))
USERS = described(METRICS, {LONG: 18.39, "mae": 3.065})
UPLOAD = {"title": "uploading to https://a.blob.core.windows.net/c/x"}


@pytest.mark.parametrize(
    ("width", "info", "fields", "expected"),
    [
        (40, PARTS, {}, ["epoch 12/90 ", " 1234/5005 12:34<"]),
        (60, PARTS, {}, [" 1234/5005 12:34<", "loss 6.9123  lr 0.1\n"]),
        (80, PARTS, {}, ["loss 6.9123  lr 0.1  1,234 img/s  mem 3.2 GiB\n"]),
        (160, PARTS, {}, ["━", "data_wait 1 %  mem 3.2 GiB\n"]),
        (80, USERS, {}, ["loss 6.9123  train/me…forecast 18.39"]),
        (220, USERS, {}, [f"{LONG} 18.39  mae 3.065"]),
        (160, USERS, {}, ["1,234 samples/s"]),
        (80, [], {"percent": True}, [" 25 % 12:34<"]),  # bytes of 140 GB say nothing
        (60, ["12 MB of 9 GB"], UPLOAD, ["uploading to https:… 1234/5005 12:34<", "12 MB"]),
    ],
)
def test_count_and_time_stay_and_what_fits_is_complete(width, info, fields, expected) -> None:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    line = Line(console)
    line.add_task(fields.get("title", "epoch 12/90"), total=5005)
    line.update(line.task_ids[0], completed=1234, info=info, percent=fields.get("percent", False))
    line.tasks[0].start_time -= 754  # type: ignore[operator]
    with console.capture() as capture:
        console.print(line.get_renderable())
    (text,) = capture.get().splitlines()  # one line at any width
    assert len(text.rstrip()) <= width
    assert all(part in f"{text.rstrip()}\n" for part in expected), text
    assert ("loss" in text) == (width > 40 and info not in ([], ["12 MB of 9 GB"]))


def test_a_long_duration() -> None:
    assert duration(3723) == "1:02:03"


def test_a_question_is_not_painted_over(monkeypatch) -> None:
    """As a debugger's prompt is one: `breakpoint()` on one device."""
    screen = io.StringIO()
    terminal = Console(file=screen, width=80, force_terminal=True)
    monkeypatch.setattr(progress.console, "Console", lambda **_: terminal)
    bar = Progress(bar=True)
    trainer: Any = SimpleNamespace(
        is_global_zero=True,
        max_epochs=2,
        current_epoch=0,
        num_training_batches=math.inf,
        num_val_batches=[3],
    )
    module: Any = None
    bar.on_train_epoch_start(trainer, module)
    assert "epoch 1/2" in screen.getvalue()
    bar.on_validation_start(trainer, module)
    bar.on_validation_batch_end()
    assert {bar} == progress.DRAWN
    monkeypatch.setattr(sys, "stdin", io.StringIO("n\n"))
    out = sys.stdout
    assert builtins.input("(Pdb) ") == "n"
    assert not progress.DRAWN and sys.stdout is out, "it comes back with the next batch"
    bar.on_validation_batch_end()


@pytest.mark.parametrize("seconds", [0, 4])
def test_an_end_by_time_is_reported(caplog, tmp_path, seconds: int) -> None:
    timer = Timer("00:00:00:03")
    timer.load_state_dict({"time_elapsed": {"train": seconds}})
    counts = {"should_stop": True, "current_epoch": 2, "global_step": 41, "callbacks": [timer]}
    module = SimpleNamespace(automatic_optimization=True)
    context: Any = SimpleNamespace(
        trainer=SimpleNamespace(**counts, lightning_module=module),
        config=SimpleNamespace(trainer={"max_time": "00:00:00:03"}),
        run=SimpleNamespace(path=tmp_path),
    )
    warn_of_time_limit(context)
    if not seconds:  # stopped by another
        assert not caplog.text
        return
    assert "trainer.max_time=00:00:00:03 is used up" in caplog.text
    assert "ended at step 41, in epoch 2" in caplog.text and "distdl resume" in caplog.text
