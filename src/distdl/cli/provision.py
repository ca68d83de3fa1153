"""`python -m distdl provision azureml`: create or complete a workspace for training.

The command prints a plan, asks, changes only what differs, and deletes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from distdl.cli.arguments import Parser
from distdl.util.answers import Answer
from distdl.util.errors import Problem, UserError
from distdl.util.screen import say
from distdl.util.suggest import closest

SPECIAL = ("sas", "prices")
USAGE = """\
usage: python -m distdl provision azureml [key=value ...]
       python -m distdl provision azureml sas account=NAME container=NAME [days=1]
       python -m distdl provision azureml prices [location=REGION]

Creates or completes an Azure ML workspace: virtual network, private endpoints, storage, container
registry, key vault, identity and roles, compute. Prints a plan, asks for "yes" (or confirm=true),
changes only what differs and deletes nothing. dry_run=true prints the resources without an account.

  python -m distdl provision azureml resource_group=ml workspace=vision dry_run=true
  python -m distdl provision azureml resource_group=ml workspace=vision private=false

"""


@dataclass(frozen=True)
class Provisioned:
    """What Azure has now."""

    SCHEMA: ClassVar[str] = "provision/1"

    text: str
    """What people are shown at the end: the next command, a signed address, or the prices."""


def main(argv: Sequence[str]) -> Answer:
    """Provisions a platform."""
    parser = Parser("python -m distdl provision", add_help=False)
    parser.add_argument("words", nargs="*", default=[])
    parser.add_argument("-h", "--help", action="store_true")
    options = parser.parse_args(argv)
    platform, *words = options.words or [""]
    special = words[0] if words and words[0] in SPECIAL else ""
    if platform and platform != "azureml" and not options.help:
        raise UserError.at(
            platform,
            what="is not a platform that distdl can provision",
            remedy="python -m distdl provision azureml --help",
            code="wrong-choice",
        )
    near = "" if special or not words or "=" in words[0] else closest(words[0], SPECIAL)
    if near:
        raise UserError.at(
            words[0],
            what="is neither a word of provision azureml nor key=value",
            remedy=f"did you mean: python -m distdl provision azureml {near}",
            code="unknown-key",
        )
    from distdl.launchers.azureml import prices
    from distdl.launchers.azureml.provision import sas, settings

    helps = {"sas": sas.HELP, "prices": prices.HELP, "": USAGE + settings.text()}
    if options.help or not platform:
        say(helps[special])
        return Answer(Provisioned(helps[special]))
    if special:
        text = (sas.run if special == "sas" else prices.run)(values(words[1:]))
        print(text)
        return Answer(Provisioned(text))
    from distdl.launchers.azureml.provision import command

    code, text = command.run(values(words))
    print(text)
    return Answer(Provisioned(text), code)


def values(words: Sequence[str]) -> dict[str, Any]:
    """Parses key=value in Hydra's grammar, as everywhere else; each word must set one value."""
    from distdl.config import grammar

    settings: dict[str, Any] = {}
    problems = []
    for override in grammar.parse_overrides(list(words)):
        key = override.key_or_group
        if override.is_delete() or override.is_add() or override.is_sweep_override():
            problems.append(
                Problem(
                    key, what="must set one value", remedy=f"write {key}=VALUE", code="incomplete"
                )
            )
        elif isinstance(value := override.value(), dict):
            settings |= {f"{key}.{name}": item for name, item in value.items()}
        else:
            settings[key] = value
    if problems:
        raise UserError(*problems)
    return settings
