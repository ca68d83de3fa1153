"""The table of exit codes in the documents, compared with the one in the code."""

from __future__ import annotations

import re

from distdl.job import JobState
from distdl.ranks.process_exit import KILL_OTHER_RANKS, of_rank
from distdl.util.exit_codes import EXIT_CODES, KILLED, KILLED_MEANS, as_shell
from tests.house import ROOT


def test_the_documents_show_the_table():
    page = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    head, *rows = re.findall(r"^\|(.*)\|$", page.split("## Exit codes")[1], flags=re.M)
    assert head.split("|")[2].strip() == f"A rank under {', '.join(KILL_OTHER_RANKS)}"
    shown = [tuple(cell.strip() for cell in row.split("|")) for row in rows[1:]]
    codes = [(str(code), means, str(of_rank(code, "mpi"))) for code, means in EXIT_CODES.items()]
    assert shown == [*codes, (KILLED, KILLED_MEANS, KILLED)]


def test_every_state_ends_with_a_code_of_the_table():
    assert {state.exit_code for state in JobState} <= {*EXIT_CODES}


def test_a_killed_process_has_the_code_that_a_shell_gives_it():
    assert (as_shell(-9), as_shell(0), as_shell(75)) == (137, 0, 75)
