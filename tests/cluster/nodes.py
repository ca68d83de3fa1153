"""The nodes of the stand-in for Azure: a job's snapshot, in an empty folder each, and its very
command with the variables that Azure ML sets, one process per device. What would be a mount of the
job's output is a folder here, filled from the datastore before and written back to it afterwards.

Source of the variables: https://learn.microsoft.com/azure/machine-learning/how-to-train-distributed-gpu
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

from tests.cluster.azurite import CONTAINER, free_port
from tests.waiting import until

HELD = "stand-in.hold"  # a tag: the job stays in the queue


def run_job(azure, job) -> None:
    """From the queue to the end, with every restart that an eviction brings."""
    properties = job.body["properties"]
    if HELD in (properties.get("tags") or {}):
        return
    job.status = "Preparing"
    try:
        if properties["jobType"] == "Command":
            job.nodes = Nodes(azure, job, {**properties, "name": job.name})
            job.status, job.error = job.nodes.run()
        else:
            job.status = sweep(azure, job, properties)
    except Exception as error:  # of this file
        job.status, job.error = "Failed", f"the stand-in failed: {error!r}"
        raise


def sweep(azure, job, properties) -> str:
    """The trials of a sweep job, all at once; as with Azure, their numbers mean nothing."""
    _, (members,) = properties["searchSpace"]["member"]
    job.status = "Running"

    def run(trial, child) -> None:
        child.status, child.error = Nodes(azure, child, trial).run()

    with ThreadPoolExecutor(len(members)) as pool:
        for number, member in enumerate(reversed(members)):
            name, tags = f"{job.name}_{number}", {"hyperparameters": json.dumps({"member": member})}
            child = azure.jobs[name] = type(job)(name, {}, "Running", tags=tags)
            job.children.append(child)
            trial = {key: properties.get(key) for key in ("inputs", "outputs")}
            trial |= {**properties["trial"], "name": name}
            trial["command"] = trial["command"].replace("${{search_space.member}}", member)
            pool.submit(run, trial, child)
    return "Completed"


class Nodes:
    """All nodes of one job, by its definition or a trial's, with its `name`."""

    def __init__(self, azure, job, properties) -> None:
        self.azure, self.job, self.properties = azure, job, properties
        self.count = properties["resources"]["instanceCount"]
        self.devices = properties["distribution"]["processCountPerInstance"]
        self.folder = azure.folder / "nodes" / properties["name"]
        output = properties["outputs"]["store"]["uri"]
        path = re.fullmatch(r"azureml://(?:.*/)?datastores/\w+/paths/(.+)", output)[1]
        self.path, self.store = f"{CONTAINER}/{path}", self.folder / "mount"
        self.evicted = threading.Event()

    def run(self) -> tuple[str, str]:
        """Returns the status, and the message if it failed."""
        code = self.azure.resources[self.properties["codeId"]]["properties"]["codeUri"]
        for node in range(self.count):
            self.azure.azurite.download(urlsplit(code).path, self.folder / f"node{node}")
        self.azure.azurite.download(self.path, self.store)
        codes = self.start()
        while self.evicted.is_set():
            self.evicted.clear()
            codes = self.start()
        self.azure.azurite.upload(self.path, self.store)
        if self.job.cancelled:
            return "Canceled", ""
        if any(codes):
            return "Failed", f"Execution failed. Process exited with status codes {codes}"
        return "Completed", ""

    def start(self) -> list[int]:
        """Starts every rank and waits; returns their exit codes."""
        port, devices = str(free_port()), range(self.devices)
        ranks = [self.rank(node, i, port) for node in range(self.count) for i in devices]
        self.job.status = "Running"
        while any(rank.poll() is None for rank in ranks):
            if self.evicted.is_set():
                # Azure's notice; then the node is gone. A process that ended before its node did
                # would make the job a failed one.
                self.signal(ranks, signal.SIGTERM)
                log = (self.folder / "std_log_process_00.txt").read_text
                until(lambda log=log: "preempted:" in log(), 60, log)
                time.sleep(4)  # for one that does not wait to end
                assert all(rank.poll() is None for rank in ranks), "a rank ended before its node"
                self.signal(ranks, signal.SIGKILL)
                break
            if self.job.cancelled:
                self.signal(ranks, signal.SIGTERM)
                break
            time.sleep(0.1)
        return [rank.wait(60) for rank in ranks]

    def rank(self, node: int, local: int, port: str):
        rank = node * self.devices + local
        command = self.properties["command"].replace("${{outputs.store}}", str(self.store))
        for name, entry in (self.properties.get("inputs") or {}).items():
            path = entry["uri"].removeprefix("file://")
            command = command.replace(f"${{{{inputs.{name}}}}}", path)
        env = {k: v for k, v in os.environ.items() if k in ("HOME", "LANG", "TMPDIR")}
        env |= {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "GLOO_SOCKET_IFNAME": "lo"}
        env |= self.azure.identity() | self.properties["environmentVariables"]
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NODE_RANK": str(node)}
        env |= {"WORLD_SIZE": str(self.count * self.devices), "RANK": str(rank)}
        env |= {"LOCAL_RANK": str(local), "AZUREML_CR_NODE_RANK": str(node)}
        env |= {"AZUREML_RUN_ID": self.properties["name"]}
        env["AZ_BATCH_HOST_LIST"] = ",".join(f"10.0.0.{n + 4}" for n in range(self.count))
        log = self.folder / f"std_log_process_{rank:02d}.txt"
        self.job.logs[f"user_logs/{log.name}"] = log
        command = self.azure.places.inside(["bash", "-c", command])
        with log.open("ab") as file:
            options = {"stdout": file, "stderr": subprocess.STDOUT, "start_new_session": True}
            return subprocess.Popen(command, cwd=self.folder / f"node{node}", env=env, **options)

    @staticmethod
    def signal(ranks, number: int) -> None:
        for rank in ranks:
            if rank.poll() is None:
                os.killpg(rank.pid, number)
