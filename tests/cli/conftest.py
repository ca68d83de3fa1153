"""What the tests of this folder share."""

import pytest


@pytest.fixture
def said(command):
    """All that a command prints, which ends with the exit code `code`."""

    def run(*typed, code=0):
        output = command(*typed)
        assert output.code == code, output
        return output.out + output.err

    return run
