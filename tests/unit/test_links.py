"""Links between folders of images: counted once, or refused; no image has another's label."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from distdl.data.folder import FolderImages
from distdl.data.views import EvalView
from distdl.datasets import records
from distdl.datasets.folder import Folder
from distdl.stores.walking import ClassFolders
from distdl.util.errors import UserError
from tests.prepared import jpeg

# What the training and the preparation see: split and file name of each image, with its label.
Seen = Counter[tuple[str, str, int]]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two classes, "a" and "b", of two images each; one of them lies in a folder inside."""
    root = tmp_path / "data" / "images"
    for split in ("train", "val"):
        for label, name in enumerate("ab"):
            (root / split / name / "inner").mkdir(parents=True)
            for n, folder in enumerate((".", "inner")):
                (root / split / name / folder / f"{split}{label}{n}.jpg").write_bytes(jpeg(n))
    return root


def trained(root: Path) -> Seen:
    folders = ClassFolders(root, "data.root")
    found: Seen = Counter()
    for split in ("train", "val"):
        images = FolderImages(root / split, EvalView(8), folders)
        found.update((split, images.path(i).name, images.label(i)) for i in range(len(images)))
    return found


def prepared(root: Path) -> Seen:
    samples = Folder(root).scan(lambda done, total: None)
    return Counter((s.split, Path(str(s.where[0])).name, s.label) for s in samples)


both = pytest.mark.parametrize("seen", [trained, prepared])


@both
@pytest.mark.parametrize("to", [".", "..", "../..", "../../..", "inner", "/"])
def test_a_link_that_leads_round_counts_nothing_twice(
    seen: Callable[[Path], Seen], to: str, root: Path
) -> None:
    before = seen(root)
    assert len(before) == 8 and set(before.values()) == {1}
    (root / "train" / "a" / "again").symlink_to(to)
    (root / "val" / "b" / "inner" / "up").symlink_to("..")
    assert seen(root) == before


@both
@pytest.mark.parametrize(
    ("link", "to"),
    [
        ("train/a/again", "../b"),
        ("train/a/again", "../b/inner"),
        ("train/a/again", "../../val"),
        ("train/b/again", "../../val/a"),
        ("val/a/again", "../../train/b"),
    ],
)
def test_images_of_two_classes_are_refused(
    seen: Callable[[Path], Seen], link: str, to: str, root: Path
) -> None:
    (root / link).symlink_to(to)
    with pytest.raises(UserError, match=rf"{root}.* are the same folder.*\n.*remove the link"):
        seen(root)


@both
def test_a_class_that_is_another_one_is_refused(seen: Callable[[Path], Seen], root: Path) -> None:
    for split in ("train", "val"):
        (root / split / "c").symlink_to("a")
    with pytest.raises(UserError, match=r"train/a and .*train/c are the same folder"):
        seen(root)


@both
def test_links_to_folders_elsewhere_are_followed(
    seen: Callable[[Path], Seen], root: Path, tmp_path: Path
) -> None:
    before = seen(root)
    (root / "train" / "a").rename(tmp_path / "pool")
    (root / "train" / "a").symlink_to(tmp_path / "pool")
    assert seen(root) == before
    for path in (root / "val").iterdir():  # validation on the training images, to try things
        path.rename(tmp_path / path.name)
    (root / "val").rmdir()
    (root / "val").symlink_to("train")
    found = seen(root)
    assert sorted(label for split, _, label in found.elements() if split == "val") == [0, 0, 1, 1]


def test_files_of_records_count_once(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "x.parquet").touch()
    (tmp_path / "train" / "round").symlink_to("..")
    (tmp_path / "train" / "again").symlink_to(".")
    (tmp_path / "val").symlink_to("train")
    found = records.find_files(tmp_path, r"\.parquet$", "*.parquet", None)[1]
    assert sorted(found.values()) == ["train", "val"]
