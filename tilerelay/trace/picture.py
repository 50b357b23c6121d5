"""The SVG timeline of one device: shares of its workers above, a line per worker below, the critical path over it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from tilerelay.trace.events import DEVICE, TILE, WORKER, Trace
from tilerelay.trace.path import Step
from tilerelay.trace.spans import BUSY, CATEGORIES, Partition
from tilerelay.trace.text import amount

WIDTH, LEFT, SHARES_HEIGHT, GAP, AXIS_HEIGHT = 1240, 74, 70, 6, 18
PLOT = WIDTH - LEFT - 10
ROWS_HEIGHT = 420  # of many workers together; few workers get rows of MAX_ROW each
MIN_ROW, MAX_ROW = 2.0, 22.0
BINS = 400
TICKS = 8
COLOURS = {
    "math": "#3a76c4",
    "store": "#7fb2dd",
    "first load": "#e3b23c",
    "prologue": "#d9632b",
    "epilogue": "#8b5bb5",
    "waiting": "#e8b7b7",
    "ramp": "#e3e7eb",
    "tail": "#cfd6dd",
}
PATH_COLOUR = "#111111"


def slug(name: str) -> str:
    """A category as a class name."""
    return "c-" + name.replace(" ", "-")


def timeline(trace: Trace, cut: Partition, steps: Sequence[Step], device: int) -> str:
    """The device's timeline; all devices' have the same scale."""
    workers = sorted({worker for d, worker in trace.walks if d == device})
    row = min(MAX_ROW, max(MIN_ROW, ROWS_HEIGHT / len(workers)))
    top = SHARES_HEIGHT + GAP
    height = top + row * len(workers) + AXIS_HEIGHT
    line = {worker: top + row * (i + 0.5) for i, worker in enumerate(workers)}
    scale = _Scale(trace.begin, trace.end)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" height="{height:.0f}" role="img" '
        f'aria-label="timeline of {escape(trace.device_name(device))}">',
        _shares(cut, device, scale),
        _rows(cut, device, scale, line, row),
        _path(trace, steps, device, scale, line, row),
        _axis(trace, scale, height - AXIS_HEIGHT),
        f'<text x="0" y="{SHARES_HEIGHT / 2:.0f}">workers</text>',
        f'<text x="0" y="{top + 11}">worker {workers[0]}</text>',
    ]
    if len(workers) > 1:
        parts.append(f'<text x="0" y="{height - AXIS_HEIGHT:.0f}">worker {workers[-1]}</text>')
    return "\n".join([*parts, "</svg>"])


class _Scale:
    """Time to x."""

    def __init__(self, begin: int, end: int) -> None:
        self.begin, self.end = begin, max(end, begin + 1)

    def __call__(self, time: float) -> float:
        return LEFT + (time - self.begin) / (self.end - self.begin) * PLOT


def _shares(cut: Partition, device: int, scale: _Scale) -> str:
    """Stacked areas: which share of the workers is in which category."""
    edges = np.linspace(scale.begin, scale.end, BINS + 1)
    shares = cut.shares(device, edges)
    upper = np.cumsum(shares, axis=0)
    xs = [round(scale(t), 1) for t in edges]
    areas = []
    for i, name in enumerate(CATEGORIES):
        if shares[i].max() <= 0:
            continue
        tops = SHARES_HEIGHT * (1 - upper[i])
        bottoms = SHARES_HEIGHT * (1 - upper[i] + shares[i])
        there = [f"{x:g},{y:.1f}" for bin in range(BINS) for x, y in ((xs[bin], tops[bin]), (xs[bin + 1], tops[bin]))]
        back = [
            f"{x:g},{y:.1f}"
            for bin in reversed(range(BINS))
            for x, y in ((xs[bin + 1], bottoms[bin]), (xs[bin], bottoms[bin]))
        ]
        areas.append(f'<polygon class="{slug(name)}" stroke="none" points="{" ".join(there + back)}"/>')
    return f'<g class="shares" stroke-width="0">{"".join(areas)}</g>'


def _rows(cut: Partition, device: int, scale: _Scale, line: dict[int, float], row: float) -> str:
    """One path per category: horizontal strokes as thick as a row."""
    here = cut.device == device
    paths = []
    for i, name in enumerate(CATEGORIES):
        chosen = here & (cut.category == i)
        strokes = [
            f"M{scale(begin):.2f} {line[worker]:.1f}h{(end - begin) / (scale.end - scale.begin) * PLOT:.2f}"
            for worker, begin, end in zip(
                cut.worker[chosen].tolist(), cut.begin[chosen].tolist(), cut.end[chosen].tolist(), strict=True
            )
        ]
        if strokes:
            thick = row * (0.92 if name in BUSY else 0.6)
            paths.append(f'<path class="{slug(name)}" stroke-width="{thick:.2f}" d="{"".join(strokes)}"/>')
    return f'<g class="rows">{"".join(paths)}</g>'


def _path(
    trace: Trace, steps: Sequence[Step], device: int, scale: _Scale, line: dict[int, float], row: float
) -> str:  # fmt: skip
    """The critical path's tiles on this device as thick dark strokes, joined by thin ones; dots where it comes in."""
    drawn = []
    before: float | None = None
    for step in steps:
        if trace.keys[step.record, DEVICE] != device:
            before = None
            continue
        y, x, end = line[int(trace.keys[step.record, WORKER])], scale(step.begin), scale(step.end)
        if before is None:
            drawn.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" class="c-path"/>')
        else:
            drawn.append(f'<path d="M{x:.1f} {before:.1f}V{y:.1f}" class="c-path" fill="none"/>')
        what = f"tile {trace.keys[step.record, TILE]}, {step.bound}, {amount(step.end - step.begin, trace.clock.unit)}"
        drawn.append(
            f'<path d="M{x:.1f} {y:.1f}H{end:.1f}" class="c-path" stroke-width="{max(2.5, row * 0.35):.1f}">'
            f"<title>{escape(what)}</title></path>"
        )
        before = y
    return f'<g class="path">{"".join(drawn)}</g>'


def _axis(trace: Trace, scale: _Scale, y: float) -> str:
    length = scale.end - scale.begin
    step = 10 ** int(np.floor(np.log10(max(1, length / TICKS))))
    step = next(s * step for s in (1, 2, 5, 10) if length / (s * step) <= TICKS)
    marks = []
    for time in range(0, length + 1, max(1, int(step))):
        x = scale(scale.begin + time)
        anchor = "end" if x > WIDTH - 60 else "middle"
        marks.append(f'<path d="M{x:.1f} {y:.0f}v4" stroke="#9aa7b4"/>')
        label = amount(time, trace.clock.unit) if time else "0"
        marks.append(f'<text x="{x:.1f}" y="{y + 15:.0f}" text-anchor="{anchor}">{label}</text>')
    return "".join(marks)
