"""Bytes per step: as many as arithmetic says, and as the kernel saw gloo write."""

from __future__ import annotations

import pytest
from lightning.pytorch import LightningModule, Trainer

from distdl.callbacks.count_traffic import CountTraffic
from distdl.distributed.traffic import Traffic, in_words
from tests.strategies.two_ranks import results

pytestmark = pytest.mark.xdist_group("two_ranks")


@pytest.fixture(scope="module")
def found() -> dict:
    return results("tests.strategies.ddp_cases")


def test_ddp_sends_four_bytes_a_parameter_and_the_buffers(found) -> None:
    for name in ("ddp_none", "ddp_batch_norm"):
        rank = found[name][0]
        assert rank["traffic"]["payload"] == rank["parameters"] + rank["buffers"]
    assert found["ddp_batch_norm"][0]["buffers"] == 2 * 8 * 4 + 8


@pytest.mark.parametrize("hook", ["bf16", "fp16"])
def test_half_precision_sends_half(found, hook) -> None:
    rank = found[f"ddp_{hook}"][0]
    assert rank["traffic"]["payload"] == rank["parameters"] / 2


def test_powersgd_sends_factors(found) -> None:
    """Rank 1: rows + columns of each matrix that this makes smaller, and all other numbers."""
    conv, first, second = 8 * 27, (160, 128), (10, 160)
    factors = (8 + 27) + sum(first) + sum(second)
    assert conv > 2 * (8 + 27)
    others = 8 + 8 + 8 + 160 + 10  # biases and the norm
    assert found["ddp_powersgd"][0]["traffic"]["payload"] == 4 * (factors + others)


def test_local_steps_send_a_fraction(found) -> None:
    """Eight counted steps, of which every second or fourth ends in a meeting."""
    for every in (2, 4):
        rank = found[f"local_every_{every}"][0]
        statistics = 2 * 8 * 4  # of batch norm; its counter is not a number to be averaged
        expected = (rank["parameters"] + statistics) / every
        assert rank["traffic"]["payload"] == expected
    post_local = found["ddp_post_local_sgd"][0]
    assert post_local["traffic"]["payload"] == post_local["parameters"] / 3


@pytest.mark.parametrize(
    "name",
    ["ddp_none", "ddp_bf16", "ddp_fp16", "ddp_powersgd", "local_every_2", "local_every_4"],
)
def test_the_kernel_saw_as_much(found, name) -> None:
    """gloo adds 96 bytes and more of its own to a message (handshakes of the steps, headers)."""
    rank = found[name][0]
    sent, written = rank["traffic"]["sent"], rank["written"]
    calls = sum(tally["calls"] for tally in rank["traffic"]["collectives"].values())
    assert sent <= written <= sent + 600 * calls


def test_the_ring_sends_all_but_its_own_part_twice() -> None:
    import torch

    traffic = Traffic()
    tensor = torch.zeros(1000)
    traffic.add("allreduce_", ([tensor],), 4)
    assert (traffic.payload, traffic.sent) == (4000, 2 * 3 / 4 * 4000)
    traffic.add("_allgather_base_", (torch.zeros(4000), tensor), 4)
    assert traffic.collectives["_allgather_base"].sent == 3 * 4000
    traffic.add("_reduce_scatter_base_", (tensor, torch.zeros(4000)), 4)
    assert traffic.collectives["_reduce_scatter_base"].sent == 3 / 4 * 16000
    traffic.add("send", ([tensor],), 4)
    assert traffic.collectives["send"].sent == 4000
    before = traffic.sent
    traffic.add("recv_", ([tensor],), 4)
    traffic.add("allreduce_", ([tensor],), 1)
    assert traffic.sent == before


@pytest.mark.parametrize(("steps", "words"), [(1, "(1 step counted)"), (2, "(2 steps counted)")])
def test_the_line_at_the_end(steps, words, tmp_path, caplog) -> None:
    counter = CountTraffic()
    counter.steps = steps
    with caplog.at_level("INFO"):
        counter.on_train_end(Trainer(default_root_dir=tmp_path, logger=False), LightningModule())
    assert words in caplog.text


def test_sizes_in_words() -> None:
    assert in_words(102_228_128) == "102.2 MB"
    assert in_words(1_500) == "1.5 kB"
    assert in_words(3) == "3 B"
