"""Weights by their names, from real servers on loopback. The hubs themselves cannot be reached."""

import hashlib
import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save

from distdl.models import published
from distdl.models.weights import read_weights
from distdl.util.errors import UserError
from tests.publisher import pickled, publishing

TIMMS = "timm:test_resnet.r160_in1k"
TIMMS_PATH = f"/timm/test_resnet.r160_in1k/resolve/{{}}/{published.FILES[0]}"
WEIGHTS = {"fc.weight": torch.arange(6.0).reshape(2, 3)}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hugging Face for this process, with the weights of `TIMMS`."""
    from huggingface_hub import constants

    from tests.publisher import COMMIT

    with publishing() as server:
        server.hub = True
        for revision in ("main", COMMIT):
            server.files[TIMMS_PATH.format(revision)] = save(WEIGHTS)
        use(server.url, monkeypatch)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setenv("HF_TOKEN", "hf_of_the_user")
        yield server


def use(url: str, monkeypatch) -> None:
    """As HF_ENDPOINT does, which is read when the client is imported."""
    from huggingface_hub import constants

    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", url)


@pytest.fixture
def torchvisions(tmp_path, monkeypatch):
    """A mirror of torchvision's server, with one file, whose name has its hash."""
    from torchvision import models

    data = pickled(WEIGHTS)
    url = f"{published.PUBLISHER}/tiny-{hashlib.sha256(data).hexdigest()[:8]}.pth"
    monkeypatch.setattr(models, "get_weight", lambda name: SimpleNamespace(url=url))
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "torch"))
    with publishing() as server:
        server.files[url.removeprefix(published.PUBLISHER)] = data
        monkeypatch.setenv(published.MIRROR, server.url)
        yield server


def refused(name: str) -> str:
    with pytest.raises(UserError) as caught:
        published.fetched(name)
    return str(caught.value)


def left(folder: Path) -> list[str]:
    """What of files of weights a cache has kept, whole or not."""
    found = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 300]
    return [path.name for path in found]


def test_timms_are_fetched_once_and_read_as_safetensors(hub):
    first = published.fetched(TIMMS)
    asked = len(hub.requests)
    again = published.fetched(TIMMS)
    assert first == again
    assert len(hub.requests) == asked > 0
    assert first["sha256"] == hashlib.sha256(save(WEIGHTS)).hexdigest()
    assert first["file"].startswith("test_resnet.r160_in1k-")
    assert read_weights(first["path"])["fc.weight"].equal(WEIGHTS["fc.weight"])


def test_a_token_does_not_follow_to_another_host(hub):
    with publishing() as elsewhere:
        hub.elsewhere = elsewhere
        elsewhere.files = {f"/signed{path}": data for path, data in hub.files.items()}
        published.fetched(TIMMS)
        assert {token for *_, token in hub.requests} == {"Bearer hf_of_the_user"}
        assert [token for *_, token in elsewhere.requests] == [None]


def test_bytes_of_another_hash_are_not_kept(hub, tmp_path):
    hub.stated = 64 * "a"
    assert "has another hash than it states: it is not kept" in refused(TIMMS)
    assert left(tmp_path) == []


def test_a_damaged_file_in_the_cache_is_fetched_again(hub):
    path = Path(published.fetched(TIMMS)["path"])
    path.resolve().write_bytes(b"cut")
    assert read_weights(published.fetched(TIMMS)["path"])["fc.weight"].equal(WEIGHTS["fc.weight"])


def test_half_a_file_is_not_taken(hub, tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between Hugging Face's five tries
    hub.cut = 100
    refused(TIMMS)
    hub.cut = 0
    assert read_weights(published.fetched(TIMMS)["path"])["fc.weight"].equal(WEIGHTS["fc.weight"])


@pytest.mark.parametrize("status", [401, 403, 500])
def test_a_hub_that_refuses_is_quoted(hub, status):
    hub.status = status
    text = refused(TIMMS)
    assert f"HTTP {status}" in text
    assert ("it needs a token, or does not take yours" in text) == (status in (401, 403))
    assert "model.weights=FILE" in text
    assert text.count("model.weights: ") == 1


def test_weights_that_the_hub_does_not_have(hub):
    hub.files.clear()
    assert "has none of model.safetensors, pytorch_model.bin" in refused(TIMMS)


def test_offline_there_is_one_message(hub, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in refused(TIMMS)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        use(f"http://127.0.0.1:{unused.getsockname()[1]}", monkeypatch)
        assert "cannot be reached" in refused(TIMMS)


def test_a_pickle_is_read_without_running_its_code(hub, tmp_path):
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "ran"),)

    for path in [*hub.files]:
        hub.files[path.replace(*published.FILES)] = pickled({"fc.weight": Bomb()})
        del hub.files[path]
    path = published.fetched(TIMMS)["path"]
    with pytest.raises(UserError):
        read_weights(path)
    assert not (tmp_path / "ran").exists()


def test_torchvisions_are_fetched_once(torchvisions):
    first = published.fetched("torchvision:Tiny_Weights.DEFAULT")
    assert published.fetched("torchvision:Tiny_Weights.DEFAULT") == first
    assert [method for method, *_ in torchvisions.requests] == ["GET"]
    assert read_weights(first["path"])["fc.weight"].equal(WEIGHTS["fc.weight"])


def test_torchvisions_that_are_cut_off_are_not_kept(torchvisions, tmp_path):
    torchvisions.cut = 100
    assert "is damaged or cut off" in refused("torchvision:Tiny_Weights.DEFAULT")
    assert left(tmp_path) == []


def test_torchvisions_of_another_hash_are_not_kept(torchvisions, tmp_path):
    torchvisions.files = dict.fromkeys(torchvisions.files, 1000 * b"x")
    assert "is damaged or cut off" in refused("torchvision:Tiny_Weights.DEFAULT")
    assert left(tmp_path) == []


def test_a_server_of_torchvisions_that_refuses_or_is_away(torchvisions, monkeypatch):
    torchvisions.files.clear()
    assert "answers HTTP 404" in refused("torchvision:Tiny_Weights.DEFAULT")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv(published.MIRROR, f"http://127.0.0.1:{unused.getsockname()[1]}")
        assert "cannot be reached" in refused("torchvision:Tiny_Weights.DEFAULT")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("timm:resnet18.a1_in1", "did you mean resnet18.a1_in1k?"),
        ("timm:nothing_like_it", "resnet18.a1_in1k is one"),
        (
            "torchvision:ResNet50_Weights.IMAGENET1K_V3",
            "did you mean ResNet50_Weights.IMAGENET1K_V",
        ),
        ("torchvision:resnet50", "ResNet50_Weights.IMAGENET1K_V2 is one"),
        ("timm:vit_huge_patch16_gap_448.in1k_ijepa", "states no hash"),
    ],
)
def test_a_name_that_there_is_not(name, hint):
    assert hint in refused(name)


def test_a_mirror_with_a_password_is_shown_without_it(torchvisions, monkeypatch):
    address = torchvisions.url.replace("http://", "http://me:secret@")
    monkeypatch.setenv(published.MIRROR, address)
    assert "secret" not in refused("torchvision:Tiny_Weights.DEFAULT")
