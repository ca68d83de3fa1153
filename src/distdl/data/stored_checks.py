"""Checks of stored samples before anything starts: whether they are there, and fit the config."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from distdl.config import epochs, task_facts
from distdl.data.roots import QUICK, cache_root, expanded, is_listed, is_prepared
from distdl.data.stored_form import StoredForm
from distdl.datasets.reading import open_data_set
from distdl.stores.files import readable
from distdl.util.errors import Problem, UserError


def check(
    form: type[StoredForm], config: Mapping[str, Any], context: Mapping[str, Any] | None = None
) -> Iterable[Problem | str]:
    """Problems of a data node, with paths relative to it, and notes (str) for the user. Files
    and servers are checked only for a local run: a remote job may see other ones.

    Args:
        context: {"local": whether the run is on this machine}; None: it is.
    """
    local = context is None or bool(context["local"])
    yield from form.domain.check(config, local=local)
    predicts = "predict_dataloader" in task_facts.of((context or {}).get("config", {})).calls
    if not local:
        yield f"the job itself checks {str(config['root']).partition('?')[0]}"  # no signature
        return
    try:
        root = expanded(str(config["root"]))
        with readable("root"):
            if predicts and form.reads_listed and is_listed(root, QUICK):
                return
            if not is_prepared(root):
                yield from without_windows(root, config.get("order"))
                found = [*form.check_folder(Path(root), config)]
                yield from found or _check_epoch(form, Path(root), config, context)
                return
        data = open_data_set(root, patience=QUICK, cache_root=cache_root(config.get("cache_dir")))
        if data.note:
            yield data.note
        found = [*form.misfits(data, config)]
        yield from found
        if not found and "train" in data.manifest.splits:
            count = data.manifest.splits["train"].samples + form.added(config)
            yield from _of_epoch(context, count)
    except UserError as error:
        yield from (replace(p, path="root") for p in error.problems)


def _check_epoch(
    form: type[StoredForm],
    root: Path,
    node: Mapping[str, Any],
    context: Mapping[str, Any] | None,
) -> Iterable[Problem]:
    """What does not fit the samples of a folder. To list a large one takes seconds, so it is
    listed no further than the check needs."""
    config = (context or {}).get("config")
    sizes = epochs.batch_sizes(config, (context or {}).get("world_size", 1)) if config else None
    if sizes is None:
        return
    added = form.added(node)
    if _counts_batches(context):
        yield from _of_epoch(context, form.count_folder(root, node) + added)
        return
    batch, shares = sizes
    count = form.count_up_to(root, node, batch * shares) + added
    if count < batch * shares:
        yield from _of_epoch(context, count)


def _counts_batches(context: Mapping[str, Any] | None) -> bool:
    """Whether a setting depends on the number of batches. Listing a folder may take seconds."""
    trainer = ((context or {}).get("config") or {}).get("trainer") or {}
    return epochs.is_count(trainer.get("val_check_interval"))


def _of_epoch(context: Mapping[str, Any] | None, samples: int) -> Iterable[Problem]:
    """What does not fit the epochs of a run; the path is that of the data node."""
    config = (context or {}).get("config")
    world_size = (context or {}).get("world_size", 1)
    for problem in epochs.problems(config, samples, world_size) if config else ():
        section, _, key = problem.path.partition(".")
        yield Problem(
            key if section == "data" else "",
            what=problem.what if section == "data" else f"{problem.path} {problem.what}",
            remedy=problem.remedy,
            code=problem.code,
        )


def without_windows(root: str, order: object) -> Iterable[Problem]:
    """The problem of an order of shards in a folder that has none."""
    if order == "windows":
        yield Problem(
            "order",
            what=f"{root} is no prepared set, and windows are of its shards",
            remedy="data.order=shuffled",
            code="conflict",
        )
