"""Current prices of Azure's VM sizes: read by the real SDK's client from a list on this machine."""

import json
import re

import pytest

from distdl.job import Resources
from distdl.launchers.azureml import cost, prices
from distdl.launchers.azureml.settings import AzureSettings
from distdl.util.errors import UserError
from tests.cluster.https import Answer, serve
from tests.unit.launchers.azureml.test_provision import write_certificate

pytest.importorskip("azure.core")
NC24, MI300X = "Standard_NC24ads_A100_v4", "Standard_ND96isr_MI300X_v5"


def entry(name, sku, price, **more):
    product = {
        "productName": "Virtual Machines Series",
        "currencyCode": "USD",
        "unitOfMeasure": "1 Hour",
        "type": "Consumption",
    }
    return {"armSkuName": name, "skuName": sku, "retailPrice": price, **product, **more}


PAGES = (
    [entry(NC24, "NC24ads", 4.1), entry(NC24, "NC24ads Spot", 0.9), entry("Other", "x", 1.0)],
    [
        entry(NC24, "NC24ads", 9.9, productName="Virtual Machines Series Windows"),
        entry(NC24, "NC24ads Low Priority", 0.5),
        entry(NC24, "NC24ads", 7.7, type="Reservation"),
        entry(MI300X, "ND96isr", "free"),
        entry(MI300X, "ND96isr", 60.5),
        "damaged",
    ],
)


class PriceList:
    def __init__(self):
        self.requests = []
        self.headers = []
        self.queries = []
        self.elsewhere = self.nonsense = False

    def answer(self, method, path, body, header, query):
        self.headers.append(dict(header))
        self.queries.append(query)
        if self.nonsense:
            raise Answer(200, ["<html>"])
        page = int(path.rpartition("/")[2]) if path.endswith("/1") else 0
        after = "https://elsewhere.example/1" if self.elsewhere else f"{self.url}/api/1"
        raise Answer(200, {"Items": PAGES[page], "NextPageLink": "" if page else after})


@pytest.fixture(scope="module")
def listed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prices")
    prices = PriceList()
    trusted, key = folder / "cert.pem", folder / "key.pem"
    write_certificate(trusted, key)
    prices.url, end = serve(prices, trusted, key)
    prices.trusted = trusted
    yield prices
    end()


@pytest.fixture
def server(listed, monkeypatch, tmp_path):
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(listed.trusted))
    monkeypatch.setenv("DISTDL_CACHE", str(tmp_path))
    for name in ("AZURE_SUBSCRIPTION_ID", "AZURE_RESOURCE_GROUP", "AZUREML_WORKSPACE_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    listed.__init__()
    return listed


def shown(size=NC24):
    return cost.table(AzureSettings(vm_size=size), Resources(1, 1, "gpu"))


def test_current_prices_are_read_kept_and_shown_with_their_date(server, capsys):
    assert "3.67 USD (chosen) (1 node, East US, 2024: indicative)" in shown()
    assert "not known here: python -m distdl provision azureml prices" in shown(MI300X)
    table = prices.run({"location": "westeurope", "server": server.url})
    assert re.search(rf"^{NC24} +4\.10 +0\.90$", table, re.MULTILINE)
    assert "no price is listed for: Standard_NC4as_T4_v3" in capsys.readouterr().err
    date = json.loads(prices.kept().read_text())["date"]
    price = f"spot about 0.90 USD, dedicated 4.10 USD (chosen) (1 node, westeurope, {date}: indica"
    assert price in shown()
    assert f"dedicated 60.50 USD (chosen) (1 node, westeurope, {date}" in shown(MI300X)
    assert not [each for each in server.headers if "Authorization" in each], "no credential is sent"
    assert "armRegionName" in server.queries[0]
    assert "westeurope" in server.queries[0]
    prices.kept().write_text('{"dedicated": 3}')  # damaged: the table's are shown
    assert "3.67 USD" in shown()


def test_what_is_no_list_of_prices_is_one_sentence_and_keeps_the_old_ones(server):
    settings = {"location": "westeurope", "server": server.url}
    for attribute, text in (("elsewhere", "to another server"), ("nonsense", "something else")):
        server.__init__()
        setattr(server, attribute, True)
        with pytest.raises(UserError, match=text):
            prices.run(settings)
    for wrong, text in (
        ({"server": "http://x"}, "not an https address"),
        ({"location": "West Europe"}, "not a region"),
        ({"place": "x"}, "place: no such setting"),
        ({}, "location: missing"),
    ):
        with pytest.raises(UserError, match=text):
            prices.run(wrong)
    assert prices.read() is None
