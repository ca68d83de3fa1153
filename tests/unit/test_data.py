"""KeyedDataset, `distribute` with torch's own samplers, and the two image data modules."""

from __future__ import annotations

import itertools
import os
import pickle
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
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

from distdl.data import StoredImages, SyntheticImages
from distdl.data.folder import FolderImages
from distdl.data.images import default_workers
from distdl.data.loading import KeyedDataset
from distdl.data.sampling import EvalBatches, SampleKey, TrainBatches, TrainPosition
from distdl.data.worker_signals import Surviving
from distdl.util.errors import Problem, Unfinished, UserError
from tests.prepared import quiet_trainer
from tests.unit.sample_data import Augmented, Loaders, draw_all, seed_all, share, synthetic


class Fixed(Augmented):
    is_deterministic = True


def draw(dataset, index, epoch=0):
    return dataset[SampleKey(index, epoch, 1.0)].tolist()


def augmented(size=3, samples=10, exact=False, **options):
    """A source whose loaders give batches of augmented samples."""
    return Loaders(lambda: DataLoader(Augmented(samples, exact), size, **options), exact)


def test_a_sample_depends_on_seed_epoch_and_index_alone():
    dataset = KeyedDataset(Augmented(), seed=3)
    once = draw(dataset, 4)
    draw(dataset, 5), draw_all()
    assert draw(dataset, 4) == once
    for other in (draw(dataset, 4, epoch=1), draw(KeyedDataset(Augmented(), 4), 4)):
        assert all(a != b for a, b in zip(other[1:], once[1:], strict=True))


def test_the_main_processs_generators_keep_their_states():
    seed_all(1)
    expected = draw_all()
    seed_all(1)
    draw(KeyedDataset(Augmented(), 0), 2)
    assert draw_all() == expected
    seed_all(1)
    result = draw(KeyedDataset(Fixed(), 0), 1)[1:]
    assert result == pytest.approx(expected), "what draws nothing is not seeded"


def test_workers_make_no_difference():
    def batches(workers):
        source = share(augmented(3, 12, shuffle=True, num_workers=workers))
        return [batch.tolist() for batch in source.train_dataloader()]

    assert batches(0) == batches(2)


def test_weight_and_index_are_added_to_dicts_only():
    dataset = KeyedDataset(Augmented(as_dict=True), 0, with_weight=True)
    loader = DataLoader(dataset, batch_sampler=[[SampleKey(3, 0, 1.0), SampleKey(0, 0, 0.0)]])
    (batch,) = loader
    assert batch["weight"].dtype == torch.float32 and batch["weight"].tolist() == [1, 0]
    assert batch["index"].dtype == torch.int64 and batch["index"].tolist() == [3, 0]
    with pytest.raises(UserError, match="exact_evaluation = True needs samples that are dicts"):
        draw(KeyedDataset(Augmented(), 0, with_weight=True), 0)
    batch = next(iter(share(augmented(2, 4, exact=True)).train_dataloader()))
    assert batch["weight"].tolist() == [1, 1] and batch["index"].tolist() == [0, 1]


def test_the_wrapped_datasets_attributes_are_available():
    dataset = KeyedDataset(Augmented(), 0)
    assert dataset.classes == ("cat", "dog") and len(dataset) == 10 and dataset[3][0] == 3
    assert draw(pickle.loads(pickle.dumps(dataset)), 1) == draw(dataset, 1)
    assert not hasattr(dataset, "nothing")


def test_loaders_keep_their_settings():
    settings = {"num_workers": 1, "collate_fn": list, "pin_memory": False, "timeout": 9}
    settings |= {"worker_init_fn": print, "generator": torch.Generator(), "in_order": False}
    settings |= {"prefetch_factor": 5, "persistent_workers": True}
    settings |= {"multiprocessing_context": "spawn"}
    loader = DataLoader(Augmented(), 3, shuffle=True, **settings)
    rebuilt = share(Loaders(lambda: loader)).train_dataloader()
    assert isinstance(rebuilt.batch_sampler, TrainBatches) and rebuilt.batch_sampler.shuffle
    for name in settings:
        assert getattr(rebuilt, name) == getattr(loader, name), name
    unshuffled = share(augmented(5, shuffle=True), shuffle=False).train_dataloader()
    assert next(iter(unshuffled))[:, 0].tolist() == [0, 1, 2, 3, 4]


def test_workers_end_with_their_rank_alone():
    """Others signal a whole job: that is no reason to end in the middle of a step."""
    loader = DataLoader(Augmented(64), 4, num_workers=1, worker_init_fn=Surviving())

    def start():
        batches = iter(loader)
        next(batches)
        return batches, *batches._workers

    batches, worker = start()
    subprocess.run(["kill", "-TERM", str(worker.pid)], check=True)
    worker.join(0.1)
    assert worker.is_alive() and len(list(batches)) == 15
    batches, worker = start()
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


def test_several_training_loaders_restart_the_epoch_with_a_warning():
    source = Loaders(lambda: [DataLoader(Augmented(), 2), DataLoader(Augmented(), 5)])
    share(source, position=TrainPosition(0, 4))
    with pytest.warns(UserWarning, match="start the epoch again"):
        loaders = source.train_dataloader()
    assert [len(list(loader)) for loader in loaders] == [5, 2]


def test_uneven_evaluation_reports_how_many_count_twice():
    loader = DataLoader(Augmented(), 3)
    assert share(Loaders(lambda: loader)).val_dataloader() is loader, "one rank: as it is"
    source = share(augmented(2, 10), 0, 3)
    with pytest.warns(UserWarning, match="10 samples over 3 ranks: 2 of them are counted twice"):
        loader = source.val_dataloader()
    assert [len(batch) for batch in loader] == [2, 2]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        share(augmented(2, 9), 0, 3).val_dataloader()
        share(augmented(2, 10), 1, 3).val_dataloader()


class Predictor(LightningModule):
    def predict_step(self, batch, batch_idx):
        return batch[:, 0]


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*custom batch sampler")
def test_lightning_calls_the_wrapped_hooks_and_no_others(tmp_path):
    class ValidatesOnly(LightningDataModule):
        def val_dataloader(self):
            return []

    predicted = quiet_trainer(tmp_path).predict(Predictor(), share(augmented(4), 1, 2))
    assert torch.cat(predicted).tolist() == [1, 3, 5, 7, 9]
    source = share(ValidatesOnly())
    assert is_overridden("val_dataloader", source)
    assert not is_overridden("test_dataloader", source)


def test_synthetic_images_are_a_function_of_the_index():
    index = torch.tensor([0, 3, 10, 700_003])
    images, again, other = (synthetic(pool_size=7, seed=n).images(index) for n in (0, 0, 1))
    assert images.shape == (4, 3, 8, 8) and images.dtype == torch.uint8
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(images, again) and not torch.equal(images, other)
    assert torch.equal(images[1], images[2]) and not torch.equal(images[0], images[1])
    # Classes differ more than their images.
    data, labels = (
        SyntheticImages(4, num_classes=4, image_size=16, pool_size=64),
        torch.arange(64) % 4,
    )
    images = data.images(torch.arange(64)).float()
    means = torch.stack([images[labels == c].mean(0) for c in range(4)])
    nearest = (images[:, None] - means).flatten(2).norm(dim=2).argmin(1)
    assert torch.equal(nearest, labels)


def test_synthetic_batches_are_normalised_on_the_device():
    mean, std = (0.5, 0.25, 0.0), (0.5, 0.25, 1.0)
    data = share(synthetic(5, 5, pool_size=7, train_samples=21, mean=mean, std=std))
    first, val = next(iter(data.train_dataloader())), list(data.val_dataloader())
    assert torch.equal(first["label"], first["index"] % 7 % 5)
    assert [b["weight"].tolist() for b in val] == [[1] * 4, [1, 0, 0, 0]]
    image = data.on_after_batch_transfer(first, 0)["image"]
    assert image.shape == (4, 3, 8, 8) and image.dtype == torch.float32
    assert image.is_contiguous(memory_format=torch.channels_last)
    constants = (torch.tensor(values).view(1, 3, 1, 1) for values in (mean, std))
    expected = (data.images(first["index"]) / 255 - next(constants)) / next(constants)
    torch.testing.assert_close(image, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    "cores, ranks, workers", [(12, 1, 10), (12, 2, 5), (12, 5, 1), (12, 50, 1), (192, 8, 16)]
)
def test_cores_are_shared_by_the_ranks_of_a_machine(monkeypatch, cores, ranks, workers):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(cores), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert default_workers() == workers


@pytest.fixture
def photographs(tmp_path):
    """Two classes, three images each for training (one grey, one .JPEG), one for validation."""
    rng = np.random.default_rng(0)
    for split, name in itertools.product(("train", "val"), ("cat", "dog")):
        folder = tmp_path / split / name
        folder.mkdir(parents=True)
        for i in range(3 if split == "train" else 1):
            pixels = rng.integers(0, 256, (40, 60) if i == 1 else (40, 60, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{i}.{'JPEG' if i == 2 else 'png'}")
        (folder / "notes.txt").write_text("no image")
    return tmp_path


def folder_data(root):
    data = StoredImages(str(root), 2, num_classes=2, image_size=16, num_workers=0)
    data.setup()
    return share(data)


def test_folders_become_batches(photographs):
    (photographs / "train/cat/._0.png").write_text("macOS puts it beside an image")
    for split in ("train", "val"):
        (photographs / split / ".cache").mkdir()
    train = list(folder_data(photographs).train_dataloader())
    image = train[0]["image"]
    assert len(train) == 3 and image.shape == (2, 3, 16, 16) and image.dtype == torch.uint8
    labels = {int(i): int(x) for b in train for i, x in zip(b["index"], b["label"], strict=True)}
    assert labels == {0: 0, 1: 0, 2: 0, 3: 1, 4: 1, 5: 1}
    assert train[0]["label"].dtype == torch.int64
    dataset = folder_data(photographs).train_dataloader().dataset
    first, again, later = (dataset[SampleKey(0, epoch, 1.0)]["image"] for epoch in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, later)
    link = photographs / "train/cat/3.jpg"  # unreadable: damaged
    link.symlink_to("gone")
    batches = folder_data(photographs).train_dataloader()
    (text,) = [text for batch in batches for text in batch["damaged"] if text]
    assert text == f"{link}: cannot be read: No such file or directory"


def test_torchvision_finds_the_same_samples(photographs):
    for inner in "zebra", "more", "lion", "ant":
        (photographs / "train/cat" / inner).mkdir()
        Image.new("RGB", (8, 8)).save(photographs / "train/cat" / inner / "a.jpg")
    ours = FolderImages(photographs / "train", lambda image: image)
    samples = [(ours.name(i), ours.label(i)) for i in range(len(ours))]
    assert samples == ImageFolder(str(photographs / "train")).samples


def test_check_and_setup_report_what_is_wrong(photographs):
    (photographs / "half/.preparing").mkdir(parents=True)
    file = photographs / "val/cat/0.png"

    def problems(root, **config):
        config = {"root": str(root), **config}
        return [(p.path, f"{p.what} {p.remedy}") for p in StoredImages.check(config)]

    assert problems(photographs, num_classes=2) == [] == problems(photographs)
    (photographs / "val/fox").mkdir()
    for root, config, path, fragment in (
        (photographs / "none", {}, "root", f"no such folder: {photographs / 'none'}"),
        (photographs / "train", {}, "root", "has no train/"),
        (file, {}, "root", f"{file} is a file"),
        (photographs / "half", {}, "root", "was interrupted"),
        (photographs, {}, "root", "train/ has 2 classes and val/ 3; only one of the two has fox"),
    ):
        found = problems(root, **config)
        assert found[0][0] == path and fragment in found[0][1], found
    (photographs / "val/fox").rmdir()
    ((path, text),) = problems(photographs, num_classes=1000)
    assert path == "num_classes" and "is 1000" in text and text.endswith("data.num_classes=2")
    with pytest.raises(UserError) as error:
        StoredImages(str(photographs), 2, num_classes=3, num_workers=0).setup()
    assert error.value.problems[0].path == "data.num_classes"
    (photographs / "val/dog/0.png").unlink()
    with pytest.raises(UserError, match="val/dog holds no image"):
        folder_data(photographs)


class Refusing(Augmented):
    def __getitem__(self, index):
        problem = Problem("data.root", "cannot be reached", "resume later")
        raise Unfinished(problem) from OSError("no answer")


def test_a_refusal_in_a_worker_is_reported_as_in_the_rank() -> None:
    with pytest.raises(Unfinished) as error:
        next(iter(DataLoader(Refusing(), num_workers=1)))
    assert str(error.value) == "data.root: cannot be reached\n    resume later"
    text = "".join(traceback.format_exception(error.value))  # for the rank's file
    assert "OSError: no answer" in text
