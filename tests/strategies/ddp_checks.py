"""What test_ddp runs on two gloo ranks: each function of a `folder` is a check, done on both."""

import copy
import functools
import gzip
import inspect
import json
import logging
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging

from distdl.callbacks.count_traffic import CountTraffic
from distdl.callbacks.trace import Trace
from distdl.distributed import process_group
from distdl.strategies import bucket_search, drifting
from distdl.strategies.ddp import DDPStrategy
from distdl.strategies.fsdp import FSDPStrategy
from distdl.strategies.local_sgd import LocalSGDStrategy
from distdl.util.errors import UserError
from tests.strategies import own_steps
from tests.strategies.small import Small, checksum, flat, loader, shard, trainer

BUCKETS = {"bucket_cap_mb": 0.03}  # MiB: several of them
PLAIN, NORM = partial(Small, momentum=0.0), partial(Small, batch_norm=True)
POST_LOCAL = partial(DDPStrategy, "post_local_sgd", hook_start_step=2, average_every=3)
POWER_SGD = partial(DDPStrategy, "powersgd", hook_start_step=2, **BUCKETS)
OUTER = {each: partial(LocalSGDStrategy, 3, each) for each in ("average", "nesterov")}


class Thawed(Small):
    """Trains its convolution from the fourth batch on, as BackboneFinetuning does."""

    def __init__(self) -> None:
        super().__init__()
        self.network[0].requires_grad_(False)

    def on_train_batch_start(self, batch, batch_idx) -> None:
        if batch_idx == 3:
            self.network[0].requires_grad_(True)


# name -> strategy, module
DDP = {
    "none": {},
    "buckets": BUCKETS,
    "bf16": {"comm_hook": "bf16"},
    "fp16": {"comm_hook": "fp16"},
    "static_graph": {"static_graph": True, "gradient_as_bucket_view": True},
}
TRAININGS = {name: (partial(DDPStrategy, **options), Small) for name, options in DDP.items()}
TRAININGS |= {"powersgd": (POWER_SGD, Small), "post_local": (POST_LOCAL, Small)}
TRAININGS |= {"thawed": (DDPStrategy, Thawed), "batch_norm": (DDPStrategy, NORM)}
TRAININGS |= {
    "plain_sgd": (DDPStrategy, PLAIN),
    "every_step": (partial(LocalSGDStrategy, 1), PLAIN),
}
TRAININGS |= {f"local_{n}": (partial(LocalSGDStrategy, n), NORM) for n in (2, 4)}
TRAININGS |= {name: (make, Small) for name, make in OUTER.items()}


class Saves(Callback):
    """Writes a checkpoint after the fourth step, as our Checkpointer does."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer, *args) -> None:
        if trainer.global_step == 4:
            trainer.save_checkpoint(self.path)


class Written(Callback):
    """What the kernel saw this process write in the steps after the second: gloo's sockets."""

    bytes = batches = 0

    def now(self) -> int:
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(fields["wchar"])

    def on_train_batch_start(self, *args) -> None:
        torch.distributed.barrier()
        self.before = self.now()

    def on_train_batch_end(self, trainer, *args) -> None:
        if trainer.global_step > 2:
            self.bytes += self.now() - self.before
            self.batches += 1


def run(folder, name):
    """On each rank: the check of this name."""
    logging.disable(logging.WARNING)
    Path(folder).mkdir(exist_ok=True)
    CHECKS[name](Path(folder))
    yield from ()


def both(**values):
    """These values on rank 0 and on rank 1."""
    return [SimpleNamespace(**rank) for rank in process_group.gather(values)]


@functools.cache
def trained(name):
    make, module = TRAININGS[name]
    module, traffic, wire = module(), CountTraffic(skip_steps=2), Written()
    steps = 10 if name in ("local_2", "local_4") else 8
    with tempfile.TemporaryDirectory() as folder:
        # Lightning calls them in this order: the first's barrier comes before the second counts.
        trainer(make(), steps, Path(folder), [wire, traffic]).fit(module, loader())
    weights = flat(module)
    assert weights.isfinite().all()
    return both(
        losses=module.losses,
        weights=weights[:2000].tolist(),
        checksum=checksum(module),
        bytes=4 * len(weights),
        traffic=traffic.per_step(),
        written=wire.bytes / wire.batches,
    )


def ranks_stay_equal(folder):
    for name in ("none", "bf16", "fp16", "powersgd", "static_graph", "thawed"):
        zero, one = trained(name)
        assert zero.checksum == one.checksum, name
        assert zero.losses != one.losses, "they have samples of their own"


def half_precision_rounds_and_little_more(folder):
    """Equal to the last bit would mean that the hook was dropped."""
    plain = trained("none")[0]
    for name, tolerance in (("bf16", 1e-3), ("fp16", 1e-4)):
        rounded = trained(name)[0]
        assert rounded.checksum != plain.checksum
        assert rounded.losses == pytest.approx(plain.losses, abs=tolerance)


def powersgd_begins_at_its_step_in_several_buckets(folder):
    """Steps 1 and 2 travel plainly, so the first three losses are those of plain DDP."""
    plain, low_rank = trained("buckets")[0].losses, trained("powersgd")[0]
    assert low_rank.losses[:3] == plain[:3] and low_rank.losses[3:] != plain[3:]
    assert low_rank.losses == pytest.approx(plain, abs=0.1)
    assert low_rank.traffic["collectives"]["allreduce"]["calls"] == 2 * 3


def buckets_and_static_graph_change_no_number(folder):
    for name in ("buckets", "static_graph"):
        one, other = trained(name)[0], trained("none")[0]
        assert (one.losses, one.checksum) == (other.losses, other.checksum)


def all_ranks_choose_the_same_bucket_size_while_they_train(folder):
    strategy, module = DDPStrategy(bucket_cap_mb="auto"), Small()
    with patch.multiple(bucket_search, SIZES_MB=(0.03,), STEPS=3):
        trainer(strategy, 8, folder).fit(module, loader())
    assert list(strategy.search.seconds) == [0.03, 1.0]
    zero, one = both(chosen=strategy.search.size, checksum=checksum(module))
    assert zero.chosen == one.chosen in (0.03, 1.0)
    assert zero.checksum == one.checksum == trained("none")[0].checksum


def a_trace_shows_the_collectives_of_the_recorded_steps(folder):
    """Two steps of one bucket each."""
    trainer(DDPStrategy(), 5, folder, [Trace(skip_batches=2, batches=2)]).fit(Small(), loader())
    rank = torch.distributed.get_rank()
    text = gzip.decompress((folder / "logs" / f"trace-rank{rank}.json.gz").read_bytes())
    names = [e["name"] for e in json.loads(text)["traceEvents"] if e.get("ph") == "X"]
    assert names.count("gloo:all_reduce") >= 2


def post_local_sgd_ends_with_equal_weights(folder):
    """Averages after steps 5 and 8; with six steps the last average would be missing."""
    (zero, one), plain = trained("post_local"), trained("none")[0].losses
    assert zero.checksum == one.checksum
    assert zero.losses[:3] == plain[:3] and zero.losses[3:] != plain[3:]


def continued(make, path, steps):
    """From the checkpoint on."""
    module = Small()
    fitted = trainer(make(), steps, path.parent)
    fitted.fit(module, loader(skip=4), ckpt_path=path, weights_only=True)
    assert fitted.global_step == steps
    return module


def interrupted(make, path, steps):
    """A training with a checkpoint after its fourth step, and another one from there."""
    whole = Small()
    trainer(make(), steps, path.parent, [Saves(path)]).fit(whole, loader())
    torch.distributed.barrier()
    return whole, continued(make, path, steps)


def resumes_exactly_from_between_two_meetings(folder):
    """To the last bit, on each rank: inner momentum, outer momentum and weights."""
    for name, make in {"post_local": POST_LOCAL, **OUTER}.items():
        whole, rest = interrupted(make, folder / f"{name}.ckpt", 7)
        assert (rest.losses, checksum(rest)) == (whole.losses[4:], checksum(whole)), name
        saved = torch.load(folder / f"{name}.ckpt", weights_only=True)
        assert "network.0.bias" in saved["optimizer_states"][0]["state"] and "state_dict" in saved
        momentum = saved.get("local_sgd", {}).get("momentum", {}).keys()
        names = {name for name, _ in rest.named_parameters()}
        assert momentum == (names if name == "nesterov" else set())


def powersgd_resumes_with_two_plain_steps(folder):
    """Its memory of errors is each rank's own and is in no checkpoint: documented, not exact."""
    whole, rest = interrupted(POWER_SGD, folder / "middle.ckpt", 7)
    assert rest.losses[0] == whole.losses[4]
    assert rest.losses == pytest.approx(whole.losses[4:], abs=0.05)
    zero, one = both(checksum=checksum(rest))
    assert zero == one


def ddp_opens_a_checkpoint_of_local_sgd(folder):
    """Its first loss is that of local_sgd resuming from the same checkpoint."""
    _, rest = interrupted(OUTER["nesterov"], folder / "local.ckpt", 7)
    module = continued(DDPStrategy, folder / "local.ckpt", 6)
    zero, one = both(checksum=checksum(module))
    assert zero == one and module.losses[0] == rest.losses[0]


@torch.no_grad()
def by_hand(outer, steps, every):
    """Two workers in one process, as in algorithm 1 of the papers, and no distdl."""
    workers = [Small(), Small()]
    last = copy.deepcopy(workers[0])
    inner = [worker.configure_optimizers() for worker in workers]
    momentum = [torch.zeros_like(p) for p in last.parameters()]
    for step in range(steps):
        for rank, worker in enumerate(workers):
            images, labels = shard(rank)[step * 4 : (step + 1) * 4]
            inner[rank].zero_grad()
            with torch.enable_grad():
                torch.nn.functional.cross_entropy(worker.network(images), labels).backward()
            inner[rank].step()
        if (step + 1) % every and step + 1 < steps:
            continue
        parameters = zip(last.parameters(), *(w.parameters() for w in workers), strict=True)
        for i, (old, one, two) in enumerate(parameters):
            new = (one + two) / 2
            if outer == "nesterov":
                delta = old - new
                momentum[i] = 0.9 * momentum[i] + delta
                new = old - 0.7 * (delta + 0.9 * momentum[i])
            for parameter in (old, one, two):
                parameter.copy_(new)
    return last


def local_sgd_is_the_algorithm_of_the_papers(folder):
    """Eight steps, meetings after 3, 6 and (the end) 8; the ranks are apart in between."""
    for outer in OUTER:
        (zero, one), expected = trained(outer), by_hand(outer, steps=8, every=3)
        assert zero.weights == pytest.approx(flat(expected)[:2000].tolist(), abs=1e-6)
        assert zero.checksum == pytest.approx(checksum(expected), rel=1e-6)
        assert zero.checksum == one.checksum
        assert zero.losses != pytest.approx(trained("none")[0].losses, abs=1e-3)


def meeting_at_every_step_is_ddp(folder):
    """Without momentum, the mean of the weights after a step is the step of the mean gradient."""
    local, ddp = trained("every_step")[0], trained("plain_sgd")[0]
    assert local.losses == pytest.approx(ddp.losses, abs=1e-5)
    assert local.weights == pytest.approx(ddp.weights, abs=1e-6)


def validation_sees_the_same_weights_on_all_ranks(folder):
    """After step 5, one step behind a meeting, batch norm and a moving average included."""
    module, ema = Small(batch_norm=True), EMAWeightAveraging(decay=0.5)
    options = {"limit_val_batches": 1, "val_check_interval": 5, "check_val_every_n_epoch": None}
    fitted = trainer(LocalSGDStrategy(sync_every=4), 6, folder, [ema], **options)
    # The same sample everywhere: only the weights may differ.
    fitted.fit(module, loader(), loader(rank=0))
    zero, one = both(seen=module.validated, end=checksum(module))
    assert zero == one and len(zero.seen) == 1


def an_average_keeps_layout_and_types(folder):
    """Tensors of several types and layouts, more than a bucket holds."""
    rank = float(torch.distributed.get_rank())
    images = torch.full((2, 3, 4, 4), rank).contiguous(memory_format=torch.channels_last)
    half, single = torch.full((5,), 2 * rank, dtype=torch.bfloat16), torch.tensor(rank)
    with patch.object(drifting, "BUCKET_BYTES", 100):
        assert drifting.average_([images, half, single]) == 96 * 4 + 5 * 2 + 4
    assert [t.unique().tolist() for t in (images, half, single)] == [[0.5], [1.0], [0.5]]
    assert images.is_contiguous(memory_format=torch.channels_last)


def fsdp_trains_what_ddp_trains(folder):
    for make in own_steps.ALIKE:
        results = []
        for strategy in (FSDPStrategy(), DDPStrategy(find_unused_parameters=True)):
            module = make()
            trainer(strategy, 8, folder).fit(module, loader())
            full = (getattr(p, "full_tensor", lambda p=p: p)() for p in module.parameters())
            results.append([*module.losses, *(float(v.detach().abs().sum()) for v in full)])
        assert len(module.losses) >= 4 and results[0] == pytest.approx(results[1], rel=1e-5), make


def what_fsdp_would_get_wrong_is_refused_on_all_ranks(folder):
    for make, message in own_steps.REFUSED.items():
        with pytest.raises(UserError) as error:
            trainer(FSDPStrategy(), 8, folder).fit(make(), loader())
        assert message in str(error.value) and "strategy=ddp" in str(error.value)


# powersgd of rank 1: rows + columns of each matrix that this makes smaller, and all other numbers
# (biases and the norm).
FACTORS = (8 + 27) + (160 + 128) + (10 + 160) + (8 + 8 + 8 + 160 + 10)
STATISTICS = 2 * 8 * 4  # of batch norm; its counter is not a number to be averaged
# Bytes of a step, from those of the parameters. Of the eight counted steps of local_sgd, every
# second or fourth ends in a meeting.
PAYLOADS = {
    "none": lambda size: size,
    "batch_norm": lambda size: size + STATISTICS + 8,
    "bf16": lambda size: size / 2,
    "fp16": lambda size: size / 2,
    "powersgd": lambda size: 4 * FACTORS,
    "post_local": lambda size: size / 3,
    "local_2": lambda size: (size + STATISTICS) / 2,
    "local_4": lambda size: (size + STATISTICS) / 4,
}


def a_step_sends_as_much_as_arithmetic_says_and_the_kernel_saw(folder):
    """gloo adds 96 bytes and more of its own to a message (handshakes of the steps, headers)."""
    for name, payload in PAYLOADS.items():
        rank = trained(name)[0]
        assert rank.traffic["payload"] == payload(rank.bytes), name
        calls = sum(tally["calls"] for tally in rank.traffic["collectives"].values())
        if name not in ("batch_norm", "post_local"):
            sent = rank.traffic["sent"]
            assert sent <= rank.written <= sent + 600 * calls, name


CHECKS = {
    name: value
    for name, value in list(globals().items())
    if inspect.isfunction(value) and list(inspect.signature(value).parameters) == ["folder"]
}
