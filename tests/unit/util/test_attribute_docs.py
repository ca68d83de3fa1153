"""Docstrings of attributes."""

from __future__ import annotations

from distdl.util.attribute_docs import attribute_docs


def test_a_text_belongs_to_the_attribute_above_it():
    class One:
        first: int = 0
        """Of the
        first.

        And more."""

        second: int = 0
        third: int = 0
        "Of the third."

        def method(self):
            """Of no attribute."""

    class Two(One):
        third: int = 1
        """Another."""

    expected = {"first": "Of the first.\nAnd more.", "third": "Another."}
    assert attribute_docs(Two, One) == expected
    assert attribute_docs(Two, Two) == {"third": "Another."}
    assert attribute_docs(type("Three", (One,), {}), One) == attribute_docs(One, One)
