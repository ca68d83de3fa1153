"""Which cards a run starts on: `trainer.devices` among those of $CUDA_VISIBLE_DEVICES.

Or what srun gave each rank.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import TINY, UNCHECKED, distdl, environment
from tests.gpu_rehearsal.machine import Machine

TRAINING = (
    *(o for o in TINY if not o.startswith(("trainer.", "callbacks"))),
    *("trainer.accelerator=gpu", "trainer.max_steps=1", "name=here"),
)
LOGS = "outputs/default/here/attempts/001/logs"

pytestmark = pytest.mark.timeout(600)

CARDS = 8
EVERY = {
    "two of four": ("4,5,6,7", "[1,2]", [5, 6]),
    "all that are visible": ("6,2", "2", [6, 2]),
    "by UUID": ("GPU-00000003,GPU-00000007,GPU-00000002", "[1,2]", [6, 1]),
    "none said": (None, "[3,5]", [3, 5]),
}
CASES = EVERY if "DISTDL_MATRIX" in os.environ else {"two of four": EVERY["two of four"]}


@pytest.mark.parametrize(("visible", "devices", "cards"), CASES.values(), ids=CASES.keys())
def test_starts_on_these(
    visible: str | None, devices: str, cards: list[int], machine: Machine, tmp_path: Path
) -> None:
    done = distdl(
        *TRAINING,
        *("strategy=ddp", f"trainer.devices={devices}"),
        cwd=tmp_path,
        env=machine.environment(CARDS, **({"CUDA_VISIBLE_DEVICES": visible} if visible else {})),
        module=UNCHECKED,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert cards_in(tmp_path / LOGS / "rank_0.log") == cards


@pytest.mark.skipif("DISTDL_MATRIX" not in os.environ, reason="make matrix")
@pytest.mark.parametrize("strategy", ["ddp", "deepspeed_zero2"])
def test_each_rank_starts_on_the_one_that_srun_gave_it(
    strategy: str, machine: Machine, tmp_path: Path
) -> None:
    """`srun --ntasks=2 --gpus-per-task=1 python -m distdl ...`: a rank sees one GPU, number 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = []
    for rank, card in enumerate((6, 3)):
        slurm = {
            "SLURM_JOB_ID": "123",
            "SLURM_STEP_ID": "0",
            "SLURM_PROCID": str(rank),
            "SLURM_NTASKS": "2",
            "SLURM_LOCALID": str(rank),
            "SLURM_NODEID": "0",
            "SLURM_STEP_TASKS_PER_NODE": "2",
            "SLURM_STEP_NODELIST": "localhost",
            "MASTER_PORT": port,
            "CUDA_VISIBLE_DEVICES": str(card),
        }
        ranks.append(
            subprocess.Popen(
                [sys.executable, *UNCHECKED, *TRAINING, f"strategy={strategy}"],
                cwd=tmp_path,
                env=environment(**machine.environment(CARDS), **slurm),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    said = [rank.communicate(timeout=500)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
    assert cards_in(tmp_path / LOGS / "rank_0.log") == [6, 3]


def cards_in(log: Path) -> list[int]:
    """The cards on which the ranks started, as rank 0's log names them."""
    return [int(card) for card in re.findall(r"cuda:\d+ Simulated GPU (\d+)", log.read_text())]
