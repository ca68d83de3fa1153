"""Builds the site of the documents: `python -m website.build [--to FOLDER]`.

`make docs` does it. The pages are those of docs/, the README and its neighbours, and a reference
that distdl writes about itself. A link that leads nowhere ends the build. Links to files of the
checkout lead to the address in $DISTDL_REPOSITORY (`https://HOST/OWNER/NAME`); without it they are
plain text, and no page has a link to edit it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from website import reference
from website.pages import copied, external, pages_of

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = Path(__file__).with_name("zensical.toml")
ZENSICAL = ROOT / ".servers/docs/bin/zensical"


def main() -> int:
    parser = argparse.ArgumentParser("python -m website.build", description=__doc__)
    parser.add_argument("--to", type=Path, default=ROOT / "build/site", metavar="FOLDER")
    folder = parser.parse_args().to.absolute()
    repository = os.environ.get("DISTDL_REPOSITORY", "")
    sources = folder.with_name(f"{folder.name}-pages")
    write(sources / "docs", repository)
    installed = sources / "python/distdl"  # as a wheel has it, for the reference
    shutil.rmtree(installed, ignore_errors=True)
    shutil.copytree(ROOT / "src/distdl", installed)
    shutil.copytree(ROOT / "launchers", installed / "launchers")
    settings = SETTINGS.read_text(encoding="utf-8")
    if missing := left_out(tomllib.loads(settings), sources / "docs"):
        print(f"{SETTINGS.relative_to(ROOT)}: `nav` lacks {', '.join(missing)}", file=sys.stderr)
        return 1
    if repository:
        settings = settings.replace("[project]", f'[project]\nrepo_url = "{repository}"', 1)
    (sources / "zensical.toml").write_text(settings, encoding="utf-8")
    built = subprocess.run([ZENSICAL, "build", "--clean", "--strict"], cwd=sources, check=False)
    if built.returncode:
        print("the site was not built", file=sys.stderr)
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    shutil.move(sources / "site", folder)
    texts = [page.read_text(encoding="utf-8") for page in (sources / "docs").rglob("*.md")]
    addresses = sorted({address for text in texts for address in external(text)})
    listed = folder / "external_links.txt"
    listed.write_text("".join(f"{each}\n" for each in addresses), encoding="utf-8")
    print(f"{folder}: {len(pages_of(ROOT))} documents; {len(addresses)} links lead elsewhere")
    print(f"look at it: {sys.executable} -m http.server --bind 127.0.0.1 --directory {folder}")
    return 0


def write(to: Path, repository: str) -> None:
    """Writes all pages, and the pictures of docs/."""
    shutil.rmtree(to, ignore_errors=True)
    pages = pages_of(ROOT)
    texts = {page: copied(ROOT, document, pages, repository) for document, page in pages.items()}
    texts["reference/commands.md"] = reference.commands()
    texts["reference/config.md"] = reference.config(ROOT)
    texts["reference/refusals.md"] = reference.refusals()
    texts["reference/python.md"] = reference.python(ROOT)
    for page, text in texts.items():
        (to / page).parent.mkdir(parents=True, exist_ok=True)
        (to / page).write_text(text, encoding="utf-8")
    for picture in (ROOT / "docs").rglob("*"):
        if picture.suffix in (".svg", ".png"):
            copy = to / picture.relative_to(ROOT / "docs")
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(picture, copy)


def left_out(settings: Mapping[str, Any], pages: Path) -> list[str]:
    """The pages that the navigation does not lead to."""
    listed = {*in_navigation(settings["project"]["nav"])}
    return [
        name
        for page in sorted(pages.rglob("*.md"))
        if (name := page.relative_to(pages).as_posix()) not in listed
    ]


def in_navigation(entry: object) -> Iterator[str]:
    """The pages in a part of zensical's `nav`."""
    if isinstance(entry, str):
        yield entry
    elif isinstance(entry, list):
        for each in entry:
            yield from in_navigation(each)
    elif isinstance(entry, dict):
        for each in entry.values():
            yield from in_navigation(each)


if __name__ == "__main__":
    sys.exit(main())
