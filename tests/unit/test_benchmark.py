"""What `task=benchmark` computes with: phases, traces, verdicts, on made-up numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distdl.benchmark import (
    BACKWARD,
    COMMUNICATION,
    DATA,
    FORWARD,
    OPTIMIZER,
    OTHER,
    PHASES,
    collectives,
    limits,
    result,
    verdict,
)
from distdl.benchmark.clock import DeviceClock, Timeline
from distdl.benchmark.input import EndlessLoader, Input
from distdl.benchmark.phases import PhaseProfiler
from distdl.benchmark.timing import Timing
from distdl.ranks.stopping import StopRequest
from distdl.report import benchmark
from distdl.tasks.benchmark import check

CPU, CUDA = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA


def timeline(*times: float) -> Timeline:
    """Whose clock shows these times."""
    marks = iter(times)
    clock = SimpleNamespace(mark=lambda: next(marks), between=lambda first, second: second - first)
    return Timeline(clock)  # type: ignore[arg-type]


def test_phases_nest_and_add_up_to_the_step() -> None:
    line = timeline(0, 1, 3, 4, 9, 10, 12, 20)
    line.open_window()  # 0
    with line.phase(OPTIMIZER):  # 1 to 10
        with line.phase(FORWARD):  # 3 to 4
            pass
        with line.phase(BACKWARD):  # 9 to 10
            pass
    line.step_done()  # 20
    (step,) = line.close_window()
    expected = {OTHER: 1 + (20 - 12), OPTIMIZER: (3 - 1) + (9 - 4) + (12 - 10)}
    expected |= {FORWARD: 1, BACKWARD: 1}
    assert step.phases == dict.fromkeys(PHASES, 0.0) | expected
    assert step.seconds == sum(step.phases.values()) == 20


def test_a_step_begins_where_the_one_before_ended() -> None:
    line = timeline(5, 6, 8, 11, 12)
    line.begin(DATA)  # before the window: takes no mark
    line.open_window()
    line.end()
    line.step_done()
    line.begin(DATA)
    line.step_done()
    shares = [(step.phases[DATA], step.phases[OTHER]) for step in line.close_window()]
    assert shares == [(1, 2), (1, 3)]


def event(
    name: str, start: int, end: int, thread: int = 1, device: Any = CPU, link: int = 0
) -> Any:
    """As torch's _KinetoEvent answers, in seconds."""
    answers = {
        "name": name,
        "start_ns": start * 10**9,
        "duration_ns": (end - start) * 10**9,
        "start_thread_id": thread,
        "device_type": device,
        "correlation_id": link,
        "is_async": name.startswith("gloo"),
    }
    return SimpleNamespace(**{key: lambda value=value: value for key, value in answers.items()})


@pytest.mark.parametrize(
    ("events", "steps", "busy", "phases"),
    [
        pytest.param(
            [
                event("distdl::forward", 0, 10),
                event("distdl::optimizer", 10, 30),
                event("distdl::backward", 10, 20),  # inside the optimizer's closure
                event("aten::mm", 0, 14),
                event("autograd::engine::evaluate_function: X", 0, 30),  # computes nothing itself
                event("gloo:all_reduce", 8, 18, thread=2),
                event("gloo:all_reduce", 12, 24, thread=3),
                event("aten::copy_", 8, 24, thread=2),  # on gloo's own thread
            ],
            2,
            16 / 2,
            {BACKWARD: 6 / 2, OPTIMIZER: 4 / 2},
            id="only what no computation hides is exposed",
        ),
        pytest.param(
            [
                event("distdl::backward", 100, 110),
                event("aten::mm", 100, 104),
                event("gloo:all_reduce", 105, 107, thread=2),
                event("gloo:all_reduce", 109, 10**6, thread=2),
                event("gloo:all_reduce", 0, 109, thread=2),
            ],
            1,
            2,
            {BACKWARD: 2},
            id="a collective that the trace cut off is left out",
        ),
        pytest.param(
            [
                event("distdl::forward", 0, 2),
                event("distdl::backward", 2, 4),
                event("cudaLaunchKernel", 3, 3, link=7),
                event("aten::mm", 0, 50),  # the host's time hides nothing
                event("distdl::forward", 5, 20, device=CUDA),  # the annotation's shadow, no kernel
                event("gemm", 5, 20, device=CUDA, link=6),
                event("ncclDevKernel_AllReduce", 15, 26, device=CUDA, link=7),
            ],
            1,
            11,
            {BACKWARD: 6},
            id="a kernel belongs to the phase that launched it",
        ),
    ],
)
def test_exposed_communication(events, steps, busy, phases) -> None:
    exposed = collectives.analyse(events, steps=steps)
    assert exposed.busy == pytest.approx(busy) and exposed.calls == 1
    assert exposed.phases == pytest.approx(phases)


def test_over_several_ranks_the_slowest_counts() -> None:
    phases = dict.fromkeys(PHASES, 1.0)
    ranks = [
        {"windows": [{"input": "real", "seconds": total, "steps": steps, "phases": phases}]}
        for total, steps in ((2.0, [1.0, 1.0]), (4.0, [0.5, 3.0]))
    ]
    seen = {"exposed": {FORWARD: 3.0, BACKWARD: 0.25, COMMUNICATION: 9.0}}
    side = result.side(ranks, "real", result.BatchSize(8, 2, 1), seen)
    assert side["images_per_second"] == 2 * 16 / 4
    assert side["step_seconds"]["median"] == 2 and side["step_seconds"]["p95"] == 3
    # Exposed communication is taken out of its phase, and never more than there is.
    split = {**phases, FORWARD: 0.0, BACKWARD: 0.75, COMMUNICATION: 2.25}
    assert side["split"] == split and sum(split.values()) == len(PHASES)


@pytest.mark.parametrize(
    ("world_size", "trace", "staged", "seen"),
    [
        (1, None, 0.0, True),
        (2, None, 0.0, False),
        (2, {"calls": 3}, 0.0, True),
        (2, None, 0.1, True),
    ],
)
def test_communication_that_was_not_measured_is_not_logged(world_size, trace, staged, seen) -> None:
    split = {**dict.fromkeys(PHASES, 0.1), COMMUNICATION: staged}
    side = {"images_per_second": 8.0, "step_seconds": {"median": 1, "p95": 1}, "split": split}
    made = {
        "real": side,
        "held": side,
        "communication": trace,
        "memory_gib": 1.0,
        "setting": {"world_size": world_size},
        "model": {"mfu": None},
        "limits": {"matrix_flops": 1e12, "copy_bytes": 1e9},
    }
    assert verdict.traced(made) == seen
    metrics = result.metrics(made)
    assert ("benchmark/share_communication" in metrics) == seen
    assert "benchmark/share_forward" in metrics


def test_an_error_before_the_first_step_is_not_replaced() -> None:
    line = Timeline(DeviceClock(torch.device("cpu")))
    arguments = (line, PhaseProfiler(line), Input(), StopRequest())
    timing = Timing([], *arguments, report=lambda window: None)
    timing.on_exception(None, None, RuntimeError("the strategy cannot split this"))


SLOWED = {"lost_to_data": 0.4, "waiting": 0.4}
BUSY = {"lost_to_data": 0.4, "waiting": 0.01}
SENDS = {"communication": 0.3}


@pytest.mark.parametrize(
    ("numbers", "setting", "bound", "remedies", "absent"),
    [
        ({}, {}, "compute", ["data.batch_size=<more than 8>"], ""),
        ({**SLOWED, "communication": 0.2}, {}, "data", ["more workers"], ""),
        # Slower, and nobody waited: a busy machine is no slow loader.
        (BUSY, {}, "compute", ["machine was busy"], "num_workers"),  # there are none to take away
        (BUSY, {"workers": 2}, "compute", ["data.num_workers=<fewer>"], ""),
        # Not traced: that is no 0 %.
        ({"communication": None}, {}, "not data", ["task.trace=3"], ""),
        ({**SLOWED, "communication": None}, {}, "data", ["more workers"], ""),
        ({**SENDS, "lost_to_data": 0.2, "waiting": 0.2}, {}, "communication", ["hook=bf16"], ""),
        (SENDS, {"nodes": 2, "comm_hook": "bf16"}, "communication", ["scale up before"], "bf16"),
        (SENDS, {"strategy": "pipeline"}, "communication", ["micro_batches"], "data.batch_size"),
        (SENDS, {"strategy": "fsdp"}, "communication", ["strategy=ddp"], "accumulate"),
        (SENDS, {"strategy": "deepspeed_zero2"}, "communication", ["strategy=ddp"], "accumulate"),
        (SENDS, {"strategy": "deepspeed_zero1"}, "communication", ["data.batch", "accumul"], ""),
        (SENDS, {"precision": "bf16-true"}, "communication", ["data.batch_size"], "comm_hook"),
        ({"mfu": 0.7}, {}, "compute", ["more devices"], ""),
        (
            {"other": 0.3},
            {},
            "compute",
            ["30 % of a step is outside forward, backward and optimizer"],
            "",
        ),
        (
            {},
            {"accelerator": "gpu", "precision": "32-true", "compile": False},
            "compute",
            ["trainer.precision=bf16-mixed", "model.compile=true"],
            "",
        ),
    ],
)
def test_verdicts(numbers, setting, bound, remedies, absent) -> None:
    measured = dict.fromkeys(("lost_to_data", "waiting", "communication", "other"), 0.0)
    measured |= {"mfu": 0.3, "bandwidth_use": 0.2, "data_remedy": "more workers", **numbers}
    setting = {"strategy": "ddp", "comm_hook": "none", "data_batch": 8, **setting}
    judged = verdict.judge(setting=setting, **measured)
    assert judged.bound == (f"{bound}-bound")
    assert all(part in text for part, text in zip(remedies, judged.remedies, strict=False))
    assert not absent or not any(absent in remedy for remedy in judged.remedies)


def test_a_held_batch_leaves_the_loader_alone() -> None:
    switch, asked = Input(), []

    class Loader(list):
        num_workers, prefetch_factor = 3, 4

        def __iter__(self):
            return (asked.append(i) or i for i in super().__iter__())

    loader = EndlessLoader(Loader([0, 1]), switch)
    switch.loaders.append(loader)
    assert switch.prefetched() == 12 and switch.batches() == 2
    batches = iter(loader)
    assert [next(batches) for _ in range(3)] == [0, 1, 0]
    switch.held = True
    assert [next(batches) for _ in range(3)] == [0, 0, 0] and asked == [0, 1, 0]
    switch.held = False
    assert next(batches) == 1 and list(EndlessLoader([], switch)) == []


def test_limits_are_measured() -> None:
    measured = limits.measure(torch.device("cpu"), "bf16-mixed")
    assert measured.dtype == "bfloat16" and measured.matrix_flops > 0
    assert 1e8 < measured.copy_bytes < 1e13, "slower than any machine, or faster than its caches"


def test_the_number_of_a_tasks_steps_is_checked() -> None:
    context = {"local": True, "refused": [], "config": {}}
    assert not list(check({}, context))
    wrong = check({"steps": 1, "windows": "5", "trace": 0, "warmup": 1}, context)
    assert [p.path for p in wrong] == ["windows", "steps"]


def test_a_report_shows_the_phases() -> None:
    split = {**dict.fromkeys(PHASES, 0.0), FORWARD: 0.02, BACKWARD: 0.04}
    svg, legend = benchmark.draw({"real": {"split": split}, "held": {"split": split}})
    assert [name for name, _ in legend] == ["forward", "backward"]
    assert "held input" in svg and "milliseconds" in svg
