"""The nodes of the stand-in for Azure: a job's snapshot, in an empty folder each, and its very
command with the variables that Azure ML sets. What would be a mount of the job's output is a folder
here, written to the datastore at the end. The nodes are taken away once, in the middle.

Source of the variables: https://learn.microsoft.com/azure/machine-learning/how-to-train-distributed-gpu
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

from tests.cluster.azurite import CONTAINER
from tests.conftest import free_port
from tests.waiting import until

# A tag: what rank 0 has printed when its nodes are taken away. Another one: they stay to the end.
# Jobs without either stay in the queue.
EVICTED, KEPT = "stand-in.evict", "stand-in.keep"


def run_job(azure, job):
    properties = job.body["properties"]
    folder = azure.folder / "nodes" / job.name
    tags = properties.get("tags") or {}
    if not {EVICTED, KEPT} & tags.keys():
        return
    code = urlsplit(azure.find(properties["codeId"])["codeUri"]).path
    for node in range(properties["resources"]["instanceCount"]):
        azure.azurite.download(code, folder / f"node{node}")
    (folder / "mount").mkdir()
    job.status = "Running"
    try:
        if EVICTED in tags:
            evict(start(azure, job, folder), tags[EVICTED], (folder / "rank_0.txt").read_text)
        codes = [rank.wait() for rank in start(azure, job, folder)]
        store = properties["outputs"]["store"]["uri"].partition("/paths/")[2]
        azure.azurite.upload(f"{CONTAINER}/{store}", folder / "mount")
        assert not any(codes), f"exit codes {codes}"
        job.status = "Completed"
    except Exception as error:  # a platform shows whatever ended its job
        job.error = repr(error)
        job.status = "Failed"
        raise


def evict(ranks, moment, log):
    until(lambda: moment in log(), 200, log)
    # Azure's notice; then the node is gone. A process that ended before its node did would make the
    # job a failed one.
    for rank in ranks:
        os.killpg(rank.pid, signal.SIGTERM)
    until(lambda: "preempted:" in log(), 60, log)
    time.sleep(2)  # for one that does not wait to end
    assert all(rank.poll() is None for rank in ranks), "a rank ended before its node"
    for rank in ranks:
        os.killpg(rank.pid, signal.SIGKILL)


def start(azure, job, folder):
    """A process of each node; with the distribution MPI, one mpirun of all of them."""
    properties = job.body["properties"]
    port = str(free_port())
    size = properties["resources"]["instanceCount"]
    command = properties["command"].replace("${{outputs.store}}", str(folder / "mount"))
    for name, entry in properties["inputs"].items():
        command = command.replace(f"${{{{inputs.{name}}}}}", entry["uri"])
    env = {k: v for k, v in os.environ.items() if k in ("HOME", "LANG", "TMPDIR")}
    env |= {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "GLOO_SOCKET_IFNAME": "lo"}
    env |= azure.identity() | properties["environmentVariables"]
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "AZUREML_RUN_ID": job.name}
    env |= {"WORLD_SIZE": str(size), "LOCAL_RANK": "0"}
    env["AZ_BATCH_HOST_LIST"] = ",".join(f"10.0.0.{n + 4}" for n in range(size))
    if properties["distribution"]["distributionType"] == "Mpi":
        log = folder / "rank_0.txt"
        job.logs["user_logs/std_log_process_00.txt"] = log
        mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", str(size)]
        options = {"stderr": subprocess.STDOUT, "start_new_session": True, "env": env}
        with log.open("ab") as file:
            words = [*mpirun, "bash", "-c", command]
            return [subprocess.Popen(words, stdout=file, cwd=folder / "node0", **options)]
    ranks = []
    for rank in range(size):
        log = folder / f"rank_{rank}.txt"
        names = ("RANK", "NODE_RANK", "AZUREML_CR_NODE_RANK")
        job.logs[f"user_logs/std_log_process_{rank:02d}.txt"] = log
        with log.open("ab") as file:
            options = {
                "stdout": file,
                "stderr": subprocess.STDOUT,
                "start_new_session": True,
                "cwd": folder / f"node{rank}",
                "env": env | dict.fromkeys(names, str(rank)),
            }
            ranks.append(subprocess.Popen(["bash", "-c", command], **options))
    return ranks
