"""The predictor: its formulas and fit, what it refuses, and its page."""

import re
from dataclasses import replace

import pytest
from pytest import approx

from benchmarks import held_out
from distdl.tools.scaling import STRATEGIES, Link, Links, Setting, fit, predict
from distdl.tools.scaling.links import ALGORITHMS, Group, all_reduce, exposed, fastest
from distdl.util.errors import UserError

GB = 1e9
INSIDE = Link(10 * GB, 1e-6)
BETWEEN = Link(1 * GB, 1e-5)
ENDLESS = Link(1e15)
LINKS = Links(inside=INSIDE, between=BETWEEN)
DEFAULTS = {
    "step_seconds": 0.1,
    "gradient_bytes": 100e6,
    "links": LINKS,
    "devices_per_node": 4,
    "bucket_bytes": 10e6,
}


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
    *((1e9, Group(4, 4), algorithm, 6 * (1e-6 + 0.025)) for algorithm in ALGORITHMS),
]


@pytest.mark.parametrize("size, group, algorithm, seconds", COLLECTIVES)
def test_collectives_by_hand(size, group, algorithm, seconds):
    assert all_reduce(size, group, LINKS, algorithm) == approx(seconds, rel=1e-3)
    assert fastest(size, group, LINKS)[0] <= all_reduce(size, group, LINKS, algorithm)
    assert fastest(8.0, Group(4096, 4), LINKS)[1] == "tree"  # for small messages


def test_a_fast_link_hides_all_but_the_last_bucket_and_a_slow_one_decides():
    result = predict(a_setting(), 4)
    bucket = all_reduce(10e6, Group(4, 4), LINKS, "ring")
    assert result.step_seconds == approx(0.1 + bucket)
    assert result.communication_share == approx(bucket / result.step_seconds)
    assert result.communication_seconds == approx(10 * bucket)
    result = predict(a_setting(links=Links(INSIDE, Link(1e6)), algorithm="ring"), 8)
    # All buckets one after the other, the first of them ready after a tenth of the backward.
    sending = 2 * 7 / 8 * 100e6 / 1e6
    assert result.step_seconds == approx(0.1 / 3 + 0.1 * 2 / 30 + sending, rel=1e-3)
    assert result.why.startswith("gradients that wait between 2 nodes (ring)")
    assert 0.99 < result.communication_share < 1
    # On a slow link, sharing out the weights costs more, and ZeRO-2's last gather most.
    seconds = {s: predict(a_setting(strategy=s), 64).step_seconds for s in STRATEGIES[:5]}
    assert seconds["ddp"] < seconds["fsdp"] == seconds["deepspeed_zero3"]
    assert seconds["fsdp"] < seconds["deepspeed_zero2"] == seconds["deepspeed_zero1"]
    light = a_setting(strategy="fsdp", weight_bytes=50e6)
    assert predict(light, 64).step_seconds < seconds["fsdp"]


def test_bubble_gradients_and_activations_of_pipelines():
    pipeline = {"strategy": "pipeline", "stages": 4, "micro_batches": 16}
    alone = a_setting(**pipeline, schedule="interleaved", links=Links(ENDLESS, ENDLESS))
    assert predict(alone, 4).efficiency == approx(1 - 3 / 19)
    two = replace(alone, pieces_per_stage=2)
    assert predict(two, 4.0).efficiency == approx(1 - 1.5 / 17.5)
    setting = a_setting(**pipeline, links=Links(ENDLESS, Link(1 * GB)))
    alone, four = predict(setting, 4), predict(setting, 16)
    # A quarter of the gradients each, but a node's four stages send at the same time: 3 buckets of
    # 25 / 3 MB, of which the backward of one micro-batch in 16 hides little.
    late = exposed(3, 2 * 3 / 4 * 25e6 / 3 / 0.25e9, 0.1 * 2 / 3 / 16)
    assert four.step_seconds - alone.step_seconds == approx(late, rel=1e-6)
    assert "gradients of 4 pipelines that wait between 4 nodes" in four.why
    assert "gradients" not in alone.why
    inside = a_setting(strategy="pipeline", stages=4, activation_bytes=10e6)
    assert "activations between stages inside a node" in predict(inside, 4).why
    across = predict(replace(inside, stages=8), 8)
    assert "activations between stages between nodes" in across.why
    hop = 1e-5 + 8 * 10e6 / 32 / 1e9
    bubble = 0.1 * 7 / 32
    # 2.5 ms per hop are less than a micro-batch's 3.1: only the way there and back is exposed.
    assert across.step_seconds == approx(0.1 + bubble + 14 * hop)


def test_losses_are_named():
    reasons = predict(a_setting(overhead_seconds=0.01, spread_seconds=0.02), 64).why.split("; ")
    assert [text.partition(" ")[0] for text in reasons] == ["gradients", "waiting", "overhead"]
    shares = [float(re.findall(r"([\d.]+) %", text)[0]) for text in reasons]
    assert shares == sorted(shares, reverse=True)  # the worst first, and small ones not at all
    assert predict(a_setting(gradient_bytes=1.0), 4).why.startswith("all of it hides")
    alone = predict(a_setting(overhead_seconds=1.0, spread_seconds=1.0), 1)
    assert (alone.efficiency, alone.communication_share) == (1.0, 0.0)


def measured(setting, *counts):
    return {n: predict(setting, n).step_seconds for n in counts}


def test_what_cannot_be_fitted_keeps_the_hardwares_value():
    one_node = fit(a_setting(), measured(a_setting(), 1, 2, 4))
    assert one_node.setting.links.between == BETWEEN
    assert any("between nodes" in note for note in one_node.notes)
    hidden = a_setting(links=Links(Link(10 * GB), BETWEEN), overhead_seconds=0.01)
    fitted = fit(a_setting(), measured(hidden, 1, 2, 4))
    assert fitted.setting.links.inside.bandwidth == approx(10 * GB)
    one_size = fit(a_setting(gradient_bytes=0.0), {1: 0.1, 4: 0.12})
    assert one_size.setting.overhead_seconds == approx(0.02)
    assert any("cannot tell" in note for note in one_size.notes)


def test_a_known_setting_is_found_again():
    true = a_setting(links=Links(Link(0.9 * GB), Link(0.3 * GB, 1e-5)), overhead_seconds=0.004)
    start = replace(true, links=LINKS, overhead_seconds=0.0, step_seconds=9.0)
    result = fit(start, measured(true, 1, 2, 3, 4, 8))
    assert result.setting.links.inside.bandwidth == approx(0.9 * GB, rel=0.01)
    assert result.setting.links.between.bandwidth == approx(0.3 * GB, rel=0.01)
    assert result.setting.overhead_seconds == approx(0.004, rel=0.05)
    assert result.setting.step_seconds == 0.1
    assert result.notes == ()
    assert max(map(abs, result.errors.values())) < 0.003


def test_the_page_is_as_the_script_writes_it(tmp_path, monkeypatch, capsys):
    page = tmp_path / "scaling.md"
    text = held_out.PAGE.read_text()
    page.write_text(text)
    code, output = re.findall(r"```(?:python)?\n(.*?)```", text, re.DOTALL)[:2]
    exec(code, {})
    assert capsys.readouterr().out == output
    monkeypatch.setattr(held_out, "PAGE", page)
    monkeypatch.setattr(held_out, "PLOT", tmp_path / "scaling.svg")
    assert held_out.command(["--write"]) == 0
    assert "<svg" in held_out.PLOT.read_text()
    assert page.read_text() == text, "python -m benchmarks.held_out --write"


NAN = float("nan")
STAGED = {"strategy": "pipeline", "stages": 4}
PIECES = {
    "stages": 4,
    "micro_batches": 8,
    "schedule": "gpipe",
    "pieces_per_stage": 2,
    "activation_bytes": 1e6,
}


def problems_of(make):
    with pytest.raises(UserError) as error:
        make()
    return {problem.path: problem for problem in error.value.problems}


REFUSED = [
    (lambda: a_setting(step_seconds=NAN), "step_seconds", "finite number, not nan"),
    (lambda: a_setting(links=Link(1.0)), "links", "of Links, not Link(bandwidth=1.0, latency=0.0)"),
    (lambda: a_setting(**STAGED, schedule="1f1b", pieces_per_stage=2), "pieces_per_stage", "1f1b"),
    # With a misspelt strategy the rest may be right.
    (lambda: a_setting(**{**PIECES, "strategy": "pipelin"}), "strategy", "not 'pipelin'"),
    (lambda: predict(a_setting(), "8"), "num_devices", "not '8'"),
    (lambda: predict(a_setting(**STAGED), 2), "num_devices", "into pipelines of 4 stages"),
    (lambda: fit(a_setting(), {2: 0.1}), "measured", "one device is missing"),
    (lambda: fit(a_setting(), {1: 0.1, 8: 0.2}), "measured", "of one node are missing"),
    (lambda: fit(a_setting(), {1: 0.1, "2": 0.1}), "measured.2", "must be a number, not '2'"),
]


@pytest.mark.parametrize("make, path, what", REFUSED)
def test_a_value_is_refused_by_its_name_alone(make, path, what):
    problems = problems_of(make)
    assert list(problems) == [path]
    assert what in problems[path].what


def test_all_problems_are_reported_at_once():
    wrong = {"step_seconds": -1.0, "strategy": "fdsp", "devices_per_node": 0}
    problems = problems_of(lambda: a_setting(**wrong))
    assert problems.keys() == wrong.keys()
    assert problems["strategy"].remedy == "did you mean fsdp?"
    # What would go unused, and what is the default anyway.
    problems = problems_of(lambda: a_setting(strategy="deepspeed_zero3", **PIECES))
    assert problems.keys() == PIECES.keys()
    assert problems["stages"].what == "4 belongs to a pipeline, and deepspeed_zero3 has none"
    assert a_setting(stages=1, schedule="1f1b", activation_bytes=0) == a_setting()
