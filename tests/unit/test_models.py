"""ImageClassifier: exact validation, mixing, normalisation layers."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from distdl.data import SyntheticImages
from distdl.data.loading import distribute
from distdl.data.sampling import TrainPosition
from distdl.models import ImageClassifier
from distdl.models.classifier import with_group_norm
from distdl.models.mixing import _cutmix, mix
from distdl.util.errors import UserError
from tests.prepared import quiet_trainer as trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


def network(classes=7):
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(8, classes))


def classifier(classes=7, **kwargs):
    return ImageClassifier(network(classes), num_classes=classes, **kwargs)


def data(samples=11, classes=7, rank=0, world_size=1, **kwargs):
    sizes = {"image_size": 8, "pool_size": 16, "train_samples": 64, "val_samples": samples}
    source = SyntheticImages(4, num_classes=classes, **sizes, **kwargs)
    position = TrainPosition()
    distribute(source, rank=rank, world_size=world_size, seed=0, position=position)
    return source


def plain_loop(module, source, samples):
    """The three means over the samples, without batches, weights or sums."""
    index = torch.arange(samples)
    images, labels = source.normalize(source.images(index)), index % 16 % module.num_classes
    with torch.no_grad():
        logits = module.eval().network(images)
    ranks = (logits > logits.gather(1, labels[:, None])).sum(1)
    loss = F.cross_entropy(logits, labels)
    return [loss.item(), (ranks < 1).float().mean().item(), (ranks < 5).float().mean().item()]


@pytest.mark.parametrize("samples, classes", [(1, 7), (4, 3), (11, 7)])
def test_validation_equals_a_plain_loop(tmp_path, samples, classes):
    module, source = classifier(classes), data(samples, classes)
    (found,) = trainer(tmp_path).validate(module, source, verbose=False)
    expected = plain_loop(module, source, samples)
    assert found["val/samples"] == samples
    values = [found[f"val/{name}"] for name in ("loss", "acc1", "acc5")]
    assert values == pytest.approx(expected, abs=1e-6)
    if classes == 3:
        assert found["val/acc5"] == 1


@pytest.mark.parametrize("samples", [1, 2, 7, 10])
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_sums_of_all_ranks_count_each_sample_once(samples, world_size):
    module = classifier().eval()
    total = torch.zeros(4, dtype=torch.float64)
    for rank in range(world_size):
        source = data(samples, rank=rank, world_size=world_size)
        module.on_validation_epoch_start()
        with torch.no_grad():
            for batch in source.val_dataloader():
                module.validation_step(source.on_after_batch_transfer(batch, 0), 0)
        total += module._sums
    assert total[3] == samples
    means = (total[:3] / samples).tolist()
    assert means == pytest.approx(plain_loop(module, data(samples), samples), abs=1e-6)


def test_the_ranks_sums_are_reduced_once_and_all_log_the_same(tmp_path, monkeypatch):
    module, source = classifier(), data(8)
    run = trainer(tmp_path)
    calls = []

    def reduce(tensor, group=None, reduce_op="mean"):
        if tensor.dim() == 0:  # Lightning counts batches
            return tensor
        calls.append(reduce_op)
        return tensor + torch.tensor(
            [0.0, 0, 0, 8], dtype=tensor.dtype
        )  # a rank that got all wrong

    monkeypatch.setattr(run.strategy, "reduce", reduce)
    (found,) = run.validate(module, source, verbose=False)
    assert calls == ["sum"] and found["val/samples"] == 16
    assert found["val/acc1"] == pytest.approx(plain_loop(module, source, 8)[1] / 2)


def test_a_fillers_infinite_loss_does_not_count():
    module = classifier()
    module.network = nn.Flatten()
    module.on_validation_epoch_start()
    image = torch.zeros(2, 7, 1, 1)
    image[1, 0] = torch.inf
    batch = {"image": image, "label": torch.tensor([0, 1]), "weight": torch.tensor([1.0, 0.0])}
    module.validation_step(batch, 0)
    assert module._sums.isfinite().all() and module._sums[3] == 1


def test_test_metrics_have_names_of_their_own(tmp_path):
    source = data(5)
    run = trainer(tmp_path)
    (found,) = run.test(classifier(), dataloaders=source_loader(source), verbose=False)
    assert set(found) == {"test/loss", "test/acc1", "test/acc5", "test/samples"}
    assert found["test/samples"] == 5


def source_loader(source):
    """Ready images as pairs: data that is not ours.

    Its batch size by name: Lightning wraps DataLoader's `__init__` while it asks for a loader, for
    good if that raises (in an earlier test), and can then not build such a loader anew.
    """
    index = torch.arange(source.val_samples)
    images = source.normalize(source.images(index))
    pairs = list(zip(images, index % 16 % 7, strict=True))
    return torch.utils.data.DataLoader(pairs, batch_size=2)


def test_training_learns_and_logs_nothing(tmp_path):
    module, source = classifier(classes=4), data(16, classes=4)
    module.configure_optimizers = lambda: torch.optim.Adam(module.parameters(), 0.03)
    logged = []
    module.log = lambda name, *args, **kwargs: logged.append(name)
    losses = []

    def step(batch, batch_idx):
        outputs = ImageClassifier.training_step(module, batch, batch_idx)
        losses.append(outputs["loss"].item())
        return outputs

    module.training_step = step
    trainer(tmp_path, max_epochs=8, limit_val_batches=0).fit(module, source)
    assert losses[-1] < losses[0] / 2 and logged == []


def test_label_smoothing_counts_in_training_only(tmp_path):
    source = data(4)
    batch = source.on_after_batch_transfer(next(iter(source.val_dataloader())), 0)
    plain, smooth = classifier().eval(), classifier(label_smoothing=0.3).eval()
    losses = [m.training_step(batch, 0)["loss"].item() for m in (plain, smooth)]
    logits = plain(batch["image"])
    expected = F.cross_entropy(logits, batch["label"], label_smoothing=0.3)
    assert losses[1] == pytest.approx(expected.item()) and losses[0] != losses[1]
    found = [trainer(tmp_path).validate(m, data(4), verbose=False)[0] for m in (plain, smooth)]
    assert found[0] == found[1]


def test_half_precision_runs_throughout(tmp_path):
    module = classifier(mixup=0.2)
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), 0.1)
    run = trainer(tmp_path, precision="bf16-true", max_epochs=1, limit_train_batches=2)
    run.fit(module, data(5))
    assert module.network[0].weight.dtype == torch.bfloat16
    assert run.callback_metrics["val/samples"] == 5


def test_predictions_are_logits(tmp_path):
    found = trainer(tmp_path).predict(classifier(), source_loader(data(5)))
    assert torch.cat(found).shape == (5, 7)


def test_lightnings_advice_on_sync_dist_is_kept_quiet(tmp_path, monkeypatch):
    from lightning.pytorch.trainer.connectors.logger_connector import result

    monkeypatch.setattr(result, "_distributed_is_initialized", lambda: True)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trainer(tmp_path).validate(classifier(), data(4), verbose=False)
    assert not [w for w in seen if "sync_dist" in str(w.message)]


@pytest.mark.parametrize("channels_last", [True, False])
def test_memory_layout(channels_last):
    module = classifier(channels_last=channels_last)
    wanted = torch.channels_last if channels_last else torch.contiguous_format
    assert module.network[0].weight.is_contiguous(memory_format=wanted)
    seen = []
    module.network.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    image = torch.rand(2, 3, 8, 8)
    for given in (image, image.to(memory_format=torch.channels_last)):
        module(given)
        assert seen[-1].is_contiguous(memory_format=wanted)


def test_compiling_keeps_the_names_of_weights():
    module, plain = classifier(compile=True), classifier()
    module.configure_model()
    assert module.network._compiled_call_impl is not None
    assert list(module.state_dict()) == list(plain.state_dict())
    plain.configure_model()
    assert plain.network._compiled_call_impl is None


def test_a_run_that_was_frozen_with_fused_bn_is_still_built(caplog):
    classifier(fused_bn=False)
    assert not caplog.text
    classifier(fused_bn=True)
    assert "model.fused_bn=true has no effect" in caplog.text


def test_group_norm_takes_the_place_of_every_batch_norm():
    from torchvision.models import resnet18

    module = ImageClassifier(resnet18(zero_init_residual=True), norm="group")
    norms = [m for m in module.modules() if isinstance(m, nn.GroupNorm)]
    assert len(norms) == 20 and not [m for m in module.modules() if isinstance(m, nn.BatchNorm2d)]
    assert {norm.num_groups for norm in norms} == {32}
    assert module.network.layer1[0].bn2.weight.abs().sum() == 0
    assert with_group_norm(nn.BatchNorm2d(48)).num_groups == 16
    assert not with_group_norm(nn.BatchNorm2d(4, affine=False)).affine


def test_group_norm_keeps_timms_activation():
    from timm.layers import BatchNormAct2d

    replaced = with_group_norm(nn.Sequential(BatchNormAct2d(8)))
    assert isinstance(replaced[0][0], nn.GroupNorm)
    assert (replaced(torch.randn(2, 8, 4, 4)) >= 0).all()


def test_group_norm_does_not_depend_on_the_batch():
    module = classifier(norm="group").train()
    images = torch.rand(4, 3, 8, 8)
    whole = module(images)
    torch.testing.assert_close(whole, torch.cat([module(images[:1]), module(images[1:])]))


@pytest.mark.parametrize(
    "given, path",
    [
        ({"norm": "layer"}, "norm"),
        ({"mixup": -1}, "mixup"),
        ({"cutmix": -0.1}, "cutmix"),
        ({"label_smoothing": 1.0}, "label_smoothing"),
    ],
)
def test_arguments_out_of_range(given, path):
    assert [p.path for p in ImageClassifier.check(given)] == [path]
    with pytest.raises(UserError) as refused:
        classifier(**given)
    assert refused.value.problems[0].path == f"model.{path}"


# Mixing


def mixed(seed, mixup=0.0, cutmix=0.0, size=6):
    # Every image is filled with its own number, so that a result tells what went into it.
    images = torch.arange(float(size)).view(-1, 1, 1, 1).expand(size, 3, 16, 16)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.arange(size)
    return images, *mix(images, labels, size, mixup=mixup, cutmix=cutmix, seed=seed)


@pytest.mark.parametrize("way", ["mixup", "cutmix"])
def test_targets_say_what_the_images_hold(way):
    for seed in range(20):
        images, found, targets = mixed(seed, **{way: 1.0})
        torch.testing.assert_close(targets.sum(1), torch.ones(6))
        # The mean of an image is the mean of the numbers, each by its share.
        torch.testing.assert_close(found.mean(dim=(1, 2, 3)), targets @ torch.arange(6.0))
        assert found.shape == images.shape
        assert found.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(images[:, 0, 0, 0], torch.arange(6.0))  # the batch stays as it is
        values = {len(set(row.flatten().tolist())) for row in found}
        assert max(values) == 1 if way == "mixup" else max(values) <= 2


def test_mixing_repeats_by_seed_and_with_both_each_comes_up():
    first, again, other = (mixed(seed, mixup=0.5, cutmix=0.5)[1] for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    boxes = [len(set(mixed(s, 1.0, 1.0)[1][0].flatten().tolist())) > 1 for s in range(40)]
    assert 10 < sum(boxes) < 30


def test_a_box_is_cut_off_at_the_edge_and_one_image_mixes_with_itself():
    images, share = _cutmix(torch.zeros(1, 1, 8, 8), torch.ones(1, 1, 8, 8), 0.75, (0.0, 1.0))
    assert images.sum() == 4 and share == 1 - 4 / 64
    assert images[0, 0, :2, 6:].sum() == 4
    images, found, targets = mixed(0, mixup=1.0, size=1)
    assert torch.equal(found, images) and targets.tolist() == [[1.0]]


def test_a_resumed_step_mixes_as_before(tmp_path):
    def losses(batch_idx):
        module = classifier(mixup=0.2, cutmix=1.0, seed=4).eval()
        source = data()
        batch = source.on_after_batch_transfer(next(iter(source.train_dataloader())), 0)
        trainer(tmp_path).strategy._lightning_module = module
        return module.training_step(batch, batch_idx)["loss"].item()

    assert losses(3) == losses(3) != losses(4)
