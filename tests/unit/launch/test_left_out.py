"""A lost or slow host is left out of the next attempt, at the same global batch, and used again
once it answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distdl.config import batches, compose
from distdl.config import recipe as configs
from distdl.launch import left_out, planning, resuming, submitting
from distdl.launch.planning import Plan
from distdl.runs.directory import Attempt
from tests.conftest import TINY

SLOW = {"host": "node2.cluster", "share": 0.6}  # of a step


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_stage_2: None) -> Path:
    """A file with the names of those that do not answer."""
    monkeypatch.chdir(tmp_path)
    down, ssh = tmp_path / "down", tmp_path / "ssh"
    down.write_text("")
    script = 'for word; do grep -qx "$word" {} && exit 255; done; exit 0'
    ssh.write_text(f"#!/bin/sh\n{script.format(down)}\n")
    ssh.chmod(0o755)
    return down


def planned(tmp_path: Path, nodes: int, *more: str) -> Plan:
    names = ",".join(f"node{number}" for number in range(1, nodes + 1))
    where = ("launcher=mpi", f"launcher.hosts=[{names}]", f"launcher.ssh={tmp_path / 'ssh'}")
    if nodes == 0:
        where = ("launcher=slurm",)
        nodes = 4
    size = (f"trainer.num_nodes={nodes}", "trainer.devices=1", "data.batch_size=12", "name=r")
    return planning.plan(compose.compose([*TINY, *where, *size, *more]))


def attempted(plan: Plan, lost: str = "", **status: Any) -> Attempt:
    """An attempt of a plan that failed."""
    if not plan.run.exists:
        plan.run.create(configs.to_yaml(plan.recipe), {})
    attempt = plan.run.begin_attempt(submitting.launch_record(plan))
    if lost:
        message = f"{lost} does not answer any more"
        attempt.record_error(1, "HostLost", message, "", host=lost)
    attempt.fail("it failed", 1)
    attempt.update(**status)
    return attempt


def hosts_of(plan: Plan) -> list[str]:
    return [str(host).partition(":")[0] for host in plan.config.launcher.hosts]


def global_batch(plan: Plan) -> tuple[int, int | None]:
    """The batch of a device, and that of all."""
    total = batches.global_batch_size(plan.config, plan.resources)
    return plan.config.data.batch_size, total


# nodes, those that do not answer, what the last attempt recorded -> the hosts of the next attempt
MPI = {
    "all answer": (2, "", {}, "node1 node2"),
    "one of two is lost": (2, "node2", {}, "node1"),
    "the first one": (2, "node1", {}, "node2"),
    "one of four": (4, "node2", {}, "node1 node3 node4"),
    "five do not divide the batch": (6, "node3", {}, "node1 node2 node4 node5"),
    "none is left": (2, "node1\nnode2", {}, "node1 node2"),
    "one that costs less than it does": (2, "", {"slow": {**SLOW, "share": 0.4}}, "node1 node2"),
    "the same of four": (4, "", {"slow": {**SLOW, "share": 0.4}}, "node1 node3 node4"),
    "a damaged record": (2, "", {"slow": {"host": 3, "share": "much"}}, "node1 node2"),
    "both": (4, "node4", {"slow": SLOW}, "node1 node3"),
}


@pytest.mark.parametrize("case", MPI)
def test_mpi_goes_on_with_the_others(case: str, hosts: Path, tmp_path: Path) -> None:
    nodes, down, status, expected = MPI[case]
    plan = planned(tmp_path, nodes)
    attempted(plan, **status)
    hosts.write_text(f"{down}\n", encoding="utf-8")
    fitted = left_out.fit(plan, set(), retry=True)
    left = expected.split()
    total = 12 * nodes
    assert hosts_of(fitted) == left
    assert fitted.resources.num_nodes == len(left)
    assert fitted.config.trainer.num_nodes == len(left)
    assert global_batch(fitted) == (total // len(left), total)
    assert bool(fitted.left_out) == any("left out: " in note for note in fitted.notes)


def test_it_grows_back_when_the_host_answers(hosts: Path, tmp_path: Path) -> None:
    plan = planned(tmp_path, 2)
    ssh = [f"launcher.ssh={tmp_path / 'ssh'}"]
    attempted(plan, lost="node2")
    hosts.write_text("node2\n", encoding="utf-8")
    for _ in range(2):  # also in a later command, as long as it does not answer
        resumed = resuming.plan(plan.run, ssh)
        smaller = left_out.fit(resumed, set())
        assert hosts_of(smaller) == ["node1"]
        assert global_batch(smaller) == (24, 24)
        record = attempted(smaller).launch()
        assert record["left_out"]["hosts"] == ["node2"]
        assert record["global_batch_size"] == 24
    hosts.write_text("", encoding="utf-8")
    whole = left_out.fit(resuming.plan(plan.run, ssh), set())
    assert hosts_of(whole) == ["node1", "node2"]
    assert global_batch(whole) == (12, 24)
    assert "left_out" not in attempted(whole).launch()
    hosts.write_text(
        "node2\n", encoding="utf-8"
    )  # no attempt has lost it: the launcher refuses it, by its name
    whole = resuming.plan(plan.run, ssh)
    assert left_out.fit(whole, set()) is whole


def test_a_slow_host_stays_out_of_one_command(hosts: Path, tmp_path: Path) -> None:
    plan = planned(tmp_path, 2)
    slow = set[str]()
    attempted(plan, slow=SLOW)
    for _ in range(2):
        fitted = left_out.fit(plan, slow, retry=True)
        assert hosts_of(fitted) == ["node1"]
        attempted(fitted)


def test_a_measured_batch_follows_the_hosts(hosts: Path, tmp_path: Path) -> None:
    """What two of three hosts have chosen, for all three; what does not divide is chosen anew."""
    plan = planned(tmp_path, 3)
    keys = ("data.batch_size", "trainer.accumulate_grad_batches", "strategy.autotune")
    attempted(plan)
    hosts.write_text("node2\n", encoding="utf-8")
    fitted = left_out.fit(plan, set(), retry=True)
    attempt = attempted(fitted)
    assert global_batch(fitted) == (18, 36)
    for batch, accumulated, then in ((9, 2, (6, 36)), (2, 9, (12, 36))):
        chosen = dict(zip(keys, (batch, accumulated, False), strict=True))
        attempt.write_launch({**attempt.launch(), "chosen": {"autotune": chosen}})
        whole = planning.with_choices(plan, attempt)
        assert global_batch(whole) == then
        assert (whole is plan) == (batch == 2)
        if whole is not plan:
            assert submitting.launch_record(whole)["changes"] == {**chosen, keys[0]: 6}


ENDS = [
    ({}, None),
    ({"lost": "node2", "slow": {"host": "node3", "share": 0.2}}, "--exclude=node2,node3"),
    ({"slow": {"host": "node3 --uid=0\n#SBATCH", "share": 0.2}}, None),
]


@pytest.mark.parametrize(("ended", "option"), ENDS)
def test_slurm_excludes_it_once(ended: dict[str, Any], option: str | None, hosts: Path) -> None:
    plan = planned(hosts.parent, 0)
    attempted(plan, **ended)
    resumed = resuming.plan(plan.run, ["dry_run=true"])
    fitted = left_out.fit(resumed, set())
    assert list(fitted.config.launcher.sbatch) == ([option] if option else [])
    assert global_batch(fitted) == (12, 48)
    attempted(fitted)
    assert list(resuming.plan(plan.run, []).config.launcher.sbatch) == []
    plan = planned(hosts.parent, 0, "launcher.sbatch=['--exclude=node9']")  # the user's own list
    attempted(plan, lost="node2")
    assert left_out.fit(plan, set()) is plan


# What sinfo prints of each node, and how many nodes the next attempt has; None: as it was.
NODES = {
    "n1|gpu*|idle n2|gpu*|down* n3|gpu*|mixed n4|gpu*|allocated n5|gpu*|idle": 4,
    "n1|gpu*|idle n2|gpu*|idle n3|gpu*|drained n4|gpu*|idle* n5|cpu|idle": 1,
    "n2|gpu*|idle n3|gpu*|down": None,  # there is no other one
    "node1|gpu*|idle node3|gpu*|idle": None,  # Slurm has other names for them
}


@pytest.mark.parametrize(("shown", "left"), NODES.items())
def test_slurm_takes_as_many_others_as_there_are(shown, left, hosts: Path, monkeypatch) -> None:
    (hosts.parent / "sinfo").write_text(f"#!/bin/sh\nprintf '%s\\n' {shown!r} | tr ' ' '\\n'\n")
    (hosts.parent / "sinfo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{hosts.parent}:/usr/bin:/bin")
    plan = planned(hosts.parent, 0)
    attempted(plan, lost="n2")
    fitted = left_out.fit(plan, set())
    assert (fitted is plan) == (left is None)
    if left:
        assert list(fitted.config.launcher.sbatch) == ["--exclude=n2"]
        assert fitted.resources.num_nodes == left
        assert global_batch(fitted) == (48 // left, 48)
