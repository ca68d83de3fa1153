"""The site of the documents (`make docs`): its pages, its links, its reference."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from PIL import Image

from distdl.cli.main import COMMANDS
from distdl.util.refusal_codes import CODES
from tests.conftest import ROOT, matrix_only
from website import build, pictures, reference
from website.pages import copied, pages_of

PAGES = pages_of(ROOT)
START = [page for page in PAGES if page.startswith("docs/") and page != "docs/index.md"]


def page_of(tmp_path: Path, text: str, repository: str = "") -> str:
    """What becomes of a document in docs/launchers."""
    (tmp_path / "docs/launchers").mkdir(parents=True)
    (tmp_path / "docs/launchers/mine.md").write_text(text)
    (tmp_path / "src").mkdir()
    pages = {"docs/launchers/mine.md": "launchers/mine.md", "docs/jobs.md": "jobs.md"}
    pages["README.md"] = "index.md"
    return copied(tmp_path, "docs/launchers/mine.md", pages, repository)


def test_links_lead_to_pages(tmp_path):
    text = "See [jobs](../jobs.md#state), [the\nREADME](../../README.md) and [us](https://a.b/c).\n"
    page = page_of(tmp_path, text)
    assert "[jobs](../jobs.md#state)" in page
    assert "[the\nREADME](../index.md)" in page
    assert "[us](https://a.b/c)" in page


def test_what_has_no_page_is_text_or_leads_to_the_repository(tmp_path):
    text = "In [`src`](../../src) is [a file](../../src/a.py).\n"
    assert page_of(tmp_path / "1", text) == "In `src` is a file.\n"
    page = page_of(tmp_path / "2", text, "https://host/us/distdl/")
    assert "[`src`](https://host/us/distdl/tree/main/src)" in page
    assert "(https://host/us/distdl/edit/main/docs/launchers/mine.md)" in page
    assert "[a file](https://host/us/distdl/blob/main/src/a.py)" in page


def test_code_stays_as_it_is(tmp_path):
    text = "`[a](../../src)`\n\n```yaml conf/x.yaml\na: '[b](../../src)'\n```\n"
    page = page_of(tmp_path, text)
    assert "`[a](../../src)`" in page
    assert "```yaml title=\"conf/x.yaml\"\na: '[b](../../src)'\n```" in page


def test_the_navigation_leads_to_every_document():
    settings = tomllib.loads(build.SETTINGS.read_text())
    listed = [*build.in_navigation(settings["project"]["nav"])]
    assert sorted({*PAGES.values()} - {*listed}) == []
    assert len(listed) == len({*listed})


@pytest.mark.parametrize("document", START)
def test_a_page_starts_with_what_it_is_for_and_a_command(document):
    _, _, text = (ROOT / document).read_text().partition("\n")
    start, _, _ = text.partition("\n## ")
    first, block, _ = start.strip().partition("```")
    assert first.strip(), "a sentence before the first command"
    assert block


def test_the_reference_has_every_command_option_and_code():
    commands = reference.commands()
    assert [name for name in COMMANDS if f"\n## {name}\n" not in commands] == []
    assert "### jobs cancel" in commands
    assert "--attempt" in commands
    config = reference.config(ROOT)
    options = (ROOT / "conf").glob("*/*.yaml")
    assert [path for path in options if f"### {path.parent.name}={path.stem}" not in config] == []
    assert "every_minutes: " in config
    refusals = reference.refusals()
    assert [code for code in CODES if f"\n## {code}\n" not in refusals] == []


@matrix_only
def test_the_pictures_are_drawn_anew(tmp_path):
    if pictures.CHROMIUM is None:
        pytest.skip("no chromium")
    pictures.write(tmp_path / "work", tmp_path / "pictures")
    for page, height in pictures.HEIGHTS.items():
        with Image.open(tmp_path / f"pictures/{page}.png") as image:
            assert image.size == (pictures.WIDTH, height)
            assert len(image.getcolors()) > 8, "it is not empty"


class Links(HTMLParser):
    """The links and anchors of a page."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.sources: list[str] = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors.add(values.get("id") or "")
        if tag == "a" and values.get("href"):
            self.links.append(str(values["href"]))
        if tag in ("script", "img", "link"):
            self.sources.append(str(values.get("src") or values.get("href") or ""))


@matrix_only
def test_the_site_has_no_dead_link_and_asks_no_other_server(tmp_path):
    if not (ROOT / ".servers/docs/.ready").exists():
        pytest.skip("make .servers/docs")
    command = [sys.executable, "-m", "website.build", "--to", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {page: Links(page) for page in (tmp_path / "site").rglob("*.html")}
    assert len(pages) > len(PAGES)
    for page, found in pages.items():
        assert [each for each in found.sources if "//" in each] == []
        for link in found.links if page.name != "404.html" else ():
            parts = urlsplit(link)
            if parts.scheme or not (parts.path or parts.fragment):
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            assert target.is_file() or (target / "index.html").is_file(), (page, link)
            if parts.fragment and target in pages:
                assert unquote(parts.fragment) in pages[target].anchors, (page, link)
    listed = (tmp_path / "site/external_links.txt").read_text().split()
    assert "https://prices.azure.com" in listed
    assert [each for each in listed if not re.match("https?://", each)] == []
