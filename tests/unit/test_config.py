"""The recipe, and apart from it where it runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from distdl.config import compose
from distdl.config import recipe as configs


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DISTDL_CONF", raising=False)


ELSEWHERE = [
    *("trainer.devices=8", "trainer.num_nodes=4", "launcher.max_attempts=3", "task=validate"),
    *("launcher.forward_env=[A]", "output_dir=elsewhere", "project.root=/somewhere"),
    "dry_run=true",
]


def test_the_recipe_does_not_depend_on_where_it_runs() -> None:
    here, there = compose.compose(["seed=3"]), compose.compose(["seed=3", *ELSEWHERE])
    text = configs.to_yaml(configs.recipe_of(here))
    assert text == configs.to_yaml(configs.recipe_of(there))
    assert "seed: 3" in text and "hydra" not in text
    assert configs.to_yaml(configs.recipe_of(compose.compose(["seed=4"]))) != text


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


@pytest.mark.parametrize("experiment", [None, "resnet50_ddp", "resnet50_imagenet"])
def test_the_frozen_file_reads_as_what_was_written(experiment, tmp_path) -> None:
    config = compose.compose([f"experiment={experiment}"] if experiment else [])
    recipe = configs.recipe_of(config)
    (tmp_path / "config.yaml").write_text(configs.to_yaml(recipe))
    loaded = OmegaConf.load(tmp_path / "config.yaml")
    assert loaded == recipe
    assert OmegaConf.to_container(loaded) == OmegaConf.to_container(recipe)


def test_what_only_hydra_knows_is_resolved_and_the_environment_is_not(monkeypatch) -> None:
    monkeypatch.setenv("PLACE", "/secret/place")
    named = ["name=run-${now:%Y}-${hydra:job.name}", "tags=['${hydra:job.name}']"]
    config = compose.compose([*named, "+data.root=${oc.env:PLACE}"])
    recipe = configs.recipe_of(config)
    plain = OmegaConf.to_container(recipe, resolve=False)
    assert plain["name"].startswith("run-20") and plain["name"].endswith("-distdl")
    assert plain["tags"] == ["distdl"]
    assert plain["data"]["root"] == "${oc.env:PLACE}"
    assert "/secret/place" not in configs.to_yaml(recipe)
    assert plain["model"]["num_classes"] == "${data.num_classes}"


def test_what_is_resolved_keeps_its_type() -> None:
    config = compose.compose(
        ["tags=${hydra:overrides.task}", "dry_run=${hydra:job.chdir}", "seed=1"]
    )
    assert "++seed=1" in configs.recipe_of(config).tags
    assert configs.where_of(config).dry_run is False


def test_the_difference_is_what_people_read() -> None:
    old = configs.recipe_of(compose.compose([]))
    new = configs.recipe_of(compose.compose(["optimizer.lr=0.5", "+tags=[a]"]))
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


@pytest.mark.parametrize(
    ("epochs", "steps", "expected"),
    [
        (3, -1, "trainer.max_epochs=<more>"),
        (3, 9, "trainer.max_epochs=<more> trainer.max_steps=<more>"),
        (-1, 9, "trainer.max_steps=<more>"),
    ],
)
def test_how_to_train_longer(epochs: int, steps: int, expected: str) -> None:
    config = OmegaConf.create({"trainer": {"max_epochs": epochs, "max_steps": steps}})
    assert configs.longer(config) == expected
