"""Each platform's variables -> one record, whatever else a shell or an image left behind."""

from dataclasses import replace

import pytest

from distdl.job import Resources
from distdl.ranks.environment import Environment, detect, resolve
from distdl.util.errors import UserError


def variables(text):
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
EVERY = (TORCHRUN, OMPI, MPICH, SLURM, AZUREML_PYTORCH, AZUREML_MPI, SAGEMAKER_MPI)
STALE = dict.fromkeys(set().union(*EVERY) - {"MASTER_ADDR", "MASTER_PORT"}, "9")


def by(launcher, env, size=None):
    return resolve({"DISTDL_LAUNCHER": launcher, **env}, size)


# The launcher and its variables; address and port of rank 0; the prefixes of its own variables.
RECORDS = [
    ("external", TORCHRUN, "node1", 29400, None),
    ("local", TORCHRUN, "node1", 29400, "RANK WORLD LOCAL GROUP"),
    ("mpi", OPENMPI, "node1", 29500, "OMPI"),
    ("mpi", MPICH, "node1", 29500, None),
    ("slurm", SLURM, "node1", None, "SLURM"),
    ("external", SLURM, "node1", None, None),
    ("azureml", AZUREML_PYTORCH, "10.0.0.4", 6105, "RANK WORLD LOCAL NODE OMPI PMI MPI AZ"),
    ("azureml", AZUREML_MPI, "10.0.0.4", 29500, "OMPI PMI MPI AZ"),
    ("azureml", {**MPICH, "MASTER_ADDR": "10.0.0.4"}, "10.0.0.4", 29500, None),
    ("sagemaker", TORCHRUN, "node1", 29400, "RANK WORLD LOCAL GROUP SM"),
    ("sagemaker", SAGEMAKER_MPI, "algo-1", 29500, "OMPI SM RANK"),
]


@pytest.mark.parametrize(("launcher", "env", "address", "port", "own"), RECORDS)
def test_each_platform_gives_the_same_record(launcher, env, address, port, own):
    """Also beside variables that other platforms left (all but `own`)."""
    size = Resources(2, 2, "gpu")
    alone = by(launcher, env, size)
    # Azure ML's PyTorch distribution does not say how many ranks a node has.
    for record in (alone, alone if env is AZUREML_PYTORCH else by(launcher, env)):
        assert (record.rank, record.world_size, record.main_address) == (3, 4, address)
        assert (record.local_rank, record.local_world_size, record.node_rank) == (1, 2, 1)
        assert port is None or record.main_port == port
    if own:
        left = {k: v for k, v in STALE.items() if not k.startswith(tuple(own.split()))}
        beside = by(launcher, {**left, **env}, size)
        assert replace(beside, main_port=0, sources={}) == replace(alone, main_port=0, sources={})


def test_the_standard_names_are_exported():
    env = {"RANK": "7", "NODE_RANK": "7"}
    by("slurm", {**SLURM, "MASTER_PORT": "29400"}).export(env)
    names = {k: v for k, v in TORCHRUN.items() if not k.startswith(("GROUP", "TORCHELASTIC"))}
    assert env == {**names, "NODE_RANK": "1"}


def test_a_single_process_ignores_all_variables():
    for chosen in ({}, {"DISTDL_LAUNCHER": "single"}):
        record = resolve({**STALE, **chosen, "MASTER_ADDR": "stale"})
        assert replace(record, main_port=29500, sources={}) == Environment("single")
    # strategy=ddp opens a port all the same: two runs on one machine must not meet on it.
    assert len({resolve({}).main_port for _ in range(3)}) > 1


def test_a_library_that_sets_no_local_rank():
    env = {"PMI_SIZE": "4", "MASTER_ADDR": "node1"}
    for rank in range(4):
        record = by("mpi", {**env, "PMI_RANK": f"{rank}"}, Resources(2, 2))
        assert (record.node_rank, record.local_rank) == divmod(rank, 2)


TASKS = "SLURM_STEP_TASKS_PER_NODE"
NINES = dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"), "9")
REFUSED = [
    ("nowhere", {}, "DISTDL_LAUNCHER", "'nowhere' is not a launcher"),
    ("mpi", {}, "DISTDL_LAUNCHER", "without setting OMPI_COMM_WORLD_RANK and OMPI"),
    ("slurm", {**SLURM, "SLURM_PROCID": "x"}, "SLURM_PROCID", "'x' is not a number"),
    ("slurm", {**SLURM, "SLURM_PROCID": "4"}, "SLURM_PROCID", "rank 4 does not exist in a world"),
    ("slurm", SLURM | NINES, " ".join(NINES), "local rank 9 does not"),
    ("slurm", {**SLURM, "SLURM_NODEID": "2"}, "SLURM_NODEID", "node rank 2 does not exist on 2"),
    ("slurm", {**SLURM, TASKS: "8"}, f"SLURM_NODEID {TASKS}", "8 processes per"),
    ("slurm", {**SLURM, TASKS: "3,1"}, TASKS, "different numbers of"),
    ("mpi", {**OPENMPI, "MASTER_ADDR": ""}, "MASTER_ADDR", "several nodes, but no address"),
    ("external", {**TORCHRUN, **OPENMPI, "RANK": "2"}, "RANK", "contradicts OMPI_COMM_WORLD_R"),
    ("slurm 2 x 4", SLURM, "trainer.devices", "4 processes were started by slurm.*2 x 4 = 8"),
]


@pytest.mark.parametrize(("launcher", "env", "paths", "message"), REFUSED)
def test_contradictions_are_refused(launcher, env, paths, message):
    size = Resources(2, 4) if "2 x 4" in launcher else None
    with pytest.raises(UserError, match=message) as error:
        by(launcher.split()[0], env, size)
    assert [problem.path for problem in error.value.problems] == paths.split(), "all in one go"


STARTED_BY = [
    (TORCHRUN, "torchrun"),
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
]


def test_who_started_this_process():
    for env, expected in STARTED_BY:
        assert detect(env) == expected, env


INNER = [
    # srun --ntasks-per-node=1 torchrun: the order of torchrun's nodes is not Slurm's.
    ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "1(x4)", "SLURM_PROCID": "2", **TORCHRUN}, "RANK"),
    ({**SLURM, "SLURM_NTASKS": "2", "SLURM_PROCID": "0", **TORCHRUN}, "RANK"),
    # srun --mpi=pmi2 sets these two, and nothing about the node.
    ({**SLURM, "PMI_RANK": "3", "PMI_SIZE": "4"}, "SLURM_PROCID"),
]


@pytest.mark.parametrize(("env", "source"), INNER)
def test_of_two_launchers_the_inner_one_numbers_the_ranks(env, source):
    record = by("external", env)
    assert (record.rank, record.local_rank, record.node_rank) == (3, 1, 1)
    assert record.sources["rank"] == source


HOSTS = {
    "gpu[003-005,9],login": "gpu003",
    "a,b[1-2]": "a",
    "rack[1-2]node[04-06]-ib,x": "rack1node04-ib",
}


def test_address_and_port_of_rank_0():
    env = {k: v for k, v in SLURM.items() if not k.endswith("_NODELIST")}
    for value, address in HOSTS.items():
        assert by("slurm", {**env, "SLURM_NODELIST": value}).main_address == address
    assert by("slurm", {**env, "MASTER_ADDR": "fd00::1"}).main_address == "fd00::1"
    # Two jobs on one machine do not meet.
    ports = [by("slurm", {**SLURM, "SLURM_JOB_ID": f"{n}"}).main_port for n in range(12, 112)]
    assert len(set(ports)) > 95
    assert all(1024 < port < 32768 for port in ports)
