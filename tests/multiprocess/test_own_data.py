"""What a user's own data set draws: killed with -9 inside the second epoch and resumed, a run ends
with the weights of one that was never disturbed, or has said in one line what is not repeated.

`make matrix` tries every kind with 0, 1 and 2 workers, respawned and persistent, under each
strategy; which pairs come together is drawn by `$DISTDL_SEED`.
"""

import os
import random
import shutil

import pytest

from tests.conftest import UNCHECKED, distdl, matrix_only
from tests.multiprocess import drawing
from tests.multiprocess.test_campaign import differing, last_checkpoint, project

MATRIX = bool(os.environ.get("DISTDL_MATRIX"))
STEPS = drawing.COUNT // drawing.GLOBAL_BATCH
KILLED_AT = STEPS + 5  # a checkpoint was written two batches before
COMMON = (
    "model=ours",
    "data=ours",
    "schedule=none",
    "experiment_name=e",
    "trainer.accelerator=cpu",
    "trainer.max_epochs=3",
    "tracking=none",
    "callbacks=[]",
    "checkpoint.every_n_steps=2",
    "checkpoint.monitor=null",
    "checkpoint.background=false",
    "+callbacks.kill._target_=mine.Kill",
    "+trainer.enable_model_summary=false",
)
STRATEGIES = {
    "single": ("trainer.devices=1",),
    "ddp": ("trainer.devices=2", "strategy=ddp"),
    "fsdp": ("trainer.devices=2", "strategy=fsdp"),
    "pipeline": ("trainer.devices=2", "strategy=pipeline", "strategy.balance=parameters"),
}
WORKERS = {
    "0 workers": ("data.workers=0",),
    "1 worker": ("data.workers=1",),
    "2 workers": ("data.workers=2",),
    "2 persistent": ("data.workers=2", "data.persistent=true"),
}
# Kind of data -> the line that says what is not repeated; "": equal.
REPEATED = [kind for kind in drawing.TRANSFORMS if kind != "entropy"]
REPEATED += ["mixed plain", "mixed monai", "stateful lazy", "stateful monai", "stateful stream"]
REPEATED += ["stateful unsized", "positioned"]
KINDS = {
    **dict.fromkeys(REPEATED, ""),
    "entropy": "a resume does not repeat what is drawn by Entropy.__call__ (default_rng() without",
    "stream": "DataLoader cannot be resumed exactly: inside an epoch a resume starts the epoch",
    "sharded torch": "DataLoader cannot be resumed exactly: inside an epoch a resume starts the",
}
AGAIN = ("starts the epoch again", "start the epoch again")


def cases():
    if not MATRIX:
        return [("single", "2 persistent", "mixed monai")]
    draw = random.Random(os.environ.get("DISTDL_SEED", "43"))
    chosen = []
    for kind in KINDS:
        # Each kind under each strategy, with workers in another order for each.
        order = draw.sample([*WORKERS], len(WORKERS))
        chosen += [(s, w, kind) for s, w in zip(STRATEGIES, order, strict=True)]
    return chosen


def run(folder, *words, code=(0,), **env):
    done = distdl(*words, cwd=folder, module=UNCHECKED, env=env)
    assert done.returncode in code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize(("strategy", "workers", "kind"), cases())
def test_what_it_draws_is_drawn_again_or_named(strategy, workers, kind, tmp_path):
    killed_and_resumed(strategy, workers, kind, tmp_path, "Net", "optimizer=none")


@matrix_only
def test_a_loader_built_before_its_state_is_restored(tmp_path):
    """For the config's optimizer, whose rate depends on the batch."""
    more = ("Configured", "optimizer=sgd")
    killed_and_resumed("single", "1 worker", "stateful stream", tmp_path, *more)


def killed_and_resumed(strategy, workers, kind, tmp_path, module, *more_words):
    if kind.startswith("stateful"):
        pytest.importorskip("torchdata")
    cls = "Positioned" if kind == "positioned" else "Data"
    rows = f"_target_: mine.{cls}\nkind: plain\nworkers: 0\npersistent: false\n"
    project(tmp_path, model=f"_target_: mine.{module}\n", data=rows)
    shutil.copy(drawing.__file__, tmp_path / "mine.py")
    words = [*COMMON, *more_words, *STRATEGIES[strategy], *WORKERS[workers]]
    words += [] if kind == "positioned" else [f"data.kind={kind}"]
    more = {"STAGES": "2"} if strategy == "pipeline" else {}
    whole = run(tmp_path, *words, "name=whole", **more)
    last = 0 if strategy == "single" else 1
    killed = {"KILL_AT": f"{last} {KILLED_AT}", "code": (-9, 137)}
    run(tmp_path, *words, "name=killed", **more, **killed)
    resumed = run(tmp_path, "resume", "outputs/e/killed", **more)
    ours, theirs = (last_checkpoint(tmp_path / "outputs/e" / n) for n in ("whole", "killed"))
    keys = ("state_dict", "optimizer_states", "global_step", "epoch")
    differ = differing(*({key: each[key] for key in keys} for each in (ours, theirs)))
    assert ours["global_step"] == 3 * STEPS
    if kind == "positioned" and strategy in ("ddp", "fsdp"):
        assert "with the state that rank 0 has saved" in " ".join(resumed.split())
    elif KINDS[kind]:
        assert KINDS[kind] in " ".join(whole.split())
    else:
        assert not differ, resumed
        assert not [line for line in AGAIN if line in resumed], resumed
