"""Ranks that another program has started."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from distdl.config import compose, programs
from distdl.launch import external
from distdl.ranks.environment import Environment
from distdl.util.errors import UserError


def rank(local, of=4):
    return Environment("slurm", local, of, local, of)


def test_a_list_cannot_choose_for_ranks_that_run_already():
    """torchrun -m distdl trainer.devices=[1,2] took cards 0 and 1."""
    config = OmegaConf.create({"trainer": {"devices": [1, 2]}})
    with pytest.raises(UserError, match="export CUDA_VISIBLE_DEVICES before"):
        external.adopt_ranks(config, rank(0, 2), config.trainer.devices)


def test_a_program_is_refused(tmp_path, monkeypatch):
    """torchrun ... -m distdl run -- COMMAND: each rank would start a distdl of its own."""
    monkeypatch.chdir(tmp_path)
    config = compose.compose([programs.command_override(["true"])])
    with pytest.raises(UserError, match="let distdl start the ranks: python -m distdl run"):
        external.refuse_program(config)
    external.refuse_program(compose.compose([]))
