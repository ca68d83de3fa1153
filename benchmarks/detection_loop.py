"""Mask R-CNN in a loop as one writes it for torchrun, after torchvision's references/detection.

`train` is what a rank does: COCO's annotations by pycocotools, batches of images of like shape on
each rank, a flip, DDP, AdamW with a warm-up and steps, and at the end one evaluation, each rank of
its share of the images, by pycocotools on rank 0.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Sampler

Sample = tuple[torch.Tensor, dict[str, Any]]


class Coco(Dataset[Sample]):
    """The images of a split. In training without crowds, and half of them flipped."""

    def __init__(self, root: Path, split: str, train: bool) -> None:
        from pycocotools.coco import COCO

        with contextlib.redirect_stdout(io.StringIO()):
            self.coco = COCO(str(root / f"annotations/instances_{split}2017.json"))
        self.folder = root / f"{split}2017"
        self.ids = sorted(self.coco.imgs)
        self.labels = {each: label for label, each in enumerate(sorted(self.coco.cats), 1)}
        self.train = train

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Sample:
        identity = self.ids[index]
        with Image.open(self.folder / self.coco.imgs[identity]["file_name"]) as file:
            pixels = np.array(file.convert("RGB"))
        image = torch.from_numpy(pixels).permute(2, 0, 1).float() / 255
        if not self.train:
            return image, {"image_id": identity}
        _, height, width = image.shape
        found = [each for each in self.coco.imgToAnns[identity] if not each["iscrowd"]]
        boxes = torch.tensor([each["bbox"] for each in found]).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        boxes[:, 0::2].clamp_(0, width)
        boxes[:, 1::2].clamp_(0, height)
        labels = torch.tensor([self.labels[each["category_id"]] for each in found])
        masks = np.zeros((len(found), height, width), np.uint8)
        for row, each in enumerate(found):
            masks[row] = self.coco.annToMask(each)
        target = {"boxes": boxes, "labels": labels.long(), "masks": torch.from_numpy(masks)}
        kept = ((boxes[:, 2:] - boxes[:, :2]) >= 1).all(1)
        target = {name: value[kept] for name, value in target.items()}
        if torch.rand(()) < 0.5:
            image = image.flip(2)
            target["boxes"][:, [0, 2]] = width - target["boxes"][:, [2, 0]]
            target["masks"] = target["masks"].flip(2)
        return image, target


class LikeShapes(Sampler[list[int]]):
    """Batches of a rank, each of images of one shape; what a group lacks is filled with its own
    images again, as torchvision's GroupedBatchSampler does."""

    def __init__(self, data: Coco, batch: int, seed: int) -> None:
        shapes = [data.coco.imgs[each] for each in data.ids]
        ratios = [each["width"] / each["height"] for each in shapes]
        self.groups = np.digitize(ratios, 2.0 ** np.linspace(-1, 1, 7))
        self.batch = batch
        self.seed = seed
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.groups) // dist.get_world_size() // self.batch

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(1000 * self.seed + self.epoch)
        order = torch.randperm(len(self.groups), generator=generator).tolist()
        waiting: dict[int, list[int]] = defaultdict(list)
        seen: dict[int, list[int]] = defaultdict(list)
        given = 0
        for index in order[dist.get_rank() :: dist.get_world_size()]:
            group = int(self.groups[index])
            waiting[group].append(index)
            seen[group].append(index)
            if len(waiting[group]) == self.batch:
                given += 1
                yield waiting.pop(group)
        for group, rest in sorted(waiting.items(), key=lambda each: -len(each[1])):
            if given < len(self):
                given += 1
                again = seen[group] * self.batch
                yield [*rest, *again][: self.batch]


def network(classes: int, options: dict[str, Any]) -> torch.nn.Module:
    from torchvision.models.detection import MaskRCNN
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

    backbone = resnet_fpn_backbone(
        backbone_name="resnet18",
        weights=None,
        norm_layer=torch.nn.BatchNorm2d,
        trainable_layers=5,
    )
    return MaskRCNN(backbone, classes + 1, **options)


def train(plan: dict[str, Any]) -> dict[str, float] | None:
    """A rank's part of a training; needs the variables that torchrun sets.

    Args:
        plan: "root", "seed", "batch" (of a rank), "epochs", "rate", "milestones", "warmup" (steps),
            "network" (options of torchvision's class).

    Returns:
        On rank 0 "box_ap50" and "mask_ap50".
    """
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(plan["seed"])
    data = Coco(Path(plan["root"]), "train", train=True)
    sampler = LikeShapes(data, plan["batch"], plan["seed"])
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=list)
    model = network(len(data.labels), plan["network"])
    torch.manual_seed(1000 * plan["seed"] + dist.get_rank())  # another one for each rank's flips
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), plan["rate"], weight_decay=1e-4)
    steps = torch.optim.lr_scheduler.MultiStepLR(optimizer, plan["milestones"], gamma=0.1)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.001, total_iters=plan["warmup"])
    for epoch in range(plan["epochs"]):
        sampler.epoch = epoch
        ddp.train()
        losses: dict[str, torch.Tensor] = {}
        for batch in loader:
            images, targets = zip(*batch, strict=True)
            losses = ddp([*images], [*targets])
            loss = torch.stack([*losses.values()]).sum()
            if not math.isfinite(loss.item()):
                raise RuntimeError(f"the loss is {loss.item()} in epoch {epoch}: {losses}")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            warm.step()
        steps.step()
        if dist.get_rank() == 0:
            print(
                epoch, {name: round(value.item(), 3) for name, value in losses.items()}, flush=True
            )
    numbers = evaluated(model, Coco(Path(plan["root"]), "val", train=False))
    dist.destroy_process_group()
    return numbers


@torch.no_grad()
def evaluated(model: torch.nn.Module, data: Coco) -> dict[str, float] | None:
    model.eval()
    mine = []
    ids = {label: identity for identity, label in data.labels.items()}
    for index in range(dist.get_rank(), len(data), dist.get_world_size()):
        image, target = data[index]
        mine += results(model([image])[0], target["image_id"], ids)
    gathered: list[list[dict[str, Any]]] | None = None
    if dist.get_rank() == 0:
        gathered = [[] for _ in range(dist.get_world_size())]
    dist.gather_object(mine, gathered)
    if gathered is None:
        return None
    found = [each for of_rank in gathered for each in of_rank]
    return {name: ap50(data, found, kind) for name, kind in KINDS.items()}


KINDS = {"box_ap50": "bbox", "mask_ap50": "segm"}


def results(
    output: dict[str, torch.Tensor], image_id: int, ids: dict[int, int]
) -> Iterator[dict[str, Any]]:
    from pycocotools import mask

    boxes = output["boxes"].tolist()
    labels = output["labels"].tolist()
    scores = output["scores"].tolist()
    masks = (output["masks"][:, 0] > 0.5).byte().numpy()
    for row, (x1, y1, x2, y2) in enumerate(boxes):
        yield {
            "image_id": image_id,
            "category_id": ids[labels[row]],
            "score": scores[row],
            "bbox": [x1, y1, x2 - x1, y2 - y1],
            "segmentation": mask.encode(np.asfortranarray(masks[row])),
        }


def ap50(data: Coco, found: Sequence[dict[str, Any]], kind: str) -> float:
    from pycocotools.cocoeval import COCOeval

    if not found:
        return 0.0
    left_out = "bbox" if kind == "segm" else "segmentation"
    kept = [{name: value for name, value in each.items() if name != left_out} for each in found]
    with contextlib.redirect_stdout(io.StringIO()):
        program = COCOeval(data.coco, data.coco.loadRes(kept), kind)
        program.evaluate()
        program.accumulate()
        program.summarize()
    return float(program.stats[1])


def rank_main(path: str) -> None:
    """A rank of `benchmarks.pair.start`: the plan is a JSON file, and so is what comes back."""
    plan = json.loads(Path(path).read_text(encoding="utf-8"))
    numbers = train(plan)
    if numbers is not None:
        Path(plan["result"]).write_text(json.dumps(numbers), encoding="utf-8")
