"""What trackers record of a run, a training or a program. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from omegaconf import DictConfig

from distdl.config import recipe as configs
from distdl.runs import inputs
from distdl.runs.directory import CONFIG, PROVENANCE, read_json
from distdl.tracking import STUDY, STUDY_KEY, RunInfo
from distdl.util.names import kept_apart
from distdl.validation.resolve import resolve
from distdl.worker.rank_context import RankContext


def run_info(config: DictConfig, context: RankContext) -> RunInfo:
    """Collects what tracking records; the same for all ranks."""
    path = context.run.path
    launch = context.launch
    world_size = context.resources.world_size
    run_id = launch["run_id"]
    provenance = read_json(path / PROVENANCE)
    params = parameters(config, provenance)
    if configs.is_own((config.get("data") or {}).get("_target_")):  # others may divide the batch
        params["global_batch_size"] = launch.get("global_batch_size")
    git = provenance.get("git") or {}
    tags = {"git.commit": git.get("commit"), "world_size": world_size}
    tags["tags"] = ",".join(config.get("tags") or ()) or None
    if search := launch.get("search"):
        tags |= {STUDY: run_id.rpartition("/")[0], STUDY_KEY: search.get("key")}
    return RunInfo(
        run_dir=path,
        run_id=run_id,
        attempt=context.attempt.number,
        **dict.fromkeys(("rank", "local_rank", "node_rank"), 0),
        world_size=world_size,
        # The folder of all runs. In a store that holds only this run, it is the store itself.
        output_dir=path.parents[run_id.count("/")] if str(path).endswith(run_id) else path,
        experiment_name=run_id.split("/")[0],
        name=member_name(provenance.get("swept") or ()) or run_id.rpartition("/")[2],
        key=configs.hash_of(f"{run_id} {provenance.get('created')}{provenance.get('id', '')}", 32),
        params=params,
        changed=launch.get("changes") or {},
        artifacts=[path / CONFIG, path / PROVENANCE],
        tags={k: v for k, v in tags.items() if v is not None},
    )


def parameters(config: DictConfig, provenance: Mapping[str, Any]) -> dict[str, Any]:
    """The run's parameters by dotted names: swept values first, then other overrides, then the rest
    of the config without null values. A value from the environment or from `${input:...}` stays an
    expression."""
    resolved = resolve(configs.recipe_of(config))
    hidden = {p: e for p, e in resolved.expressions.items() if "${oc.env:" in e or "${input:" in e}
    flat: dict[str, Any] = {}
    for path, value in leaves(resolved.values):
        parts = [e for p, e in hidden.items() if p[: len(path)] == path[: len(p)]]
        flat[".".join(path)] = " ".join(parts) or resolved.hide_environment(str(value))
    for key, entry in (provenance.get(inputs.RECORD) or {}).items():
        flat[key] = entry["name"]  # and not where its file is on this machine
    typed: dict[str, Any] = {}
    for override in (*(provenance.get("swept") or ()), *(provenance.get("overrides") or ())):
        key, _, value = str(override).partition("=")
        typed.setdefault(key, flat.get(key, value))
    return typed | {k: v for k, v in flat.items() if k not in typed and v != "None"}


def leaves(values: object, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each value inside nested mappings, with its path. A list is one value."""
    if not isinstance(values, dict):
        yield path, values
    else:
        for key, value in values.items():
            yield from leaves(value, (*path, str(key)))


def member_name(swept: Sequence[str]) -> str:
    """The name of a sweep's member, made of its varied values: `lr=0.1 seed=2`. If two short keys
    are equal, all keys are written in full."""
    shorts = [re.sub(r"^[^=]*\.", "", override) for override in swept]
    keys = {override.partition("=")[0] for override in shorts}
    name = " ".join(shorts if len(keys) == len(shorts) else swept)
    return kept_apart(name, name)
