"""What a predict_step returns becomes columns of a table, or is refused."""

from __future__ import annotations

import pytest
import torch

from distdl.domains.rows import on_host
from distdl.tasks.predict import refuse_difference
from distdl.util.errors import UserError

ODD = {
    "an empty dict": {},
    "a value of type NoneType": None,
    "a value of type str as 'x'": {"x": "text"},
    "a value of type dict as 'x'": {"x": {"y": torch.zeros(2)}},
    "a value of type list": [torch.zeros(2), torch.zeros(3)],
    "a tensor of torch.complex64": torch.zeros(2, dtype=torch.complex64),
    "a nested tensor": torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)]),
    "a sparse": torch.zeros(2, 2).to_sparse(),
    "a tensor of shape [2, 0]": torch.zeros(2, 0),
    "a tensor of shape [3]": torch.zeros(3),
    "'index', which is also the name of a column": {"index": torch.zeros(2)},
    "'1', which is also the name of another key": {1: torch.zeros(2), "1": torch.zeros(2)},
}


@pytest.mark.filterwarnings("ignore:.*nested tensors")
@pytest.mark.parametrize("text", ODD)
def test_what_no_table_holds_is_refused(text):
    with pytest.raises(UserError) as error:
        on_host(ODD[text], 2, ("index",))
    assert f"predict_step returned {text}" in str(error.value)


def test_batches_of_other_columns_are_refused():
    one = {"x": ("torch.float32", (3,))}
    refuse_difference(one, {"x": ("torch.float32", (3,))})
    for other in ({"x": ("torch.float32", (4,))}, {"y": ("torch.float32", (3,))}, {}):
        with pytest.raises(UserError, match="per sample in one batch of predict_step"):
            refuse_difference(one, other)
