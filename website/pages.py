"""Which documents become pages, and where their links lead on the site."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath

# Documents outside docs/ -> their pages.
OUTSIDE = {
    "README.md": "index.md",
    "docs/index.md": "pages.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "AGENTS.md": "project/agents.md",
    "benchmarks/RESULTS.md": "project/results.md",
    "benchmarks/RESULTS_GPU.md": "project/results_gpu.md",
}
FENCE = re.compile(r"^(`{3,})(\w*) ?(\S*)$")
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
ADDRESS = re.compile(r"(?:\]\(|<)(https?://[^)>\s]+)")
CODE = re.compile(r"(`+).*?\1", re.DOTALL)


def pages_of(root: Path) -> dict[str, str]:
    """Document -> page, both relative: to `root`, and to the site."""
    found = {}
    for document in sorted([*root.glob("docs/**/*.md"), *root.glob("examples/*/README.md")]):
        path = document.relative_to(root).as_posix()
        if path.startswith("docs/"):
            found[path] = path.removeprefix("docs/")
        else:
            found[path] = f"examples/{document.parent.name}.md"
    return found | OUTSIDE


def copied(root: Path, document: str, pages: Mapping[str, str], repository: str) -> str:
    """The text of a document's page.

    Args:
        root: The checkout.
        pages: As `pages_of` gives them.
        repository: The address at which the checkout can be looked at; empty: nowhere. Links to
            what has no page lead there; without it, their text stays.
    """
    links = Links(root, document, pages, repository)
    parts = []
    paragraph: list[str] = []  # a link may begin in one line and end in the next
    inside = ""
    for line in (root / document).read_text(encoding="utf-8").splitlines():
        fence = FENCE.match(line.strip())
        if line and not fence and not inside:
            paragraph.append(line)
            continue
        parts += [outside_code("\n".join(paragraph), links.rewritten)] if paragraph else []
        paragraph = []
        if fence and not inside:
            inside = fence[1]
            line = line.replace(fence[0], opened(fence))
        elif line.strip() == inside:
            inside = ""
        parts.append(line)
    parts.append(outside_code("\n".join(paragraph), links.rewritten))
    if links.repository:
        parts += ["", f"[Edit this page]({links.repository}/edit/main/{document})"]
    return "\n".join(parts) + "\n"


def opened(fence: re.Match[str]) -> str:
    """A fence with the name of a file behind its language, as a title."""
    marks, language, file = fence.groups()
    return f'{marks}{language} title="{file}"' if file else f"{marks}{language}"


def outside_code(paragraph: str, act: Callable[[str], str]) -> str:
    """A paragraph whose text, but not its `code`, is replaced. A link's text may have code."""
    held: list[str] = []

    def hold(code: re.Match[str]) -> str:
        held.append(code[0])
        return f"\0{len(held) - 1}\0"

    text = act(CODE.sub(hold, paragraph))
    return re.sub("\0(\\d+)\0", lambda number: held[int(number[1])], text)


class Links:
    """The links of one document."""

    def __init__(
        self, root: Path, document: str, pages: Mapping[str, str], repository: str
    ) -> None:
        self.root = root
        self.folder = PurePosixPath(document).parent
        self.page = PurePosixPath(pages[document])
        self.pages = pages
        self.repository = repository.rstrip("/")

    def rewritten(self, text: str) -> str:
        return LINK.sub(self._link, text)

    def _link(self, link: re.Match[str]) -> str:
        image, text, target = link.groups()
        path, _, anchor = target.partition("#")
        if "://" in target or target.startswith("mailto:") or not path:
            return link[0]
        document = os.path.normpath(self.folder / path)
        page = self.pages.get(document)
        if page is None and document.startswith("docs/") and not document.endswith(".md"):
            page = document.removeprefix("docs/")  # a picture
        if page is not None:
            to = os.path.relpath(page, self.page.parent)
            return f"{image}[{text}]({to}{f'#{anchor}' if anchor else ''})"
        if not self.repository:
            return text
        kind = "tree" if (self.root / document).is_dir() else "blob"
        return f"[{text}]({self.repository}/{kind}/main/{document})"


def external(text: str) -> list[str]:
    """The addresses that a document's links lead to."""
    return ADDRESS.findall(text)
