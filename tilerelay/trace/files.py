"""The event table as plain JSON values, and back, refusing whatever is not one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tilerelay.errors import InvalidInput
from tilerelay.graph.tiling import Int32s, TileGrid
from tilerelay.trace.events import COLUMNS, KEYS, UNITS, ClockInfo, EdgeInfo, StageInfo, Trace

FORMAT = 1


def to_values(trace: Trace) -> dict[str, Any]:
    """Everything in the trace. Sets of tiles are [first, end) runs; a record has the columns in order.

    Older tables have no `first` and no `in_turn`: their runs knew neither steps nor turns.
    """
    return {
        "format": FORMAT,
        "columns": list(COLUMNS),
        "records": np.concatenate([trace.keys, trace.times], axis=1).tolist(),
        "stages": [
            {
                "name": s.name, "kernel": s.kernel, "m": s.grid.m, "n": s.grid.n, "k": s.k,
                "tile": [s.grid.block_m, s.grid.block_n], "workers": s.workers, "workers_known": s.workers_known,
                "in_turn": s.in_turn,
            }
            for s in trace.stages
        ],
        "edges": [
            {
                "producer": e.producer, "consumer": e.consumer, "groups": [[_runs(a), _runs(b)] for a, b in e.groups],
                "first": [_runs(tiles) for tiles in e.first],
            }
            for e in trace.edges
        ],
        "clock": {
            "source": trace.clock.source, "unit": trace.clock.unit, "granularity": trace.clock.granularity,
            "error": trace.clock.error, "offsets": {str(d): offset for d, offset in trace.clock.offsets.items()},
        },
        "run": dict(trace.run),
    }  # fmt: skip


def from_values(values: object) -> Trace:
    """The trace that `to_values` was given.

    Raises:
        InvalidInput: another format, or values that are missing or do not fit together.
    """
    if not isinstance(values, Mapping):
        raise InvalidInput("the event table is not a JSON object")
    if values.get("format") != FORMAT:
        raise InvalidInput(f"event table format {values.get('format')!r}; this version reads format {FORMAT}")
    try:
        if tuple(values["columns"]) != COLUMNS:
            raise InvalidInput(f"the event table's columns are {values['columns']}, not {list(COLUMNS)}")
        table = np.array(values["records"], dtype=np.int64).reshape(-1, len(COLUMNS))
        stages = tuple(_stage(s) for s in values["stages"])
        clock = values["clock"]
        if clock["unit"] not in UNITS:
            raise InvalidInput(f"a clock that counts {clock['unit']!r}; it must count one of {', '.join(UNITS)}")
        return Trace(
            stages,
            tuple(_edge(e, stages) for e in values["edges"]),
            ClockInfo(
                str(clock["source"]), clock["unit"], int(clock["granularity"]), float(clock["error"]),
                {int(device): float(offset) for device, offset in clock["offsets"].items()},
            ),
            dict(values["run"]),
            table[:, : len(KEYS)],
            table[:, len(KEYS) :],
        )  # fmt: skip
    except InvalidInput:
        raise
    except KeyError as error:
        raise InvalidInput(f"the event table has no {error}") from None
    except (AttributeError, IndexError, OverflowError, TypeError, ValueError) as error:
        raise InvalidInput(f"the event table is damaged: {str(error).splitlines()[0]}") from None


def _stage(values: Mapping[str, Any]) -> StageInfo:
    block_m, block_n = values["tile"]
    grid = TileGrid(values["m"], values["n"], block_m, block_n)
    return StageInfo(
        str(values["name"]), str(values["kernel"]), grid, int(values["k"]), int(values["workers"]),
        bool(values["workers_known"]), bool(values.get("in_turn", False)),
    )  # fmt: skip


def _edge(values: Mapping[str, Any], stages: tuple[StageInfo, ...]) -> EdgeInfo:
    producer, consumer = values["producer"], values["consumer"]
    if not 0 <= producer < consumer < len(stages):
        raise InvalidInput(f"the event table's edge {producer} -> {consumer} joins stages that do not exist")
    sizes = stages[producer].grid.tiles, stages[consumer].grid.tiles
    groups = tuple((_ids(a, sizes[0]), _ids(b, sizes[1])) for a, b in values["groups"])
    first = tuple(_ids(a, sizes[0]) for a in values.get("first", [a for a, _ in values["groups"]]))
    if len(first) != len(groups):
        raise InvalidInput(
            f"the event table's edge {producer} -> {consumer} begins {len(first)} of {len(groups)} groups"
        )
    return EdgeInfo(producer, consumer, groups, first)


def _runs(ids: Int32s) -> list[list[int]]:
    """Sorted ids as [first, end) runs."""
    breaks = np.flatnonzero(np.diff(ids) != 1) + 1
    return [[int(run[0]), int(run[-1]) + 1] for run in np.split(ids, breaks) if len(run)]


def _ids(runs: list[list[int]], size: int) -> Int32s:
    for first, end in runs:
        if not 0 <= first < end <= size:
            raise InvalidInput(f"the event table names tiles {first} to {end - 1} of a stage with {size}")
    return np.concatenate([np.arange(first, end, dtype=np.int32) for first, end in runs] or [np.empty(0, np.int32)])
