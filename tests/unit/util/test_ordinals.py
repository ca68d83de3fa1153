"""1st, 2nd, 3rd."""

from distdl.util.ordinals import ordinal


def test_ordinals():
    numbers = (1, 2, 3, 4, 11, 12, 13, 21, 22, 101, 112)
    expected = "1st 2nd 3rd 4th 11th 12th 13th 21st 22nd 101st 112th"
    assert " ".join(map(ordinal, numbers)) == expected
