"""`model.recompute=auto`: what is chosen, where it is kept, and where it is refused."""

from __future__ import annotations

from distdl.config import compose
from distdl.launch import planning
from distdl.models import recompute
from distdl.ranks.stopping import StopRequest
from distdl.tools.measure import recompute_choice
from distdl.tools.measure.estimate import Machine, by_strategy, estimates
from distdl.tools.measure.step_profile import measure
from distdl.util.errors import UserError
from distdl.worker import named_tools, performing, recomputing
from distdl.worker.rank_context import RankContext
from tests.conftest import TINY
from tests.prepared import refusal

WORDS = (*TINY, "data.batch_size=64")
AUTO = (*WORDS, "model.recompute=auto")


def taken(*words):
    """Bytes under `single`."""
    measured = measure(compose.compose([*WORDS, *words]), 64)
    return by_strategy(estimates(measured, Machine(1, 1.0, 1.0, 1.0)))["single"].total


def test_blocks_recompute_if_the_batch_does_not_fit(context, monkeypatch, caplog):
    caplog.set_level("INFO")
    config = compose.compose([*AUTO])
    plain, less = taken(), taken("model.recompute=blocks")
    for memory, value in ((0.99 * plain / 0.9, "blocks"), (1.01 * plain / 0.9, "none")):
        found = recompute_choice.recompute_for(config, 64, 1, memory)
        assert found.value == value
        assert f"single takes {plain / 2**30:.3g} of {memory / 2**30:.3g} GiB" in found.reason
        assert ("% more operations" in found.reason) == (value == "blocks")
    problem = refusal(recompute_choice.recompute_for, config, 64, 1, 0.9 * less)
    assert problem.path == "model.recompute"
    assert f"and {less / 2**30:.3g} if all blocks recompute" in problem.what
    # In a worker, by the memory that is free.
    monkeypatch.setattr(recomputing, "free_memory", lambda accelerator: less / 0.89)
    tuned = performing.tune(config, context)
    assert tuned.model.recompute == "blocks"
    launch = context.attempt.launch()
    assert launch["changes"] == {"model.recompute": "blocks"}
    assert launch["chosen"] == {"recompute": launch["changes"]}
    assert "single takes" in launch["recompute"][0]
    assert "train with model.recompute=blocks" in caplog.text
    # A resume keeps it, though more memory is free now, and measures nothing.
    monkeypatch.setattr(named_tools, "recompute_planner", None)
    attempt = context.run.begin_attempt({**context.launch, "changes": {}, "chosen": {}})
    again = RankContext(
        attempt, attempt.launch(), context.resources, context.environment, StopRequest()
    )
    assert performing.tune(config, again).model.recompute == "blocks"
    assert attempt.launch()["changes"] == {"model.recompute": "blocks"}


def test_where_nothing_is_trained_it_is_none(context, monkeypatch):
    monkeypatch.setattr(named_tools, "recompute_planner", None)
    config = compose.compose([*AUTO, "task=validate"])
    assert performing.tune(config, context) == config
    assert recompute.apply(None, "auto") == []


def test_a_model_without_blocks_that_does_not_fit(monkeypatch):
    config = compose.compose([*AUTO])
    measured = recompute_choice.measure

    def without_blocks(config, batch):
        if config.model.recompute == "blocks":
            raise UserError.at("model.recompute", "Own has no blocks", "name some", code="failed")
        return measured(config, batch)

    monkeypatch.setattr(recompute_choice, "measure", without_blocks)
    problem = refusal(recompute_choice.recompute_for, config, 64, 1, 2**20)
    assert "GiB, and Own has no blocks" in problem.what
    assert "docs/memory.md" in problem.remedy


def test_beside_the_largest_batch_it_is_refused(tmp_path, monkeypatch, no_child):
    monkeypatch.chdir(tmp_path)
    problem = refusal(planning.plan, compose.compose([*AUTO, "data.batch_size=auto"]))
    assert problem.path == "model.recompute"
    assert "the largest one without it" in problem.what


def test_for_a_module_that_divides_itself_it_is_refused(tmp_path, monkeypatch, no_child):
    monkeypatch.chdir(tmp_path)
    words = [*AUTO, "strategy=model_parallel", "trainer.devices=2"]
    problem = refusal(planning.plan, compose.compose(words))
    assert problem.path == "model.recompute"
    assert "a module that divides itself" in problem.what
