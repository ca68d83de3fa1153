"""The command line: a verb, or compose -> validate -> launch."""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from distdl import __version__
from distdl.cli import json_output
from distdl.cli.arguments import Parser
from distdl.cli.endings import ending_of
from distdl.config.hints import words
from distdl.config.own_code import in_a_run
from distdl.ranks import process_exit, stopping
from distdl.util import lightning_names
from distdl.util.answers import Answer
from distdl.util.errors import Problem, UserError
from distdl.util.screen import say
from distdl.util.suggest import closest

if TYPE_CHECKING:
    from distdl.config.compose import Composed
    from distdl.launch.sweeps import Ended

# Verbs besides a training: module and one line for --help.
COMMANDS = {
    "new": ("distdl.cli.new", "make a project that trains at once: distdl new project NAME"),
    "run": ("distdl.cli.run", "start a program of your own: distdl run [key=value] -- COMMAND"),
    "resume": ("distdl.cli.resume", "resume a run"),
    "jobs": ("distdl.cli.jobs", "list, follow, cancel or resubmit runs, wherever they are"),
    "prepare": ("distdl.cli.prepare", "write an image data set as shards, from tars or folders"),
    "data": ("distdl.cli.data", "check a data set: what it holds, how fast it can be read"),
    "plan": ("distdl.cli.plan", "recommend a strategy by its memory and traffic; needs no GPU"),
    "doctor": ("distdl.cli.doctor", "examine the hosts, links and devices of a job"),
    "scale": ("distdl.cli.scale", "run the same benchmark on 1, 2, 4 ... devices"),
    "drill": ("distdl.cli.drill", "kill, stop and damage copies of a run: does it survive?"),
    "serve": ("distdl.cli.serve", "answer over HTTP with the model of a run"),
    "export": ("distdl.cli.export", "write the model in a form that answers without distdl"),
    "convert": ("distdl.cli.convert", "write a checkpoint or its weights as one file"),
    "deploy": ("distdl.cli.deploy", "an exported model answers on Azure ML or SageMaker"),
    "provision": ("distdl.cli.provision", "create or complete an Azure ML workspace"),
    "report": ("distdl.cli.report", "write a run's curves and config as one HTML page"),
    "explain": ("distdl.cli.explain", "what the code of a refusal means, and what helps"),
    "schema": ("distdl.cli.schema", "JSON Schemas: of config files for an editor, and of answers"),
    "completion": ("distdl.cli.completion", "what a shell needs to complete at the TAB key"),
    "compare": ("distdl.cli.compare", "what differs between runs, and which one is better"),
    "tune": ("distdl.cli.tune", "search for the best values: each trial is a run"),
    "track": ("distdl.cli.track", "deliver metrics that a tracking server missed"),
}
# Verbs that start runs: a signal that asks them to end is recorded in the run.
STARTING = ("run", "tune", "resume", "scale", "export", "doctor", "drill")
# Flags that Hydra itself handles.
HYDRAS = ("--hydra-help", "--info", "-i", "--shell-completion", "-sc")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 2 for errors that the user can fix."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if json_output.asked(arguments):
            arguments = json_output.without(arguments)
            return json_output.main(arguments, json_output.name_of(arguments, [*COMMANDS]), answer)
        answered = answer(arguments)
        return answered.exit_code if isinstance(answered, Answer) else answered
    except (UserError, KeyboardInterrupt) as error:
        ending = ending_of(error)
        say(ending.text, to=sys.stderr)
        return ending.exit_code
    except BrokenPipeError:  # `distdl --help | head`: the reader has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def answer(arguments: list[str]) -> Answer | int:
    """What one command found or did. Prints it for people."""
    verb = arguments[0] if arguments and arguments[0] in COMMANDS else ""
    if in_a_run(Path.cwd()):  # `python -m` imports from it; a run may be somebody else's
        sys.path[:] = [p for p in sys.path if p and Path(p) != Path.cwd()]
    lightning_names.serve()
    starts = not verb or verb in STARTING
    if starts and not {"-h", "--help"} & {*arguments}:
        process_exit.survive_closed_pipes()
    if not verb and any(a.split("=")[0] in HYDRAS for a in arguments):
        return hydra_itself(arguments)
    with stopping.raise_on_signal() if starts else nullcontext():
        if not verb:
            return run(arguments)
        module = importlib.import_module(COMMANDS[verb][0])
        answered: Answer | int | None = module.main(arguments[1:])
        return answered or 0


def run(
    arguments: list[str], further: Sequence[str] = (), *, program: bool = False
) -> Answer | int:
    """A run of what the overrides compose. `further` overrides come last, and are no words of a
    user's. `program`: it must be a program."""
    from distdl.ranks import environment

    # Before the options are parsed, because they may be those of a misspelt command.
    first = [*itertools.takewhile(lambda word: not word.startswith("-"), arguments)]
    words.check(first, COMMANDS)
    options = parse(arguments)
    if options.help or not (arguments or program):
        from distdl.cli import help as texts

        chosen = any(word.startswith("launcher=") for word in options.overrides)
        if chosen:
            say(texts.of_launcher(options.overrides, options.config_dir))
        else:
            say(texts.text(COMMANDS))
        return 0
    if options.version:
        say(f"distdl {__version__}")
        return 0
    if len(first) < len(options.overrides):  # some stand behind an option
        words.check(options.overrides, COMMANDS)
    options.overrides += further
    if options.cfg:
        return show_config(options)
    started_by = environment.detect()
    if started_by and options.multirun:
        raise UserError.at(
            "-m",
            what=f"a sweep starts its own processes, and {started_by} has started several already",
            remedy="python -m distdl -m ...",
            code="conflict",
        )
    if started_by:
        from distdl.launch import external

        return external.train(options.overrides, options.config_dir)
    from distdl.config import compose, grammar, programs

    overrides = grammar.parse_checked(options.overrides)
    if options.multirun:
        from distdl.launch import sweeps

        return sweeps.main(overrides, options.config_dir, show_members)
    if keys := grammar.sweep_keys(overrides):
        raise UserError.at(
            ", ".join(keys),
            what="several values, and no sweep",
            remedy="add -m to run each of them; a list is written [a,b]",
            code="ambiguous",
        )
    composed = compose.composed(overrides, options.config_dir)
    if program:
        programs.refuse_none(composed.config)
    return launch(composed)


def show_members(results: Sequence[Ended]) -> None:
    """The end of a sweep. The core knows no tools, and trains without them."""
    try:
        from distdl.tools.compare import sweep_end
    except ModuleNotFoundError:
        from distdl.launch import sweeps

        sweeps.print_table(results)
    else:
        sweep_end.show(results)


def launch(composed: Composed) -> Answer:
    from distdl.config import user_conf
    from distdl.launch import dry_run, planning
    from distdl.launch import start as launching

    user_conf.print_shadowed()
    planned = planning.plan(composed.config, typed=composed.typed)
    planning.check_classes(planned)
    if planned.config.dry_run:
        return dry_run.answer(planned)
    return launching.answer(planned, [*sys.argv])


class OverridesParser(Parser):
    """The parser of a command without a verb, whose options may be Hydra's or Lightning's."""

    typed: Sequence[str] = ()

    def unknown(self, word: str) -> Problem:
        if not word.startswith("-"):
            return super().unknown(word)
        from distdl.config.recipe import LAYERS
        from distdl.config.schema import known_paths

        pairs = itertools.pairwise([*self.typed, ""])
        following = next((after for typed, after in pairs if typed == word), "")
        remedy = words.for_option(word, [*LAYERS, *known_paths()], following)
        near = closest(word.partition("=")[0], self._options())
        remedy = remedy or (f"did you mean: {near}" if near else "--help lists the options")
        return Problem(word, what="is not an option of distdl", remedy=remedy, code="unknown-key")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = OverridesParser("python -m distdl", add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*", default=[])
    for flags in (("-h", "--help"), ("--version",), ("-m", "--multirun"), ("--resolve",)):
        parser.add_argument(*flags, action="store_true")
    parser.add_argument("-c", "--cfg", choices=("job", "hydra", "all"))
    parser.add_argument("-p", "--package")
    parser.add_argument("-cd", "--config-dir", action="append", default=[])
    parser.typed = arguments
    return parser.parse_intermixed_args(arguments)


def show_config(options: argparse.Namespace) -> Answer:
    """`--cfg job`: prints the composed config as YAML; with -m that of each job of a sweep."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from distdl.config import compose, grammar
    from distdl.launch.answers import Configs

    jobs = [options.overrides]
    if options.multirun:
        jobs = compose.sweep(grammar.parse_checked(options.overrides), options.config_dir)
    values = []
    for overrides in jobs:
        shown = config = compose.compose(overrides, options.config_dir)
        if len(jobs) > 1:
            print(f"# {' '.join(overrides)}")
        if options.cfg == "hydra":
            shown = config.hydra
        elif options.cfg == "job":
            config.pop("hydra")
        if options.package:
            shown = OmegaConf.select(shown, options.package)
            if shown is None:
                raise UserError.at(
                    "--package", what=f"the config has no {options.package!r}", code="incomplete"
                )
        try:
            plain = not OmegaConf.is_config(shown)
            text = f"{shown}\n" if plain else OmegaConf.to_yaml(shown, resolve=options.resolve)
            print(text, end="")
            values.append(
                shown if plain else OmegaConf.to_container(shown, resolve=options.resolve)
            )
        except OmegaConfBaseException as error:
            raise UserError.at(
                "--resolve", what=str(error).split("\n")[0], code="unreadable"
            ) from error
    return Answer(Configs(values))


def hydra_itself(arguments: list[str]) -> int:
    """Lets Hydra's own main handle its flags (shell completion, --info)."""
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from distdl.config import grammar, user_conf

    user_conf.register()
    sys.argv = ["distdl", *arguments]
    answer = hydra.main(config_path="pkg://distdl.conf", config_name="distdl", version_base="1.3")
    try:
        answer(lambda config: None)()
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError.at("", what=grammar.first_lines(error), code="unreadable") from error
    return 0
