"""The core trains without the tools: `distdl/tools` is deleted, and nothing misses it."""

import os
import shutil
import subprocess
import sys

from tests.conftest import ROOT, TINY, status

COMMANDS = """
import sys
# An editable installation would find the missing package where it was installed from.
sys.meta_path[:] = [each for each in sys.meta_path if "Editable" not in str(each)]
from distdl.cli.main import main

tiny = sys.argv[1:]
codes = [main([*tiny, "name=bare"]), main(["resume", RUN, "trainer.max_epochs=2"])]
codes += [main(["resume", RUN, "task=validate"]), main([*tiny, "name=wary", "preflight=true"])]
print("codes", codes, "distdl.tools" in sys.modules)
"""
RUN = "outputs/default/bare"
SHORT = ["trainer.max_epochs=1", "data.train_samples=16", "data.val_samples=8"]


def test_a_run_trains_resumes_and_validates_without_the_tools(tmp_path):
    copy, work = tmp_path / "distdl", tmp_path / "work"
    for part in ("src", "conf", "launchers"):
        shutil.copytree(ROOT / part, copy / part)
    shutil.rmtree(copy / "src/distdl/tools")
    work.mkdir()
    env = {**os.environ, "PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", COMMANDS.replace("RUN", repr(RUN)), *TINY, *SHORT]
    done = subprocess.run(command, cwd=work, env=env, capture_output=True, text=True, timeout=240)
    assert "codes [0, 0, 0, 2] False" in done.stdout, done.stdout + done.stderr
    assert status(work / RUN, 3)["state"] == "SUCCEEDED"
    assert "preflight: needs distdl.tools.doctor.examiner" in done.stderr
