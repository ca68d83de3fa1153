"""The user's ./conf: first among the options, never the primary config, in no other application."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from distdl.config import compose, user_conf
from distdl.util.errors import UserError
from tests.conftest import ROOT


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DISTDL_CONF", raising=False)
    (tmp_path / "conf/model").mkdir(parents=True)
    (tmp_path / "conf/model/mine.yaml").write_text("# my own\n_target_: mine.Model\n")
    return tmp_path / "conf"


def test_it_adds_and_shadows(conf) -> None:
    assert compose.compose(["model=mine"]).model._target_ == "mine.Model"
    assert user_conf.shadowed() == []
    (conf / "model/resnet50.yaml").write_text("_target_: mine.Fifty\n")
    (conf / "brand/new").mkdir(parents=True)
    (conf / "brand/new/one.yaml").write_text("a: 1\n")
    assert compose.compose([]).model == {"_target_": "mine.Fifty"}
    assert user_conf.shadowed() == ["model/resnet50"]


def test_its_experiments_may_use_ours(conf) -> None:
    (conf / "experiment").mkdir()
    (conf / "experiment/mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /model: mine\n  - override /data: imagenet\n"
        "seed: 7\n"
    )
    config = compose.compose(["experiment=mine"])
    assert (config.model._target_, config.seed) == ("mine.Model", 7)
    assert config.data._target_ == "distdl.data.StoredImages"


def test_named_by_a_variable(conf, tmp_path, monkeypatch) -> None:
    os.rename(conf, tmp_path / "settings")
    assert user_conf.folder() is None
    monkeypatch.setenv("DISTDL_CONF", "settings")
    assert user_conf.folder() == tmp_path / "settings"
    assert compose.compose(["model=mine"]).model._target_ == "mine.Model"
    monkeypatch.setenv("DISTDL_CONF", "nowhere")
    with pytest.raises(UserError, match="DISTDL_CONF: 'nowhere' is not a folder"):
        compose.compose([])


def test_the_primary_config_cannot_be_replaced(conf) -> None:
    (conf / "distdl.yaml").write_text("seed: 1\n")
    with pytest.raises(UserError, match=r"would replace distdl's primary config"):
        compose.compose([])


def test_inside_a_foreign_hydra_project(conf) -> None:
    """Its primary config and its own groups are of no interest to us."""
    (conf / "config.yaml").write_text("defaults: [nothing_of_ours]\nseed: 99\n")
    for file, text in {"hydra/job_logging": "nonsense: true\n", "db/mysql": "port: 3306\n"}.items():
        (conf / f"{file}.yaml").parent.mkdir()
        (conf / f"{file}.yaml").write_text(text)
    config = compose.compose([])
    assert config.seed == 0 and "db" not in config


def test_our_own_folder_is_nobodys(monkeypatch) -> None:
    """In our checkout ./conf is ours: nothing is shadowed there."""
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("DISTDL_CONF", raising=False)
    assert user_conf.folder() is None and user_conf.shadowed() == []


def test_other_applications_do_not_see_it(conf) -> None:
    """Neither those in this process, nor any other Hydra of the environment."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.plugins import Plugins
    from hydra.plugins.search_path_plugin import SearchPathPlugin

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
