"""KeyedDataset, distribute, and the two image data modules."""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import traceback
import warnings

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from distdl.data import StoredImages, SyntheticImages
from distdl.data.folder import FolderImages
from distdl.data.images import default_workers
from distdl.data.loading import KeyedDataset, distribute
from distdl.data.sampling import EvalBatches, SampleKey, TrainBatches, TrainPosition
from distdl.data.worker_signals import Surviving
from distdl.util.errors import Problem, Unfinished, UserError
from tests.prepared import quiet_trainer as trainer


class Augmented(Dataset):
    """Draws from all three generators that a user's augmentation may use."""

    classes = ("cat", "dog")

    def __init__(self, length=10, as_dict=False):
        self.length, self.as_dict = length, as_dict

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        draws = torch.tensor([index, random.random(), np.random.rand(), torch.rand(()).item()])
        return {"x": draws} if self.as_dict else draws


def draw(dataset, index, epoch=0):
    return dataset[SampleKey(index, epoch, 1.0)].tolist()


def test_a_sample_depends_on_seed_epoch_and_index_alone():
    dataset = KeyedDataset(Augmented(), seed=3)
    once = draw(dataset, 4)
    draw(dataset, 5), random.random(), torch.rand(7), np.random.rand(3)
    assert draw(dataset, 4) == once
    others = [draw(dataset, 4, epoch=1), draw(KeyedDataset(Augmented(), 4), 4)]
    for other in others:
        assert all(a != b for a, b in zip(other[1:], once[1:], strict=True))


def test_the_main_processes_generators_are_left_alone():
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = random.random(), np.random.rand(), torch.rand(()).item()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    draw(KeyedDataset(Augmented(), 0), 2)
    assert (random.random(), np.random.rand(), torch.rand(()).item()) == expected


def test_workers_make_no_difference():
    def batches(workers):
        source = Loaders(lambda: DataLoader(Augmented(12), 3, shuffle=True, num_workers=workers))
        share(source)
        return [batch.tolist() for batch in source.train_dataloader()]

    assert batches(0) == batches(2)


def test_a_dataset_that_draws_nothing_is_not_seeded():
    class Fixed(Augmented):
        is_deterministic = True

    torch.manual_seed(5)
    expected = torch.rand(())
    torch.manual_seed(5)
    assert draw(KeyedDataset(Fixed(), 0), 1)[3] == expected


def test_weight_and_index_are_added_to_dicts_only():
    dataset = KeyedDataset(Augmented(as_dict=True), 0, with_weight=True)
    loader = DataLoader(dataset, batch_sampler=[[SampleKey(3, 0, 1.0), SampleKey(0, 0, 0.0)]])
    (batch,) = loader
    assert batch["weight"].dtype == torch.float32 and batch["weight"].tolist() == [1, 0]
    assert batch["index"].dtype == torch.int64 and batch["index"].tolist() == [3, 0]
    with pytest.raises(UserError, match="exact_evaluation = True needs samples that are dicts"):
        draw(KeyedDataset(Augmented(), 0, with_weight=True), 0)


def test_the_wrapped_datasets_attributes_stay_within_reach():
    dataset = KeyedDataset(Augmented(), 0)
    assert dataset.classes == ("cat", "dog") and len(dataset) == 10
    assert dataset[3][0] == 3
    assert draw(pickle.loads(pickle.dumps(dataset)), 1) == draw(dataset, 1)
    with pytest.raises(AttributeError):
        _ = dataset.nothing


class Loaders(LightningDataModule):
    """Gives what `make` makes, in every stage."""

    def __init__(self, make, exact=False):
        super().__init__()
        self.make = make
        if exact:
            self.exact_evaluation = True

    def train_dataloader(self):
        return self.make()

    def val_dataloader(self):
        return self.make()

    def test_dataloader(self):
        return [self.make(), self.make()]

    def predict_dataloader(self):
        return self.make()


def share(source, rank=0, world_size=1, position=None, **kwargs):
    position = position or TrainPosition()
    distribute(source, rank=rank, world_size=world_size, seed=0, position=position, **kwargs)
    return source


def test_loaders_keep_their_settings():
    settings = {
        "num_workers": 1,
        "collate_fn": list,
        "pin_memory": False,
        "timeout": 9,
        "worker_init_fn": print,
        "multiprocessing_context": "spawn",
        "prefetch_factor": 5,
        "generator": torch.Generator(),
        "persistent_workers": True,
        "in_order": False,
    }
    given = DataLoader(Augmented(), 3, shuffle=True, **settings)
    rebuilt = share(Loaders(lambda: given)).train_dataloader()
    assert isinstance(rebuilt.batch_sampler, TrainBatches) and rebuilt.batch_sampler.shuffle
    for name in settings:
        assert getattr(rebuilt, name) == getattr(given, name), name


def test_two_ranks_share_the_training_samples_and_resume():
    def indices(rank, consumed=0):
        source = Loaders(lambda: DataLoader(Augmented(23), 4, shuffle=True))
        share(source, rank, 2, TrainPosition(2, consumed))
        return [batch[:, 0].tolist() for batch in source.train_dataloader()]

    whole = [indices(0), indices(1)]
    assert [len(batches) for batches in whole] == [2, 2]
    assert len({i for batches in whole for batch in batches for i in batch}) == 16
    assert [indices(0, 8), indices(1, 8)] == [batches[1:] for batches in whole]


def test_shuffling_can_be_switched_off():
    source = share(Loaders(lambda: DataLoader(Augmented(), 5, shuffle=True)), shuffle=False)
    assert next(iter(source.train_dataloader()))[:, 0].tolist() == [0, 1, 2, 3, 4]


def test_workers_end_with_their_rank_alone():
    """Others signal a whole job: that is not reason to end in the middle of a step."""
    loader = DataLoader(Augmented(64), 4, num_workers=1, worker_init_fn=Surviving())
    batches = iter(loader)
    next(batches)
    (worker,) = batches._workers
    subprocess.run(["kill", "-TERM", str(worker.pid)], check=True)
    worker.join(0.3)
    assert worker.is_alive() and len(list(batches)) == 15
    batches = iter(loader)
    next(batches)
    (worker,) = batches._workers
    worker.terminate()  # as multiprocessing does at the end of a script
    worker.join(20)
    assert worker.exitcode == 0


def test_collections_of_loaders():
    def make():
        return {"a": DataLoader(Augmented(), 2), "b": [DataLoader(Augmented(), 2)], "c": None}

    loaders = share(Loaders(make), 1, 2).train_dataloader()
    assert isinstance(loaders["a"].batch_sampler, TrainBatches) and loaders["c"] is None
    assert isinstance(loaders["b"][0].batch_sampler, TrainBatches)
    pair = share(Loaders(lambda: tuple(make()["b"])), 1, 2).val_dataloader()
    assert isinstance(pair, tuple) and isinstance(pair[0].batch_sampler, EvalBatches)
    combined = share(Loaders(lambda: CombinedLoader(make()["b"], "sequential")), 1, 2)
    assert isinstance(combined.val_dataloader().iterables[0].batch_sampler, EvalBatches)


def test_several_training_loaders_start_the_epoch_anew_and_say_so():
    source = Loaders(lambda: [DataLoader(Augmented(), 2), DataLoader(Augmented(), 5)])
    share(source, position=TrainPosition(0, 4))
    with pytest.warns(UserWarning, match="start the epoch anew"):
        loaders = source.train_dataloader()
    assert [len(list(loader)) for loader in loaders] == [5, 2]


def test_evaluation_on_one_rank_is_the_users_own():
    given = DataLoader(Augmented(), 3)
    assert share(Loaders(lambda: given)).val_dataloader() is given


def test_uneven_evaluation_says_how_many_count_twice():
    source = share(Loaders(lambda: DataLoader(Augmented(10), 2)), 0, 3)
    with pytest.warns(UserWarning, match="10 samples over 3 ranks: 2 of them are counted twice"):
        loader = source.val_dataloader()
    assert [len(batch) for batch in loader] == [2, 2]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        share(Loaders(lambda: DataLoader(Augmented(9), 2)), 0, 3).val_dataloader()
        share(Loaders(lambda: DataLoader(Augmented(10), 2)), 1, 3).val_dataloader()


@pytest.mark.parametrize("samples", [1, 2, 4, 7, 9])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_exact_evaluation_counts_each_sample_once(samples, world_size):
    counted = []
    for rank in range(world_size):
        make = lambda: DataLoader(Augmented(samples, as_dict=True), 2)  # noqa: E731
        loader = share(Loaders(make, exact=True), rank, world_size).val_dataloader()
        for batch in loader:
            assert torch.equal(batch["x"][:, 0], batch["index"].float())
            counted += batch["index"][batch["weight"] > 0].tolist()
    assert sorted(counted) == list(range(samples))


def test_exact_sources_get_weights_in_training_too():
    make = lambda: DataLoader(Augmented(4, as_dict=True), 2)  # noqa: E731
    batch = next(iter(share(Loaders(make, exact=True)).train_dataloader()))
    assert batch["weight"].tolist() == [1, 1] and batch["index"].tolist() == [0, 1]


class Recorder(LightningModule):
    """Trains on nothing; remembers what it saw."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.seen = {"train": [], "val": []}

    def training_step(self, batch, batch_idx):
        self.seen["train"] += batch[:, 0].int().tolist()
        return self.layer(batch.float()).sum()

    def validation_step(self, batch, batch_idx):
        self.seen["val"] += batch[:, 0].int().tolist()

    def predict_step(self, batch, batch_idx):
        return batch[:, 0]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.0)


class RecorderWithData(Recorder):
    def train_dataloader(self):
        return DataLoader(Augmented(10), 3, shuffle=True)

    def val_dataloader(self):
        return DataLoader(Augmented(10), 3)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("inside", [True, False])
def test_lightning_takes_the_wrapped_hooks(tmp_path, inside):
    module = RecorderWithData() if inside else Recorder()
    make = lambda: DataLoader(Augmented(10), 3, shuffle=True)  # noqa: E731
    data = None if inside else share(Loaders(make))
    if inside:
        share(module)
    trainer(tmp_path, max_epochs=1).fit(module, datamodule=data)
    expected = [
        i for keys in share(Loaders(make)).train_dataloader().batch_sampler for i, *_ in keys
    ]
    assert module.seen["train"] == expected and sorted(module.seen["val"]) == list(range(10))


def test_hooks_that_the_user_lacks_stay_absent():
    class ValidatesOnly(LightningDataModule):
        def val_dataloader(self):
            return []

    source = share(ValidatesOnly())
    assert is_overridden("val_dataloader", source)
    assert not is_overridden("test_dataloader", source)


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*custom batch sampler")
def test_lightning_predicts_with_the_wrapped_hooks(tmp_path):
    make = lambda: DataLoader(Augmented(10), 4)  # noqa: E731
    found = trainer(tmp_path).predict(Recorder(), share(Loaders(make), 1, 2))
    assert torch.cat(found).tolist() == [1, 3, 5, 7, 9]


# Our own data modules


def synthetic(**kwargs):
    return SyntheticImages(4, num_classes=5, image_size=8, pool_size=7, **kwargs)


def test_synthetic_images_are_a_function_of_the_index():
    data, again, other = synthetic(), synthetic(), synthetic(seed=1)
    index = torch.tensor([0, 3, 10, 700_003])
    images = data.images(index)
    assert images.shape == (4, 3, 8, 8) and images.dtype == torch.uint8
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(images, again.images(index)) and not torch.equal(images, other.images(index))
    assert torch.equal(images[1], images[2]) and not torch.equal(images[0], images[1])


def test_synthetic_classes_differ_more_than_their_images():
    data = SyntheticImages(4, num_classes=4, image_size=16, pool_size=64)
    images = data.images(torch.arange(64)).float()
    labels = torch.arange(64) % 4
    means = torch.stack([images[labels == c].mean(0) for c in range(4)])
    nearest = (images[:, None] - means).flatten(2).norm(dim=2).argmin(1)
    assert torch.equal(nearest, labels)


def test_synthetic_batches():
    data = share(synthetic(train_samples=21, val_samples=5))
    (first, *_), val = list(data.train_dataloader()), list(data.val_dataloader())
    assert torch.equal(first["label"], first["index"] % 7 % 5)
    assert [b["weight"].tolist() for b in val] == [[1] * 4, [1, 0, 0, 0]]
    on_device = data.on_after_batch_transfer(first, 0)
    assert on_device["image"].shape == (4, 3, 8, 8) and on_device["image"].dtype == torch.float32


def test_images_are_normalised_on_the_device():
    data = SyntheticImages(2, mean=(0.5, 0.25, 0.0), std=(0.5, 0.25, 1.0))
    image = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in ((0.5, 0.25, 0.0), (0.5, 0.25, 1.0)))
    found = data.normalize(image)
    torch.testing.assert_close(found, (image / 255 - mean) / std, atol=1e-6, rtol=1e-6)
    assert found.is_contiguous(memory_format=torch.channels_last)


def test_cores_are_shared_by_the_ranks_of_a_machine(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(12), raising=False)
    assert default_workers() == 10, "two are left to the training"
    for ranks, workers in ((2, 5), (5, 1), (50, 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        assert default_workers() == workers
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8 * 24), raising=False)
    assert default_workers() == 16


@pytest.fixture
def photographs(tmp_path):
    """Two classes, three images each for training (one grey, one .JPEG), one for validation."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 3), ("val", 1)):
        for name in ("cat", "dog"):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                shape = (40, 60) if i == 1 else (40, 60, 3)
                image = Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8))
                image.save(folder / f"{i}.{'JPEG' if i == 2 else 'png'}")
            (folder / "notes.txt").write_text("no image")
    return tmp_path


def folder_data(root, **kwargs):
    data = StoredImages(str(root), 2, num_classes=2, image_size=16, num_workers=0, **kwargs)
    data.setup()
    return share(data)


def test_folders_become_batches(photographs):
    (photographs / "train" / "cat" / "._0.png").write_text("macOS puts it beside an image")
    for split in ("train", "val"):
        (photographs / split / ".cache").mkdir()
    data = folder_data(photographs)
    train = list(data.train_dataloader())
    assert len(train) == 3
    assert train[0]["image"].shape == (2, 3, 16, 16) and train[0]["image"].dtype == torch.uint8
    labels = {int(i): int(x) for b in train for i, x in zip(b["index"], b["label"], strict=True)}
    assert labels == {0: 0, 1: 0, 2: 0, 3: 1, 4: 1, 5: 1}
    assert train[0]["label"].dtype == torch.int64


def test_augmentation_differs_by_epoch_and_repeats(photographs):
    def first(epoch):
        dataset = folder_data(photographs).train_dataloader().dataset
        return dataset[SampleKey(0, epoch, 1.0)]["image"]

    assert torch.equal(first(0), first(0)) and not torch.equal(first(0), first(1))


def test_torchvision_finds_the_same_samples(photographs):
    from torchvision.datasets import ImageFolder

    for inner in "zebra", "more", "lion", "ant":
        (photographs / "train" / "cat" / inner).mkdir()
        Image.new("RGB", (8, 8)).save(photographs / "train" / "cat" / inner / "a.jpg")
    ours = FolderImages(photographs / "train", lambda image: image)
    theirs = ImageFolder(str(photographs / "train")).samples
    assert [(str(ours.path(i)), int(ours._labels[i])) for i in range(len(ours))] == theirs


def test_a_class_without_images_is_named(photographs):
    for file in (photographs / "val" / "dog").glob("*.png"):
        file.unlink()
    with pytest.raises(UserError, match="val/dog holds no image"):
        folder_data(photographs)


def problems(root, **kwargs):
    return [(p.path, p.what, p.remedy) for p in StoredImages.check({"root": str(root), **kwargs})]


def test_check_and_setup_say_what_is_wrong(photographs, tmp_path):
    assert problems(photographs, num_classes=2) == [] == problems(photographs)
    assert problems(tmp_path / "none")[0][1] == f"no such folder: {tmp_path / 'none'}"
    without = problems(tmp_path / "train")
    assert len(without) == 2 and "has no train/" in without[0][1]
    path, what, remedy = problems(photographs, num_classes=1000)[0]
    assert (path, remedy) == ("num_classes", "data.num_classes=2") and "is 1000" in what
    with pytest.raises(UserError) as refused:
        StoredImages(str(photographs), 2, num_classes=3, num_workers=0).setup()
    assert refused.value.problems[0].path == "data.num_classes"
    (photographs / "val" / "fox").mkdir()
    (_, differing, _), *_ = problems(photographs)
    assert "train/ has 2 classes and val/ 3" in differing and "fox" in differing
    file = tmp_path / "val" / "cat" / "0.png"
    assert problems(file)[0][1] == f"{file} is a file"
    (tmp_path / "half" / ".preparing").mkdir(parents=True)
    ((path, what, _),) = problems(tmp_path / "half")
    assert path == "root" and "was interrupted" in what


def test_a_file_that_cannot_be_read_is_damaged(photographs):
    link = photographs / "train" / "cat" / "3.jpg"
    link.symlink_to("gone")
    batches = list(folder_data(photographs).train_dataloader())
    (said,) = [text for batch in batches for text in batch["damaged"] if text]
    assert said == f"{link}: cannot be read: No such file or directory"


class Refusing(Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        try:
            raise OSError("no answer")
        except OSError as error:
            raise Unfinished(Problem("data.root", "cannot be reached", "resume later")) from error


def test_a_refusal_in_a_worker_is_said_as_in_the_rank() -> None:
    with pytest.raises(Unfinished) as refused:
        next(iter(DataLoader(Refusing(), num_workers=1)))
    assert str(refused.value) == "data.root: cannot be reached\n    resume later"
    told = "".join(traceback.format_exception(refused.value))  # for the rank's file
    assert 'raise OSError("no answer")' in told
