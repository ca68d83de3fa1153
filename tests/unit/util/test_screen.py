"""Lines for people: as wide as their terminal, and commands that can be copied."""

from __future__ import annotations

import shlex

from distdl.util.screen import fitted


def split_as_a_shell(text: str) -> list[str]:
    """The words of a line that goes on behind a backslash."""
    return shlex.split(text.replace("\\\n", ""))


def test_a_line_is_broken_between_words_and_goes_on_below_its_text():
    shown = fitted("note    one two three four five six", 22)
    assert shown == "note    one two three\n        four five six"
    shown = fitted("  seed: must be an integer, not one and a half", 30)
    assert shown == "  seed: must be an integer,\n        not one and a half"
    shown = fitted("done    val/acc1 0.5  val/loss 2.3  val/samples 8", 40)
    assert shown == "done    val/acc1 0.5  val/loss 2.3\n        val/samples 8"


def test_a_command_can_be_copied_from_several_lines():
    command = "python -m distdl resume outputs/default/x trainer.max_epochs=3 'data.root=a b'"
    shown = fitted(f"next    {command}", 50)
    assert max(map(len, shown.splitlines())) <= 50
    assert split_as_a_shell(shown.removeprefix("next")) == shlex.split(command)
    before, _, typed = fitted(f"It has finished. To train longer: {command}", 50).partition("\n")
    assert before == "It has finished. To train longer:"
    assert split_as_a_shell(typed) == shlex.split(command)


def test_what_cannot_be_broken_stays_whole():
    path = "/a/" + "b" * 70
    assert path in fitted(f"the weights of {path} are gone", 60).split()
    assert fitted("a " * 100, None) == "a " * 100, "a file has no width"


def test_a_long_word_does_not_stand_behind_a_wide_label():
    word = "c" * 30
    shown = fitted(f"a long label here:  {word} {word}", 38)
    assert max(map(len, shown.splitlines())) <= 38


def test_wide_characters_take_two_places():
    assert fitted("名前 名前 名前", 10) == "名前 名前\n名前"
