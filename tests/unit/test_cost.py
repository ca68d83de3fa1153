"""Azure's VM sizes, and quota, prices and advice of a job, as `dry_run=true` shows them."""

from __future__ import annotations

import re
from datetime import date
from itertools import groupby
from typing import Any

import pytest

from distdl.job import Resources
from distdl.launchers.azureml import cost, vm_sizes
from distdl.launchers.azureml.settings import AzureSettings
from tests.conftest import ROOT, check_golden

SIZES = {size.name: size for size in vm_sizes.known()}
NC24, NC96, ND96 = "NC24ads_A100_v4", "NC96ads_A100_v4", "ND96asr_v4"
Case = tuple[str, int, int, int]  # size, nodes, devices (0: on the CPU), members of the sweep
SPREAD, FOUR, EIGHT = (NC24, 4, 1, 1), (ND96, 4, 8, 1), (NC24, 1, 1, 8)
ONE, PAIR, SLOW = (NC24, 1, 1, 1), (ND96, 2, 8, 1), (NC96, 2, 4, 1)


def job(size: str, nodes: int, devices: int, jobs: int, **node: Any) -> tuple[Any, Resources, int]:
    settings = AzureSettings(vm_size=f"Standard_{size}", **node)
    return settings, Resources(nodes, devices, "gpu" if devices else "cpu"), jobs


DATA, BASIC = {"inputs": {"imagenet": "azureml:x:1"}}, {"registry_sku": "basic"}
IDLE, DAY = {"compute": "gpu", "min_nodes": 2}, {"walltime": 24}
STANDARD, PREMIUM = {"storage_sku": "standard"}, {"storage_sku": "premium"}
# A job, its settings; topic -> what the advice says of that. Golden files have the rest.
ADVICE: list[tuple[Case, dict[str, Any], str, str]] = [
    (SPREAD, {}, "scale up", "1 x Standard_NC96ads_A100_v4 (14.69 USD per hour, 4 x A100"),
    # Eight nodes become one at a price that is similar, not the same.
    ((NC24, 8, 1, 1), {}, "scale up", "Standard_ND96amsr_A100_v4 (32.77 USD"),
    (("NC6s_v3", 4, 1, 1), {}, "scale up", "1 x Standard_NC96ads_A100_v4"),
    (SLOW, {}, "infiniband", "32.77 USD per hour) because Standard_NC96ads_A100_v4 has no Infini"),
    (PAIR, DATA, "blob", "if the data is on standard Blob storage"),
    (EIGHT, BASIC, "registry", "8 nodes pull"),
    (ONE, IDLE, "idle", "5,363 USD"),  # 2 x 3.673 x 730
    (ONE, {**IDLE, "min_nodes": 1, "tier": "spot"}, "idle", "about 324 USD"),
    (("NC6s_v3", 1, 1, 1), {}, "retired", "such as Standard_NC24ads_A100_v4 because Azure retired"),
    (("NC24s_v3", 1, 4, 1), {}, "retired", NC96),  # as many GPUs as are asked for
    ((NC96, 1, 1, 1), {}, "unused", "3 idle GPUs of 4 per node"),
    ((NC24, 1, 0, 1), {}, "unused", "you pay for 1 x A100 per node, idle"),
]
# Four times the price is not advice, nor is a weaker GPU or a size that is gone.
NONE: dict[str, list[tuple[Case, dict[str, Any]]]] = {
    "scale up": [(("NC4as_T4_v3", 2, 1, 1), {}), (("ND96isr_H100_v5", 2, 8, 1), {})],
    "infiniband": [((NC96, 1, 4, 1), {}), (("ND96amsr_A100_v4", 2, 8, 1), {})],
    "blob": [(PAIR, {**DATA, **PREMIUM}), (PAIR, {}), ((ND96, 1, 8, 1), STANDARD)],
    "registry": [(PAIR, BASIC), (FOUR, {"registry_sku": "premium"}), (FOUR, {})],
    "idle": [(ONE, {"compute": "gpu"}), (ONE, {"min_nodes": 2})],
    "sweep": [((ND96, 1, 8, 10), {}), (PAIR, {})],
}


@pytest.mark.parametrize(("case", "node", "topic", "fact"), ADVICE)
def test_advice(case: Case, node: Any, topic: str, fact: str) -> None:
    advice = cost.advice(*job(*case, **node))
    by_topic = {each.topic: f"{each.what} because {each.why}" for each in advice}
    assert len(by_topic) == len(advice) and fact in by_topic[topic]


@pytest.mark.parametrize("topic", NONE)
def test_no_advice(topic: str) -> None:
    for case, node in NONE[topic]:
        assert topic not in [each.topic for each in cost.advice(*job(*case, **node))]


def test_a_good_choice_needs_none_and_no_old_gpu_is_proposed() -> None:
    for case in (PAIR, ONE, ("D8s_v5", 4, 0, 1)):
        assert cost.advice(*job(*case, **PREMIUM)) == []
    for size in ("NC24r", "NC24s_v3", "ND24s"):  # CUDA 13 has no code for V100 and older
        assert "ND40rs_v2" not in str(cost.advice(*job(size, 2, 4, 1)))


@pytest.mark.parametrize(
    ("case", "fact"),
    [
        (("ND96isr_H200_v5", 1, 8, 1), "not known here"),
        (("ND96isr_H100_v5", 1, 8, 1), "spot unknown, dedicated 98.32 USD (chosen)"),
        (("DS3_v2", 2, 0, 1), "each            4 cores, 14 GB\nquota needed    8 cores"),
        (("X1", 1, 1, 1), "unknown, as distdl does not know Standard_X1"),
    ],
)
def test_table(case: Case, fact: str) -> None:
    text = cost.table(*job(*case))
    assert fact in text and "h at most" not in text


OLD = {"tier": "low_priority", "compute": "old", "min_nodes": 1, "walltime": 12.5}


@pytest.mark.parametrize(
    ("name", "case", "node"),
    [("good", PAIR, DAY), ("everything", ("NC24r", 4, 2, 3), {**OLD, **STANDARD, **BASIC})],
)
def test_golden(name: str, case: Case, node: Any, pytestconfig: pytest.Config) -> None:
    text = cost.table(*job(*case, **node)) + "\n"
    check_golden(pytestconfig, ROOT / f"tests/golden/launchers/advice_{name}.txt", text)


# The table of sizes


def row(size: vm_sizes.VmSize) -> str:
    """A size as docs/azure_vm_sizes.md has it."""
    gpus = f"{size.gpus} x {size.gpu} {size.gpu_memory_gb} GB" if size.gpus else ""
    network = f"{size.infiniband_gbps} Gb/s" if size.infiniband else ""
    network = network if size.sr_iov else "unusable"
    prices = [size.price_per_hour, size.spot_price_per_hour]
    dedicated, low = ("?" if price is None else f"{price:.2f}" for price in prices)
    cells = [f"`{size.name}`", gpus, str(size.cores), str(size.memory_gb), size.interconnect]
    cells += [network, dedicated, low, size.price_date, f"`{size.quota_family}`"]
    return f"| {' | '.join([*cells, size.retired or ''])} |"


def test_facts_agree_with_the_name_and_the_page() -> None:
    """Azure's names have the vCPUs, and by an r whether there is InfiniBand.

    learn.microsoft.com/azure/virtual-machines/vm-naming-conventions
    """
    page = (ROOT / "docs/azure_vm_sizes.md").read_text().splitlines()
    for name, size in SIZES.items():
        match = re.fullmatch(r"Standard_[A-Z]{1,2}(\d+)([a-z]*)(_.*)?", name)
        assert match is not None, name
        # Two are older than the rule.
        assert name == "Standard_DS3_v2" or size.cores == int(match[1]), name
        has_r = "r" in match[2] and size.sr_iov
        assert size.infiniband == has_r and (size.sr_iov or name == "Standard_NC24r"), name
        has_gpu = {size.gpus > 0, bool(size.gpu), size.gpu_memory_gb > 0, bool(size.interconnect)}
        assert len(has_gpu) == 1 and size.gpu in ("", *cost.GPUS), name
        assert size.quota_family and size.memory_gb > 0, name
        low, dedicated = size.spot_price_per_hour, size.price_per_hour
        assert dedicated is None or (size.price_date and dedicated > 0), name
        assert low is None or (dedicated is not None and 0 < low < dedicated), name
        assert not size.retired or date.fromisoformat(size.retired) < date(2026, 11, 21), name
    assert {line for line in page if line.startswith("| `")} == {row(s) for s in SIZES.values()}


def test_prices_grow_with_the_gpus() -> None:
    priced = [size for size in SIZES.values() if size.gpus and size.price_per_hour]
    order = sorted(priced, key=lambda s: (s.series, s.gpus, s.cores, s.infiniband))
    for _, sizes in groupby(order, key=lambda s: s.series):
        prices = [size.price_per_hour for size in sizes]
        assert prices == sorted(prices)


def test_find_and_suggest() -> None:
    assert vm_sizes.find("STANDARD_nc24RS_v3") == SIZES["Standard_NC24rs_v3"]
    assert vm_sizes.find("Standard_NC24rs_v9") is None
    for wrong, right in (("NC6s_v3", "NC6s_v3"), ("Standard_ND96isr_H100", "ND96isr_H100_v5")):
        assert vm_sizes.suggest(wrong) == f"did you mean Standard_{right}?"
    known = vm_sizes.suggest("p4d.24xlarge")
    assert "Standard_ND96asr_v4" in known and "Standard_NC6," not in known
