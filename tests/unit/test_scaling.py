"""The predictor: its formulas, its fit, and that its page hides no held-out error."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import held_out, published
from distdl.planner import estimate
from distdl.scaling import STRATEGIES, Link, Links, Setting, fit, predict
from distdl.scaling.links import ALGORITHMS, Group, all_reduce, exposed, fastest
from distdl.scaling.published import AZURE_RATES, INTEL, NCCL
from tests.conftest import ROOT

GB = 1e9
LINKS = Links(inside=Link(10 * GB, 1e-6), between=Link(1 * GB, 1e-5))


def a_setting(**changes: Any) -> Setting:
    given = {
        "step_seconds": 0.1,
        "gradient_bytes": 100e6,
        "links": LINKS,
        "devices_per_node": 4,
        "bucket_bytes": 10e6,
    }
    return Setting(**{**given, **changes})


# Collectives


def test_a_ring_by_hand() -> None:
    # 3 + 3 messages of a quarter each, over 10 GB/s.
    assert all_reduce(4e9, Group(4, 4), LINKS, "ring") == pytest.approx(6 * (1e-6 + 0.1))
    # Over two nodes each message waits for the network.
    assert all_reduce(8e9, Group(8, 4), LINKS, "ring") == pytest.approx(14 * (1e-5 + 1.0))


def test_rings_in_and_between_nodes_by_hand() -> None:
    inside = 6 * (1e-6 + 1e9 / 10e9)
    # Three nodes: each of a node's 4 devices sends 4/3 of its quarter, all over one adapter.
    sent = 4 * 4 / 3 * 1e9 / 1e9
    group = Group(12, 4)
    assert all_reduce(4e9, group, LINKS, "hierarchical") == pytest.approx(inside + 4e-5 + sent)
    # 2 log2(3), rounded up, instead of 2 x (3 - 1) messages.
    wide = Group(4 * 64, 4)
    assert all_reduce(1.0, wide, LINKS, "tree") == pytest.approx(6e-6 + 12e-5, rel=1e-3)
    assert all_reduce(1.0, wide, LINKS, "hierarchical") == pytest.approx(6e-6 + 126e-5, rel=1e-3)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_in_one_node_and_alone_all_algorithms_agree(algorithm: str) -> None:
    assert all_reduce(1e9, Group(1, 1), LINKS, algorithm) == 0
    ring = all_reduce(1e9, Group(4, 4), LINKS, "ring")
    assert all_reduce(1e9, Group(4, 4), LINKS, algorithm) == ring > 0


def test_groups_that_share_a_network_get_their_part_of_it() -> None:
    free = Links(LINKS.inside, Link(1 * GB))
    alone = all_reduce(1e9, Group(8, 1), free, "ring")
    assert all_reduce(1e9, Group(8, 1, sharing=4), free, "ring") == pytest.approx(4 * alone)


def test_small_messages_take_the_tree_and_one_node_a_ring() -> None:
    assert fastest(8.0, Group(4096, 4), LINKS)[1] == "tree"
    assert fastest(1e9, Group(4096, 4), LINKS)[0] <= all_reduce(1e9, Group(4096, 4), LINKS, "ring")


@given(st.integers(1, 40), st.floats(0, 2), st.floats(0, 10))
def test_what_sticks_out_is_what_a_simulation_says(parts: int, each: float, window: float) -> None:
    free = 0.0
    for part in range(1, parts + 1):  # piece by piece: ready, then sent when the link is free
        free = max(free, part / parts * window) + each
    assert exposed(parts, each, window) == pytest.approx(free - window, abs=1e-9)


# Predictions


def sent_by_plan(devices: int, setting: Setting) -> dict[str, float]:
    """Bytes per step, as `distdl plan` counts them."""
    size = setting.gradient_bytes
    found: Any = SimpleNamespace(
        weights=size, gradients=size, optimizer=0, buffers=0, activations=0, transient=0, unit=0,
        no_blocks="none", blocks=[],
    )  # fmt: skip
    machine = estimate.Machine(devices, 1e12, 1e11, 1e13)
    return {row.name: row.sent for row in estimate.estimates(found, machine)}


@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if s != "pipeline"])
def test_as_many_bytes_travel_as_plan_counts(strategy: str) -> None:
    free = Links(Link(10 * GB), Link(1 * GB))
    setting = a_setting(strategy=strategy, links=free)
    busy = predict(setting, 4).communication_seconds
    assert 10 * GB * busy == pytest.approx(sent_by_plan(4, setting)[strategy])


def test_a_fast_link_hides_all_but_the_last_bucket() -> None:
    found = predict(a_setting(), 4)
    bucket = all_reduce(10e6, Group(4, 4), LINKS, "ring")
    assert found.step_seconds == pytest.approx(0.1 + bucket)
    assert found.communication_share == pytest.approx(bucket / found.step_seconds)
    assert found.communication_seconds == pytest.approx(10 * bucket)


def test_a_slow_link_decides_alone() -> None:
    setting = a_setting(links=Links(LINKS.inside, Link(1e6)), algorithm="ring")
    found = predict(setting, 8)
    # All buckets one after the other, the first of them ready after a tenth of the backward.
    sending = 2 * 7 / 8 * 100e6 / 1e6
    assert found.step_seconds == pytest.approx(0.1 / 3 + 0.1 * 2 / 30 + sending, rel=1e-3)
    assert found.why.startswith("gradients that wait between 2 nodes (ring)")
    assert 0.99 < found.communication_share < 1


def test_sharing_out_the_weights_costs_more_than_ddp_on_a_slow_link() -> None:
    seconds = {s: predict(a_setting(strategy=s), 64).step_seconds for s in STRATEGIES[:5]}
    assert seconds["ddp"] < seconds["fsdp"] == seconds["deepspeed_zero3"]
    # ZeRO-2's last gather hides behind nothing.
    assert seconds["fsdp"] < seconds["deepspeed_zero2"] == seconds["deepspeed_zero1"]
    light = a_setting(strategy="fsdp", weight_bytes=50e6)
    assert predict(light, 64).step_seconds < seconds["fsdp"]


@pytest.mark.parametrize("stages, micro", list(itertools.product((2, 4, 8), (8, 32))))
def test_without_links_a_pipeline_only_has_its_bubble(stages: int, micro: int) -> None:
    setting = a_setting(
        strategy="pipeline", stages=stages, micro_batches=micro, gradient_bytes=0.0,
        links=Links(Link(1e15), Link(1e15)), devices_per_node=8,
    )  # fmt: skip
    bubble = (stages - 1) / (micro + stages - 1)
    assert predict(setting, 64).efficiency == pytest.approx(1 - bubble)
    both = replace(setting, schedule="interleaved", pieces_per_stage=2)
    part = (stages - 1) / 2
    assert predict(both, 64).efficiency == pytest.approx(1 - part / (micro + part))
    zero = replace(both, schedule="zero_bubble")
    assert predict(zero, 64).efficiency > predict(both, 64).efficiency
    gpipe = replace(setting, schedule="gpipe")
    assert predict(gpipe, 64).efficiency == predict(setting, 64).efficiency


def test_a_pipeline_averages_the_gradients_of_its_copies() -> None:
    setting = a_setting(
        strategy="pipeline", stages=4, micro_batches=16, links=Links(Link(1e15), Link(1 * GB))
    )
    alone, four = predict(setting, 4), predict(setting, 16)
    assert "gradients" not in alone.why
    # A quarter of the gradients each, but a node's four stages send at the same time: 3 buckets of
    # 25 / 3 MB, of which the backward of one micro-batch in 16 hides little.
    each = 2 * 3 / 4 * 25e6 / 3 / 0.25e9
    late = exposed(3, each, 0.1 * 2 / 3 / 16)
    assert four.step_seconds - alone.step_seconds == pytest.approx(late, rel=1e-6)
    assert "gradients of 4 pipelines that wait between 4 nodes" in four.why


def test_activations_cross_a_node_when_the_pipeline_does() -> None:
    inside = a_setting(strategy="pipeline", stages=4, activation_bytes=10e6)
    across = replace(inside, stages=8)
    assert "activations between stages inside a node" in predict(inside, 4).why
    found = predict(across, 8)
    assert "activations between stages between nodes" in found.why
    hop = 1e-5 + 8 * 10e6 / 32 / 1e9
    bubble = 0.1 * 7 / 32
    # 2.5 ms per hop are less than a micro-batch's 3.1: only the way there and back sticks out.
    assert found.step_seconds == pytest.approx(0.1 + bubble + 14 * hop)


def test_waiting_for_the_slowest_bounds_what_is_drawn() -> None:
    spread, draws = 0.01, np.random.default_rng(0).normal(0.0, 0.01, (200, 4096))
    quiet = a_setting(gradient_bytes=0.0)
    waiting = predict(replace(quiet, spread_seconds=spread), 4096).step_seconds - 0.1
    drawn = draws.max(axis=1).mean()
    assert drawn < waiting < 1.25 * drawn


@settings(max_examples=60, deadline=None)
@given(
    strategy=st.sampled_from(STRATEGIES),
    devices=st.sampled_from([1, 2, 4, 8, 64, 512, 4096]),
    size=st.floats(0, 1e11),
    bandwidth=st.floats(1e6, 1e12),
    overhead=st.floats(0, 1),
)
def test_always_a_share_and_never_worse_on_a_better_link(
    strategy: str, devices: int, size: float, bandwidth: float, overhead: float
) -> None:
    setting = a_setting(
        strategy=strategy,
        gradient_bytes=size,
        links=Links(LINKS.inside, Link(bandwidth, 1e-5)),
        overhead_seconds=overhead,
    )
    found = predict(setting, devices)
    assert 0 < found.efficiency <= 1
    assert 0 <= found.communication_share < 1
    better = replace(setting, links=Links(LINKS.inside, Link(2 * bandwidth, 1e-5)))
    assert predict(better, devices).step_seconds <= found.step_seconds * (1 + 1e-12)


def test_the_worst_loss_is_named_first_and_small_ones_not_at_all() -> None:
    setting = a_setting(overhead_seconds=0.01, spread_seconds=0.02)
    said = predict(setting, 64).why.split("; ")
    assert [words.partition(" ")[0] for words in said] == ["gradients", "waiting", "overhead"]
    shares = [float(re.findall(r"([\d.]+) %", words)[0]) for words in said]
    assert shares == sorted(shares, reverse=True)
    assert predict(a_setting(gradient_bytes=1.0), 4).why.startswith("all of it hides")


def test_one_device_loses_nothing() -> None:
    found = predict(a_setting(overhead_seconds=1.0, spread_seconds=1.0), 1)
    assert (found.efficiency, found.communication_share) == (1.0, 0.0)


# The fit


def measured(setting: Setting, *counts: int) -> dict[int, float]:
    return {n: predict(setting, n).step_seconds for n in counts}


def test_what_was_planted_is_found_again() -> None:
    true = a_setting(links=Links(Link(0.9 * GB), Link(0.3 * GB, 1e-5)), overhead_seconds=0.004)
    given = replace(true, links=LINKS, overhead_seconds=0.0, step_seconds=9.0)
    found = fit(given, measured(true, 1, 2, 3, 4, 8))
    assert found.setting.links.inside.bandwidth == pytest.approx(0.9 * GB, rel=0.01)
    assert found.setting.links.between.bandwidth == pytest.approx(0.3 * GB, rel=0.01)
    assert found.setting.overhead_seconds == pytest.approx(0.004, rel=0.05)
    assert found.setting.step_seconds == 0.1
    assert max(map(abs, found.errors.values())) < 0.003
    assert predict(found.setting, 64).efficiency == pytest.approx(
        predict(true, 64).efficiency, rel=0.01
    )
    assert found.notes == ()


def test_a_node_says_nothing_of_the_network() -> None:
    found = fit(a_setting(), measured(a_setting(), 1, 2, 4))
    assert found.setting.links.between == LINKS.between
    assert any("between nodes" in note for note in found.notes)


def test_what_hides_leaves_the_hardwares_bandwidth() -> None:
    true = a_setting(links=Links(Link(10 * GB), LINKS.between), overhead_seconds=0.01)
    found = fit(a_setting(), measured(true, 1, 2, 4))
    assert found.setting.links.inside.bandwidth == pytest.approx(10 * GB)
    nothing = fit(a_setting(gradient_bytes=0.0), {1: 0.1, 2: 0.12, 4: 0.12})
    assert nothing.setting.links.inside.bandwidth == pytest.approx(10 * GB)


def test_one_number_of_devices_is_taken_for_overhead() -> None:
    found = fit(a_setting(gradient_bytes=0.0), {1: 0.1, 4: 0.12})
    assert found.setting.overhead_seconds == pytest.approx(0.02)
    assert any("cannot tell" in note for note in found.notes)


# What was published, and the page


def test_no_published_point_is_left_out() -> None:
    rows = [row for series in held_out.everything() for row in held_out.held_out(series)]
    shown = {(row.series.name, row.devices) for row in rows}
    wanted = {
        (series.name, n)
        for series in held_out.everything()
        for n in series.seconds
        if n > max(held_out.FITTED, min(series.seconds))
    }
    assert shown == wanted and len(rows) == len(wanted) == 36
    page = held_out.PAGE.read_text()
    for row in rows:
        assert f"| {row.series.name} | {row.devices} | {100 * row.measured:.1f} % |" in page


def test_nothing_held_out_is_looked_at() -> None:
    for series in (*published.azure(), *published.pytorch()):
        spoilt = {n: s if n <= held_out.FITTED else 1e3 * s for n, s in series.seconds.items()}
        again = held_out.fitted(replace(series, seconds=spoilt))
        assert again.setting == held_out.fitted(series).setting


def test_the_published_numbers_are_those_of_the_facts() -> None:
    """Read off the same bars by somebody else, who says to 1 %."""
    facts = {
        "V100": ([979, 1809, 3406, 6516], [1244, 1247, 2210, 4270]),
        "P100": ([863, 1615, 3040, 5818], [856, 1099, 2000, 3943]),
        "P40": ([658, 1310, 2620, 5180], [654, 968, 1787, 3635]),
        "K80": ([207, 413, 823, 1648], [154, 318, 555, 986]),
    }
    for gpu, columns in facts.items():
        for library, rates in zip((INTEL, NCCL), columns, strict=True):
            found = AZURE_RATES[gpu][library]
            assert [found[n] for n in (4, 8, 16, 32)] == pytest.approx(rates, rel=0.01)


def test_the_infiniband_is_that_of_the_vm_table() -> None:
    import yaml

    series = yaml.safe_load((ROOT / "launchers/azureml/vm_sizes.yaml").read_text())["series"]
    sizes = {name: size for each in series for name, size in each["sizes"].items()}
    known = [sizes[name] for name in published.AZURE_SIZES.values()]
    assert {size["gpus"] for size in known} == {4}
    # The K80's has InfiniBand that only Intel MPI could use, and no number in the table.
    rates = {size["infiniband_gbps"] for size in known if size.get("sr_iov", True)}
    assert [published.FDR.bandwidth] == [rate * 1e9 / 8 * 64 / 66 for rate in rates]


def test_the_page_is_what_the_script_says() -> None:
    text = held_out.PAGE.read_text()
    made = held_out.page_with(text, held_out.markdown())
    assert text == made, "python -m benchmarks.held_out --write"


def test_writing_puts_the_tables_between_the_marks(tmp_path: Any, monkeypatch: Any) -> None:
    page, plot = tmp_path / "scaling.md", tmp_path / "scaling.svg"
    page.write_text(f"before\n{held_out.BEGIN}\nold\n{held_out.END}\nafter\n")
    monkeypatch.setattr(held_out, "PAGE", page)
    monkeypatch.setattr(held_out, "PLOT", plot)
    monkeypatch.setattr(held_out, "markdown", lambda: "new")
    assert held_out.command(["--wirte"]) == 2
    assert "old" in page.read_text() and not plot.exists()
    assert held_out.command(["--write"]) == 0
    assert page.read_text() == f"before\n{held_out.BEGIN}\n\nnew\n\n{held_out.END}\nafter\n"
    assert "<svg" in plot.read_text()
    with pytest.raises(ValueError, match="lacks"):
        held_out.page_with("no marks", "")


def test_the_example_of_the_page_says_what_it_says(capsys: Any) -> None:
    text = held_out.PAGE.read_text()
    code, output = re.findall(r"```(?:python)?\n(.*?)```", text, re.DOTALL)[:2]
    exec(code, {})
    assert capsys.readouterr().out == output


def test_a_prediction_loads_neither_torch_nor_lightning() -> None:
    code = "import sys, distdl.scaling, distdl.scaling.published\nprint('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"
