"""Lightning's own Trainer is asked, wherever validation runs."""

from __future__ import annotations

import pytest

from distdl.validation.lightnings import try_trainer

CLUSTERS = {
    "slurm": {"SLURM_NTASKS": "2", "SLURM_JOB_NAME": "train.sh", "SLURM_PROCID": "0"},
    "torchelastic": {"TORCHELASTIC_RUN_ID": "1"},
    "lsf": {"LSB_JOBID": "1", "LSB_DJOB_RANKFILE": "/none", "JSM_NAMESPACE_LOCAL_RANK": "0"},
    "kubeflow": {"KUBERNETES_PORT": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1", "RANK": "1"},
}


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_the_variables_of_a_cluster_are_those_of_the_shell(monkeypatch, cluster):
    for name, value in (CLUSTERS[cluster] | {"SLURM_JOB_ID": "7"}).items():
        monkeypatch.setenv(name, value)
    assert try_trainer({"max_epochs": 1}) is None
