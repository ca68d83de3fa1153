"""The recipe, and apart from it where it runs."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from distdl.config import compose
from distdl.config import recipe as configs


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DISTDL_CONF", raising=False)


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


def test_where_it_runs_holds_the_rest() -> None:
    where = configs.where_of(compose.compose(ELSEWHERE))
    assert where.trainer == {"devices": 8, "num_nodes": 4}
    assert where.project == {"root": "/somewhere", "allow": [], "max_snapshot_mb": 300}
    assert where.task._target_ == "distdl.tasks.validate"
    assert (where.output_dir, where.dry_run) == ("elsewhere", True)
    assert where.launcher.max_attempts == 3
    keys = "checkpoint trainer project task output_dir dry_run follow launcher"
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
