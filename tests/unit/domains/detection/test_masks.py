"""Masks of COCO: equal to those of its own tools, and wrong ones are told."""

import numpy as np
import pytest

from distdl.domains.detection import masks
from tests.drawn_coco import runs


@pytest.mark.filterwarnings("ignore:__array__ implementation")
def test_masks_are_those_of_cocos_own_tools():
    """Polygons, runs as numbers and as COCO's text; and wrong ones, which its C code believes."""
    from pycocotools import mask as truth

    random = np.random.default_rng(0)
    for _ in range(30):
        height, width = (int(side) for side in random.integers(5, 40, 2))
        pixels = (random.random((height, width)) < random.random()).astype(np.uint8)
        packed = truth.encode(np.asfortranarray(pixels))
        for counts in (runs(pixels), packed["counts"].decode()):
            found = masks.decode({"size": [height, width], "counts": counts}, height, width)
            assert np.array_equal(found, pixels)
        polygon = [(random.random((4, 2)) * (width, height)).round(2).reshape(-1).tolist()]
        wanted = truth.decode(truth.merge(truth.frPyObjects(polygon, height, width)))
        assert np.array_equal(masks.decode(polygon, height, width), wanted)
    size = [4, 3]
    for counts in ([13], [-1, 13], [5, 5], [12.0], "", "zzzz", "~", "1o", [[12]], None, [1 << 70]):
        assert masks.wrong({"size": size, "counts": counts}, 4, 3)
    for polygon in ("text", [[1, 2, 3, 4, 5, None]], [[1, 2, 3, 4, 5, "6"]], [7], [[0] * 5]):
        assert masks.wrong(polygon, 4, 3)
