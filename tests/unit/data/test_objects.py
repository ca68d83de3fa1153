"""`data=coco`: targets as COCO has them, from folders and shards; what is refused."""

import itertools
import json
import shutil
from collections import Counter

import numpy as np
import pytest
import torch

from distdl.data import StoredImages, StoredObjects, TrainPosition, objects
from distdl.data.loading import distribute
from distdl.data.objects import by_shape
from distdl.datasets.format import MANIFEST
from distdl.util.errors import UserError
from tests.drawn_coco import draw
from tests.miniature import prepare
from tests.prepared import flip, refusal
from tests.unit.sample_data import write_photographs

ONE = ("--workers", "1", "--shard-mb", "0.02")
TRAIN, VAL = "annotations/instances_train2017.json", "annotations/instances_val2017.json"
PLAIN = {"num_classes": 5, "num_workers": 0, "augment": {"horizontal_flip": 0}}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    return draw(tmp_path_factory.mktemp("drawn"), train=40, val=11, keypoints=True)


@pytest.fixture(scope="module")
def shards(drawn, tmp_path_factory):
    out = tmp_path_factory.mktemp("shards") / "out"
    prepare("coco", drawn, out, *ONE, "--labels", "instances,person_keypoints")
    return out


@pytest.fixture
def coco(drawn, tmp_path):
    return shutil.copytree(drawn, tmp_path / "coco")


def opened(root, **options):
    data = StoredObjects(str(root), 4, **{**PLAIN, **options})
    data.setup("fit")
    return data


def by_id(samples):
    found = [samples[index] for index in range(len(samples))]
    assert all(sample["weight"] == 1 for sample in found), [s["damaged"] for s in found]
    return {sample["target"]["image_id"]: sample for sample in found}


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert torch.equal(value, other[key]) if torch.is_tensor(value) else value == other[key]


def test_folder_and_shards_give_the_targets_of_cocos_own_tools(drawn, shards):
    from pycocotools.coco import COCO

    labels = ["instances", "person_keypoints"]
    prepared, folder = opened(shards, keypoints=True), opened(drawn, keypoints=True, labels=labels)
    points = {}
    for split, name in (("train", TRAIN), ("val", VAL)):
        truth = COCO(str(drawn / name))
        people = json.loads((drawn / name.replace("instances", "person_keypoints")).read_text())
        points |= {each["id"]: each["keypoints"] for each in people["annotations"]}
        found = by_id(prepared.splits[split])
        for identity, sample in by_id(folder.splits[split]).items():
            assert torch.equal(sample["image"], found[identity]["image"])
            assert_equal(sample["target"], found[identity]["target"])
        assert found.keys() == truth.imgs.keys()
        for identity, sample in found.items():
            target, image = sample["target"], truth.imgs[identity]
            assert sample["image"].shape == (3, image["height"], image["width"])
            wanted = truth.imgToAnns[identity]
            if split == "train":
                wanted = [each for each in wanted if not each["iscrowd"]]
            else:
                kept = {each["id"]: each for each in target["annotations"]}
                assert {i: kept[i]["bbox"] for i in kept} == {a["id"]: a["bbox"] for a in wanted}
            count = len(wanted)
            assert target["labels"].tolist() == [
                [1, 3, 18, 44, 90].index(a["category_id"]) + 1 for a in wanted
            ]
            assert target["iscrowd"].tolist() == [each["iscrowd"] for each in wanted]
            assert target["masks"].shape == (count, image["height"], image["width"])
            assert target["keypoints"].shape == (count, 17, 3)
            for row, each in enumerate(wanted):
                x, y, w, h = each["bbox"]
                x2, y2 = min(x + w, image["width"]), min(y + h, image["height"])
                box = [x, y, x2, y2] if split == "train" else [x, y, x + w, y + h]
                assert target["boxes"][row].tolist() == pytest.approx(box, abs=1e-4)
                assert np.array_equal(target["masks"][row].numpy(), truth.annToMask(each))
                known = points.get(each["id"], [0] * 51)
                assert target["keypoints"][row].flatten().tolist() == pytest.approx(known, abs=1e-4)
    assert prepared.classes == folder.classes == ["disc", "square", "triangle", "cross", "ring"]
    assert prepared.categories.ids == (1, 3, 18, 44, 90)
    assert {type(image) for image in next(iter(prepared.val_dataloader()))["image"]} == {
        torch.Tensor
    }


def steps(root, world, batch, position=None):
    """The images of each global batch, with their groups."""
    ranks = []
    for rank in range(world):
        data = opened(root, masks=False)
        data.batch_size = batch // world
        groups = data.splits["train"].groups.of_sample
        at = TrainPosition(0, *([position] if position else []))
        distribute(data, rank=rank, world_size=world, seed=3, position=at)
        sampler = data.train_dataloader().batch_sampler
        ranks.append([[(key.index, int(groups[key.index])) for key in keys] for keys in sampler])
    return [list(itertools.chain(*step)) for step in zip(*ranks, strict=True)]


def test_a_global_batch_has_images_of_one_shape(shards):
    alone = steps(shards, 1, 4)
    assert steps(shards, 2, 4) == alone
    assert steps(shards, 2, 4, position=12) == alone[3:]
    assert steps(shards, 1, 4, position=12) == alone[3:]
    mixed = [step for step in alone if len({group for _, group in step}) > 1]
    assert mixed == alone[len(alone) - len(mixed) :]
    assert len(mixed) < len(alone) / 2
    assert Counter(index for step in alone for index, _ in step) == Counter(range(40))
    assert opened(shards, aspect_groups=0).splits["train"].groups is None
    sizes = np.array([[100, 100], [100, 99], [99, 100], [100, 210], [210, 100], [640, 480]])
    assert by_shape(sizes, 3).tolist() == [4, 4, 3, 0, 7, 5]


def test_test_images_are_predicted_and_not_evaluated(coco, tmp_path):
    value = json.loads((coco / VAL).read_text())
    del value["annotations"]
    (coco / "annotations/image_info_test2017.json").write_text(json.dumps(value))
    shutil.copytree(coco / "val2017", coco / "test2017")
    cut = coco / "test2017" / value["images"][1]["file_name"]
    cut.write_bytes(cut.read_bytes()[:-100])
    prepare("coco", coco, tmp_path / "out", *ONE, "--skip-damaged")
    for root, count in ((coco, 11), (tmp_path / "out", 10)):
        data = opened(root, predict_split="test")
        batches = list(data.predict_dataloader())
        damaged = [text for batch in batches for text in batch["damaged"]]
        targets = [target for batch in batches for target in batch["target"]]
        assert len(targets) == count
        assert sum(map(bool, damaged)) == count - 10
        assert all("annotations" not in target for target in targets)
        ids = {image["id"] for image in value["images"]}
        lost = {value["images"][1]["id"]} if count == 10 else set()
        assert {target["image_id"] for target in targets} == ids - lost
    assert refusal(opened, coco, predict_split="tes").path == "data.predict_split"
    (problem,) = StoredObjects.check({"root": str(coco), "num_classes": 5, "predict_split": "tes"})
    assert problem.path == "predict_split"
    for split in ("train", "val"):  # a set that can only be predicted
        (coco / f"annotations/instances_{split}2017.json").unlink()
    prepare("coco", coco, tmp_path / "alone", *ONE, "--skip-damaged", "--labels", "instances")
    predicts = {"local": True, "config": {"task": {"_target_": "distdl.tasks.predict"}}}
    for root, count in ((coco, 11), (tmp_path / "alone", 10)):
        node = {"root": str(root), "num_classes": 5, "predict_split": "test"}
        assert [*StoredObjects.check(node, predicts)] == []
        assert {each.path for each in StoredObjects.check(node)} == {"root"}, "it cannot be trained"
        data = StoredObjects(str(root), 4, predict_split="test", **PLAIN)
        data.setup("predict")
        assert sum(len(batch["target"]) for batch in data.predict_dataloader()) == count
        assert data.categories.ids == (1, 3, 18, 44, 90)


def test_damage_is_replaced_and_named(coco, tmp_path, drawn):
    names = [image["file_name"] for image in json.loads((drawn / TRAIN).read_text())["images"]]
    (coco / "train2017" / names[2]).write_bytes(b"no image")
    data = opened(coco)
    sample = data.splits["train"][2]
    assert sample["weight"] == 0
    assert names[2] in sample["damaged"]
    prepare("coco", drawn, tmp_path / "out", *ONE)
    shard = tmp_path / "out" / "train-00000.tar"
    flip(shard, shard.read_bytes().index(b'"bbox"') + 3)
    samples = opened(tmp_path / "out").splits["train"]
    damaged = [samples[index]["damaged"] for index in range(len(samples))]
    assert sum(map(bool, damaged)) == 1
    assert "the shard is damaged" in "".join(damaged)


def write_as(coco, edit, name=TRAIN):
    value = json.loads((coco / name).read_text())
    edit(value)
    (coco / name).write_text(json.dumps(value))


def without_masks(value):
    for each in value["annotations"]:
        del each["segmentation"]


def federated(value):
    value["images"][0]["neg_category_ids"] = [1]


def test_wrong_inputs_get_one_message_before_the_start(coco, shards, tmp_path, monkeypatch):
    def problems(root=coco, kind=StoredObjects, **node):
        return [*kind.check({"root": str(root), "num_classes": 5, **node})]

    def told(path, what, **node):
        (problem,) = problems(**node)
        assert problem.path == path
        assert what in problem.what, problem
        assert problem.remedy

    assert problems() == problems(shards) == []
    for root in (coco, shards):
        told("num_classes", "is 80, but", root=root, num_classes=80)
    told("root", "was prepared for detection", root=shards, kind=StoredImages)
    write_photographs(tmp_path / "photos", ("cat", "dog"), train=2, val=2)
    prepare("folder", tmp_path / "photos", tmp_path / "classes", "--workers", "1")
    told("root", "was prepared for classification", root=tmp_path / "classes")
    assert {p.path for p in problems(tmp_path / "photos")} == {"root"}
    told("root", "does not exist", root=tmp_path / "nothing")
    told("decoder", "crops each image", decoder="nvjpeg")
    write_as(coco, lambda v: v["categories"][0].update(name="plate"), VAL)
    told("root", "differ: 1 'disc', 1 'plate'")
    write_as(coco, lambda v: v["categories"][0].update(name="disc"), VAL)
    before = (coco / VAL).read_text()
    write_as(coco, without_masks, VAL)
    told("masks", "val2017.json: annotation 5000007 has no segmentation")
    prepare("coco", coco, tmp_path / "validated", *ONE)
    told("masks", "has no masks", root=tmp_path / "validated")
    (coco / VAL).write_text(before)
    write_as(coco, without_masks)
    told("masks", "train2017.json: annotation 10007 has no segmentation")
    assert problems(masks=False) == []
    prepare("coco", coco, tmp_path / "boxes", *ONE)
    told("masks", "has no masks", root=tmp_path / "boxes")
    told("keypoints", "has no keypoints", masks=False, keypoints=True)
    write_as(coco, federated, VAL)
    data = opened(coco, masks=False)
    assert "federated" in refusal(data.val_dataloader).what
    prepare("coco", coco, tmp_path / "federated", *ONE)
    for root in (coco, tmp_path / "federated"):
        told("root", "federated", root=root, masks=False)
        context = {"local": True, "config": {"trainer": {"limit_val_batches": 0}}}
        node = {"root": str(root), "num_classes": 5, "masks": False}
        assert [*StoredObjects.check(node, context)] == []
    write_as(coco, lambda value: value["images"][0].pop("neg_category_ids"), VAL)
    fourth = json.loads((coco / TRAIN).read_text())["annotations"][3]
    named = f"negative side: {fourth['id']} (image {fourth['image_id']}: x"
    for box in ([500, 5, 20, 20], [5, -40, 20, 20], [50, 5, -20, 20]):
        write_as(coco, lambda v, box=box: v["annotations"][3].update(bbox=box))
        told("root", f"{named} {box[0]}, y {box[1]}", masks=False)
    for box in ([-5, -5, 20, 20], [5, 5, 0, 20], "none"):  # cut, left out, and a damaged image
        write_as(coco, lambda v, box=box: v["annotations"][3].update(bbox=box))
        assert problems(masks=False) == []
    (tmp_path / "empty").mkdir()
    told("root", "no annotation file", root=tmp_path / "empty", masks=False)
    before = (coco / TRAIN).read_text()
    write_as(coco, lambda v: v["annotations"].clear())
    told("root", "nothing to learn", masks=False)
    prepare("coco", coco, tmp_path / "unlearnable", *ONE)
    told("root", "nothing to learn", root=tmp_path / "unlearnable", masks=False)
    with monkeypatch.context() as patch:  # of a URI only the manifest is read before the start
        patch.setattr(objects, "is_remote", lambda uri: True)
        assert problems(tmp_path / "unlearnable", masks=False) == []
        problem = refusal(opened, tmp_path / "unlearnable", masks=False)
        assert "nothing to learn" in problem.what
    write_as(coco, lambda v: v.pop("annotations"))
    told("root", "nothing to learn", masks=False)
    (coco / TRAIN).write_text(before)
    write_as(coco, lambda v: v["images"][0].update(file_name="lost.jpg"))
    told("root", "1 of 40 images of", masks=False)
    write_as(coco, lambda v: v["annotations"][0].update(image_id=5))
    told("root", "(image 5)", masks=False)
    (coco / TRAIN).write_text("[]")
    told("root", "'[' instead of '{'")
    text = (shards / MANIFEST).read_text().replace('"id": 3,', '"id": 1,')
    shutil.copytree(shards, tmp_path / "twice")
    (tmp_path / "twice" / MANIFEST).write_text(text)
    with pytest.raises(UserError, match="is there twice"):
        opened(tmp_path / "twice")


def test_the_batches_of_a_folder_with_other_names_are_counted(coco):
    for split in (TRAIN, VAL):
        (coco / split).rename(coco / split.replace("instances", "ours"))
    node = {"root": str(coco), "num_classes": 5, "labels": ["ours"], "batch_size": 4}
    task = {"_target_": "distdl.tasks.train"}
    run = {"data": node, "task": task, "trainer": {"val_check_interval": 50}}
    (problem,) = StoredObjects.check(node, {"local": True, "config": run})
    assert "trainer.val_check_interval" in problem.what, "an epoch has 10 batches"
    run = {"data": {**node, "batch_size": 41}, "task": task}
    (problem,) = StoredObjects.check(node, {"local": True, "config": run})
    assert (problem.path, problem.code) == ("batch_size", "not-enough")
    assert "40 training samples are fewer than one global batch" in problem.what
