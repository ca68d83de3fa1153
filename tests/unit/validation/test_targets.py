"""What a `_target_` that leads nowhere is told."""

from __future__ import annotations

from distdl.validation.targets import Trust, problem_of


def test_a_module_that_is_not_there_is_looked_for(tmp_path):
    (tmp_path / "mine").mkdir()
    trust = Trust((str(tmp_path),))
    what, remedy = problem_of("mine.model.Net", trust, ("model",))
    assert what.startswith(f"{tmp_path}/mine has no module 'model'")
    assert "model.py" in remedy
    what, _ = problem_of("other.model.Net", trust, ("model",))
    assert str(tmp_path) in what
    assert "nor is it installed" in what
    what, remedy = problem_of("numpy.save", trust, ("model",))
    assert "outside the allowed packages" in what
    assert "project.allow=[numpy]" in remedy
