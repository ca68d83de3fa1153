"""What `task=benchmark` computes with: phases, traces, verdicts, on made-up numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from distdl.benchmark import (
    BACKWARD,
    COMMUNICATION,
    DATA,
    FORWARD,
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


@dataclass
class Script:
    """A clock that says what it was told to say."""

    times: list[float] = field(default_factory=list)

    def mark(self) -> float:
        return self.times.pop(0)

    def between(self, first: float, second: float) -> float:
        return second - first


def test_phases_nest_and_add_up_to_the_step() -> None:
    timeline = Timeline(Script([0, 1, 3, 4, 9, 10, 12, 20]))  # type: ignore[arg-type]
    timeline.open_window()  # 0
    with timeline.phase("optimizer"):  # 1 to 10
        with timeline.phase(FORWARD):  # 3 to 4
            pass
        with timeline.phase(BACKWARD):  # never left before 10: 9 is its begin
            pass
    timeline.step_done()  # 20
    (step,) = timeline.close_window()
    assert step.phases == {
        **dict.fromkeys(PHASES, 0.0),
        OTHER: 1 + (20 - 12),
        "optimizer": (3 - 1) + (9 - 4) + (12 - 10),
        FORWARD: 1,
        BACKWARD: 1,
    }
    assert step.seconds == sum(step.phases.values()) == 20


def test_a_step_begins_where_the_one_before_ended() -> None:
    timeline = Timeline(Script([5, 6, 8, 11, 12]))  # type: ignore[arg-type]
    timeline.begin(DATA)  # before the window: takes no mark
    timeline.open_window()
    timeline.end()
    timeline.step_done()
    timeline.begin(DATA)
    timeline.step_done()
    first, second = timeline.close_window()
    assert (first.phases[DATA], first.phases[OTHER]) == (1, 2)
    assert (second.phases[OTHER], second.phases[DATA]) == (3, 1)


@dataclass
class Event:
    """As torch's _KinetoEvent answers."""

    _name: str
    start: int
    end: int
    thread: int = 1
    device: Any = CPU
    correlation: int = 0

    def name(self) -> str:
        return self._name

    def start_ns(self) -> int:
        return self.start * 10**9

    def duration_ns(self) -> int:
        return (self.end - self.start) * 10**9

    def start_thread_id(self) -> int:
        return self.thread

    def device_type(self) -> Any:
        return self.device

    def correlation_id(self) -> int:
        return self.correlation

    def is_async(self) -> bool:
        return self._name.startswith("gloo")


def test_only_what_no_computation_hides_is_exposed() -> None:
    found = collectives.analyse(
        [
            Event("distdl::forward", 0, 10),
            Event("distdl::optimizer", 10, 30),
            Event("distdl::backward", 10, 20),  # inside the optimizer's closure
            Event("aten::mm", 0, 14),
            Event("autograd::engine::evaluate_function: X", 0, 30),  # surrounds, computes nothing
            Event("gloo:all_reduce", 8, 18, thread=2),
            Event("gloo:all_reduce", 12, 24, thread=3),
            Event("aten::copy_", 8, 24, thread=2),  # on gloo's own thread
        ],
        steps=2,
    )
    assert found.busy == pytest.approx(16 / 2)
    assert found.phases == pytest.approx({"backward": 6 / 2, "optimizer": 4 / 2})
    assert found.calls == 1


def test_a_collective_that_the_trace_cut_off_is_left_out() -> None:
    found = collectives.analyse(
        [
            Event("distdl::backward", 100, 110),
            Event("aten::mm", 100, 104),
            Event("gloo:all_reduce", 105, 107, thread=2),
            Event("gloo:all_reduce", 109, 10**6, thread=2),
            Event("gloo:all_reduce", 0, 109, thread=2),
        ],
        steps=1,
    )
    assert found.busy == sum(found.phases.values()) == pytest.approx(2)


def test_a_kernel_belongs_to_the_phase_that_launched_it() -> None:
    found = collectives.analyse(
        [
            Event("distdl::forward", 0, 2),
            Event("distdl::backward", 2, 4),
            Event("cudaLaunchKernel", 3, 3, correlation=7),
            Event("aten::mm", 0, 50),  # the host's time hides nothing
            Event("distdl::forward", 5, 20, device=CUDA),  # the annotation's shadow, no kernel
            Event("gemm", 5, 20, device=CUDA, correlation=6),
            Event("ncclDevKernel_AllReduce", 15, 26, device=CUDA, correlation=7),
        ],
        steps=1,
    )
    assert found.busy == pytest.approx(11)
    assert found.phases == pytest.approx({"backward": 6})


def test_over_several_ranks_the_slowest_counts() -> None:
    phases = dict.fromkeys(PHASES, 1.0)
    ranks = [
        {"windows": [{"input": "real", "seconds": 2.0, "steps": [1.0, 1.0], "phases": phases}]},
        {"windows": [{"input": "real", "seconds": 4.0, "steps": [0.5, 3.0], "phases": phases}]},
    ]
    seen = {"exposed": {FORWARD: 3.0, BACKWARD: 0.25, COMMUNICATION: 9.0}}
    found = result.side(ranks, "real", result.BatchSize(8, 2, 1), seen)
    assert found["images_per_second"] == 2 * 16 / 4
    assert found["step_seconds"]["median"] == 2 and found["step_seconds"]["p95"] == 3
    # Exposed communication is taken out of its phase, and never more than there is.
    split = {**phases, FORWARD: 0.0, BACKWARD: 0.75, COMMUNICATION: 2.25}
    assert found["split"] == split and sum(split.values()) == len(PHASES)


@pytest.mark.parametrize(
    ("world_size", "trace", "staged", "seen"),
    [
        (1, None, 0.0, True),
        (2, None, 0.0, False),
        (2, {"calls": 3}, 0.0, True),
        (2, None, 0.1, True),
    ],
)
def test_communication_that_nobody_looked_at_is_not_counted(
    world_size: int, trace: dict[str, int] | None, staged: float, seen: bool
) -> None:
    split = {**dict.fromkeys(PHASES, 0.1), "communication": staged}
    step = {"median": 1.0, "p95": 1.0}
    side = {"images_per_second": 8.0, "step_seconds": step, "split": split}
    found = {
        "real": side,
        "held": side,
        "communication": trace,
        "memory_gib": 1.0,
        "setting": {"world_size": world_size},
        "limits": {"matrix_flops": 1e12, "copy_bytes": 1e9},
        "model": {"mfu": None},
    }
    assert verdict.traced(found) == seen
    assert ("benchmark/share_communication" in result.metrics(found)) == seen
    assert "benchmark/share_forward" in result.metrics(found)


def test_an_error_before_the_first_step_is_the_one_that_is_told() -> None:
    timeline = Timeline(DeviceClock(torch.device("cpu")))
    given = (timeline, PhaseProfiler(timeline), Input(), StopRequest())
    timing = Timing([], *given, report=lambda window: None)
    timing.on_exception(None, None, RuntimeError("the strategy cannot split this"))


def judge(**given: Any) -> verdict.Verdict:
    setting = {"strategy": "ddp", "comm_hook": "none", "data_batch": 8, **given.pop("setting", {})}
    plain = {
        "lost_to_data": 0.0,
        "waiting": 0.0,
        "communication": 0.0,
        "other": 0.0,
        "mfu": 0.3,
        "bandwidth_use": 0.2,
        "data_remedy": "more workers",
    }
    return verdict.judge(setting=setting, **{**plain, **given})


def test_verdicts() -> None:
    assert judge().bound == verdict.COMPUTE
    data = judge(lost_to_data=0.4, waiting=0.4, communication=0.2)
    assert (data.bound, data.remedies) == (verdict.DATA, ["more workers"])
    # Slower, and nobody waited: a busy machine is not slow loader.
    busy = judge(lost_to_data=0.4, waiting=0.01)
    assert busy.bound == verdict.COMPUTE and "machine was busy" in busy.remedies[0]
    assert "num_workers" not in busy.remedies[0], "there are none to take away"
    crowded = judge(lost_to_data=0.4, waiting=0.01, setting={"workers": 2})
    assert "data.num_workers=<fewer>" in crowded.remedies[0]
    # Nobody looked: that is no 0 %.
    unseen = judge(communication=None)
    assert unseen.bound == verdict.NOT_DATA and "task.trace=3" in unseen.remedies[0]
    assert judge(lost_to_data=0.4, waiting=0.4, communication=None).bound == verdict.DATA
    sent = judge(lost_to_data=0.2, waiting=0.2, communication=0.3)
    assert sent.bound == verdict.COMMUNICATION and "comm_hook=bf16" in sent.remedies[0]
    out = judge(communication=0.3, setting={"nodes": 2, "comm_hook": "bf16"})
    assert "scale up" in out.remedies[0] and not any("bf16" in r for r in out.remedies)
    assert "micro_batches" in judge(communication=0.3, setting={"strategy": "pipeline"}).remedies[0]
    gathers = judge(communication=0.3, setting={"strategy": "fsdp"})
    assert not any("accumulate" in r for r in gathers.remedies)
    assert "more devices" in judge(mfu=0.7).remedies[0]
    full = judge(setting={"accelerator": "gpu", "precision": "32-true", "compile": False})
    assert full.remedies[:2] == ["trainer.precision=bf16-mixed", "model.compile=true"]


def test_a_held_batch_leaves_the_loader_alone() -> None:
    switch = Input()
    asked: list[int] = []

    class Loader:
        num_workers, prefetch_factor = 3, 4

        def __len__(self) -> int:
            return 2

        def __iter__(self) -> Any:
            for i in range(2):
                asked.append(i)
                yield i

    loader = EndlessLoader(Loader(), switch)
    switch.loaders.append(loader)
    assert switch.prefetched() == 12 and switch.batches() == 2
    batches = iter(loader)
    assert [next(batches) for _ in range(3)] == [0, 1, 0]
    switch.held = True
    assert [next(batches) for _ in range(3)] == [0, 0, 0] and asked == [0, 1, 0]
    switch.held = False
    assert next(batches) == 1
    assert list(EndlessLoader([], switch)) == []


def test_limits_are_measured() -> None:
    found = limits.measure(torch.device("cpu"), "bf16-mixed")
    assert found.dtype == "bfloat16" and found.matrix_flops > 0
    # No machine copies slower than 100 MB/s, or faster than its caches.
    assert 1e8 < found.copy_bytes < 1e13


def test_the_number_of_a_tasks_steps_is_checked() -> None:
    context = {"local": True, "refused": [], "config": {}}
    assert not list(check({}, context))
    wrong = check({"steps": 1, "windows": "5", "trace": 0, "warmup": 1}, context)
    assert [p.path for p in wrong] == ["windows", "steps"]


def test_a_report_shows_the_phases() -> None:
    split = {**dict.fromkeys(PHASES, 0.0), FORWARD: 0.02, BACKWARD: 0.04}
    found = {"real": {"split": split}, "held": {"split": split}}
    svg, legend = benchmark.draw(found)
    assert [name for name, _ in legend] == ["forward", "backward"]
    assert "held input" in svg and "milliseconds" in svg
