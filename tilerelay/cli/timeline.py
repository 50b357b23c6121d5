"""A timeline of a run in characters: a line for each stage, a column for each slice of time."""

from __future__ import annotations

from collections.abc import Mapping

from tilerelay.kernels.protocol import OBTAINED, PUBLISHED

COLUMNS = 64


def draw(stamps: Mapping[int, object]) -> str:
    """The stages' tiles over time: `#` while a tile is computed, `.` while the stage waits.

    Args:
        stamps: by stage, int64 [tiles, EVENTS] in nanoseconds of one clock (tensors or arrays).
    """
    spans = {stage: _spans(table) for stage, table in stamps.items()}
    begin = min(first for tiles in spans.values() for first, _ in tiles)
    end = max(last for tiles in spans.values() for _, last in tiles)
    scale = COLUMNS / max(1, end - begin)
    lines = []
    for stage, tiles in spans.items():
        cells = ["."] * COLUMNS
        for first, last in tiles:
            start = min(COLUMNS - 1, int((first - begin) * scale))
            for column in range(start, max(start + 1, min(COLUMNS, int((last - begin) * scale)))):
                cells[column] = "#"
        lines.append(f"stage {stage} |{''.join(cells)}|")
    lines.append(f"        0 ms{' ' * (COLUMNS - 12)}{(end - begin) / 1e6:.0f} ms")
    return "\n".join(lines)


def _spans(table: object) -> list[tuple[int, int]]:
    rows = table.tolist()  # type: ignore[attr-defined]
    return sorted((row[OBTAINED.value], row[PUBLISHED.value]) for row in rows)
