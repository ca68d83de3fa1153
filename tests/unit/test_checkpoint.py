"""What a checkpoint stores: of its moment, and read again without running code from the file."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import functools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch import Callback, LightningDataModule
from omegaconf import OmegaConf
from torch import Tensor, nn

from distdl.checkpoint import formats, host_copy
from distdl.checkpoint.formats import AnyCheckpoint
from distdl.checkpoint.host_copy import HostCopy
from distdl.checkpoint.portable import names_of, to_indices, to_names
from distdl.cli import convert
from distdl.util.errors import UserError
from tests.prepared import Gadget
from tests.unit import checkpointing


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Settings:
    depth: int
    colour: Colour


ORDINARY = {"lr": 0.1, "sizes": (1, 2), "device": torch.device("cpu"), "set": {1}}
# A hyperparameter, and what is kept of it.
HYPER_PARAMETERS: dict[str, tuple[Any, Any]] = {
    "optimizer": (
        functools.partial(torch.optim.SGD, lr=0.5),
        {"_target_": "torch.optim.sgd.SGD", "_partial_": True, "lr": 0.5},
    ),
    "namespace": (argparse.Namespace(a=1, b=Path("x")), {"a": 1, "b": "x"}),
    "scalar": (np.float64(0.5), 0.5),
    "config": (OmegaConf.create({"a": {"b": [1, "${a.b[0]}"]}}), {"a": {"b": [1, 1]}}),
    "enum": (Colour.RED, "red"),
    "dataclass": (Settings(2, Colour.RED), {"depth": 2, "colour": "red"}),
    "class": (Settings, f"{__name__}.Settings"),
    "network": (nn.Linear(1, 1), "torch.nn.modules.linear.Linear"),
    "nested": ([{"deep": (Path("y"), {1, 2})}], [{"deep": ("y", {1, 2})}]),
    "ordinary": (ORDINARY, ORDINARY),
}
STATE = {
    "path": Path("data/x"),
    "scalar": np.float32(0.5),
    "array": np.arange(6.0).reshape(2, 3),
    "deque": collections.deque([1, Path("z")], maxlen=3),
    "default": collections.defaultdict(list, {"a": [1]}),
    "enum": Colour.RED,
    "namespace": argparse.Namespace(a=1),
    "frozen": frozenset({1, 2}),
    "empty": b"",
    "keys": {(1, 2): "a", Colour.RED: "b", Path("x"): "c"},
    "ours": {"__distdl__": "pickle", "of": 1},
    "counter": collections.Counter(a=2),
    "tensor": torch.ones(2),
    "large": 1 << 3000,
}


class Keeps(Callback):
    state: Any = None
    seen: Any = None

    def state_dict(self):
        return {"state": self.state}

    def load_state_dict(self, state):
        self.seen = state["state"]


class Module(checkpointing.OneWeight):
    seen = None

    def __init__(self, settings: Any = None, lr: float = 0.1, **others: Any) -> None:
        super().__init__()
        self.save_hyperparameters()

    def on_save_checkpoint(self, checkpoint):
        checkpoint["mine"] = dict(STATE)

    def on_load_checkpoint(self, checkpoint):
        self.seen = checkpoint["mine"]


class Data(LightningDataModule):
    state = STATE
    seen = None
    state_dict = Keeps.state_dict
    load_state_dict = Keeps.load_state_dict

    def __init__(self, root: Any) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self):
        return checkpointing.numbers(2)


def fit(folder: Path, module, state: Any = None, resume=None, trust=False) -> tuple[Keeps, Data]:
    keeps = Keeps()
    data = Data(Path("root"))
    keeps.state = state
    ours = checkpointing.checkpointer(folder, monitor=None, trust_pickle=trust)
    epochs = 2 if resume else 1
    checkpointing.fit(module, [keeps, ours], data, resume=resume, trust=trust, max_epochs=epochs)
    return keeps, data


def test_any_hyperparameters_are_read_again(tmp_path):
    """As plain data or text; and Lightning hands them to the module, as it did."""
    odd = {"array": np.arange(3, dtype=np.int16), "object": object()}
    fit(tmp_path, Module(**{k: v for k, (v, _) in HYPER_PARAMETERS.items()}, **odd))
    file = tmp_path / "epoch_000.ckpt"
    kept = torch.load(file, weights_only=True)["hyper_parameters"]
    assert all(kept[key] == expected for key, (_, expected) in HYPER_PARAMETERS.items())
    assert torch.equal(kept["array"], torch.arange(3, dtype=torch.int16))
    assert kept["object"].startswith("<object object")
    again = Module.load_from_checkpoint(file, settings=3)
    assert again.hparams.ordinary == ORDINARY
    assert again.hparams.settings == 3
    config = OmegaConf.create({"depth": 3})
    fit(tmp_path / "only", Module(config), resume=file)  # another module's file resumes as well
    assert Module.load_from_checkpoint(tmp_path / "only/last.ckpt").hparams.settings == config


def test_state_comes_back_as_it_was(tmp_path):
    """Of a callback, of the data, and of what the module puts into the checkpoint."""
    fit(tmp_path, Module(), STATE)
    torch.load(tmp_path / "last.ckpt", weights_only=True)
    module = Module()
    keeps, data = fit(tmp_path / "again", module, STATE, resume=tmp_path / "last.ckpt")
    for source, seen in (("callback", keeps.seen), ("data", data.seen), ("module", module.seen)):
        shown = {key: (type(seen[key]), repr(seen[key])) for key in STATE}
        assert shown == {key: (type(value), repr(value)) for key, value in STATE.items()}, source


def test_what_only_pickle_keeps_is_refused_before_the_first_step(tmp_path, caplog):
    state = Settings(1, Colour.RED)
    resume = tmp_path / "last.ckpt"
    for bad, shown in ((state, r" \(a .*Settings\)"), ((i for i in ()), "")):
        with pytest.raises(UserError, match=rf"callbacks\.Keeps\.state{shown}: "):
            fit(tmp_path, Module(), bad)
    assert not resume.exists()
    fit(tmp_path, Module(), state, trust=True)
    assert "Settings), kept as a pickle: a resume needs" in caplog.text
    torch.load(resume, weights_only=True)  # all the rest is read by everybody
    assert formats.read(resume)["state_dict"].keys() == {"weight"}
    keeps, _ = fit(tmp_path / "b", Module(), Settings(2, Colour.RED), resume=resume, trust=True)
    assert keeps.seen == state
    with pytest.raises(UserError, match=r"Keeps\.state is a pickled .*Settings.*\n.*trust_pickle"):
        fit(tmp_path / "c", Module(), resume=resume)


def file_of(folder: Path, gadget: Any) -> Path:
    torch.save({"state_dict": {}, "optimizer_states": [], "mine": gadget}, folder / "gadget.ckpt")
    return folder / "gadget.ckpt"


def sharded(folder: Path, gadget: Any, *, within: str) -> Path:
    extra = {"extra": gadget} if within == "entry" else {}
    state = {"state_dict": {"a": torch.ones(2), **extra}}
    dcp.save(state, checkpoint_id=folder / "dcp", no_dist=True)
    if within == "index":
        (folder / "dcp/.metadata").write_bytes(pickle.dumps({"state": gadget}))
    if within == "rest":
        torch.save({"mine": gadget}, folder / "dcp/rest.pt")
    return folder / "dcp"


def deepspeeds(folder: Path, gadget: Any) -> Path:
    """One that ends before the optimizer states."""
    (folder / "ds/tag").mkdir(parents=True)
    (folder / "ds/latest").write_text("tag")
    torch.save({"mine": gadget}, folder / "ds/tag/mp_rank_00_model_states.pt")
    return folder / "ds"


PARTS = [functools.partial(sharded, within=part) for part in ("index", "entry", "rest")]


@pytest.mark.parametrize("write", [file_of, deepspeeds, *PARTS])
def test_nothing_in_a_checkpoint_is_run(tmp_path, monkeypatch, write):
    monkeypatch.chdir(tmp_path)
    ran = tmp_path / "ran"
    path = write(tmp_path, Gadget(ran))
    for argument in ("ddp", "weights"):
        with pytest.raises(UserError, match=r"object of (posix|os)\.system.*\n.*--trust-pickle"):
            convert.main([str(path), "--to", argument])
    with pytest.raises(UserError):
        AnyCheckpoint().load_checkpoint(path, weights_only=True)
    assert not ran.exists()


def test_an_index_that_leads_out_of_its_folder_and_a_missing_part_are_refused(tmp_path):
    path = sharded(tmp_path, {"a": 1}, within="entry")
    index = dcp.FileSystemReader(path).read_metadata()
    for entry in index.storage_data.values():
        entry.relative_path = "../secret"
    (path / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(UserError, match=r"UnpicklingError"):
        formats.read(path)
    with pytest.raises(UserError, match="holds no optimizer states of ZeRO"):
        formats.read(deepspeeds(tmp_path, None))


def test_who_trusts_a_file_reads_and_repairs_it(tmp_path, monkeypatch, capsys):
    """One that distdl 0.1 wrote and refused for ever."""
    monkeypatch.chdir(tmp_path)
    fit(tmp_path, Module())
    old = torch.load("last.ckpt", weights_only=True)
    old["hyper_parameters"] = {"args": argparse.Namespace(path=Path("x"))}
    old["callbacks"]["Keeps"]["state"] = Settings(1, Colour.RED)
    torch.save(old, "old.ckpt")
    with pytest.raises(UserError):
        fit(tmp_path / "a", Module(), resume=tmp_path / "old.ckpt")
    keeps, _ = fit(tmp_path / "a", Module(), resume=tmp_path / "old.ckpt", trust=True)
    assert keeps.seen == Settings(1, Colour.RED)
    assert (
        convert.main(
            ["old.ckpt", "--to", "ddp", "--trust-pickle", "--output", "new.ckpt"]
        ).exit_code
        == 0
    )
    assert "equal: weights, 1 tensors" in capsys.readouterr().out
    assert torch.load("new.ckpt", weights_only=True)["hyper_parameters"] == {"args": {"path": "x"}}


def test_optimizer_state_follows_the_names_of_parameters():
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    own = dict(module.named_parameters())

    def optimizer(*groups: str) -> torch.optim.Optimizer:
        rated = ([own[name] for name in names.split()] for names in groups)
        return torch.optim.SGD([{"params": p, "lr": 0.1 / i} for i, p in enumerate(rated, 1)])

    saved = optimizer("0.weight 1.weight", "0.bias 1.bias")
    part = optimizer("0.weight", "0.bias")
    state = {i: {"momentum_buffer": i} for i in range(4)}
    named = to_names({**saved.state_dict(), "state": state}, saved, module)
    swapped = to_indices(named, optimizer("1.bias 0.bias", "1.weight 0.weight"), module)
    assert [group["lr"] for group in swapped["param_groups"]] == [0.05, 0.1]
    assert [held["momentum_buffer"] for _, held in sorted(swapped["state"].items())] == [3, 2, 1, 0]
    with pytest.raises(ValueError, match=r"for 2 of the parameters.*1\.weight"):
        to_indices(to_names(part.state_dict(), part, module), saved, module)
    with pytest.raises(ValueError, match=r"\[1, 1\] parameters, and the checkpoint's \[2, 2\]"):
        to_names(saved.state_dict(), part, module)
    nn.utils.prune.l1_unstructured(module[0], "weight", 1)
    assert names_of(part, module) == [["0.weight"], ["0.bias"]], "also of a pruned weight"


class Own(Tensor):
    """As quantised weights are."""


def test_a_copy_is_the_file_that_torch_writes_at_that_moment(tmp_path, monkeypatch):
    """Also of what is not a plain tensor; the next copy uses the same memory."""
    made = []
    new = host_copy.host_memory

    def recorded(size, **how):
        made.append(size)
        return new(size, **how)

    monkeypatch.setattr(host_copy, "host_memory", recorded)
    network = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 5))
    network[2].weight = network[0].weight  # tied
    base = torch.arange(24.0)
    learned = nn.Parameter(torch.ones(2))
    steps = [1, {"a": 1}]
    learned.note = ["a user's"]
    complex_ = torch.tensor([1 + 2j, 3 - 1j])
    state = {
        "state_dict": network.state_dict(),  # an OrderedDict with an attribute
        "views": [base[:6], base[6:].view(3, 6).t(), base],
        "types": (torch.ones(3, dtype=torch.bfloat16), torch.tensor(True), torch.empty(0, 4)),
        "graph": [learned, learned * 2, torch.ones(2, requires_grad=True)],
        "not plain": [torch.eye(3).to_sparse(), complex_.as_subclass(Own)],
        "conjugated": complex_.conj(),
        "others": [collections.Counter(a=2), torch.device("cpu"), base, base, None, steps],
    }
    copy = HostCopy()
    copy.take(state)
    sizes = [*made]
    copy.take(state)
    assert made == sizes
    assert 4 * 24 in made
    with (tmp_path / "direct").open("wb") as file:
        torch.save({**state, "conjugated": complex_.conj().clone()}, file)
    base.add_(1)
    complex_.zero_()
    steps[1].clear()
    copy.write(tmp_path / "copied")
    assert (tmp_path / "copied").read_bytes() == (tmp_path / "direct").read_bytes()
