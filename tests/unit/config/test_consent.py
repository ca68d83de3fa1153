"""What a config executes counts only in the user's own words: command line, `./conf`, trust.yaml.
A file of somebody else (`--config-dir`, a foreign $DISTDL_CONF, a run's folder) never agrees."""

from __future__ import annotations

import json
import os
import re
from fnmatch import fnmatchcase

import pytest
import yaml

from distdl.config import compose, consent, doors, grammar, recipe, schema, trust
from distdl.config.own_words import OwnWords, Speaker
from distdl.util.errors import UserError
from tests.conftest import ROOT

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
    assert refused.startswith(key)
    assert "cannot agree to that in your name" in refused
    assert refused.count("\n") == 1
    assert f"allow it in {trust.file()}" in refused
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
    os.rename(run / "conf", folders / "mine/outputs/conf")
    monkeypatch.setenv("DISTDL_CONF", "outputs/conf")
    assert check().startswith(key)
    os.rename(folders / "mine/outputs/conf", folders / "mine/settings")  # the user's
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


def test_a_section_is_not_hidden_behind_an_interpolation(folders):
    file = folders / "theirs/experiment/asks.yaml"
    launcher = {"_target_": "distdl.launchers.mpi.MpiLauncher", "mpirun": "./evil.sh"}
    hidden = yaml.safe_dump({"launcher": "${tags[0]}", "tags": [launcher]})
    file.write_text(f"# @package _global_\n{hidden}")
    refused = check(config_dirs=["../theirs"])
    assert refused.startswith("launcher: ${tags[0]} is")
    assert refused.count("\n") == 1


RUNS = (
    "PYTHONPATH",
    "PYTHONSTARTUP",
    "LD_PRELOAD",
    "LD_AUDIT",
    "BASH_ENV",
    "TORCH_HOME",
    "HF_HOME",
    "TORCH_EXTENSIONS_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "XDG_CACHE_HOME",
    "NCCL_NET_PLUGIN",
    "NCCL_TUNER_PLUGIN",
    "OMPI_MCA_plm_rsh_agent",
    "I_MPI_HYDRA_BOOTSTRAP_EXEC",
    "CUDA_INJECTION64_PATH",
    "OMP_TOOL_LIBRARIES",
    "MPLBACKEND",
    "PYTHONWARNINGS",
    "PATH",
    "CC",
    "MLFLOW_TRACKING_AUTH",
    "AWS_CONFIG_FILE",
    "GIT_SSH_COMMAND",
    "SLURM_TASK_PROLOG",
    "TMPDIR",
)
PLAIN = (
    "NCCL_DEBUG",
    "NCCL_SOCKET_IFNAME",
    "NCCL_IB_HCA",
    "GLOO_SOCKET_IFNAME",
    "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "PYTHONUNBUFFERED",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "MY_FLAG",
    "HF_HUB_OFFLINE",
    "TORCH_DISTRIBUTED_DEBUG",
    "HYDRA_FULL_ERROR",
    "NODE_RANK",
    "TZ",
    "LANG",
    "PYTORCH_CUDA_ALLOC_CONF",
    "MKL_NUM_THREADS",
    "AWS_REGION",
    "WANDB_MODE",
    "KILLED_RANK",
)


def test_what_a_resume_repeats():
    typed = ["++launcher.mpirun=x", "model=resnet18", "project.allow=[a]", "seed=2"]
    assert consent.repeated(grammar.parse_overrides(typed)) == [
        "++launcher.mpirun=x",
        "project.allow=[a]",
    ]


def test_which_variables_make_programs_load_something():
    assert [name for name in RUNS if not doors.loads(name)] == []
    assert [name for name in PLAIN if doors.loads(name)] == []


SETTINGS = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
IMPORTS = {"torch_autocast": {"lower_precision_safe_modules": ["evil.Net"]}}


def test_deepspeeds_settings_import_nothing(folders):
    for content, refused in ((SETTINGS, False), ({**SETTINGS, **IMPORTS}, True)):
        (folders / "theirs/ds.json").write_text(json.dumps(content))
        for config in (str(folders / "theirs/ds.json"), content):
            opened = [*doors.opened({"strategy": {"config": config}})]
            assert [key for key, *_ in opened] == (["strategy.config"] if refused else [])
    assert [*doors.opened({"strategy": {"config": "absent.json"}})]


# What a key's name has if it may be of a program, a library, a module, or options of one.
LOOKS = re.compile(
    r"mpi|ssh|srun|sbatch|python|program|command|cmd|exec|script|shell|hook|before|after|setup|image$"
    r"|container|docker|build|module|package|class|plugin|preload|lib|env|args|allow|trust|root|code"
    r"|backend|target|entry|service|pickle|config|weights|checkpoint|resume|decoder|file|identity"
    r"|network|compile|profiler"
)


def test_every_key_that_looks_like_it_is_in_the_table():
    """All keys of the schema and of the shipped YAML files."""
    keys = set(schema.known_paths())
    for file in (ROOT / "conf").rglob("*.yaml"):
        group = file.parent.relative_to(ROOT / "conf").as_posix()
        top = "" if group in (".", *recipe.LAYERS) else f"{group}."
        paths = recipe.flat_paths(yaml.safe_load(file.read_text()) or {}, leaves=False)
        keys |= {top + path for path in paths}
    keys = {key for key in keys if "." in key and not key.startswith(("hydra.", "defaults"))}
    looking = {key for key in keys if LOOKS.search(key.rpartition(".")[2])}
    assert len(looking) > 50
    known = [*doors.DOORS, *(f"{door}.*" for door in doors.DOORS), *doors.HARMLESS]
    assert [k for k in sorted(looking) if not any(fnmatchcase(k, each) for each in known)] == []
    # Nothing in the table is of a key that is gone.
    gone = [k for k in (*doors.DOORS, *doors.HARMLESS) if not any(fnmatchcase(p, k) for p in keys)]
    assert gone == ["strategy._args_", "launcher._args_"]


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
    typed = ["project.allow=[a]", "++tracking.mlflow.uri=http://x", "launcher=mpi"]
    words = OwnWords(grammar.parse_overrides(typed))
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
        ("\xff", "cannot be read: 'utf-8' codec"),
    ],
)
def test_a_wrong_trust_file_is_refused(content, what, folders):
    file = allow(folders, "")
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match=r"trust\.yaml") as error:
        trust.read()
    assert what in str(error.value)


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


def test_a_mapping_is_said_key_by_key(folders):
    volumes = {"data": {"claim": "imagenet", "path": "/data"}}
    file = "# @package _global_\ndefaults: [{override /launcher: kubernetes}]\n"
    (folders / "theirs/experiment/asks.yaml").write_text(file)
    claim, path = "+launcher.volumes.data.claim=imagenet", "+launcher.volumes.data.path=/data"
    assert check(claim, path, config_dirs=["../theirs"]) == ""
    (folders / "theirs/experiment/asks.yaml").write_text(
        file + yaml.safe_dump({"launcher": {"volumes": volumes}})
    )
    for typed in ((), (path,), ("+launcher.volumes.data.claim=other",)):
        overrides = [each.replace("+", "++") for each in typed]
        assert check(*overrides, config_dirs=["../theirs"]).startswith("launcher.volumes: ")
    own = OwnWords(grammar.parse_overrides([claim, path]))
    assert own.speaker("launcher.volumes", volumes) is Speaker.COMMAND_LINE
    assert own.speaker("launcher.volumes", {**volumes, "b": {}}) is Speaker.ELSEWHERE
    assert own.speaker("launcher.volumes", {"data.path": "/data"}) is Speaker.ELSEWHERE
