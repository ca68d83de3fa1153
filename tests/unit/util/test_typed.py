"""pydantic's errors as problems: one sentence for each place, in the words of the user's keys."""

from __future__ import annotations

from typing import Literal

import pytest
from pydantic import BaseModel, ConfigDict, ValidationError

from distdl.util import typed
from distdl.util.errors import UserError
from tests.house import FILES, imported


class Lights(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    count: int
    colour: Literal["green", "amber"] = "green"
    height: int | bool | None = None
    names: list[str] = []


def refused(values):
    with pytest.raises(ValidationError) as caught:
        Lights.model_validate(values)
    return [str(p) for p in typed.problems(caught.value, values, Lights.model_fields, "launcher.")]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"count": "3"}, "count: '3' is not an integer"),
        ({}, "count: missing\n    write count=..."),
        ({"count": 1, "colou": 1}, "colou: no such setting\n    did you mean colour?"),
        (
            {"count": 1, "colour": "gren"},
            "colour: 'gren' is not 'green' or 'amber'\n    did you mean green?",
        ),
        ({"count": 1, "height": "x"}, "height: 'x' is not an integer or true or false"),
        ({"count": 1, "names": "a"}, "names: 'a' is not a list\n    launcher.names=[a]"),
        (
            {"count": 1, "names": "a b"},
            "names: 'a b' is not a list\n    'launcher.names=[\"a b\"]'",
        ),
        ({"count": 1, "names": [1]}, "names: 1 is not a string"),
    ],
)
def test_a_setting_that_does_not_fit(values, text):
    assert refused(values) == [text]


def test_a_field_of_a_dataclass():
    with pytest.raises(UserError, match=r"^devices\.two: must be a number, not '2'$"):
        typed.checked(dict[str, typed.FromOne], {"two": "2"}, "devices")


def test_only_one_file_reads_the_words_of_pydantic():
    words = ("Input should be", "extra_forbidden", "include_url")
    source = {name: FILES[name].read_text(encoding="utf-8") for name in FILES}
    reading = {name for name, text in source.items() if any(word in text for word in words)}
    # One asks for a kind; a model folder's server answers over HTTP, without distdl.
    apart = {"distdl.config.section_checks", "distdl.tools.serving.requests"}
    assert reading == {"distdl.util.typed", *apart}
    assert "distdl.util.typed" in imported()["distdl.config.section_checks"]
