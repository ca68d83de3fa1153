"""Whether a model's `weights`, `head`, `freeze` and `norm` fit its network, before the start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import nn

from distdl.config import published
from distdl.models import freezing, lone_values
from distdl.models.parts import heads_of
from distdl.models.weights import NEW, fit_to, read_weights
from distdl.runs.checkpoints import located
from distdl.util.errors import Note, Problem, UserError
from distdl.validation.meta import on_meta

# They lay out once what is trained. distdl's own that do so are built again, all but the first.
MODEL_PARALLEL, ZERO = "ModelParallelStrategy", "DeepSpeedStrategy"


def problems(
    config: Mapping[str, object], context: Mapping[str, object] | None, classifies: bool
) -> Iterator[Problem | str]:
    """Problems of a model node, and notes; paths are relative to it. What depends on the network is
    found if the network can be built on `meta`; if not, the start of the ranks finds it.

    Args:
        context: As `validation.own_checks` gives it to a `check`; None: a call without a config.
        classifies: Whether `weights` are all of the network's, and its head gives `num_classes`. Of
            another model its own check says what does not fit the network.
    """
    file = config.get("weights")
    head = config.get("head")
    patterns = config.get("freeze") or []
    if head == NEW and not file:
        yield Problem(
            "head",
            what="has no effect without model.weights",
            remedy="model.weights=FILE, timm:NAME or torchvision:NAME, or model.head=null",
            code="conflict",
        )
    if config.get("lora") and not file and not _is_pretrained(config.get("network")):
        yield Note("model.lora without model.weights: adapters are trained beside random weights")
    if config.get("unfreeze_at") is not None:
        yield from _unfreezing(patterns, context)
    # A name that nobody has fetched: nothing is about to start (`distdl plan`).
    named = not file or published.is_name(file)
    here = context is not None and bool(context["local"] or context.get("fetched"))
    reads = here and not named
    if not config.get("lora"):  # of a run that has a checkpoint, that has all weights
        reads = reads and not (context or {}).get("resumes")
    try:
        if reads:
            located(str(file))
    except UserError as error:
        yield from within_model(error)
        return
    lone = lone_values.size_of_one(context) if context is not None and classifies else None
    if config.get("norm") == "group":
        lone = None
    if context is None or not classifies or not (patterns or reads or lone):
        return
    network = network_of(config, context)
    if network is None:
        return
    count = config.get("num_classes")
    classes = count if isinstance(count, int) else None
    try:
        if reads:
            fit = fit_to(network, str(file), read_weights(str(file)), _text(head), classes)
            whole = context.get("config")
            is_dry = isinstance(whole, Mapping) and whole.get("dry_run")
            if is_dry or not context["local"]:  # elsewhere rank 0 says it
                yield Note(fit.said(located(str(file)), len(network.state_dict())))
        frozen = freezing.Frozen()
        if isinstance(patterns, list) and patterns:
            frozen = freezing.freeze(network, patterns, heads_of(network, classes))
    except UserError as error:
        yield from within_model(error)
        return
    if config.get("unfreeze_at") is not None:
        frozen = freezing.Frozen()  # of which nothing is left by then
    wrong = lone_values.problem(network, frozen, lone) if lone else None
    if wrong is not None:
        yield wrong


def _is_pretrained(network: object) -> bool:
    """Whether the node of a network asks timm or torchvision for published weights itself."""
    node = network if isinstance(network, Mapping) else {}
    return bool(node.get("pretrained") or node.get("weights"))


def within_model(error: UserError) -> Iterator[Problem]:
    """The problems of a network that is built, as a check of the section `model` names them. Those
    of a file are about the key that names it."""
    for problem in error.problems:
        key = problem.path.removeprefix("model.")
        if key == problem.path:
            yield replace(problem, path="weights", what=f"{problem.path}: {problem.what}")
        else:
            yield replace(problem, path=key)


def network_of(
    config: Mapping[str, object], context: Mapping[str, object] | None
) -> nn.Module | None:
    """The network of a model node, on `meta`; None: its node is refused, or it cannot be built
    there."""
    refused = (context or {}).get("refused") or ()
    node = config.get("network")
    if not isinstance(node, Mapping) or (isinstance(refused, list) and "model" in refused):
        return None
    return on_meta(node)


def _unfreezing(patterns: object, context: Mapping[str, object] | None) -> Iterator[Problem]:
    if not patterns:
        yield Problem(
            "unfreeze_at",
            what="has no effect without model.freeze",
            remedy="model.freeze=[backbone]",
            code="conflict",
        )
    config = (context or {}).get("config")
    strategy = config.get("strategy") if isinstance(config, Mapping) else None
    target = str(strategy.get("_target_")) if isinstance(strategy, Mapping) else ""
    kind = target.rpartition(".")[2]
    if kind == MODEL_PARALLEL or (kind == ZERO and not target.startswith("distdl.")):
        yield Problem(
            "unfreeze_at",
            what=f"{kind} is built for the weights that are trained at the start",
            remedy="strategy=fsdp or deepspeed_zero3; or a second run with model.weights=FILE",
            code="unsupported",
        )
    checkpoint = config.get("checkpoint") if isinstance(config, Mapping) else None
    sharded = isinstance(checkpoint, Mapping) and checkpoint.get("sharded")
    if kind == ZERO and sharded:
        yield Problem(
            "unfreeze_at",
            what="ZeRO reads its own folders only as they were trained, with these weights frozen",
            remedy="checkpoint.sharded=false",
            code="conflict",
        )


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
