"""A benchmark's result as text, for the screen and for a report. Imports no torch."""

from __future__ import annotations

from typing import Any

from distdl.config.recipe import unit_of
from distdl.tools.measure import PHASES
from distdl.util import table
from distdl.util.screen import say

PHASE_NAMES = {phase: phase for phase in PHASES} | {"data": "data wait"}


def show(result: dict[str, Any]) -> None:
    """Prints the result of `result.assemble`."""
    say(f"\n{setting_text(result)}")
    sides = (result["real"], result["held"])
    unit = unit_of(result["setting"].get("data"))
    count = result["setting"]["world_size"]
    rates = [side["images_per_second"] for side in sides]
    rows = [
        (unit, *(f"{rate:,.1f}" for rate in rates)),
        (f"{unit} per device", *(f"{rate / count:,.1f}" for rate in rates)),
        (
            "  slowest to fastest window",
            *(f"{min(s['windows']):,.1f} - {max(s['windows']):,.1f}" for s in sides),
        ),
    ]
    for name in ("median", "p95"):
        rows.append((f"step, {name}", *(milliseconds(s["step_seconds"][name]) for s in sides)))
    for phase, name in PHASE_NAMES.items():
        parts = [(s["split"][phase], s["split"][phase] / sum(s["split"].values())) for s in sides]
        if any(seconds for seconds, _ in parts):
            cells = (f"{milliseconds(seconds)} {100 * share:4.0f} %" for seconds, share in parts)
            rows.append((f"  {name}", *cells))
    table.show(("", "real input", "held input"), rows, numbers=True)
    for name, text in facts(result):
        say(f"{name:8} {text}")
    verdict = result["verdict"]
    say(f"\n{verdict['bound']}: {verdict['why']}")
    for remedy in verdict["remedies"]:
        say(f"  try: {remedy}")


def setting_text(result: dict[str, Any]) -> str:
    """The measured strategy, devices, precision and batch."""
    return (
        "{strategy} on {nodes} x {devices_per_node} {accelerator} ({device}), {precision}, "
        "{global_batch} samples a step"
    ).format(device=result["device"], **result["setting"])


def facts(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Name and text of each line: memory, limits, use of the device, communication."""
    limits, model = result["limits"], result["model"]
    link, traced = result.get("link"), result.get("communication")
    text = (
        f"{limits['matrix_flops'] / 1e12:.3g} TFLOP/s ({limits['dtype']}, "
        f"{limits['matrix_size']} x {limits['matrix_size']}), copy "
        f"{limits['copy_bytes'] / 1e9:.3g} GB/s, measured in this run"
    )
    memory = f"{result['memory_gib']:.2f} GiB at most on a rank"
    lines = [("memory", memory), ("device", text)]
    if model["mfu"] is not None:
        text = (
            f"{model['flops_per_sample'] / 1e9:.3g} GFLOP a sample: "
            f"{100 * model['mfu']:.1f} % of the matrix rate (MFU) with held input"
        )
        if model["bandwidth_use"] is not None:
            text += f", at least {100 * model['bandwidth_use']:.1f} % of the copy bandwidth"
        lines.append(("model", text))
    if model["note"]:
        lines.append(("" if model["mfu"] is not None else "model", model["note"]))
    if link:
        text = f"{link['bandwidth'] / 1e9:.3g} GB/s and {1e6 * link['latency']:.3g} us a message"
        lines.append(("link", f"{text}, by an all-reduce over {link['ranks']} ranks"))
    if traced:
        text = (
            f"{traced['calls']:.3g} collectives a step, which take "
            f"{milliseconds(traced['busy_seconds'])}, of which no computation hides "
        )
        lines.append(("traced", text + milliseconds(sum(traced["exposed"].values()))))
    return lines


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.4g} ms" if seconds >= 1e-4 else f"{1000 * seconds:.3f} ms"
