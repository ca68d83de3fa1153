"""Quota, prices and advice of a job on Azure, as `dry_run=true` shows them."""

from __future__ import annotations

from typing import Any

import pytest

from distdl.job import Resources
from distdl.launchers.azureml import advice
from tests.conftest import ROOT, check_golden

GOLDEN = ROOT / "tests/golden/launchers"


def given(
    size: str, nodes: int = 1, devices: int = 1, jobs: int = 1, **node: Any
) -> dict[str, str]:
    """topic -> the advice."""
    found = advice.lines(
        {"vm_size": size, **node}, Resources(nodes, devices, "gpu" if devices else "cpu"), jobs=jobs
    )
    assert len({each.topic for each in found}) == len(found)
    assert all(each.why for each in found)
    return {each.topic: str(each) for each in found}


def table(size: str, resources: Resources, hours: float | None = None, **node: Any) -> str:
    return advice.table({"vm_size": size, **node}, resources, hours)


def test_a_good_choice_needs_none() -> None:
    assert given("Standard_ND96asr_v4", 2, 8, storage_sku="premium") == {}
    assert given("Standard_NC24ads_A100_v4") == {}
    assert given("Standard_D8s_v5", 4, 0) == {}


def test_scale_up_before_scaling_out() -> None:
    said = given("Standard_NC24ads_A100_v4", nodes=4)["scale up"]
    assert "1 x Standard_NC96ads_A100_v4 (14.69 USD per hour, 4 x A100 each)" in said
    assert "instead of 4 x Standard_NC24ads_A100_v4 (14.69 USD)" in said
    # Eight nodes become one at a price that is similar, not the same.
    assert (
        "Standard_ND96amsr_A100_v4 (32.77 USD" in given("Standard_NC24ads_A100_v4", 8)["scale up"]
    )
    # Four times the price is no advice, nor is a weaker GPU or a size that is gone.
    assert "scale up" not in given("Standard_NC4as_T4_v3", nodes=2)
    assert "scale up" not in given("Standard_ND96isr_H100_v5", nodes=2, devices=8)
    assert "1 x Standard_NC96ads_A100_v4" in given("Standard_NC6s_v3", nodes=4)["scale up"]


def test_an_infiniband_size_for_several_nodes() -> None:
    said = given("Standard_NC96ads_A100_v4", nodes=2, devices=4)["infiniband"]
    assert "Standard_ND96amsr_A100_v4 (8 x A100, 1600 Gb/s, 32.77 USD per hour)" in said
    assert "no r in its name" in said
    assert "infiniband" not in given("Standard_NC96ads_A100_v4", devices=4)
    assert "infiniband" not in given("Standard_ND96amsr_A100_v4", nodes=2, devices=8)


def test_infiniband_that_does_not_work() -> None:
    said = given("Standard_NC24r", nodes=2, devices=4)["infiniband"]
    assert "the InfiniBand of Standard_NC24r has no SR-IOV" in said
    assert "no r in its name" not in said


def test_nothing_is_proposed_that_todays_torch_cannot_use() -> None:
    """CUDA 13 has no code for V100 and older."""
    for size in ("Standard_NC24r", "Standard_NC24s_v3", "Standard_ND24s"):
        assert "ND40rs_v2" not in " ".join(given(size, nodes=2, devices=4).values())


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        ({"storage_sku": "standard"}, "put the training data on premium block blob storage"),
        ({"inputs": {"imagenet": "azureml:x"}}, "if the data lie on standard Blob storage"),
        ({"inputs": {"imagenet": "azureml:x"}, "storage_sku": "premium"}, None),
        ({}, None),
    ],
)
def test_data_on_standard_blob(node: dict[str, Any], expected: str | None) -> None:
    said = given("Standard_ND96asr_v4", 2, 8, **node).get("blob")
    assert (expected in said) if expected else said is None
    assert "blob" not in given("Standard_ND96asr_v4", 1, 8, **node)


def test_a_basic_registry_feeding_many_nodes() -> None:
    said = given("Standard_ND96asr_v4", 4, 8, registry_sku="Basic")["registry"]
    assert "premium container registry" in said and "4 nodes pull" in said
    assert "registry" in given("Standard_NC24ads_A100_v4", jobs=8, registry_sku="basic")
    assert "registry" not in given("Standard_ND96asr_v4", 2, 8, registry_sku="basic")
    assert "registry" not in given("Standard_ND96asr_v4", 4, 8, registry_sku="premium")
    assert "registry" not in given("Standard_ND96asr_v4", 4, 8)


def test_a_cluster_that_costs_money_idle() -> None:
    said = given("Standard_NC24ads_A100_v4", compute="gpu", min_nodes=2)["idle"]
    assert "launcher.min_nodes=0" in said
    assert "about 5,363 USD a month" in said  # 2 x 3.673 x 730
    cheap = given("Standard_NC24ads_A100_v4", compute="g", min_nodes=1, tier="low_priority")["idle"]
    assert "about 324 USD a month" in cheap  # 0.444 x 730
    assert "idle" not in given("Standard_NC24ads_A100_v4", compute="gpu", min_nodes=0)
    assert "idle" not in given("Standard_NC24ads_A100_v4", compute=None, min_nodes=2)


def test_a_sweep_of_jobs_of_several_nodes() -> None:
    said = given("Standard_ND96asr_v4", 2, 8, jobs=10)["sweep"]
    assert "train the configurations separately, one VM each" in said
    assert "sweep" in given("Standard_ND96asr_v4", 2, 8, sweep="azureml")
    assert "sweep" not in given("Standard_ND96asr_v4", 1, 8, jobs=10)
    assert "sweep" not in given("Standard_ND96asr_v4", 2, 8, sweep="jobs")


def test_a_size_that_is_gone() -> None:
    said = given("Standard_NC6s_v3")["retired"]
    assert "retired NCv3 (V100) on 2025-09-30" in said
    assert "Standard_NC24ads_A100_v4" in said
    # As many GPUs as are asked for.
    assert "Standard_NC96ads_A100_v4" in given("Standard_NC24s_v3", devices=4)["retired"]


def test_devices_that_are_paid_and_idle() -> None:
    assert "3 of 4 GPUs per node are idle" in given("Standard_NC96ads_A100_v4")["unused"]
    assert (
        "trainer.accelerator=cpu leaves 1 x A100"
        in given("Standard_NC24ads_A100_v4", devices=0)["unused"]
    )


def test_quota() -> None:
    one = Resources(2, 8, "gpu")
    assert '192 cores of "Standard NDASv4_A100 Family"; spot has a quota of its own' in table(
        "Standard_ND96asr_v4", one
    )
    low = table("Standard_ND96asr_v4", one, tier="spot")
    assert "192 cores of the region's low-priority quota" in low
    sweep = advice.table({"vm_size": "Standard_ND96asr_v4"}, one, None, jobs=3)
    assert "per job, 576 for all 3 of the sweep at once" in sweep


def test_prices() -> None:
    text = table("Standard_ND96asr_v4", Resources(2, 8, "gpu"), 24)
    assert "spot about 5.98 USD, dedicated 54.39 USD (chosen)" in text
    assert "for 24 h at most" in text and "dedicated 1,305 USD (chosen)" in text
    assert "prices of 2024: indicative" in text
    assert "for " not in table("Standard_ND96asr_v4", Resources(2, 8, "gpu")).split("advice")[0]
    unknown = table("Standard_ND96isr_H200_v5", Resources(1, 8, "gpu"), 24)
    assert "not known here" in unknown
    assert "spot unknown, dedicated 98.32 USD (chosen)" in table(
        "Standard_ND96isr_H100_v5", Resources(1, 8, "gpu")
    )


def test_a_size_that_nobody_knows() -> None:
    assert advice.lines({"vm_size": "Standard_X1"}, Resources()) == []
    said = table("Standard_X1", Resources())
    assert "price and quota: unknown here, as distdl does not know Standard_X1" in said


GOLDENS: dict[str, tuple[dict[str, Any], Resources, float | None, int]] = {
    "advice_good": ({"vm_size": "Standard_ND96asr_v4"}, Resources(2, 8, "gpu"), 24, 1),
    "advice_everything": (
        {
            "vm_size": "Standard_NC24r",
            "tier": "low_priority",
            "compute": "old",
            "min_nodes": 1,
            "storage_sku": "standard",
            "registry_sku": "basic",
        },
        Resources(4, 2, "gpu"),
        12.5,
        3,
    ),
    "advice_cpu": ({"vm_size": "Standard_DS3_v2"}, Resources(2, 2, "cpu"), None, 1),
}


@pytest.mark.parametrize("name", GOLDENS)
def test_golden(name: str, pytestconfig: pytest.Config) -> None:
    node, resources, hours, jobs = GOLDENS[name]
    text = advice.table(node, resources, hours, jobs=jobs) + "\n"
    file = GOLDEN / f"{name}.txt"
    check_golden(pytestconfig, file, text)
