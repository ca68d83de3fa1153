"""Each strategy on simulated GPUs: it trains, is saved, and resumes; nothing waits in a step.

A rehearsal, not a GPU run: docs/gpu_rehearsal.md says what it shows.
"""

import pytest

from tests.strategies import matrix
from tests.strategies.ranks import Case

pytestmark = pytest.mark.timeout(600)

STEPS, HALF, LOG_EVERY = 12, 6, 4
COMMON = (
    *(o for o in matrix.COMMON if not o.startswith(("trainer.", "checkpoint.every"))),
    *("trainer.accelerator=gpu", "trainer.max_epochs=1", f"trainer.max_steps={STEPS}"),
    *(f"trainer.log_every_n_steps={LOG_EVERY}", "+trainer.enable_model_summary=false"),
    *(f"checkpoint.every_n_steps={HALF}", "data.batch_size=4"),
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
# One rank opens its own group; two have everything else.
FEW = [("ddp", 1), ("ddp", 2), ("fsdp", 2), ("pipeline", 2)]
CASES = EVERY if matrix.MATRIX else FEW


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
        assert len(counts) == STEPS - 1 and counts[0]["launches"]
        for step in quiet:
            waited = [counts[step - 1][name] for name in ("streamsync", "pageable", "devicesync")]
            if strategy.startswith("zero"):
                # DeepSpeed itself waits: once a step for the device, and where it reads the norm.
                assert waited[2] <= 1, step
            else:
                assert waited == [0, 0, 0], step
