"""Decoders against PIL, views against torchvision, and what happens to damaged images."""

from __future__ import annotations

import csv
import io
import pickle
import random
import time

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from PIL import Image
from torch.utils.data import DataLoader

from distdl.callbacks import Progress, StepMetrics
from distdl.callbacks.progress import remedy
from distdl.config.recipe import CHANGEABLE
from distdl.data import StoredImages
from distdl.data.crop import random_crop
from distdl.data.decoding import CPU_DECODERS, Header, decoder, jpeg_header, works
from distdl.data.encoded import EncodedImages
from distdl.data.images import ImageData, default_workers
from distdl.data.loading import KeyedDataset, distribute
from distdl.data.nvjpeg import EncodedBatch
from distdl.data.resizing import Resizing
from distdl.data.sampling import SampleKey, TrainPosition
from distdl.data.synthetic_jpeg import SyntheticJpegs, jpegs
from distdl.data.views import EvalView, TrainView, check_views
from distdl.datasets.image_files import DamagedImage
from distdl.util.errors import UserError
from tests.conftest import ROOT
from tests.prepared import quiet_trainer

PHOTOGRAPHS = ROOT.parent / "shared" / "images" / "imagenet_sample"
FAST = [name for name in CPU_DECODERS if name != "pil" and works(name)]


def encoded(image: Image.Image, kind: str = "JPEG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def picture(width=125, height=90, seed=0) -> Image.Image:
    """Smooth colours, as photographs have them."""
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def turned() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: a quarter to the right
    return exif


KINDS = {
    "plain": encoded(picture()),
    "grey": encoded(picture().convert("L")),
    "cmyk": encoded(picture().convert("CMYK"), quality=95),
    "progressive": encoded(picture(), progressive=True),
    "fine colours": encoded(picture(), subsampling=0),
    "restart markers": encoded(picture(), restart_marker_rows=1),
    "turned by EXIF": encoded(picture(), exif=turned()),
    "png": encoded(picture(), "PNG"),
    "palette": encoded(picture().convert("P"), "PNG"),
    "transparent": encoded(picture().convert("RGBA"), "PNG"),
    "webp": encoded(picture(), "WEBP"),
}


def by_pil(data: bytes) -> torch.Tensor:
    with Image.open(io.BytesIO(data)) as file:
        return torch.from_numpy(np.array(file.convert("RGB"))).permute(2, 0, 1)


def apart(left: torch.Tensor, right: torch.Tensor) -> float:
    """Mean difference, of 255."""
    assert left.shape == right.shape
    return float((left.float() - right.float()).abs().mean())


@pytest.mark.parametrize("name", ["pil", *FAST])
@pytest.mark.parametrize("kind", KINDS)
def test_all_decoders_see_what_pil_sees(name, kind):
    found = decoder(name)(KINDS[kind])
    assert found.dtype == torch.uint8
    assert found[None].is_contiguous(memory_format=torch.channels_last)
    assert apart(found, by_pil(KINDS[kind])) < 0.01


@pytest.mark.skipif(not PHOTOGRAPHS.is_dir(), reason="the photographs are not here")
@pytest.mark.parametrize("name", FAST)
def test_and_on_photographs(name):
    files = sorted(PHOTOGRAPHS.rglob("*.jpg"))[::5]
    assert len(files) == 20
    for path in files:
        assert apart(decoder(name)(path.read_bytes()), by_pil(path.read_bytes())) < 1, path


@pytest.mark.parametrize("name", ["pil", *FAST])
def test_no_decoder_fills_up_what_is_missing(name):
    decode = decoder(name)
    for whole in KINDS["plain"], KINDS["grey"], KINDS["progressive"], KINDS["png"]:
        for share in (0.0, 0.01, 0.4, 0.9, 0.99):
            with pytest.raises(DamagedImage):
                decode(whole[: int(len(whole) * share)])
        if jpeg_header(whole):
            with pytest.raises(DamagedImage):
                decode(whole[:-1])
    with pytest.raises(DamagedImage, match="no image"):
        decode(b"<html>404</html>")


def test_auto_takes_the_first_that_works(monkeypatch):
    from distdl.data import decoding

    assert decoder("auto") is decoder(next(n for n in CPU_DECODERS if works(n)))
    monkeypatch.setattr(decoding, "works", lambda name: name == "pil")
    assert decoder("auto") is decoding.decode_pil
    with pytest.raises(ValueError, match="there are auto, simplejpeg"):
        decoder("opencv")


def test_headers():
    assert jpeg_header(KINDS["plain"]) == Header(90, 125, 3)
    assert jpeg_header(KINDS["grey"]) == Header(90, 125, 1)
    assert jpeg_header(KINDS["cmyk"]).components == 4
    assert jpeg_header(KINDS["turned by EXIF"]) == Header(90, 125, 3)
    flat = KINDS["plain"].replace(bytes((8, 0, 90, 0, 125)), bytes((8, 0, 0, 0, 125)))
    assert flat != KINDS["plain"] and jpeg_header(flat) is None
    with pytest.raises(DamagedImage):
        TrainView(16)(flat)
    assert jpeg_header(KINDS["png"]) is None and jpeg_header(KINDS["plain"][:40]) is None


# Views


def draw(view, data, seed=0, epoch=0):
    random.seed(seed), torch.manual_seed(seed)
    return view(data, epoch)["image"]


@pytest.mark.parametrize("size", [(125, 90), (90, 125), (64, 64), (40, 300)])
def test_validation_sees_exactly_what_torchvisions_reference_sees(size):
    from torchvision.transforms import v2

    data = encoded(picture(*size), quality=95)
    seen = draw(EvalView(56, decoder="pil"), data)
    reference = v2.Compose([v2.Resize(64, antialias=True), v2.CenterCrop(56)])
    assert torch.equal(seen, reference(by_pil(data)))
    on_pil = v2.Compose([v2.Resize(64), v2.CenterCrop(56), v2.PILToTensor()])
    assert apart(seen, on_pil(Image.open(io.BytesIO(data)))) < 0.5


def test_validation_may_have_a_crop_and_a_size_of_its_own():
    """As torchvision's later recipes: trained at 176, evaluated at 224 out of 232; in small."""
    from torchvision.transforms import v2

    sizes = {"image_size": 22, "val_crop_size": 28, "val_resize_size": 29}
    data = SyntheticJpegs(
        4, 2, **sizes, pool_size=4, width=64, height=48, kilobytes=3, num_workers=0
    )
    data.setup()
    batch = next(iter(data.val_dataloader()))
    assert batch["image"].shape == (4, 3, 28, 28)
    reference = v2.Compose([v2.Resize(29, antialias=True), v2.CenterCrop(28)])
    decoded = data.val_dataloader().dataset.view.decode(data._pool[0])
    assert torch.equal(batch["image"][0], reference(decoded))
    assert next(iter(data.train_dataloader()))["image"].shape == (4, 3, 22, 22)
    folder = StoredImages("/nowhere", 4, val_crop_size=28, num_workers=0)._val_view
    assert (folder.image_size, folder.short_side) == (28, 32)
    assert problems(**sizes) == problems(val_crop_size=224, val_resize_size=None) == []


def test_crops_are_drawn_as_torchvision_draws_them():
    from torchvision.transforms import v2

    ratio = (1.0, 2.0)  # the usual one is the same upside down
    theirs = v2.RandomResizedCrop(224, ratio=ratio)
    image = torch.empty(3, 375, 500, dtype=torch.uint8)
    torch.manual_seed(0), random.seed(0)
    count = 2000
    other = [theirs.make_params([image]) for _ in range(count)]
    ours = [random_crop(375, 500, (0.08, 1.0), ratio) for _ in range(count)]
    for place, key in enumerate(("top", "left", "height", "width")):
        mine = np.array([crop[place] for crop in ours])
        yours = np.array([crop[key] for crop in other])
        error = np.hypot(mine.std(), yours.std()) / count**0.5
        assert abs(mine.mean() - yours.mean()) < 4 * error
    assert all(t + h <= 375 and w + x <= 500 for t, x, h, w in ours)
    # Nothing fits: the widest centre that is allowed.
    assert random_crop(10, 400, (1.0, 1.0), (3 / 4, 4 / 3)) == (0, 193, 10, 13)
    assert random_crop(400, 10, (1.0, 1.0), (3 / 4, 4 / 3)) == (193, 0, 13, 10)


def test_training_sees_a_crop_resized_and_flipped():
    from torchvision.transforms.v2 import functional as v2

    view, data = TrainView(32, decoder="pil"), KINDS["plain"]
    flips = 0
    for seed in range(20):
        seen = draw(view, data, seed)
        random.seed(seed)
        plan = view.crop(90, 125, 0)
        crop = (plan.top, plan.left, plan.height, plan.width)
        expected = v2.resized_crop_image(by_pil(data), *crop, [32, 32], antialias=True)
        assert torch.equal(seen, expected.flip(-1) if plan.flip else expected)
        flips += plan.flip
    assert 3 < flips < 17


@pytest.mark.parametrize("decoder_name", [*FAST, "nvjpeg"])
@pytest.mark.parametrize("kind", ["plain", "cmyk", "png"])
def test_a_header_is_parsed_once_per_image(monkeypatch, decoder_name, kind):
    from distdl.data import decoding, views

    parsed = []
    count = lambda data: parsed.append(data) or jpeg_header(data)  # noqa: E731
    for module in (decoding, views):
        monkeypatch.setattr(module, "jpeg_header", count)
    for view in (TrainView(16, decoder=decoder_name), EvalView(16, decoder=decoder_name)):
        parsed.clear()
        view(KINDS[kind])
        assert len(parsed) == 1


def test_views_travel_to_workers():
    view = TrainView(16, augment={"rand_augment": {"ops": 2, "magnitude": 9}})
    assert torch.equal(
        draw(pickle.loads(pickle.dumps(view)), KINDS["plain"]), draw(view, KINDS["plain"])
    )


# Progressive resizing


def test_sizes_grow_by_the_epoch_alone():
    size = Resizing.from_config({"from": 160, "to": 192, "from_epoch": 10, "until_epoch": 20}).size
    sizes = [size(epoch) for epoch in range(25)]
    assert sizes == [160] * 15 + [192] * 10  # from half-way on
    growing = Resizing.from_config({"from": 96, "to": 224, "until_epoch": 8})
    assert {growing.size(epoch) for epoch in range(9)} == {96, 128, 160, 192, 224}


def test_workers_see_the_epochs_size():
    class One(Listed):
        def __init__(self):
            super().__init__([KINDS["plain"]], TrainView(32, resize=RESIZE))

    dataset = KeyedDataset(One(), seed=0, with_weight=True)
    keys = [[SampleKey(0, epoch, 1.0)] * 2 for epoch in (0, 1, 2, 0)]
    loader = DataLoader(dataset, batch_sampler=keys, num_workers=2, collate_fn=One().collate)
    assert [batch["image"].shape[-1] for batch in loader] == [32, 64, 96, 32]


RESIZE = {"from": 32, "to": 96, "until_epoch": 2}


# Damage


class Listed(EncodedImages):
    def __init__(self, files, view=None, mended=None):
        super().__init__(view or EvalView(16))
        self.files, self.mended = list(files), mended

    def __len__(self):
        return len(self.files)

    def read(self, index):
        return self.files[index]

    def label(self, index):
        return index

    def name(self, index):
        return f"file {index}"

    def repair(self, index):
        if self.mended is None:
            return False
        self.files[index] = self.mended
        return True


BROKEN = KINDS["plain"][:500]


def test_the_next_whole_image_takes_a_damaged_ones_place():
    dataset = Listed([KINDS["plain"], BROKEN, BROKEN, KINDS["grey"]])
    whole, broken, end = dataset[0], dataset[1], dataset[3]
    assert (whole["label"], whole["weight"], whole["damaged"]) == (0, 1, "")
    assert (broken["label"], broken["weight"], end["label"]) == (3, 0, 3)
    assert torch.equal(broken["image"], end["image"])
    assert broken["damaged"].startswith("file 1: ")
    assert Listed([KINDS["plain"], BROKEN])[1]["label"] == 0  # past the end is the beginning


def test_a_copy_that_can_be_mended_is():
    sample = Listed([BROKEN, KINDS["grey"]], mended=KINDS["plain"])[0]
    assert (sample["label"], sample["weight"], sample["damaged"]) == (0, 1, "")
    still = Listed([BROKEN, KINDS["grey"]], mended=BROKEN)[0]
    assert (still["label"], still["weight"]) == (1, 0)


def test_many_in_a_row_are_no_accident():
    with pytest.raises(UserError, match="20 images in a row cannot be decoded, from file 0"):
        Listed([BROKEN] * 50)[0]


def test_a_filler_stays_one():
    dataset = KeyedDataset(Listed([KINDS["plain"], BROKEN]), 0, with_weight=True)
    keys = [SampleKey(0, 0, 1.0), SampleKey(1, 0, 1.0), SampleKey(0, 0, 0.0)]
    assert [dataset[key]["weight"] for key in keys] == [1, 0, 0]
    assert [dataset[key]["index"] for key in keys] == [0, 1, 0]


def batch_of(*files, view=None):
    dataset = Listed(files, view)
    return dataset.collate([dataset[i] for i in range(len(files))])


def test_batches_are_channels_last_and_report_damage_once(caplog):
    data = ImageData(2, 0)
    batch = batch_of(KINDS["plain"], BROKEN, KINDS["grey"])
    assert batch["image"].shape == (3, 3, 16, 16)
    assert batch["image"].is_contiguous(memory_format=torch.channels_last)
    for _ in range(2):
        seen = data.on_before_batch_transfer(batch, 0)
        assert "damaged" not in seen and seen["weight"].tolist() == [1, 0, 1]
    assert data.damage.in_epoch == 2
    assert caplog.text.count("file 1: ") == 1


def test_the_list_of_damaged_images_holds_each_once(tmp_path):
    file = tmp_path / "logs" / "damaged-rank0.txt"
    for _ in range(2):  # two attempts
        ImageData(2, 0).damage.note(
            ["", "a.jpg: cut off", "a.jpg: cut off", "b.jpg: no image"], file
        )
    assert file.read_text() == "a.jpg: cut off\nb.jpg: no image\n"


def test_damage_can_end_the_run():
    data = ImageData(2, 0, on_damaged="error")
    data.on_before_batch_transfer(batch_of(KINDS["plain"]), 0)
    with pytest.raises(UserError, match=r"cannot decode file 1: ") as refused:
        data.on_before_batch_transfer(batch_of(KINDS["plain"], BROKEN), 0)
    told = refused.value.problems[0].remedy
    assert told.startswith("replace or remove it") and told.endswith("data.on_damaged=skip")
    assert "data.on_damaged" in CHANGEABLE  # so a resume can
    with pytest.raises(UserError, match="copy or prepare its shard again"):
        data.damage.note(["/data/val-00000.tar:a.jpg: cut off"], None)


# nvjpeg: all but the GPU's own decoding


@pytest.mark.skipif(not works("torchcodec"), reason="torchcodec is not here")
def test_a_torchcodec_that_has_no_jpegs_is_refused(monkeypatch):
    monkeypatch.delattr("torchcodec.decoders.decode_jpeg")  # as before 0.16
    assert not works("torchcodec")
    for name in ("torchcodec", "nvjpeg"):
        (problem,) = check_views({"decoder": name})
        assert problem.path == "decoder" and "'torchcodec>=0.16'" in problem.remedy


@pytest.mark.skipif(not works("torchcodec"), reason="torchcodec is not here")
def test_the_device_makes_of_the_bytes_what_the_worker_would_have_made():
    names = ("plain", "grey", "cmyk", "png", "turned by EXIF", "fine colours")
    kinds = [KINDS[name] for name in names]
    for view, shipping in (
        (EvalView(16), EvalView(16, decoder="nvjpeg")),
        (TrainView(16), TrainView(16, decoder="nvjpeg")),
    ):
        random.seed(0)
        expected = batch_of(*kinds, view=view)
        random.seed(0)
        batch = batch_of(*kinds, view=shipping)
        assert isinstance(batch["image"], EncodedBatch) and len(batch["image"]) == len(kinds)
        shipped = [crop[6] > 0 for crop in batch["image"].crops]
        assert shipped == [kind not in ("cmyk", "png") for kind in names]
        image = ImageData(2, 0).on_before_batch_transfer(batch, 0)["image"]
        assert torch.equal(image, expected["image"])
        assert image.is_contiguous(memory_format=torch.channels_last)
    broken = batch_of(KINDS["plain"], BROKEN, view=EvalView(16, decoder="nvjpeg"))
    assert broken["weight"].tolist() == [1, 0] and "file 1: " in broken["damaged"][1]


# Generated JPEGs


def test_generated_jpegs_have_the_size_that_was_asked_for():
    files = jpegs(3, 2, 200, 150, 20_000, seed=0)
    assert len(set(files)) == 3 and all(18_000 < len(file) < 22_000 for file in files)
    assert jpeg_header(files[0]) == Header(150, 200, 3)
    assert files == jpegs(3, 2, 200, 150, 20_000, seed=0) != jpegs(3, 2, 200, 150, 20_000, seed=1)


def test_generated_jpegs_go_the_whole_way():
    data = SyntheticJpegs(4, 2, 16, 9, 5, 64, 48, kilobytes=3, pool_size=4, num_workers=0)
    data.setup()
    batch = next(iter(data.val_dataloader()))
    assert batch["image"].shape == (4, 3, 16, 16) and batch["label"].tolist() == [0, 1, 0, 1]
    assert len(data.train_dataloader().dataset) == 9
    assert apart(batch["image"][0], batch["image"][2]) < apart(batch["image"][0], batch["image"][1])


# What the config may say


def problems(**config):
    return [(p.path, p.what, p.remedy) for p in check_views(config)]


def test_good_settings():
    assert problems() == []
    assert problems(image_size=1, scale=[1, 1], ratio=(0.5, 2.0)) == []
    assert problems(decoder="pil", resize=RESIZE, on_damaged="error", augment=None) == []


@pytest.mark.parametrize(
    ("config", "path", "said"),
    [
        ({"decoder": "opencv"}, "decoder", "one of auto, simplejpeg"),
        ({"resize": {"from": 160, "until_epoch": 3}}, "resize", "lacks to"),
        ({"resize": {**RESIZE, "untilepoch": 3}}, "resize.untilepoch", "until_epoch"),
        ({"resize": {**RESIZE, "from": 170}}, "resize.from", "data.resize.from=160"),
        ({"resize": {**RESIZE, "to": "192"}}, "resize.to", "no whole number"),
        ({"resize": {**RESIZE, "from_epoch": 2}}, "resize.until_epoch", "not after from_epoch=2"),
        ({"resize": 32}, "resize", "is 32, no mapping 'data.resize={from"),
        ({"augment": "trivial_augment"}, "augment", "'data.augment={trivial_augment: true}'"),
        ({"image_size": 0}, "image_size", "is 0"),
        ({"image_size": 100_000}, "image_size", "to 8,192"),
        ({"val_crop_size": 0}, "val_crop_size", "data.val_crop_size=224"),
        ({"val_resize_size": 223}, "val_resize_size", "less than the 224 pixels"),
        (
            {"image_size": 176, "val_crop_size": 192, "val_resize_size": 176},
            "val_resize_size",
            "data.val_resize_size=219",
        ),
        ({"scale": 0.5}, "scale", "is 0.5, not two numbers"),
        ({"scale": [0.5]}, "scale", "not two numbers"),
        ({"scale": [0, 1]}, "scale", "above 0, at most 1"),
        ({"scale": [0.5, 1.5]}, "scale", "at most 1"),
        ({"scale": [0.9, 0.5]}, "scale", "the smaller one first"),
        ({"ratio": ["a", "b"]}, "ratio", "not two numbers above 0, the"),
        ({"ratio": [-1, 1]}, "ratio", "above 0"),
        (
            {"decoder": "nvjpeg", "augment": {"random_erasing": {"p": 0.1}}},
            "augment",
            "data.augment.random_erasing=null",
        ),
    ],
)
def test_settings_that_cannot_be(config, path, said):
    found = [p for p in problems(**config) if p[0] == path]
    assert found and said in f"{found[0][1]} {found[0][2]}"


def test_a_decoder_that_is_not_installed(monkeypatch):
    from distdl.data import views

    monkeypatch.setattr(views, "works", lambda name: False)
    assert problems(decoder="nvjpeg")[0][2].startswith("pip install 'torchcodec")
    assert list(check_views({"decoder": "nvjpeg"}, local=False)) == problems(decoder="pil") == []


def test_waiting_for_data_names_the_numbers(monkeypatch):
    monkeypatch.setattr("distdl.callbacks.progress.default_workers", lambda: 8)
    assert default_workers() >= 1
    assert remedy(ImageData(2, 3)).startswith("data.num_workers=8 uses")
    assert "--short-side 256" in remedy(ImageData(2, 8)) and "nvjpeg" in remedy(ImageData(2, 8))
    assert remedy(object()).startswith("num_workers=8 of its DataLoader uses")

    class Theirs(LightningDataModule):
        def __init__(self, num_workers=1):
            super().__init__()
            self.save_hyperparameters()

    assert remedy(Theirs()).startswith("data.num_workers=8 uses this process's CPU cores (now 1)")


def test_the_first_seconds_of_a_run_give_no_advice(monkeypatch, caplog):
    bar, trainer = Progress(bar=True), Trainer(accelerator="cpu", logger=False, max_steps=1)
    trainer.datamodule = None
    for began, said in ((time.monotonic(), 0), (time.monotonic() - 60, 1)):
        bar._began = began
        for step in range(4):
            bar.on_metrics(trainer, step, {"perf/data_wait": 0.9})
        assert caplog.text.count("waiting for data") == said


class OneLayer(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def training_step(self, batch, batch_idx):
        assert "damaged" not in batch
        logits = self.layer(batch["image"].mean((2, 3)))
        return torch.nn.functional.cross_entropy(logits, batch["label"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Slow(ImageData):
    """Two images of six are damaged, and each takes a while to come."""

    def train_dataloader(self):
        class Sleeping(Listed):
            def read(self, index):
                time.sleep(0.02)
                return super().read(index)

            def label(self, index):
                return index % 2

        whole = KINDS["plain"]
        return self.loader(Sleeping([whole, BROKEN, whole, whole, BROKEN, whole]), shuffle=True)


@pytest.mark.filterwarnings("ignore:.*")
def test_a_training_counts_damage_and_says_once_that_it_waits(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("distdl.callbacks.progress.HINT_AFTER", 0)
    logger = CSVLogger(tmp_path)
    metrics, data = StepMetrics(2), Slow(2, 0)
    watched = {"logger": logger, "callbacks": [metrics, Progress(bar=False)]}
    trainer = quiet_trainer(tmp_path, max_epochs=3, log_every_n_steps=1, **watched)
    distribute(data, rank=0, world_size=1, seed=0, position=TrainPosition())
    trainer.fit(OneLayer(), datamodule=data)
    with open(f"{logger.log_dir}/metrics.csv", encoding="utf-8") as file:
        logged = [row["data/damaged"] for row in csv.DictReader(file) if row["data/damaged"]]
    assert logged == ["2.0"] * 3
    names = sorted((tmp_path / "logs" / "damaged-rank0.txt").read_text().splitlines())
    assert [name.split(":")[0] for name in names] == ["file 1", "file 4"]
    assert caplog.text.count("file 1: ") == 1 == caplog.text.count("file 4: ")
    assert caplog.text.count("2 damaged images were left out") == 3
    assert caplog.text.count("of the time is spent waiting for data: data.num_workers=") == 1
