"""Image classification: exact validation, mixing, normalisation layers."""

from __future__ import annotations

import pytest
import torch
from hydra.utils import instantiate
from timm.layers import BatchNormAct2d
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchvision.models import resnet18

from distdl.config.compose import compose
from distdl.models import ImageClassifier
from distdl.models.classifier import with_group_norm
from distdl.models.mixing import mix
from distdl.validation.binding import Binding
from distdl.validation.resolve import resolve
from tests.prepared import quiet_trainer, refusal
from tests.unit.sample_data import classifier, share, synthetic

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


def data(samples=11, classes=7, **options):
    return share(synthetic(samples, classes), **options)


def first_batch(loader, source):
    return source.on_after_batch_transfer(next(iter(loader)), 0)


def plain_loop(module, source, samples):
    """The three means over the samples, without batches, weights or sums."""
    index = torch.arange(samples)
    images = source.normalize(source.images(index))
    labels = index % 16 % module.num_classes
    with torch.no_grad():
        logits = module.eval().network(images)
    ranks = (logits > logits.gather(1, labels[:, None])).sum(1)
    loss = F.cross_entropy(logits, labels)
    means = [loss.item(), (ranks < 1).float().mean().item(), (ranks < 5).float().mean().item()]
    return pytest.approx(means, abs=1e-6)


def means(metrics, stage="val"):
    return [metrics[f"{stage}/{name}"] for name in ("loss", "acc1", "acc5")]


@pytest.mark.parametrize("samples, classes", [(1, 7), (4, 3), (11, 7)])
def test_validation_equals_a_plain_loop(tmp_path, samples, classes):
    module = classifier(classes, label_smoothing=0.3)
    source = data(samples, classes)
    expected = plain_loop(module, source, samples)
    (metrics,) = quiet_trainer(tmp_path).validate(module, source, verbose=False)
    assert metrics["val/samples"] == samples
    assert means(metrics) == expected
    index = torch.arange(samples)  # ready images as pairs: data of another's
    images = source.normalize(source.images(index))
    pairs = list(zip(images, index % 16 % classes, strict=True))
    # The batch size by name: Lightning wraps DataLoader's `__init__` while it asks for a loader.
    loader = DataLoader(pairs, batch_size=2)
    (metrics,) = quiet_trainer(tmp_path).test(module, dataloaders=loader, verbose=False)
    assert metrics.pop("test/samples") == samples
    assert means(metrics, "test") == expected
    logits = torch.cat(quiet_trainer(tmp_path).predict(module, loader))
    assert logits.shape == (samples, classes)
    assert classes > 3 or metrics["test/acc5"] == 1


def test_a_fillers_infinite_loss_does_not_count(tmp_path):
    image = torch.zeros(2, 7, 1, 1)
    image[1, 0] = torch.inf
    batch = {"image": image, "label": torch.tensor([0, 1]), "weight": torch.tensor([1.0, 0.0])}
    module = ImageClassifier(nn.Flatten(), num_classes=7)
    loader = DataLoader([batch], None)
    (metrics,) = quiet_trainer(tmp_path).validate(module, loader, verbose=False)
    assert metrics["val/samples"] == 1
    assert torch.tensor(means(metrics)).isfinite().all()


class Received(nn.Module):
    """Logits that another stage of a pipeline has computed."""

    def forward(self, images):
        return torch.eye(len(images), 4)


@pytest.mark.parametrize("as_mapping", [True, False])
def test_a_batch_of_ones_own_data_is_counted_where_its_images_are_not(as_mapping):
    images = torch.empty(4, 3, 8, 8, device="meta")
    labels = torch.tensor([0, 1, 0, 0])
    module = ImageClassifier(Received(), num_classes=4)
    module.on_validation_epoch_start()
    module.validation_step(
        {"image": images, "label": labels} if as_mapping else (images, labels), 0
    )
    assert module.metric.sums[1:].tolist() == [2, 4, 4]


def test_labels_are_smoothed_in_training():
    module = classifier(label_smoothing=0.3).eval()
    source = data(4)
    batch = first_batch(source.val_dataloader(), source)
    expected = F.cross_entropy(module(batch["image"]), batch["label"], label_smoothing=0.3)
    assert module.training_step(batch, 0)["loss"].item() == pytest.approx(expected.item())


def test_half_precision_runs_throughout(tmp_path):
    module = classifier(mixup=0.2)
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), 0.1)
    trainer = quiet_trainer(tmp_path, precision="bf16-true", max_epochs=1, limit_train_batches=2)
    trainer.fit(module, data(5))
    assert module.network[0].weight.dtype == torch.bfloat16
    assert trainer.callback_metrics["val/samples"] == 5


def test_compiling_keeps_the_names_of_weights():
    module = classifier(compile=True)
    plain = classifier()
    module.configure_model(), plain.configure_model()
    assert module.network._compiled_call_impl
    assert not plain.network._compiled_call_impl
    assert list(module.state_dict()) == list(plain.state_dict())


def test_group_norm_replaces_every_batch_norm():
    module = ImageClassifier(resnet18(zero_init_residual=True), norm="group")
    norms = [m for m in module.modules() if isinstance(m, nn.GroupNorm)]
    assert len(norms) == 20
    assert not [m for m in module.modules() if isinstance(m, nn.BatchNorm2d)]
    assert {norm.num_groups for norm in norms} == {32}
    assert module.network.layer1[0].bn2.weight.abs().sum() == 0
    assert with_group_norm(nn.BatchNorm2d(48)).num_groups == 16
    assert not with_group_norm(nn.BatchNorm2d(4, affine=False)).affine
    timms = with_group_norm(nn.Sequential(BatchNormAct2d(8)))
    assert isinstance(timms[0][0], nn.GroupNorm)
    assert (timms(torch.randn(2, 8, 4, 4)) >= 0).all()
    module = classifier(norm="group").train()
    images = torch.rand(4, 3, 8, 8)
    parts = torch.cat([module(images[:1]), module(images[1:])])
    torch.testing.assert_close(module(images), parts), "it does not depend on the batch"


@pytest.mark.parametrize("name, value", [("norm", "layer"), ("mixup", -1), ("label_smoothing", 1)])
def test_arguments_out_of_range(name, value):
    assert [p.path for p in ImageClassifier.check({name: value})] == [name]
    assert refusal(classifier, **{name: value}).path == f"model.{name}"


def mixed(seed, mixup=0.0, cutmix=0.0, size=6):
    """Images filled with their own number, which shows what goes into a result; it; its targets."""
    images = torch.arange(float(size)).view(-1, 1, 1, 1).expand(size, 3, 16, 16)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.arange(size)
    return images, *mix(images, labels, size, mixup=mixup, cutmix=cutmix, seed=seed)


@pytest.mark.parametrize("way, most", [("mixup", 1), ("cutmix", 2)])
def test_targets_are_the_shares_of_the_images(way, most):
    for seed in range(20):
        images, result, targets = mixed(seed, **{way: 1.0})
        torch.testing.assert_close(targets.sum(1), torch.ones(6))
        torch.testing.assert_close(result.mean(dim=(1, 2, 3)), targets @ torch.arange(6.0))
        assert result.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(images[:, 0, 0, 0], torch.arange(6.0)), "the batch was written to"
        assert max(len(row.unique()) for row in result) <= most
    images, result, targets = mixed(0, size=1, **{way: 1.0})  # an image mixes with itself
    assert torch.equal(result, images)
    assert targets.tolist() == [[1.0]]


def test_a_resumed_step_mixes_as_before_and_with_both_ways_each_comes_up():
    def loss(batch_idx):
        module = classifier(mixup=0.2, cutmix=1.0, seed=4).eval()
        source = data()
        batch = first_batch(source.train_dataloader(), source)
        return module.training_step(batch, batch_idx)["loss"]

    assert loss(3) == loss(3) != loss(4)
    boxes = [len(mixed(seed, 1.0, 1.0)[1][0].unique()) > 1 for seed in range(40)]
    assert 10 < sum(boxes) < 30


def test_the_network_for_small_images_keeps_twice_the_positions():
    config = compose(["model=resnet_small", "data.num_classes=10", "debug=cpu"])
    values = resolve(config).values
    binding = Binding(
        {"config": values, "context": {"local": True}, "trust": [(), ()], "expressions": []}
    )
    binding.import_targets()
    binding.visit(values["model"], ("model",))
    assert not binding.findings.problems, "it needs no consent"
    network = instantiate(config.model.network, _convert_="all")
    assert sum(each.numel() for each in network.parameters()) == 1_598_378
    with torch.no_grad():
        for size, positions in ((32, 2), (48, 3), (64, 4), (96, 6)):
            images = torch.randn(2, 3, size, size)
            assert network.forward_features(images).shape == (2, 256, positions, positions)
            assert network(images).shape == (2, 10)
