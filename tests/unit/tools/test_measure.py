"""What `task=benchmark` computes with: phases, traces, verdicts, on made-up numbers."""

from types import SimpleNamespace

import pytest
import torch
from pytest import approx

from distdl.tasks.benchmark import check
from distdl.tools.measure import PHASES, clock, collectives, result, verdict
from distdl.tools.measure.clock import Timeline
from distdl.tools.measure.timing import Timing

CPU, CUDA = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA


def test_phases_nest_and_steps_follow_each_other(monkeypatch):
    marks, lags = (5, 6, 8, 9, 14, 15, 17, 25), (0, 0, 0, 0, 3, 2, 1, 4)
    device = iter(marks)
    host = iter(mark - lag for mark, lag in zip(marks, lags, strict=True))
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: next(host)))
    queue = {"mark": lambda: next(device), "between": lambda a, b: b - a, "queues": True}
    line = Timeline(SimpleNamespace(**queue))
    line.begin("data")  # before the window: takes no mark
    line.open_window()  # 5
    line.end()  # 6
    with line.phase("optimizer"), line.phase("forward"):  # 8 to 15, and 9 to 14
        pass
    line.step_done()  # 17
    line.step_done()  # 25
    first, second = line.close_window()
    none = dict.fromkeys(PHASES, 0)
    assert first.phases == none | {"data": 1, "forward": 5, "optimizer": 2, "other": 2 + 2}
    assert first.seconds == 12
    assert second.phases == none | {"other": 8}
    # Until 9, and from 15 on, the device was less than 1.2 behind; then it had a long queue.
    assert first.host_paced == 4 + 2
    assert second.host_paced == 0


def event(name, start, end, thread=1, device=CPU, link=0):
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


# Only what no computation hides is exposed.
HIDDEN = [
    event("distdl::forward", 0, 10),
    event("distdl::optimizer", 10, 30),
    event("distdl::backward", 10, 20),  # inside the optimizer's closure
    event("aten::mm", 0, 14),
    event("autograd::engine::evaluate_function: X", 0, 30),  # computes nothing itself
    event("gloo:all_reduce", 8, 18, thread=2),
    event("gloo:all_reduce", 12, 24, thread=3),
    event("aten::copy_", 8, 24, thread=2),  # on gloo's own thread
]
# A collective that the trace cut off is left out.
CUT_OFF = [
    event("distdl::backward", 100, 110),
    event("aten::mm", 100, 104),
    event("gloo:all_reduce", 105, 107, thread=2),
    event("gloo:all_reduce", 109, 10**6, thread=2),
    event("gloo:all_reduce", 0, 109, thread=2),
]
# A kernel belongs to the phase that launched it.
LAUNCHED = [
    event("distdl::forward", 0, 2),
    event("distdl::backward", 2, 4),
    event("cudaLaunchKernel", 3, 3, link=7),
    event("aten::mm", 0, 50),  # the host's time hides nothing
    event("distdl::forward", 5, 20, device=CUDA),  # the annotation's shadow, no kernel
    event("gemm", 5, 20, device=CUDA, link=6),
    event("ncclDevKernel_AllReduce", 15, 26, device=CUDA, link=7),
]
TRACES = [
    (HIDDEN, 2, 16 / 2, {"backward": 6 / 2, "optimizer": 4 / 2}),
    (CUT_OFF, 1, 2, {"backward": 2}),
    (LAUNCHED, 1, 11, {"backward": 6}),
]


@pytest.mark.parametrize("events, steps, busy, phases", TRACES)
def test_exposed_communication(events, steps, busy, phases):
    exposed = collectives.analyse(events, steps=steps)
    assert exposed.busy == approx(busy)
    assert exposed.calls == 1
    assert exposed.phases == approx(phases)


def test_over_several_ranks_the_slowest_counts():
    phases = dict.fromkeys(PHASES, 1.0)
    both = {"input": "real", "phases": phases, "host_paced": 0.0}
    ranks = [
        {"windows": [{**both, "seconds": total, "steps": steps}]}
        for total, steps in ((2.0, [1.0, 1.0]), (4.0, [0.5, 3.0]))
    ]
    seen = {"exposed": {"forward": 3.0, "backward": 0.25, "communication": 9.0}}
    side = result.side(ranks, "real", result.BatchSize(8, 2, 1), seen)
    assert side["images_per_second"] == 2 * 16 / 4
    assert side["step_seconds"]["median"] == 2
    assert side["step_seconds"]["p95"] == 3
    # Exposed communication is taken out of its phase, and never more than there is.
    split = {"forward": 0.0, "backward": 0.75, "communication": 2.25}
    assert side["split"] == {**phases, **split}


SLOWED = {"lost_to_data": 0.4, "waiting": 0.4}
BUSY = {"lost_to_data": 0.4, "waiting": 0.01}
SENDS = {"communication": 0.3}
UNKNOWN = {"communication": None}
GPU = {"accelerator": "gpu", "precision": "32-true", "compile": False}
WAITS = {"host_paced": 0.8, "mfu": 0.07}
FASTER = ["trainer.precision=bf16-mixed", "model.compile=true"]
# Shares of a step, the setting, what limits it, in this order what to do, and what not.
VERDICTS = [
    ({}, {}, "compute", ["data.batch_size=16"], "other"),
    ({}, GPU, "compute", FASTER, "more devices"),
    ({"mfu": 0.7}, {}, "compute", ["more devices"], "data.batch_size"),
    ({"other": 0.3}, {}, "compute", ["30 % of a step is outside forward"], "more devices"),
    # The device waits for the host.
    (WAITS, {**GPU, "precision": "bf16-mixed"}, "host", ["model.compile=true"], "more devices"),
    (WAITS, {"compile": True}, "host", ["reduce-overhead", "data.batch_size"], "true"),
    (WAITS, {"compile": "default", "accumulate": 2}, "host", ["data.batch_size"], "graphs"),
    ({**WAITS, **SENDS}, {}, "communication", ["hook=bf16"], "kernel"),
    ({**SLOWED, "communication": 0.2}, {}, "data", ["more workers"], "hook"),
    # Slower, and nobody waited: a busy machine is no slow loader.
    (BUSY, {"workers": 2}, "compute", ["fewer data.num_workers"], "more workers"),
    # Not traced: that is no 0 %.
    (UNKNOWN, {}, "not data", ["task.trace=3"], "data.batch_size"),
    ({**SENDS, "lost_to_data": 0.2, "waiting": 0.2}, {}, "communication", ["hook=bf16"], "workers"),
    (SENDS, {"nodes": 2, "comm_hook": "bf16"}, "communication", ["scale up before"], "bf16"),
    (SENDS, {"strategy": "pipeline"}, "communication", ["micro_batches"], "data.batch_size"),
    (SENDS, {"strategy": "fsdp"}, "communication", ["strategy=ddp"], "accumulate"),
]


@pytest.mark.parametrize("numbers, setting, bound, remedies, absent", VERDICTS)
def test_verdicts(numbers, setting, bound, remedies, absent):
    measured = dict.fromkeys(
        ("lost_to_data", "waiting", "communication", "other", "host_paced"), 0.0
    )
    measured |= {"mfu": 0.3, "bandwidth_use": 0.2, "data_remedy": "more workers", **numbers}
    setting = {"strategy": "ddp", "comm_hook": "none", "data_batch": 8, **setting}
    judged = verdict.judge(setting=setting, **measured)
    assert judged.bound == f"{bound}-bound"
    for part, remedy in zip(remedies, judged.remedies[: len(remedies)], strict=True):
        assert part in remedy
    assert not any(absent in remedy for remedy in judged.remedies)


def test_an_error_before_the_first_step_is_not_replaced():
    timing = Timing([], None, None, None, None, report=None)
    timing.on_exception(None, None, RuntimeError("the strategy cannot split this"))


def test_the_number_of_a_tasks_steps_is_checked():
    context = {"local": True, "refused": [], "config": {}}
    assert not list(check({}, context))
    wrong = check({"steps": 1, "windows": "5", "trace": 0, "warmup": 1}, context)
    assert [problem.path for problem in wrong] == ["windows", "steps"]
