"""The command that `plan` advises."""

from distdl.cli import plan
from distdl.tools.measure import plan_table
from tests.conftest import TINY


def test_the_advice_of_plan_is_one_line_that_can_be_copied(capsys):
    typed = [*TINY, "strategy=fsdp", "tags=[my run]", "data.train_samples=640"]
    plan.main([*typed, "--devices", "8", "--link", "0.01", "--tflops", "0.001"])
    printed = capsys.readouterr().out
    (command,) = (line for line in printed.splitlines() if "python -m distdl" in line)
    assert "'tags=[my run]'" in command
    assert command.count("strategy=") == printed_keys(command)
    assert command.strip().startswith("python -m distdl ")
    (reason,) = (line for line in printed.splitlines() if "on this link" in line)
    assert reason.endswith(".")
    assert len(reason) > 160, "as one line, however long"
    assert plan_table.command(
        ["strategy=fsdp", "strategy.sharding=x", "+a=1 2"], ["strategy=ddp"]
    ) == ("python -m distdl '+a=1 2' strategy=ddp")


def printed_keys(command):
    return len({word.partition("=")[0] for word in command.split() if "strategy=" in word})
