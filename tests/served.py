"""Model folders for the tests of `distdl deploy`, as `distdl export` writes them."""

import functools
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace

from distdl.tools.serving.model_folder import export_of, requirements
from tests.drawn_coco import CATEGORIES
from tests.serving.colours import write_model


@functools.cache
def files() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        root = write_model(Path(folder) / "model")
        paths = [path for path in root.rglob("*") if path.is_file()]
        return {str(path.relative_to(root)): path.read_bytes() for path in paths}


def model_folder(folder: Path, card: str = "# Colours") -> Path:
    """Writes a folder. With another card it is another model to `deploy`."""
    description = json.dumps({**json.loads(files()["model.json"]), "card": card})
    more = {"model.json": description.encode(), "requirements.txt": requirements().encode()}
    for name, content in {**files(), **more}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def detector_folder(folder: Path) -> Path:
    """Writes a package of a detector with random weights, which finds objects everywhere."""
    import torch

    from distdl.domains.detection.categories import Categories
    from distdl.domains.detection.exports import DetectionExports
    from distdl.domains.detection.views import DetectionView
    from distdl.models import Detector, torchvision_detector
    from distdl.tools.serving import formats, model_folder

    options = {
        "name": "fasterrcnn_mobilenet_v3_large_320_fpn",
        "num_classes": 5,
        "min_size": 64,
        "max_size": 96,
        "box_score_thresh": 0.0,
        "box_detections_per_img": 5,
        "rpn_score_thresh": 0.0,
    }
    torch.manual_seed(0)
    module = Detector(torchvision_detector(**options), 5).eval()
    categories = Categories(tuple(CATEGORIES), tuple(CATEGORIES.values()))
    data = SimpleNamespace(categories=categories)
    leaves = DetectionExports(module, data, DetectionView(categories), categories.names)
    answers = leaves.answers("package", None)
    said = {"kind": "package", "domain": "detection", **answers.description()}
    node = {"network": {"_target_": "distdl.models.torchvision_detector", **options}}
    said |= formats.write("package", leaves, answers, [], folder, node)
    model_folder.describe(folder, said)
    return folder


def run_folder(folder: Path) -> Path:
    """A run with a checkpoint and its export."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints/last.ckpt").write_bytes(b"a checkpoint")
    recipe = {
        "model": {"_target_": "distdl.models.ImageClassifier"},
        "data": {"_target_": "distdl.data.StoredImages"},
        "trainer": {},
        "callbacks": None,
    }
    (folder / "config.yaml").write_text(json.dumps(recipe))
    model_folder(export_of(folder, folder / "checkpoints/last.ckpt", "pt2"))
    return folder
