"""A timeline of a run in characters: a line for each stage, a column for each slice of time."""

from __future__ import annotations

from tilerelay.trace.events import OBTAINED, PUBLISHED, STAGE, Trace
from tilerelay.trace.text import amount

COLUMNS = 64


def draw(trace: Trace) -> str:
    """The stages' tiles over time: `#` while a tile is computed, `.` while the stage waits."""
    length = trace.end - trace.begin
    scale = COLUMNS / max(1, length)
    stage = trace.keys[:, STAGE]
    lines = []
    for i in range(len(trace.stages)):
        cells = ["."] * COLUMNS
        for first, last in (trace.at[stage == i][:, [OBTAINED, PUBLISHED]] - trace.begin).tolist():
            start = min(COLUMNS - 1, int(first * scale))
            for column in range(start, max(start + 1, min(COLUMNS, int(last * scale)))):
                cells[column] = "#"
        lines.append(f"stage {i} |{''.join(cells)}|")
    end = amount(length, trace.clock.unit)
    return "\n".join([*lines, f"        0{end:>{COLUMNS}}"])
