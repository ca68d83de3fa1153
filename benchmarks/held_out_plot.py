"""The plot of docs/scaling.md: Azure's published points, and curves fitted on up to 4 GPUs."""

from __future__ import annotations

import io
from typing import Any

import matplotlib

from benchmarks import published
from benchmarks.held_out import fitted
from distdl.tools.scaling import table
from distdl.tools.scaling.published import AZURE_RATES, INTEL, NCCL

COUNTS = (1, 2, 4, 8, 16, 32)


def plot() -> str:
    """The plot as SVG."""
    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    colours = dict(zip(AZURE_RATES, ("#2f7ed8", "#e8743b", "#19a979", "#945ecf"), strict=True))
    style: Any = {"svg.hashsalt": "scaling", "font.size": 11.0}
    with plt.rc_context(style):
        figure, axes = plt.subplots(1, 2, figsize=(11, 4.6), sharey=True, layout="constrained")
        for axis, library, link in zip(
            axes,
            (INTEL, NCCL),
            ("InfiniBand", "Ethernet"),
            strict=True,
        ):
            for series in published.azure():
                gpu, _, of = series.name.partition(", ")
                if of != library:
                    continue
                setting = fitted(series).setting
                rows = [r for r in table(setting, (*range(1, 5), *COUNTS[3:])) if r.prediction]
                colour = colours[gpu]
                axis.plot(
                    [r.devices for r in rows],
                    [100 * r.prediction.efficiency for r in rows if r.prediction],
                    color=colour,
                    label=gpu,
                )
                counts = list(series.seconds)
                axis.plot(
                    counts,
                    [100 * series.seconds[1] / series.seconds[n] for n in counts],
                    "o",
                    color=colour,
                )
            axis.axvspan(0.9, 5.6, color="#8899aa", alpha=0.15, lw=0)
            axis.text(0.95, 3, "fitted", color="#445566")
            axis.text(6, 3, "held out", color="#445566")
            axis.set_xscale("log", base=2)
            axis.set_xticks(COUNTS, [str(n) for n in COUNTS])
            axis.minorticks_off()
            axis.set_xlim(0.9, 36)
            axis.set_ylim(0, 110)
            axis.grid(color="#dfe4ea", linewidth=0.6)
            axis.set_xlabel("GPUs (4 per node)")
            axis.set_title(f"{library}, {link} between nodes", fontsize=11)
            for side in ("top", "right"):
                axis.spines[side].set_visible(False)
        axes[0].set_ylabel("efficiency, %")
        axes[0].legend(
            title="lines: predicted\ndots: published",
            loc="center left",
            bbox_to_anchor=(0.02, 0.36),
            frameon=False,
        )
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", facecolor="white", metadata={"Date": None})
        plt.close(figure)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"
