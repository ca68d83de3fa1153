"""From an app of torchx's to a run, and what a replica gets. CI has no torchx: none is needed here.

torchx itself: tests/cluster/test_torchx.py.
"""

import random
from types import SimpleNamespace

import pytest

from distdl.config import compose
from distdl.tools.torchx import replica
from distdl.tools.torchx.app import REPLICA, LauncherFacts, role_of, translated
from distdl.util.errors import UserError

NO_IMAGE = "ghcr.io/torchx:1"
MARK = "replica-0123"


def a_role(**changes):
    fields = {
        "name": "train",
        "image": NO_IMAGE,
        "min_replicas": None,
        "entrypoint": "bash",
        "args": ["-c", "torchrun --nnodes 2 train.py"],
        "env": {},
        "num_replicas": 2,
        "max_retries": 0,
        "port_map": {},
        "mounts": [],
    }
    size = {"cpu": 2, "gpu": 0, "memMB": 1024, "capabilities": {}, "devices": {}}
    own = {key: changes.pop(key) for key in [*changes] if key in size}
    return SimpleNamespace(**{**fields, **changes}, resource=SimpleNamespace(**{**size, **own}))


def target(name, **chosen):
    node = compose.compose([f"launcher={name}"]).launcher
    node.pop("_target_")
    return LauncherFacts(name, compose.OmegaConf.to_container(node), chosen, NO_IMAGE)


def composed(role, to, **chosen):
    made = translated([role], target(to, **chosen), "train-x1", MARK)
    config = compose.compose(made.overrides)
    return compose.OmegaConf.to_container(config, resolve=True), made.notes


def test_an_app_becomes_a_program_per_node():
    config, notes = composed(a_role(gpu=8), "mpi", hosts="[a,b]", interface="eth0")
    assert (config["experiment_name"], config["name"]) == ("torchx", "train-x1")
    assert config["trainer"] == {"num_nodes": 2, "devices": 8, "accelerator": "gpu"}
    assert config["program"]["per"] == "node"
    command = config["program"]["command"]
    assert command == ["-m", REPLICA, "train", "--", "bash", "-c", "torchrun --nnodes 2 train.py"]
    assert role_of(command) == "train"
    assert role_of(["sh", "-c", "x"]) == ""
    assert config["launcher"]["hosts"] == ["a", "b"]
    assert config["launcher"]["interface"] == "eth0"
    assert notes == [
        "cpu=2 has no effect: launcher=mpi has no setting for it",
        "memMB=1024 has no effect: launcher=mpi has no setting for it",
    ]


def test_what_a_cluster_can_be_told_is_told():
    labels = {"node.kubernetes.io/instance-type": "p5.48xlarge"}
    devices = {"vpc.amazonaws.com/efa": 4}
    role = a_role(
        image="r/x:1", capabilities=labels, devices=devices, max_retries=3, port_map={"c10d": 29500}
    )
    config, notes = composed(role, "kubernetes", memory="64Gi", store="s3://b/x")
    node = config["launcher"]
    assert (node["image"], node["cpus"], node["memory"]) == ("r/x:1", 2, "64Gi")
    assert node["resources"] == devices
    assert node["node_selector"] == labels
    assert (node["retries"], node["store"]) == (3, "s3://b/x")
    assert node["port"] == 29498, "29500 is the app's, and 29499 would be the heartbeat's"
    assert notes == []


PIECES = ["\\", "'", '"', "${", "}", "$", "{", " ", "a", "\n", ",", "]", "[", "=", ":", "?", "é"]


def test_any_text_arrives_as_it_is():
    draw = random.Random(0)
    texts = ["".join(draw.choices(PIECES, k=draw.randint(1, 8))) for _ in range(200)]
    env = {f"V{number}": text for number, text in enumerate(texts)}
    config, _ = composed(a_role(args=texts, env=env), "mpi")
    assert config["launcher"]["env"] == env
    assert config["program"]["command"][5:] == texts


@pytest.mark.parametrize(
    ("to", "changes", "chosen", "said"),
    [
        ("mpi", {"min_replicas": 1}, {}, "1 to 2 nodes: distdl starts all nodes, or none"),
        ("mpi", {"max_retries": 1}, {}, "launcher=mpi starts nothing again by itself"),
        ("mpi", {"mounts": ["x"]}, {}, "-cfg inputs="),
        ("kubernetes", {"mounts": ["x"]}, {}, "-cfg volumes="),
        ("kubernetes", {"port_map": {"c10d": 29500}}, {"port": "29501"}, "the port below it"),
    ],
)
def test_what_a_launcher_does_not_have_is_refused(to, changes, chosen, said):
    with pytest.raises(UserError, match=said):
        translated([a_role(**changes)], target(to, **chosen), "a", MARK)


def test_an_app_of_two_roles_is_refused():
    with pytest.raises(UserError, match="has 2 roles"):
        translated([a_role(), a_role()], target("mpi"), "a", MARK)


def test_a_replica_knows_its_number_and_the_first_one():
    role = a_role(args=["--node_rank", MARK], env={"X": f"of {MARK}"})
    config, _ = composed(role, "mpi")
    command = config["program"]["command"]
    assert f"--mark={MARK}" in command
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "PATH": "/bin", "X": f"of {MARK}"}
    for number, first in (("0", "localhost"), ("1", "127.0.0.1")):
        env = replica.environment({**shared, "NODE_RANK": number}, MARK)
        assert env["TORCHX_RANK0_HOST"] == first
        assert env["X"] == f"of {number}"
        assert env["PET_LOCAL_ADDR"] == "127.0.0.1"
        assert env["PATH"].endswith(":/bin")
        assert replica.numbered(command[-2:], MARK, number) == ["--node_rank", number]
    assert replica.numbered(["a"], "", "1") == ["a"]
