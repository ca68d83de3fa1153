"""The documents: links lead somewhere, commands compose, every option on disk is mentioned."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from distdl.cli import main as command_line
from distdl.config import compose
from distdl.config.words import check
from distdl.validation.validate import problems_of
from tests.conftest import ROOT

FOLDERS = (".", "docs", "examples", "benchmarks")
PAGES = sorted(
    page
    for folder in FOLDERS
    for page in (ROOT / folder).glob("*.md" if folder == "." else "**/*.md")
    if "outputs" not in page.parts
)
FENCE = re.compile(r"^```(\w*) ?(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
# What a reader puts something of his own for. /path/to/... composes, it is only no folder.
PLACEHOLDER = re.compile(r"\bRUN\b|<|\.\.\.|\bDIR\b")
VERBS_WITH_OVERRIDES = ("resume",)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@dataclass(frozen=True)
class Command:
    """A distdl command line of a document."""

    page: Path
    folder: str  # where the reader is, by the `cd` lines before it
    words: tuple[str, ...]
    files: dict[str, str] = field(hash=False, default_factory=dict)
    shell: tuple[str, ...] = ()  # what copies and edits files, before it

    def __str__(self) -> str:
        return f"{name(self.page)}: {' '.join(self.words)}"[:120]


def commands(page: Path) -> Iterator[Command]:
    text = page.read_text()
    files = {path: body for _, path, body in FENCE.findall(text) if path}
    shell: list[str] = []
    for language, path, body in FENCE.findall(text):
        if path or language not in ("bash", "console", ""):
            continue
        folder = name(page.parent) if page.is_relative_to(ROOT / "examples") else "."
        for line in body.replace("\\\n", " ").splitlines():
            try:
                words = shlex.split(line.removeprefix("$ "), comments=True)
            except ValueError:  # prose, or a message
                continue
            if words[:1] == ["cd"]:
                folder = words[1]
            if words and words[0] in ("mkdir", "cp", "sed"):
                shell.append(line)
            found = arguments(words)
            refused = line.startswith("$ ")  # a transcript, whose answer stands below it
            if found is not None and not refused:
                yield Command(page, folder, found, files, tuple(shell))


def arguments(words: list[str]) -> tuple[str, ...] | None:
    """What follows `distdl` in `A=1 torchrun -n 2 -m distdl ...`, None for another command."""
    while words and re.match(r"^[A-Z_]+=", words[0]):
        words = words[1:]
    program = Path(words[0]).name if words else ""
    if words[:1] == ["distdl"]:
        return tuple(words[1:])
    starts = (program.startswith("python") and words[1:2] == ["-m"]) or program == "torchrun"
    if starts and "distdl" in words:
        return tuple(words[words.index("distdl") + 1 :])
    return None


ALL = [command for page in PAGES for command in commands(page)]
DISTINCT = {(command.folder, command.words, *command.files): command for command in ALL}


def compose_all(words: list[str]) -> Iterator[tuple[str, list[object]]]:
    """Every config that a command line means, with what stage 1 finds wrong with it."""
    options = command_line.parse(words)
    check(options.overrides)
    jobs = [options.overrides]
    swept = compose.sweep_keys(options.overrides)
    assert bool(swept) == options.multirun, f"-m and several values belong together: {words}"
    if options.multirun:
        jobs = compose.sweep(options.overrides)
    for job in jobs:
        yield " ".join(job), list(problems_of(compose.compose(job), local=True))


@pytest.mark.parametrize("command", DISTINCT.values(), ids=str)
def test_commands_compose(command, tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("DISTDL_CONF", raising=False)
    words = list(command.words)
    if command.folder != ".":
        monkeypatch.chdir(ROOT / command.folder)
    else:
        monkeypatch.chdir(tmp_path)
        for line in (None, *command.shell):  # what is copied may be written anew below
            if line:
                subprocess.run(["bash", "-ec", line], check=True)
            for path, body in command.files.items():
                (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / path).write_text(body)
    if words and words[0] in command_line.COMMANDS:
        words = [w for w in words if "=" in w] if words[0] in VERBS_WITH_OVERRIDES else []
    elif any(PLACEHOLDER.search(w) for w in words) or words[:1] in (["--help"], ["-sc"]):
        return
    for job, found in compose_all(words):
        # What is not a part of `all`, such as wandb, may be missing here.
        problems = [problem for problem in found if "not installed" not in problem.what]
        assert not problems, f"{job}: {'; '.join(map(str, problems))}"


def test_there_are_commands() -> None:
    """Should the search break, nothing would be tested, and nobody would know."""
    pages = {name(command.page) for command in ALL}
    assert {"README.md", "CONTRIBUTING.md", "docs/runs.md", "docs/command-line.md"} <= pages
    assert any("-m" in command.words for command in ALL)
    assert any(command.folder == "examples/my_project" for command in ALL)
    assert any(command.words[:1] == ("resume",) for command in ALL)
    assert len(DISTINCT) > 40


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page) -> None:
    text = FENCE.sub("", page.read_text())
    for target in LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{name(page)} links to {target}"
        if anchor:
            assert anchor in anchors(linked), f"{name(page)} links to {target}"


def anchors(page: Path) -> set[str]:
    """Headings as GitHub names them."""
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs/index.md").read_text()
    for page in sorted((ROOT / "docs").glob("*.md")):
        assert page.name == "index.md" or f"({page.name})" in index, page.name


def test_every_option_is_mentioned() -> None:
    text = "\n".join(page.read_text() for page in PAGES if page.parent != ROOT / "benchmarks")
    options = {(path.parent.name, path.stem) for path in (ROOT / "conf").glob("*/*.yaml")}
    lists = set(re.findall(r"(\w+)=\[?([\w,]+)", text))
    said = {(group, option) for group, found in lists for option in found.split(",")}
    missing = sorted(f"{group}={option}" for group, option in options - said)
    assert not missing, f"in no document: {', '.join(missing)}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_nothing_of_one_machine(page) -> None:
    found = re.findall(r"(?<![\w.])/(?:home|root|work|Users|mnt|tmp)/\S*", page.read_text())
    assert not found, f"{name(page)} names folders of one machine: {', '.join(found)}"


def test_what_the_architecture_names_is_there() -> None:
    """Each `package/file.py` of the page exists, and so does the function or class behind it."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    named = re.findall(r"`([a-z_/]+\.py)`(?:\s+\(`(\w+)`\))?", page)
    assert len(named) > 30
    for path, inside in named:
        file = next((p for p in (ROOT / "src/distdl" / path, ROOT / path) if p.is_file()), None)
        assert file, path
        defined = re.compile(rf"^(?:def|class) {inside}\b", re.MULTILINE)
        assert not inside or defined.search(file.read_text()), f"{path}: {inside}"
