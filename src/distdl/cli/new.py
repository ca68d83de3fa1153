"""`python -m distdl new project NAME`: a project that trains and passes its tests as it is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from distdl.cli.arguments import Parser, not_empty
from distdl.util.answers import Answer
from distdl.util.screen import escaped, say

# As `tools.project.make` has them, which takes longer to import.
TASKS = ("classify", "detect", "own")


def main(argv: Sequence[str]) -> Answer:
    parser = Parser("python -m distdl new", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    text = "code, configs, data, a test, CI, a Dockerfile, and what an editor needs"
    verb = verbs.add_parser("project", help=text, description=text)
    verb.add_argument("name", metavar="NAME", type=not_empty, help="of the folder")
    text = "a network for images of one class each, or with objects; own: any module (own)"
    verb.add_argument("--task", choices=TASKS, default="own", help=text)
    options = parser.parse_args(argv)
    from distdl.tools.project.make import make

    made = make(Path(options.name), options.task)
    say(escaped(f"{made.folder}: {len(made.files)} files"))
    say(escaped(f"next    {' && '.join(made.next)}"))
    return Answer(made)
