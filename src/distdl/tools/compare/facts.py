"""What is known of one run that is compared: settings, code, data, metrics, speed and cost."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from distdl.runs import judging
from distdl.runs.directory import RunDirectory
from distdl.runs.judging import Score
from distdl.stores import is_remote
from distdl.tools.compare.finding import FoundRun
from distdl.tools.pages import data
from distdl.tools.pages.data import ReportedAttempt, ReportedRun, mapping

SEED = "seed"
SPEED = "perf/images_per_second"
NOT_SET = "(not set)"
UNKNOWN = "(unknown)"
# Of a config: what a run is called, and what says nothing about what it does.
NAMES = ("name", "experiment_name", "output_dir", "dry_run", "follow", "project.root")
DEEPEST = 40  # levels of a config
MOST_DEVICES = 1 << 20  # of which a file is believed
# Facts beside the settings.
COMMIT, CHANGES, VERSION, PYTHON, DATA = "commit", "local changes", "distdl", "python", "data set"


@dataclass
class ComparedRun:
    """A run, with what a comparison says about it.

    Args:
        name: As the user would type it.
        label: What tells it apart from the others: the swept values, or the name.
        settings: The config with the changes of its last training, and where that ran: each leaf
            as text.
        facts: The code and the data set, as far as they are known.
        packages: Versions by name.
        score: By the metric that chose its best.ckpt.
        devices: "1 x 2 cpu": nodes, devices of each, accelerator.
        device_hours: All devices together; 0: unknown.
        price: In USD, of what is known of Azure's VM sizes; None: unknown.
    """

    name: str
    label: str
    reported: ReportedRun
    settings: dict[str, str]
    facts: dict[str, str]
    packages: dict[str, str]
    score: Score
    state: str
    devices: str = ""
    device_hours: float = 0.0
    price: float | None = None
    values: dict[str, float] = field(default_factory=dict)  # of each metric: the best, or the last

    @property
    def speed(self) -> float:
        """Images or samples per second, the median; NaN: it was not logged."""
        return data.median(self.reported.values(SPEED))

    @property
    def seconds(self) -> float:
        return data.seconds(self.reported)

    @property
    def monitor(self) -> str:
        return self.score.judged.monitor or ""

    def mode(self, metric: str) -> str:
        """ "max" or "min"; "": nobody knows which is better."""
        chosen = self.score.judged.mode if metric == self.monitor else ""
        choose = data.better(metric, chosen)
        return choose.__name__ if choose else ""


def facts_of(run: FoundRun, *, label: str = "", state: str = "") -> ComparedRun:
    """Reads a run. `label` and `state` are what the caller knows better."""
    reported = data.load(run.path, is_copy=is_remote(run.name))
    trained = [each for each in reported.attempts if not each.task]
    last = next(reversed(trained or reported.attempts), None)
    config = reported.settings()
    score = judging.score(
        RunDirectory(run.path).checkpoints,
        mapping(config.get("checkpoint")),
        last.metrics if last else {},
    )
    size = mapping(last.launch.get("resources")) if last else {}
    made = ComparedRun(
        name=run.name,
        label=label or _swept(reported) or run.name,
        reported=reported,
        settings=_settings(config, last),
        facts=_facts(reported, last),
        packages=_packages(reported.provenance),
        score=score,
        state=state or (last.state if last else "UNKNOWN"),
        devices=_devices(size),
    )
    for attempt in trained:
        hours = data.seconds(reported, attempt) / 3600
        used = mapping(attempt.launch.get("resources"))
        made.device_hours += hours * _count(used, "num_nodes") * _count(used, "devices")
        price = _hourly(attempt)
        if price is not None:
            made.price = (made.price or 0.0) + price * hours * _count(used, "num_nodes")
    made.values = {name: _value(made, name) for name in reported.series}
    if not math.isnan(score.value) and made.monitor:
        made.values[made.monitor] = score.value
    return made


def _value(run: ComparedRun, name: str) -> float:
    """The best value of a metric if it is known which is better, else the last, as of the losses of
    single steps; NaN: none."""
    logged = [v for v in run.reported.values(name) if not data.is_absent(name, v)]
    finite = [value for value in logged if not math.isnan(value)]
    if not logged or math.isnan(logged[-1]) or not finite:
        return math.nan  # a training that ended with NaN has no good value
    mode = run.mode(name)
    if mode and not name.startswith("train/"):
        return max(finite) if mode == "max" else min(finite)
    return finite[-1]


def _swept(reported: ReportedRun) -> str:
    swept = reported.provenance.get("swept")
    return " ".join(map(str, swept)) if isinstance(swept, list) else ""


def _settings(config: Mapping[str, Any], last: ReportedAttempt | None) -> dict[str, str]:
    leaves = dict(_leaves(config, "", 0))
    if last is not None:
        leaves |= _leaves(mapping(last.launch.get("where")), "", 0)
        for path, value in mapping(last.launch.get("changes")).items():
            for old in [key for key in leaves if key == path or key.startswith(f"{path}.")]:
                del leaves[old]
            leaves |= _leaves({path: value}, "", 0)
    return {key: text for key, text in leaves.items() if key not in NAMES}


def _leaves(node: Mapping[Any, Any], prefix: str, depth: int) -> Iterator[tuple[str, str]]:
    for key, value in node.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and value and depth < DEEPEST:
            yield from _leaves(value, f"{path}.", depth + 1)
        else:
            yield path, value if isinstance(value, str) else _text(value)


def _text(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):  # a key that JSON does not have
        return str(type(value))


def _facts(reported: ReportedRun, last: ReportedAttempt | None) -> dict[str, str]:
    provenance = reported.provenance
    git = mapping(provenance.get("git"))
    diff = str(git.get("diff") or "")
    changes = hashlib.sha256(diff.encode()).hexdigest()[:8] if diff else "none"
    known = bool(git.get("commit"))
    return {
        COMMIT: str(git["commit"])[:10] if known else UNKNOWN,
        CHANGES: changes if known else UNKNOWN,
        VERSION: str(provenance.get("distdl") or UNKNOWN),
        PYTHON: str(provenance.get("python") or UNKNOWN),
        DATA: (last.data if last else "") or UNKNOWN,
    }


def _packages(provenance: Mapping[str, Any]) -> dict[str, str]:
    listed = provenance.get("packages")
    entries = (str(each).partition("==") for each in (listed if isinstance(listed, list) else ()))
    return {name: version for name, _, version in entries}


def _count(size: Mapping[str, Any], key: str) -> int:
    value = size.get(key)
    return value if isinstance(value, int) and 0 < value < MOST_DEVICES else 1


def _devices(size: Mapping[str, Any]) -> str:
    if not size:
        return ""
    return f"{_count(size, 'num_nodes')} x {_count(size, 'devices')} {size.get('accelerator')}"


def _hourly(attempt: ReportedAttempt) -> float | None:
    """USD per hour and node, of an attempt on Azure."""
    from distdl.launchers.azureml import prices, vm_sizes

    launcher = mapping(mapping(attempt.launch.get("where")).get("launcher"))
    size = vm_sizes.find(str(launcher.get("vm_size") or ""))
    if size is None:
        return None
    size = prices.current(size)
    spot = launcher.get("tier") in vm_sizes.SPOT
    return size.spot_price_per_hour if spot else size.price_per_hour
