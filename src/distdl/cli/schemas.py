"""What each command answers with `--json`: the classes, which are the schemas."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from distdl.util.answers import ANSWER, EVENT
from distdl.util.attribute_docs import attribute_docs
from distdl.util.exit_codes import EXIT_CODES
from distdl.util.refusal_codes import CODES

_RUNS = "distdl.launch.answers"
_STARTED = (f"{_RUNS}.RunState", f"{_RUNS}.ShownRequest")
# Command -> the classes of its answer, the usual one first.
ANSWERS: Mapping[str, tuple[str, ...]] = {
    "train": (*_STARTED, f"{_RUNS}.Configs"),
    "sweep": (f"{_RUNS}.SweepState", f"{_RUNS}.ShownRequest", f"{_RUNS}.Configs"),
    "run": _STARTED,
    "resume": _STARTED,
    "jobs list": (f"{_RUNS}.RunStates",),
    "jobs status": (f"{_RUNS}.RunStates",),
    "jobs logs": (f"{_RUNS}.Log",),
    "jobs wait": (f"{_RUNS}.Asked",),
    "jobs cancel": (f"{_RUNS}.Asked",),
    "jobs ended": (f"{_RUNS}.Asked",),
    "jobs fetch": (f"{_RUNS}.Asked",),
    "jobs resubmit": _STARTED,
    "prepare": ("distdl.cli.prepare.PreparedData",),
    "data check": ("distdl.tools.data_check.screen.CheckedData",),
    "plan": ("distdl.tools.measure.plan_answer.PlannedStrategies",),
    "doctor": ("distdl.cli.doctor.Examination", f"{_RUNS}.ShownRequest"),
    "scale": ("distdl.tools.scaling.show.Scaling",),
    "drill": ("distdl.tools.drill.drill.Drilled",),
    "serve": ("distdl.cli.serve.Served",),
    "export": ("distdl.cli.export.ExportedModel",),
    "convert": ("distdl.cli.convert.ConvertedFile",),
    "deploy": ("distdl.cli.deploy.DeployedModel",),
    "provision": ("distdl.cli.provision.Provisioned",),
    "report": ("distdl.tools.report.page.WrittenPage",),
    "compare": ("distdl.tools.compare.answer.ComparedRuns",),
    "tune": ("distdl.tools.search.answer.Study", f"{_RUNS}.ShownRequest"),
    "track sync": ("distdl.tracking.sync.SentMetrics",),
    "new project": ("distdl.tools.project.make.NewProject",),
    "completion": ("distdl.cli.completion.ShellCode",),
    "explain": ("distdl.cli.explain.ExplainedCodes",),
    "schema": ("distdl.cli.schema.Schema", "distdl.cli.schema.WrittenSchemas"),
}
_TEXT = {"type": "string"}
DIALECT = "https://json-schema.org/draft/2020-12/schema"


def of_command(command: str) -> dict[str, Any]:
    """The JSON Schema of what a command writes as its last line, whether it is refused or not."""
    kinds = [_class_named(name) for name in ANSWERS[command]]
    problem = {
        "type": "object",
        "properties": {
            "path": _TEXT | {"description": "where, as a user writes it: strategy.stages"},
            "code": {"enum": [*CODES]},
            "message": _TEXT,
            "remedy": _TEXT | {"description": "what to write instead, in words; empty if unknown"},
        },
        "required": ["path", "code", "message", "remedy"],
        "additionalProperties": False,
    }
    meanings = "; ".join(f"{code}: {text}" for code, text in EXIT_CODES.items())
    answers = [schema_of(kind) for kind in kinds]
    definitions = {
        name: schema for answer in answers for name, schema in answer.pop("$defs", {}).items()
    }
    properties = {
        "schema": {"const": ANSWER},
        "command": {"const": command},
        "exit_code": {"type": "integer", "description": meanings},
        "outcome": _TEXT | {"description": "what became of a command that gives no answer"},
        "problems": {"type": "array", "items": problem},
        "answer": {"anyOf": [*answers, {"type": "null"}]},
    }
    return {
        "$schema": DIALECT,
        "title": f"distdl {command} --json",
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
        "$defs": definitions,
    }


def of_events() -> dict[str, Any]:
    """The JSON Schema of the lines before the last one."""
    kinds: Mapping[str, Mapping[str, Any]] = {
        "line": {"text": _TEXT | {"description": "a line of a log"}},
        "metrics": {
            "time": {"type": "number", "description": "seconds since 1970"},
            "attempt": {"type": "integer", "description": "which start of the run, from 1"},
            "step": {"type": "integer", "description": "of the optimizer"},
            "metrics": {
                "type": "object",
                "additionalProperties": {"type": ["number", "string"]},
                "description": 'numbers; "nan", "inf" and "-inf" are texts',
            },
        },
        "ready": {
            "url": _TEXT | {"description": "where the server answers"},
            "model": _TEXT | {"description": "its folder"},
            "classes": {"type": "integer"},
        },
    }
    return {
        "$schema": DIALECT,
        "title": "an event",
        "anyOf": [_event(name, fields) for name, fields in kinds.items()],
    }


def _event(name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    properties = {"schema": {"const": EVENT}, "event": {"const": name}, **fields}
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


def schema_of(kind: type) -> dict[str, Any]:
    """The JSON Schema of a dataclass, with the texts below its fields as descriptions."""
    from pydantic import TypeAdapter

    schema: dict[str, Any] = TypeAdapter(kind).json_schema()
    for name, each in ((kind.__name__, schema), *schema.get("$defs", {}).items()):
        owner = kind if name == kind.__name__ else _member_of(kind, name)
        for field, text in attribute_docs(owner, owner).items():
            if field in each["properties"]:
                each["properties"][field]["description"] = text
        # Each field is written, whether it has a default or not.
        each["required"] = [*each["properties"]]
        each["additionalProperties"] = False
        each["properties"] = {k: _without_default(v) for k, v in each["properties"].items()}
    schema["properties"] = {"schema": {"const": kind.SCHEMA}, **schema["properties"]}  # type: ignore[attr-defined]
    schema["required"] = [*schema["properties"]]
    return schema


def _without_default(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key != "default"}


def _member_of(kind: type, name: str) -> type:
    """A dataclass that a field of another has, which stands in the same module."""
    member: type = getattr(importlib.import_module(kind.__module__), name)
    return member


def _class_named(name: str) -> type:
    module, _, attribute = name.rpartition(".")
    kind: type = getattr(importlib.import_module(module), attribute)
    return kind
