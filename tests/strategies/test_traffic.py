"""Bytes per step: as many as arithmetic says, and as the kernel saw gloo write."""

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer

from distdl.callbacks.count_traffic import CountTraffic
from distdl.distributed.traffic import Traffic, in_words
from tests.strategies.two_ranks import results

pytestmark = pytest.mark.xdist_group("two_ranks")

# powersgd of rank 1: rows + columns of each matrix that this makes smaller, and all other numbers
# (biases and the norm).
FACTORS = (8 + 27) + (160 + 128) + (10 + 160) + (8 + 8 + 8 + 160 + 10)
STATISTICS = 2 * 8 * 4  # of batch norm; its counter is not a number to be averaged
PAYLOADS = {
    "ddp_none": lambda parameters: parameters,
    "ddp_batch_norm": lambda parameters: parameters + STATISTICS + 8,
    "ddp_bf16": lambda parameters: parameters / 2,
    "ddp_fp16": lambda parameters: parameters / 2,
    "ddp_powersgd": lambda parameters: 4 * FACTORS,
    "ddp_post_local": lambda parameters: parameters / 3,
    # Eight counted steps, of which every second or fourth ends in a meeting.
    "local_2": lambda parameters: (parameters + STATISTICS) / 2,
    "local_4": lambda parameters: (parameters + STATISTICS) / 4,
}


@pytest.mark.parametrize("name", PAYLOADS)
def test_a_step_sends_as_much_as_arithmetic_says_and_the_kernel_saw(name):
    """gloo adds 96 bytes and more of its own to a message (handshakes of the steps, headers)."""
    rank = results("tests.strategies.ddp_cases")[name][0]
    traffic = rank["traffic"]
    assert traffic["payload"] == PAYLOADS[name](rank["parameters"])
    if name not in ("ddp_batch_norm", "ddp_post_local"):
        calls = sum(tally["calls"] for tally in traffic["collectives"].values())
        assert traffic["sent"] <= rank["written"] <= traffic["sent"] + 600 * calls


def test_the_ring_sends_all_but_its_own_part_twice():
    traffic, tensor, four = Traffic(), torch.zeros(1000), torch.zeros(4000)
    traffic.add("allreduce_", ([tensor],), 4)
    assert (traffic.payload, traffic.sent) == (4000, 2 * 3 / 4 * 4000)
    traffic.add("_allgather_base_", (four, tensor), 4)
    traffic.add("_reduce_scatter_base_", (tensor, four), 4)
    traffic.add("send", ([tensor],), 4)
    sent = {name: tally.sent for name, tally in traffic.collectives.items() if name != "allreduce"}
    assert sent == {"_allgather_base": 12_000, "_reduce_scatter_base": 12_000, "send": 4000}
    before = traffic.sent
    traffic.add("recv_", ([tensor],), 4)
    traffic.add("allreduce_", ([tensor],), 1)
    assert traffic.sent == before


@pytest.mark.parametrize(("steps", "words"), [(1, "(1 step counted)"), (2, "(2 steps counted)")])
def test_the_line_at_the_end(steps, words, tmp_path, caplog):
    counter = CountTraffic()
    counter.steps = steps
    with caplog.at_level("INFO"):
        counter.on_train_end(Trainer(default_root_dir=tmp_path, logger=False), LightningModule())
    assert words in caplog.text


def test_sizes_in_words():
    values = (102_228_128, 1_500, 3)
    assert [in_words(value) for value in values] == ["102.2 MB", "1.5 kB", "3 B"]
