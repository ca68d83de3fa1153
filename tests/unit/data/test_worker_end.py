"""A batch that a loader's worker cannot send."""

import pytest
from torch.utils.data import DataLoader, Dataset

from distdl.data.worker_end import EndingWithRank


class Unsendable(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return lambda: index


@pytest.mark.timeout(60)
def test_a_batch_that_cannot_be_sent_fails_at_once():
    """A thread of the worker's queue fails; by default it prints that, and the rank waits."""
    more = {"worker_init_fn": EndingWithRank(), "collate_fn": list, "timeout": 30}
    with pytest.raises(Exception, match="which could not send a batch") as caught:
        next(iter(DataLoader(Unsendable(), 2, num_workers=1, **more)))
    assert "pickle" in str(caught.value)
