"""A rehearsal on simulated GPUs (docs/gpu_rehearsal.md): each strategy trains, is saved and
resumes, and nothing waits in a step; the cards that a run starts on; `task=benchmark`."""

import json
import math
import os
import re
import subprocess
import sys

import pytest
import yaml

from benchmarks import gpu_proof
from tests.conftest import ROOT, TINY, UNCHECKED, distdl, environment, free_port
from tests.gpu_rehearsal.machine import Machine
from tests.strategies import matrix
from tests.strategies.matrix import MATRIX
from tests.strategies.ranks import Case, Ranks

pytestmark = pytest.mark.timeout(600)

STEPS, HALF, LOG_EVERY = 12, 6, 4
LEFT_OUT = ("trainer.", "checkpoint.every", "model.network")
COMMON = (
    *(o for o in matrix.COMMON if not o.startswith(LEFT_OUT)),
    "trainer.accelerator=gpu",
    "trainer.max_epochs=1",
    f"trainer.max_steps={STEPS}",
    f"trainer.log_every_n_steps={LOG_EVERY}",
    "+trainer.enable_model_summary=false",
    f"checkpoint.every_n_steps={HALF}",
    "data.batch_size=4",
)
# The overrides of a strategy, and with how many ranks.
PIPELINE = "pipeline strategy.stages=2 strategy.balance=parameters strategy.micro_batches=2"
STRATEGIES = {
    "single": ("single", (1,)),
    "ddp": ("ddp", (1, 2)),
    "local_sgd": ("local_sgd strategy.sync_every=5", (1, 2)),
    "fsdp": ("fsdp strategy.min_parameters=10000", (1, 2)),
    "fsdp offload": ("fsdp strategy.offload=true", (1, 2)),
    "zero2": ("deepspeed_zero2", (1, 2)),
    "zero2 offload": ("deepspeed_offload", (1, 2)),
    "zero3": ("deepspeed_zero3", (2,)),
    "pipeline": (PIPELINE, (2,)),
    "ddp ema": ("ddp callbacks=[default,ema]", (2,)),
}
EVERY = [(name, size) for name, (_, sizes) in STRATEGIES.items() for size in sizes]
FEW = [("ddp", 2)]
CASES = EVERY if MATRIX else FEW


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    """Skips where it cannot be compiled, and fails there in CI (`.ci/run`)."""
    try:
        return Machine(tmp_path_factory.mktemp("machine"))
    except (ImportError, OSError, RuntimeError) as error:
        if os.environ.get("DISTDL_NO_SKIP"):
            pytest.fail(f"the rehearsal cannot be compiled: {error}")
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def ranks(machine, tmp_path_factory):
    """So many ranks, with a card each, started when they are first asked for."""
    started = {}
    folder = tmp_path_factory.mktemp("ranks")

    def of(size):
        if size not in started:
            started[size] = Ranks(size, folder, "gpu", **machine.environment(size))
        return started[size]

    yield of
    for each in started.values():
        each.close()


@pytest.mark.parametrize(("strategy", "size"), CASES, ids=[f"{s} x{n}" for s, n in CASES])
def test_trains_and_resumes(strategy, size, ranks, tmp_path):
    def train(folder, resume, expected):
        call = "tests.gpu_rehearsal.counting:train"
        overrides = [*COMMON, *f"strategy={STRATEGIES[strategy][0]}".split()]
        seen = ranks(size).train(Case([resume, *overrides], folder, call=call))
        checkpoints = map(matrix.read, (folder / "checkpoints").glob("*.ckpt"))
        assert {checkpoint["global_step"] for checkpoint in checkpoints} == expected
        return [rank["steps"] for rank in seen.ranks]

    counted = train(tmp_path / "whole", "", {HALF, STEPS})
    middle = matrix.step(tmp_path / "whole/checkpoints", HALF)
    train(tmp_path / "rest", str(middle), {STEPS})
    assert len(counted) == size
    # Of what the host waits for, in the steps after which nothing is reported or saved; without
    # the first two: optimizers make their state there.
    quiet = [step for step in range(3, STEPS) if step % LOG_EVERY and step != HALF]
    for counts in counted:
        assert len(counts) == STEPS - 1
        assert counts[0]["launches"]
        for step in quiet:
            waited = [counts[step - 1][name] for name in ("streamsync", "pageable", "devicesync")]
            if strategy.startswith("zero"):
                # DeepSpeed itself waits: once a step for the device, and where it reads the norm.
                assert waited[2] <= 1, step
            else:
                assert waited == [0, 0, 0], step


ONE_STEP = (
    *(o for o in TINY if not o.startswith(("trainer.", "callbacks"))),
    "trainer.accelerator=gpu",
    "trainer.max_steps=1",
    "name=here",
)
# Strategy -> its ranks.
BUCKETS = "strategy.allgather_bucket_size=1000000 strategy.reduce_bucket_size=1000000"
SIZED = {
    "single": 1,
    "ddp": 2,
    "fsdp strategy.min_parameters=10000": 2,
    f"deepspeed_zero2 {BUCKETS}": 2,
}


@pytest.mark.skipif(not MATRIX, reason="make matrix")
@pytest.mark.parametrize("strategy", SIZED)
def test_the_largest_batch_is_found_by_trying(strategy, machine, tmp_path):
    """On cards of 256 MiB; a batch larger by a tenth is out of memory, which the run never is."""
    size = SIZED[strategy]
    env = machine.environment(size, SIMULATED_MEMORY_MB="256")
    if strategy in ("single", "ddp"):  # others read what is fresh memory without the cache
        del env["PYTORCH_NO_CUDA_MEMORY_CACHING"]
    words = [word for word in ONE_STEP if not word.startswith(("data.batch_size", "name"))]
    words += [f"strategy={strategy.split()[0]}", *strategy.split()[1:], f"trainer.devices={size}"]
    words += ["data.train_samples=100000"]

    def started(*more, code):
        done = distdl(*words, *more, cwd=tmp_path, env=env, module=UNCHECKED, timeout=500)
        assert (done.returncode != 0) == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    said = started("data.batch_size=auto", "name=auto", code=0)
    run = tmp_path / "outputs/default/auto"
    launch = yaml.safe_load((run / "attempts/001/launch.yaml").read_text())
    chosen = launch["changes"]["data.batch_size"]
    assert launch["global_batch_size"] == size * chosen
    assert f"batch   {chosen} x {size} device" in said
    assert "batch_size: auto" in (run / "config.yaml").read_text()
    assert "out of memory" in launch["batch_size"][-1] + launch["batch_size"][-2]
    for rank in range(size):
        log = (run / f"attempts/001/logs/rank_{rank}.log").read_text()
        assert f"this attempt and its resumes train with data.batch_size={chosen}" in log
    started(f"data.batch_size={chosen}", "name=fits", code=0)
    tenth = math.ceil(1.1 * chosen)
    assert "out of memory" in started(f"data.batch_size={tenth}", "name=larger", code=1)
    again = distdl(
        "resume",
        str(run),
        "trainer.max_steps=2",
        cwd=tmp_path,
        env=env,
        module=UNCHECKED,
        timeout=500,
    )
    assert again.returncode == 0, again.stdout + again.stderr
    assert "batch_size:" not in again.stdout + again.stderr
    assert f"batch   {chosen} x {size} device" in again.stdout + again.stderr


CARDS = 8
# $CUDA_VISIBLE_DEVICES, trainer.devices -> the cards
VISIBLE = {
    "two of four": ("4,5,6,7", "[1,2]", [5, 6]),
    "by UUID": ("GPU-00000003,GPU-00000007,GPU-00000002", "[1,2]", [6, 1]),
    "not set": (None, "[3,5]", [3, 5]),
}


def cards_in(folder):
    """The cards on which the ranks started, as rank 0's log names them."""
    log = (folder / "outputs/default/here/attempts/001/logs/rank_0.log").read_text()
    return [int(card) for card in re.findall(r"cuda:\d+ Simulated GPU (\d+)", log)]


@pytest.mark.parametrize("case", VISIBLE if MATRIX else [])
def test_starts_on_these_cards(case, machine, tmp_path):
    visible, devices, cards = VISIBLE[case]
    env = machine.environment(CARDS, **({"CUDA_VISIBLE_DEVICES": visible} if visible else {}))
    words = (*ONE_STEP, "strategy=ddp", f"trainer.devices={devices}")
    done = distdl(*words, cwd=tmp_path, env=env, module=UNCHECKED, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert cards_in(tmp_path) == cards


@pytest.mark.skipif(not MATRIX, reason="make matrix")
@pytest.mark.parametrize("strategy", ["ddp", "deepspeed_zero2"])
def test_each_rank_starts_on_the_one_that_srun_gave_it(strategy, machine, tmp_path):
    """`srun --ntasks=2 --gpus-per-task=1 python -m distdl ...`: a rank sees one GPU, number 0."""
    variables = {"MASTER_PORT": str(free_port()), "SLURM_STEP_NODELIST": "localhost"}
    numbers = {"JOB_ID": 123, "STEP_ID": 0, "NTASKS": 2, "NODEID": 0, "STEP_TASKS_PER_NODE": 2}
    variables |= {f"SLURM_{name}": str(value) for name, value in numbers.items()}
    command = [sys.executable, *UNCHECKED, *ONE_STEP, f"strategy={strategy}"]
    options = {"cwd": tmp_path, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    processes = []
    for rank, card in enumerate((6, 3)):
        own = {
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank),
            "CUDA_VISIBLE_DEVICES": str(card),
            **variables,
        }
        env = environment(**machine.environment(CARDS), **own)
        processes.append(subprocess.Popen(command, env=env, text=True, **options))
    outputs = [process.communicate(timeout=500)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    assert cards_in(tmp_path) == [6, 3]


@pytest.mark.skipif(not MATRIX, reason="make matrix")
@pytest.mark.parametrize(("strategy", "size"), [("single", 1), ("ddp", 2)])
def test_measures_a_step(strategy, size, machine, tmp_path):
    """It gets to its end; its numbers say nothing. (torch's profiler ends with SIGSEGV here.)"""
    words = (
        "task=benchmark",
        "task.warmup=1",
        "task.windows=1",
        "task.steps=2",
        "task.trace=0",
        *ONE_STEP,
        f"trainer.devices={size}",
        f"strategy={strategy}",
    )
    env = machine.environment(size)
    done = distdl(*words, cwd=tmp_path, env=env, module=UNCHECKED, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = json.loads((tmp_path / "outputs/default/here/benchmark.json").read_text())["ranks"]
    assert [rank["device"] for rank in ranks] == [f"Simulated GPU {n}" for n in range(size)]


@pytest.mark.skipif(not MATRIX, reason="make matrix")
def test_the_proof_on_one_gpu_goes_to_its_end_and_goes_on(machine, tmp_path):
    """make gpu-proof: small, and nothing is compiled; its results say so."""
    command = [sys.executable, "-m", "benchmarks.gpu_proof", "--rehearse", "--rounds", "1"]
    command += ["--to", str(tmp_path / "proof")]
    options = {"cwd": ROOT, "env": machine.environment(2), "text": True, "capture_output": True}
    done = subprocess.run(command, **options, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "lost" not in done.stdout, done.stdout + done.stderr
    (path,) = (tmp_path / "proof").glob("rehearsal-*")
    folder = gpu_proof.ProofFolder(path, rounds=1)
    files = {folder.file(arm) for arm in gpu_proof.arms(devices=2, rounds=1)}
    assert files == {*folder.path.glob("*.json")}
    text = (folder.path / "RESULTS_GPU.md").read_text()
    assert "A rehearsal: simulated GPUs" in text
    assert text.count("replaced: nothing was compiled") == len(gpu_proof.COMPILES)
    cut_off = folder.path / "round-1-distdl.json"
    before = {path: path.stat().st_mtime for path in files - {cut_off}}
    cut_off.write_text('{"arm": "rou')
    done = subprocess.run(command, **options, timeout=500)
    assert done.stdout.count("running ") == 1, done.stdout
    assert json.loads(cut_off.read_text())["value"] > 0
    assert {path: path.stat().st_mtime for path in before} == before
