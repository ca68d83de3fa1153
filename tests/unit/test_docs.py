"""The documents: links lead somewhere, commands compose, every option on disk is mentioned."""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

from distdl.cli import completion_index
from distdl.cli import main as command_line
from distdl.config import compose, consent, grammar
from distdl.config.hints.words import check
from distdl.validation.validate import problems_of
from tests.conftest import ROOT

PATTERNS = ("*.md", "docs/**/*.md", "examples/**/*.md", "benchmarks/**/*.md")
FOUND = (page for pattern in PATTERNS for page in ROOT.glob(pattern))
PAGES = sorted(page for page in FOUND if "outputs" not in page.parts)
FENCE = re.compile(r"^```(\w*) ?(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
# What a reader puts something of his own for. /path/to/... composes, it is only no folder.
PLACEHOLDER = re.compile(r"\bRUN\b|<|\.\.\.|\bDIR\b")
COMPOSE = ("resume", "plan", "scale", "doctor")  # verbs whose `key=value` are a config's


def name(page):
    return str(page.relative_to(ROOT))


@dataclass(frozen=True)
class Command:
    """A distdl command line of a document."""

    page: Path
    folder: str  # where the reader is, by the `cd` lines before it
    words: tuple[str, ...]
    files: dict[str, str] = field(hash=False)
    shell: tuple[str, ...]  # what copies and edits files, before it

    def __str__(self):
        return f"{name(self.page)}: {' '.join(self.words)}"[:120]


def commands(page):
    blocks = FENCE.findall(page.read_text())
    files = {path: body for _, path, body in blocks if path}
    shell = []
    for language, path, body in blocks:
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
            # Below `$ ` stands the answer, which may be a refusal.
            if (typed := arguments(words)) is not None and not line.startswith("$ "):
                yield Command(page, folder, typed, files, tuple(shell))


def arguments(words):
    """What follows `distdl` in `A=1 torchrun -n 2 -m distdl ...`, None for another command."""
    words = [*itertools.dropwhile(re.compile("^[A-Z_]+=").match, words)]
    program = Path(words[0]).name if words else ""
    starts = (program.startswith("python") and words[1:2] == ["-m"]) or program == "torchrun"
    if words[:1] == ["distdl"] or (starts and "distdl" in words):
        return tuple(words[words.index("distdl") + 1 :])
    return None


ALL = [command for page in PAGES for command in commands(page)]
DISTINCT = {(command.folder, command.words, *command.files): command for command in ALL}
assert len(DISTINCT) > 40, "should the search break, nothing would be tested"


VERBS = cache(completion_index.verbs)


def unknown_options(words):
    """Those of a verb's options that it does not have, by what the TAB key completes."""
    own = [*itertools.takewhile(lambda word: word != "--", words)]  # the rest is a program's
    verb = VERBS()[own[0]]
    if inner := verb.get("verbs"):
        verb = inner[own[1]]
    options = [word.partition("=")[0] for word in own if word.startswith("-")]
    return [option for option in options if option not in verb["options"]]


@pytest.mark.parametrize("command", DISTINCT.values(), ids=str)
def test_commands_compose(command, tmp_path, monkeypatch):
    monkeypatch.delenv("DISTDL_CONF", raising=False)
    words = [word for word in command.words if word != "--json"]  # of every command
    monkeypatch.chdir(tmp_path if command.folder == "." else ROOT / command.folder)
    for line in ("", *command.shell) if command.folder == "." else ():
        if line:
            subprocess.run(["bash", "-ec", line], check=True)
        for path, body in command.files.items():  # what was copied may be written anew here
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(body)
    if words and words[0] in command_line.COMMANDS:
        assert unknown_options(words) == []
        if words[0] not in COMPOSE:
            return
        words = [word for word in words[1:] if re.match(r"[^-\s]\S*=", word)]
        if not words:
            return
    elif any(PLACEHOLDER.search(word) for word in words) or words[:1] in (["--help"], ["-sc"]):
        return
    options = command_line.parse(words)
    check(options.overrides)
    overrides = grammar.parse_overrides(options.overrides)
    swept = bool(grammar.sweep_keys(overrides))
    assert swept == options.multirun, f"-m and several values belong together: {words}"
    jobs = compose.sweep(overrides) if swept else [options.overrides]
    for job in jobs[:: max(1, len(jobs) - 1)]:  # the first and the last
        # What is not a part of `all`, such as wandb, may be missing here.
        config = compose.compose(job)
        consent.refuse(config, compose.typed(config))
        problems = problems_of(config, local=True)
        assert [p for p in problems if "not installed" not in p.what] == [], job


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere_and_nothing_is_of_one_machine(page):
    text = page.read_text()
    assert re.findall(r"(?<![\w.])/(?:home|root|work|Users|mnt|tmp)/\S*", text) == []
    for target in LINK.findall(FENCE.sub("", text)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


def anchors(page):
    """Headings as GitHub names them."""
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_page_is_in_the_index_and_every_option_is_mentioned():
    index = (ROOT / "docs/index.md").read_text()
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert [page for page in pages if f"({page})" not in index] == []
    text = "\n".join(page.read_text() for page in PAGES if page.parent != ROOT / "benchmarks")
    options = {(path.parent.name, path.stem) for path in (ROOT / "conf").glob("*/*.yaml")}
    lists = re.findall(r"(\w+)=\[?([\w,]+)", text)
    mentioned = {(group, option) for group, names in lists for option in names.split(",")}
    assert options - mentioned == set()
