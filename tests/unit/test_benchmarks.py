"""`make bench`: its tables and goals, a part that fails, and its parts with tiny counts."""

import errno
import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks import detection, goodput, gpu_proof, overhead, run, runs, table
from benchmarks.table import Goal, Result
from distdl.config import compose
from distdl.validation.validate import problems_of
from distdl.worker import main
from tests.conftest import ROOT, environment
from tests.waiting import until

GOALS = [
    ("at least 0.99", 0.95, (0.96, 1.03), "**not reached**"),
    ("at most 1.01", 1.02, (0.97, 1.03), "reached"),
    ("at most 1.01", 1.02, (0.7, 1.3), "undecided"),
    # Further than 2 % from 1: what the competitor does by chance does not count.
    ("at least 0.97", 0.965, (0.96, 1.04), "**not reached**"),
]


@pytest.mark.parametrize("goal, measured, same, state", GOALS)
def test_when_a_goal_is_reached(goal, measured, same, state):
    row = Goal("a to b", goal, measured, same).row()
    assert row.startswith("| CPU | a to b | ")
    assert row.endswith(f" | {state} |")
    assert f"(A/A {same[0]:.3f} to {same[1]:.3f})" in row


def result():
    rows = [table.row("one", [3.0, 1.0, 2.0], "s")]
    more = [Goal("c to d", "at least 2", 1.5)]
    return Result("A (s)", "B", "at most 0.5", 0.25, rows, "python -m x", more=more)


def ends(error):
    """A part that an error ends."""

    def main():
        raise error

    return main


@pytest.fixture
def parts(monkeypatch, tmp_path):
    """Three parts: one that measures, one that fails, and one that needs a GPU."""
    monkeypatch.setattr(run, "CPU", ("startup", "overhead"))
    monkeypatch.setattr(run, "ALL", ("startup", "overhead", "gpu"))
    monkeypatch.setattr(run, "PAGE", tmp_path / "RESULTS.md")
    monkeypatch.setattr(run, "KEPT", tmp_path / "results")
    monkeypatch.setattr(run, "ENVIRONMENTS", {})
    monkeypatch.setattr(run, "in_own_process", run.in_this_process)
    monkeypatch.setattr(run, "torch_sees_a_gpu", lambda: False)
    monkeypatch.setattr("benchmarks.startup.main", result)
    monkeypatch.setattr("benchmarks.overhead.main", ends(RuntimeError("no room on the disk")))


def test_each_part_can_be_run():
    for name in run.ALL:
        assert callable(importlib.import_module(f"benchmarks.{name}").main), name


def test_no_file_hides_a_module_of_python():
    """A program in this folder, such as a competitor's under torchrun, would import it instead."""
    names = {path.stem for path in Path(run.__file__).parent.glob("*.py")}
    assert names & sys.stdlib_module_names == set()


def test_a_part_is_kept_when_it_ends_and_one_that_fails_loses_nothing(parts, monkeypatch, capsys):
    assert run.main(["--keep"]) == 1
    page = run.PAGE.read_text()
    assert "**0.250** (goal: at most 0.5: reached)" in page
    assert "| one | 2 | 1 | 3 | s | 3 |" in page
    assert "c to d: **1.500** (goal: at least 2: not reached)." in page
    assert "overhead: `python -m benchmarks.run --keep overhead`" in page
    assert page.count("| GPU | ") == page.count("| not run |") == 4
    printed = capsys.readouterr().out
    assert printed.endswith("without a new result (see above): overhead\n")
    # The goals of all parts once more, at the end.
    assert printed.count("| CPU | A (s) | <= 0.5 | 0.250 | reached |") == 2
    # Without a result, it is the first the next time; whatever ends that, the page has it.
    measured = []
    monkeypatch.setattr("benchmarks.overhead.main", lambda: measured.append("overhead") or result())
    monkeypatch.setattr("benchmarks.startup.main", ends(KeyboardInterrupt()))
    assert run.main(["--keep"]) == 130
    printed = capsys.readouterr().out
    assert printed.endswith("interrupted; kept: overhead\n")
    assert measured == ["overhead"]
    assert run.PAGE.read_text().count("| CPU | A (s) | <= 0.5 | 0.250 | reached |") == 2
    # An earlier result is not lost to an error.
    monkeypatch.setattr("benchmarks.startup.main", ends(OSError("no room on the disk")))
    before = run.PAGE.read_text()
    assert run.main(["--keep", "startup"]) == 1
    assert run.PAGE.read_text() == before


def test_a_result_with_competitors_is_not_replaced_by_one_without(parts, monkeypatch, capsys):
    installed = True
    missing = {"B": "pip install b"}
    there = "benchmarks.startup.absent"
    monkeypatch.setattr(there, lambda: {} if installed else missing, raising=False)
    assert run.main(["--keep", "startup"]) == 0
    before = (run.KEPT / "startup.json").read_text()
    installed = False
    monkeypatch.setattr("benchmarks.startup.main", ends(AssertionError("it was measured")))
    assert run.main(["--keep", "startup"]) == 1
    printed = capsys.readouterr().out
    assert "startup: not measured" in printed
    assert "compares with B. Not installed here: pip install b" in printed
    assert (run.KEPT / "startup.json").read_text() == before
    # Where no kept result has it, it is measured, and the result says so.
    (run.KEPT / "startup.json").unlink()
    monkeypatch.setattr("benchmarks.startup.main", result)
    assert run.main(["--keep", "startup"]) == run.main(["--keep", "startup"]) == 0
    assert run.Kept.read("startup").absent == ["B"]


def test_what_is_only_run_is_not_kept(parts, capsys):
    assert run.main(["startup"]) == 0
    assert not run.PAGE.exists()
    assert not run.KEPT.exists()
    assert "| CPU | A (s) | <= 0.5 | 0.250 | reached |" in capsys.readouterr().out
    assert run.main(["startups"]) == run.main(["gpu"]) == 2
    printed = capsys.readouterr().out
    assert "startups: unknown benchmark; did you mean startup?" in printed
    assert "needs an NVIDIA GPU" in printed


def test_of_several_parts_each_is_measured_by_another_process(capfd):
    assert run.in_own_process("startups", keep=False) == 2
    assert "did you mean startup?" in capfd.readouterr().out


def test_a_part_that_is_killed_is_said_to_be(monkeypatch, tmp_path, capsys):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nkill -9 $$\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    assert run.in_own_process("startup", keep=False)
    assert "startup: killed by SIGKILL" in capsys.readouterr().out


# A part that needs a moment to end, and two such parts.
SLOW_TO_END = """#!/bin/sh
trap 'sleep 1; touch ended; exit 130' INT
touch begun
while :; do sleep 0.1; done
"""
TWO_PARTS = """
import signal, sys
from benchmarks import run
signal.signal(signal.SIGINT, signal.default_int_handler)  # nohup's children ignore it
run.ROOT = "."
sys.executable = "./python"
sys.exit(run.main(["startup", "listing"]))
"""


def test_after_ctrl_c_a_part_ends_by_itself_and_what_is_kept_is_said(tmp_path):
    python = tmp_path / "python"
    python.write_text(SLOW_TO_END)
    python.chmod(0o755)
    options = {"env": environment(PYTHONPATH=str(ROOT)), "text": True, "start_new_session": True}
    command = [sys.executable, "-c", TWO_PARTS]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, **options) as process:
        until((tmp_path / "begun").exists)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == 130
        assert (tmp_path / "ended").exists()
        printed = process.stdout.read()
    assert printed.endswith("interrupted; kept: nothing\n")


def test_ctrl_c_is_not_lost_in_a_worker_that_ends_well(tmp_path, monkeypatch):
    """As a validation does: it asks nobody whether it shall end."""

    def perform(*given):
        signal.raise_signal(signal.SIGINT)
        return {}

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(main, "perform", perform)
    with pytest.raises(KeyboardInterrupt):
        runs.work(runs.create_run(tmp_path, *TINY))
    assert signal.getsignal(signal.SIGINT) == before


def test_what_lightning_makes_of_ctrl_c_is_one(parts, monkeypatch, capsys):
    monkeypatch.setattr("benchmarks.startup.main", ends(SystemExit(1)))
    assert run.main(["startup"]) == 130
    assert capsys.readouterr().out.endswith("interrupted; kept: nothing\n")


@pytest.mark.parametrize("blocked", ["RESULTS.md", "results", "results/startup.json"])
def test_what_cannot_be_kept_is_not_measured(blocked, parts, monkeypatch, tmp_path, capsys):
    """A folder is no file, and root could write to a file that is read-only."""
    monkeypatch.setattr("benchmarks.startup.main", ends(AssertionError("it was measured")))
    if blocked == "results":
        (tmp_path / blocked).write_text("")
    else:
        (tmp_path / blocked).mkdir(parents=True)
    assert run.main(["--keep", "startup"]) == 2
    printed = capsys.readouterr().out
    assert f"{tmp_path / blocked}: " in printed
    assert "nothing was measured" in printed
    if blocked == "RESULTS.md":
        assert run.main(["--page"]) == 2


def test_a_result_that_the_disk_refuses_is_said_and_the_others_run(parts, monkeypatch, capsys):
    def full(self):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("benchmarks.overhead.main", result)
    with monkeypatch.context() as patched:
        patched.setattr(run.Kept, "write", full)
        assert run.main(["--keep"]) == 1
    printed = capsys.readouterr().out
    for name in ("startup", "overhead"):
        assert f"{name}: its result, above, is not kept: [Errno 28]" in printed
    # The page alone can be made later.
    monkeypatch.setattr(run, "page", lambda: full(None))
    assert run.main(["--keep", "startup"]) == 0
    assert (
        "startup is kept in results/, and RESULTS.md lacks it: [Errno 28]"
        in capsys.readouterr().out
    )
    assert (run.KEPT / "startup.json").exists()


def test_the_page_is_of_all_parts(parts, capsys):
    assert run.main(["--page", "startup"]) == 2
    assert "leave startup away" in capsys.readouterr().out
    assert run.main(["--page", "startups"]) == 2
    assert not run.PAGE.exists()


def test_how_long_parts_took_is_said_before_they_run(parts, capsys):
    assert run.main(["--keep", "startup"]) == 0
    assert "the last time" not in capsys.readouterr().out
    run.main(["--keep"])
    printed = capsys.readouterr().out
    assert "2 parts (the last time 0.0 minutes without overhead)" in printed
    assert "startup ... (the last time 0.0 minutes)" in printed


def test_a_damaged_result_is_named_and_counts_as_none(parts, capsys):
    assert run.main(["--keep", "startup"]) == 0
    kept = json.loads((run.KEPT / "startup.json").read_text())
    unlike = (json.dumps(kept | {"seconds": "12"}), json.dumps(kept | {"ended": "yesterday"}))
    broken = ('{"title": "A', "[]", '{"goals": []}', '{"goals": [{"what": 1}], "text": []}')
    for damaged in (*broken, *unlike):
        (run.KEPT / "startup.json").write_text(damaged)
        assert run.main(["--page"]) == 0
        assert "startup.json is damaged" in capsys.readouterr().out
        assert "startup, overhead: `python" in run.PAGE.read_text()


def test_the_committed_page_is_made_of_the_committed_results():
    assert run.page() == run.PAGE.read_text(encoding="utf-8")


def test_results_are_no_change_of_distdl(monkeypatch, tmp_path):
    def git(*words):
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    monkeypatch.setattr(table, "ROOT", tmp_path)
    git("init")
    for name in ("benchmarks/RESULTS.md", "benchmarks/results/ddp.json", "code.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("1")
    git("add", ".")
    git("commit", "-m", "first")
    named = table.commit()
    for name in ("benchmarks/RESULTS.md", "benchmarks/results/ddp.json"):
        (tmp_path / name).write_text("2")
    assert len(named) >= 7
    assert table.commit() == named
    (tmp_path / "code.py").write_text("2")
    assert table.commit() == f"{named}+"


def test_a_goal_with_an_exponent_is_not_cut_short():
    assert Goal("a to b", "at most 1e-05", 0.5).state == "not reached"
    with pytest.raises(ValueError, match="begins with"):
        Goal("a to b", "at most 1.0.5", 0.5).row()


# File of a rank and process -> lines of time, step, ranks and ids of samples: step 2 is done, lost,
# and done again by the rank that is left over.
NOTES = {
    "0-11.txt": "10 1 2 0 1 2 3\n11 2 2 8 9 10 11\n",
    "1-12.txt": "10 1 2 4 5 6 7\n11 2 2 12 13 14 15\n",
    "0-21.txt": "14 2 1 8 9 10 11 12 13 14 15\n15 3 1 16 17 18 19 20 21 22 23\n",
}


def test_the_goodput_counts_what_was_done_last(tmp_path):
    for name, lines in NOTES.items():
        (tmp_path / name).write_text(lines)
    training = goodput.Training(tmp_path, 3, kills=[11.5])
    training.read()
    assert (training.wrong_samples, training.healing) == (0, [3.5])
    assert training.goodput == pytest.approx(3 * 1.0 / 5.0)
    # One sample that is lost, and one that is repeated.
    (tmp_path / "0-21.txt").write_text(NOTES["0-21.txt"].replace(" 23\n", " 22\n"))
    training.read()
    assert training.wrong_samples == 2


TINY = (
    "model=tiny",
    "data=tiny",
    "data.steps=2",
    "optimizer=none",
    "schedule=none",
    "tracking=none",
    "trainer.accelerator=cpu",
    "trainer.max_epochs=1",
)


def test_what_a_worker_prints_at_the_end(tmp_path, capsys):
    """The report of a profiler that is asked for; and no training to resume after a benchmark."""
    task = ("task=benchmark", "task.warmup=1", "task.windows=1", "task.steps=2")
    for overrides, resumes in (((), True), (("trainer.profiler=simple",), True), (task, False)):
        made = runs.create_run(tmp_path, *TINY, *overrides)
        assert main.main([str(made.path)] * 2) == 0
        out = capsys.readouterr().out
        assert "python -m distdl report" in out
        assert ("resume" in out) == resumes
        log = (made.path / "attempts/001/logs/rank_0.log").read_text()
        assert ("FIT Profiler Report" in log) == ("trainer.profiler=simple" in overrides)


def test_the_parts_of_the_time_that_distdl_adds_are_timed(tmp_path, monkeypatch):
    """Also though distdl takes hooks away that do nothing."""
    monkeypatch.setattr(overhead, "PARTS_STEPS", 60)  # one log line
    parts = overhead.parts_of(overhead.distdl, tmp_path)
    assert {"StepMetrics", "Checkpointer", overhead.DISPATCH, overhead.LOGGERS} <= parts.keys()


def test_detectors_are_compared_by_the_means_of_their_seeds():
    def trained(cpu, box, mask):
        return detection.Trained(cpu, {"box_ap50": box, "mask_ap50": mask})

    size = detection.Size(seeds=2)
    ours = [trained(1100.0, 0.5, 0.25), trained(1100.0, 0.25, 0.25)]
    theirs = [trained(1000.0, 0.25, 0.5), trained(1200.0, 0.25, 0.25)]
    made = detection.result({detection.LOOP: theirs, detection.OURS: ours}, size)
    assert [goal.measured for goal in made.goals] == pytest.approx([1.5, 2 / 3, 1.0])
    assert "distdl, box_ap50: 0.500, 0.250 (sd 0.177)" in made.markdown()
    # What is trained is a shipped recipe, and the loop's options are the network's.
    config = compose.compose(detection.overrides(Path("coco"), size, seed=3))
    assert config.model.network.items() >= detection.NETWORK.items()
    assert problems_of(config, local=False) == []


@pytest.fixture
def proof(monkeypatch, tmp_path):
    """The results of a GPU's arms, of which none has run."""
    monkeypatch.setattr(gpu_proof, "machine", lambda: "one GPU")
    monkeypatch.setattr(gpu_proof.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(gpu_proof.torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(gpu_proof.ProofFolder, "caches", lambda self: {})
    return folder_of_card(tmp_path)


def folder_of_card(tmp_path, rehearsal=False):
    path = tmp_path / gpu_proof.kind_of_machine(rehearsal)
    path.mkdir(exist_ok=True)
    return gpu_proof.ProofFolder(path, rounds=2)


def test_the_proof_on_a_gpu_goes_on_where_it_was_cut_off(proof, tmp_path, monkeypatch):
    started = []

    def ended(command, env, seconds):
        name = command[command.index("--arm") + 1]
        (arm,) = (arm for arm in proof.arms if arm.name == name)
        started.append(name)
        if len(started) == 5:  # the machine is gone in the middle of this one
            proof.file(arm).write_text('{"arm": "rou')
            raise KeyboardInterrupt
        proof.keep(arm, gpu_proof.ArmResult(name, 1.0, "c0ffee", 100.0, "img/s"))
        return True

    monkeypatch.setattr(gpu_proof, "ended", ended)
    results = tmp_path / "RESULTS_GPU.md"
    results.write_text("# Mine\n")
    with pytest.raises(KeyboardInterrupt):
        gpu_proof.prove(proof, 60, results, rehearse=False)
    assert f"4 of {len(proof.arms)} arms have ended" in results.read_text()
    gpu_proof.prove(proof, 60, results, rehearse=False)
    names = [arm.name for arm in proof.arms]
    assert started == [*names[:5], *names[4:]], "what had ended was not run again"
    text = results.read_text()
    assert text.startswith("# Mine\n")
    assert text.count(": begin -->") == 1
    assert "arms have ended, of distdl at c0ffee." in text
    gpu_proof.prove(proof, 60, results, rehearse=False)
    assert results.read_text() == text


def test_results_of_another_card_and_of_a_rehearsal_are_kept_apart(proof, tmp_path, monkeypatch):
    first = proof.arms[0]
    results = tmp_path / "RESULTS_GPU.md"
    proof.keep(first, gpu_proof.ArmResult(first.name, 1.0, "c0ffee", outcome="passed"))
    gpu_proof.write(proof, results, rehearsal=False)
    assert folder_of_card(tmp_path).result(first) is not None
    assert folder_of_card(tmp_path, rehearsal=True).result(first) is None
    monkeypatch.setattr(gpu_proof.torch.cuda, "get_device_name", lambda: "Tesla T4 <b>")
    other = folder_of_card(tmp_path)
    assert other.result(first) is None, "another card has shown nothing yet"
    assert other.path.name.startswith("Tesla-T4-b--torch")
    gpu_proof.write(other, results, rehearsal=False)
    text = results.read_text()
    assert text.count(": begin -->") == 2
    assert "| passed |" in text, "what the first card has shown stays"


def test_the_proof_on_a_gpu_starts_nothing_for_which_no_time_is_left(proof, tmp_path, capsys):
    gpu_proof.prove(proof, 0, tmp_path / "RESULTS_GPU.md", rehearse=False)
    assert capsys.readouterr().out.count("no time ") == len(proof.arms)


def test_the_proofs_goals_are_of_the_rounds_that_both_arms_have(proof):
    rates = {gpu_proof.AUTO: [150.0, 160.0, 1.0], gpu_proof.LOOP: [100.0, 100.0]}
    first, *others = gpu_proof.goals(rates)
    assert first.measured == pytest.approx(1.55)
    assert [goal.state for goal in others] == ["not run", "not run"]


def test_an_arm_that_takes_too_long_is_ended_with_its_processes(tmp_path):
    (tmp_path / "child.sh").write_text("sleep 99 & echo $! > child; wait")
    words = ["bash", "-c", f"cd {tmp_path} && . ./child.sh"]
    assert not gpu_proof.ended(words, dict(os.environ), 1.0)
    child = int((tmp_path / "child").read_text())
    until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie", 10)
