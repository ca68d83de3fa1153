"""What a config executes counts only in the user's own words: command line, `./conf`, trust.yaml.
A file of somebody else (`--config-dir`, a foreign $DISTDL_CONF, a run's folder) never agrees."""

from __future__ import annotations

import os

import pytest
import yaml

from distdl.config import compose, consent, trust
from distdl.config.own_words import OwnWords, Speaker
from distdl.util.errors import UserError

# A value of each kind of key that executes something, as a file and as the command line say it.
ASKED = {
    "project.allow": (["evil"], "project.allow=[evil]"),
    "project.root": ("/theirs", "project.root=/theirs"),
    "checkpoint.trust_pickle": (True, "checkpoint.trust_pickle=true"),
    "launcher.mpirun": ("./evil.sh", "launcher.mpirun=./evil.sh"),
    "launcher.ssh": ("ssh -F x", "launcher.ssh='ssh -F x'"),
    "launcher.python": ("./python", "launcher.python=./python"),
    "launcher.extra_args": (["./evil.sh"], "launcher.extra_args=[./evil.sh]"),
    "launcher.env": ({"LD_PRELOAD": "/e.so"}, "+launcher.env.LD_PRELOAD=/e.so"),
}
BY_CONF = ("project.allow", "project.root", "launcher.env")


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """The user's current folder, configuration and somebody else's folder of configs."""
    for name in ("mine/conf/experiment", "home", "theirs/experiment"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "mine")
    monkeypatch.delenv("DISTDL_CONF", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    return tmp_path


def says(folder, key, value):
    """An experiment in a folder of configs that gives a value to a key."""
    section, name = key.split(".")
    defaults = "defaults: [{override /launcher: mpi}]\n"
    text = f"# @package _global_\n{defaults}{yaml.safe_dump({section: {name: value}})}"
    (folder / "experiment/asks.yaml").write_text(text)


def allow(folders, content):
    file = folders / "home/distdl/trust.yaml"
    file.parent.mkdir(mode=0o700, exist_ok=True)
    file.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    file.chmod(0o600)
    return file


def check(*typed, config_dirs=()):
    """The problems of `distdl +experiment=asks ...`, as text."""
    config = compose.compose(["experiment=asks", *typed], config_dirs)
    try:
        consent.refuse(config, compose.typed(config))
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("key", ASKED)
def test_a_foreign_file_does_not_agree_and_the_user_does(key, folders):
    value, typed = ASKED[key]
    says(folders / "theirs", key, value)
    refused = check(config_dirs=["../theirs"])
    assert refused.startswith(key) and "cannot agree to that in your name" in refused
    assert refused.count("\n") == 1 and f"allow it in {trust.file()}" in refused
    assert check(typed, config_dirs=["../theirs"]) == ""
    allow(folders, {key: value})
    assert check(config_dirs=["../theirs"]) == ""


@pytest.mark.parametrize("key", ASKED)
def test_what_the_own_conf_may_agree_to(key, folders, monkeypatch):
    value, _ = ASKED[key]
    says(folders / "mine/conf", key, value)
    refused = check()
    assert refused == "" if key in BY_CONF else "./conf cannot agree to that" in refused
    # The same folder, elsewhere, is somebody else's; a run's folder always is.
    os.rename(folders / "mine/conf", folders / "elsewhere")
    monkeypatch.setenv("DISTDL_CONF", str(folders / "elsewhere"))
    assert check().startswith(key)
    run = folders / "mine/outputs/r"
    (run / "attempts").mkdir(parents=True)
    (run / "config.yaml").touch()
    os.rename(folders / "elsewhere", run / "conf")
    monkeypatch.setenv("DISTDL_CONF", str(run / "conf"))
    assert check().startswith(key)
    os.rename(run / "conf", folders / "mine/settings")  # here it is the user's again
    monkeypatch.setenv("DISTDL_CONF", "settings")
    assert check().startswith(key) is (key not in BY_CONF)


def test_it_is_the_value_that_is_agreed_to(folders, monkeypatch):
    says(folders / "theirs", "launcher.mpirun", "./evil.sh")
    theirs = ["../theirs"]
    allow(folders, {"launcher.mpirun": ["mpirun.mpich", "./other.sh"], "project.allow": ["evil"]})
    assert check(config_dirs=theirs).startswith("launcher.mpirun")
    assert check("launcher.mpirun=mpirun.mpich", config_dirs=theirs) == ""
    # What is typed as an interpolation is what their file says.
    says(folders / "theirs", "launcher.extra_args", ["./evil.sh"])
    assert "${" in check("launcher.mpirun='${launcher.extra_args[0]}'", config_dirs=theirs)
    monkeypatch.setenv("MPI", "x")
    says(folders / "theirs", "launcher.mpirun", "./evil.sh")
    assert check("launcher.mpirun='${oc.env:MPI}'", config_dirs=theirs) == ""
    # Only what a program loads is refused among variables; a list of packages is taken one by one.
    says(folders / "theirs", "launcher.env", {"NCCL_DEBUG": "INFO", "MINE": 1, "TORCH_HOME": "/x"})
    assert check(config_dirs=theirs).startswith("launcher.env.TORCH_HOME: /x is a variable")
    says(folders / "theirs", "project.allow", ["evil", "worse"])
    assert check(config_dirs=theirs).startswith("project.allow: worse is code")


def test_a_file_cannot_write_the_command_line(folders):
    """Hydra keeps the typed overrides in the config, where a file may have written others."""
    says(folders / "theirs", "checkpoint.trust_pickle", True)
    file = folders / "theirs/experiment/asks.yaml"
    written = {"hydra": {"overrides": {"task": ["++checkpoint.trust_pickle=true"]}}}
    file.write_text(file.read_text() + yaml.safe_dump(written))
    assert check(config_dirs=["../theirs"]).startswith("checkpoint.trust_pickle")


def test_who_said_it(folders):
    allow(folders, "project: {allow: [c]}\nlauncher.env.TMPDIR: /scratch\n")
    (folders / "mine/conf/launcher").mkdir()
    (folders / "mine/conf/launcher/ours.yaml").write_text("ssh: ssh -v\n")
    (folders / "mine/conf/experiment/x.yaml").write_text("project: {allow: [b]}\n")
    words = OwnWords(["project.allow=[a]", "++tracking.mlflow.uri=http://x", "launcher=mpi"])
    said = {name: words.speaker("project.allow", name) for name in "abcd"}
    expected = (Speaker.COMMAND_LINE, Speaker.CONF, Speaker.TRUST, Speaker.ELSEWHERE)
    assert tuple(said.values()) == expected
    assert words.speaker("tracking.mlflow.uri", "http://x") is Speaker.COMMAND_LINE
    assert words.speaker("tracking.mlflow.uri", "http://y") is Speaker.ELSEWHERE
    assert words.speaker("launcher.ssh", "ssh -v") is Speaker.CONF
    assert words.speaker("launcher.env.TMPDIR", "/scratch") is Speaker.TRUST


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("checkpoint.trust_pickel: true", "did you mean checkpoint.trust_pickle?"),
        ("launcher.infiniband: true", "launcher.infiniband is not a key that needs trust"),
        ("[project.allow]", "is not a mapping"),
        ("a: [b", "is not YAML"),
        ("\xff", "is not"),
    ],
)
def test_a_wrong_trust_file_is_refused(content, what, folders):
    file = allow(folders, "")
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match=r"trust\.yaml") as error:
        trust.read()
    assert what in str(error.value) or "cannot be read" in str(error.value)


@pytest.mark.parametrize("writable", ["", "/trust.yaml"])
def test_a_trust_file_that_others_may_write_is_refused(writable, folders):
    file = allow(folders, {"project.allow": ["c"]})
    path = file.parent / writable.strip("/")
    mode = path.stat().st_mode
    path.chmod(mode | 0o022)
    with pytest.raises(UserError, match=r"others may write .*\n.*chmod go-w"):
        trust.read()
    path.chmod(mode)
    assert trust.read() == [{"project.allow": ["c"]}]
    file.unlink()
    assert trust.read() == []
