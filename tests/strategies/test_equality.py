"""The same training under every strategy, against one process with the same micro-batches; and
three steps under A, three more under B, against six under A."""

from itertools import pairwise

import pytest

from distdl.strategies.pipeline import stage_rules
from tests.conftest import ROOT, matrix_only
from tests.strategies import matrix
from tests.strategies.matrix import HALF, MATRIX, SAME_TO, STEPS, TOPOLOGIES, difference, step, two

# The files of this folder share the ranks.
pytestmark = pytest.mark.xdist_group("strategies")

EVERYONE = {name: topology for name, topology in TOPOLOGIES.items() if name != "single"}
EVERYONE["offload x2"] = two("deepspeed_offload")
if not MATRIX:  # the cases below have stages of ZeRO, and test_pipeline has the schedules
    del EVERYONE["zero1 x2"]
else:
    EVERYONE["zero2 x2"] = two("deepspeed_zero2")
    for each in ("gpipe", "interleaved", "zero_bubble"):
        EVERYONE[f"{each} x2"] = matrix.staged(2, 8, 4, f"strategy.schedule={each}")


@pytest.mark.parametrize("name", EVERYONE)
def test_trains_as_one_process_does(name, runs):
    if name == "zero_bubble x2" and not stage_rules.splits_backward():
        pytest.skip("this torch does not split the backward of every network")
    alone = runs.train("single")
    together = runs.train(name, EVERYONE[name])
    assert difference(step(alone), step(together)) < SAME_TO
    # Lightning divides the losses of accumulated batches already.
    halves = runs.seen["single"].losses
    sums = [sum(halves[i : i + 2]) for i in range(0, 2 * STEPS, 2)]
    assert runs.seen[name].losses == pytest.approx(sums, abs=1e-5)
    assert len(sums) == STEPS
    if MATRIX:
        pairs = ("single", TOPOLOGIES["single"]), (name, EVERYONE[name])
        files = [step(runs.train(f"resnet50 {n}", t.plus("model=resnet50"))) for n, t in pairs]
        assert difference(*files) < 10 * SAME_TO


# Two epochs of 20 samples: three accumulated batches of 2 x 2 and a rest that is stepped, too; the
# norm is clipped; 21 samples are validated, which no two ranks share evenly.
HARD = (
    "data.train_samples=20",
    "trainer.max_epochs=2",
    "trainer.max_steps=-1",
    "+trainer.gradient_clip_val=0.5",
    "optimizer=adamw",
    "checkpoint.every_n_steps=null",
    *matrix.batch(2, 3),
)
STAGES = ["fsdp", "deepspeed_zero2"]
if MATRIX:
    STAGES += ["deepspeed_zero1", "deepspeed_zero3"]
# channels_last chooses other kernels for DDP's weights, and a fused step rounds once less than that
# of sharded weights: both show in 16 bits.
HALF_PRECISION = (
    "model.norm=batch",
    "model.channels_last=false",
    "optimizer.fused=false",
    "+trainer.precision=bf16-mixed",
    *matrix.batch(4),
)


@pytest.mark.parametrize("name", STAGES)
def test_hard_settings_and_16_bits_with_batch_norm_as_under_ddp(name, runs):
    files = [runs.train(f"hard {n}", two(n, *HARD)) / "last.ckpt" for n in ("ddp", name)]
    assert difference(*files) < SAME_TO
    expected, metrics = (runs.seen[f"hard {n}"].metrics for n in ("ddp", name))
    assert metrics["val/samples"] == expected["val/samples"] == 21
    assert metrics["val/loss"] == pytest.approx(expected["val/loss"], abs=1e-6)
    files = [step(runs.train(f"bf16 {n}", two(n, *HALF_PRECISION))) for n in ("ddp", name)]
    assert difference(*files) == 0


# Norms of layers, and a norm of all gradients.
LAMB = ("optimizer=lamb", "optimizer.lr=0.1", "+trainer.gradient_clip_val=1.0")


@pytest.mark.parametrize("name", ["fsdp x2", "pipeline x2"] if MATRIX else ["pipeline x2"])
def test_an_optimizer_that_knows_layers_trains_as_under_ddp(name, runs):
    files = [step(runs.train(f"lamb {n}", TOPOLOGIES[n].plus(*LAMB))) for n in ("ddp x2", name)]
    assert difference(*files) < SAME_TO


# Orthogonal matrices, in 16 bits: what ranks round shows in the weights, and hardly in the losses.
MUON = ("optimizer=muon", "optimizer.lr=0.05")


def exact(one, other):
    """Whether weights and optimizer states are equal in every bit."""
    first, second = matrix.read(one), matrix.read(other)
    (a,), (b,) = first["optimizer_states"], second["optimizer_states"]
    pairs = [(first["state_dict"], second["state_dict"])]
    pairs += [(a["state"][name], b["state"][name]) for name in a["state"]]
    same = a["param_groups"] == b["param_groups"] and a["state"].keys() == b["state"].keys()
    return same and all(matrix.apart(*pair) == 0 for pair in pairs)


@matrix_only
@pytest.mark.parametrize("name", ["ddp x2", "fsdp x2", "pipeline x2"])
def test_muon_trains_as_one_process_does_and_resumes_exactly(name, runs):
    alone = runs.train("muon single", TOPOLOGIES["single"].plus(*MUON))
    topology = TOPOLOGIES[name].plus(*MUON)
    whole = runs.train(f"muon {name}", topology)
    halves = runs.seen["muon single"].losses
    sums = [sum(halves[i : i + 2]) for i in range(0, 2 * STEPS, 2)]
    assert runs.seen[f"muon {name}"].losses == pytest.approx(sums, abs=1e-2)
    assert sums[-1] != pytest.approx(sums[0], abs=1e-2)
    (state,) = matrix.read(step(alone))["optimizer_states"]
    kinds = {key: held["use_muon"] for key, held in state["state"].items()}
    assert kinds["network.fc.weight"] is False
    assert True in kinds.values()
    again = runs.train(f"muon {name} again", topology, resume=step(whole, HALF))
    assert exact(step(whole), step(again))


def passed_on(runs, folder, name, overrides):
    """A checkpoint of ddp that fsdp and then ddp have loaded and saved has the same bits."""
    source = step(runs.train(f"{name} ddp x2", TOPOLOGIES["ddp x2"].plus(*overrides)), HALF)
    before = source
    for topology in ("fsdp x2", "ddp x2"):
        file = folder / f"{topology}.ckpt"
        saves = "+callbacks.saves._target_=tests.strategies.small.SavesFirst"
        more = (*overrides, saves, f"+callbacks.saves.path='{file}'")
        runs.train(f"{name} through {topology}", TOPOLOGIES[topology].plus(*more), resume=before)
        assert exact(source, file)
        before = file


@matrix_only
def test_muons_state_is_stored_alike_by_ddp_fsdp_and_ddp(runs, tmp_path):
    passed_on(runs, tmp_path, "muon", MUON)


FREE = ("optimizer=schedulefree", "optimizer.lr=0.3", "schedule=constant")


@matrix_only
@pytest.mark.parametrize("name", ["ddp x2", "fsdp x2", "pipeline x2"])
def test_schedule_free_trains_as_one_process_does_and_resumes_exactly(name, runs):
    every = "trainer.val_check_interval"
    single = TOPOLOGIES["single"].plus(*FREE, f"+{every}={2 * HALF}")  # of two batches a step
    alone = runs.train("free single", single)
    topology = TOPOLOGIES[name].plus(*FREE, f"+{every}={HALF}")
    whole = runs.train(f"free {name}", topology)
    halves = runs.seen["free single"].losses
    sums = [sum(halves[i : i + 2]) for i in range(0, 2 * STEPS, 2)]
    assert runs.seen[f"free {name}"].losses == pytest.approx(sums, abs=1e-6)
    assert sums[-1] != pytest.approx(sums[0], abs=1e-2)
    assert matrix.read(step(alone))["optimizer_states"][0]["param_groups"][0]["k"] == STEPS
    again = runs.train(f"free {name} again", topology, resume=step(whole, HALF))
    assert exact(step(whole), step(again))
    validated = [runs.seen[f"free {n}"].metrics["val/loss"] for n in ("single", name)]
    assert validated[0] == pytest.approx(validated[1], abs=1e-6)


@matrix_only
def test_its_state_is_stored_alike_by_ddp_fsdp_and_ddp(runs, tmp_path):
    passed_on(runs, tmp_path, "free", FREE)


@matrix_only
def test_its_statistics_are_the_same_on_two_ranks(runs):
    """GroupNorm would have none. What is trained differs, as each rank has its own batches."""
    normed = (*FREE, "model.norm=batch", "trainer.max_steps=1", "checkpoint.every_n_steps=null")
    cases = {"single": (*normed, *matrix.batch(8)), "ddp x2": normed, "fsdp x2": normed}
    # At a rate of nothing all have the initial weights.
    files = {
        name: runs.train(f"free norm {name}", TOPOLOGIES[name].plus(*more, "optimizer.lr=0"))
        for name, more in cases.items()
    }
    first, *others = (matrix.read(folder / "last.ckpt")["state_dict"] for folder in files.values())
    assert any("running_mean" in name for name in first)
    for other in others:
        assert matrix.apart(first, other) < 1e-6


@matrix_only
def test_adapters_train_under_fsdp_as_under_ddp_and_are_all_that_is_saved(runs):
    more = ("+model.lora.rank=2", "model.norm=batch")
    files = {n: runs.train(f"lora {n}", TOPOLOGIES[n].plus(*more)) for n in ("ddp x2", "fsdp x2")}
    assert difference(*(step(folder) for folder in files.values())) < SAME_TO
    saved = matrix.read(step(files["fsdp x2"]))["state_dict"]
    assert any("lora_A" in name for name in saved)
    assert not any("base_layer" in name for name in saved)
    for name, folder in files.items():
        resumed = runs.train(
            f"lora {name} again", TOPOLOGIES[name].plus(*more), resume=step(folder, HALF)
        )
        assert exact(step(folder), step(resumed))


# The small network has no blocks of several layers but its first.
RECOMPUTED = "blocks" if MATRIX else "[network.stem,network.wide]"


@pytest.mark.parametrize("name", TOPOLOGIES if MATRIX else ["fsdp x2"])
def test_what_is_recomputed_changes_no_bit(name, runs):
    batch_norm = TOPOLOGIES[name].plus("model.norm=batch")
    kept = runs.train(f"kept {name}", batch_norm)
    again = runs.train(f"recomputed {name}", batch_norm.plus(f"model.recompute={RECOMPUTED}"))
    assert difference(step(kept), step(again)) == 0


def test_averages_as_ddp_does_and_resumes_there(runs):
    ema = {n: TOPOLOGIES[n].plus("callbacks=[ema]", "callbacks.ema.decay=0.9") for n in TOPOLOGIES}
    ddp = runs.train("ema ddp", ema["ddp x2"])
    zero1 = runs.train("ema zero1", ema["zero1 x2"])
    after = runs.train("ema zero1 then ddp", ema["ddp x2"], resume=step(zero1, HALF))
    assert max(difference(step(ddp), step(other)) for other in (zero1, after)) < SAME_TO
    averaged = matrix.read(step(ddp))
    plain = matrix.read(step(runs.train("ddp x2")))
    assert matrix.apart(averaged["current_model_state"], plain["state_dict"]) < SAME_TO
    assert matrix.apart(averaged["state_dict"], plain["state_dict"]) > 2 * SAME_TO, "not averaged"


# Each topology once on either side, except that DDP is only left.
CHAIN = ("single", "fsdp x2", "zero3 x2", "pipeline x2", "zero1 x2", "PP2xDP2", "ddp x2")
EVERY = [(a, b) for a in TOPOLOGIES for b in TOPOLOGIES]
PAIRS = EVERY if MATRIX else list(pairwise(CHAIN))
# Those that make as many batches of an epoch as DDP does: Lightning counts nothing else.
ON_TWO = [name for name in TOPOLOGIES if name not in ("single", "ddp x2")]
LIGHTNINGS = [(name, False) for name in (ON_TWO if MATRIX else ["pipeline x2"])]


@pytest.fixture(scope="module")
def differences():
    """When all pairs were trained (`make matrix`), they become the table in docs/. Rows: before;
    columns: after; zero: equal in every bit."""
    measured = {}
    yield measured
    if len(measured) == len(EVERY):
        rows = [["", *TOPOLOGIES], ["---"] * (len(TOPOLOGIES) + 1)]
        for before in TOPOLOGIES:
            values = [measured[before, after] for after in TOPOLOGIES]
            rows.append([f"**{before}**", *(f"{value:.0e}" if value else "0" for value in values)])
        table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
        page = ROOT / "docs/strategies/checkpoints.md"
        above, begin, rest = page.read_text().partition("<!-- table: any to any -->\n")
        page.write_text(f"{above}{begin}{table}{''.join(rest.partition('<!-- /table -->')[1:])}")


@pytest.mark.parametrize(("before", "after"), PAIRS, ids=[f"{a} to {b}" for a, b in PAIRS])
def test_resumes_as_if_nothing_had_changed(before, after, runs, differences):
    whole = runs.train(before)
    rest = runs.train(f"{before} then {after}", TOPOLOGIES[after], resume=step(whole, HALF))
    result = difference(step(whole), step(rest))
    differences[before, after] = result
    assert result < SAME_TO


@pytest.mark.parametrize(("name", "old"), [*LIGHTNINGS, ("fsdp x2", True), ("zero3 x2", True)])
def test_a_file_by_position_resumes_alike(name, old, runs):
    """One of Lightning's, or an old one, of distdl 0.1."""
    ddp = runs.train("ddp x2")
    kind = "old" if old else "lightnings"
    file = matrix.by_position(step(ddp, HALF), runs.folder / f"{kind}.ckpt", keep=old)
    if not old:  # Lightning's does not say which samples are left
        ddp = runs.train("lightnings then ddp", TOPOLOGIES["ddp x2"], resume=file)
    resumed = runs.train(f"{kind} then {name}", TOPOLOGIES[name], resume=file)
    assert difference(step(ddp), step(resumed)) < SAME_TO


# Two accumulated batches a step.
ACCUMULATING = {
    "pipeline": matrix.staged(2, 4, 2, repeat=2),
    "local_sgd": two("local_sgd", "strategy.sync_every=2", *matrix.batch(2, 2)),
}
if MATRIX:
    for each in ("ddp", "fsdp", "deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3"):
        ACCUMULATING[each] = two(each, *matrix.batch(2, 2))
ENDS = ("+callbacks.ends._target_=tests.strategies.small.Ends", "+callbacks.ends.after=5")


@pytest.mark.parametrize("name", ACCUMULATING)
def test_a_time_limit_between_accumulated_batches_loses_no_gradient(name, runs):
    topology = ACCUMULATING[name]
    whole = runs.train(f"{name} without a limit", topology)
    cut = runs.train(f"{name} with a limit", topology.plus(*ENDS)) / "last.ckpt"
    assert matrix.read(cut)["global_step"] < STEPS
    rest = runs.train(f"{name} after a limit", topology, resume=cut)
    assert difference(step(whole), step(rest)) < SAME_TO
