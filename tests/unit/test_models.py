"""ImageClassifier: exact validation, mixing, normalisation layers."""

from __future__ import annotations

import warnings

import pytest
import torch
from timm.layers import BatchNormAct2d
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchvision.models import resnet18

from distdl.models import ImageClassifier
from distdl.models.classifier import with_group_norm
from distdl.models.mixing import mix
from distdl.util.errors import UserError
from tests.prepared import quiet_trainer
from tests.unit.sample_data import classifier, share, synthetic

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


def data(samples=11, classes=7, **options):
    return share(synthetic(samples, classes), **options)


def first_batch(loader, source):
    return source.on_after_batch_transfer(next(iter(loader)), 0)


def plain_loop(module, source, samples):
    """The three means over the samples, without batches, weights or sums."""
    index = torch.arange(samples)
    images, labels = source.normalize(source.images(index)), index % 16 % module.num_classes
    with torch.no_grad():
        logits = module.eval().network(images)
    ranks = (logits > logits.gather(1, labels[:, None])).sum(1)
    loss = F.cross_entropy(logits, labels)
    return [loss.item(), (ranks < 1).float().mean().item(), (ranks < 5).float().mean().item()]


def means(metrics, stage="val"):
    return [metrics[f"{stage}/{name}"] for name in ("loss", "acc1", "acc5")]


@pytest.mark.parametrize("samples, classes", [(1, 7), (4, 3), (11, 7)])
def test_validation_equals_a_plain_loop(tmp_path, samples, classes):
    module, source = classifier(classes), data(samples, classes)
    expected = pytest.approx(plain_loop(module, source, samples), abs=1e-6)
    (metrics,) = quiet_trainer(tmp_path).validate(module, source, verbose=False)
    assert metrics["val/samples"] == samples and means(metrics) == expected
    index = torch.arange(samples)  # ready images as pairs: data of another's
    images = source.normalize(source.images(index))
    pairs = list(zip(images, index % 16 % classes, strict=True))
    # The batch size by name: Lightning wraps DataLoader's `__init__` while it asks for a loader.
    loader = DataLoader(pairs, batch_size=2)
    (metrics,) = quiet_trainer(tmp_path).test(module, dataloaders=loader, verbose=False)
    assert metrics.pop("test/samples") == samples and means(metrics, "test") == expected
    assert len(metrics) == 3
    logits = torch.cat(quiet_trainer(tmp_path).predict(module, loader))
    assert logits.shape == (samples, classes) and (classes > 3 or metrics["test/acc5"] == 1)


@pytest.mark.parametrize("samples, world_size", [(1, 2), (2, 3), (7, 2), (10, 3)])
def test_the_ranks_sums_are_reduced_once_and_count_each_sample_once(
    tmp_path, monkeypatch, samples, world_size
):
    module, total, operations = classifier(), 0, []
    for rank in range(world_size):
        trainer = quiet_trainer(tmp_path)

        def reduce(tensor, group=None, reduce_op="mean"):
            nonlocal total
            if tensor.dim():  # Lightning counts batches
                operations.append(reduce_op)
                total = tensor = tensor + total
            return tensor

        monkeypatch.setattr(trainer.strategy, "reduce", reduce)
        source = data(samples, rank=rank, world_size=world_size)
        (metrics,) = trainer.validate(module, source, verbose=False)
    assert operations == ["sum"] * world_size and metrics["val/samples"] == samples
    assert means(metrics) == pytest.approx(plain_loop(module, source, samples), abs=1e-6)


def test_a_fillers_infinite_loss_does_not_count(tmp_path):
    image = torch.zeros(2, 7, 1, 1)
    image[1, 0] = torch.inf
    batch = {"image": image, "label": torch.tensor([0, 1]), "weight": torch.tensor([1.0, 0.0])}
    module, loader = ImageClassifier(nn.Flatten(), num_classes=7), DataLoader([batch], None)
    (metrics,) = quiet_trainer(tmp_path).validate(module, loader, verbose=False)
    assert metrics["val/samples"] == 1 and torch.tensor(means(metrics)).isfinite().all()


def test_training_learns_and_logs_nothing(tmp_path, monkeypatch):
    module, losses, logged = classifier(classes=4), [], []
    module.configure_optimizers = lambda: torch.optim.Adam(module.parameters(), 0.03)
    module.log = lambda name, *args, **kwargs: logged.append(name)
    step = module.training_step
    module.training_step = lambda batch, batch_idx: losses.append(step(batch, 0)) or losses[-1]
    trainer = quiet_trainer(tmp_path, max_epochs=8, limit_val_batches=0)
    trainer.fit(module, data(16, classes=4))
    assert losses[-1]["loss"] < losses[0]["loss"] / 2 and logged == []


def test_label_smoothing_counts_in_training_only(tmp_path):
    source = data(4)
    batch = first_batch(source.val_dataloader(), source)
    plain, smooth = classifier().eval(), classifier(label_smoothing=0.3).eval()
    losses = [m.training_step(batch, 0)["loss"].item() for m in (plain, smooth)]
    logits = plain(batch["image"])
    expected = F.cross_entropy(logits, batch["label"], label_smoothing=0.3)
    assert losses[1] == pytest.approx(expected.item()) and losses[0] != losses[1]
    trainer = quiet_trainer(tmp_path)
    validated = [trainer.validate(m, data(4), verbose=False)[0] for m in (plain, smooth)]
    assert validated[0] == validated[1]


def test_half_precision_runs_throughout(tmp_path):
    module = classifier(mixup=0.2)
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), 0.1)
    trainer = quiet_trainer(tmp_path, precision="bf16-true", max_epochs=1, limit_train_batches=2)
    trainer.fit(module, data(5))
    assert module.network[0].weight.dtype == torch.bfloat16
    assert trainer.callback_metrics["val/samples"] == 5


def test_lightnings_advice_on_sync_dist_is_suppressed(tmp_path, monkeypatch):
    from lightning.pytorch.trainer.connectors.logger_connector import result

    monkeypatch.setattr(result, "_distributed_is_initialized", lambda: True)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        quiet_trainer(tmp_path).validate(classifier(), data(4), verbose=False)
    assert not [w for w in seen if "sync_dist" in str(w.message)]


@pytest.mark.parametrize("channels_last", [True, False])
def test_memory_layout(channels_last):
    module, seen = classifier(channels_last=channels_last), []
    layout = torch.channels_last if channels_last else torch.contiguous_format
    assert module.network[0].weight.is_contiguous(memory_format=layout)
    module.network.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    image = torch.rand(2, 3, 8, 8)
    for each in (image, image.to(memory_format=torch.channels_last)):
        module(each)
        assert seen[-1].is_contiguous(memory_format=layout)


def test_compiling_keeps_the_names_of_weights():
    module, plain = classifier(compile=True), classifier()
    module.configure_model(), plain.configure_model()
    assert module.network._compiled_call_impl and not plain.network._compiled_call_impl
    assert list(module.state_dict()) == list(plain.state_dict())


def test_a_run_that_was_frozen_with_fused_bn_is_still_built(caplog):
    classifier(fused_bn=False)
    assert not caplog.text
    classifier(fused_bn=True)
    assert "model.fused_bn=true has no effect" in caplog.text


def test_group_norm_replaces_every_batch_norm():
    module = ImageClassifier(resnet18(zero_init_residual=True), norm="group")
    norms = [m for m in module.modules() if isinstance(m, nn.GroupNorm)]
    assert len(norms) == 20 and not [m for m in module.modules() if isinstance(m, nn.BatchNorm2d)]
    assert {norm.num_groups for norm in norms} == {32}
    assert module.network.layer1[0].bn2.weight.abs().sum() == 0
    assert with_group_norm(nn.BatchNorm2d(48)).num_groups == 16
    assert not with_group_norm(nn.BatchNorm2d(4, affine=False)).affine
    timms = with_group_norm(nn.Sequential(BatchNormAct2d(8)))
    assert isinstance(timms[0][0], nn.GroupNorm) and (timms(torch.randn(2, 8, 4, 4)) >= 0).all()
    module, images = classifier(norm="group").train(), torch.rand(4, 3, 8, 8)
    parts = torch.cat([module(images[:1]), module(images[1:])])
    torch.testing.assert_close(module(images), parts), "it does not depend on the batch"


@pytest.mark.parametrize(
    "name, value", [("norm", "layer"), ("mixup", -1), ("cutmix", -0.1), ("label_smoothing", 1.0)]
)
def test_arguments_out_of_range(name, value):
    assert [p.path for p in ImageClassifier.check({name: value})] == [name]
    with pytest.raises(UserError) as error:
        classifier(**{name: value})
    assert error.value.problems[0].path == f"model.{name}"


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
    assert torch.equal(result, images) and targets.tolist() == [[1.0]]


def test_mixing_repeats_by_seed_and_with_both_each_comes_up():
    first, again, other = (mixed(seed, mixup=0.5, cutmix=0.5)[1] for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    boxes = [len(mixed(seed, 1.0, 1.0)[1][0].unique()) > 1 for seed in range(40)]
    assert 10 < sum(boxes) < 30


def test_a_resumed_step_mixes_as_before(tmp_path):
    def loss(batch_idx):
        module, source = classifier(mixup=0.2, cutmix=1.0, seed=4).eval(), data()
        return module.training_step(first_batch(source.train_dataloader(), source), batch_idx)

    assert loss(3)["loss"] == loss(3)["loss"] != loss(4)["loss"]
