"""The predictor: its formulas and fit, what it refuses, and that its page hides no error."""

import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import approx

from benchmarks import held_out, published
from distdl.planner import estimate
from distdl.scaling import STRATEGIES, Link, Links, Setting, fit, predict, table
from distdl.scaling.links import ALGORITHMS, Group, all_reduce, exposed, fastest
from distdl.scaling.published import AZURE_RATES, INTEL, NCCL
from distdl.util.errors import UserError
from tests.conftest import ROOT

GB = 1e9
INSIDE, BETWEEN, ENDLESS = Link(10 * GB, 1e-6), Link(1 * GB, 1e-5), Link(1e15)
LINKS = Links(inside=INSIDE, between=BETWEEN)
DEFAULTS = {"step_seconds": 0.1, "gradient_bytes": 100e6, "links": LINKS}
DEFAULTS |= {"devices_per_node": 4, "bucket_bytes": 10e6}


def a_setting(**changes):
    return Setting(**{**DEFAULTS, **changes})


HIERARCHY = 6 * (1e-6 + 1e9 / 10e9)  # inside a node, for 4e9 bytes
COLLECTIVES = [
    # 3 + 3 messages of a quarter each, over 10 GB/s; over two nodes each waits for the network.
    (4e9, Group(4, 4), "ring", 6 * (1e-6 + 0.1)),
    (8e9, Group(8, 4), "ring", 14 * (1e-5 + 1.0)),
    # Three nodes: each of a node's 4 devices sends 4/3 of its quarter, all over one adapter.
    (4e9, Group(12, 4), "hierarchical", HIERARCHY + 4e-5 + 4 * 4 / 3 * 1e9 / 1e9),
    # 2 log2(3), rounded up, instead of 2 x (3 - 1) messages.
    (1.0, Group(4 * 64, 4), "tree", 6e-6 + 12e-5),
    (1.0, Group(4 * 64, 4), "hierarchical", 6e-6 + 126e-5),
    (1e9, Group(8, 1, sharing=4), "ring", 4 * 14 / 8 + 14e-5),  # groups share a network
    *((1e9, Group(1, 1), algorithm, 0) for algorithm in ALGORITHMS),
    *((1e9, Group(4, 4), algorithm, 6 * (1e-6 + 0.025)) for algorithm in ALGORITHMS),
]


@pytest.mark.parametrize("size, group, algorithm, seconds", COLLECTIVES)
def test_collectives_by_hand(size, group, algorithm, seconds):
    assert all_reduce(size, group, LINKS, algorithm) == approx(seconds, rel=1e-3)
    assert fastest(size, group, LINKS)[0] <= all_reduce(size, group, LINKS, algorithm)
    assert fastest(8.0, Group(4096, 4), LINKS)[1] == "tree"  # for small messages


@given(st.integers(1, 40), st.floats(0, 2), st.floats(0, 10))
def test_what_is_exposed_is_what_a_simulation_finds(parts, each, window):
    free = 0.0
    for part in range(1, parts + 1):  # piece by piece: ready, then sent when the link is free
        free = max(free, part / parts * window) + each
    assert exposed(parts, each, window) == approx(free - window, abs=1e-9)


@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if s != "pipeline"])
def test_as_many_bytes_travel_as_plan_counts(strategy):
    size = DEFAULTS["gradient_bytes"]
    counts = dict.fromkeys(("optimizer", "buffers", "activations", "transient", "unit"), 0)
    counts |= {"weights": size, "gradients": size, "no_blocks": "none", "blocks": []}
    machine = estimate.Machine(4, 1e12, 1e11, 1e13)
    rows = estimate.estimates(SimpleNamespace(**counts), machine)
    (sent,) = [row.sent for row in rows if row.name == strategy]
    setting = a_setting(strategy=strategy, links=Links(Link(10 * GB), Link(1 * GB)))
    assert 10 * GB * predict(setting, 4).communication_seconds == approx(sent)


def test_a_fast_link_hides_all_but_the_last_bucket_and_a_slow_one_decides():
    result, bucket = predict(a_setting(), 4), all_reduce(10e6, Group(4, 4), LINKS, "ring")
    assert result.step_seconds == approx(0.1 + bucket)
    assert result.communication_share == approx(bucket / result.step_seconds)
    assert result.communication_seconds == approx(10 * bucket)
    result = predict(a_setting(links=Links(INSIDE, Link(1e6)), algorithm="ring"), 8)
    # All buckets one after the other, the first of them ready after a tenth of the backward.
    sending = 2 * 7 / 8 * 100e6 / 1e6
    assert result.step_seconds == approx(0.1 / 3 + 0.1 * 2 / 30 + sending, rel=1e-3)
    assert result.why.startswith("gradients that wait between 2 nodes (ring)")
    assert 0.99 < result.communication_share < 1


def test_sharing_out_the_weights_costs_more_than_ddp_on_a_slow_link():
    seconds = {s: predict(a_setting(strategy=s), 64).step_seconds for s in STRATEGIES[:5]}
    assert seconds["ddp"] < seconds["fsdp"] == seconds["deepspeed_zero3"]
    # ZeRO-2's last gather hides behind nothing.
    assert seconds["fsdp"] < seconds["deepspeed_zero2"] == seconds["deepspeed_zero1"]
    light = a_setting(strategy="fsdp", weight_bytes=50e6)
    assert predict(light, 64).step_seconds < seconds["fsdp"]


@pytest.mark.parametrize("stages, micro", [(2, 8), (8, 8), (4, 32)])
def test_without_links_a_pipeline_only_has_its_bubble(stages, micro):
    pipeline = {"strategy": "pipeline", "stages": stages, "micro_batches": micro}
    pipeline |= {"gradient_bytes": 0.0, "links": Links(ENDLESS, ENDLESS), "devices_per_node": 8}

    def efficiency(**more):
        return predict(a_setting(**pipeline, **more), 64).efficiency

    part = (stages - 1) / 2
    assert efficiency() == approx(1 - 2 * part / (micro + 2 * part))
    assert efficiency(schedule="gpipe") == efficiency()
    interleaved = efficiency(schedule="interleaved", pieces_per_stage=2)
    assert interleaved == approx(1 - part / (micro + part))
    assert efficiency(schedule="zero_bubble", pieces_per_stage=2) > interleaved


def test_gradients_and_activations_of_pipelines():
    pipeline = {"strategy": "pipeline", "stages": 4, "micro_batches": 16}
    setting = a_setting(**pipeline, links=Links(ENDLESS, Link(1 * GB)))
    alone, four = predict(setting, 4), predict(setting, 16)
    # A quarter of the gradients each, but a node's four stages send at the same time: 3 buckets of
    # 25 / 3 MB, of which the backward of one micro-batch in 16 hides little.
    each = 2 * 3 / 4 * 25e6 / 3 / 0.25e9
    late = exposed(3, each, 0.1 * 2 / 3 / 16)
    assert four.step_seconds - alone.step_seconds == approx(late, rel=1e-6)
    assert "gradients of 4 pipelines that wait between 4 nodes" in four.why
    assert "gradients" not in alone.why
    inside = a_setting(strategy="pipeline", stages=4, activation_bytes=10e6)
    assert "activations between stages inside a node" in predict(inside, 4).why
    across = predict(replace(inside, stages=8), 8)
    assert "activations between stages between nodes" in across.why
    hop, bubble = 1e-5 + 8 * 10e6 / 32 / 1e9, 0.1 * 7 / 32
    # 2.5 ms per hop are less than a micro-batch's 3.1: only the way there and back is exposed.
    assert across.step_seconds == approx(0.1 + bubble + 14 * hop)


def test_losses_are_named_and_waiting_bounds_what_is_drawn():
    reasons = predict(a_setting(overhead_seconds=0.01, spread_seconds=0.02), 64).why.split("; ")
    assert [text.partition(" ")[0] for text in reasons] == ["gradients", "waiting", "overhead"]
    shares = [float(re.findall(r"([\d.]+) %", text)[0]) for text in reasons]
    assert shares == sorted(shares, reverse=True)  # the worst first, and small ones not at all
    assert predict(a_setting(gradient_bytes=1.0), 4).why.startswith("all of it hides")
    alone = predict(a_setting(overhead_seconds=1.0, spread_seconds=1.0), 1)
    assert (alone.efficiency, alone.communication_share) == (1.0, 0.0)
    draws = np.random.default_rng(0).normal(0.0, 0.01, (200, 4096))
    waiting = a_setting(gradient_bytes=0.0, spread_seconds=0.01)
    drawn = draws.max(axis=1).mean()
    assert drawn < predict(waiting, 4096).step_seconds - 0.1 < 1.25 * drawn


COUNTS = st.sampled_from([1, 2, 4, 8, 64, 512, 4096])
SIZES, SPEEDS, OVERHEADS = st.floats(0, 1e11), st.floats(1e6, 1e12), st.floats(0, 1)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(STRATEGIES), COUNTS, SIZES, SPEEDS, OVERHEADS)
def test_a_share_that_is_never_worse_on_a_better_link(strategy, devices, size, speed, overhead):
    common = {"strategy": strategy, "gradient_bytes": size, "overhead_seconds": overhead}
    links = [Links(INSIDE, Link(bandwidth, 1e-5)) for bandwidth in (speed, 2 * speed)]
    result, better = (predict(a_setting(**common, links=each), devices) for each in links)
    assert 0 < result.efficiency <= 1 and 0 <= result.communication_share < 1
    assert better.step_seconds <= result.step_seconds * (1 + 1e-12)


def measured(setting, *counts):
    return {n: predict(setting, n).step_seconds for n in counts}


def test_a_known_setting_is_found_again():
    true = a_setting(links=Links(Link(0.9 * GB), Link(0.3 * GB, 1e-5)), overhead_seconds=0.004)
    start = replace(true, links=LINKS, overhead_seconds=0.0, step_seconds=9.0)
    result = fit(start, measured(true, 1, 2, 3, 4, 8))
    assert result.setting.links.inside.bandwidth == approx(0.9 * GB, rel=0.01)
    assert result.setting.links.between.bandwidth == approx(0.3 * GB, rel=0.01)
    assert result.setting.overhead_seconds == approx(0.004, rel=0.05)
    assert result.setting.step_seconds == 0.1 and result.notes == ()
    assert max(map(abs, result.errors.values())) < 0.003
    efficiencies = [predict(setting, 64).efficiency for setting in (result.setting, true)]
    assert efficiencies[0] == approx(efficiencies[1], rel=0.01)


def test_what_cannot_be_fitted_keeps_the_hardwares_value():
    one_node = fit(a_setting(), measured(a_setting(), 1, 2, 4))
    assert one_node.setting.links.between == BETWEEN
    assert any("between nodes" in note for note in one_node.notes)
    hidden = a_setting(links=Links(Link(10 * GB), BETWEEN), overhead_seconds=0.01)
    no_bytes = a_setting(gradient_bytes=0.0)
    fits = fit(a_setting(), measured(hidden, 1, 2, 4)), fit(no_bytes, {1: 0.1, 2: 0.12, 4: 0.12})
    for each in fits:
        assert each.setting.links.inside.bandwidth == approx(10 * GB)
    one_size = fit(no_bytes, {1: 0.1, 4: 0.12})
    assert one_size.setting.overhead_seconds == approx(0.02)
    assert any("cannot tell" in note for note in one_size.notes)


def test_no_published_point_is_left_out():
    series = held_out.everything()
    rows = [row for each in series for row in held_out.held_out(each)]
    wanted = {
        (each.name, n)
        for each in series
        for n in each.seconds
        if n > max(held_out.FITTED, min(each.seconds))
    }
    assert {(row.series.name, row.devices) for row in rows} == wanted
    assert len(rows) == len(wanted) == 36
    page = held_out.PAGE.read_text()
    for row in rows:
        assert f"| {row.series.name} | {row.devices} | {100 * row.measured:.1f} % |" in page
    for each in (*published.azure(), *published.pytorch()):  # held-out points are not looked at
        spoilt = {n: s if n <= held_out.FITTED else 1e3 * s for n, s in each.seconds.items()}
        again = held_out.fitted(replace(each, seconds=spoilt))
        assert again.setting == held_out.fitted(each).setting


# 32 GPUs by Intel MPI and NCCL, read off the same bars by somebody else, to 1 %.
BARS = {"V100": (6516, 4270), "P100": (5818, 3943), "P40": (5180, 3635), "K80": (1648, 986)}


def test_published_numbers_and_the_vm_table():
    for gpu, rates in AZURE_RATES.items():
        assert (rates[INTEL][32], rates[NCCL][32]) == approx(BARS[gpu], rel=0.01)
    series = yaml.safe_load((ROOT / "launchers/azureml/vm_sizes.yaml").read_text())["series"]
    sizes = {name: size for each in series for name, size in each["sizes"].items()}
    known = [sizes[name] for name in published.AZURE_SIZES.values()]
    assert {size["gpus"] for size in known} == {4}
    # The K80's has InfiniBand that only Intel MPI could use, and no number in the table.
    rates = {size["infiniband_gbps"] for size in known if size.get("sr_iov", True)}
    assert [published.FDR.bandwidth] == [rate * 1e9 / 8 * 64 / 66 for rate in rates]


def test_the_page_is_what_the_script_writes(capsys):
    text = held_out.PAGE.read_text()
    made = held_out.page_with(text, held_out.markdown())
    assert text == made, "python -m benchmarks.held_out --write"
    code, output = re.findall(r"```(?:python)?\n(.*?)```", text, re.DOTALL)[:2]
    exec(code, {})
    assert capsys.readouterr().out == output


def test_writing_puts_the_tables_between_the_marks(tmp_path, monkeypatch):
    page, plot = tmp_path / "scaling.md", tmp_path / "scaling.svg"
    page.write_text(f"before\n{held_out.BEGIN}\nold\n{held_out.END}\nafter\n")
    for name, value in {"PAGE": page, "PLOT": plot, "markdown": lambda: "new"}.items():
        monkeypatch.setattr(held_out, name, value)
    assert held_out.command(["--wirte"]) == 2
    assert "old" in page.read_text() and not plot.exists()
    assert held_out.command(["--write"]) == 0 and "<svg" in plot.read_text()
    assert page.read_text() == f"before\n{held_out.BEGIN}\n\nnew\n\n{held_out.END}\nafter\n"
    with pytest.raises(ValueError, match="lacks"):
        held_out.page_with("no marks", "")


def test_a_prediction_loads_neither_torch_nor_lightning():
    code = "import sys, distdl.scaling, distdl.scaling.published\nprint('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"


NAN, STAGED = float("nan"), {"strategy": "pipeline", "stages": 4}
PIECES = {"stages": 4, "micro_batches": 8, "schedule": "gpipe", "pieces_per_stage": 2}
PIECES |= {"activation_bytes": 1e6}


def refused(make, *arguments, **settings):
    with pytest.raises(UserError) as error:
        make(*arguments, **settings)
    return {problem.path: problem for problem in error.value.problems}


VALUES = [
    ("step_seconds", 0.0, "greater than 0, not 0.0"),
    ("step_seconds", NAN, "finite number, not nan"),
    ("step_seconds", "0.1", "a number, not '0.1'"),
    ("step_seconds", True, "a number, not True"),
    ("gradient_bytes", -1.0, "greater than or equal to 0, not -1.0"),
    ("gradient_bytes", 10**400, "number, not 1000"),
    ("backward_share", 1.5, "less than or equal to 1, not 1.5"),
    ("devices_per_node", 8.5, "a valid integer"),
    ("stages", np.ones(2), "a number, not array("),
    ("links", Link(1.0), "instance of Links, not Link(bandwidth=1.0, latency=0.0)"),
    ("strategy", 5, "'deepspeed_zero3' or 'pipeline', not 5"),
    ("algorithm", "butterfly", "'ring', 'hierarchical', 'tree' or 'fastest', not 'butterfly'"),
    ("schedule", None, "not None"),
]


@pytest.mark.parametrize("name, value, what", VALUES)
def test_a_value_is_refused_by_its_name_alone(name, value, what):
    problems = refused(a_setting, **{name: value})
    assert list(problems) == [name] and what in problems[name].what


def test_all_problems_are_reported_at_once():
    problems = refused(a_setting, step_seconds=-1.0, strategy="fdsp", devices_per_node=0)
    assert list(problems) == ["step_seconds", "devices_per_node", "strategy"]
    assert problems["strategy"].remedy == "did you mean fsdp?"
    for link, path in (("1",), "bandwidth"), ((float("inf"),), "bandwidth"), ((1e9, -1), "latency"):
        assert list(refused(Link, *link)) == [path]
    assert list(refused(Links, 1e9, Link(1e9))) == ["inside"]


def test_numpys_numbers_and_integral_floats_are_numbers():
    plain = a_setting(**STAGED, micro_batches=8)
    other = {"stages": 4.0, "micro_batches": np.int8(8), "devices_per_node": np.int64(4)}
    other |= {"step_seconds": np.float64(0.1), "gradient_bytes": np.int64(100e6)}
    links = Links(Link(np.float64(10 * GB), np.float64(1e-6)), BETWEEN)
    setting = a_setting(strategy="pipeline", **other, links=links)
    assert predict(setting, np.int64(16)) == predict(plain, 16) == predict(plain, 16.0)
    points = {np.int64(1): np.float64(0.1), 2.0: 0.12, 4: 0.12}
    assert fit(a_setting(), points) == fit(a_setting(), {1: 0.1, 2: 0.12, 4: 0.12})


def test_settings_that_would_go_unused_are_refused():
    for schedule in ("gpipe", "1f1b"):
        problems = refused(a_setting, **STAGED, schedule=schedule, pieces_per_stage=2)
        assert problems["pieces_per_stage"].what.endswith(f"not {schedule}")
        remedy = "schedule='interleaved' or schedule='zero_bubble'"
        assert problems["pieces_per_stage"].remedy == remedy
    problems = refused(a_setting, strategy="deepspeed_zero3", **PIECES)
    assert problems.keys() == PIECES.keys()
    assert problems["stages"].what == "4 belongs to a pipeline, and deepspeed_zero3 has none"
    # With a misspelt strategy or schedule they may be right.
    assert list(refused(a_setting, **{**PIECES, "strategy": "pipelin"})) == ["strategy"]
    assert list(refused(a_setting, **STAGED, schedule="inter", pieces_per_stage=2)) == ["schedule"]
    assert a_setting(stages=1, schedule="1f1b", activation_bytes=0) == a_setting()


def test_refused_numbers_of_devices():
    for count in ("8", 2.5, True, None, 0, NAN):
        problem = refused(predict, a_setting(), count)["num_devices"]
        assert problem.what.endswith(f"not {count!r}")
        assert table(a_setting(), [count])[0].missing == problem.what
    rows = {row.devices: row for row in table(a_setting(), [0, 1, 2, 3, 6, 8])}
    assert [n for n, row in rows.items() if row.prediction] == [1, 2, 3, 8]
    assert rows[6].missing == "6 devices do not fill nodes of 4"
    assert refused(predict, a_setting(), 6)["num_devices"].remedy == "4 or 8"
    assert "into pipelines of 4 stages" in table(a_setting(**STAGED), [2])[0].missing


POINTS = [
    ({2: 0.1}, "measured", "one device is missing"),
    ({1: 0.1, 8: 0.2}, "measured", "several devices of one node are missing"),
    ({1: 0.1, 2: -0.2}, "measured.2", "must be greater than 0"),
    ({1: 0.1, "2": 0.1}, "measured.2", "must be a number, not '2'"),
    ({0: 0.1, 1: 0.1, 2: 0.1}, "measured.0", ""),
    ([0.1, 0.2], "measured", "must be a valid dictionary"),
]


@pytest.mark.parametrize("points, path, what", POINTS)
def test_points_that_cannot_be_fitted(points, path, what):
    with pytest.raises(UserError) as error:
        fit(a_setting(), points)
    problem = error.value.problems[0]
    assert problem.path == path and problem.what.startswith(what)
