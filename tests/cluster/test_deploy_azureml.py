"""`distdl deploy azureml` with the real SDK, over https to a stand-in for Azure in which the
uploaded model answers. Not seen here: Azure itself, its images and its load balancer."""

from __future__ import annotations

import json
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
    shared.broken = ""
    return shared


@pytest.fixture
def deploy(azure: AzureEndpoints, command) -> Callable[..., Any]:
    def run(*words: Any, code: int = 0) -> Any:
        azure.requests.clear()
        output = command("deploy", "azureml", *map(str, words), "--name", "flowers", *WORKSPACE)
        assert output.code == code, output
        return output

    return run


def deployments(azure: AzureEndpoints, kind: str = "online") -> set[str]:
    return {name for name, r in azure.stored("deployments").items() if f"/{kind}Endp" in r["id"]}


def test_the_order_of_models(azure, models, deploy) -> None:
    names: list[str] = []
    for model in models:
        output = deploy(model)
        names += deployments(azure) - {*names}
        assert output.out == f"{names[-1]} answers\n" and azure.traffic("flowers") == {
            names[-1]: 100
        }
        order = [path for method, path, _ in azure.requests if method in ("PUT", "POST")]
        (asked,) = [n for n, path in enumerate(order) if path.startswith("/score/")]
        moved = [n for n, path in enumerate(order) if path.endswith("/onlineEndpoints/flowers")]
        assert moved[-1] > asked > order.index(next(p for p in order if names[-1] in p))
    second, third = names[1:]
    assert deployments(azure) == {second, third}
    body = azure.stored("deployments")[third]
    assert body["sku"] == {"name": "Default", "capacity": 1}
    assert body["properties"]["codeConfiguration"]["scoringScript"] == "score.py"
    environments = [str(body) for key, body in azure.resources.items() if "/environments/" in key]
    assert "azureml-inference-server-http" in environments[0] and "pydantic" not in environments[0]
    assert deploy(models[2]).out == f"{third} answers\n"
    assert not [method for method, _, _ in azure.requests if method in ("PUT", "POST", "DELETE")]
    assert deploy("--rollback").out == f"{second} answers\n"
    assert azure.traffic("flowers") == {second: 100}
    assert deploy("--delete").out == "flowers was deleted\n"
    assert not azure.stored("onlineEndpoints") and not deployments(azure)
    assert "flowers has no other models" in deploy("--rollback", code=2).err


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        ("upload", "no right to write models"),
        ("creation", "the container has crashed"),
        ("answers", 'the answer was {"predictions"'),
    ],
)
def test_no_traffic_moves_to_a_model_that_fails(broken, expected, azure, models, deploy) -> None:
    deploy(models[0])
    (name,) = deployments(azure)
    azure.broken = broken
    failed = deploy(models[1], code=1)
    assert expected in failed.err and "1 problem, traffic stays where it was" in failed.err
    assert azure.traffic("flowers") == {name: 100} and deployments(azure) == {name}


def test_an_interrupted_command_leaves_no_deployment(azure, models, deploy, monkeypatch) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("distdl.launchers.deploying.check", interrupt)
    assert "interrupted" in deploy(models[0], code=130).err
    assert deployments(azure) == set()


def test_an_endpoint_of_somebody_else_is_left_alone(azure, models, deploy) -> None:
    deploy(models[0])
    (name,) = deployments(azure)
    (key,) = [key for key in azure.resources if key.endswith(name)]
    text = json.dumps(azure.resources.pop(key)).replace(name, "theirs")
    azure.resources[key.replace(name, "theirs")] = json.loads(text)
    for words in ([models[1]], ["--delete"], ["--rollback"]):
        assert "theirs, which distdl did not create" in deploy(*words, code=2).err
        assert not [method for method, _, _ in azure.requests if method in ("PUT", "DELETE")]


def test_a_batch_endpoint_has_the_new_model_as_its_default(azure, models, deploy) -> None:
    names: list[str] = []
    for model in models:
        deploy(model, *BATCH)
        names += deployments(azure, "batch") - {*names}
        (endpoint,) = azure.stored("batchEndpoints").values()
        assert endpoint["properties"]["defaults"] == {"deploymentName": names[-1]}
    assert deployments(azure, "batch") == {*names[1:]}
    body = azure.stored("deployments")[names[-1]]["properties"]
    assert body["codeConfiguration"]["scoringScript"] == "batch_score.py"
    assert body["compute"].endswith("/computes/cpu") and body["outputFileName"].endswith("jsonl")
    assert deploy("--rollback", "--batch").out == f"{names[1]} answers\n"
    deploy("--delete", "--batch")
    assert not azure.stored("batchEndpoints")


@pytest.mark.parametrize(
    ("words", "price"),
    [
        ((), "0.29 USD (1 x Standard_DS3_v2; list price, East US"),
        (("--instance-type", "Standard_D99_v9"), "not known to distdl"),
        (BATCH, "nothing while no job runs"),
    ],
)
def test_a_dry_run_contacts_nothing(words, price, azure, models, deploy) -> None:
    shown = deploy(models[0], "dry_run=true", *words).out
    assert azure.requests == [] and f"price per hour: {price}" in shown
    size = next(models[0].glob("exports/*/model.pt2")).stat().st_size
    for part in ("endpoint_name: flowers\n", f"{size:,}  model.pt2\n", "nothing was sent"):
        assert part in shown
