"""Credentials go only to servers that the user names, seen by servers on loopback that record what
they receive."""

import http.server
import threading

import pytest

from distdl.cli import track
from distdl.config import compose, consent, trust
from distdl.tracking.outbox import Outbox
from distdl.util.errors import UserError
from tests.tracking.conftest import Tracked, logger

SECRETS = {"MLFLOW_TRACKING_USERNAME": "me", "MLFLOW_TRACKING_PASSWORD": "canary"}


class Recorder(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.received.append(self.headers.get("Authorization"))
        self.send_error(503)

    do_POST = do_GET

    def log_message(self, *args):
        pass


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    for name in ("HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    (tmp_path / "home/.mlflow").mkdir(parents=True)
    monkeypatch.setattr("distdl.tracking.sync.WAITS", ())
    return tmp_path / "home"


@pytest.fixture(scope="module")
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Recorder) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        server.uri = f"http://127.0.0.1:{server.server_port}"
        yield server
        server.shutdown()


@pytest.fixture
def foreign(server, outputs):
    """Somebody else's run, whose folder names their server."""
    server.received = []
    folder = outputs / "foreign/run"
    if not folder.exists():
        away = logger(tracking_uri="http://127.0.0.1:9", flush_timeout=0)
        tracked = Tracked(outputs, "foreign/run", components={"mlflow": away})
        sender = tracked.component._thread
        tracked.finish()
        tracked.component._wake.set()
        sender.join()
    outbox = Outbox(folder)
    outbox.state.server = server.uri
    outbox.save()
    return folder


def sync(folder, *more):
    return track.main(["sync", str(folder), *more]).exit_code


@pytest.mark.parametrize("given", [SECRETS, {"MLFLOW_TRACKING_TOKEN": "canary"}, "file"])
def test_track_sync_of_a_foreign_run(server, foreign, home, monkeypatch, given):
    if given == "file":
        text = "[mlflow]\nmlflow_tracking_username = me\nmlflow_tracking_password = canary\n"
        (home / ".mlflow/credentials").write_text(text)
    else:
        for name, value in given.items():
            monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="would get") as error:
        sync(foreign)
    assert server.received == [], "not even asked"
    (problem,) = error.value.problems
    assert problem.path.endswith("tracking/mlflow.json")
    assert f"--send-credentials-to {server.uri}" in problem.remedy
    assert "canary" not in str(problem)
    with pytest.raises(UserError, match="would get"):
        sync(foreign, "--send-credentials-to", "http://127.0.0.1:9")
    assert sync(foreign, "--send-credentials-to", f"{server.uri}/") == 1  # it answers 503
    assert server.received
    assert all(server.received)


def test_what_the_user_names_gets_them_and_others_are_asked_without(
    server, foreign, home, monkeypatch
):
    assert sync(foreign) == 1
    assert server.received, "it is asked"
    assert not any(server.received), "without credentials"
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    server.received.clear()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    assert sync(foreign) == 1
    assert all(server.received)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri.replace("http:", "https:"))
    with pytest.raises(UserError, match="would get"):
        sync(foreign)
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    trust.file().parent.mkdir(parents=True, mode=0o700)
    trust.file().write_text(f"credentials.to: [{server.uri}]\n")
    trust.file().chmod(0o600)
    assert sync(foreign) == 1


@pytest.mark.parametrize(
    ("key", "uri", "secret"),
    [
        ("tracking.mlflow.tracking_uri", "http://evil.example", "MLFLOW_TRACKING_TOKEN"),
        (
            "tracking.mlflow.tracking_uri",
            "http://evil.example\\@mine.example",
            "MLFLOW_TRACKING_TOKEN",
        ),
        ("tracking.mlflow.artifact_location", "http://evil.example", "MLFLOW_TRACKING_AWS_SIGV4"),
        ("tracking.wandb.settings.base_url", "http://evil.example", "WANDB_API_KEY"),
        ("data.root", "https://me.blob.evil.example/box", "AZURE_STORAGE_SAS_TOKEN"),
        ("data.root", "abfss://box@me.dfs.evil.example/x", "AZURE_STORAGE_KEY"),
        ("data.root", "http://127.0.0.1:10000/me/box", "AZURE_STORAGE_KEY"),
    ],
)
def test_addresses_of_configs(tmp_path, monkeypatch, key, uri, secret):
    foreign = tmp_path / "foreign/experiment"
    foreign.mkdir(parents=True)
    text = f"# @package _global_\n{tree(key, uri)}"
    (foreign / "theirs.yaml").write_text(text)
    words = ["+experiment=theirs", "tracking=wandb"][: 1 + ("wandb" in key)]

    def refused(*typed, config_dirs=(str(tmp_path / "foreign"),)):
        config = compose.compose([*words, *typed], config_dirs)
        try:
            consent.refuse(config, compose.typed(config))
        except UserError as error:
            return [problem.path for problem in error.problems]

    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mine.example")
    if key != "data.root":  # a store may find a way to sign in that no variable shows
        assert not refused()
    monkeypatch.setenv(secret, "canary")
    assert refused() == [key]
    assert not refused(f"{key}='{uri}'")
    own = tmp_path / "cwd/conf/experiment"
    own.mkdir(parents=True)
    (own / "theirs.yaml").write_text(text)
    assert not refused(config_dirs=())


def tree(key, uri):
    """`a.b=uri` as YAML."""
    parts = key.split(".")
    lines = [f"{'  ' * depth}{part}:" for depth, part in enumerate(parts)]
    return "\n".join(lines) + f" '{uri}'\n"


def test_addresses_that_get_nothing_or_are_azures_own(monkeypatch):
    for name in ("MLFLOW_TRACKING_TOKEN", "AZURE_STORAGE_KEY"):
        monkeypatch.setenv(name, "canary")
    config = compose.compose(["experiment_name=x"])
    for root in (
        "https://me.blob.core.windows.net/box",
        "abfss://box@me.dfs.core.windows.net/x",
        "https://me.blob.evil.example/box?sig=theirs",
        "s3://box/x",
        "azure://box/x",
        "/folder",
    ):
        config.data.root = root
        consent.refuse(config, [])
    config.tracking.mlflow.tracking_uri = "sqlite:////somewhere/mlflow.db"
    consent.refuse(config, [])
