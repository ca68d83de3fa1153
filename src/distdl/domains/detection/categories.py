"""The categories of a data set: COCO's ids, which have gaps, and labels, which have none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Categories:
    """Label `n` is the category `ids[n - 1]`, called `names[n - 1]`; 0 is the background.

    `points` are the names of an object's keypoints, in the order of an annotation.
    """

    ids: tuple[int, ...]
    names: tuple[str, ...]
    points: tuple[str, ...] = ()

    @classmethod
    def numbered(cls, count: int) -> Categories:
        """Those of data that name none: the ids are the labels."""
        return cls(tuple(range(1, count + 1)), tuple(map(str, range(1, count + 1))))

    @classmethod
    def of(cls, categories: Iterable[Mapping[str, object]]) -> Categories:
        """From a manifest's or an annotation file's categories (id, name, ...), by their ids.

        Raises:
            ValueError: One has no id or name, or an id is there twice.
        """
        found: dict[int, str] = {}
        points: list[str] = []
        for category in categories:
            identity = category.get("id")
            name = category.get("name")
            if type(identity) is not int or not isinstance(name, str):
                raise ValueError(f"{str(dict(category))[:80]} is no category with id and name")
            if identity in found:
                raise ValueError(f"category {identity} is there twice")
            found[identity] = name
            named = category.get("keypoints")
            if isinstance(named, list) and len(named) > len(points):
                points = [str(each) for each in named]
        ids = tuple(sorted(found))
        return cls(ids, tuple(found[identity] for identity in ids), tuple(points))

    @cached_property
    def labels(self) -> dict[int, int]:
        """The label of each id."""
        return {identity: label for label, identity in enumerate(self.ids, 1)}

    def ids_of(self, labels: Sequence[int]) -> list[int]:
        return [self.ids[label - 1] for label in labels]

    def __len__(self) -> int:
        return len(self.ids)
