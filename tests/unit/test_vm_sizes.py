"""The table of Azure's VM sizes is complete, consistent and easy to ask."""

from __future__ import annotations

import re
from datetime import date

import pytest

from distdl.launchers.azureml import advice, vm_sizes
from tests.conftest import ROOT


def test_every_series_of_the_architecture_is_there() -> None:
    names = {size.name for size in vm_sizes.all()}
    for end in ("", "s_v2", "s_v3"):
        assert {f"Standard_NC{cores}{end}" for cores in (6, 12, 24)} <= names
    assert {"Standard_NC24r", "Standard_NC24rs_v2", "Standard_NC24rs_v3"} <= names
    assert {f"Standard_ND{size}" for size in ("6s", "12s", "24s", "24rs", "40rs_v2")} <= names
    assert {"Standard_ND96asr_v4", "Standard_ND96amsr_A100_v4"} <= names
    assert {f"Standard_NC{cores}ads_A100_v4" for cores in (24, 48, 96)} <= names
    assert {"Standard_NC40ads_H100_v5", "Standard_NC80adis_H100_v5"} <= names
    assert {"Standard_ND96isr_H100_v5", "Standard_ND96isr_H200_v5"} <= names
    assert {"Standard_DS3_v2", "Standard_D8s_v5"} <= names


@pytest.mark.parametrize("size", vm_sizes.all(), ids=str)
def test_facts_agree_with_the_name(size: vm_sizes.VmSize) -> None:
    """Azure's names say vCPUs, and by an r whether there is InfiniBand.

    learn.microsoft.com/azure/virtual-machines/vm-naming-conventions
    """
    cores, features = re.fullmatch(r"Standard_[A-Z]{1,2}(\d+)([a-z]*)(_.*)?", size.name).groups()[
        :2
    ]
    if size.name != "Standard_DS3_v2":  # older than the rule
        assert size.cores == int(cores)
    if size.sr_iov:
        assert size.infiniband == ("r" in features)
    else:
        assert size.name == "Standard_NC24r" and not size.infiniband
    assert (size.gpus > 0) == bool(size.gpu) == (size.gpu_memory_gb > 0) == bool(size.interconnect)
    assert not size.gpu or size.gpu in advice.GPUS
    assert size.quota_family and size.memory_gb > 0
    low, dedicated = size.spot_price_per_hour, size.price_per_hour
    assert dedicated is None or (size.price_date and dedicated > 0)
    assert low is None or (dedicated is not None and 0 < low < dedicated)
    assert size.retired is None or date.fromisoformat(size.retired) < date(2026, 11, 21)


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
    assert vm_sizes.find("STANDARD_nc24RS_v3").name == "Standard_NC24rs_v3"
    assert vm_sizes.find("Standard_NC24rs_v9") is None
    assert vm_sizes.suggest("NC6s_v3") == "did you mean Standard_NC6s_v3?"
    assert vm_sizes.suggest("Standard_ND96isr_H100") == "did you mean Standard_ND96isr_H100_v5?"
    known = vm_sizes.suggest("p4d.24xlarge")
    assert "Standard_ND96asr_v4" in known and "Standard_NC6," not in known


def row(size: vm_sizes.VmSize) -> str:
    """A size as docs/azure_vm_sizes.md has it."""
    gpus = f"{size.gpus} x {size.gpu} {size.gpu_memory_gb} GB" if size.gpus else ""
    network = f"{size.infiniband_gbps} Gb/s" if size.infiniband else ""
    network = network if size.sr_iov else "unusable"
    dedicated, low = (
        "?" if price is None else f"{price:.2f}"
        for price in (size.price_per_hour, size.spot_price_per_hour)
    )
    cells = [f"`{size.name}`", gpus, str(size.cores), str(size.memory_gb), size.interconnect]
    cells += [network, dedicated, low, size.price_date, f"`{size.quota_family}`"]
    return f"| {' | '.join([*cells, size.retired or ''])} |"


@pytest.mark.parametrize("size", vm_sizes.all(), ids=str)
def test_the_page_has_it(size: vm_sizes.VmSize) -> None:
    page = (ROOT / "docs/azure_vm_sizes.md").read_text().splitlines()
    assert row(size) in page, f"docs/azure_vm_sizes.md lacks this line:\n{row(size)}"
