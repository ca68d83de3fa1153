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

SIZES = {size.name: size for size in vm_sizes.all()}
NC24, NC96, ND96 = "NC24ads_A100_v4", "NC96ads_A100_v4", "ND96asr_v4"
Case = tuple[str, int, int, int]  # size, nodes, devices (0: on the CPU), members of the sweep
SPREAD, FOUR, EIGHT, TEN = (NC24, 4, 1, 1), (ND96, 4, 8, 1), (NC24, 1, 1, 8), (ND96, 2, 8, 10)
ONE, PAIR, SLOW = (NC24, 1, 1, 1), (ND96, 2, 8, 1), (NC96, 2, 4, 1)


def job(size: str, nodes: int, devices: int, jobs: int, **node: Any) -> tuple[Any, Resources, int]:
    settings = AzureSettings(vm_size=f"Standard_{size}", **node)
    return settings, Resources(nodes, devices, "gpu" if devices else "cpu"), jobs


IDLE, STANDARD = {"compute": "gpu", "min_nodes": 2}, {"storage_sku": "standard"}
DATA, BASIC = {"inputs": {"imagenet": "azureml:x:1"}}, {"registry_sku": "basic"}
# A job, its settings; topic -> what the advice says of that. None: it says nothing.
ADVICE: list[tuple[Case, dict[str, Any], str, str | None]] = [
    (SPREAD, {}, "scale up", "1 x Standard_NC96ads_A100_v4 (14.69 USD per hour, 4 x A100"),
    (SPREAD, {}, "scale up", "instead of 4 x Standard_NC24ads_A100_v4 (14.69 USD)"),
    # Eight nodes become one at a price that is similar, not the same.
    ((NC24, 8, 1, 1), {}, "scale up", "Standard_ND96amsr_A100_v4 (32.77 USD"),
    (("NC6s_v3", 4, 1, 1), {}, "scale up", "1 x Standard_NC96ads_A100_v4"),
    # Four times the price is not advice, nor is a weaker GPU or a size that is gone.
    (("NC4as_T4_v3", 2, 1, 1), {}, "scale up", None),
    (("ND96isr_H100_v5", 2, 8, 1), {}, "scale up", None),
    (SLOW, {}, "infiniband", "_A100_v4 (8 x A100, 1600 Gb/s, 32.77 USD per hour)"),
    (SLOW, {}, "infiniband", "no r in its name"),
    ((NC96, 1, 4, 1), {}, "infiniband", None),
    (("ND96amsr_A100_v4", 2, 8, 1), {}, "infiniband", None),
    (("NC24r", 2, 4, 1), {}, "infiniband", "InfiniBand of Standard_NC24r has no SR-IOV"),
    (PAIR, STANDARD, "blob", "put the training data on premium block"),
    (PAIR, DATA, "blob", "if the data lie on standard Blob storage"),
    (PAIR, {**DATA, "storage_sku": "premium"}, "blob", None),
    (PAIR, {}, "blob", None),
    ((ND96, 1, 8, 1), STANDARD, "blob", None),
    (FOUR, BASIC, "registry", "premium container registry because 4 nodes pull"),
    (EIGHT, BASIC, "registry", "8 nodes pull"),
    (PAIR, BASIC, "registry", None),
    (FOUR, {"registry_sku": "premium"}, "registry", None),
    (FOUR, {}, "registry", None),
    (ONE, IDLE, "idle", "launcher.min_nodes=0"),
    (ONE, IDLE, "idle", "5,363 USD"),  # 2 x 3.673 x 730
    (ONE, {**IDLE, "min_nodes": 1, "tier": "spot"}, "idle", "about 324 USD"),
    (ONE, {"compute": "gpu"}, "idle", None),
    (ONE, {"min_nodes": 2}, "idle", None),
    (TEN, {}, "sweep", "train the configurations separately, one VM each"),
    ((ND96, 1, 8, 10), {}, "sweep", None),
    (PAIR, {}, "sweep", None),
    (("NC6s_v3", 1, 1, 1), {}, "retired", "such as Standard_NC24ads_A100_v4 because Azure retired"),
    (("NC24s_v3", 1, 4, 1), {}, "retired", NC96),  # as many GPUs as are asked for
    ((NC96, 1, 1, 1), {}, "unused", "3 of 4 GPUs per node are idle"),
    ((NC24, 1, 0, 1), {}, "unused", "trainer.accelerator=cpu leaves 1 x A100"),
]


@pytest.mark.parametrize(("case", "node", "topic", "fact"), ADVICE)
def test_advice(case: Case, node: Any, topic: str, fact: str | None) -> None:
    advice = cost.advice(*job(*case, **node))
    by_topic = {each.topic: f"{each.what} because {each.why}" for each in advice}
    assert len(by_topic) == len(advice) and all(each.why for each in advice)
    assert (fact in by_topic[topic]) if fact else topic not in by_topic


@pytest.mark.parametrize("case", [PAIR, ONE, ("D8s_v5", 4, 0, 1)])
def test_a_good_choice_needs_none(case: Case) -> None:
    assert cost.advice(*job(*case, storage_sku="premium")) == []


@pytest.mark.parametrize("size", ["NC24r", "NC24s_v3", "ND24s"])
def test_nothing_is_proposed_that_todays_torch_cannot_use(size: str) -> None:
    """CUDA 13 has no code for V100 and older."""
    assert "ND40rs_v2" not in str(cost.advice(*job(size, 2, 4, 1)))


DAY = {"walltime": 24}
# A job, its settings; what the table says.
TABLES: list[tuple[Case, dict[str, Any], str]] = [
    (PAIR, {}, '192 cores of "Standard NDASv4_A100 Family"; spot has a quota of its own'),
    (PAIR, {"tier": "spot"}, "192 cores of the region's low-priority quota"),
    ((ND96, 2, 8, 3), {}, "per job, 576 for all 3 of the sweep at once"),
    (PAIR, DAY, "spot about 5.98 USD, dedicated 54.39 USD (chosen)"),
    (PAIR, DAY, "dedicated 1,305 USD (chosen)"),
    (PAIR, {}, "prices of 2024: indicative"),
    (("ND96isr_H200_v5", 1, 8, 1), {}, "not known here"),
    (("ND96isr_H100_v5", 1, 8, 1), {}, "spot unknown, dedicated 98.32 USD (chosen)"),
    (("DS3_v2", 2, 0, 1), {}, "each            4 cores, 14 GB\nquota needed    8 cores"),
    (("X1", 1, 1, 1), {}, "unknown here, as distdl does not know Standard_X1"),
]


@pytest.mark.parametrize(("case", "node", "fact"), TABLES)
def test_table(case: Case, node: Any, fact: str) -> None:
    text = cost.table(*job(*case, **node))
    assert fact in text and ("for 24 h at most" in text) == ("walltime" in node)


OLD = {"tier": "low_priority", "compute": "old", "min_nodes": 1, "walltime": 12.5}


@pytest.mark.parametrize(
    ("name", "case", "node"),
    [("good", PAIR, DAY), ("everything", ("NC24r", 4, 2, 3), {**OLD, **STANDARD, **BASIC})],
)
def test_golden(name: str, case: Case, node: Any, pytestconfig: pytest.Config) -> None:
    text = cost.table(*job(*case, **node)) + "\n"
    check_golden(pytestconfig, ROOT / f"tests/golden/launchers/advice_{name}.txt", text)


# The table of sizes


def test_every_series_of_the_architecture_is_there() -> None:
    names = "NC6 NC12 NC24 NC6s_v2 NC12s_v2 NC24s_v2 NC6s_v3 NC12s_v3 NC24s_v3 NC24r NC24rs_v2"
    names += " NC24rs_v3 NC24ads_A100_v4 NC48ads_A100_v4 NC96ads_A100_v4 NC40ads_H100_v5"
    names += " NC80adis_H100_v5 ND6s ND12s ND24s ND24rs ND40rs_v2 ND96asr_v4 ND96amsr_A100_v4"
    names += " ND96isr_H100_v5 ND96isr_H200_v5 DS3_v2 D8s_v5"
    assert {f"Standard_{name}" for name in names.split()} <= set(SIZES)


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
        assert row(size) in page, f"docs/azure_vm_sizes.md lacks this line:\n{row(size)}"


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
