"""A real blob server (Azurite): stores, connections that break, `provision azureml sas`, and a
small ImageNet from its tars to a training. `jobs fetch` from it: test_azureml.py.
"""

import base64
import json
import os
import re
import shutil
import ssl
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from urllib.parse import parse_qsl

import pytest
from azure.core.credentials import AccessToken
from azure.core.exceptions import ServiceResponseError
from azure.storage.blob import BlobClient

from distdl.data import StoredImages
from distdl.datasets import reading
from distdl.datasets.format import MANIFEST
from distdl.datasets.reading import open_data_set
from distdl.launchers.azureml.provision import sas
from distdl.stores import StoreError, open_store
from distdl.stores import remote as remote_module
from tests.cluster.arm_store import TENANT
from tests.cluster.azurite import ACCOUNT, CONTAINER, Azurite, connection, needs_azurite
from tests.conftest import NETWORK, distdl, last_step, matrix_only, samples
from tests.drawn_coco import draw
from tests.miniature import CLASSES, imagenet
from tests.prepared import refusal

pytestmark = [needs_azurite, pytest.mark.xdist_group("azurite")]
STRING = "AZURE_STORAGE_CONNECTION_STRING"


@pytest.fixture(scope="module")
def azurite(tmp_path_factory):
    server = Azurite(tmp_path_factory.mktemp("azurite") / "data", "--oauth", "basic")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REQUESTS_CA_BUNDLE", str(server.certificate))
        patch.setenv("NO_PROXY", "127.0.0.1")
        for name in [name for name in os.environ if name.startswith("AZURE_")]:
            patch.delenv(name)
        yield server
    server.close()


@pytest.fixture
def account(azurite, monkeypatch):
    monkeypatch.setenv(STRING, connection(azurite.port))
    return f"azure://{azurite.new_container()}/images"


def test_files_are_stored_and_read_back(azurite, account, tmp_path, monkeypatch):
    """What is the same in every store: tests/unit/test_stores.py."""
    monkeypatch.setattr(remote_module, "PART", 1 << 18)
    store = open_store(account, patience=30)
    data = os.urandom(2_345_678)
    back = tmp_path / "back"
    (tmp_path / "source").write_bytes(data)
    sent, received = [], []
    store.upload(tmp_path / "source", "a/b.tar", sent.append)
    folder = {"hdi_isfolder": "true"}  # made by a mount
    azurite.client(account.split("/")[2]).upload_blob("images/a", b"", metadata=folder)
    store.download("a/b.tar", back, received.append)
    assert back.read_bytes() == data
    assert sum(sent) == sum(received) == len(data)
    assert list(store.names()) == ["a/b.tar"]
    assert list(store.names("b")) == []
    assert store.size("a/b.tar") == len(data)
    assert store.size("a/c.tar") is None
    with pytest.raises(StoreError, match="exists already"):
        store.upload(tmp_path / "source", "a/b.tar")
    (tmp_path / "other").write_bytes(data[::-1])

    def overtake(count):  # by a file of the same size
        if store.size("c.tar") is None:
            store.upload(tmp_path / "other", "c.tar")

    with pytest.raises(StoreError, match=r"c\.tar"):
        store.upload(tmp_path / "source", "c.tar", overtake)
    assert store.read("c.tar") == data[::-1]

    # Connections break: some before the first byte of a response, and some in the middle of it.
    reads = []
    read = ssl.SSLSocket.recv_into

    def recv_into(*arguments):
        reads.append(arguments)
        if len(reads) in (1, 2, 7, 12, 21, 33):
            raise ConnectionResetError
        return read(*arguments)

    monkeypatch.setattr(ssl.SSLSocket, "recv_into", recv_into)
    back.unlink()
    store.download("a/b.tar", back)
    assert back.read_bytes() == data
    assert len(reads) > 33


def test_a_file_that_changes_is_replaced_and_removed(account, tmp_path, monkeypatch):
    """As status and logs of a run on Kubernetes are; also in several blocks, and once the answer to
    a commit is lost."""
    monkeypatch.setattr(remote_module, "PART", 1 << 18)
    store = open_store(account, patience=30)
    file = tmp_path / "status.json"
    contents = (b"one", os.urandom(700_000), os.urandom(300_000), b"two", b"")
    for content in contents:
        file.write_bytes(content)
        store.replace(file, "run/status.json")
        assert store.read("run/status.json") == content
        assert store.size("run/status.json") == len(content)
    commit = BlobClient.commit_block_list
    lost = []

    def lose(client, *arguments, **more):
        answer = commit(client, *arguments, **more)
        if not lost:
            lost.append(answer)
            raise ServiceResponseError("the answer is lost")
        return answer

    monkeypatch.setattr(BlobClient, "commit_block_list", lose)
    file.write_bytes(contents[1])
    store.replace(file, "run/status.json")
    assert lost
    assert store.read("run/status.json") == contents[1]
    store.upload(file, "run/other.json")
    with pytest.raises(StoreError, match="exists already"):
        store.upload(file, "run/status.json")
    for _ in range(2):  # one that is gone is no error
        store.remove("run/status.json")
    assert [*store.names()] == ["run/other.json"]
    assert store.size("run/status.json") is None


class Identity:
    """Gives tokens like Entra's, which Azurite reads (`--oauth basic`)."""

    user = "12121212-3434-5656-7878-909090909090"

    def get_token(self, *scopes, **more):
        now = int(time.time())
        claims = {
            "iat": now - 60,
            "nbf": now - 60,
            "exp": now + 3600,
            "oid": self.user,
            "iss": f"https://sts.windows.net/{TENANT}/",
            "tid": TENANT,
        }
        claims["aud"] = "https://storage.azure.com"
        parts = (json.dumps(part).encode() for part in ({"alg": "none", "typ": "JWT"}, claims))
        coded = [base64.urlsafe_b64encode(part).rstrip(b"=") for part in parts]
        return AccessToken(b".".join([*coded, b"c2ln"]).decode(), now + 3600)


def test_a_link_and_what_it_opens(azurite, account, tmp_path, monkeypatch, capsys):
    """Azurite knows no signatures of a user, only those of an account's key."""
    endpoint = f"https://127.0.0.1:{azurite.port}/{ACCOUNT}"
    container = account.split("/")[2]
    (tmp_path / "file").write_text("content")
    open_store(account).upload(tmp_path / "file", "file")
    monkeypatch.delenv(STRING)
    base = f"{endpoint}/{container}/images"
    foreign = azurite.sas(CONTAINER)
    assert open_store(f"{base}?{azurite.sas(container)}").read("file") == b"content"
    refused = open_store(f"{base}?{foreign}", patience=0.5)
    with pytest.raises(StoreError, match=base) as error:
        refused.read("file")
    assert not error.value.transient
    for text in (str(error.value), repr(refused)):  # a signature is never shown
        assert foreign.partition("sig=")[2][:20] not in text
        assert "sig=" not in text.replace("sig=***", "")

    options = {"account": ACCOUNT, "container": container, "days": 2, "endpoint": endpoint}
    link = sas.run(options, Identity())
    note = capsys.readouterr().err
    address, _, signed = link.strip().partition("?")
    query = dict(parse_qsl(signed))
    assert address == f"{endpoint}/{container}"
    assert query["skoid"] == Identity.user
    assert (query["sp"], query["sr"], query["spr"]) == ("rl", "c", "https")
    expiry = datetime.fromisoformat(query["se"])
    assert timedelta(days=1.9) < expiry - datetime.now(UTC) <= timedelta(days=2)
    assert f"reads and lists {container} until" in note
    assert query["sig"] not in note


@matrix_only
def test_from_cocos_zips_to_two_ranks_with_an_outage(tmp_path, background, monkeypatch):
    """A server of its own, which is away from the second epoch on."""
    server = Azurite(tmp_path / "azurite", "--oauth", "basic")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(server.certificate))
    monkeypatch.setenv(STRING, connection(server.port))
    container = server.new_container()
    root, out = f"azure://{container}/coco", tmp_path / "out"
    source = draw(tmp_path / "coco", train=24, val=7)
    for name in ("annotations", "train2017", "val2017"):
        archive = (
            tmp_path / "coco" / ("annotations_trainval2017" if name == "annotations" else name)
        )
        shutil.make_archive(str(archive), "zip", source, name)
        shutil.rmtree(source / name)
    where = {"cwd": tmp_path, "env": {"DISTDL_CACHE": str(tmp_path / "cache")}}
    prepare = ["prepare", "coco", "--source", str(source), "--to", str(out)]
    done = distdl(*prepare, "--shard-mb", "0.02", "--upload", root, **where)
    assert done.returncode == 0, done.stdout + done.stderr
    there = server.contents(f"{container}/coco")
    assert there == {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    checked = distdl("data", "check", root, "--all", **where)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    run, before = tmp_path / "outputs/default/run", len(server.log.read_text())
    training = background(
        "model=detector",
        "model.network.name=fasterrcnn_mobilenet_v3_large_320_fpn",
        "model.network.min_size=64",
        "model.network.max_size=96",
        "data=coco",
        f"data.root={root}",
        "data.num_classes=5",
        "data.masks=false",
        "data.batch_size=2",
        "data.num_workers=1",
        "data.shuffle_window=4",
        "schedule.warmup_epochs=0",
        "checkpoint.monitor=val/box_ap",
        "name=run",
        "trainer.accelerator=cpu",
        "trainer.devices=2",
        "trainer.max_epochs=2",
        "trainer.log_every_n_steps=1",
        "tracking=none",
        "callbacks=[default,record_samples]",
        **where,
    )
    training.until(lambda: last_step(run) > 6)
    server.close()
    assert training.wait() == 0, training.output()
    steps = samples(run)[1]
    for epoch in range(2):
        seen = Counter(i for (e, _), ids in steps.items() if e == epoch for i in ids)
        assert seen == Counter(range(24))
    requests = Counter(re.findall(r'"GET \S*?/([\w-]+\.tar)', server.log.read_text()[before:]))
    assert requests == Counter(path.name for path in out.glob("*.tar"))
    metrics = (run / "logs/metrics.jsonl").read_text().splitlines()
    counted = [json.loads(line)["metrics"].get("val/samples") for line in metrics]
    assert counted.count(7.0) == 2


PER_CLASS, STEPS, EPOCHS = 80, 10, 2  # steps of 2 x 12 images


def test_from_tars_to_two_ranks(azurite, account, tmp_path, background, monkeypatch):
    """ImageNet is prepared, uploaded, checked and trained on. The server ends in the first epoch,
    so this is the last test of the file."""
    out = tmp_path / "out"
    cache = tmp_path / "cache"
    container = account.split("/")[2]
    where = {"cwd": tmp_path, "env": {"DISTDL_CACHE": str(cache)}}
    tars = imagenet(tmp_path / "tars", PER_CLASS)
    done = distdl(
        "prepare",
        "imagenet",
        f"--source={tars}",
        f"--to={out}",
        "--subset",
        "--shard-mb=0.01",
        f"--upload={account}",
        **where,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"python -m distdl +experiment=resnet50_imagenet data.root={account}" in done.stdout

    # What is in the files: tests/unit/tools/test_prepare.py.
    there = azurite.contents(f"{container}/images")
    assert there == {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}

    checked = distdl("data", "check", account, "--gpu", "v100", **where)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{account}  (shards in a store, {len(CLASSES)} classes)" in checked.stdout

    # Two ranks; the server is there for the first epoch only.
    run = tmp_path / "outputs/default/run"
    before = len(azurite.log.read_text())
    training = background(
        *NETWORK,
        "data=imagenet",
        f"data.root={account}",
        f"data.num_classes={len(CLASSES)}",
        "data.image_size=32",
        "data.batch_size=12",
        "data.num_workers=1",
        "data.shuffle_window=4",
        "schedule.warmup_epochs=0",
        "name=run",
        "trainer.accelerator=cpu",
        "trainer.devices=2",
        f"trainer.max_epochs={EPOCHS}",
        "trainer.log_every_n_steps=1",
        "tracking=none",
        "callbacks=[default,record_samples]",
        **where,
    )
    training.until(lambda: last_step(run) > STEPS)
    (kept,) = (cache / "manifests").iterdir()
    copy = kept.read_bytes()
    kept.write_text("{}")  # not used while the server responds
    assert open_data_set(account, cache_root=cache).manifest.classes
    azurite.close()
    kept.write_bytes(copy)
    assert training.wait() == 0, training.output()
    steps = samples(run)[1]
    assert sorted(steps) == [(e, e * STEPS + s + 1) for e in range(EPOCHS) for s in range(STEPS)]
    for epoch in range(EPOCHS):
        seen = Counter(i for (e, _), ids in steps.items() if e == epoch for i in ids)
        assert seen == Counter(range(PER_CLASS * len(CLASSES)))
    metrics = (run / "logs/metrics.jsonl").read_text().splitlines()
    assert sum("val/acc1" in json.loads(line)["metrics"] for line in metrics) == EPOCHS
    # Each shard was downloaded once, for both ranks together.
    requests = Counter(re.findall(r'"GET \S*?/([\w-]+\.tar)', azurite.log.read_text()[before:]))
    assert requests == Counter(path.name for path in out.glob("*.tar"))

    # The next training on this node needs no server either: the manifest was kept.
    monkeypatch.setattr(reading, "QUICK", 0.5)
    node = {"root": account, "num_classes": 11, "cache_dir": str(cache)}
    note, problem = StoredImages.check(node)
    assert note.startswith(f"{account} cannot be reached; the copy of 20")
    assert "11" in problem.what
    elsewhere = refusal(open_data_set, account, patience=0.5, cache_root=tmp_path / "elsewhere")
    assert elsewhere.path == "data.root"
    assert f"{account}/{MANIFEST}" in elsewhere.what
