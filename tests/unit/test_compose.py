"""What a user types -> one config; everything that Hydra refuses is a UserError."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from distdl.config import compose
from distdl.util.errors import UserError


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DISTDL_CONF", raising=False)
    return tmp_path


def refused(*overrides: str, sweep: bool = False) -> str:
    with pytest.raises(UserError) as error:
        if sweep:
            compose.sweep(overrides)
        else:
            compose.compose(overrides)
    return str(error.value)


def test_every_group_has_its_default() -> None:
    config = compose.compose([])
    assert config.model.network._target_ == "torchvision.models.resnet50"
    assert config.experiment_name == "default"
    assert list(config.tracking) == ["mlflow"] and list(config.callbacks) == ["progress"]
    assert compose.compose(["tracking=none", "callbacks=none"]).tracking == {}


@pytest.mark.parametrize("sign", ["", "+", "++"])
def test_an_experiment_however_it_is_written(sign) -> None:
    config = compose.compose([f"{sign}experiment=resnet50_ddp"])
    assert config.data.batch_size == 256
    assert config.experiment_name == "resnet50_ddp"


def test_what_comes_over_what_whatever_the_order() -> None:
    """options < experiment < debug < values."""
    for order in (
        ["data.batch_size=3", "debug=cpu", "experiment=resnet50_ddp", "model=resnet18"],
        ["model=resnet18", "experiment=resnet50_ddp", "debug=cpu", "data.batch_size=3"],
    ):
        config = compose.compose(order)
        assert config.data.batch_size == 3
        assert config.trainer.precision == "32-true"  # debug's, over the experiment's bf16
        assert config.schedule.warmup_epochs == 0  # the experiment
        # A choice on the command line wins over the experiment's.
        assert config.model.network._target_ == "torchvision.models.resnet18"


def test_several_options_of_one_group() -> None:
    config = compose.compose(["tracking=[csv,tensorboard]", "callbacks=[default,ema]"])
    assert list(config.tracking) == ["csv", "tensorboard"]
    assert list(config.callbacks) == ["progress", "ema"]


def test_unknown_keys_and_interpolations_are_left_to_validation() -> None:
    config = compose.compose(["lrr=1", "+optimizer.foo=2", "trainer.max_epoch=3"])
    assert (config.lrr, config.optimizer.foo, config.trainer.max_epoch) == (1, 2, 3)
    config = compose.compose(["experiment_name=${nope}", "name=${oc.env:NOPE}"])
    assert config._get_node("experiment_name")._value() == "${nope}"


def test_options_that_do_not_exist_all_at_once() -> None:
    text = refused("model=resnet5", "data=imagnet", "optimizer=null", "experiment=nope")
    assert "model: no option 'resnet5'\n    did you mean model=resnet50?" in text
    assert "did you mean data=imagenet?" in text
    assert "optimizer: no option 'null'" in text and "available: adamw, lars, none, sgd" in text
    assert "experiment: no option 'nope'" in text


def test_what_is_no_override_all_at_once() -> None:
    text = refused("a=[1", "seed=1", "name=a b=c", "~", 'b=[1, "', 'c={"B C": y}', 'd="{"B C": y}"')
    assert text.count("is not an override") == 5
    assert "it lacks ]: 'a=[1]'" in text
    # What is advised can be typed; a mapping is not a text, and what is quoted is not quoted again.
    assert """'b="[1, \\""'""" in text and text.count("special characters") == 2


def test_a_refused_override_does_not_repeat_a_secret() -> None:
    assert "hunter22" not in refused("model.api_token=hunter22[")


def test_a_file_that_is_no_yaml(tmp_path) -> None:
    (tmp_path / "conf/model").mkdir(parents=True)
    (tmp_path / "conf/model/broken.yaml").write_text("a: [1\nb: 2\n")
    assert "broken.yaml" in refused("model=broken")
    (tmp_path / "conf/model/broken.yaml").write_text("defaults:\n  - nothing_here\n")
    assert "nothing_here" in refused("model=broken")


def test_sweeps_are_products_in_order() -> None:
    jobs = compose.sweep(["seed=1,2", "model=resnet18", "optimizer.lr=range(1,3)"])
    pairs = [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert jobs == [[f"seed={seed}", "model=resnet18", f"optimizer.lr={lr}"] for seed, lr in pairs]
    assert compose.sweep(["model=glob(*18)"]) == [["model=resnet18"]]
    several = [["tracking=[csv]"], ["tracking=[csv,mlflow]"]]
    assert compose.sweep(["tracking=[csv],[csv,mlflow]"]) == several
    assert compose.sweep_keys(["seed=1,2", "tags=[a,b]", "+x=choice(1,2)"]) == ["seed", "x"]
    assert "cannot be counted out" in refused("optimizer.lr=interval(0,1)", sweep=True)
    assert "matches nothing" in refused("model=glob(nothing*)", sweep=True)
    assert "matches nothing" in refused("optimizer.lr=glob(*)", sweep=True)


def test_one_journey(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command parses each word once, resolves its config once and asks one child."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    from distdl.cli import main
    from distdl.launch import dry_run
    from distdl.validation import resolve, validate

    counted: Counter[str] = Counter()

    def count(owner: Any, name: str, answer: Any = None) -> None:
        real = getattr(owner, name)

        def counting(*arguments: Any, **named: Any) -> Any:
            counted[name] += 1
            return answer if answer is not None else real(*arguments, **named)

        monkeypatch.setattr(owner, name, counting)

    count(OverridesParser, "parse_override")
    count(resolve, "Resolved")
    count(validate, "_ask_child", {"problems": [], "notes": [], "facts": {}})
    count(dry_run, "render", "the request")
    words = ["optimizer.lr=0.123", "seed=321", "trainer.accelerator=cpu", "dry_run=true"]
    compose._parsed.cache_clear()
    assert main.main(words) == 0
    assert counted == {"parse_override": 4, "Resolved": 1, "_ask_child": 1, "render": 1}


def test_config_dir_adds_and_does_not_shadow(tmp_path) -> None:
    (tmp_path / "more/model").mkdir(parents=True)
    (tmp_path / "more/model/mine.yaml").write_text("_target_: mine.Model\n")
    (tmp_path / "more/model/resnet50.yaml").write_text("_target_: mine.Model\n")
    assert compose.compose(["model=mine"], ["more"]).model._target_ == "mine.Model"
    assert compose.compose([], ["more"]).model._target_ == "distdl.models.ImageClassifier"
    # Gone again in the next command of this process.
    assert "no option 'mine'" in refused("model=mine")
    with pytest.raises(UserError, match="--config-dir"):
        compose.compose([], ["nowhere"])


def test_nothing_is_written(tmp_path) -> None:
    compose.compose(["experiment=resnet50_ddp"])
    refused("model=nope")
    assert list(tmp_path.iterdir()) == []
