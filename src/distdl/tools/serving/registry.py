"""Logs an exported MLflow model to the run that trained it, and registers it as a version."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf

from distdl.config.schema import Checkpoint
from distdl.runs.checkpoints import Judged, judged_by
from distdl.runs.directory import RunDirectory, shown
from distdl.tools.serving.model_folder import read
from distdl.tracking.outbox import Outbox, redact
from distdl.tracking.refusals import described, refusal
from distdl.tracking.sync import server_of
from distdl.util.errors import Unfinished, UserError
from distdl.util.screen import say

if TYPE_CHECKING:
    from mlflow import MlflowClient

CHAMPION = "champion"
SERVER = "tracking.mlflow.tracking_uri"
GONE = ("RESOURCE_DOES_NOT_EXIST", "INVALID_STATE")  # MLflow's codes for a deleted run
# Tags of a version: what its metric was measured on, and by which two versions are compared.
SHA256, METRIC, VALUE, DATA = (f"distdl.{key}" for key in ("sha256", "metric", "value", "data"))


def publish(config: DictConfig, run: RunDirectory, folder: Path) -> None:
    """Sends a model to the MLflow run, and registers it if `tracking.mlflow.register` names it. To
    repeat it changes nothing.

    Raises:
        UserError: The run was not tracked in MLflow.
        Unfinished: The server failed.
    """
    from mlflow.exceptions import MlflowException

    from distdl.tracking.client import import_client, prepare_environment

    outbox = Outbox(run.path)
    # What the config says was agreed to when the export was planned (`config.consent`).
    agreed = OmegaConf.select(config, SERVER)
    uri = server_of(outbox, agreed, f"{SERVER}=")
    run_id = outbox.state.run_id
    if not run_id:
        raise UserError.at(
            shown(run.path),
            what="is not on the MLflow server yet",
            remedy=f"python -m distdl track sync {shown(run.path)}, and then this command again",
            code="incomplete",
        )
    prepare_environment()
    client = import_client()(uri, registry_uri=uri)
    try:
        client.log_artifacts(run_id, str(folder), folder.name)  # again, as it may be incomplete
        say(f"model   runs:/{run_id}/{folder.name}")
        if name := OmegaConf.select(config, "tracking.mlflow.register"):
            _register(client, str(name), run_id, folder, _judged(config, run))
    except (MlflowException, OSError) as error:
        again = f"the model is in {shown(folder)}; the same command sends it"
        if refused := refusal(error, uri):
            raise Unfinished.at(
                "tracking.mlflow",
                what=f"MLflow at {redact(uri)} {refused.what}",
                remedy=f"{refused.remedy}; {again}",
                code="platform-refuses",
            ) from error
        if getattr(error, "error_code", "") in GONE:
            raise Unfinished.at(
                "tracking.mlflow",
                what=f"MLflow at {redact(uri)} has no active run {run_id}",
                remedy=f"python -m distdl track sync {shown(run.path)} makes another; {again}",
                code="incomplete",
            ) from error
        raise Unfinished.at(
            "tracking.mlflow",
            what=f"MLflow at {redact(uri)} fails: {described(error, uri)}",
            remedy=again,
            code="failed",
        ) from error


def _judged(config: DictConfig, run: RunDirectory) -> Judged:
    chosen = Checkpoint.of(config.checkpoint)
    return judged_by(run.checkpoints, chosen.monitor, chosen.mode)


def _register(client: MlflowClient, name: str, run_id: str, folder: Path, best: Judged) -> None:
    """Adds a version, if this checkpoint has none; `best` is what the run's best.ckpt is."""
    trained = read(folder / "artifacts/model")
    # Older exports, all of classifiers, do not say it.
    metric = best.monitor or trained.get("main_metric") or "val/acc1"
    tags = {SHA256: trained["sha256"], DATA: trained["data_key"]}
    if metric in trained["metrics"]:
        tags |= {METRIC: metric, VALUE: repr(float(trained["metrics"][metric]))}
    if not client.search_registered_models(f"name = '{name}'"):
        client.create_registered_model(name)
    versions = client.search_model_versions(f"name = '{name}'")
    same = (each for each in versions if each.tags.get(SHA256) == tags[SHA256])
    source = f"{client.get_run(run_id).info.artifact_uri}/{folder.name}"
    version = next(same, None) or client.create_model_version(name, source, run_id, tags=tags)
    champion = client.get_registered_model(name).aliases.get(CHAMPION)
    before = client.get_model_version(name, champion).tags if champion else None
    moves, reason = succeeds(tags, before, best.mode)
    if moves:
        client.set_registered_model_alias(name, CHAMPION, version.version)
    stands = f"is version {version.version}" if moves else "does not move"
    say(f"version models:/{name}/{version.version}")
    say(f"alias   {CHAMPION} {stands}: {reason}")


def succeeds(
    new: Mapping[str, str], champion: Mapping[str, str] | None, mode: str
) -> tuple[bool, str]:
    """Whether a version with the tags `new` becomes the champion, and why: it does if it is better
    by the same metric on the same data. `mode` is "max" or "min"."""
    if VALUE not in new:
        return False, "the checkpoint does not have the metric of checkpoint.monitor"
    metric = new[METRIC]
    if champion is None:
        return True, f"it is the first with a {metric}"
    if (champion.get(METRIC), champion.get(DATA)) != (metric, new[DATA]):
        return False, "it was measured by another metric or on other data"
    before, now = float(champion[VALUE]), float(new[VALUE])
    better = now > before if mode == "max" else now < before
    return better, f"{metric} {now:.4g}, {'better' if better else 'not better'} than {before:.4g}"
