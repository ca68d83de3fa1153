"""Members of enums, as Python 3.11.0 to 3.11.3 pickles them, and what getattr may not fetch."""

import builtins
import io
import os
import pickle

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from distdl.checkpoint import deepspeed_folder, enum_members
from distdl.checkpoint.sharded_folder import _Index

CONTIGUOUS = _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT


class Fetched:
    """Pickled as a call of getattr."""

    def __init__(self, owner, name):
        self.owner = owner
        self.name = name

    def __reduce__(self):
        return builtins.getattr, (self.owner, self.name)


def index_of(value):
    return _Index(io.BytesIO(pickle.dumps(value))).load()


def test_an_index_may_hold_members_of_an_allowed_enum():
    assert index_of(Fetched(_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT")) is CONTIGUOUS


@pytest.mark.parametrize("name", ["__class__", "mro", "nothing", "__init__"])
def test_nothing_else_of_it_can_be_fetched(name):
    with pytest.raises(pickle.UnpicklingError, match="getattr was not an allowed global"):
        index_of(Fetched(_MEM_FORMAT_ENCODING, name))
    with pytest.raises(pickle.UnpicklingError, match="not an allowed global"):
        index_of(Fetched(torch.Size, "count"))


def test_torch_loads_members_and_fetches_nothing(tmp_path):
    file = tmp_path / "x.pt"
    with enum_members.allowed(), torch.serialization.safe_globals([_MEM_FORMAT_ENCODING]):
        torch.save({"a": Fetched(_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT")}, file)
        assert torch.load(file, weights_only=True) == {"a": CONTIGUOUS}
        torch.save({"a": Fetched(torch.Size, "index")}, file)
        with pytest.raises(pickle.UnpicklingError, match="getattr"):
            torch.load(file, weights_only=True)


def test_a_stage_of_deepspeeds_is_read_by_its_name():
    assert int(deepspeed_folder.member(deepspeed_folder.Inert, "weights")) == 3
    with pytest.raises(pickle.UnpicklingError):
        deepspeed_folder.member(os, "system")
