"""The event table of a run of the reference executor: its scheduler's steps are the clock."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tilerelay.errors import InvalidInput
from tilerelay.graph.placement import Placement
from tilerelay.graph.workload import Workload
from tilerelay.protocol.reference import Event
from tilerelay.trace.events import (
    COMPUTED,
    EVENTS,
    KEYS,
    MISSING,
    OBTAINED,
    STORED,
    ClockInfo,
    Trace,
    edge_info,
    first_workers,
    stage_info,
)

# What the executor tells of a tile -> the events that this is. It has no separate loads, and its signals are events of
# their own that it does not tell.
MEANING = {"started": (OBTAINED,), "finished": (COMPUTED, STORED)}


def trace_events(
    workload: Workload,
    placement: Placement,
    signalling: str,
    workers: Sequence[int],
    events: Sequence[Event],
    epoch: int,
) -> Trace:
    """The table of one epoch of what `reference.run` returned.

    Args:
        workers: as `reference.run` was given them.
        epoch: the word in memory, as the events carry it.

    Raises:
        InvalidInput: no event, or only a part of the events, is of that epoch.
    """
    chosen = [e for e in events if e.epoch == epoch]
    if not chosen:
        raise InvalidInput(f"no event is of epoch {epoch}; the epochs are {sorted({e.epoch for e in events})}")
    devices = [placement.device_of(i) for i in range(len(workload.stages))]
    first = first_workers(devices, workers)
    tiles = {(e.stage, e.tile): e.worker for e in chosen}
    record = {key: i for i, key in enumerate(tiles)}
    keys = np.empty((len(tiles), len(KEYS)), dtype=np.int64)
    times = np.full((len(tiles), len(EVENTS)), MISSING, dtype=np.int64)
    for (stage, tile), worker in tiles.items():
        keys[record[stage, tile]] = stage, tile, devices[stage], first[stage] + worker
    begin = min(e.step for e in chosen)
    for e in chosen:
        times[record[e.stage, e.tile], MEANING[e.what]] = e.step - begin
    return Trace(
        tuple(stage_info(s, "reference", n) for s, n in zip(workload.stages, workers, strict=True)),
        tuple(edge_info(edge) for edge in workload.edges),
        ClockInfo("scheduler", "steps"),
        {"backend": "reference", "placement": f"{placement.kind}: {placement}", "signalling": signalling},
        keys,
        times,
    )
