"""What SageMaker's own description of `create_training_job`, in botocore, allows in a request.

The description has the limits of every text, number and list: at most 50 tags, 16 subnets, 100
variables of 512 characters. The service refuses what breaks them, but only at the submission.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from distdl.util.errors import Problem
from distdl.util.suggest import did_you_mean_word

if TYPE_CHECKING:
    from botocore.model import Shape

    from distdl.launchers.sagemaker.sagemaker_settings import SageMakerSettings

# Part of a request -> the key that it comes from. The longest that fits counts.
KEYS: Mapping[tuple[str, ...], str] = {
    ("TrainingJobName",): "name",
    ("AlgorithmSpecification", "TrainingImage"): "launcher.image",
    ("AlgorithmSpecification", "MetricDefinitions"): "launcher.metrics",
    ("RoleArn",): "launcher.role",
    ("InputDataConfig",): "launcher.inputs",
    ("OutputDataConfig",): "launcher.prefix",
    ("CheckpointConfig",): "launcher.prefix",
    ("OutputDataConfig", "KmsKeyId"): "launcher.kms_key",
    ("ResourceConfig", "VolumeKmsKeyId"): "launcher.kms_key",
    ("ResourceConfig", "VolumeSizeInGB"): "launcher.volume_gb",
    ("ResourceConfig", "InstanceType"): "launcher.instance_type",
    ("ResourceConfig", "InstanceCount"): "trainer.num_nodes",
    ("ResourceConfig", "InstanceGroups"): "launcher.instance_groups",
    ("ResourceConfig", "KeepAlivePeriodInSeconds"): "launcher.keep_alive",
    ("ResourceConfig", "TrainingPlanArn"): "launcher.training_plan",
    ("StoppingCondition", "MaxRuntimeInSeconds"): "launcher.walltime",
    ("StoppingCondition", "MaxWaitTimeInSeconds"): "launcher.max_wait",
    ("RetryStrategy",): "launcher.retries",
    ("Tags",): "launcher.tags",
    ("Environment",): "launcher.env",
    ("VpcConfig", "Subnets"): "launcher.subnets",
    ("VpcConfig", "SecurityGroupIds"): "launcher.security_groups",
}
# The fields by which the elements of lists are told apart; they are names in the settings.
NAMES = ("Key", "Name", "ChannelName", "InstanceGroupName")
OWN = "name"  # the key behind elements that distdl adds
# Classes of characters that Java's regular expressions know and Python's do not.
CLASSES = {
    r"\p{L}": r"\w",
    r"\p{N}": r"\d",
    r"\p{Z}": r" \u00a0\u2000-\u200a\u3000",
    r"\p{Alnum}": "A-Za-z0-9",
}


@cache
def input_shape() -> Shape | None:
    """The description of the arguments; None if botocore is not installed."""
    try:
        from botocore.session import Session
    except ImportError:
        return None
    service = Session().get_service_model("sagemaker")
    return service.operation_model("CreateTrainingJob").input_shape


def problems(body: Mapping[str, Any], settings: SageMakerSettings) -> list[Problem]:
    """What the service would refuse in a request, by the keys that the user has written; none if
    botocore is not installed."""
    shape = input_shape()
    found: dict[str, Problem] = {}
    for each in violations(shape, body) if shape else ():
        path = key_of(each.where, body, settings)
        what = each.what
        setting = getattr(settings, path.removeprefix("launcher."), None)
        if isinstance(each.value, Sized) and isinstance(setting, (list, dict)):
            own = len(each.value) - len(setting)
            what += f" (distdl adds {own} of its own)" if own > 0 else ""
        found.setdefault(path, Problem(path, what=what, remedy=each.remedy, code=each.code))
    return list(found.values())


def key_of(
    where: tuple[str | int, ...], body: Mapping[str, Any], settings: SageMakerSettings
) -> str:
    """The key of a part of the request, with the user's own name of an element
    (`launcher.tags.team`)."""
    start = max((part for part in KEYS if where[: len(part)] == part), key=len, default=())
    key = KEYS.get(start, "launcher")
    inside = where[len(start) :]
    if not inside:
        return key
    if start == ("Environment",):
        return f"{key}.{inside[0]}" if inside[0] in settings.env else str(inside[0])
    element: Any = body
    for step in where[: len(start) + 1]:
        element = element[step]
    if not isinstance(element, Mapping):
        return key
    name = next((element[field] for field in NAMES if field in element), None)
    # The bundle's channel and the run's tag are distdl's own.
    return f"{key}.{name}" if name in getattr(settings, key.removeprefix("launcher.")) else OWN


@dataclass(frozen=True)
class Violation:
    """A part of a request that the service refuses: where it is, and what it is."""

    where: tuple[str | int, ...]
    value: Any
    what: str
    remedy: str = ""
    code: str = "out-of-range"


def violations(
    shape: Shape, value: object, where: tuple[str | int, ...] = ()
) -> Iterator[Violation]:
    """Every part of a request that breaks a limit of its description. What is missing, the check of
    the settings has named."""
    if value is None:
        return
    if what := size_problem(shape, value):
        yield Violation(where, value, what)
    if isinstance(value, str):
        yield from text_violations(shape, value, where)
    elif isinstance(value, Mapping) and shape.type_name == "structure":
        for name, each in value.items():
            yield from violations(shape.members[name], each, (*where, name))
    elif isinstance(value, Sequence):
        for number, each in enumerate(value):
            yield from violations(shape.member, each, (*where, number))
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from violations(shape.key, name, (*where, name))
            yield from violations(shape.value, each, (*where, name))


def size_problem(shape: Shape, value: object) -> str:
    """What is wrong with a number, or with the length of a text, list or mapping; mostly ""."""
    units = {"string": " characters", "list": " entries", "map": " entries"}
    unit = units.get(shape.type_name, "")
    size: float
    if isinstance(value, Sized):
        size = len(value)
    elif isinstance(value, int | float):
        size = value
    else:
        return ""
    least, most = shape.metadata.get("min"), shape.metadata.get("max")
    has = "has " if unit else "is "
    if most is not None and size > most:
        return f"{has}{size}{unit}; SageMaker allows at most {most}"
    if least is not None and size < least:
        return f"{has}{size}{unit}; SageMaker needs at least {least}"
    return ""


def text_violations(shape: Shape, text: str, where: tuple[str | int, ...]) -> Iterator[Violation]:
    if shape.enum and text not in shape.enum:
        near = did_you_mean_word(text, shape.enum)
        yield Violation(where, text, f"SageMaker does not know {text!r}", near, "wrong-choice")
    pattern = shape.metadata.get("pattern")
    if pattern and not in_python(pattern).fullmatch(text):
        remedy = f"it has to match {pattern}"
        yield Violation(where, text, f"SageMaker refuses {text!r}", remedy, "platform-refuses")


def in_python(pattern: str) -> re.Pattern[str]:
    for java, python in CLASSES.items():
        pattern = pattern.replace(java, python)
    return re.compile(pattern)
