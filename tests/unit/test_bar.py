"""What a bar says on a terminal of any width, and whom it gives way to."""

from __future__ import annotations

import builtins
import io
import math
import sys
import time
from types import SimpleNamespace
from typing import Any

from lightning.pytorch.callbacks import Timer
from rich.console import Console

from distdl.callbacks.progress import Progress, described
from distdl.config.recipe import unit_of
from distdl.tasks import train
from distdl.util.progress_bar import Line, duration

LONG = "train/mean_absolute_percentage_error_of_the_forecast"
METRICS = {
    "train/loss": 6.9123,
    "lr": 0.1,
    "perf/images_per_second": 1234.5,
    "perf/data_wait": 0.01,
    "perf/memory_gib": 3.2,
}


def drawn(width: int, info: list[str], **fields: Any) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    line = Line(console)
    line.add_task(fields.pop("title", "epoch 12/90"), total=5005)
    time.sleep(0.002)
    line.update(line.task_ids[0], completed=1234, info=info, **fields)
    line.tasks[0].start_time -= 754  # type: ignore[operator]
    with console.capture() as capture:
        console.print(line.get_renderable())
    (text,) = capture.get().splitlines()  # one line at any width
    assert len(text.rstrip()) <= width
    return text


def test_count_and_time_stay_and_what_fits_is_whole():
    own = {LONG: 18.39, "mae": 3.065}
    parts, users = described(METRICS, unit=unit_of("distdl.data.x")), described(METRICS, own)
    at = {width: drawn(width, parts) for width in (40, 60, 80, 160)}
    for text in at.values():
        assert text.startswith("epoch 12/90 ") and " 1234/5005 12:34<" in text
    assert "loss" not in at[40]
    assert at[60].rstrip().endswith("loss 6.9123  lr 0.1")
    assert at[80].rstrip().endswith("loss 6.9123  lr 0.1  1,234 img/s  mem 3.2 GiB")
    assert "━" in at[160] and at[160].rstrip().endswith("data_wait 1 %  mem 3.2 GiB")
    assert "loss 6.9123  train/me…forecast 18.39" in drawn(80, users)
    assert f"{LONG} 18.39  mae 3.065" in drawn(220, users)
    assert "1,234 samples/s" in drawn(160, users)
    assert " 25 % 12:34<" in drawn(80, [], percent=True), "bytes of 140 GB say nothing"
    text = drawn(60, ["12 MB of 9 GB"], title="uploading to https://a.blob.core.windows.net/c/x")
    assert text.startswith("uploading to https:… 1234/5005 12:34<") and "12 MB" in text
    assert duration(3723) == "1:02:03"


def test_a_question_is_not_painted_over(monkeypatch):
    """As a debugger's prompt is one: `breakpoint()` on one device."""
    bar: Any = Progress(bar=True)
    screen = io.StringIO()
    bar._console = Console(file=screen, width=80, force_terminal=True)
    trainer: Any = SimpleNamespace(
        is_global_zero=True,
        max_epochs=2,
        current_epoch=0,
        num_training_batches=math.inf,
        num_val_batches=[3],
    )
    bar.on_train_epoch_start(trainer, None)
    assert bar._line is not None and "epoch 1/2" in screen.getvalue()
    bar.on_validation_start(trainer, None)
    bar.on_validation_batch_end()
    assert [task.completed for task in bar._line.tasks] == [0, 1]
    monkeypatch.setattr(sys, "stdin", io.StringIO("n\n"))
    out = sys.stdout
    assert builtins.input("(Pdb) ") == "n"
    assert bar._line is None and sys.stdout is out, "it comes back with the next batch"
    bar.on_validation_batch_end()


def test_an_end_by_time_is_told(caplog, tmp_path):
    timer = Timer("00:00:00:03")
    trainer = SimpleNamespace(
        should_stop=True,
        callbacks=[timer],
        current_epoch=2,
        global_step=41,
        lightning_module=SimpleNamespace(automatic_optimization=True),
    )
    limit = SimpleNamespace(trainer={"max_time": "00:00:00:03"})
    context: Any = SimpleNamespace(
        trainer=trainer, config=limit, run=SimpleNamespace(path=tmp_path)
    )
    train.__globals__["log_durations"](context)
    assert not caplog.text, "stopped by another"
    timer._offset = 4
    train.__globals__["log_durations"](context)
    assert "trainer.max_time=00:00:00:03 is used up" in caplog.text
    assert "ended at step 41, in epoch 2. To go on: python -m distdl resume" in caplog.text
