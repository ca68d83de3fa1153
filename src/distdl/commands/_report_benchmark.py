"""What `task=benchmark` measured, for a report: where a step's time goes."""

from __future__ import annotations

import io
from typing import Any

from distdl.commands import _report_plots as plots
from distdl.config import unit_of

FILE = "benchmark.json"
# As distdl.benchmark.clock.PHASES: a report imports no torch.
PHASES = ("data", "forward", "backward", "optimizer", "communication", "other")
NAMES = {"data": "data wait"}
INPUTS = (("real", "real input"), ("held", "held input"))


def rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Name and value of what one reads first."""
    real, held, setting, said = found["real"], found["held"], found["setting"], found["verdict"]
    model, limits = found["model"], found["limits"]
    lines = [
        ("verdict", f"{said['bound']}: {said['why']}"),
        *(("try", remedy) for remedy in said["remedies"]),
        (
            "speed",
            f"{real['images_per_second']:,.1f} {unit_of(setting.get('data'))} with real input, "
            f"{held['images_per_second']:,.1f} with held input",
        ),
        (
            "step",
            f"{1000 * real['step_seconds']['median']:.4g} ms (median), "
            f"{1000 * real['step_seconds']['p95']:.4g} ms (p95)",
        ),
        (
            "on",
            f"{setting['nodes']} x {setting['devices_per_node']} {setting['accelerator']} "
            f"({found['device']}), {setting['strategy']}, {setting['precision']}, "
            f"{setting['global_batch']} samples a step",
        ),
        ("memory", f"{found['memory_gib']:.2f} GiB at most on a rank"),
        (
            "device",
            f"{limits['matrix_flops'] / 1e12:.3g} TFLOP/s ({limits['dtype']}), copy "
            f"{limits['copy_bytes'] / 1e9:.3g} GB/s, measured in this run",
        ),
    ]
    if model["mfu"] is not None:
        flops = f"{model['flops_per_sample'] / 1e9:.3g} GFLOP a sample"
        lines.append(("model", f"{flops}, {100 * model['mfu']:.1f} % of the matrix rate (MFU)"))
    return lines


def draw(found: dict[str, Any]) -> tuple[str, list[tuple[str, str]]]:
    """One bar per kind of input, its phases in milliseconds; and the legend."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    with plt.rc_context(plots.STYLE):
        figure, axes = plt.subplots(figsize=(6.4, 2.2), layout="constrained")
        try:
            legend = bars(axes, found)
            buffer = io.StringIO()
            figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        finally:
            plt.close(figure)
    return plots._for_page(buffer.getvalue(), "Where a step's time goes"), legend


def bars(axes: Any, found: dict[str, Any]) -> list[tuple[str, str]]:
    """Draws into the axes; returns (phase, colour) of what there is."""
    used = [p for p in PHASES if any(found[key]["split"][p] > 0 for key, _ in INPUTS)]
    legend = []
    left = [0.0, 0.0]
    for phase in used:
        colour = plots.LINES[PHASES.index(phase)]
        width = [1000 * found[key]["split"][phase] for key, _ in INPUTS]
        axes.barh([1, 0], width, left=left, color=colour, height=0.6)
        left = [a + b for a, b in zip(left, width, strict=True)]
        legend.append((NAMES.get(phase, phase), colour))
    axes.set_yticks([1, 0], [name for _, name in INPUTS])
    axes.set_title("Where a step's time goes", loc="left")
    axes.set_xlabel("milliseconds")
    axes.grid(visible=False, axis="y")
    return legend
