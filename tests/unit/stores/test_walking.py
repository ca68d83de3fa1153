"""Links between folders of images: counted once, or refused; no image has another's label."""

from collections import Counter
from pathlib import Path

import pytest

from distdl.data.folder import FolderImages
from distdl.images.views import EvalView
from distdl.stores.walking import ClassFolders
from distdl.tools.prepare.folder import Folder
from distdl.util.errors import UserError


@pytest.fixture
def root(tmp_path):
    """Two classes, "a" and "b", of two images each; one of them lies in a folder inside."""
    root = tmp_path / "data" / "images"
    for split in ("train", "val"):
        for label, name in enumerate("ab"):
            (root / split / name / "inner").mkdir(parents=True)
            for n, folder in enumerate((".", "inner")):
                (root / split / name / folder / f"{split}{label}{n}.jpg").touch()
    return root


def trained(root):
    folders = ClassFolders(root, "data.root")
    for split in ("train", "val"):
        images = FolderImages(root / split, EvalView(8), folders)
        yield from ((split, images.path(i).name, images.label(i)) for i in range(len(images)))


def prepared(root):
    for sample in Folder(root).scan(lambda done, total: None):
        yield sample.split, Path(str(sample.where[0])).name, sample.label


@pytest.fixture(params=[trained, prepared], ids=lambda function: function.__name__)
def seen(request, root):
    """What the training or the preparation sees: how often each image, by split, name, label."""
    return lambda: Counter(request.param(root))


@pytest.mark.parametrize("to", ["..", "../../..", "inner", "/"])
def test_a_link_that_leads_round_counts_nothing_twice(seen, to, root):
    before = seen()
    assert len(before) == 8
    assert set(before.values()) == {1}
    (root / "train" / "a" / "again").symlink_to(to)
    (root / "val" / "b" / "inner" / "up").symlink_to("..")
    assert seen() == before


OTHERS = [{"train/a/again": "../b/inner"}, {"train/b/again": "../../val/a"}]


@pytest.mark.parametrize("links", [*OTHERS, {"train/c": "a", "val/c": "a"}])
def test_images_of_two_classes_are_refused(seen, links, root):
    for link, to in links.items():
        (root / link).symlink_to(to)
    with pytest.raises(UserError, match=rf"{root}.* are the same folder.*\n.*remove the link"):
        seen()


def test_links_to_folders_elsewhere_are_followed(seen, root, tmp_path):
    before = seen()
    (root / "train" / "a").rename(tmp_path / "pool")
    (root / "train" / "a").symlink_to(tmp_path / "pool")
    assert seen() == before
    (root / "val").rename(tmp_path / "val")
    (root / "val").symlink_to("train")  # validation on the training images, to try things
    labels = sorted(label for split, _, label in seen().elements() if split == "val")
    assert labels == [0, 0, 1, 1]
