"""Low-rank adapters beside frozen weights."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from distdl.callbacks.adapters import Adapters
from distdl.checkpoint.adapters import KEY
from distdl.models import ImageClassifier, lora
from distdl.models.weights import read_weights
from distdl.util.errors import UserError
from tests.strategies.small import Wide
from tests.unit import checkpointing

IMAGES = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(5))
NODE = {"rank": 2, "alpha": 8.0}
LAYERS = ["stem.0", *(f"body.{n}" for n in range(4)), "wide"]


class Learns(ImageClassifier):
    def configure_optimizers(self):
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, 0.05)


def classifier(node=NODE, seed=0, kind=Wide):
    torch.manual_seed(seed)
    module = Learns(kind(10, False), num_classes=10, channels_last=False)
    torch.manual_seed(1)
    lora.apply(module, node)
    return module


def trained(module, steps=3):
    """After some steps, so that the adapters answer."""
    optimizer = module.configure_optimizers()
    for _ in range(steps):
        module.training_step({"image": IMAGES, "label": torch.arange(6)}, 0)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    return module.eval()


def test_adapters_are_beside_all_layers_but_the_head_which_is_trained_whole():
    plain = classifier(None)
    module = classifier()
    learnt = {name for name, p in module.network.named_parameters() if p.requires_grad}
    adapters = {f"{n}.lora_{part}.default.weight" for n in LAYERS for part in "AB"}
    assert learnt == {*adapters, "fc.weight", "fc.bias"}
    assert not module.train().network.stem[1].training, "its statistics stay"
    assert torch.equal(module.eval()(IMAGES), plain.eval()(IMAGES)), "B is zero at first"
    kept = lora.trained_names(module)
    assert {name for name, _ in module.named_buffers()} <= kept
    assert {n for n in kept if "running" not in n and "tracked" not in n} == {
        f"network.{name}" for name in learnt
    }


def test_merged_they_answer_the_same_under_the_names_of_before():
    module = classifier()
    before = copy.deepcopy(module.network.wide.base_layer.weight)
    trained(module)
    assert torch.equal(module.network.wide.base_layer.weight, before)
    answers = module(IMAGES)
    assert not torch.allclose(answers, classifier(None).eval()(IMAGES), atol=1e-2)
    lora.without_adapters(module)
    torch.testing.assert_close(module(IMAGES), answers, rtol=1e-4, atol=1e-4)
    plain = classifier(None)
    plain.load_state_dict(module.state_dict())
    assert torch.equal(plain.eval()(IMAGES), module(IMAGES))


def test_a_module_that_no_one_knows():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
            self.deep = nn.Conv2d(4, 4, 1, groups=4)
            self.head = nn.Linear(4, 2)

    module = Own()
    lora.apply(module, {"rank": 3, "targets": ["blocks.[02]"]})
    learnt = [name for name, p in module.named_parameters() if p.requires_grad]
    assert [n.partition(".lora")[0] for n in learnt] == [
        "blocks.0", "blocks.0", "blocks.2", "blocks.2", "head.weight", "head.bias"
    ]  # fmt: skip


def problems(node, **more):
    network = {"_target_": "tests.strategies.small.Wide"}
    network |= {"num_classes": 10, "zero_init_residual": False}
    model = {"_target_": "distdl.models.ImageClassifier", "network": network, "num_classes": 10}
    config = {key: more.pop(key) for key in ("strategy", "callbacks") if key in more}
    context = {"config": config, "local": True}
    found = lora.LoraCheck.check({**model, "lora": node, **more}, context)
    return [f"{each.path}: {each.what} ({each.remedy})" for each in found]


@pytest.mark.parametrize(
    ("node", "more", "text"),
    [
        (NODE, {}, ""),
        ({}, {"strategy": {"_target_": "distdl.strategies.FSDPStrategy"}}, ""),
        ({"targets": ["stam"]}, {}, "lora.targets: Wide has no module or parameter 'stam' (did"),
        ({"targets": ["pool"]}, {}, "lora.targets: pool is or has no linear layer"),
        ({"rnk": 4}, {}, "lora.rnk: no such setting (did you mean rank?)"),
        ({"rank": 0}, {}, "lora.rank: 0 is not"),
        ({"dropout": 1.5}, {}, "lora.dropout: 1.5 is not"),
        ({"targets": "stem"}, {}, "(model.lora.targets=[stem])"),
        (8, {}, "lora: 8 is no mapping of rank, alpha"),
        (NODE, {"freeze": ["stem"]}, "freeze: has no effect beside model.lora"),
        (
            NODE,
            {"strategy": {"_target_": "distdl.strategies.DeepSpeedStrategy"}},
            "lora: DeepSpeedStrategy lays out all weights",
        ),
        (NODE, {"callbacks": {"e": {"_target_": "EMAWeightAveraging"}}}, "lora: callbacks.e"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_before_the_start(node, more, text):
    found = problems(node, **more)
    assert text in " ".join(found)
    assert len(found) == bool(text)


def test_without_peft_its_extra_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'distdl[lora]'" in " ".join(problems(NODE))


def fit(folder, resume=None, node=NODE, seed=0, **more):
    module = classifier(node, seed)
    module.strict_loading = False  # `InitialState` knows which weights are there already
    ours = checkpointing.checkpointer(folder, monitor=None, every_n_steps=2)
    rows = [{"image": image, "label": n} for n, image in enumerate(IMAGES)] * 2
    adapters = [Adapters(module)] if node else []
    data = DataLoader(rows, 3)
    options = {"max_epochs": 2, "default_root_dir": folder, "resume": resume, **more}
    checkpointing.fit(module, [ours, *adapters], data, **options)
    return module


def test_a_checkpoint_has_what_is_trained_and_a_resume_is_exact(tmp_path):
    whole = fit(tmp_path / "whole")
    saved = torch.load(tmp_path / "whole/epoch_000_step_00000002.ckpt", weights_only=True)
    assert saved["state_dict"].keys() == lora.trained_names(whole)
    assert saved[KEY]["beside"]
    with pytest.raises(UserError, match="export RUN --to weights"):
        read_weights(tmp_path / "whole/last.ckpt")
    again = fit(tmp_path / "again", resume=tmp_path / "whole/epoch_000_step_00000002.ckpt")
    wanted = torch.load(tmp_path / "whole/last.ckpt", weights_only=True)
    resumed = torch.load(tmp_path / "again/last.ckpt", weights_only=True)
    for key in ("state_dict", "optimizer_states"):
        torch.testing.assert_close(resumed[key], wanted[key], rtol=0, atol=0)
    for name, value in whole.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_adapters_go_beside_the_weights_that_they_were_trained_with(tmp_path):
    fit(tmp_path, max_epochs=1)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)

    def refused(module, digest=None):
        trained = lora.trained_names(module)
        digest = lora.digest_of(module, trained) if digest is None else digest
        lora.refuse_others(saved, "last.ckpt", digest)
        lora.refuse_missing(trained, saved["state_dict"], "last.ckpt")

    refused(classifier())
    with pytest.raises(UserError, match="beside other weights than the model has now"):
        refused(classifier(seed=3))
    with pytest.raises(UserError, match=r"the model has no model\.lora"):
        refused(classifier(None), digest="")
    wider = classifier({"rank": 2, "targets": ["wide", "fc"]})
    with pytest.raises(UserError, match=r"it lacks network\.fc\.lora_A"):
        refused(wider, digest=saved[KEY]["beside"])
    del saved[KEY]
    with pytest.raises(UserError, match="it holds no adapters"):
        refused(classifier())
