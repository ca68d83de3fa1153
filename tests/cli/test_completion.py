"""The TAB key: what is offered, from which files, by which imports, and in real shells (pty)."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from distdl.cli import completing, completion_index, config_files
from distdl.cli.completion import SHELLS
from distdl.cli.main import COMMANDS
from distdl.cli.schemas import of_command
from tests.conftest import ROOT, environment, matrix_only

HEAVY = {
    "hydra",
    "omegaconf",
    "torch",
    "pydantic",
    "lightning",
    "mlflow",
    "jinja2",
    "numpy",
    "yaml",
}
TABBED = "from distdl.cli.entry import command; command()"


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Iterator[Path]:
    """A folder with the index of distdl's own files."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DISTDL_CACHE", str(folder))
        patch.chdir(folder)
        config_files._config_files.cache_clear()
        completion_index.make()
    yield folder


@pytest.fixture
def project(cache, tmp_path, monkeypatch) -> Path:
    """A project with options and runs of its own, and the index of distdl's."""
    shutil.copytree(ROOT / "examples/my_project/conf", tmp_path / "conf")
    for run in ("first", "second"):
        (tmp_path / "outputs/forecast" / run / "attempts/001").mkdir(parents=True)
    (tmp_path / "outputs/forecast/notes").mkdir()
    for member in ("a1", "b2"):
        (tmp_path / "outputs/forecast/rates" / member / "attempts/001").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DISTDL_CACHE", str(tmp_path / "cache"))
    (index,) = cache.glob("*.json")
    (tmp_path / "cache").mkdir()
    shutil.copy(index, config_files._path())
    return tmp_path


def offered(line: str) -> list[str]:
    *words, prefix = line.split(" ")
    config_files._config_files.cache_clear()
    found = completing.candidates(words, prefix, config_files.index())
    return sorted(each for each in found if each.startswith(prefix))


@pytest.mark.parametrize(
    "line, expected",
    [
        ("repo", ["report"]),
        ("tra", ["track", "tracking.", "tracking=", "trainer.", "trainer="]),
        ("trainer.prec", ["trainer.precision="]),
        ("trainer.benchmark=", ["trainer.benchmark=false", "trainer.benchmark=true"]),
        ("checkpoint.mode=m", ["checkpoint.mode=max", "checkpoint.mode=min"]),
        ("model=forec", ["model=forecaster"]),
        ("model=resnet18 model.network.zero", ["model.network.zero_init_residual="]),
        ("experiment=forecast model.hid", ["model.hidden="]),
        ("experiment=forecast data.noi", ["data.noise="]),
        ("optimizer=sgd optimizer.mom", ["optimizer.momentum="]),
        ("optimizer=adamw optimizer.mom", []),
        ("callbacks=[default,em", ["callbacks=[default,ema"]),
        ("+experiment=forec", ["+experiment=forecast"]),
        ("~call", ["~callbacks.progress=", "~callbacks="]),
        ("jobs ca", ["cancel"]),
        ("jobs logs --fo", ["--follow"]),
        ("resume outputs/forecast/f", ["outputs/forecast/first"]),
        ("resume outputs/forecast/first trainer.max_ep", ["trainer.max_epochs="]),
        ("resume outputs/forecast/first out", ["output_dir="]),
        ("report outputs/forecast/f", ["outputs/forecast/first"]),
        (
            "compare outputs/forecast/r",
            [f"outputs/forecast/rates{member}" for member in ("", "/a1", "/b2")],
        ),
        ("compare outputs/forecast/first outputs/forecast/s", ["outputs/forecast/second"]),
        ("export outputs/forecast/first --to on", ["onnx"]),
        ("export --to=on", ["--to=onnx"]),
        ("explain unkn", ["unknown-key"]),
        ("schema opti", ["optimizer"]),
        ("schema job", ["jobs"]),
        ("schema spa", ["spaces"]),
        ("schema jobs lo", ["logs"]),
        ("schema tune ", []),
        ("serve outputs/forecast/first serve.po", ["serve.port="]),
        ("plan --js", ["--json"]),
        ("run -- python trai", []),
    ],
)
def test_what_is_offered(line, expected, project):
    assert offered(line) == expected


def test_every_verb_and_option_is_known(project):
    assert {*offered("")} >= {*COMMANDS, "model=", "trainer.", "seed="}
    known = config_files.index()["verbs"]
    assert "--attempt" in known["jobs"]["verbs"]["logs"]["options"]
    assert "--task" in known["new"]["verbs"]["project"]["options"]
    assert "--source" in known["prepare"]["verbs"]["imagenet"]["options"]
    assert offered("prepare ima") == ["imagenet"]


def test_a_file_is_read_again_when_it_has_changed(project, monkeypatch):
    assert offered("model=forecaster model.dep") == []
    file = project / "conf/model/forecaster.yaml"
    file.write_text(f"{file.read_text()}depth: 3\n")
    assert offered("model=forecaster model.dep") == ["model.depth="]
    (project / "conf/model/deeper.yaml").write_text("defaults: [forecaster]\nwidth: 3\n")
    assert offered("model=dee") == ["model=deeper"]
    assert offered("model=deeper model.dep") == ["model.depth="]
    file.unlink()
    assert offered("model=forec") == []
    monkeypatch.setattr(config_files, "_content", lambda path: pytest.fail("nothing has changed"))
    assert offered("model=dee") == ["model=deeper"]


def test_an_index_of_another_version_is_made_again(project, monkeypatch):
    path = config_files._path()
    made = []
    monkeypatch.setattr(config_files, "_make", lambda wait: made.append(wait))
    path.write_text("{}")
    assert offered("model=forec") == ["model=forecaster"]
    known = json.loads(path.read_text())
    path.write_text(json.dumps({**known, "sources": 0}))
    offered("seed")
    assert made == [True, False], "waits for the first one alone"


def test_what_a_terminal_would_obey_is_not_offered(project):
    (project / "conf/model/a\x1b[31m.yaml").write_text("{}")
    assert tab("distdl model=a", project) == []


def tab(line: str, folder: Path, *options: str) -> list[str]:
    """What a shell gets for a line, from a process as it starts it."""
    answer = folder / "answer"
    variables = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_SHELL": "fish",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "DISTDL_CACHE": str(folder / "cache"),
    }
    command = [sys.executable, *options, "-c", TABBED]
    done = subprocess.run(command, cwd=folder, env=environment(**variables), capture_output=True)
    (folder / "said.txt").write_bytes(done.stderr)
    return answer.read_text().split()


def test_a_tab_imports_nothing_heavy(project):
    tab("distdl seed", project)  # the index has this project's files now
    assert tab("distdl trainer.prec", project, "-X", "importtime") == ["trainer.precision="]
    imported = re.findall(r"\| +([\w.]+)$", (project / "said.txt").read_text(), re.MULTILINE)
    assert "argcomplete" in imported
    assert {name.partition(".")[0] for name in imported} & HEAVY == set()
    assert [name for name in imported if name.startswith("distdl.cli.main")] == []


def test_the_command(command, monkeypatch):
    monkeypatch.setattr(completion_index, "make", lambda: None)
    for shell in SHELLS:
        assert "distdl" in command("completion", shell).out
    last = json.loads(command("completion", "bash", "--json").out)
    Draft202012Validator(of_command("completion")).validate(last)
    assert "one of bash, zsh, fish" in command("completion", "powershell").err


class Terminal:
    """A shell under a pty, in which a person types."""

    def __init__(self, words: list[str], folder: Path, **variables: str) -> None:
        self.process, self.stream = pty.fork()
        if self.process == 0:
            os.chdir(folder)
            os.execvpe(words[0], words, environment(TERM="xterm", PS1="$ ", **variables))

    def type(self, text: str) -> None:
        os.write(self.stream, text.encode())

    def read_until(self, text: str, seconds: float = 60) -> str:
        said = ""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if select.select([self.stream], [], [], 0.2)[0]:
                said += os.read(self.stream, 65536).decode("utf-8", "replace")
                if text in re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", said):
                    return said
        raise AssertionError(f"{text!r} is not in {said!r}")

    def close(self) -> None:
        os.kill(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)
        os.close(self.stream)


STARTED = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "-i"],
}
SET_UP = {
    "bash": 'eval "$(distdl completion bash)"',
    "zsh": 'autoload -Uz compinit; compinit -u; eval "$(distdl completion zsh)"',
    "fish": "distdl completion fish | source",
}


@pytest.mark.parametrize(
    "shell", ["bash", *(pytest.param(s, marks=matrix_only) for s in ("zsh", "fish"))]
)
def test_in_a_real_shell(shell, project):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed: make servers")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    home = {"HOME": str(project), "PATH": path, "DISTDL_CACHE": str(project / "cache")}
    terminal = Terminal(STARTED[shell], project, **home)
    try:
        terminal.type(f"{SET_UP[shell]}; echo rea''dy\n")
        terminal.read_until("ready")
        for typed, completed in (
            ("distdl experiment=forec\t", "experiment=forecast"),
            ("model.hid\t", "model.hidden="),
            ("5 trainer.prec\t", "trainer.precision="),
            ("bf16-m\t", "bf16-mixed"),
            ("\x15distdl resume outputs/forecast/se\t", "outputs/forecast/second"),
            ("trainer.max_ep\t", "trainer.max_epochs="),
            ("\x15distdl jobs sta\t", "status"),
        ):
            terminal.type(typed)
            terminal.read_until(completed)
    finally:
        terminal.close()
