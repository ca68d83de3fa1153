"""The image data modules: generated images, and folders of classes."""

import pytest
import torch
from torchvision.datasets import ImageFolder

from distdl.data import StoredImages
from distdl.data.images import ImageData
from distdl.data.synthetic_jpeg import SyntheticJpegs, jpegs
from tests.prepared import refusal
from tests.unit.sample_data import share, synthetic, write_photographs


def test_synthetic_images_are_of_their_index_and_normalised_on_the_device():
    mean, std = (0.5, 0.25, 0.0), (0.5, 0.25, 1.0)
    data = share(synthetic(5, 5, pool_size=7, train_samples=21, mean=mean, std=std))
    first = next(iter(data.train_dataloader()))
    assert torch.equal(first["label"], first["index"] % 7 % 5)
    image = data.on_after_batch_transfer(first, 0)["image"]
    assert image.shape == (4, 3, 8, 8)
    assert image.dtype == torch.float32
    assert image.is_contiguous(memory_format=torch.channels_last)
    constants = (torch.tensor(values).view(1, 3, 1, 1) for values in (mean, std))
    expected = (data.images(first["index"]) / 255 - next(constants)) / next(constants)
    torch.testing.assert_close(image, expected, atol=1e-6, rtol=1e-6)
    index = torch.tensor([0, 3, 10, 700_003])
    images, again, other = (synthetic(pool_size=7, seed=n).images(index) for n in (0, 0, 1))
    assert torch.equal(images, again)
    assert not torch.equal(images, other)
    assert torch.equal(images[1], images[2])
    assert not torch.equal(images[0], images[1])
    # Classes differ more than their images.
    labels = torch.arange(64) % 4
    images = synthetic(classes=4, pool_size=64).images(torch.arange(64)).float()
    means = torch.stack([images[labels == c].mean(0) for c in range(4)])
    assert torch.equal((images[:, None] - means).flatten(2).norm(dim=2).argmin(1), labels)


def test_generated_jpegs_have_the_size_that_was_asked_for():
    files = jpegs(3, 2, 200, 150, 20_000, seed=0)
    assert len(set(files)) == 3
    assert all(18_000 < len(file) < 22_000 for file in files)
    assert files == jpegs(3, 2, 200, 150, 20_000, seed=0) != jpegs(3, 2, 200, 150, 20_000, seed=1)
    sizes = {
        "width": 64,
        "height": 48,
        "kilobytes": 3,
        "train_samples": 9,
        "val_samples": 5,
        "val_crop_size": 28,
        "val_resize_size": 29,
    }
    data = SyntheticJpegs(4, 2, 22, pool_size=4, num_workers=0, **sizes)
    data.setup()
    batch = next(iter(data.val_dataloader()))
    train = data.train_dataloader()
    assert batch["image"].shape == (4, 3, 28, 28)
    assert batch["label"].tolist() == [0, 1, 0, 1]
    assert len(train.dataset) == 9
    assert next(iter(train))["image"].shape == (4, 3, 22, 22)
    image = batch["image"].float()
    assert (image[0] - image[2]).abs().mean() < (image[0] - image[1]).abs().mean()


def test_cores_are_shared_by_the_ranks_of_a_machine(monkeypatch):
    monkeypatch.setattr("distdl.data.images.cpu_cores", lambda: 12)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert ImageData(4, None).num_workers == 5


@pytest.fixture
def photographs(tmp_path):
    write_photographs(tmp_path, ("cat", "dog"), train=3, val=1)
    (tmp_path / "train/dog/notes.txt").write_text("no image")
    return tmp_path


def folder_data(root, num_classes=2):
    data = StoredImages(str(root), 2, num_classes, image_size=16, num_workers=0)
    data.setup()
    return share(data)


def test_folders_become_batches(photographs):
    (photographs / "train/cat/zebra").mkdir()
    (photographs / "train/cat/2.jpg").rename(photographs / "train/cat/zebra/2.JPEG")
    theirs = ImageFolder(str(photographs / "train")).samples
    (photographs / "train/cat/._0.jpg").write_text("macOS puts it beside an image")
    for split in ("train", "val"):
        (photographs / split / ".cache").mkdir()
    loader = folder_data(photographs).train_dataloader()
    train = list(loader)
    images = loader.dataset.dataset
    assert [(images.name(i), images.label(i)) for i in range(len(images))] == theirs
    image = train[0]["image"]
    assert len(train) == 3
    assert image.shape == (2, 3, 16, 16)
    assert image.dtype == torch.uint8
    labels = {int(i): int(x) for b in train for i, x in zip(b["index"], b["label"], strict=True)}
    assert labels == dict(enumerate(label for _, label in theirs))
    link = photographs / "train/cat/3.jpg"  # unreadable: damaged
    link.symlink_to("gone")
    batches = folder_data(photographs).train_dataloader()
    (text,) = [text for batch in batches for text in batch["damaged"] if text]
    assert text == f"{link}: cannot be read: No such file or directory"


def test_check_and_setup_report_what_is_wrong(photographs):
    def problems(root, **config):
        return [f"{p} {p.remedy}" for p in StoredImages.check({"root": str(root), **config})]

    (photographs / "half/.preparing").mkdir(parents=True)
    assert problems(photographs, num_classes=2) == [] == problems(photographs)
    (text,) = problems(photographs, num_classes=1000)
    assert text.startswith("num_classes: is 1000")
    assert text.endswith("data.num_classes=2")
    assert refusal(folder_data, photographs, 3).path == "data.num_classes"
    (photographs / "val/fox").mkdir()
    for inner, text in (
        ("none", f"no such folder: {photographs / 'none'}"),
        ("train", "has no train/"),
        ("val/cat/0.jpg", "val/cat/0.jpg is a file"),
        ("half", "was interrupted"),
        (".", "train/ has 2 classes and val/ 3; only one of the two has fox"),
    ):
        found = problems(photographs / inner)[0]
        assert found.startswith("root: ")
        assert text in found
    (photographs / "val/fox").rmdir()
    (photographs / "val/dog/0.jpg").unlink()
    assert "val/dog holds no image" in refusal(folder_data, photographs).what
