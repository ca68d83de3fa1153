"""`distribute`: the loaders of any data module, samplers of a user's own, and their datasets."""

import pickle
import random
import traceback
import warnings

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
)

from distdl.data.drawing import Drawn, seed_all
from distdl.data.keyed import KeyedDataset
from distdl.data.sampling import EvalBatches, SampleKey, TrainBatches, TrainPosition
from distdl.util.errors import Problem, Unfinished, UserError
from tests.unit.sample_data import Augmented, Loaders, draw_all, share


def draw(dataset, index, epoch=0):
    return dataset[SampleKey(index, epoch, 1.0)].tolist()


def loader(size=2, samples=24, **options):
    return lambda: DataLoader(Augmented(samples), size, **options)


def test_a_sample_depends_on_seed_epoch_and_index_alone():
    dataset = KeyedDataset(Augmented(), seed=3)
    once = draw(dataset, 4)
    draw(dataset, 5), draw_all()
    assert draw(pickle.loads(pickle.dumps(dataset)), 4) == draw(dataset, 4) == once
    for other in (draw(dataset, 4, epoch=1), draw(KeyedDataset(Augmented(), 4), 4)):
        assert all(a != b for a, b in zip(other[1:], once[1:], strict=True))
    assert dataset.classes == ("cat", "dog")
    assert len(dataset) == 10
    assert dataset[3][0] == 3
    assert not hasattr(dataset, "nothing")
    # The generators of this process keep their states, and what draws nothing is not seeded.
    seed_all(1)
    expected = draw_all()
    seed_all(1)
    assert draw(dataset, 2)
    assert draw_all() == expected
    seed_all(1)
    dataset.dataset.is_deterministic = True
    assert draw(dataset, 1)[1:] == pytest.approx(expected)


def test_workers_make_no_difference():
    def batches(workers):
        source = share(Loaders(loader(3, 12, shuffle=True, num_workers=workers)))
        return [batch.tolist() for batch in source.train_dataloader()]

    assert batches(0) == batches(2)


def test_loaders_keep_their_settings():
    settings = {
        "num_workers": 1,
        "collate_fn": list,
        "pin_memory": False,
        "timeout": 9,
        "worker_init_fn": print,
        "generator": torch.Generator(),
        "in_order": False,
        "prefetch_factor": 5,
        "persistent_workers": True,
        "multiprocessing_context": "spawn",
    }
    made = DataLoader(Augmented(), 3, shuffle=True, **settings)
    rebuilt = share(Loaders(lambda: made)).train_dataloader()
    assert isinstance(rebuilt.batch_sampler, TrainBatches)
    assert rebuilt.batch_sampler.shuffle
    for name in settings:
        assert getattr(rebuilt, name) == getattr(made, name), name
    unshuffled = share(Loaders(loader(5, shuffle=True)), shuffle=False).train_dataloader()
    assert next(iter(unshuffled))[:, 0].tolist() == [0, 1, 2, 3, 4]


class OfOwnClass(DataLoader):
    pass


class Endless(IterableDataset):
    shards_itself = True

    def __iter__(self):
        while True:
            yield torch.rand(())


def test_workers_that_stay_get_seeds_that_leave_the_training_alone():
    """Torch draws them from the global generator, once in a process: a resumed one drew again."""
    stay = {"num_workers": 1, "persistent_workers": True}
    epochs, seeds = TrainPosition(epoch=2), []
    for make, position, more in (
        (loader(**stay), None, {}),
        (loader(**stay), None, {"share": False}),
        (lambda: OfOwnClass(Augmented(), 2, **stay), None, {}),
        (lambda: DataLoader(Endless(), 2, **stay), None, {}),
        (lambda: DataLoader(Endless(), 2, **stay), epochs, {}),
    ):
        source = share(Loaders(make), position=position, **more)
        for made in (source.train_dataloader(), source.val_dataloader()):
            before = torch.get_rng_state()
            batches = iter(made)
            next(batches)
            assert torch.equal(before, torch.get_rng_state()), (make, more)
            seeds.append(batches._base_seed)
    assert len({*seeds}) == 4, "by the stage, and by the epoch in which they start"
    of_two = share(Loaders(lambda: [loader(**stay)(), loader(**stay)()])).val_dataloader()
    assert len({made.generator.initial_seed() for made in of_two}) == 2
    # As they were: workers that are started for each epoch, and runs of older checkpoints.
    for source in (
        share(Loaders(loader(num_workers=1))),
        share(Loaders(loader(**stay)), position=TrainPosition(seeds_apart=False)),
    ):
        before = torch.get_rng_state()
        iter(source.train_dataloader())
        assert not torch.equal(before, torch.get_rng_state())


class OwnDraws(Dataset):
    """Draws from a generator in an attribute."""

    def __init__(self):
        self.generator = np.random.default_rng(0)

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return torch.tensor([index, self.generator.random()])


VALIDATIONS = {
    "no workers": {},
    "workers of one validation": {"num_workers": 2},
    "workers that stay": {"num_workers": 2, "persistent_workers": True},
    "in order of a sampler": {"num_workers": 1, "persistent_workers": True, "shuffle": True},
}


@pytest.mark.parametrize("dataset", [Augmented, OwnDraws])
@pytest.mark.parametrize("options", VALIDATIONS.values(), ids=VALIDATIONS)
def test_a_validation_on_one_rank_draws_the_same_after_a_resume(options, dataset):
    def validated(loader):
        """The batches; and the state of the process that a checkpoint would have after them."""
        batches = [batch.tolist() for batch in loader]
        return batches, torch.get_rng_state()

    def made(epoch):
        make = lambda: DataLoader(dataset(), 2, **options)  # noqa: E731
        return share(Loaders(make), position=TrainPosition(epoch=epoch)).val_dataloader()

    seed_all(1)
    whole = made(0)
    _, between = validated(whole)
    states = random.getstate(), np.random.get_state()
    expected, after = validated(whole)
    seed_all(2)  # another process
    random.setstate(states[0]), np.random.set_state(states[1]), torch.set_rng_state(between)
    resumed, after_resumed = validated(made(1))
    assert resumed == expected
    assert torch.equal(after, after_resumed)
    assert sorted(row[0] for batch in resumed for row in batch) == [*range(len(dataset()))]


def test_a_validation_loader_that_needs_no_keys_is_the_users_own():
    stay = {"num_workers": 1, "persistent_workers": True}
    for make in (
        loader(),
        loader(num_workers=1),
        lambda: DataLoader(TensorDataset(torch.rand(4)), 2, **stay),
    ):
        mine = make()
        assert share(Loaders(lambda mine=mine: mine)).val_dataloader() is mine
    # As the runs of older checkpoints did, whose training would draw otherwise.
    mine = DataLoader(OwnDraws(), 2, **stay)
    older = TrainPosition(seeds_apart=False)
    assert share(Loaders(lambda: mine), position=older).val_dataloader() is mine


def test_what_no_resume_of_a_validation_repeats_is_named(caplog):
    caplog.set_level("INFO")
    stay = {"num_workers": 1, "persistent_workers": True}
    for many in (1, 2):
        caplog.clear()
        share(Loaders(lambda: DataLoader(Endless(), 2, **stay)), world_size=many).val_dataloader()
        assert "val_dataloader: what the workers of DataLoader draw, if they do," in caplog.text
    caplog.clear()
    share(Loaders(lambda: DataLoader(Endless(), 2, num_workers=1))).val_dataloader()
    assert not caplog.text
    with pytest.warns(UserWarning, match="val_dataloader: a resume does not repeat what is drawn"):
        share(Loaders(lambda: DataLoader(Unseeded(), 2))).val_dataloader()


class Unseeded(OwnDraws):
    def __getitem__(self, index):
        return torch.tensor([index, np.random.default_rng().random()])


class Refusing(Augmented):
    def __getitem__(self, index):
        problem = Problem("data.root", "cannot be reached", "resume later")
        raise Unfinished(problem) from OSError("no answer")


def test_workers_pass_on_refusals():
    with pytest.raises(Unfinished) as error:
        next(iter(DataLoader(Refusing(), num_workers=1)))
    assert str(error.value) == "data.root: cannot be reached\n    resume later"
    text = "".join(traceback.format_exception(error.value))  # for the rank's file
    assert "OSError: no answer" in text


def test_collections_of_loaders():
    def make():
        return {"a": loader()(), "b": [loader(3)()], "c": None}

    position = TrainPosition()
    loaders = share(Loaders(make), 1, 2, position).train_dataloader()
    assert isinstance(loaders["a"].batch_sampler, TrainBatches)
    assert loaders["c"] is None
    assert isinstance(loaders["b"][0].batch_sampler, TrainBatches)
    assert position.samples == position.per_batch == 10
    pair = share(Loaders(lambda: tuple(make()["b"])), 1, 2).val_dataloader()
    assert isinstance(pair, tuple)
    assert isinstance(pair[0].batch_sampler, EvalBatches)
    combined = share(Loaders(lambda: CombinedLoader(make()["b"], "sequential")), 1, 2)
    assert isinstance(combined.val_dataloader().iterables[0].batch_sampler, EvalBatches)
    source = share(Loaders(make), position=TrainPosition(0, 4))
    with pytest.warns(UserWarning, match="start the epoch again"):
        assert len(list(source.train_dataloader()["a"])) == 12


def test_each_uneven_loader_is_named_once(recwarn):
    """Of several validation loaders, and also where torch's sampler repeats the samples."""

    def of(count, sampler=None):
        return DataLoader(TensorDataset(torch.arange(count)), sampler=sampler)

    def make():
        torchs = [DistributedSampler(range(n), 2, 0, shuffle=False) for n in (9, 4)]
        return [of(8), of(7), of(5), of(9, torchs[0]), of(4, torchs[1])]

    source = share(Loaders(make), 0, 2)
    for _ in range(2):
        source.val_dataloader()
    told = [str(each.message) for each in recwarn if "twice" in str(each.message)]
    starts = ("7 samples over 2", "5 samples over 2", "a DistributedSampler gives 1 of 9 samples")
    pairs = zip(starts, told, strict=True)
    assert all(text.startswith(f"val_dataloader: {start}") for start, text in pairs), told


def test_uneven_evaluation_reports_how_many_count_twice():
    made = loader()()
    assert share(Loaders(lambda: made)).val_dataloader() is made, "one rank: as it is"
    with pytest.warns(UserWarning, match="10 samples over 3 ranks: 2 of them are counted twice"):
        uneven = share(Loaders(loader(2, 10)), 0, 3).val_dataloader()
    assert [len(batch) for batch in uneven] == [2, 2]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        share(Loaders(loader(2, 9)), 0, 3).val_dataloader()
        share(Loaders(loader(2, 10)), 1, 3).val_dataloader()
    stream = Stream()
    stream.shards_itself = False
    with pytest.warns(UserWarning, match="fewer than 2 that are left at the end .* are not used"):
        cut = share(Loaders(lambda: DataLoader(stream, None)), 0, 2).val_dataloader()
    assert list(cut) == [0, 2, 4, 6], "of 9"
    source = share(LightningDataModule())  # Lightning calls what is overridden
    assert not is_overridden("test_dataloader", source)


class Own(Sampler):
    """Draws from a generator of its own, or from one that everybody shares, or counts epochs."""

    def __init__(self, generator=None):
        self.generator = generator
        self.count = 0

    def __len__(self):
        return 24

    def __iter__(self):
        if self.generator is not None:
            return (np.int64(round(self.generator.random() * 23)) for _ in range(24))
        self.count += 1
        generator = torch.Generator().manual_seed(self.count)
        return iter(torch.randperm(24, generator=generator).tolist())


class ByEpoch(Own):
    def set_epoch(self, epoch):
        self.count = epoch


class Batches(Own):
    """Of 1, 2, 3 samples in turn, in another order in each epoch."""

    def __len__(self):
        return 12

    def __iter__(self):
        starts = torch.randperm(12).tolist()
        return iter([[2 * s + k % 2 for k in range(1 + s % 3)] for s in starts])


class Irreplaceable(DataLoader):
    def __init__(self):
        super().__init__(Augmented(24), 2, sampler=Own())


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(9))


class ShardsItself(Own):
    num_replicas, rank = 2, 0


SAMPLERS = {
    "weighted": lambda: torch.utils.data.WeightedRandomSampler([1.0] * 24, 24),
    "own generator": lambda: SubsetRandomSampler(range(24), generator=torch.Generator()),
    "random": lambda: Own(random),
    "Random": lambda: Own(random.Random()),
    "numpy": lambda: Own(np.random.default_rng()),
    "RandomState": lambda: Own(np.random.RandomState()),
    "count": Own,
    "set_epoch": ByEpoch,
    "in batches": lambda: BatchSampler(Own(), 4, False),
}


@pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)
def test_an_order_depends_on_seed_and_epoch_alone(make):
    one, later = Drawn(make()), Drawn(make())
    orders = [one.order(7, epoch).tolist() for epoch in range(4)]
    draw_all()
    assert later.order(7, 3).tolist() == orders[3] != orders[2]
    assert later.order(7, 3).tolist() == orders[3], "asked for twice, as Lightning does"


def train(make, world, *where):
    """The batches of all ranks, step by step, and the position that counts them."""
    ranks = []
    for rank in range(world):
        position = TrainPosition(*where)
        batches = share(Loaders(make), rank, world, position).train_dataloader()
        ranks.append([[int(i) for i in batch[:, 0]] for batch in batches])
    return [batch for step in zip(*ranks, strict=True) for batch in step], position


def test_a_run_resumes_at_another_world_size():
    """Two ranks, then one with the double batch, then four with half of it."""

    def samples(size, *where):
        batches, position = train(lambda: loader(size, sampler=Own())(), *where)
        return [i for batch in batches for i in batch], position

    order, _ = samples(2, 2, 2)
    assert sorted(order) == list(range(24))
    rest, position = samples(4, 1, 2, 8)
    assert position.per_batch == 4
    assert rest == order[8:]
    assert samples(1, 4, 2, 16)[0] == order[16:]
    # Custom batches are dealt out as they are.
    make = lambda: DataLoader(Augmented(24), batch_sampler=Batches())  # noqa: E731
    batches, _ = train(make, 1)
    assert len(batches) == 12
    assert {len(batch) for batch in batches} == {1, 2, 3}
    two, position = train(make, 2, 0, 4)
    assert two == batches[4:]
    assert (position.per_batch, position.samples) == (2, None)


@pytest.mark.parametrize(
    ("make", "fragment"),
    [
        (Irreplaceable, "Irreplaceable cannot be given one rank's share"),
        (lambda: DataLoader(Augmented(), sampler=iter(range(8))), "its sampler has no length"),
        (lambda: DataLoader(Stream()), "Stream, an iterable dataset"),
    ],
)
def test_ranks_never_train_silently_on_the_same_samples(make, fragment):
    with pytest.raises(UserError, match=fragment) as error:
        share(Loaders(make), 0, 2).train_dataloader()
    assert "trainer.use_distributed_sampler=false" in str(error.value)
    made = make()
    for arguments in ({}, {"world_size": 2, "share": False}):
        assert share(Loaders(lambda: made), **arguments).train_dataloader() is made
    with pytest.warns(UserWarning, match="starts the epoch again"):
        share(Loaders(lambda: made), position=TrainPosition(0, 4)).train_dataloader()


@pytest.mark.parametrize(
    "make",
    [
        loader(sampler=ShardsItself()),  # as torch's DistributedSampler
        lambda: DataLoader(Augmented(24), batch_sampler=BatchSampler(ShardsItself(), 2, False)),
    ],
)
def test_a_loader_that_shards_itself_is_unchanged(make):
    made = make()
    position = TrainPosition()
    source = share(Loaders(lambda: made), 0, 2, position)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert source.train_dataloader() is made is source.val_dataloader()
    assert position.samples == position.per_batch == 4


def test_another_kind_of_loader_is_unchanged_with_one_warning():
    made = iter(())
    source = Loaders(lambda: made)
    source.val_dataloader = None  # as PyTorch Geometric's does without a validation set
    assert share(source, 0, 2).val_dataloader is None
    with pytest.warns(UserWarning, match="not a DataLoader.*shard itself over 2") as seen:
        assert source.train_dataloader() is made is source.train_dataloader()
    assert len(seen) == 1


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"batch_size": 2}, [*range(24)]),
        ({"sampler": range(5, 12), "batch_size": 2}, [*range(5, 12)]),
        ({"batch_sampler": Batches()}, sorted(i for b in Drawn(Batches()).order(0, 0) for i in b)),
    ],
)
def test_exact_evaluation_counts_what_a_sampler_chose(world, options, expected):
    """Each sample once, and all ranks equally often."""
    counted = []
    lengths = set()
    for rank in range(world):
        make = lambda: DataLoader(Augmented(24, as_dict=True), **options)  # noqa: E731
        source = share(Loaders(make, exact=True), rank, world)
        batches = list(source.val_dataloader())
        assert all(torch.equal(b["x"][:, 0], b["index"].float()) for b in batches)
        lengths.add(len(batches))
        counted += [i for b in batches for i in b["index"][b["weight"] > 0].tolist()]
    assert sorted(counted) == expected
    assert len(lengths) == 1
    assert (batches[0]["weight"].dtype, batches[0]["index"].dtype) == (torch.float32, torch.int64)
    make = lambda: DataLoader(Augmented(24), **options)  # noqa: E731
    with pytest.raises(UserError, match="exact_evaluation = True needs samples that are dicts"):
        list(share(Loaders(make, exact=True)).val_dataloader())
