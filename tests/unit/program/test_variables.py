"""The variables that each framework's program gets."""

from __future__ import annotations

import json

import pytest

from distdl.config.schema import Program
from distdl.program import variables
from distdl.ranks.environment import PROGRAM_PORT, Environment
from distdl.util.errors import UserError

HOSTS = ["10.0.0.1:1", "10.0.0.1:2", "10.0.0.2:3", "10.0.0.2:4", "10.0.0.3:5"]


def program(**more):
    return Program(command=["./x"], **more)


def config_of(rank, count=5, **more):
    place = Environment("mpi", rank=rank, world_size=count)
    tensorflow = program(framework="tensorflow", **more)
    return json.loads(variables.of_framework(tensorflow, place, HOSTS[:count])["TF_CONFIG"])


def test_tensorflow_chief_and_workers():
    cluster = {"chief": HOSTS[:1], "worker": HOSTS[1:3]}
    assert config_of(0, 3) == {"cluster": cluster, "task": {"type": "chief", "index": 0}}
    assert config_of(2, 3) == {"cluster": cluster, "task": {"type": "worker", "index": 1}}


def test_tensorflow_parameter_servers_and_an_evaluator():
    roles = {"parameter_servers": 2, "evaluator": True}
    cluster = {"chief": HOSTS[:1], "worker": HOSTS[1:2], "ps": HOSTS[2:4]}
    tasks = [config_of(rank, **roles) for rank in range(5)]
    assert [each["cluster"] for each in tasks[:4]] == [cluster] * 4
    kinds = [(each["task"]["type"], each["task"]["index"]) for each in tasks]
    assert kinds == [("chief", 0), ("worker", 0), ("ps", 0), ("ps", 1), ("evaluator", 0)]
    assert tasks[4]["cluster"] == {"evaluator": HOSTS[4:]}
    served = [variables.serves(program(framework="tensorflow", **roles), n, 5) for n in range(5)]
    assert served == [False, True, True, True, True]


def test_tensorflow_with_too_few_ranks():
    with pytest.raises(UserError, match="too few"):
        config_of(0, 2, parameter_servers=1)


def test_jax():
    place = Environment("slurm", rank=1, world_size=2)
    assert variables.of_framework(program(framework="jax"), place, HOSTS[:2]) == {
        "JAX_COORDINATOR_ADDRESS": "10.0.0.1:1",
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": "1",
    }


def test_a_program_per_node():
    rank = Environment("slurm", 4, 8, 0, 4, 1, "n1", 5000)
    place = variables.placed(rank, per_node=True, env={})
    values = variables.of_torch(place, 4)
    expected = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "NODE_RANK": "1"}
    assert expected.items() <= values.items()
    assert values["MASTER_ADDR"] == "n1"
    assert values["DISTDL_DEVICES"] == "4"


def test_no_trace_of_the_agent():
    env = {
        "TORCHELASTIC_RUN_ID": "1",
        "GROUP_RANK": "0",
        "ROLE_ARN": "mine",
        "DISTDL_LAUNCHER": "local",
        "DISTDL_INPUT_X": "/x",
        PROGRAM_PORT: "7000",
    }
    assert variables.inherited(env) == {"ROLE_ARN": "mine", "DISTDL_INPUT_X": "/x"}
    place = variables.placed(Environment("local", main_port=6000), per_node=False, env=env)
    assert place.main_port == 7000
