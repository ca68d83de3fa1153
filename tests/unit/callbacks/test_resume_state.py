"""Random numbers after a resume: ranks with the same samples must drop the same activations."""

import torch

from distdl.callbacks.resume_state import restore_rng


class Held:
    """In place of the generators of a module's parts."""

    def restore_shared(self, states, seed, share):
        self.seeded = seed, share


def drawn(own, share, states=1):
    held = Held()
    restore_rng([{}] * states, held, 7, own, share)
    assert held.seeded == (7, share)
    return torch.rand(4).tolist()


def test_ranks_that_share_samples_otherwise_than_before_are_seeded_by_their_share():
    assert drawn(None, 0) == drawn(None, 0) != drawn(None, 1)
    assert drawn(0, 1, states=3) == drawn(2, 1, states=3), "at another number of ranks"
