"""The report's plots, PNG and SVG, readable without colour: every line has its own marker, dashes and end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tilerelay.bench.methods import FLOOR, NAMES, ONE_PROCESS, OURS, TORCHRUN
from tilerelay.bench.series import Parts, Row, Series

MARKERS = "osD^v<>pPXh*d8"
DASHES = ("-", "--", "-.", ":")
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#555555")
PIXELS_PER_INCH = 150


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")  # no display
    matplotlib.rcParams["svg.hashsalt"] = "tilerelay"  # the same picture gives the same file
    import matplotlib.pyplot as plt

    return plt


def style_of(row: Row) -> dict[str, Any]:
    """Looks of a method's line: ours heavy, the floor heavy and unmarked, the others told apart three ways."""
    if row.method == FLOOR:
        return {"color": "black", "linestyle": "-", "linewidth": 2.5, "marker": ""}
    if row.method == OURS:
        return {"color": "black", "linestyle": "--", "linewidth": 2.5, "marker": "o", "markersize": 8}
    number = NAMES.index(row.method)
    colour = COLOURS[number % len(COLOURS)]
    return {
        "color": colour,
        "linestyle": DASHES[number % len(DASHES)],
        "linewidth": 1.2,
        "marker": MARKERS[number % len(MARKERS)],
        "markersize": 6,
        # Filled: a process per GPU. Both sets have tensor parallelism, and one plot shows both.
        "markerfacecolor": colour if row.process_set == TORCHRUN else "none",
    }


def _save(plt: Any, figure: Any, out: Path, name: str) -> list[Path]:
    paths = [out / f"{name}.png", out / f"{name}.svg"]
    figure.savefig(paths[0], dpi=PIXELS_PER_INCH, bbox_inches="tight")
    figure.savefig(paths[1], bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
    return paths


def _m_axis(axes: Any, ms: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(ms), [str(m) for m in ms])
    axes.minorticks_off()
    axes.set_xlabel("M (rows of the batch)")
    axes.grid(True, which="major", linewidth=0.4, color="#bbbbbb")


def latency_plot(series: Series, out: Path, name: str) -> list[Path]:
    """Latency against M, and below it the ratio to the floor; a column per process set, for each has its own floor."""
    plt = _pyplot()
    sets = [s for s in (ONE_PROCESS, TORCHRUN) if any(row.process_set == s for row in series.rows)]
    shape = {"figsize": (7 * len(sets), 9), "squeeze": False, "sharex": True, "sharey": "row", "layout": "constrained"}
    figure, panels = plt.subplots(2, len(sets), **shape)
    for above, below, process_set in zip(*panels, sets, strict=True):
        for row in series.rows:
            records = [r for m in series.ms if (r := series.ok(row, m)) is not None]
            if row.process_set != process_set or not records:
                continue
            above.plot([r.m for r in records], [r.median_us for r in records], label=row.method, **style_of(row))
            against = [(r.m, r.ratio_to_floor) for r in records if r.ratio_to_floor is not None]
            if against:
                below.plot(*zip(*against, strict=True), **style_of(row))
        above.set_yscale("log")
        above.grid(True, which="major", linewidth=0.4, color="#bbbbbb")
        above.set_ylabel("latency (us)")
        above.set_title("one process, one graph" if process_set == ONE_PROCESS else "a process and a graph per GPU")
        above.legend(fontsize=8)
        below.set_ylabel("latency / floor")
        _m_axis(below, series.ms)
    figure.suptitle(series.title)
    return _save(plt, figure, out, name)


def reduction_plot(series: Series, out: Path, name: str) -> list[Path]:
    """Our latency reduction against each method; the paper's figures as large hollow markers on thin dotted lines."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(8, 5))
    drawn = False
    for row in series.rows:
        if row.method in (OURS, FLOOR):
            continue
        points = [(m, 100 * r) for m in series.ms if (r := series.reduction(row, m)) is not None]
        if points:
            drawn = True
            axes.plot(*zip(*points, strict=True), label=f"against {row.name}", **style_of(row))
        records = [(m, series.record(row, m)) for m in series.ms]
        stated = [(m, 100 * r.paper_reduction) for m, r in records if r is not None and r.paper_reduction is not None]
        if stated and row.process_set == ONE_PROCESS:
            look = {**style_of(row), "linestyle": (0, (1, 4)), "markersize": 12, "linewidth": 1}
            axes.plot(*zip(*stated, strict=True), label=f"the paper, against {row.method}", **look)
    if not drawn:
        plt.close(figure)
        return []
    axes.axhline(0, color="black", linewidth=0.8)
    _m_axis(axes, series.ms)
    axes.set_ylabel(f"latency saved by {OURS} (%)")
    axes.set_title(series.title)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.02, 0.5))
    return _save(plt, figure, out, name)


def parts_plot(parts: Sequence[Parts], out: Path, name: str) -> list[Path]:
    """Computation and communication of one two-layer chain as stacked bars, a panel per M (the paper's Figure 7)."""
    plt = _pyplot()
    ms = sorted({p.cell.m for p in parts})
    across = min(len(ms), 3)
    down = -(-len(ms) // across)
    figure, grid = plt.subplots(down, across, figsize=(4.5 * across, 5 * down), squeeze=False, layout="constrained")
    panels = list(grid.flat)
    for axes in panels[len(ms) :]:
        axes.set_axis_off()
    for axes, m in zip(panels, ms, strict=False):
        bars = [p for p in parts if p.cell.m == m]
        names = [f"{p.row.name.replace(' (', chr(10) + '(')}\n{p.cell.gpus} GPUs" for p in bars]
        compute = [p.compute_us for p in bars]
        look = {"edgecolor": "black", "linewidth": 0.8}
        axes.bar(range(len(bars)), compute, color="#dddddd", label="computation", **look)
        rest = [p.communication_us for p in bars]
        axes.bar(range(len(bars)), rest, bottom=compute, color="white", hatch="///", label="communication", **look)
        axes.set_xticks(range(len(bars)), names, fontsize=7, rotation=90)
        axes.set_title(f"M={m}")
        axes.set_ylabel("latency (us)")
    panels[0].legend(fontsize=8)
    figure.suptitle(" -> ".join(str(w) for w in parts[0].cell.widths))
    return _save(plt, figure, out, name)
