"""Each platform's variables -> one record, whatever else a shell or an image left behind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distdl.job import Resources
from distdl.ranks.environment import Environment, detect, resolve
from distdl.util.errors import UserError


def variables(text: str) -> dict[str, str]:
    """`NAME=value` each."""
    return dict(pair.split("=", 1) for pair in text.split())


TORCHRUN = variables(
    "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=1 MASTER_ADDR=node1 "
    "MASTER_PORT=29400 TORCHELASTIC_RUN_ID=none"
)
# OMPI_COMM_WORLD_NODE_RANK is not the index of the node, whatever it is called.
OMPI = variables(
    "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 "
    "OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_COMM_WORLD_NODE_RANK=1"
)
OPENMPI = {**OMPI, "MASTER_ADDR": "node1"}
MPICH = variables(  # and Intel MPI
    "PMI_RANK=3 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2 MASTER_ADDR=node1"
)
# SLURM_TASKS_PER_NODE is that of the allocation, not of the step.
SLURM = variables(
    "SLURM_JOB_ID=123 SLURM_STEP_ID=0 SLURM_PROCID=3 SLURM_NTASKS=4 SLURM_LOCALID=1 "
    "SLURM_NODEID=1 SLURM_STEP_TASKS_PER_NODE=2(x2) SLURM_TASKS_PER_NODE=8(x2) "
    "SLURM_STEP_NODELIST=node[1-2] SLURM_JOB_NODELIST=node[0-7]"
)
AZUREML_PYTORCH = variables(
    "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 NODE_RANK=1 MASTER_ADDR=10.0.0.4 MASTER_PORT=6105 "
    "AZUREML_RUN_ID=run AZUREML_CR_NODE_RANK=1"
)
# NODE_RANK is what Azure's own guide once made of the rank.
AZUREML_MPI = OMPI | variables(
    "NODE_RANK=3 AZ_BATCH_MASTER_NODE=10.0.0.4:6000 AZ_BATCH_HOST_LIST=10.0.0.4:6000,10.0.0.5:6000"
)
SAGEMAKER_MPI = {**OMPI, "SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-1"}
EVERYTHING_STALE = variables(
    "RANK=7 WORLD_SIZE=9 LOCAL_RANK=7 LOCAL_WORLD_SIZE=9 GROUP_RANK=5 NODE_RANK=5 "
    "TORCHELASTIC_RUN_ID=old OMPI_COMM_WORLD_RANK=7 OMPI_COMM_WORLD_SIZE=9 "
    "OMPI_COMM_WORLD_LOCAL_RANK=7 OMPI_COMM_WORLD_LOCAL_SIZE=9 PMI_RANK=6 PMI_SIZE=8 "
    "MPI_LOCALRANKID=6 MPI_LOCALNRANKS=8 SLURM_JOB_ID=9 SLURM_STEP_ID=0 SLURM_PROCID=6 "
    "SLURM_NTASKS=8 SLURM_LOCALID=6 SLURM_NODEID=3 SLURM_STEP_TASKS_PER_NODE=4(x2) "
    "SLURM_NODELIST=stale[1-2] AZ_BATCH_MASTER_NODE=stale:1"
) | {"SM_HOSTS": '["stale"]'}


@pytest.mark.parametrize(
    ("launcher", "given", "address", "port"),
    [
        ("external", TORCHRUN, "node1", 29400),
        ("sagemaker", TORCHRUN, "node1", 29400),
        ("mpi", OPENMPI, "node1", 29500),
        ("mpi", MPICH, "node1", 29500),
        ("external", OPENMPI, "node1", 29500),
        ("external", MPICH, "node1", 29500),
        ("slurm", SLURM, "node1", None),
        ("external", SLURM, "node1", None),
        ("azureml", AZUREML_PYTORCH, "10.0.0.4", 6105),
        ("azureml", AZUREML_MPI, "10.0.0.4", 29500),
        ("azureml", {**MPICH, "MASTER_ADDR": "10.0.0.4"}, "10.0.0.4", 29500),
        ("sagemaker", SAGEMAKER_MPI, "algo-1", 29500),
    ],
)
def test_each_platform_says_the_same(launcher, given, address, port) -> None:
    env = {"DISTDL_LAUNCHER": launcher, **given}
    sizes: list[Resources | None] = [Resources(2, 2, "gpu")]
    if given is not AZUREML_PYTORCH:  # which does not say how many ranks a node has
        sizes.append(None)
    for size in sizes:
        found = resolve(env, size)
        assert (found.rank, found.world_size) == (3, 4)
        assert (found.local_rank, found.local_world_size, found.node_rank) == (1, 2, 1)
        assert found.main_address == address
        assert port is None or found.main_port == port


def test_the_sources_are_named() -> None:
    text = resolve({"DISTDL_LAUNCHER": "mpi", **OPENMPI}).describe()
    for part in (
        "launcher=mpi",
        "rank=3 (OMPI_COMM_WORLD_RANK)",
        "node_rank=1 (OMPI_COMM_WORLD_RANK // local_world_size)",
        "main_address=node1 (MASTER_ADDR)",
        "main_port=29500 (default)",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("launcher", "given", "stale"),
    [
        ("mpi", OPENMPI, ("OMPI",)),
        ("slurm", SLURM, ("SLURM",)),
        (
            "azureml",
            AZUREML_PYTORCH,
            ("RANK", "WORLD", "LOCAL", "NODE", "OMPI", "PMI", "MPI", "AZ"),
        ),
        ("azureml", AZUREML_MPI, ("OMPI", "PMI", "MPI", "AZ")),
        ("sagemaker", SAGEMAKER_MPI, ("OMPI", "SM", "RANK")),
        ("sagemaker", TORCHRUN, ("RANK", "WORLD", "LOCAL", "GROUP", "SM")),
        ("local", TORCHRUN, ("RANK", "WORLD", "LOCAL", "GROUP")),
    ],
)
def test_variables_of_other_platforms_do_not_count(launcher, given, stale) -> None:
    left = {k: v for k, v in EVERYTHING_STALE.items() if not k.startswith(stale)}
    env = {"DISTDL_LAUNCHER": launcher, **given}
    alone, beside = (resolve(each, Resources(2, 2)) for each in (env, {**left, **env}))
    assert replace(beside, main_port=0, sources={}) == replace(alone, main_port=0, sources={})


def test_one_process_alone_believes_nobody() -> None:
    for chosen in ({}, {"DISTDL_LAUNCHER": "single"}):
        found = resolve({**EVERYTHING_STALE, **chosen, "MASTER_ADDR": "stale"})
        assert replace(found, main_port=29500, sources={}) == Environment("single")
    # strategy=ddp opens a port all the same: two runs on one machine must not meet on it.
    assert len({resolve({}).main_port for _ in range(3)}) > 1


def test_exported_again_under_the_standard_names() -> None:
    env = {"RANK": "7", "NODE_RANK": "7"}
    resolve({"DISTDL_LAUNCHER": "slurm", **SLURM, "MASTER_PORT": "1234"}).export(env)
    assert env == variables(
        "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 NODE_RANK=1 MASTER_ADDR=node1 "
        "MASTER_PORT=1234"
    )


def test_libraries_that_set_no_local_rank() -> None:
    for rank, here in ((0, (0, 0)), (1, (1, 0)), (2, (0, 1)), (3, (1, 1))):
        env = {"DISTDL_LAUNCHER": "mpi", "PMI_RANK": f"{rank}", "PMI_SIZE": "4"}
        found = resolve({**env, "MASTER_ADDR": "node1"}, Resources(2, 2))
        assert (found.local_rank, found.node_rank) == here
        assert found.sources["local_world_size"] == "trainer.devices"


@pytest.mark.parametrize(
    ("launcher", "changes", "path", "words"),
    [
        ("nowhere", {}, "DISTDL_LAUNCHER", "no launcher 'nowhere'"),
        ("mpi", {}, "DISTDL_LAUNCHER", "without OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE or"),
        ("slurm", {**SLURM, "SLURM_PROCID": "x"}, "SLURM_PROCID", "'x' is not a number"),
        (
            "slurm",
            {**SLURM, "SLURM_PROCID": "4"},
            "SLURM_PROCID",
            "4 is not a rank of a world of 4",
        ),
        ("mpi", {**OPENMPI, "OMPI_COMM_WORLD_LOCAL_RANK": "2"}, "LOCAL_RANK", "on a node of 2"),
        ("slurm", {**SLURM, "SLURM_NODEID": "2"}, "SLURM_NODEID", "node rank 2, but 4 processes"),
        ("slurm", {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "8"}, "TASKS_PER_NODE", "8 processes per"),
        ("slurm", {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "3,1"}, "TASKS", "different numbers of"),
        ("mpi", {**OPENMPI, "MASTER_ADDR": ""}, "MASTER_ADDR", "several nodes, and no main addr"),
        ("mpi", {**OPENMPI, "MASTER_PORT": "many"}, "MASTER_PORT", "'many' is not a number"),
        ("external", {**TORCHRUN, **OPENMPI, "RANK": "2"}, "RANK", "contradicts OMPI_COMM_WORLD_R"),
        ("external", {**OPENMPI, **MPICH, "PMI_SIZE": "8"}, "OMPI_COMM_WORLD_SIZE", "PMI_SIZE=8"),
        ("external", {**TORCHRUN, **SLURM, "RANK": "1"}, "RANK", "contradicts SLURM_PROCID=3"),
    ],
)
def test_contradictions_are_refused(launcher, changes, path, words) -> None:
    with pytest.raises(UserError) as refused:
        resolve({"DISTDL_LAUNCHER": launcher, **changes})
    text = str(refused.value)
    assert path in text and words in text


def test_another_size_than_the_run_asks_for_is_refused() -> None:
    with pytest.raises(UserError, match=r"4 processes were started by slurm.*2 x 4 = 8"):
        resolve({"DISTDL_LAUNCHER": "slurm", **SLURM}, Resources(2, 4))
    wrong = {"SLURM_PROCID": "9", "SLURM_LOCALID": "9", "SLURM_NODEID": "9"}
    with pytest.raises(UserError) as refused:
        resolve({"DISTDL_LAUNCHER": "slurm", **SLURM, **wrong})
    assert len(refused.value.problems) == 3, "all of them in one go"


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (TORCHRUN, "torchrun"),
        (OPENMPI, "openmpi"),
        (MPICH, "mpich"),
        (SLURM, "slurm"),
        ({}, None),
        # Somebody's own RANK, without a launch by torchrun.
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, None),
        # Slurm's own steps and shells: `sbatch` scripts, salloc, `srun --pty bash`.
        ({k: v for k, v in SLURM.items() if k != "SLURM_STEP_ID"}, None),
        ({**SLURM, "SLURM_STEP_ID": "4294967290"}, None),
        ({**SLURM, "SLURM_NTASKS": "1", "SLURM_JOB_NAME": "bash"}, None),
        ({**SLURM, "SLURM_NTASKS": "1", "SLURM_PTY_PORT": "40001"}, None),
        # srun -n 4 bash -c "python -m distdl ...": four ranks, though the job is called bash.
        ({**SLURM, "SLURM_JOB_NAME": "bash"}, "slurm"),
        # A worker of ours, or a process that it starts, is never one that somebody else started.
        ({**TORCHRUN, "DISTDL_LAUNCHER": "local"}, None),
    ],
)
def test_who_started_this_process(given, found) -> None:
    assert detect(given) == found


def test_an_agent_per_node_inside_a_slurm_step_numbers_its_own_ranks() -> None:
    """srun --ntasks-per-node=1 torchrun: the order of torchrun's nodes is not Slurm's."""
    agents = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "1(x4)", "SLURM_PROCID": "2"}
    found = resolve({"DISTDL_LAUNCHER": "external", **agents, **TORCHRUN})
    assert (found.rank, found.sources["rank"]) == (3, "RANK")
    fewer = {**SLURM, "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}
    assert resolve({"DISTDL_LAUNCHER": "external", **fewer, **TORCHRUN}).rank == 3


def test_slurms_pmi_variables_do_not_hide_its_own() -> None:
    """srun --mpi=pmi2 sets PMI_RANK and PMI_SIZE, and nothing about the node."""
    env = {**SLURM, "PMI_RANK": "3", "PMI_SIZE": "4", "DISTDL_LAUNCHER": "external"}
    found = resolve(env)
    assert (found.local_rank, found.node_rank, found.sources["rank"]) == (1, 1, "SLURM_PROCID")


@pytest.mark.parametrize(
    ("name", "value", "address"),
    [
        ("SLURM_NODELIST", "gpu[003-005,9],login", "gpu003"),
        ("SLURM_NODELIST", "gpu7", "gpu7"),
        ("SLURM_NODELIST", "a,b[1-2]", "a"),
        ("SLURM_NODELIST", "rack[1-2]node[04-06]-ib,x", "rack1node04-ib"),
        ("MASTER_ADDR", "fd00::1", "fd00::1"),
    ],
)
def test_the_first_host(name, value, address) -> None:
    lists = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    env = {k: v for k, v in SLURM.items() if k not in lists}
    found = resolve({"DISTDL_LAUNCHER": "slurm", **env, name: value})
    assert (found.main_address, found.sources["main_address"]) == (address, name)


def test_jobs_on_one_machine_have_ports_of_their_own() -> None:
    numbers = [f"{n}" for n in (12, 21, *range(123456, 123556))]
    ports = [
        resolve({"DISTDL_LAUNCHER": "slurm", **SLURM, "SLURM_JOB_ID": n}).main_port for n in numbers
    ]
    assert len(set(ports)) > 0.95 * len(numbers)
    assert all(1024 < port < 32768 for port in ports)
