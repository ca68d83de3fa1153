"""Every test here has its own environment, and those that write to MLflow share a database."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path) -> None:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "AZUREML_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")


@pytest.fixture(scope="module")
def outputs(tmp_path_factory) -> Path:
    """One project's output folder: creating its database takes seconds."""
    return tmp_path_factory.mktemp("outputs")
