"""How wrong the predictor is: fitted on up to 4 GPUs, compared with published numbers for more.

    python -m benchmarks.held_out            # prints the tables; `make bench` keeps their summary
    python -m benchmarks.held_out --write    # writes the tables and the plot into docs/

Every published number of GPUs that was not fitted gets a row. tests/unit/tools/test_scaling.py
compares the page with the printed tables.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from benchmarks import published
from benchmarks.published import Published
from benchmarks.table import Goal
from distdl.tools.scaling import Fit, Link, Links, Setting, fit, predict, table
from distdl.tools.scaling.published import INTEL, NCCL

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE, PLOT = DOCS / "scaling.md", DOCS / "scaling.svg"
BEGIN, END = "<!-- benchmarks.held_out: begin -->", "<!-- benchmarks.held_out: end -->"
FITTED = 4  # GPUs: the fit uses no measurement on more


@dataclass(frozen=True)
class Held:
    """One published number that was not fitted; efficiencies are relative to the fewest GPUs."""

    series: Published
    devices: int
    measured: float
    predicted: float
    as_before: float  # the efficiency of the most GPUs that were fitted: what "no model" predicts

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def error_as_before(self) -> float:
        return self.as_before / self.measured - 1


def fitted(series: Published, most: int = FITTED) -> Fit:
    """The fit to the published points up to `most` GPUs; without any, the unchanged setting."""
    points = {n: s for n, s in series.seconds.items() if n <= most}
    if 1 in points and len(points) > 1:
        return _fit(series.setting, tuple(points.items()))
    return Fit(series.setting, {}, ("nothing fitted",))


@functools.cache
def _fit(setting: Setting, points: tuple[tuple[int, float], ...]) -> Fit:
    return fit(setting, dict(points))


def held_out(series: Published, most: int = FITTED) -> list[Held]:
    """A row for every published point above `most` GPUs, except the one with the fewest GPUs."""
    setting = fitted(series, most).setting
    base = min(series.seconds)
    known = max([n for n in series.seconds if n <= most], default=base)
    alone = predict(setting, base).step_seconds if base == 1 else setting.step_seconds
    return [
        Held(
            series,
            n,
            series.seconds[base] / seconds,
            alone / predict(setting, n).step_seconds,
            series.seconds[base] / series.seconds[known],
        )
        for n, seconds in series.seconds.items()
        if n > max(most, base)
    ]


def everything() -> list[Published]:
    return [
        *published.azure(),
        *published.pytorch(),
        published.goyal(),
        *published.nvidia(),
    ]


def markdown() -> str:
    """All tables."""
    rows = [row for series in everything() for row in held_out(series)]
    parts = [
        "### Every held-out error",
        f"{len(rows)} published points above {FITTED} GPUs. Efficiency is throughput per GPU, "
        "relative to one GPU (Goyal: to 8). Error: predicted over published throughput, less 1; "
        "positive is too optimistic. Last column: the error of no model, which assumes the "
        f"efficiency of the most GPUs up to {FITTED} for any larger number.",
        _errors(rows),
        "### In short",
        _summary(rows),
        f"If Azure measured with 256 images per GPU instead of 64, the mean error there is "
        f"{_mean(_azure_of(256))} instead of "
        f"{_mean(_azure_of(published.AZURE_BATCH))}.",
        "### What was fitted",
        _parameters(),
        "### With two nodes measured",
        "The same, but fitted on up to 8 GPUs, so that one measurement over the link between nodes "
        "is known. The points at 16 and 32 are held out. Where the fitted link is the "
        "published one, two nodes were at least as fast as the model could explain.",
        _two_nodes(),
        "### Up to 4,096 GPUs",
        _large(),
        "### Where the published numbers come from",
        _sources(),
    ]
    return "\n\n".join(parts)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    marks = "|" + "---|" * left + "---:|" * (len(head) - left)
    return "\n".join([f"| {' | '.join(head)} |", marks, *(f"| {' | '.join(r)} |" for r in rows)])


def _errors(rows: Sequence[Held]) -> str:
    return _table(
        ["Published by", "What", "GPUs", "published", "predicted", "error", "no model"],
        [
            [
                row.series.group,
                row.series.name,
                str(row.devices),
                _percent(row.measured),
                _percent(row.predicted),
                f"**{_signed(row.error)}**",
                _signed(row.error_as_before),
            ]
            for row in rows
        ],
        2,
    )


def _summary(rows: Sequence[Held]) -> str:
    groups: dict[str, list[Held]] = {}
    for row in rows:
        name = row.series.group
        for library in (INTEL, NCCL):
            if name == "Azure" and row.series.name.endswith(library):
                name = f"Azure, {library}"
        groups.setdefault(name, []).append(row)
    return _table(
        ["", "points", "mean error", "worst", "mean error of no model"],
        [
            [
                name,
                str(len(points)),
                _mean(points),
                _signed(max((r.error for r in points), key=abs)),
                _percent(fmean(abs(r.error_as_before) for r in points)),
            ]
            for name, points in groups.items()
        ],
    )


def _azure_of(batch: int) -> list[Held]:
    return [row for series in published.azure(batch) for row in held_out(series)]


def _parameters() -> str:
    lines = []
    for series in (*published.azure(), *published.pytorch()):
        result = fitted(series)
        inside = result.setting.links.inside.bandwidth
        free = inside >= 0.999 * series.setting.links.inside.bandwidth
        lines.append(
            [
                series.name,
                f"{inside / 1e9:.2f}" + (" (no limit seen)" if free else ""),
                f"{series.setting.links.between.bandwidth / 1e9:.2f}",
                f"{1e3 * result.setting.overhead_seconds:.1f}",
                ", ".join(f"{n}: {_signed(e)}" for n, e in result.errors.items() if n > 1),
            ]
        )
    return _table(
        [
            "What",
            "inside a node, GB/s a GPU (fitted)",
            "between nodes, GB/s a node (published)",
            "overhead, ms (fitted)",
            "error where it was fitted, by GPUs",
        ],
        lines,
    )


def _two_nodes() -> str:
    lines = []
    for series in published.azure():
        between = fitted(series, 8).setting.links.between.bandwidth
        before = {row.devices: row.error for row in held_out(series)}
        lines.append(
            [
                series.name,
                f"{between / 1e9:.2f}",
                *(
                    f"{_signed(row.error)} (was {_signed(before[row.devices])})"
                    for row in held_out(series, 8)
                ),
            ]
        )
    return _table(["What", "between nodes, GB/s (fitted)", "16 GPUs", "32 GPUs"], lines)


def _sources() -> str:
    series_of = {series.group: series for series in everything()}
    return "\n".join(
        f"- {group}: <{series.source}>" + (f". {series.note}." if series.note else ".")
        for group, series in series_of.items()
    )


def example() -> Setting:
    """ResNet-50 on Azure's ND A100 v4 (8 x A100, 1,600 Gbit/s), from NVIDIA's number for one."""
    series = published.nvidia()[0]
    links = Links(published.NVLINK_A100, Link(1600 * published.GBIT, 5e-6))
    return replace(series.setting, links=links)


def _large() -> str:
    one = example()
    slow = replace(one, links=replace(one.links, between=Link(25 * published.GBIT, 20e-6)))
    # The largest activation of ResNet-50 (256 channels of 56 x 56) in 16 bit, for 256 images.
    cut = 256 * 56 * 56 * 2 * published.NVIDIA_BATCH
    staged = replace(one, strategy="pipeline", stages=8, micro_batches=32, activation_bytes=cut)
    settings = {
        "`ddp`": one,
        "`ddp`, one ring": replace(one, algorithm="ring"),
        "`ddp`, hierarchical rings": replace(one, algorithm="hierarchical"),
        "`fsdp`": replace(one, strategy="fsdp"),
        "`deepspeed_zero1`, `zero2`": replace(one, strategy="deepspeed_zero2"),
        "`deepspeed_zero3`": replace(one, strategy="deepspeed_zero3"),
        "`pipeline` of 8 x DP, 1f1b": staged,
        "the same, interleaved (2)": replace(staged, schedule="interleaved", pieces_per_stage=2),
        "the same, zero_bubble (2)": replace(staged, schedule="zero_bubble", pieces_per_stage=2),
        "`ddp` on 25 Gbit/s, 20 us": slow,
        "`ddp`, steps spread by 3 %": replace(one, spread_seconds=0.03 * one.step_seconds),
    }
    lines = [
        [
            name,
            *(
                _percent(row.prediction.efficiency) if row.prediction else "-"
                for row in table(setting, (8, 64, 512, 4096))
            ),
        ]
        for name, setting in settings.items()
    ]
    return (
        "Predicted efficiency of ResNet-50 in mixed precision, 256 images per GPU, 102 MB of "
        f"gradients, {1e3 * one.step_seconds:.1f} ms per step on one A100 (NVIDIA's "
        f"{published.NVIDIA_RATES['resnet50, A100, mixed precision'][1][1]:,.0f} images/s), nodes "
        "of 8 with NVLink and 1,600 Gbit/s between them, as Azure's ND A100 v4. **Not measured**; "
        "for 8 GPUs of such a node NVIDIA published 84 % (above).\n\n"
        + _table(["Strategy", *(f"{n:,} GPUs" for n in (8, 64, 512, 4096))], lines)
    )


def page_with(text: str, tables: str) -> str:
    """The page with the tables between its two marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    if not rest or END not in rest:
        raise ValueError(f"{PAGE.name} lacks {BEGIN} or {END}")
    return f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _signed(value: float) -> str:
    text = f"{100 * value:+.1f} %"
    return "0.0 %" if text[1:] == "0.0 %" else text  # the sign of 0 differs between machines


def _mean(rows: Iterable[Held]) -> str:
    return _percent(fmean(abs(row.error) for row in rows))


@dataclass(frozen=True)
class Summary:
    """The part of benchmarks/RESULTS.md."""

    goals: tuple[Goal, ...] = ()

    def markdown(self) -> str:
        rows = [row for series in everything() for row in held_out(series)]
        parts = (
            "## Predicted scaling against published measurements",
            f"{len(rows)} published points above {FITTED} GPUs, which the fit has not seen; error: "
            "predicted over published throughput, less 1. Competitor: no model, which assumes the "
            f"efficiency of the most GPUs up to {FITTED} for any larger number. Every point, its "
            "error and its source: [docs/scaling.md](../docs/scaling.md).",
            _summary(rows),
            "`python -m benchmarks.held_out`",
        )
        return "\n\n".join(parts)


def main() -> Summary:
    """For benchmarks.run; this part measures nothing."""
    return Summary()


def command(argv: Sequence[str]) -> int:
    tables = markdown()
    if list(argv) == ["--write"]:
        from benchmarks.held_out_plot import plot

        PAGE.write_text(page_with(PAGE.read_text(), tables))
        PLOT.write_text(plot())
        print(f"{PAGE.name}, {PLOT.name}")
        return 0
    if argv:
        print("usage: python -m benchmarks.held_out [--write]")
        return 2
    print(tables)
    return 0


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
