"""The one printer of tables, at the widths that terminals have."""

from __future__ import annotations

import pytest

from distdl.distributed import rank_table
from distdl.launch import job_status
from distdl.tools.doctor import rows as doctor_rows
from distdl.tools.drill import table as drill_table
from distdl.tools.drill.subjects import Training
from distdl.tools.drill.trial import FaultRow
from distdl.util import table
from tests.house import FILES

COLUMNS = ("strategy", "nodes x devices", "images/s", "communication", "verdict", "$ an epoch")
ROWS = [
    ("ddp", "1 x 2", "1,204.5", "3.1 %", "compute", "$0.40"),
    ("deepspeed_zero3 with an offload", "16 x 8", "90,000.0", "45.0 %", "communication", "-"),
]


@pytest.fixture
def terminal(monkeypatch):
    """Makes stdout a terminal of a width."""

    def of(width):
        monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
        monkeypatch.setenv("COLUMNS", str(width))

    return of


@pytest.mark.parametrize("width", [60, 80, 160])
def test_nothing_is_cut_at_any_width(width, terminal, capsys):
    terminal(width)
    table.show(COLUMNS, ROWS, numbers=True)
    shown = capsys.readouterr().out
    assert all(len(line) <= width for line in shown.splitlines())
    assert all(name in shown for name in COLUMNS)
    assert all(cell in shown for row in ROWS for cell in row)
    assert len(shown.splitlines()) == (3 if width == 160 else 13)  # two blocks, a line between


def test_columns_and_numbers_are_aligned():
    assert table.text(("name", "count"), [("a", "5"), ("long", "1,000")], numbers=True) == (
        "name  count\n"  # keeps the rows in line
        "a         5\n"
        "long  1,000\n"
    )


def test_a_block_names_each_cell_and_skips_empty_ones():
    shown = table.text(("", "state", "run"), [("lr=1", "failed", ""), ("b", "", "r")], width=14)
    assert shown == "lr=1\nstate  failed\n\nb\nrun    r\n"


def test_a_log_has_no_width(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "20")
    table.show(COLUMNS, ROWS)
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_cells_of_others_do_not_move_the_cursor_and_wide_letters_count_twice():
    shown = table.text(("run", "n"), [("a\x1b[2J\nb", "1"), ("\u732b\u732b", "2")])
    assert shown.splitlines() == [
        "run         n",
        "a\\x1b[2J b  1",
        "\u732b\u732b        2",
    ]


@pytest.mark.parametrize("width", [60, 80, 160])
def test_the_tables_of_verbs(width, terminal, capsys):
    terminal(width)
    run = "outputs/resnet50_imagenet/2026-11-23_05-54-09-e3f69a86"
    rows = [(run, "2", "FAILED", "slurm://1234", "2026-11-23 05:54", "val/acc1 0.71")]
    table.show(job_status.COLUMNS, rows)
    kill = FaultRow("kill_rank", named="rank 1", rightly=True, survived=True, difference=0.0)
    drill_table.show([kill], Training.columns)
    fail = doctor_rows.Finding("link", "host-a to host-b", "fail", 1.5, "GB/s", "see the switch")
    print(doctor_rows.table([fail]))
    shown = capsys.readouterr().out
    for word in (run, "val/acc1 0.71", "rightly: rank 1", "bit-equal", "host-a to host-b"):
        assert word in shown
    assert all(len(line) <= max(width, len(run) + 9) for line in shown.splitlines())


def test_the_table_of_ranks_is_written_to_a_log():
    facts = {
        "host": "h",
        "pid": 1,
        "device": "cpu",
        "interconnect": "",
        "sources": {"rank": "me"},
        "node": 0,
        "local": 0,
        "main": "h:1",
        "launcher": "local",
        "settings": {},
    }
    shown = rank_table.table([facts | {"rank": 0}, facts | {"rank": 1}])
    assert shown.splitlines()[:3] == [
        "rank  node  local  host  pid  device",
        "0     0     0      h     1    cpu",
        "1     0     0      h     1    cpu",
    ]


def test_nobody_else_draws_a_table():
    drawing = {
        name
        for name, path in FILES.items()
        if "rich.table" in (text := path.read_text(encoding="utf-8")) or ".ljust(w" in text
    }
    assert drawing == {"distdl.util.progress_bar"}  # a bar's columns
