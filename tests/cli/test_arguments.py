"""What argparse refuses, of every verb: one problem with what to type, and no usage."""

from __future__ import annotations

import argparse

import pytest

from distdl.cli import main as command_line
from distdl.cli.arguments import Parser
from tests.house import FILES, package

REFUSED = """
report | report: missing: RUN [missing-key] | optional: --output FILE
report r --outptu x | --outptu: is not an option of report [unknown-key] | did you mean: --output
report a b | b: is one word too many for report | python -m distdl report RUN
jobs | jobs: missing: VERB [missing-key] | python -m distdl jobs list|status|
jobs lst | jobs: there is no 'lst' [wrong-choice] | did you mean list?
jobs wait | jobs wait: missing: RUN [missing-key] | optional: OVERRIDES, --attempt N
jobs logs r --folow | --folow: is not an option of jobs | did you mean: --follow
convert x --to | --to: needs a value [missing-key] | --to TO
convert x --to ddp --world-size a | --world-size: must be a whole number, not 'a' [wrong-type]
export r --to pt3 | --to: there is no 'pt3' [wrong-choice] | did you mean pt2?
deploy azureml | deploy: missing: --name | python -m distdl deploy azureml|sagemaker --name NAME
doctor --expect fast | --expect: must be a number, not 'fast'
drill --seed 1 | drill: missing: RUN|OVERRIDES
data check x --gpu | --gpu: needs a value
prepare imagenet --source a | prepare imagenet: missing: --to | imagenet --source DIR --to OUT
track snyc | track: there is no 'snyc' | did you mean sync?
serve r --max-batch 3 | --max-batch: is not an option of serve | serve.max_batch=VALUE
plan --foo | --foo: is not an option of plan | python -m distdl plan --help
jobs status r --folow | --folow: is not an option of jobs status | distdl jobs status --help
new project p q | q: is one word too many for new project | distdl new project NAME
--multirn a=1 | --multirn: is not an option of distdl | did you mean: --multirun
"""


@pytest.mark.parametrize("line", REFUSED.strip().splitlines())
def test_argparse_refuses(line, capsys):
    words, *expected = line.split(" | ")
    assert command_line.main(words.split()) == 2
    output = capsys.readouterr()
    assert output.err.startswith("distdl: 1 problem, nothing was started\n  "), output.err
    assert "usage:" not in output.err + output.out
    for part in expected:
        assert part in output.err, output.err


def test_a_misspelt_option_that_is_required_is_named(capsys):
    assert command_line.main(["prepare", "folder", "--sorce", "a", "--to", "b"]) == 2
    printed = capsys.readouterr().err
    assert "--sorce: is not an option of prepare folder [unknown-key]\n" in printed
    assert "did you mean: --source" in printed
    assert "prepare folder: missing: --source" in printed
    assert command_line.main(["convert", "--", "--odd.ckpt"]) == 2
    assert "--odd.ckpt" not in capsys.readouterr().err


def test_every_verb_uses_that_parser():
    verbs = {name: path.read_text() for name, path in FILES.items() if package(name) == "cli"}
    # argcomplete asks for a parser of argparse's own, which parses nothing.
    completion = ("distdl.cli.completing", "distdl.cli.completion_index")
    verbs = {name: text for name, text in verbs.items() if name not in completion}
    assert [name for name, text in verbs.items() if "ArgumentParser(" in text] == []
    assert issubclass(Parser, argparse.ArgumentParser)
