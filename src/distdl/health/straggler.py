from typing import Any, NamedTuple

STEPS = 10


class Verdict(NamedTuple):
    rank: int | None
    phase: str
    excess_ms: float
    step_ms: float
    sentence: str


def record(steps: Any, collectives: Any) -> dict[str, Any]:
    return {}


def verdict(records: Any) -> Verdict | None:
    return None
