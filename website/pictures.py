"""The README's pictures, as distdl draws them now: `python -m website.pictures [--to FOLDER]`.

It draws images of four shapes, trains a small network on them at two rates (a minute on a laptop's
CPU), writes the report and the comparison, and photographs both with Chromium (`chromium` on PATH).
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image, ImageDraw

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs/pictures"
CHROMIUM = shutil.which("chromium")
SHAPES = ("circle", "cross", "square", "triangle")
PIXELS = 64  # of an image's side
EACH = {"train": 120, "val": 30}  # images of a shape
WIDTH = 1280  # of a photograph
HEIGHTS = {"report": 2400, "compare": 1230}
COLOURS = 64  # which a page of text and curves needs
TYPED = (
    "data=imagenet",
    "data.root=shapes",
    "data.num_classes=4",
    "data.image_size=48",
    "data.batch_size=16",
    "data.num_workers=0",
    "model=timm",
    "model.network.model_name=resnet10t",
    "+model.network.channels=[16,32,64,128]",
    "schedule.warmup_epochs=1",
    "trainer.accelerator=cpu",
    "trainer.devices=1",
    "trainer.max_epochs=8",
    "trainer.log_every_n_steps=2",
    "tracking=none",
)
RATES = {"slow": "optimizer.lr=0.02", "fast": "optimizer.lr=0.5"}


def main() -> int:
    parser = argparse.ArgumentParser("python -m website.pictures", description=__doc__)
    parser.add_argument("--to", type=Path, default=PICTURES, metavar="FOLDER")
    to = parser.parse_args().to.absolute()
    if CHROMIUM is None:
        print("there is no chromium on PATH: apt-get install chromium", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), to)
    print(f"{to}: {', '.join(sorted(path.name for path in to.glob('*.png')))}")
    return 0


def write(folder: Path, to: Path) -> None:
    """Trains in `folder`, and photographs the two pages."""
    draw(folder / "shapes")
    for name, rate in RATES.items():
        distdl(folder, *TYPED, rate, f"name={name}")
    runs = [f"outputs/default/{name}" for name in RATES]
    distdl(folder, "report", runs[1], "--output", "report.html")
    distdl(folder, "compare", *runs, "--output", "compare.html")
    to.mkdir(parents=True, exist_ok=True)
    for page, height in HEIGHTS.items():
        photograph(folder / f"{page}.html", to / f"{page}.png", height)


def distdl(folder: Path, *words: str) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}  # so small a network is no faster by more
    subprocess.run([sys.executable, "-m", "distdl", *words], cwd=folder, env=env, check=True)


def draw(folder: Path) -> None:
    """Folders of images, as `data=imagenet` reads them: bright shapes on a dark ground."""
    dice = random.Random(0)
    for split, count in EACH.items():
        for shape in SHAPES:
            (folder / split / shape).mkdir(parents=True)
            for number in range(count):
                drawn(shape, dice).save(folder / split / shape / f"{number}.jpg", quality=95)


def drawn(shape: str, dice: random.Random) -> Image.Image:
    """One shape, of any size, place and colour."""
    ground = tuple(dice.randrange(90) for _ in range(3))
    colour = tuple(dice.randrange(120, 256) for _ in range(3))
    image = Image.new("RGB", (PIXELS, PIXELS), ground)
    pen = ImageDraw.Draw(image)
    radius = dice.randrange(8, 22)
    x = dice.randrange(radius, PIXELS - radius)
    y = dice.randrange(radius, PIXELS - radius)
    box = (x - radius, y - radius, x + radius, y + radius)
    if shape == "circle":
        pen.ellipse(box, fill=colour)
    elif shape == "square":
        pen.rectangle(box, fill=colour)
    elif shape == "triangle":
        pen.polygon([(x, box[1]), (box[0], box[3]), (box[2], box[3])], fill=colour)
    else:
        bar = radius // 3
        pen.rectangle((x - bar, box[1], x + bar, box[3]), fill=colour)
        pen.rectangle((box[0], y - bar, box[2], y + bar), fill=colour)
    return image


def photograph(page: Path, to: Path, height: int) -> None:
    """The top of a page, as Chromium shows it, in few colours."""
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--window-size={WIDTH},{height}", f"--screenshot={to}", page.as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    with Image.open(to) as taken:
        small = taken.convert("RGB").quantize(COLOURS)
    small.save(to, optimize=True)


if __name__ == "__main__":
    sys.exit(main())
