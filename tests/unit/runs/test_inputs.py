"""Files that a run starts from, and keeps."""

import pytest
from omegaconf import OmegaConf

from distdl.config import published
from distdl.launch import inputs as fetching
from distdl.runs import inputs
from distdl.runs.directory import RunDirectory
from distdl.runs.inputs import StoredInput
from distdl.util.digests import sha256_of
from distdl.util.errors import UserError

NAME = "timm:tiny.in1k"
CONFIG = {"model": {"weights": NAME}}


@pytest.fixture
def fetched(tmp_path) -> StoredInput:
    """As a cache has it: a link to the file."""
    (tmp_path / "blob").write_bytes(b"weights")
    path = tmp_path / "model.safetensors"
    path.symlink_to("blob")
    sha256 = sha256_of(path)
    return StoredInput(published.KEY, NAME, path, "tiny.safetensors", sha256, "https://hub/tiny")


@pytest.fixture
def run(tmp_path, fetched) -> RunDirectory:
    run = RunDirectory(tmp_path / "outputs/e/r")
    inputs.store([fetched], run.path)
    run.create("seed: 1\n", {inputs.RECORD: {fetched.key: fetched.record()}})
    return run


def place(run: RunDirectory, folder) -> str:
    config = inputs.placed(OmegaConf.create(CONFIG), folder, run.provenance())
    return config.model.weights


def test_a_name_becomes_the_file_in_the_run_and_in_a_bundle(tmp_path, run):
    bundle = tmp_path / "bundle"
    inputs.carry(run.provenance(), run.path, bundle)
    for folder in (run.path, bundle):
        assert place(run, folder) == str(folder / "inputs/tiny.safetensors")
        assert (folder / "inputs/tiny.safetensors").read_bytes() == b"weights"
    other = OmegaConf.create({"model": {"weights": "mine.pth"}})
    assert inputs.placed(other, run.path, run.provenance()) == other


def trained(folder, number: int) -> None:
    """A run's folder, with a best checkpoint of an epoch."""
    (folder / "attempts").mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text("seed: 1\n")
    (folder / "checkpoints").mkdir(exist_ok=True)
    best = folder / "checkpoints/best.ckpt"
    best.unlink(missing_ok=True)
    best.write_text(f"epoch {number}")


def test_weights_beside_adapters_stay_with_the_run(tmp_path, monkeypatch):
    """Its checkpoints lack them, and the best checkpoint of another run is another one later."""
    monkeypatch.chdir(tmp_path)
    trained(tmp_path / "base", 1)
    config = OmegaConf.create({"model": {"weights": "base", "lora": {"rank": 2}}})
    (found,) = fetching.provide(config, None)
    run = RunDirectory(tmp_path / "outputs/e/r")
    inputs.store([found], run.path)
    run.create("seed: 1\n", {inputs.RECORD: {found.key: found.record()}})
    trained(tmp_path / "base", 2)
    (kept,) = fetching.provide(config, run)
    assert kept.path.read_text() == "epoch 1"
    placed = inputs.placed(config.copy(), run.path, run.provenance())
    assert placed.model.weights == str(kept.path)
    kept.path.unlink()
    with pytest.raises(UserError, match="base is another file now than the run began with"):
        fetching.provide(config, run)
    trained(tmp_path / "base", 1)
    assert [each.sha256 for each in fetching.provide(config, run)] == [found.sha256]
    (tmp_path / "base/checkpoints/best.ckpt").unlink()
    assert fetching.provide(config, None) == [], "the model's own check says that it is missing"
    whole = OmegaConf.create({"model": {"weights": "base", "lora": None}})
    assert fetching.provide(whole, None) == [], "a checkpoint of it has all weights"


def test_a_changed_or_missing_file_is_refused(run):
    file = run.path / "inputs/tiny.safetensors"
    file.unlink()
    with pytest.raises(UserError, match="is not in"):
        place(run, run.path)
    file.write_bytes(b"others")
    with pytest.raises(UserError, match="is not the file"):
        place(run, run.path)


def test_a_record_cannot_lead_out_of_the_run(run, tmp_path, fetched):
    (run.path / "inputs/tiny.safetensors").unlink()
    (tmp_path / "outside").write_bytes(b"weights")
    entry = {**fetched.record(), "file": "../../../../outside"}
    with pytest.raises(UserError, match="is not in"):
        inputs.placed(OmegaConf.create(CONFIG), run.path, {inputs.RECORD: {published.KEY: entry}})
    (run.path / "inputs/tiny.safetensors").symlink_to(tmp_path / "outside")
    with pytest.raises(UserError, match="is not the file"):
        place(run, run.path)


def test_a_resume_fetches_nothing_unless_the_file_is_gone(run, fetched, monkeypatch):
    asked = []
    monkeypatch.setattr(fetching, "fetch", lambda name: asked.append(name) or fetched)
    config = OmegaConf.create(CONFIG)
    assert fetching.provide(config, run)[0].path == run.path / "inputs/tiny.safetensors"
    assert asked == []
    inputs.remove(run.path)
    assert fetching.provide(config, run) == [fetched]
    assert asked == [NAME]
    fetched.path.resolve().write_bytes(b"another version")
    newer = StoredInput(*[*vars(fetched).values()][:4], sha256_of(fetched.path), "")
    monkeypatch.setattr(fetching, "fetch", lambda name: newer)
    with pytest.raises(UserError, match="is another file now than the run began with"):
        fetching.provide(config, run)


def test_a_run_that_is_not_written_leaves_no_file(run):
    run.undo_create()
    assert not run.path.exists()


@pytest.mark.parametrize(
    ("written", "instead"),
    [
        ("ResNet50_Weights.IMAGENET1K_V2", "torchvision:ResNet50_Weights.IMAGENET1K_V2"),
        ("timm/resnet18.a1_in1k", "timm:resnet18.a1_in1k"),
        ("hf_hub:timm/resnet18.a1_in1k", "timm:resnet18.a1_in1k"),
    ],
)
def test_names_as_others_write_them_are_pointed_out(written, instead):
    assert published.instead_of(written) == f"model.weights={instead}"
    assert not published.is_name(written)
    assert published.is_name(instead)
