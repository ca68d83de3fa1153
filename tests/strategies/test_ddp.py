"""ddp, local_sgd, modules that step by hand, and bytes per step, on two gloo ranks.

Each function of a `folder` is a check, done on both ranks. Every hook of ddp takes effect on a CPU,
local_sgd is the algorithm of its papers written by hand, and what FSDP2 would get wrong is refused.
"""

import copy
import functools
import gzip
import inspect
import json
import tempfile
from functools import partial
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, LambdaCallback
from torch.nn.parallel import DistributedDataParallel

from distdl import tasks
from distdl.callbacks import StepMetrics
from distdl.callbacks.count_traffic import CountTraffic
from distdl.callbacks.trace import Trace
from distdl.distributed import process_group
from distdl.strategies import bucket_search
from distdl.strategies.bucket_search import NOT_COUNTED, STEPS, BucketSearch
from distdl.strategies.ddp import DDPStrategy
from distdl.strategies.fsdp import FSDPStrategy
from distdl.strategies.local_sgd import LocalSGDStrategy
from distdl.util.errors import UserError
from tests.conftest import TINY
from tests.strategies import small
from tests.strategies.ranks import Case, built_of, shared
from tests.strategies.small import Small, Thawed, checksum, flat, loader, shard, trainer

BUCKETS = {"bucket_cap_mb": 0.03}  # MiB: several of them
NORM = partial(Small, batch_norm=True)
POST_LOCAL = partial(DDPStrategy, "post_local_sgd", hook_start_step=2, average_every=3)
POWER_SGD = partial(DDPStrategy, "powersgd", hook_start_step=2, **BUCKETS)
STATIC = partial(DDPStrategy, static_graph=True, gradient_as_bucket_view=True)
OUTER = {each: partial(LocalSGDStrategy, 3, each) for each in ("average", "nesterov")}
# name -> strategy, module
TRAININGS = {
    "none": (DDPStrategy, Small),
    "buckets": (partial(DDPStrategy, **BUCKETS), Small),
    "bf16": (partial(DDPStrategy, "bf16"), Small),
    "fp16": (partial(DDPStrategy, "fp16"), Small),
    "static_graph": (STATIC, Small),
    "powersgd": (POWER_SGD, Small),
    "post_local": (POST_LOCAL, Small),
    "thawed": (DDPStrategy, Thawed),
    "batch_norm": (DDPStrategy, NORM),
    "local_2": (partial(LocalSGDStrategy, 2), NORM),
    **{name: (make, Small) for name, make in OUTER.items()},
}


def both(**values):
    """These values on rank 0 and on rank 1."""
    return [SimpleNamespace(**rank) for rank in process_group.gather(values)]


@functools.cache
def trained(name):
    make, module = TRAININGS[name]
    module = module()
    traffic = CountTraffic(skip_steps=2)
    with tempfile.TemporaryDirectory() as folder:
        trainer(make(), 8, Path(folder), [traffic]).fit(module, loader())
    weights = flat(module)
    assert weights.isfinite().all()
    return both(
        losses=module.losses,
        weights=weights[:2000].tolist(),
        checksum=checksum(module),
        bytes=4 * len(weights),
        **{name: traffic.per_step()[name] for name in ("payload", "sent")},
    )


def every_option_of_ddp_has_its_effect(folder):
    plain, buckets = trained("none")[0], trained("buckets")[0]
    for name in ("none", "bf16", "fp16", "powersgd", "static_graph", "thawed", "post_local"):
        zero, one = trained(name)
        assert zero.checksum == one.checksum, name
        assert zero.losses != one.losses, "they have samples of their own"
    for one in (buckets, trained("static_graph")[0]):
        assert (one.losses, one.checksum) == (plain.losses, plain.checksum)
    # Equal to the last bit would mean that the hook was dropped.
    for name, tolerance in (("bf16", 1e-3), ("fp16", 1e-4), ("powersgd", 0.1)):
        rounded = trained(name)[0]
        assert rounded.checksum != plain.checksum
        assert rounded.losses == pytest.approx(plain.losses, abs=tolerance)
    # Steps 1 and 2 are plain, so the first three losses are those of plain DDP. The averages are
    # after steps 5 and 8; with six steps the last one would be missing.
    for name, without in (("powersgd", buckets), ("post_local", plain)):
        losses = trained(name)[0].losses
        assert losses[:3] == without.losses[:3]
        assert losses[3:] != without.losses[3:]


def all_ranks_choose_the_same_bucket_size_while_they_train(folder):
    strategy = DDPStrategy(bucket_cap_mb="auto")
    module = Small()
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


def continued(make, path, steps):
    """From the checkpoint on."""
    module = Small()
    fitted = trainer(make(), steps, path.parent)
    fitted.fit(module, loader(skip=4), ckpt_path=path, weights_only=True)
    assert fitted.global_step == steps
    return module


def interrupted(make, path):
    """A training of 7 steps with a checkpoint after its fourth step, and another from there."""
    whole = Small()
    saves = LambdaCallback(
        on_train_batch_end=lambda at, *_: at.global_step == 4 and at.save_checkpoint(path)
    )
    trainer(make(), 7, path.parent, [saves]).fit(whole, loader())
    torch.distributed.barrier()
    return whole, continued(make, path, 7)


def resumes_from_between_two_meetings(folder):
    """To the last bit, on each rank: inner momentum, outer momentum and weights."""
    for name, make in {"post_local": POST_LOCAL, **OUTER}.items():
        whole, rest = interrupted(make, folder / f"{name}.ckpt")
        assert (rest.losses, checksum(rest)) == (whole.losses[4:], checksum(whole)), name
        saved = torch.load(folder / f"{name}.ckpt", weights_only=True)
        assert "network.0.bias" in saved["optimizer_states"][0]["state"]
        assert "state_dict" in saved
        momentum = saved.get("local_sgd", {}).get("momentum", {}).keys()
        names = {name for name, _ in rest.named_parameters()}
        assert momentum == (names if name == "nesterov" else set())
    # DDP opens it, too: its first loss is that of local_sgd resuming from there.
    module = continued(DDPStrategy, folder / "nesterov.ckpt", 6)
    zero, one = both(checksum=checksum(module))
    assert zero == one
    assert module.losses[0] == rest.losses[0]
    # PowerSGD's memory of errors is each rank's own and in no checkpoint: two plain steps.
    whole, rest = interrupted(POWER_SGD, folder / "middle.ckpt")
    assert rest.losses[0] == whole.losses[4]
    assert rest.losses == pytest.approx(whole.losses[4:], abs=0.05)
    zero, one = both(checksum=checksum(rest))
    assert zero == one


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
        zero, one = trained(outer)
        expected = by_hand(outer, steps=8, every=3)
        assert zero.weights == pytest.approx(flat(expected)[:2000].tolist(), abs=1e-6)
        assert zero.checksum == pytest.approx(checksum(expected), rel=1e-6)
        assert zero.checksum == one.checksum
        assert zero.losses != pytest.approx(trained("none")[0].losses, abs=1e-3)


def validation_sees_the_same_weights_on_all_ranks(folder):
    """After step 5, one step behind a meeting, batch norm and a moving average included."""
    module = Small(batch_norm=True)
    ema = EMAWeightAveraging(decay=0.5)
    options = {"limit_val_batches": 1, "val_check_interval": 5, "check_val_every_n_epoch": None}
    fitted = trainer(LocalSGDStrategy(sync_every=4), 6, folder, [ema], **options)
    # The same sample everywhere: only the weights may differ.
    fitted.fit(module, loader(), loader(rank=0))
    zero, one = both(seen=module.validated, end=checksum(module))
    assert zero == one
    assert len(zero.seen) == 1


def fsdp_trains_what_ddp_trains_or_refuses_it_on_all_ranks(folder):
    for make in small.UNDER_FSDP:
        results = []
        for strategy in (FSDPStrategy(), DDPStrategy(find_unused_parameters=True)):
            module = make()
            trainer(strategy, 8, folder).fit(module, loader())
            full = (getattr(p, "full_tensor", lambda p=p: p)() for p in module.parameters())
            results.append([*module.losses, *(float(v.detach().abs().sum()) for v in full)])
        assert len(module.losses) >= 4, make
        assert results[0] == pytest.approx(results[1], rel=1e-5), make
    for make, message in small.NOT_UNDER_FSDP.items():
        with pytest.raises(UserError) as error:
            trainer(FSDPStrategy(), 8, folder).fit(make(), loader())
        assert message in str(error.value)
        assert "strategy=ddp" in str(error.value)


def fsdp_calls_steps_with_what_they_take(folder):
    """As Lightning does under ddp: without a number, decorated, or with the loader's iterator."""
    steps = partial(small.OwnArguments, False), partial(small.OwnArguments, True), small.OwnIterator
    for make in steps:
        losses = []
        for strategy in (FSDPStrategy(), DDPStrategy()):
            module = make()
            samples = loader()
            plain = inspect.signature(module.training_step)
            trainer(strategy, 4, folder, limit_val_batches=1).fit(module, samples, samples)
            assert inspect.signature(module.training_step) == plain
            losses.append(module.losses)
        assert len(losses[0]) == 4, make
        assert losses[0] == pytest.approx(losses[1], rel=1e-5), make
    module = small.OwnArguments(False)
    trainer(FSDPStrategy(), 4, folder).predict(module, loader())


class SilentOnOne(small.ByHand):
    """Returns a loss on rank 0, and on rank 1 in its third step alone."""

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        returns = self.global_rank == 0 or batch_idx == 2
        return torch.tensor(10.0 + self.global_rank) if returns else None


def a_rank_that_returns_no_loss_keeps_nobody_waiting(folder):
    metrics = StepMetrics(None)
    logged = []
    metrics.listeners.append(SimpleNamespace(on_metrics=lambda *args: logged.append(args[-1])))
    strategy = DDPStrategy(find_unused_parameters=True)
    fitted = trainer(strategy, 8, folder, [metrics], log_every_n_steps=1)
    fitted.fit(SilentOnOne(), loader())
    (zero, _) = both(losses=[entry["train/loss"] for entry in logged])
    assert zero.losses == [10, 10, 10.5, 10]


# powersgd of rank 1: rows + columns of each matrix that this makes smaller, and all other numbers
# (biases and the norm).
FACTORS = (8 + 27) + (160 + 128) + (10 + 160) + (8 + 8 + 8 + 160 + 10)
STATISTICS = 2 * 8 * 4  # of batch norm; its counter is not a number to be averaged
# Bytes of a step, from those of the parameters. Of the six counted steps two or three end in a
# meeting.
PAYLOADS = {
    "none": lambda size: size,
    "batch_norm": lambda size: size + STATISTICS + 8,
    "bf16": lambda size: size / 2,
    "powersgd": lambda size: 4 * FACTORS,
    "post_local": lambda size: size / 3,
    "local_2": lambda size: (size + STATISTICS) / 2,
}


def a_step_sends_as_much_as_arithmetic_says(folder):
    for name, payload in PAYLOADS.items():
        rank = trained(name)[0]
        assert rank.payload == payload(rank.bytes), name
    assert trained("none")[0].sent == trained("none")[0].payload, "a ring of two: 2 x 1/2"


CHECKS = [
    name
    for name, value in list(globals().items())
    if inspect.isfunction(value) and list(inspect.signature(value).parameters) == ["folder"]
]


@pytest.mark.parametrize("check", CHECKS)
def test_on_two_ranks(check, tmp_path):
    shared(2).train(Case([], tmp_path, call=f"tests.strategies.test_ddp:{check}"))


def test_a_bucket_search_takes_the_slowest_rank_and_the_median():
    """Rank 1 is slow with small buckets: 1 MB is fastest here, and 5 MB for all."""
    other = iter([0.9, 0.3, 0.4])
    search = BucketSearch(20.5, lambda mine: [mine, next(other)], sizes_mb=(1, 5, 25))
    assert search.sizes == [1, 5, 21.0]  # 25 is as good as one bucket
    steps = {1: 0.1, 5: 0.2, 21.0: 0.3}
    changes = []
    for number, _ in zip(cycle(range(STEPS)), range(3 * STEPS), strict=False):
        changes.append(search.add_step(5.0 if number < NOT_COUNTED else steps[search.size]))
    assert search.done
    assert search.size == 5
    assert sum(changes) == 3
    assert changes[STEPS - 1]
    assert search.describe() == "1 MB 900.0 ms, 5 MB 300.0 ms, 21 MB 400.0 ms: 5 MB"


def alone(folder):
    wrapped = []
    seen = LambdaCallback(
        on_train_batch_end=lambda trainer, *_: wrapped.append(
            isinstance(trainer.strategy.model, DistributedDataParallel)
        )
    )
    weights = []
    for words in (["strategy=ddp", "strategy.bucket_cap_mb=auto"], ["strategy=auto"]):
        typed = [*TINY, *words, "trainer.max_epochs=1", "callbacks=none"]
        built = built_of(Case(typed, folder / words[0]))
        built.trainer.callbacks.insert(0, seen)
        tasks.train().run(built)
        weights.append(flat(built.module))
    assert wrapped == [False] * 40
    assert weights[0].equal(weights[1])


def test_a_single_device_has_no_wrapper(tmp_path):
    shared(1).train(Case([], tmp_path, call="tests.strategies.test_ddp:alone"))
