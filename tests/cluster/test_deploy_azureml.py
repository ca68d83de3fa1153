"""`distdl deploy azureml` with the real SDK, over https to a stand-in for Azure in which the
uploaded model answers. Not seen here: Azure itself, its images and its load balancer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.arm import why_not, work_with
from tests.cluster.arm_endpoints import AzureEndpoints
from tests.served import model_folder, run_folder

pytestmark = [
    pytest.mark.xdist_group("azureml"),
    pytest.mark.filterwarnings("ignore"),  # the SDK's own, hundreds of them
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]
NAME = "deploy.name=flowers"
WORKSPACE = (
    "launcher.subscription=11111111-2222-3333-4444-555555555555",
    *("launcher.resource_group=group", "launcher.workspace=space"),
)
BATCH = ("--batch", "launcher.compute=cpu")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three models: of a run, and two folders."""
    run = run_folder(tmp_path_factory.mktemp("run") / "r")
    folder = tmp_path_factory.mktemp("models")
    return [run, *(model_folder(folder / card, card) for card in ("second", "third"))]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AzureEndpoints]:
    azure = AzureEndpoints(tmp_path_factory.mktemp("azure"))
    yield azure
    azure.close()


@pytest.fixture
def azure(shared: AzureEndpoints, monkeypatch: pytest.MonkeyPatch) -> AzureEndpoints:
    work_with(shared, monkeypatch)
    shared.resources.clear()
    shared.requests.clear()
    shared.broken = ""
    return shared


@pytest.fixture
def deploy(azure: AzureEndpoints, command) -> Callable[..., Any]:
    def run(*words: Any, code: int = 0) -> Any:
        azure.requests.clear()
        output = command("deploy", "azureml", *map(str, words), NAME, *WORKSPACE)
        assert output.code == code, output
        return output

    return run


def sent(azure: AzureEndpoints) -> list[str]:
    """What changed something, as method and kind, in this order."""
    changes = [(m, p.split("/")) for m, p, _ in azure.requests if m in ("PUT", "PATCH", "DELETE")]
    return [f"{method} {path[-2]}" for method, path in changes]


def deployments(azure: AzureEndpoints, kind: str = "online") -> set[str]:
    return {name for name, r in azure.stored("deployments").items() if f"/{kind}Endp" in r["id"]}


def test_a_first_model_answers_before_it_gets_the_traffic(azure, models, deploy) -> None:
    output = deploy(models[0])
    (name,) = deployments(azure)
    assert output.out.startswith(f"flowers: {name} answers\n")
    assert f"POST {azure.url}/score/flowers, with a key: az ml" in output.out
    assert azure.traffic("flowers") == {name: 100}
    assert sent(azure) == [
        *("PUT versions", "PUT versions"),  # model and environment
        *("PUT onlineEndpoints", "PUT versions", "PUT deployments", "PUT onlineEndpoints"),
    ]
    (asked,) = [n for n, (_, path, _) in enumerate(azure.requests) if path.startswith("/score/")]
    moved = [
        n for n, (m, p, _) in enumerate(azure.requests) if m == "PUT" and p.endswith("flowers")
    ]
    assert moved[0] < asked < moved[1]
    sent_deployment = azure.stored("deployments")[name]
    assert sent_deployment["sku"] == {"name": "Default", "capacity": 1}
    properties = sent_deployment["properties"]
    assert properties["codeConfiguration"]["scoringScript"] == "score.py"
    (environment,) = [r for k, r in azure.resources.items() if "/environments/" in k]
    conda = environment["properties"]["condaFile"]
    assert "azureml-inference-server-http" in conda and "pydantic" not in conda


def test_the_same_model_again_changes_nothing(azure, models, deploy) -> None:
    deploy(models[0])
    (name,) = deployments(azure)
    assert deploy(models[0]).out.startswith(f"flowers: {name} answers already\n")
    assert sent(azure) == []


def test_the_model_before_stays_for_one_rollback(azure, models, deploy) -> None:
    names = []
    for model in models:
        deploy(model)
        names += deployments(azure) - {*names}
        assert azure.traffic("flowers") == {names[-1]: 100}
    first, second, third = names
    assert deploy(models[2]).out.startswith(f"flowers: {third} answers already\n")
    assert deployments(azure) == {second, third}
    output = deploy("deploy.rollback=true")
    assert output.out == f"flowers: {second} answers, and {third} no more\n"
    assert azure.traffic("flowers") == {second: 100}
    assert deploy(models[2]).out.startswith(f"flowers: {third} answers\n")
    assert sent(azure) == ["PUT onlineEndpoints"], "it is there still"
    deploy(models[0], "deploy.keep=0")
    assert deployments(azure) == {first}
    said = deploy("deploy.rollback=true", code=2).err
    assert "deploy.rollback: flowers has no other models" in said


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("answers", "the test request: the answer was green (0.95"),
        ("creation", "the container has crashed"),
    ],
)
def test_a_model_that_fails_is_removed_and_no_traffic_moves(
    broken, said, azure, models, deploy
) -> None:
    deploy(models[0])
    (name,) = deployments(azure)
    azure.broken = broken
    failed = deploy(models[1], code=1)
    assert said in failed.err and "ModuleNotFoundError: the last line of the log" in failed.err
    assert "1 problem, traffic stays where it was" in failed.err and "was removed" in failed.err
    assert azure.traffic("flowers") == {name: 100} and deployments(azure) == {name}
    assert sent(azure)[-1] == "DELETE deployments"


def test_an_interrupted_creation_leaves_no_deployment(azure, models, deploy, monkeypatch) -> None:
    from azure.ai.ml.operations import OnlineEndpointOperations

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(OnlineEndpointOperations, "invoke", interrupt)
    assert "interrupted" in deploy(models[0], code=130).err
    assert deployments(azure) == set() and sent(azure)[-1] == "DELETE deployments"


def test_deletion_asks_and_then_deletes_everything(azure, models, deploy, monkeypatch) -> None:
    deploy(models[0])
    assert "add --yes" in deploy("--delete", code=2).err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda prompt: "no")
    assert deploy("--delete", code=1).out == "Nothing was deleted.\n"
    assert len(deployments(azure)) == 1
    assert deploy("--delete", "--yes").out.startswith("flowers was deleted")
    assert not azure.stored("onlineEndpoints") and not deployments(azure)
    assert "there is no endpoint flowers" in deploy("--delete", "--yes", code=2).err


def test_an_endpoint_of_somebody_else_is_left_alone(azure, models, deploy) -> None:
    deploy(models[0])
    (endpoint,) = azure.stored("onlineEndpoints").values()
    endpoint["tags"] = {}
    for words in ([models[1]], ["--delete", "--yes"], ["deploy.rollback=true"]):
        assert "that distdl did not create" in deploy(*words, code=2).err
        assert sent(azure) == []


def test_a_batch_endpoint_has_the_new_model_as_its_default(azure, models, deploy) -> None:
    names = []
    for model in models:
        deploy(model, *BATCH)
        names += deployments(azure, "batch") - {*names}
        (endpoint,) = azure.stored("batchEndpoints").values()
        assert endpoint["properties"]["defaults"] == {"deploymentName": names[-1]}
    assert deployments(azure, "batch") == {*names[1:]}
    body = azure.stored("deployments")[names[-1]]["properties"]
    assert body["codeConfiguration"]["scoringScript"] == "batch_score.py"
    assert body["compute"].endswith("/computes/cpu") and body["miniBatchSize"] == 64
    deploy("deploy.rollback=true", "--batch")
    (endpoint,) = azure.stored("batchEndpoints").values()
    assert endpoint["properties"]["defaults"] == {"deploymentName": names[1]}
    assert deploy(models[1], *BATCH).out.startswith(f"flowers: {names[1]} answers already\n")
    deploy("--delete", "--yes", "--batch")
    assert not azure.stored("batchEndpoints")


@pytest.mark.parametrize("words", [(), BATCH])
def test_a_dry_run_contacts_nothing(words, azure, models, deploy) -> None:
    shown = deploy(models[0], "dry_run=true", *words).out
    assert azure.requests == []
    size = next(models[0].glob("exports/*/model.pt2")).stat().st_size
    for part in (
        "name: flowers",
        f"{size:,}  model.pt2",
        "price per hour: ",
        "Azure was not asked",
    ):
        assert part in shown
    price = "nothing while no job runs" if words else "(1 x Standard_DS3_v2; list price, East US"
    assert price in shown


def test_an_unknown_size_has_an_unknown_price(azure, models, deploy) -> None:
    shown = deploy(models[0], "dry_run=true", "deploy.instance_type=Standard_D99_v9").out
    assert "price per hour: not known to distdl" in shown
