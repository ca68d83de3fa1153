"""Words of the command line -> overrides, by Hydra's grammar."""

from __future__ import annotations

import pytest

from distdl.config import grammar
from distdl.util.errors import UserError


def test_keys_with_several_values_are_swept_and_lists_are_not():
    typed = grammar.parse_overrides(["seed=1,2", "tags=[a,b]", "+x=choice(1,2)"])
    assert grammar.sweep_keys(typed) == ["seed", "x"]


def test_words_outside_ascii_need_no_quotes():
    (typed,) = grammar.parse_overrides(["data.root=/daten/größe"])
    assert typed.value() == "/daten/größe"
    assert grammar.texts_of([typed]) == ['data.root="/daten/größe"']


def test_all_words_that_are_no_overrides_are_refused_at_once():
    with pytest.raises(UserError) as refused:
        grammar.parse_overrides(["a=[1", "seed=1", 'b=[1, "'])
    assert [problem.path for problem in refused.value.problems] == ["a", "b"]
    assert {problem.code for problem in refused.value.problems} == {"wrong-kind"}
