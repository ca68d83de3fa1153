"""What a `_target_` that leads nowhere is told."""

from __future__ import annotations

from distdl.validation.targets import Trust, problem_of


def test_a_module_that_is_not_there_is_looked_for(tmp_path):
    (tmp_path / "mine").mkdir()
    trust = Trust((str(tmp_path),))
    mine = problem_of("mine.model.Net", trust, ("model",))
    assert mine.path == "model._target_"
    assert mine.what.startswith(f"{tmp_path}/mine has no module 'model'")
    assert "model.py" in mine.remedy
    other = problem_of("other.model.Net", trust, ("model",))
    assert str(tmp_path) in other.what
    assert "nor is it installed" in other.what
    installed = problem_of("numpy.save", trust, ("model",))
    assert "outside the allowed packages" in installed.what
    assert "project.allow=[numpy]" in installed.remedy
