"""What all pages share: their templates, and where one is written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup

from distdl.util.errors import UserError
from distdl.util.screen import escaped

if TYPE_CHECKING:
    from jinja2 import Template

HERE = Path(__file__).parent
PART = 1000  # characters at the start of a page that hold its mark


def mark_of(verb: str) -> str:
    """What a page has at its start, by which the verb knows that it wrote it."""
    return f'<meta name="generator" content="distdl {verb}">'


def output_of(to: str | None, folder: Path, verb: str) -> Path:
    """The file to write: `to`, or `<verb>.html` in the folder `to`, or in `folder`.

    Raises:
        UserError: It is a file that the verb did not write.
    """
    output = Path(to).expanduser() if to else folder
    if output.is_dir():
        output = output / f"{verb}.html"
    if output.exists() and mark_of(verb) not in output.read_text(errors="replace")[:PART]:
        raise UserError.at(
            str(output),
            what=f"exists and is not a page of distdl {verb}, so it is not replaced",
            remedy="choose another name: --output FILE",
            code="exists-already",
        )
    return output


def _without_controls(value: object) -> object:
    """A run's text with its control characters written out, as in a terminal; not what a template
    has marked as HTML itself."""
    return escaped(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def template(name: str, folder: Path) -> Template:
    """A template of a folder, which may use those of this package. It escapes every value: a run's
    files may come from anyone."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader([folder, HERE])
    pages = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, finalize=_without_controls
    )
    pages.filters["lines"] = lambda text: Markup("<br>").join(escaped(str(text)).split("\n"))
    return pages.get_template(name)
