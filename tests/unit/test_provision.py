"""`python -m distdl provision azureml`: the plan, what is sent, and that nothing is deleted."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from distdl.commands import provision as verb
from distdl.errors import UserError
from distdl.launchers.azureml import provision, provision_arm, provision_settings
from distdl.launchers.azureml.provision_plan import differences, merge
from distdl.launchers.azureml.provision_resources import resources
from distdl.launchers.azureml.provision_values import Resource
from tests.cluster.arm_store import SUBSCRIPTION, ArmStore, Token, serving
from tests.conftest import ROOT, Said, check_golden

azure = pytest.importorskip("azure.mgmt.core")
GOLDEN = ROOT / "tests/golden/launchers"
NAMES = {"resource_group": "ml", "workspace": "vision"}
PUBLIC = {**NAMES, "private": False}


@pytest.fixture(autouse=True)
def nobodys_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("AZURE_", "ARM_"))]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ArmStore, Path]]:
    folder = tmp_path_factory.mktemp("arm")
    with serving(folder) as store:
        yield store, folder / "cert.pem"


@pytest.fixture
def store(server: tuple[ArmStore, Path], monkeypatch: pytest.MonkeyPatch) -> ArmStore:
    """An empty Azure."""
    found, trusted = server
    found.resources.clear()
    found.requests.clear()
    found.failures.clear()
    found.subscriptions = [SUBSCRIPTION]
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(trusted))
    monkeypatch.setattr(provision_arm, "POLLING_INTERVAL", 0.01)
    return found


@pytest.fixture
def run(store: ArmStore) -> Callable[..., int]:
    def provisioned(**overrides: Any) -> int:
        given = {key.replace("__", "."): value for key, value in overrides.items()}
        to = {"resource_manager": store.url, "confirm": True}
        return provision.run({**PUBLIC, **to, **given}, Token())

    return provisioned


def settings(**overrides: Any) -> provision_settings.Settings:
    given = {key.replace("__", "."): value for key, value in overrides.items()}
    return provision_settings.read({**NAMES, "subscription": SUBSCRIPTION, **given})


def problems(**overrides: Any) -> str:
    with pytest.raises(UserError) as caught:
        settings(**overrides)
    return str(caught.value)


def of_kind(found: list[Resource], kind: str) -> list[Resource]:
    return [resource for resource in found if resource.kind == kind]


# Settings


def test_every_problem_is_named_at_once() -> None:
    said = problems(
        workspase="x",
        compute__max_node=3,
        workspace="a b",
        network__address_space="172.16.0.0/12",
        compute__vm_size="NC24adsA100_v4",
        registry__sku="Basic",
        compute__min_nodes=9,
        resource_manager="http://example.com",
        compute=3,
    )
    for text in (
        "did you mean workspace?",
        "did you mean compute.max_nodes?",
        "workspace: 'a b' is no such name in Azure",
        "network.address_space: 172.16.0.0/12 overlaps 172.16.0.0/16, which InfiniBand uses",
        "did you mean Standard_NC24ads_A100_v4?",
        "registry.sku: private endpoints need a premium registry, not Basic",
        "compute.max_nodes: 4 nodes at most, 9 at least",
        "resource_manager: http://example.com is no https address",
        "compute: is a section\n    it has compute.name,",
    ):
        assert text in said


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("compute__min_nodes", "2", "compute.min_nodes: must be a valid integer, not '2'"),
        ("private", 1, "private: must be a valid boolean, not 1"),
        ("registry__sku", "premium", "registry.sku: must be 'Basic', 'Standard' or 'Premium'"),
        ("network__compute_subnet", "10.9.0.0/24", "is not inside 10.66.0.0/16"),
        ("network__compute_subnet", "10.66.0.1/24", "network.compute_subnet: 10.66.0.1/24 has"),
        ("network__endpoint_subnet", "10.66.0.0/24", "10.66.0.0/24 overlaps 10.66.0.0/20"),
        ("compute__vm_size", "Standard_NC6", "Azure retired Standard_NC6 on 2023-08-31"),
        ("storage__data", "Data_1", "storage.data: 'Data_1' is no such name in Azure"),
        ("build_compute__name", "gpu-cluster", "gpu-cluster is the other cluster's name"),
        ("compute__idle_seconds", -1, "compute.idle_seconds: -1 is no time"),
        ("resource_group", None, "resource_group: missing\n    write resource_group=NAME"),
    ],
)
def test_refused(key: str, value: Any, said: str) -> None:
    assert said in problems(**{key: value})


def test_names_are_made_once_and_for_all() -> None:
    first, again = resources(settings()), resources(settings())
    assert [r.id for r in first] == [r.id for r in again]
    elsewhere = resources(settings(resource_group="other"))
    accounts = [[r.name for r in of_kind(found, "key vault")] for found in (first, elsewhere)]
    assert accounts[0] != accounts[1]
    long = settings(workspace="A-very-long-name-of-a-workspace33")
    for resource in resources(long):
        if resource.kind.startswith("storage account") or resource.kind == "key vault":
            assert len(resource.name) <= 24 and resource.name.isalnum()


# What is made


@pytest.mark.parametrize(
    ("name", "overrides"), [("provision_azureml", {}), ("provision_azureml_public", PUBLIC)]
)
def test_golden(name: str, overrides: dict[str, Any], pytestconfig: pytest.Config) -> None:
    text = provision.render(settings(**overrides, users=["user-object-id"])) + "\n"
    file = GOLDEN / f"{name}.txt"
    check_golden(pytestconfig, file, text)


def test_private_means_private() -> None:
    found = resources(settings())
    closed = [r for r in found if "publicNetworkAccess" in r.body.get("properties", {})]
    assert len(closed) == 5  # workspace, vault, registry, two accounts
    assert all(r.body["properties"]["publicNetworkAccess"] == "Disabled" for r in closed)
    for cluster in of_kind(found, "cluster"):
        inner = cluster.body["properties"]["properties"]
        assert inner["enableNodePublicIp"] is False and inner["subnet"]["id"].endswith("/compute")
    # A registry that nobody reaches cannot build images itself.
    (workspace,) = of_kind(found, "workspace")
    builder = workspace.body["properties"]["imageBuildCompute"]
    assert builder in [r.name for r in of_kind(found, "cluster")]
    assert not of_kind(resources(settings(private=False)), "private endpoint")


def test_access_is_by_identity() -> None:
    found = resources(settings())
    for account in found:
        if account.kind.startswith("storage account"):
            assert account.body["properties"]["allowSharedKeyAccess"] is False
    for store in of_kind(found, "datastore"):
        assert store.body["properties"]["credentials"] == {"credentialsType": "None"}
    granted = {r.name.partition(": ")[0] for r in of_kind(found, "role")}
    assert {"Storage Blob Data Reader", "Storage Blob Data Contributor"} <= granted
    assert "Owner" not in granted and "Contributor" not in granted


def test_dry_run_needs_no_account(capsys: pytest.CaptureFixture[str]) -> None:
    assert provision.run({**NAMES, "dry_run": True}) == 0
    out = capsys.readouterr().out
    assert "hbiWorkspace: true" in out and "name: Premium_LRS" in out
    assert "tenantId: <tenantId of" in out
    assert "The subscription is not given" in out


# Against a resource manager that answers


@pytest.mark.parametrize("private", [True, False])
def test_creates_then_leaves_alone(run, store: ArmStore, private: bool, capsys) -> None:
    assert run(private=private) == 0
    out = capsys.readouterr().out
    count = len(resources(settings(private=private)))
    assert f"{count} to create, 0 that differ, 0 unchanged." in out
    # The store refuses whatever comes before its parent or what it points to.
    assert [method for method, *_ in store.sent()] == ["PUT"] * count
    assert f"[{count}/{count}] creating cluster" in out
    assert "python -m distdl +experiment=... launcher=azureml" in out
    # References are resolved: the identity's principal, the subscription's tenant.
    principal = store.find("/vision-jobs")["properties"]["principalId"]
    roles = [r for key, r in store.resources.items() if "/roleassignments/" in key]
    assert roles and all(r["properties"]["principalId"] == principal for r in roles)
    assert "<" not in str(store.resources)

    assert run(private=private) == 0
    assert f"0 to create, 0 that differ, {count} unchanged." in capsys.readouterr().out
    assert store.sent() == []


def test_changes_only_what_differs(run, store: ArmStore, capsys) -> None:
    run()
    registry = next(k for k in store.resources if k.split("/")[-2] == "registries")
    store.resources[registry]["sku"]["name"] = "Basic"
    store.resources[registry]["properties"]["policies"] = {"set by": "somebody else"}
    store.resources[registry]["tags"] = {"owner": "me"}
    store.find("/computes/gpu-cluster")["tags"] = {"owner": "me"}
    store.sent()
    capsys.readouterr()
    assert run(compute__max_nodes=9) == 0
    out = capsys.readouterr().out
    assert "sku.name: Basic -> Premium" in out
    assert "maxNodeCount: 4 -> 9" in out
    assert "0 to create, 2 that differ" in out
    (patch, _, changed), (put, where, whole) = store.sent()
    assert (patch, changed) == ("PATCH", {"sku": {"name": "Premium"}})
    assert put == "PUT" and where.endswith("/computes/gpu-cluster")
    assert whole["properties"]["properties"]["scaleSettings"]["maxNodeCount"] == 9
    # What others have set is still there, where Azure takes a change and where it takes the whole.
    assert store.find("/computes/gpu-cluster")["tags"] == {"owner": "me"}
    assert store.resources[registry]["properties"]["policies"] == {"set by": "somebody else"}
    assert store.resources[registry]["tags"] == {"owner": "me"}


def test_what_azure_cannot_change_is_refused_before_anything_is_made(run, store, capsys) -> None:
    run()
    container = next(k for k in store.resources if k.endswith("/containers/data"))
    del store.resources[container]
    store.sent()
    with pytest.raises(UserError) as caught:
        run(compute__tier="dedicated", compute__vm_size="Standard_ND96asr_v4")
    said = str(caught.value)
    assert "vmSize: STANDARD_NC24ADS_A100_V4 -> Standard_ND96asr_v4" in said
    assert "vmPriority: LowPriority -> Dedicated" in said
    assert "give it another name (compute.name=NAME)" in said
    assert "cannot change  cluster" in capsys.readouterr().out
    assert store.sent() == []
    assert run(compute__name="other", compute__tier="dedicated") == 0
    assert len(store.sent()) == 2  # the container and the new cluster


def test_others_in_the_group_are_named_and_left(run, store: ArmStore, capsys) -> None:
    run()
    theirs = f"/subscriptions/{SUBSCRIPTION}/resourceGroups/ml/providers/Microsoft.Web/sites/shop"
    store.resources[theirs.lower()] = {"id": theirs, "name": "shop", "type": "Microsoft.Web/sites"}
    capsys.readouterr()
    run()
    assert "Not touched in this group: sites shop." in capsys.readouterr().out
    assert theirs.lower() in store.resources


def test_a_failure_on_the_way_says_what_stays(run, store: ArmStore, capsys) -> None:
    store.failures["/computes/gpu-cluster"] = (400, "ClusterCoreQuotaReached", "0 of 96 cores")
    assert run() == 1
    said = capsys.readouterr().err
    assert "cluster gpu-cluster: ClusterCoreQuotaReached: 0 of 96 cores" in said
    assert "ask for quota" in said and "are done and stay" in said
    store.failures.clear()
    store.sent()
    assert run() == 0
    assert len(store.sent()) == 1  # it goes on where it stopped


def test_a_role_that_is_granted_already(run, store: ArmStore, capsys) -> None:
    run()
    role = next(k for k in store.resources if "/roleassignments/" in k)
    found = store.resources.pop(role)
    store.failures[found["id"]] = (409, "RoleAssignmentExists", "exists")
    assert run() == 0
    assert "is there already" in capsys.readouterr().out


def test_asks_for_yes(run, store: ArmStore, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    with pytest.raises(UserError, match="confirm=true"):
        run(confirm=False)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda prompt: "y")
    assert run(confirm=False) == 1
    assert "Nothing was done." in capsys.readouterr().out
    assert store.sent() == []
    monkeypatch.setattr("builtins.input", lambda prompt: "yes")
    assert run(confirm=False) == 0
    assert store.sent()


def test_which_subscription(run, store: ArmStore, monkeypatch) -> None:
    store.subscriptions = [SUBSCRIPTION, SUBSCRIPTION.replace("1", "2")]
    with pytest.raises(UserError, match="you can see 2 subscriptions"):
        run()
    store.subscriptions = []
    with pytest.raises(UserError, match="you can see no subscription"):
        run()
    with pytest.raises(UserError, match="there is no subscription"):
        run(subscription=SUBSCRIPTION)
    store.subscriptions = [SUBSCRIPTION]
    monkeypatch.setenv("AZURE_SUBSCRIPTION_ID", SUBSCRIPTION)
    assert run() == 0


def test_nobody_is_logged_in(store: ArmStore, monkeypatch) -> None:
    monkeypatch.setenv("AZURE_TOKEN_CREDENTIALS", "AzureCliCredential")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="nobody is logged in to Azure here") as caught:
        provision.run({**PUBLIC, "resource_manager": store.url})
    assert "az login" in str(caught.value)


def test_a_server_that_is_not_there(store: ArmStore) -> None:
    closed = "https://127.0.0.1:9"
    with pytest.raises(UserError, match="Azure does not answer"):
        provision.run({**PUBLIC, "resource_manager": closed, "subscription": SUBSCRIPTION}, Token())


def test_from_the_command_line_as_whoever_az_knows(run, store: ArmStore, tmp_path: Path) -> None:
    """The real credential chain, in a process of its own; only `az` is a script."""
    run()
    del store.resources[next(k for k in store.resources if k.endswith("/containers/results"))]
    store.sent()
    az = tmp_path / "az"
    token = '{"accessToken": "from-az", "expiresOn": "2099-01-01 00:00:00.000000"}'
    az.write_text(f"#!/bin/sh\necho '{token}'\n")
    az.chmod(0o755)
    code = "import sys; from distdl.commands.provision import main; sys.exit(main(sys.argv[1:]))"
    words = ["resource_group=ml", "workspace=vision", "private=false", "confirm=true"]
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, "-c", code, "azureml", *words, f"resource_manager={store.url}"],
        env={**os.environ, "PATH": path, "AZURE_TOKEN_CREDENTIALS": "AzureCliCredential"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[1/1] creating blob container" in done.stdout
    assert "from-az" not in done.stdout + done.stderr
    assert [method for method, *_ in store.sent()] == ["PUT"]


# Comparing


@pytest.mark.parametrize(
    ("wanted", "actual"),
    [
        ({"a": 1}, {"a": 1, "added by Azure": 2}),
        ({"location": "eastus"}, {"location": "East US"}),
        ({"idle": "PT300S"}, {"idle": "PT5M"}),
        ({"idle": "PT86400S"}, {"idle": "P1D"}),
        ({"size": "Standard_NC6"}, {"size": "STANDARD_NC6"}),
        ({"/subscriptions/A/x": {}}, {"/subscriptions/a/X": {"clientId": 1}}),
        ({"list": [{"name": "a"}]}, {"list": [{"name": "b"}, {"name": "a", "more": 1}]}),
        ({"list": []}, {"list": [1]}),
        ({"list": []}, {}),
    ],
)
def test_no_difference(wanted: Any, actual: Any) -> None:
    assert list(differences(wanted, actual)) == []


@pytest.mark.parametrize(
    ("wanted", "actual"),
    [
        ({"a": 1}, {}),
        ({"a": True}, {"a": 1}),
        ({"a": {"b": 1}}, {"a": None}),
        ({"idle": "PT300S"}, {"idle": "PT6M"}),
        ({"list": [{"name": "a", "x": 1}]}, {"list": [{"name": "a", "x": 2}]}),
    ],
)
def test_difference(wanted: Any, actual: Any) -> None:
    assert len(list(differences(wanted, actual))) == 1


def test_merging_takes_nothing_away() -> None:
    actual = {"a": {"theirs": 1, "x": 1}, "list": [{"name": "theirs"}, {"name": "ours", "x": 1}]}
    wanted = {"a": {"x": 2}, "list": [{"name": "ours", "x": 2}, {"name": "new"}]}
    assert merge(actual, wanted) == {
        "a": {"theirs": 1, "x": 2},
        "list": [{"name": "theirs"}, {"name": "ours", "x": 2}, {"name": "new"}],
    }


# The verb


def test_the_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert verb.main(["--help"]) == 0
    assert "high_business_impact: true" in capsys.readouterr().out
    assert verb.main(["azureml", "sas", "--help"]) == 0
    assert "days" in capsys.readouterr().out
    assert verb.main(["azureml", "resource_group=ml", "workspace=vision", "dry_run=true"]) == 0
    assert verb.main(["azureml", "resource_group=ml", "workspace=v12", "compute={max_nodes: 2}",
                         "users=[a,b]", "dry_run=true"]) == 0  # fmt: skip
    assert "maxNodeCount: 2" in capsys.readouterr().out
    with pytest.raises(UserError, match="is no place that can be provisioned"):
        verb.main(["slurm"])
    with pytest.raises(UserError, match="sets one value here"):
        verb.main(["azureml", "workspace=a,b"])


def test_from_distdls_own_command(command: Callable[..., Said]) -> None:
    shown = command("provision", "azureml", "resource_group=ml", "workspace=v12", "dry_run=true")
    assert shown.code == 0 and "# 1 resource group ml" in shown.out
    refused = command("provision", "azureml", "workspase=x", "resource_group=ml")
    assert refused.code == 2 and "Traceback" not in refused.err
    assert "distdl: 2 problems, nothing was started" in refused.err
    assert "did you mean workspace?" in refused.err


def test_the_verbs_help_needs_neither_azure_nor_torch() -> None:
    code = (
        "import sys\n"
        "for name in ('azure', 'torch', 'lightning'): sys.modules[name] = None\n"
        "from distdl.commands import provision\n"
        "sys.exit(provision.main(['azureml', '--help']) or provision.main("
        "['azureml', 'resource_group=ml', 'workspace=vision', 'dry_run=true']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_without_azures_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "azure.identity", None)
    with pytest.raises(UserError, match=r"distdl\[azure\]"):
        provision.run(PUBLIC)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["account=x"], "container: missing"),
        (["account=x", "container=c", "days=8"], "8 is no number of days from 1 to 7"),
        (["account=x", "container=c", "day=1"], "did you mean days?"),
        (["account=x", "container=c", "endpoint=http://x"], "is no https address"),
    ],
)
def test_sas_refuses(words: list[str], said: str) -> None:
    with pytest.raises(UserError) as caught:
        verb.main(["azureml", "sas", *words])
    assert said in str(caught.value)
