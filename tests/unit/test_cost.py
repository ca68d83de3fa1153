"""Azure's VM sizes, and quota, prices and advice of a job, as `dry_run=true` shows them."""

from __future__ import annotations

import re
from datetime import date
from typing import Any

import pytest

from distdl.job import Resources
from distdl.launchers.azureml import cost, vm_sizes
from distdl.launchers.azureml.settings import AzureSettings
from tests.conftest import ROOT, check_golden

SIZES = {size.name: size for size in vm_sizes.all()}
SCALE_UP, INFINIBAND, BLOB, REGISTRY = "scale up", "infiniband", "blob", "registry"
NC24, NC96, ND96 = "Standard_NC24ads_A100_v4", "Standard_NC96ads_A100_v4", "Standard_ND96asr_v4"
DATA = {"imagenet": "azureml:x:1"}


def job(size: str, nodes: int, devices: int, node: dict[str, Any]) -> tuple[Any, Resources]:
    accelerator = "gpu" if devices else "cpu"
    return AzureSettings(vm_size=size, **node), Resources(nodes, devices, accelerator)


# Size, nodes, devices (0: on the CPU), members of the sweep, settings; topic -> what it says of
# that. None: it says nothing.
ADVICE: list[tuple[str, int, int, int, dict[str, Any], str, str | None]] = [
    (NC24, 4, 1, 1, {}, SCALE_UP, "1 x Standard_NC96ads_A100_v4 (14.69 USD per hour, 4 x A100"),
    (NC24, 4, 1, 1, {}, SCALE_UP, "instead of 4 x Standard_NC24ads_A100_v4 (14.69 USD)"),
    # Eight nodes become one at a price that is similar, not the same.
    (NC24, 8, 1, 1, {}, SCALE_UP, "Standard_ND96amsr_A100_v4 (32.77 USD"),
    ("Standard_NC6s_v3", 4, 1, 1, {}, SCALE_UP, "1 x Standard_NC96ads_A100_v4"),
    # Four times the price is not advice, nor is a weaker GPU or a size that is gone.
    ("Standard_NC4as_T4_v3", 2, 1, 1, {}, SCALE_UP, None),
    ("Standard_ND96isr_H100_v5", 2, 8, 1, {}, SCALE_UP, None),
    (NC96, 2, 4, 1, {}, INFINIBAND, "_A100_v4 (8 x A100, 1600 Gb/s, 32.77 USD per hour)"),
    (NC96, 2, 4, 1, {}, INFINIBAND, "no r in its name"),
    (NC96, 1, 4, 1, {}, INFINIBAND, None),
    ("Standard_ND96amsr_A100_v4", 2, 8, 1, {}, INFINIBAND, None),
    ("Standard_NC24r", 2, 4, 1, {}, INFINIBAND, "InfiniBand of Standard_NC24r has no SR-IOV"),
    (ND96, 2, 8, 1, {"storage_sku": "standard"}, BLOB, "put the training data on premium block"),
    (ND96, 2, 8, 1, {"inputs": DATA}, BLOB, "if the data lie on standard Blob storage"),
    (ND96, 2, 8, 1, {"inputs": DATA, "storage_sku": "premium"}, BLOB, None),
    (ND96, 2, 8, 1, {}, BLOB, None),
    (ND96, 1, 8, 1, {"storage_sku": "standard"}, BLOB, None),
    (ND96, 4, 8, 1, {"registry_sku": "basic"}, REGISTRY, "give the workspace a premium container"),
    (ND96, 4, 8, 1, {"registry_sku": "basic"}, REGISTRY, "4 nodes pull"),
    (NC24, 1, 1, 8, {"registry_sku": "basic"}, REGISTRY, "8 nodes pull"),
    (ND96, 2, 8, 1, {"registry_sku": "basic"}, REGISTRY, None),
    (ND96, 4, 8, 1, {"registry_sku": "premium"}, REGISTRY, None),
    (ND96, 4, 8, 1, {}, REGISTRY, None),
    (NC24, 1, 1, 1, {"compute": "gpu", "min_nodes": 2}, "idle", "launcher.min_nodes=0"),
    (NC24, 1, 1, 1, {"compute": "gpu", "min_nodes": 2}, "idle", "5,363 USD"),  # 2 x 3.673 x 730
    (NC24, 1, 1, 1, {"compute": "gpu", "min_nodes": 1, "tier": "spot"}, "idle", "about 324 USD"),
    (NC24, 1, 1, 1, {"compute": "gpu"}, "idle", None),
    (NC24, 1, 1, 1, {"min_nodes": 2}, "idle", None),
    (ND96, 2, 8, 10, {}, "sweep", "train the configurations separately, one VM each"),
    (ND96, 1, 8, 10, {}, "sweep", None),
    (ND96, 2, 8, 1, {}, "sweep", None),
    ("Standard_NC6s_v3", 1, 1, 1, {}, "retired", "retired NCv3 (V100) on 2025-09-30"),
    ("Standard_NC6s_v3", 1, 1, 1, {}, "retired", NC24),
    ("Standard_NC24s_v3", 1, 4, 1, {}, "retired", NC96),  # as many GPUs as are asked for
    (NC96, 1, 1, 1, {}, "unused", "3 of 4 GPUs per node are idle"),
    (NC24, 1, 0, 1, {}, "unused", "trainer.accelerator=cpu leaves 1 x A100"),
]


@pytest.mark.parametrize(("size", "nodes", "devices", "jobs", "node", "topic", "fact"), ADVICE)
def test_advice(
    size: str, nodes: int, devices: int, jobs: int, node: Any, topic: str, fact: str | None
) -> None:
    found = cost.advice(*job(size, nodes, devices, node), jobs)
    by_topic = {each.topic: f"{each.what} because {each.why}" for each in found}
    assert len(by_topic) == len(found) and all(each.why for each in found)
    assert (fact in by_topic[topic]) if fact else topic not in by_topic


@pytest.mark.parametrize("case", [(ND96, 2, 8), (NC24, 1, 1), ("Standard_D8s_v5", 4, 0)])
def test_a_good_choice_needs_none(case: tuple[str, int, int]) -> None:
    assert cost.advice(*job(*case, {"storage_sku": "premium"})) == []


def test_nothing_is_proposed_that_todays_torch_cannot_use() -> None:
    """CUDA 13 has no code for V100 and older."""
    for size in ("Standard_NC24r", "Standard_NC24s_v3", "Standard_ND24s"):
        assert "ND40rs_v2" not in str(cost.advice(*job(size, 2, 4, {})))


# Size, nodes, devices, members of the sweep, settings; what the table says.
TABLES: list[tuple[str, int, int, int, dict[str, Any], str]] = [
    (ND96, 2, 8, 1, {}, '192 cores of "Standard NDASv4_A100 Family"; spot has a quota of its own'),
    (ND96, 2, 8, 1, {"tier": "spot"}, "192 cores of the region's low-priority quota"),
    (ND96, 2, 8, 3, {}, "per job, 576 for all 3 of the sweep at once"),
    (ND96, 2, 8, 1, {"walltime": 24}, "spot about 5.98 USD, dedicated 54.39 USD (chosen)"),
    (ND96, 2, 8, 1, {"walltime": 24}, "for 24 h at most"),
    (ND96, 2, 8, 1, {"walltime": 24}, "dedicated 1,305 USD (chosen)"),
    (ND96, 2, 8, 1, {}, "prices of 2024: indicative"),
    ("Standard_ND96isr_H200_v5", 1, 8, 1, {}, "not known here"),
    ("Standard_ND96isr_H100_v5", 1, 8, 1, {}, "spot unknown, dedicated 98.32 USD (chosen)"),
    ("Standard_DS3_v2", 2, 0, 1, {}, "each            4 cores, 14 GB\nquota needed    8 cores"),
    ("Standard_X1", 1, 1, 1, {}, "unknown here, as distdl does not know Standard_X1"),
]


@pytest.mark.parametrize(("size", "nodes", "devices", "jobs", "node", "fact"), TABLES)
def test_table(size: str, nodes: int, devices: int, jobs: int, node: Any, fact: str) -> None:
    text = cost.table(*job(size, nodes, devices, node), jobs)
    assert fact in text
    assert ("h at most" in text) == ("walltime" in node)


OLD = {"tier": "low_priority", "compute": "old", "min_nodes": 1, "walltime": 12.5}
SKUS = {"storage_sku": "standard", "registry_sku": "basic"}


@pytest.mark.parametrize(
    ("name", "size", "nodes", "devices", "jobs", "node"),
    [
        ("advice_good", ND96, 2, 8, 1, {"walltime": 24}),
        ("advice_everything", "Standard_NC24r", 4, 2, 3, {**OLD, **SKUS}),
    ],
)
def test_golden(
    name: str, size: str, nodes: int, devices: int, jobs: int, node: Any, pytestconfig: Any
) -> None:
    text = cost.table(*job(size, nodes, devices, node), jobs) + "\n"
    check_golden(pytestconfig, ROOT / f"tests/golden/launchers/{name}.txt", text)


# The table of sizes


def test_every_series_of_the_architecture_is_there() -> None:
    ends = "6 12 24 6s_v2 12s_v2 24s_v2 6s_v3 12s_v3 24s_v3 24r 24rs_v2 24rs_v3 24ads_A100_v4"
    ends += " 48ads_A100_v4 96ads_A100_v4 40ads_H100_v5 80adis_H100_v5"
    series = [f"Standard_NC{end}" for end in ends.split()]
    ends = "6s 12s 24s 24rs 40rs_v2 96asr_v4 96amsr_A100_v4 96isr_H100_v5 96isr_H200_v5"
    series += [f"Standard_ND{end}" for end in ends.split()]
    assert {*series, "Standard_DS3_v2", "Standard_D8s_v5"} <= set(SIZES)


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
    """Azure's names say vCPUs, and by an r whether there is InfiniBand.

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
    series: dict[str, list[vm_sizes.VmSize]] = {}
    for size in vm_sizes.all():
        if size.gpus and size.price_per_hour:
            series.setdefault(size.series, []).append(size)
    for sizes in series.values():
        ordered = sorted(sizes, key=lambda size: (size.gpus, size.cores, size.infiniband))
        prices = [size.price_per_hour for size in ordered]
        assert prices == sorted(prices)


def test_find_and_suggest() -> None:
    assert vm_sizes.find("STANDARD_nc24RS_v3") == SIZES["Standard_NC24rs_v3"]
    assert vm_sizes.find("Standard_NC24rs_v9") is None
    assert vm_sizes.suggest("NC6s_v3") == "did you mean Standard_NC6s_v3?"
    assert vm_sizes.suggest("Standard_ND96isr_H100") == "did you mean Standard_ND96isr_H100_v5?"
    known = vm_sizes.suggest("p4d.24xlarge")
    assert "Standard_ND96asr_v4" in known and "Standard_NC6," not in known
