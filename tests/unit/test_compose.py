"""What a user types -> one config; everything that Hydra refuses is a UserError; and the user's
./conf: first among the options, never the primary config, in no other application. And of the
config the recipe, and apart from it where it runs."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from unittest import mock

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from distdl.cli import main
from distdl.config import compose, user_conf
from distdl.config import recipe as configs
from distdl.launch import dry_run
from distdl.util.errors import UserError
from distdl.validation import resolve, validate
from tests.conftest import ROOT


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DISTDL_CONF", raising=False)
    return tmp_path


def write(folder, files) -> None:
    for name, text in files.items():
        (folder / f"{name}.yaml").parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.yaml").write_text(text)


@pytest.fixture
def conf(folder):
    write(folder / "conf", {"model/mine": "# my own\n_target_: mine.Model\n"})
    return folder / "conf"


def refused(*overrides, work=compose.compose) -> str:
    with pytest.raises(UserError) as error:
        work(overrides)
    return str(error.value)


def test_every_group_has_its_default() -> None:
    config = compose.compose([])
    assert config.model.network._target_ == "torchvision.models.resnet50"
    assert config.experiment_name == "default"
    assert list(config.tracking) == ["mlflow"] and list(config.callbacks) == ["progress"]
    assert compose.compose(["tracking=none", "callbacks=none"]).tracking == {}
    config = compose.compose(["tracking=[csv,tensorboard]", "callbacks=[default,ema]"])
    assert list(config.tracking) == ["csv", "tensorboard"]
    assert list(config.callbacks) == ["progress", "ema"]


@pytest.mark.parametrize("sign", ["", "+", "++"])
def test_what_comes_over_what_whatever_the_order(sign) -> None:
    """options < experiment < debug < values."""
    typed = ["data.batch_size=3", "debug=cpu", f"{sign}experiment=resnet50_ddp", "model=resnet18"]
    assert compose.compose(typed) == (config := compose.compose(typed[::-1]))
    assert config.experiment_name == "resnet50_ddp"
    assert config.data.batch_size == 3
    assert config.trainer.precision == "32-true"  # debug's, over the experiment's bf16
    assert config.schedule.warmup_epochs == 0  # the experiment
    # A choice on the command line wins over the experiment's.
    assert config.model.network._target_ == "torchvision.models.resnet18"
    assert compose.compose(typed[2:3]).data.batch_size == 256


def test_unknown_keys_and_interpolations_are_left_to_validation() -> None:
    config = compose.compose(["lrr=1", "+optimizer.foo=2", "trainer.max_epoch=3"])
    assert (config.lrr, config.optimizer.foo, config.trainer.max_epoch) == (1, 2, 3)
    config = compose.compose(["experiment_name=${nope}", "name=${oc.env:NOPE}"])
    assert config._get_node("experiment_name")._value() == "${nope}"


def test_wrong_options_and_wrong_overrides_are_reported_at_once(folder) -> None:
    text = refused("model=resnet5", "data=imagnet", "optimizer=null", "experiment=nope")
    for group in ("model", "data", "optimizer", "experiment"):
        assert f"{group}: no option " in text
    text = refused("a=[1", "seed=1", "name=a b=c", "~", 'b=[1, "', 'c={"B C": y}', 'd="{"B C": y}"')
    assert text.count("is not an override") == 5
    # What is advised can be typed; a mapping is not a text, and what is quoted is not quoted again.
    assert """'b="[1, \\""'""" in text and text.count("special characters") == 2
    assert "hunter22" not in refused("model.api_token=hunter22[")
    assert list(folder.iterdir()) == []


def test_sweeps_are_products_in_order() -> None:
    jobs = compose.sweep(["seed=1,2", "model=resnet18", "optimizer.lr=range(1,3)"])
    pairs = [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert jobs == [[f"seed={seed}", "model=resnet18", f"optimizer.lr={lr}"] for seed, lr in pairs]
    assert compose.sweep(["model=glob(*18)"]) == [["model=resnet18"]]
    several = [["tracking=[csv]"], ["tracking=[csv,mlflow]"]]
    assert compose.sweep(["tracking=[csv],[csv,mlflow]"]) == several
    assert compose.sweep_keys(["seed=1,2", "tags=[a,b]", "+x=choice(1,2)"]) == ["seed", "x"]
    for typed in ("model=glob(nothing*)", "optimizer.lr=glob(*)"):
        assert "matches nothing" in refused(typed, work=compose.sweep)


def test_one_command_does_each_thing_once() -> None:
    """It parses each word once, resolves its config once and asks one child."""
    answer, parse = {"problems": [], "notes": [], "facts": {}}, OverridesParser.parse_override
    spies = (
        mock.patch.object(OverridesParser, "parse_override", autospec=True, side_effect=parse),
        mock.patch.object(resolve, "Resolved", wraps=resolve.Resolved),
        mock.patch.object(validate, "_check_in_child", return_value=answer),
        mock.patch.object(dry_run, "render", return_value="the request"),
    )
    compose._parsed.cache_clear()
    with contextlib.ExitStack() as stack:
        spied = [stack.enter_context(spy) for spy in spies]
        words = ["optimizer.lr=0.123", "seed=321", "trainer.accelerator=cpu", "dry_run=true"]
        assert main.main(words) == 0
    assert [spy.call_count for spy in spied] == [4, 1, 1, 1]


def test_config_dir_adds_and_does_not_shadow(folder) -> None:
    write(folder / "more/model", dict.fromkeys(("mine", "resnet50"), "_target_: mine.Model\n"))
    assert compose.compose(["model=mine"], ["more"]).model._target_ == "mine.Model"
    assert compose.compose([], ["more"]).model._target_ == "distdl.models.ImageClassifier"
    # Gone again in the next command of this process.
    assert "no option 'mine'" in refused("model=mine")


# --------------------------------------------------------------------------------- ./conf


def test_it_adds_and_shadows(conf) -> None:
    assert compose.compose(["model=mine"]).model._target_ == "mine.Model"
    assert user_conf.shadowed() == []
    write(conf, {"model/resnet50": "_target_: mine.Fifty\n", "brand/new/one": "a: 1\n"})
    assert compose.compose([]).model == {"_target_": "mine.Fifty"}
    assert user_conf.shadowed() == ["model/resnet50"]


def test_its_experiments_may_use_ours(conf) -> None:
    defaults = "defaults:\n  - override /model: mine\n  - override /data: imagenet\n"
    write(conf, {"experiment/mine": f"# @package _global_\n{defaults}seed: 7\n"})
    config = compose.compose(["experiment=mine"])
    assert (config.model._target_, config.seed) == ("mine.Model", 7)
    assert config.data._target_ == "distdl.data.StoredImages"


def test_named_by_a_variable(conf, folder, monkeypatch) -> None:
    os.rename(conf, folder / "settings")
    assert user_conf.folder() is None
    monkeypatch.setenv("DISTDL_CONF", "settings")
    assert user_conf.folder() == folder / "settings"
    assert compose.compose(["model=mine"]).model._target_ == "mine.Model"
    monkeypatch.setenv("DISTDL_CONF", "nowhere")
    assert "DISTDL_CONF: 'nowhere' is not a folder" in refused()


def test_inside_a_foreign_hydra_project(conf, monkeypatch) -> None:
    """Its primary config and its own groups are of no interest to us."""
    files = {"hydra/job_logging": "nonsense: true\n", "db/mysql": "port: 3306\n"}
    write(conf, {"config": "defaults: [nothing_of_ours]\nseed: 99\n", **files})
    config = compose.compose([])
    assert config.seed == 0 and "db" not in config
    monkeypatch.chdir(ROOT)  # in our checkout ./conf is ours
    assert user_conf.folder() is None and user_conf.shadowed() == []


def test_other_applications_do_not_see_it(conf) -> None:
    """Neither those in this process, nor any other Hydra of the environment."""
    for _ in range(3):  # registered once, however often
        compose.compose([])
    plugins = [p.__name__ for p in Plugins.instance().discover(SearchPathPlugin)]
    assert plugins.count("UserConf") == 1
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(conf / "model"), version_base="1.3"):
        path = GlobalHydra.instance().config_loader().get_search_path()
        assert not any(e.provider == "distdl-user" for e in path.get_path())
        assert hydra_compose("mine")._target_ == "mine.Model"
    GlobalHydra.instance().clear()
    code = (
        "from hydra.core.plugins import Plugins\n"
        "print([p.__module__ for p in Plugins.instance().discover()])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "distdl" not in shown.stdout


# ------------------------------------------------------------------- recipe and location

ELSEWHERE = [
    *("trainer.devices=8", "trainer.num_nodes=4", "launcher.max_attempts=3", "task=validate"),
    *("launcher.forward_env=[A]", "output_dir=elsewhere", "project.root=/somewhere"),
    "dry_run=true",
]


def recipe(*overrides):
    return configs.recipe_of(compose.compose(overrides))


def test_the_recipe_does_not_depend_on_where_it_runs() -> None:
    text = configs.to_yaml(recipe("seed=3"))
    assert text == configs.to_yaml(recipe("seed=3", *ELSEWHERE))
    assert "seed: 3" in text and "hydra" not in text
    assert configs.to_yaml(recipe("seed=4")) != text
    where = configs.where_of(compose.compose(ELSEWHERE))
    assert where.trainer == {"devices": 8, "num_nodes": 4}
    assert where.project == {"root": "/somewhere", "allow": [], "max_snapshot_mb": 300}
    assert where.task._target_ == "distdl.tasks.validate"
    assert (where.output_dir, where.dry_run) == ("elsewhere", True)
    assert where.launcher.max_attempts == 3
    keys = "checkpoint trainer project task output_dir dry_run follow launcher watchdog preflight"
    assert set(where) == set(keys.split())


def test_both_together_are_the_config_again() -> None:
    config = compose.compose(["experiment=resnet50_imagenet", *ELSEWHERE])
    config.pop("hydra")
    merged = configs.merge(configs.recipe_of(config), configs.where_of(config))
    assert OmegaConf.to_container(merged) == OmegaConf.to_container(config)
    changed = configs.merge(merged, OmegaConf.create(), {"data.batch_size": 7})
    assert changed.data.batch_size == 7 and merged.data.batch_size == 256


@pytest.mark.parametrize("overrides", [[], ["experiment=resnet50_imagenet"]])
def test_the_frozen_file_reads_as_what_was_written(overrides) -> None:
    written = recipe(*overrides)
    assert OmegaConf.create(configs.to_yaml(written)) == written


def test_what_only_hydra_knows_is_resolved_and_the_environment_is_not(monkeypatch) -> None:
    monkeypatch.setenv("SECRET_FOLDER", "/secret/folder")
    named = ["name=run-${now:%Y}-${hydra:job.name}", "tags=${hydra:overrides.task}", "seed=1"]
    config = compose.compose(
        [*named, "+data.root=${oc.env:SECRET_FOLDER}", "dry_run=${hydra:job.chdir}"]
    )
    plain = OmegaConf.to_container(configs.recipe_of(config), resolve=False)
    assert plain["name"].startswith("run-20") and plain["name"].endswith("-distdl")
    assert "++seed=1" in plain["tags"] and configs.where_of(config).dry_run is False
    assert plain["data"]["root"] == "${oc.env:SECRET_FOLDER}"
    assert plain["model"]["num_classes"] == "${data.num_classes}"


def test_the_difference_is_what_people_read() -> None:
    old, new = recipe(), recipe("optimizer.lr=0.5", "+tags=[a]")
    shown = configs.difference(old, new).splitlines()
    assert "-  lr: 0.1" in shown and "+  lr: 0.5" in shown
    assert shown[:2] == ["--- stored", "+++ given"]
    assert configs.difference(old, old) == ""


def test_paths_and_hashes() -> None:
    config = {"a": {"b": {"c": 1}, "d": {}}, "e": [1]}
    assert configs.flat_paths(config) == ["a.b.c", "e"]
    assert configs.flat_paths(config, leaves=False) == ["a", "a.b", "a.b.c", "a.d", "e"]
    assert configs.hash_of("a") != configs.hash_of("b")
    assert len(configs.hash_of("a")) == 8 and len(configs.hash_of("a", 6)) == 6


LENGTHS = {(3, -1): "max_epochs", (3, 9): "max_epochs max_steps", (-1, 9): "max_steps"}


@pytest.mark.parametrize(("length", "keys"), LENGTHS.items())
def test_how_to_train_longer(length, keys) -> None:
    config = {"trainer": dict(zip(("max_epochs", "max_steps"), length, strict=True))}
    expected = " ".join(f"trainer.{key}=<more>" for key in keys.split())
    assert configs.longer(OmegaConf.create(config)) == expected
