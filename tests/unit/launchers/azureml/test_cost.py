"""Azure's VM sizes, and quota, prices and advice of a job, as `dry_run=true` shows them."""

import pytest

from distdl.job import Resources
from distdl.launchers.azureml import cost, vm_sizes
from distdl.launchers.azureml.settings import AzureSettings
from tests.conftest import ROOT, check_golden

NC24, NC96, ND96 = "NC24ads_A100_v4", "NC96ads_A100_v4", "ND96asr_v4"
BASIC, STANDARD = {"registry_sku": "basic"}, {"storage_sku": "standard"}


@pytest.fixture(autouse=True)
def no_prices_of_this_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("DISTDL_CACHE", str(tmp_path))


def job(size, nodes, devices, jobs, **node):
    settings = AzureSettings(vm_size=f"Standard_{size}", **node)
    return settings, Resources(nodes, devices, "gpu" if devices else "cpu"), jobs


# Size, nodes, devices (0: on the CPU), members of the sweep; topic -> what the advice says of that.
# The golden file has the rest.
ADVICE = [
    (
        (NC24, 4, 1, 1),
        "scale up",
        "1 x Standard_NC96ads_A100_v4 (14.69 USD per hour, East US, 2024; 4 x A100",
    ),
    # Eight nodes become one at a price that is similar, not the same.
    ((NC24, 8, 1, 1), "scale up", "Standard_ND96amsr_A100_v4 (32.77 USD"),
    (
        (NC96, 2, 4, 1),
        "infiniband",
        "32.77 USD per hour, East US, 2024) because Standard_NC96ads_A100_v4 has no",
    ),
    ((NC24, 1, 0, 1), "unused", "you pay for 1 x A100 per node, idle"),
]


@pytest.mark.parametrize(("case", "topic", "fact"), ADVICE)
def test_advice(case, topic, fact):
    (advice,) = [each for each in cost.advice(*job(*case)) if each.topic == topic]
    assert fact in f"{advice.what} because {advice.why}"


def test_no_advice():
    for case, node in (
        ((ND96, 2, 8, 1), {"storage_sku": "premium"}),
        ((NC24, 1, 1, 1), {"min_nodes": 2, **BASIC}),  # serverless keeps no nodes
        (("D8s_v5", 4, 0, 1), {}),
        ((ND96, 1, 8, 10), STANDARD),
    ):
        assert cost.advice(*job(*case, **node)) == []
    # Four times the price is not advice, nor is a weaker GPU, nor one without code in CUDA 13.
    for case in (("NC4as_T4_v3", 2, 1, 1), ("ND96isr_H100_v5", 2, 8, 1)):
        assert "scale up" not in [each.topic for each in cost.advice(*job(*case))]
    assert "ND40rs_v2" not in str(cost.advice(*job("NC24s_v3", 2, 4, 1)))


def test_golden(pytestconfig):
    old = {"tier": "low_priority", "compute": "old", "min_nodes": 1, "walltime": 12.5}
    text = cost.table(*job("NC24r", 4, 2, 3, **old, **STANDARD, **BASIC)) + "\n"
    check_golden(pytestconfig, ROOT / "tests/golden/launchers/advice_everything.txt", text)


def row(size):
    """A size as docs/azure_vm_sizes.md has it."""
    gpus = f"{size.gpus} x {size.gpu} {size.gpu_memory_gb} GB" if size.gpus else ""
    network = f"{size.infiniband_gbps} Gb/s" if size.infiniband else ""
    network = network if size.sr_iov else "unusable"
    prices = [size.price_per_hour, size.spot_price_per_hour]
    dedicated, low = ("?" if price is None else f"{price:.2f}" for price in prices)
    cells = [
        f"`{size.name}`",
        gpus,
        str(size.cores),
        str(size.memory_gb),
        size.interconnect,
        network,
        dedicated,
        low,
        size.price_date,
        f"`{size.quota_family}`",
    ]
    return f"| {' | '.join([*cells, size.retired or ''])} |"


def test_facts_agree_with_the_page():
    page = (ROOT / "docs/azure_vm_sizes.md").read_text().splitlines()
    assert {line for line in page if line.startswith("| `")} == {*map(row, vm_sizes.known())}


def test_unknown_prices_and_sizes():
    assert "not known here" in cost.table(*job("ND96isr_H200_v5", 1, 8, 1))
    text = cost.table(*job("ND96isr_H100_v5", 1, 8, 1))
    assert "spot unknown, dedicated 98.32 USD (chosen)" in text
    assert "h at most" not in text
    text = cost.table(*job("X1", 1, 1, 1))
    assert text.startswith("price and quota: unknown, as distdl does not know Standard_X1")
    known = vm_sizes.suggest("p4d.24xlarge")
    assert "Standard_ND96asr_v4" in known
    assert "Standard_NC6," not in known
