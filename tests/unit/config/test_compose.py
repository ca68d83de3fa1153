"""What a user types -> one config; the user's ./conf: first among the options, never the primary
config, in no other application. And what of the config is resolved in the recipe."""

from __future__ import annotations

import os

import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from distdl.config import compose, grammar, user_conf
from distdl.config import recipe as configs
from distdl.util.errors import UserError
from tests.conftest import ROOT


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DISTDL_CONF", raising=False)
    return tmp_path


@pytest.fixture
def conf(folder):
    (folder / "conf/model").mkdir(parents=True)
    (folder / "conf/model/mine.yaml").write_text("_target_: mine.Model\n")
    (folder / "conf/model/resnet50.yaml").write_text("_target_: mine.F\n")
    return folder / "conf"


def refused(*overrides):
    with pytest.raises(UserError) as error:
        compose.compose(overrides)
    return str(error.value)


def test_what_comes_over_what_whatever_the_order():
    """options < experiment < debug < values."""
    typed = ["data.batch_size=3", "debug=cpu", "++experiment=resnet50_ddp", "model=resnet18"]
    assert compose.compose(typed) == (config := compose.compose(typed[::-1]))
    assert config.experiment_name == "resnet50_ddp"
    assert config.data.batch_size == 3
    assert config.trainer.precision == "32-true"  # debug's, over the experiment's bf16
    assert config.schedule.warmup_epochs == 0  # the experiment
    # A choice on the command line wins over the experiment's.
    assert config.model.network._target_ == "torchvision.models.resnet18"
    assert compose.compose(typed[2:3]).data.batch_size == 256


def test_wrong_options_and_wrong_overrides_are_reported_at_once():
    text = refused("model=resnet5", "data=imagnet", "optimizer=null", "experiment=nope")
    for group in ("model", "data", "optimizer", "experiment"):
        assert f"{group}: no option " in text
    text = refused("a=[1", "seed=1", "name=a b=c", "~", 'b=[1, "', 'c={"B C": y}', 'd="{"B C": y}"')
    assert text.count("is not an override") == 5
    # What is advised can be typed; a mapping is not a text, and what is quoted is not quoted again.
    assert """'b="[1, \\""'""" in text
    assert text.count("special characters") == 2


def test_sweeps_are_products_in_order():
    def jobs_of(*overrides):
        return compose.sweep(grammar.parse_overrides(overrides))

    jobs = jobs_of("seed=1,2", "model=resnet18", "optimizer.lr=range(1,3)")
    pairs = [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert jobs == [[f"seed={seed}", "model=resnet18", f"optimizer.lr={lr}"] for seed, lr in pairs]
    assert jobs_of("model=glob(*18)") == [["model=resnet18"]]
    several = [["tracking=[csv]"], ["tracking=[csv,mlflow]"]]
    assert jobs_of("tracking=[csv],[csv,mlflow]") == several


def test_a_folder_adds_and_may_shadow(conf, folder, monkeypatch):
    """The user's own one, named by a variable, shadows; one of `--config-dir` does not."""
    os.rename(conf, folder / "settings")
    assert user_conf.folder() is None
    assert compose.compose(["model=mine"], ["settings"]).model._target_ == "mine.Model"
    assert compose.compose([], ["settings"]).model._target_ == "distdl.models.ImageClassifier"
    # Gone again in the next command of this process.
    assert "no option 'mine'" in refused("model=mine")
    monkeypatch.setenv("DISTDL_CONF", "settings")
    assert user_conf.folder() == folder / "settings"
    assert compose.compose(["model=mine"]).model._target_ == "mine.Model"
    assert compose.compose([]).model == {"_target_": "mine.F"}
    monkeypatch.setenv("DISTDL_CONF", "nowhere")
    assert "DISTDL_CONF: 'nowhere' is not a folder" in refused()
    monkeypatch.delenv("DISTDL_CONF")
    monkeypatch.chdir(ROOT)  # in our checkout ./conf is ours
    assert user_conf.folder() is None
    assert user_conf.shadowed() == []


def test_other_applications_do_not_see_it(conf):
    compose.compose([])
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(conf / "model"), version_base="1.3"):
        path = GlobalHydra.instance().config_loader().get_search_path()
        assert not any(e.provider == "distdl-user" for e in path.get_path())


def test_what_only_hydra_knows_is_resolved_and_the_environment_is_not(monkeypatch):
    monkeypatch.setenv("SECRET_FOLDER", "/secret/folder")
    named = ["name=run-${now:%Y}-${hydra:job.name}", "tags=${hydra:overrides.task}", "seed=1"]
    rest = ["+data.root=${oc.env:SECRET_FOLDER}", "dry_run=${hydra:job.chdir}"]
    config = compose.compose([*named, *rest])
    plain = OmegaConf.to_container(configs.recipe_of(config), resolve=False)
    assert plain["name"].startswith("run-20")
    assert plain["name"].endswith("-distdl")
    assert "++seed=1" in plain["tags"]
    assert configs.where_of(config).dry_run is False
    assert plain["data"]["root"] == "${oc.env:SECRET_FOLDER}"
    assert plain["model"]["num_classes"] == "${data.num_classes}"


def test_an_experiment_may_be_called_as_a_number(tmp_path, monkeypatch):
    (tmp_path / "conf/experiment").mkdir(parents=True)
    (tmp_path / "conf/experiment/2024.yaml").write_text("# @package _global_\nseed: 77\n")
    (tmp_path / "conf/experiment/1.5.yaml").write_text("# @package _global_\nseed: 78\n")
    monkeypatch.chdir(tmp_path)
    for text, seed in (("2024", 77), ("[2024]", 77), ("1.5", 78), ('"2024"', 77)):
        for plus in ("", "+"):
            assert compose.compose([f"{plus}experiment={text}"]).seed == seed
    for text in ("2025", "null", "true", "[2025]", "[2024,x]"):
        with pytest.raises(UserError) as error:
            compose.compose([f"experiment={text}"])
        assert "no option" in str(error.value)


def test_what_an_experiment_leaves_to_the_user_is_missing_whatever_a_preset_has(conf, tmp_path):
    (conf / "experiment").mkdir(parents=True, exist_ok=True)
    needs = "# @package _global_\nmodel:\n  weights: ???\nseed: ???\n"
    (conf / "experiment/needs.yaml").write_text(needs)
    (conf / "experiment/gives.yaml").write_text("# @package _global_\nseed: 3\n")

    def missing(*words: str) -> set[str]:
        config = compose.compose(["model=resnet18", *words])
        both = {"model.weights": config.model, "seed": config}
        return {
            path for path, node in both.items() if OmegaConf.is_missing(node, path.split(".")[-1])
        }

    assert missing() == set()
    assert missing("experiment=needs") == {"model.weights", "seed"}
    assert missing("experiment=needs", "model.weights=null") == {"seed"}
    assert missing("experiment=[needs,gives]") == {"model.weights"}
    assert missing("experiment=needs", "seed=4", "model.weights=x.pth") == set()
