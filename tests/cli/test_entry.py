"""The command as a process: its first moments, whatever the folder holds, and its end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import distdl

INTERRUPT = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"


@pytest.mark.parametrize("name", ["logging.py", "numpy/__init__.py"])
def test_a_file_with_the_name_of_a_module_that_others_need(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("x = 1\n")
    # The second stage is in a child process: two devices.
    typed = ("model=resnet18", "trainer.devices=2", "trainer.accelerator=cpu")
    done = distdl(*typed, cwd=tmp_path, fresh=True)
    assert done.returncode == 2 and done.stdout == ""
    assert "distdl: 1 problem, nothing was started" in done.stderr and len(done.stderr) < 1000
    assert f"{file}: hides /" in done.stderr, done.stderr
    assert "give it another name" in done.stderr and "Traceback" not in done.stderr


def test_ctrl_c_during_the_first_imports_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "argparse.py").write_text(INTERRUPT)
    done = distdl("--help", cwd=tmp_path, fresh=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    command = f"mkdir gone; cd gone; rmdir ../gone; exec '{sys.executable}' -m distdl debug=cpu"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "the folder that this was typed in is gone" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("before", [True, False])
def test_the_end_takes_nothing_apart_and_calls_who_asked_for_it(before: bool) -> None:
    """`before`: something in the process came before distdl, as coverage does by a .pth file."""
    code = f"""if True:
        import sys, types, atexit
        from distdl.cli.entry import command
        class Kept:
            def __del__(self): print("taken apart")
        kept = Kept()
        def main():
            atexit.register(print, "called")
            print("done")
            return 75
        sys.modules["distdl.cli.main"] = types.ModuleType("x")
        sys.modules["distdl.cli.main"].main = main
        {"atexit.register(print, 'first')" if before else ""}
        command()
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    said = "done\ncalled\nfirst\ntaken apart\n" if before else "done\ncalled\n"
    assert (done.stdout, done.stderr, done.returncode) == (said, "", 75)
