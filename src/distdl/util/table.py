"""The one printer of tables: columns where they fit into the terminal, a block per row where not.

No column is left out and no cell is cut: a log has no width, and a terminal that is too narrow for
the columns gets one line per cell, with the column's name before it.
"""

from __future__ import annotations

from collections.abc import Sequence

from distdl.util.screen import cells_of, escaped, fitted, terminal_width

Row = Sequence[str]

GAP = "  "


def show(columns: Row, rows: Sequence[Row], *, numbers: bool = False, indent: int = 0) -> None:
    """Prints a table for the terminal, or for the log that stdout is; see `text`."""
    shown = text(columns, rows, width=terminal_width(), numbers=numbers, indent=indent)
    print(shown, end="", flush=True)


def text(
    columns: Row,
    rows: Sequence[Row],
    *,
    width: int | None = None,
    numbers: bool = False,
    indent: int = 0,
) -> str:
    """A table as lines, each of which ends with a newline.

    Args:
        columns: The names; a name may be empty.
        rows: A text for each column.
        width: The characters of a line; None: there is no limit.
        numbers: The columns behind the first are aligned at their right.
        indent: Blanks before each line.
    """
    lines = [_printable(columns), *map(_printable, rows)]
    widths = [max(map(cells_of, column)) for column in zip(*lines, strict=True)]
    needed = indent + sum(widths) + len(GAP) * (len(widths) - 1)
    margin = " " * indent
    if width is not None and needed > width:
        blocks = (_block(lines[0], line, margin) for line in lines[1:])
        return fitted("\n".join(blocks), width)
    return "".join(f"{margin}{_aligned(line, widths, numbers)}".rstrip() + "\n" for line in lines)


def markdown(columns: Row, rows: Sequence[Row]) -> str:
    """A table in Markdown, whose columns are aligned."""
    lines = [_printable(columns), *map(_printable, rows)]
    widths = [max(map(cells_of, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    joined = (" | ".join(map(_padded, line, widths)) for line in lines)
    return "".join(f"| {line} |\n" for line in joined)


def _printable(row: Row) -> list[str]:
    """Cells of one line each; other people's names must not move the cursor."""
    return [escaped(" ".join(cell.splitlines())) for cell in row]


def _padded(cell: str, width: int) -> str:
    return cell + " " * (width - cells_of(cell))


def _aligned(line: Row, widths: Sequence[int], numbers: bool) -> str:
    first, *others = map(_padded, line, widths)
    if numbers:
        pairs = zip(line[1:], widths[1:], strict=True)
        others = [" " * (width - cells_of(cell)) + cell for cell, width in pairs]
    return GAP.join([first, *others])


def _block(columns: Row, line: Row, margin: str) -> str:
    """One row of a table that is too wide: a line for each cell that is not empty."""
    width = max(map(cells_of, columns))
    pairs = [(name, cell) for name, cell in zip(columns, line, strict=True) if cell]
    shown = [f"{_padded(name, width)}{GAP}{cell}" if name else cell for name, cell in pairs]
    return "".join(f"{margin}{each}\n" for each in shown)
