"""`python -m distdl provision azureml`: the plan, what is sent, and that nothing is deleted."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from distdl.cli import provision as verb
from distdl.launchers.azureml.provision import arm, command
from distdl.launchers.azureml.provision.diff import merge
from distdl.launchers.azureml.provision.resources import resources
from distdl.launchers.azureml.provision.settings import read
from distdl.util.errors import UserError
from tests.cluster.arm_store import SUBSCRIPTION, ArmStore
from tests.cluster.azurite import write_certificate
from tests.cluster.https import serve
from tests.conftest import ROOT, check_golden
from tests.written import program

pytest.importorskip("azure.mgmt.core")
credentials = pytest.importorskip("azure.core.credentials")
TOKENS = SimpleNamespace(get_token=lambda *_, **__: credentials.AccessToken("token", 4102444800))
NAMES = {"resource_group": "ml", "workspace": "vision"}
PUBLIC = {**NAMES, "private": False}
DEDICATED = {"compute.tier": "dedicated"}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("AZURE_", "ARM_"))]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("arm")
    store = ArmStore()
    trusted, key = folder / "cert.pem", folder / "key.pem"
    write_certificate(trusted, key)
    store.url, end = serve(store, trusted, key)
    yield store, trusted
    end()


@pytest.fixture
def store(server, monkeypatch):
    """An empty Azure."""
    store, trusted = server
    vars(store).update(vars(ArmStore()) | {"url": store.url})
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(trusted))
    monkeypatch.setattr(arm, "POLLING_INTERVAL", 0.01)
    return store


@pytest.fixture
def run(store):
    def run(**overrides):
        settings = {**PUBLIC, "resource_manager": store.url, "confirm": True}
        code, text = command.run({**settings, **overrides}, TOKENS)
        print(text)
        return code

    return run


def settings(**overrides):
    return read({**NAMES, "subscription": SUBSCRIPTION, **overrides})


def forget(store, part):
    """Removes one resource behind distdl's back."""
    store.sent()
    return store.resources.pop(next(key for key in store.resources if part in key))


# Settings, or the words of a command; the Problem's path, and the fact in its text.
SAS = ["azureml", "sas", "account=x", "container=c"]
REFUSED = [
    ({"workspase": "v12"}, "workspase", "did you mean workspace?"),
    ({"compute": 3}, "compute", "is a section\n    write one of compute.name,"),
    ({"resource_group": None}, "resource_group", "missing\n    write resource_group=NAME"),
    ({"workspace": "a b"}, "workspace", "'a b' is not allowed by Azure"),
    ({"compute.min_nodes": 9}, "compute.max_nodes", "4 is less than min_nodes (9)"),
    ({"compute.vm_size": "Standard_NC6"}, "compute.vm_size", "retired Standard_NC6 on 2023-08-31"),
    ({"build_compute.name": "gpu-cluster"}, "build_compute.name", "the name of the other cluster"),
    ({"registry.sku": "Basic"}, "registry.sku", "need a Premium registry, not Basic"),
    ({"network.address_space": "172.16.0.0/12"}, "network.address_space", "InfiniBand uses"),
    ({"network.compute_subnet": "10.9.0.0/24"}, "network.compute_subnet", "not inside 10.66.0.0"),
    ({"network.compute_subnet": "10.66.0.1/24"}, "network.compute_subnet", "has host bits"),
    ({"network.endpoint_subnet": "10.66.0.0/24"}, "network.endpoint_subnet", "overlaps 10.66.0.0"),
    ({"resource_manager": "http://example.com"}, "resource_manager", "not an https address"),
    (["slurm"], "slurm", "can provision"),
    (["azureml", "workspace=a,b"], "workspace", "must set one value"),
    (SAS[:3], "container", "missing"),
    ([*SAS, "days=8"], "days", "8 is not less than or"),
]


@pytest.mark.parametrize(("given", "path", "fact"), REFUSED)
def test_refused(given, path, fact):
    with pytest.raises(UserError) as caught:
        settings(**given) if isinstance(given, dict) else verb.main(given)
    assert [p.path for p in caught.value.problems] == [path]
    assert fact in str(caught.value)


def test_generated_names_differ_by_group_and_are_short():
    def names(**overrides):
        made = resources(settings(**overrides))
        return {r.name for r in made if r.kind.startswith(("storage account", "key vault"))}

    assert not names() & names(resource_group="other")
    long = names(workspace="A-very-long-name-of-a-workspace33")
    assert all(len(name) <= 24 and name.isalnum() for name in long)


@pytest.mark.parametrize(("name", "overrides"), [("azureml", {}), ("azureml_public", PUBLIC)])
def test_golden(name, overrides, pytestconfig):
    text = command.render(settings(**overrides, users=["user-object-id"])) + "\n"
    check_golden(pytestconfig, ROOT / f"tests/golden/launchers/provision_{name}.txt", text)


@pytest.mark.parametrize("private", [True, False])
def test_creates_once(run, store, private, capsys):
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
    assert roles
    assert all(r["properties"]["principalId"] == principal for r in roles)
    assert "<" not in str(store.resources)

    assert run(private=private) == 0
    assert f"0 to create, 0 that differ, {count} unchanged." in capsys.readouterr().out
    assert store.sent() == []


def test_changes_only_what_differs(run, store, capsys):
    run()
    registry = next(r for k, r in store.resources.items() if k.split("/")[-2] == "registries")
    registry["sku"]["name"] = "Basic"
    registry["properties"]["policies"] = {"set by": "somebody else"}
    store.find("/computes/gpu-cluster")["tags"] = registry["tags"] = {"owner": "me"}
    theirs = f"/subscriptions/{SUBSCRIPTION}/resourceGroups/ml/providers/Microsoft.Web/sites/shop"
    store.resources[theirs.lower()] = {"id": theirs, "name": "shop", "type": "Microsoft.Web/sites"}
    store.sent()
    assert run(**{"compute.max_nodes": 9}) == 0
    out = capsys.readouterr().out
    for text in ("name: Basic -> Premium", "NodeCount: 4 -> 9", "0 to create, 2 that differ"):
        assert text in out
    (patch, _, changed), (put, address, body) = store.sent()
    assert (patch, changed) == ("PATCH", {"sku": {"name": "Premium"}})
    assert put == "PUT"
    assert address.endswith("/computes/gpu-cluster")
    assert body["properties"]["properties"]["scaleSettings"]["maxNodeCount"] == 9
    # What others have set is kept, by a PATCH and by a PUT of the complete body.
    registry = store.find(f"/{registry['name']}")
    assert registry["properties"]["policies"] == {"set by": "somebody else"}
    assert store.find("/computes/gpu-cluster")["tags"] == registry["tags"] == {"owner": "me"}
    assert "Not touched in this group: sites shop." in out
    assert theirs.lower() in store.resources


def test_merging_takes_nothing_away():
    """From lists either, whose items are known by name."""
    actual = {"a": {"theirs": 1, "x": 1}, "list": [{"name": "theirs"}, {"name": "ours", "x": 1}]}
    wanted = {"a": {"x": 2}, "list": [{"name": "ours", "x": 2}, {"name": "new"}]}
    merged = [{"name": "theirs"}, {"name": "ours", "x": 2}, {"name": "new"}]
    assert merge(actual, wanted) == {"a": {"theirs": 1, "x": 2}, "list": merged}


def test_what_azure_cannot_change_is_refused_before_anything_is_made(run, store, capsys):
    run()
    forget(store, "/containers/data")
    with pytest.raises(UserError, match="vmPriority: LowPriority -> Dedicated") as caught:
        run(**DEDICATED, **{"compute.vm_size": "Standard_ND96asr_v4"})
    assert "vmSize: STANDARD_NC24ADS_A100_V4 -> Standard_ND96asr_v4" in str(caught.value)
    assert "give it another name (compute.name=NAME)" in str(caught.value)
    assert "cannot change  cluster" in capsys.readouterr().out
    assert store.sent() == []
    assert run(**DEDICATED, **{"compute.name": "other"}) == 0
    assert len(store.sent()) == 2  # the container and the new cluster


def test_a_failed_step_is_named_and_the_next_command_resumes(run, store, capsys):
    store.failures["/computes/gpu-cluster"] = (400, "ClusterCoreQuotaReached", "0 of 96 cores")
    assert run() == 1
    message = capsys.readouterr().err
    assert message.startswith("cluster gpu-cluster: ")
    for text in ("ClusterCoreQuotaReached", "0 of 96 cores", "request quota", "are done"):
        assert text in message
    store.failures.clear()
    store.sent()
    assert run() == 0
    assert len(store.sent()) == 1
    # A role that somebody has granted by hand, under another GUID.
    role = forget(store, "/roleassignments/")
    store.failures[role["id"]] = (409, "RoleAssignmentExists", "exists")
    assert run() == 0


def test_asks_for_yes(run, store, monkeypatch):
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    with pytest.raises(UserError, match="confirm=true"):
        run(confirm=False)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    for answer, code in (("y", 1), ("yes", 0)):
        monkeypatch.setattr("builtins.input", lambda prompt, answer=answer: answer)
        assert run(confirm=False) == code
        assert bool(store.sent()) == (code == 0)


def test_which_subscription_and_who(run, store, monkeypatch, tmp_path, capsys):
    other = SUBSCRIPTION.replace("1", "2")
    for visible, overrides, text in (
        ([SUBSCRIPTION, other], {}, "you can see 2 subscriptions"),
        ([], {}, "you can see no subscription"),
        ([], {"subscription": SUBSCRIPTION}, "there is no subscription"),
    ):
        store.subscriptions = visible
        with pytest.raises(UserError, match=f"^subscription: {text}"):
            run(**overrides)
    store.subscriptions = [SUBSCRIPTION]
    with monkeypatch.context() as patch:
        patch.setattr("time.sleep", lambda seconds: None)  # before the SDK tries again
        with pytest.raises(UserError, match="Azure does not answer"):
            run(resource_manager="https://127.0.0.1:9", subscription=SUBSCRIPTION)
    monkeypatch.setenv("AZURE_SUBSCRIPTION_ID", SUBSCRIPTION)
    # The real credential chain; only `az` is a script.
    words = ["resource_group=ml", "workspace=vision", "private=false", "confirm=true"]
    words = ["azureml", *words, f"resource_manager={store.url}"]
    monkeypatch.setenv("AZURE_TOKEN_CREDENTIALS", "AzureCliCredential")
    token = '{"accessToken": "from-az", "expiresOn": "2099-01-01 00:00:00.000000"}'
    program(tmp_path / "az", f"echo '{token}'")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert verb.main(words).exit_code == 0
    shown = capsys.readouterr()
    assert "] creating blob container" in shown.out
    assert "from-az" not in shown.out + shown.err


def test_the_verb_needs_neither_azure_nor_torch(command, monkeypatch):
    dry = ["resource_group=ml", "workspace=v12", "compute={max_nodes: 2}", "users=[a,b]"]
    code = (
        "import sys\n"
        "for name in ('azure', 'torch', 'lightning'): sys.modules[name] = None\n"
        "from distdl.cli import provision\n"
    )
    for words in (["--help"], ["azureml", "sas", "--help"], ["azureml", *dry, "dry_run=true"]):
        code += f"assert provision.main({words}).exit_code == 0\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for text in ("high_business_impact: true", "days         1 to 7", "# 1 resource group ml"):
        assert text in done.stdout
    assert "maxNodeCount: 2" in done.stdout
    assert "The subscription is not set" in done.stdout
    monkeypatch.setitem(sys.modules, "azure.identity", None)
    refused = command("provision", "azureml", "resource_group=ml", "workspace=vis").err
    assert "distdl[azure]" in refused
    assert "Traceback" not in refused


@pytest.mark.parametrize(("word", "near"), [("price", "prices"), ("sass", "sas")])
def test_a_misspelt_word_is_told_the_nearest(command, word, near):
    refused = command("provision", "azureml", word)
    assert refused.code == 2
    assert f"{word}: is neither a word of provision azureml nor key=value" in refused.err
    assert f"did you mean: python -m distdl provision azureml {near}\n" in refused.err
