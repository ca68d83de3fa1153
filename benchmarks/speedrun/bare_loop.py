"""A recipe as a bare loop, as one writes it for torchrun: DDP, SGD, a cosine, torchvision's views.

    python -m benchmarks.speedrun.bare_loop small_bf16 --photographs DIR...

Trains an idea of ideas.yaml by distdl and by the loop in turn, seed for seed, on the 1,800
photographs, and measures both on the 2,000. The loop takes its numbers from the same config, and
runs no code of distdl or Lightning while it trains. Accuracy passes if distdl's mean is not lower
by more than its spread; CPU time if it is at most 1.05 of the loop's, or undecided, since seeds of
one recipe differ by more.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import pair
from benchmarks.table import turned

if TYPE_CHECKING:
    import torch
    from torch import nn

MOST = 1.05  # of the loop's CPU time
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# What the loop does; a recipe with anything else is refused.
OPTIMIZER, SCHEDULE = "torch.optim.SGD", "distdl.optim.warmup_cosine"
UNKNOWN = (
    "callbacks.ema",
    "data.augment",
    "data.mix",
    "model.cutmix",
    "model.freeze",
    "model.mixup",
    "model.weights",
    "optimizer.layer_decay",
    "trainer.gradient_clip_val",
)


def plan_of(arguments: Sequence[str], root: Path, seed: int) -> dict[str, Any]:
    """The numbers of a recipe that the loop needs.

    Raises:
        ValueError: The recipe has something that the loop does not do.
    """
    from omegaconf import OmegaConf

    from benchmarks.speedrun.training import CONF
    from distdl.config.compose import compose

    config = compose([*arguments, f"data.root={root}"], [str(CONF)])
    left_out = [key for key in UNKNOWN if OmegaConf.select(config, key)]
    if config.optimizer._target_ != OPTIMIZER or config.schedule._target_ != SCHEDULE or left_out:
        does = f"{OPTIMIZER} with {SCHEDULE}, and none of {', '.join(UNKNOWN)}"
        raise ValueError(f"the loop does {does}")
    plan: dict[str, Any] = {
        name: OmegaConf.to_container(config[name], resolve=True)
        for name in ("model", "data", "optimizer", "schedule")
    }
    plan["epochs"] = config.trainer.max_epochs
    plan["bf16"] = config.trainer.precision == "bf16-mixed"
    plan["seed"] = seed
    return plan


def rank_main(file: str) -> None:
    """A rank of the loop. Rank 0 writes {"accuracy", "samples"} to `result` of the plan."""
    import torch
    import torch.distributed as dist
    from torch.nn import functional as F
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    plan = json.loads(Path(file).read_text(encoding="utf-8"))
    data, optimizer, epochs = plan["data"], plan["optimizer"], plan["epochs"]
    dist.init_process_group("gloo")
    torch.manual_seed(plan["seed"])
    random.seed(plan["seed"])
    network = _network(plan["model"]["network"]).to(memory_format=torch.channels_last)
    torch.manual_seed(plan["seed"] + 1 + dist.get_rank())
    model = DistributedDataParallel(network, gradient_as_bucket_view=True)
    world = dist.get_world_size()
    rate = optimizer["lr"] * data["batch_size"] * world / optimizer["lr_reference_batch"]
    sgd = torch.optim.SGD(
        _groups(network, optimizer["weight_decay"]),
        lr=rate,
        momentum=optimizer["momentum"],
        nesterov=optimizer["nesterov"],
        fused=True,
    )
    end = [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    train = ImageFolder(f"{data['root']}/train")
    sampler: Any = DistributedSampler(train, seed=plan["seed"], drop_last=True)
    per_epoch = len(train) // (data["batch_size"] * world)
    warm_up = round(plan["schedule"]["warmup_epochs"] * per_epoch)
    total = epochs * per_epoch
    step = 0
    for epoch in range(epochs):
        size = size_of(data, epoch)
        scale, ratio = tuple(data["scale"]), tuple(data["ratio"])
        crop = v2.RandomResizedCrop(size, scale, ratio, antialias=True)
        train.transform = v2.Compose([crop, v2.RandomHorizontalFlip(), *end])
        sampler.set_epoch(epoch)
        loader: Any = DataLoader(
            train, data["batch_size"], sampler=sampler, num_workers=1, drop_last=True
        )
        model.train()
        for images, labels in loader:
            share = (step + 1) / warm_up
            if step >= warm_up:
                share = (1 + math.cos(math.pi * (step - warm_up) / (total - warm_up))) / 2
            for group in sgd.param_groups:
                group["lr"] = rate * share
            sgd.zero_grad(set_to_none=True)
            images = images.contiguous(memory_format=torch.channels_last)
            with torch.autocast("cpu", torch.bfloat16, enabled=plan["bf16"]):
                logits = model(images)
            smoothing = plan["model"]["label_smoothing"]
            F.cross_entropy(logits.float(), labels, label_smoothing=smoothing).backward()
            sgd.step()
            step += 1
    crop_size = data["val_crop_size"] or data["image_size"]
    short = data["val_resize_size"] or round(crop_size * 256 / 224)
    centre = [v2.Resize(short, antialias=True), v2.CenterCrop(crop_size), *end]
    held_out = ImageFolder(f"{data['root']}/val", v2.Compose(centre))
    share_of_rank: Any = torch.utils.data.Subset(
        held_out, range(dist.get_rank(), len(held_out), world)
    )
    counts = _right(network, DataLoader(share_of_rank, data["batch_size"]), plan["bf16"])
    dist.all_reduce(counts)
    if dist.get_rank() == 0:
        right, samples = counts.tolist()
        result = {"accuracy": right / samples, "samples": int(samples)}
        Path(plan["result"]).write_text(json.dumps(result), encoding="utf-8")
    dist.destroy_process_group()


def _network(node: object) -> Any:
    """What a config's node describes, as Hydra would build it."""
    from hydra.utils import instantiate

    return instantiate(node, _convert_="all")


def _groups(network: nn.Module, decay: float) -> list[dict[str, Any]]:
    """No decay of norms and biases: all that has a single dimension."""
    parameters = list(network.parameters())
    return [
        {"params": [each for each in parameters if each.ndim > 1], "weight_decay": decay},
        {"params": [each for each in parameters if each.ndim <= 1], "weight_decay": 0.0},
    ]


def size_of(data: Mapping[str, Any], epoch: int) -> int:
    """Pixels of a training image, by `data.resize`."""
    resize = data["resize"]
    if not resize:
        return int(data["image_size"])
    first = resize.get("from_epoch", 0)
    done = min(max((epoch - first) / (resize["until_epoch"] - first), 0.0), 1.0)
    multiple = resize.get("multiple", 32)
    return round((resize["from"] + done * (resize["to"] - resize["from"])) / multiple) * multiple


def _right(network: nn.Module, loader: Any, bf16: bool) -> torch.Tensor:
    """How many images were recognised, and how many there were."""
    import torch

    network.eval()
    counts = torch.zeros(2)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        for images, labels in loader:
            logits = network(images.contiguous(memory_format=torch.channels_last))
            counts += torch.tensor([int((logits.argmax(1) == labels).sum()), len(labels)])
    return counts


def train_both_ranks(file: str) -> None:
    """Starts the two ranks of the loop, and waits for them."""
    (port,) = pair.free_ports(1)
    code = (
        f"import os, sys; os.environ['MASTER_PORT'] = '{port}'; "
        "from benchmarks.speedrun import bare_loop; bare_loop.rank_main(sys.argv[1])"
    )
    pair.start(code, json.loads(Path(file).read_text(encoding="utf-8")))


def by_hand(at: Path, root: Path, arguments: Sequence[str], seed: int, *, photographs: str) -> Any:
    """As `training.trained`, by the loop."""
    from benchmarks.speedrun.training import (
        Trained,
        alone_in,
        cpu_of,
        known,
        recipe_of,
        run_folder,
        write,
    )

    plan = plan_of(arguments, root, seed)
    said = [*arguments, "the bare loop", f"seed={seed}"]
    recipe = recipe_of([*arguments, f"seed={seed}"])
    if (before := known(at, said, recipe, photographs)) is not None:
        return before
    folder = run_folder(at)
    plan["result"] = str(folder / "result.json")
    code = "import sys; from benchmarks.speedrun import bare_loop as loop; "
    start = f"{code}loop.train_both_ranks(sys.argv[1])"
    with alone_in(at.parent):
        folder.mkdir(exist_ok=True)
        (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
        cpu = cpu_of([sys.executable, "-c", start, str(folder / "plan.json")], folder)
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        done = Trained(
            accuracy=result["accuracy"],
            cpu=round(cpu, 1),
            samples=result["samples"],
            arguments=said,
            recipe=recipe,
            photographs=photographs,
        )
        write(at, done)
    return done


def main(typed: Sequence[str] | None = None) -> int:
    from benchmarks.speedrun import folds, ideas
    from benchmarks.speedrun.training import add_seeds, one_message, trained

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speedrun.bare_loop",
        description=str(__doc__).splitlines()[0],
    )
    parser.add_argument("idea", help="a name in ideas.yaml")
    folds.add_photographs(parser)
    add_seeds(parser)
    args = parser.parse_args(typed)
    with one_message(parser):
        said = ideas.arguments(ideas.read(), args.idea)
        folds.require_photographs(args)
        splits = folds.measured(args.lists, args.photographs)
        photographs = folds.together(folds.digests(splits))
        root = folds.link((args.results / "photographs").resolve(), splits)
        arms = {args.idea: trained, "loop": by_hand}
        done: dict[str, list[Any]] = {name: [] for name in arms}
        for seed in range(args.seeds):
            for name in turned(list(arms), seed):
                prefix = f"{args.idea}-" if name == "loop" else ""
                at = args.results / f"{prefix}{name}-seed{seed}.json"
                done[name].append(arms[name](at, root, said, seed, photographs=photographs))
                last = done[name][-1]
                accuracy = f"{100 * last.accuracy:.1f} %"
                print(f"{name}, seed {seed}: {accuracy}, {last.cpu:.0f} CPU s", flush=True)
    text, passes = verdict(done[args.idea], done["loop"])
    print(text)
    return 0 if passes else 1


def verdict(ours: Sequence[Any], loop: Sequence[Any]) -> tuple[str, bool]:
    """Both means, and whether distdl's accuracy and CPU time are as good as the loop's.

    CPU time above the limit decides nothing if runs of the same recipe differ by more than the
    share that the limit allows.
    """
    from benchmarks.speedrun import table  # imports distdl, which no rank of the loop does

    accuracies = [each.accuracy for each in ours]
    mean, others = statistics.mean(accuracies), statistics.mean(each.accuracy for each in loop)
    spread = table.spread(accuracies)
    accurate = mean >= others - spread
    ratio = sum(each.cpu for each in ours) / sum(each.cpu for each in loop)
    apart = max(longest_by_shortest(ours), longest_by_shortest(loop))
    undecided = ratio > MOST and apart > MOST
    said = f", undecided: equal runs differ by up to {apart:.3f}" if undecided else ""
    lines = (
        f"accuracy: {100 * mean:.1f} %, the loop's {100 * others:.1f} %: "
        f"{'not lower' if accurate else 'lower'} by more than the spread of {100 * spread:.1f}",
        f"CPU time: {ratio:.3f} of the loop's (at most {MOST}){said}",
    )
    return "\n".join(lines), accurate and (ratio <= MOST or undecided)


def longest_by_shortest(results: Sequence[Any]) -> float:
    """The ratio of the CPU times of the longest and the shortest of some trainings."""
    seconds = [each.cpu for each in results]
    return float(max(seconds) / min(seconds))


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    sys.exit(main())
