"""The event table: one record per tile, with the same columns whoever ran the tiles.

GPUs, virtual devices and the reference executor all write this table; names, ids and phases are derived from `EVENTS`.
Times count from the first event of the run, on one clock for all devices (`ClockInfo` says how good that clock is).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilerelay.errors import InvalidInput
from tilerelay.graph.tiling import Int32s, TileGrid
from tilerelay.graph.workload import Edge, Stage

Int64s = NDArray[np.int64]

# What a tile passes through, in this order; kernels.protocol numbers its timestamps the same way.
EVENTS = ("seen", "obtained", "loaded", "computed", "stored", "published")
SEEN, OBTAINED, LOADED, COMPUTED, STORED, PUBLISHED = range(len(EVENTS))
KEYS = ("stage", "tile", "device", "worker")
STAGE, TILE, DEVICE, WORKER = range(len(KEYS))
COLUMNS = (*KEYS, *EVENTS)
MISSING = -1  # an event that this executor or this kernel doesn't have

# Phase -> the event that ends it; it begins with the event before. The names of slices in every export.
PHASES = {
    "prologue": OBTAINED,
    "first load": LOADED,
    "math": COMPUTED,
    "store": STORED,
    "epilogue": PUBLISHED,
}
# The role of a warp-specialised kernel that a phase keeps busy.
ROLES = {"prologue": "load", "first load": "load", "math": "math", "store": "store", "epilogue": "store"}
REQUIRED = (OBTAINED, COMPUTED, STORED)
ELEMENT_BYTES = 2  # bf16 and fp16
UNITS = ("ns", "steps")


@dataclass(frozen=True)
class StageInfo:
    """A stage of the run.

    Attributes:
        kernel: "persistent" (three roles work on three tiles at once), "classical" or "reference" (one tile at a time).
        grid: tiles of the [M, N] output.
        k: length of the sum.
        workers: CTAs (or agents) that computed tiles at the same time.
        workers_known: each tile's worker was recorded; else it was worked out from the times.
        in_turn: tiles are sent to other devices in turn, after their own device was told.
    """

    name: str
    kernel: str
    grid: TileGrid
    k: int
    workers: int
    workers_known: bool = True
    in_turn: bool = False

    @property
    def roles_overlap(self) -> bool:
        """Loads, math and stores of different tiles go on at once on one worker."""
        return self.kernel == "persistent"

    def tile_bytes(self, tile: int) -> int:
        """Bytes of one output tile, clipped to [M, N]."""
        top, bottom, left, right = self.grid.extent(tile)
        return (bottom - top) * (right - left) * ELEMENT_BYTES


@dataclass(frozen=True, eq=False)
class EdgeInfo:
    """Dependencies between two stages: (producer tiles, consumer tiles that need all of them), each once.

    Attributes:
        first: for each of the groups, the producer tiles that its tiles wait for before they begin: all of them, or
            those of the first step of their sums.
    """

    producer: int
    consumer: int
    groups: tuple[tuple[Int32s, Int32s], ...]
    first: tuple[Int32s, ...]


@dataclass(frozen=True)
class ClockInfo:
    """The clock that all times are on.

    Attributes:
        source: "globaltimer", "monotonic" or "scheduler".
        unit: "ns", or "steps" of a scheduler.
        granularity: the smallest difference that it shows.
        error: bound of what two devices' times can be wrong by against each other.
        offsets: what was taken off each device's own clock, at the middle of the run.
    """

    source: str
    unit: str = "ns"
    granularity: int = 1
    error: float = 0.0
    offsets: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Trace:
    """A run: what ran, and the table.

    Attributes:
        run: plain facts about the run (backend, placement, signalling, ...), as `Pipeline.describe` gives them.
        keys: int64 [records, KEYS]. Workers are numbered per device, over all stages.
        times: int64 [records, EVENTS] in the clock's unit, from the first event; MISSING where there is none.

    Raises:
        InvalidInput: columns that are missing, no record, tiles that do not exist or come twice, or a tile without
            the events that every executor records.
    """

    stages: tuple[StageInfo, ...]
    edges: tuple[EdgeInfo, ...]
    clock: ClockInfo
    run: Mapping[str, Any]
    keys: Int64s
    times: Int64s

    def __post_init__(self) -> None:
        records = len(self.keys)
        if self.keys.shape != (records, len(KEYS)) or self.times.shape != (records, len(EVENTS)) or not records:
            raise InvalidInput(f"an event table needs records of the columns {', '.join(COLUMNS)}, at least one")
        stages, tiles = self.keys[:, STAGE], self.keys[:, TILE]
        if stages.min() < 0 or stages.max() >= len(self.stages) or self.keys.min() < 0:
            raise InvalidInput("the event table names stages, tiles, devices or workers that do not exist")
        sizes = np.array([stage.grid.tiles for stage in self.stages])
        if (tiles >= sizes[stages]).any() or len(np.unique(self.keys[:, :2], axis=0)) != records:
            raise InvalidInput("the event table names tiles that are not in their stage's grid, or a tile twice")
        if (self.times[:, REQUIRED] < 0).any():
            names = ", ".join(EVENTS[event] for event in REQUIRED)
            raise InvalidInput(f"every tile needs the times of {names}; run the pipeline to its end first")

    def __len__(self) -> int:
        return len(self.keys)

    @cached_property
    def at(self) -> Int64s:
        """[records, EVENTS] without gaps or steps backwards: a phase that wasn't recorded takes no time."""
        filled = self.times.copy()
        filled[:, SEEN] = np.where(self.times[:, SEEN] < 0, self.times[:, OBTAINED], self.times[:, SEEN])
        return np.maximum.accumulate(filled, axis=1)

    @property
    def backward(self) -> int:
        """Tiles with an event that is earlier than the one before it by more than the clock's granularity."""
        recorded = np.where(self.times < 0, 0, self.times)
        lag = np.maximum.accumulate(recorded, axis=1) - self.times
        return int(((lag > self.clock.granularity) & (self.times >= 0)).any(axis=1).sum())

    @property
    def begin(self) -> int:
        return int(self.at[:, SEEN].min())

    @property
    def end(self) -> int:
        return int(self.at[:, PUBLISHED].max())

    @property
    def devices(self) -> list[int]:
        return [int(device) for device in np.unique(self.keys[:, DEVICE])]

    def device_name(self, device: int) -> str:
        return f"GPU {device}" if self.run.get("backend") == "cuda" else f"virtual device {device}"

    @cached_property
    def roles_overlap(self) -> NDArray[np.bool_]:
        """[records] of a stage whose roles work on several tiles at once."""
        return np.array([stage.roles_overlap for stage in self.stages])[self.keys[:, STAGE]]

    @cached_property
    def record_of(self) -> list[Int64s]:
        """By stage, [tiles]: the record of each tile, -1: none."""
        found = [np.full(stage.grid.tiles, -1, dtype=np.int64) for stage in self.stages]
        for record, (stage, tile, *_) in enumerate(self.keys.tolist()):
            found[stage][tile] = record
        return found

    @cached_property
    def walks(self) -> dict[tuple[int, int], list[int]]:
        """(device, worker) -> its records in the order in which it obtained them."""
        order = np.lexsort((self.at[:, COMPUTED], self.at[:, OBTAINED]))
        walks: dict[tuple[int, int], list[int]] = {}
        for record in order.tolist():
            walks.setdefault((int(self.keys[record, DEVICE]), int(self.keys[record, WORKER])), []).append(record)
        return dict(sorted(walks.items()))

    @cached_property
    def previous(self) -> Int64s:
        """[records]: the record that the same worker obtained before, -1: none."""
        found = np.full(len(self), -1, dtype=np.int64)
        for walk in self.walks.values():
            found[walk[1:]] = walk[:-1]
        return found

    @cached_property
    def free_at(self) -> Int64s:
        """[records]: when the worker could begin with the next tile: its math role, or the whole CTA, was done."""
        return np.where(self.roles_overlap, self.at[:, COMPUTED], self.at[:, PUBLISHED])

    @cached_property
    def _arrivals(self) -> tuple[Int64s, Int64s]:
        """[records] each: the prerequisite to begin with that came last, and when; -1: there is none in the table."""
        found = np.full(len(self), -1, dtype=np.int64)
        arrival = np.full(len(self), -1, dtype=np.int64)
        device = self.keys[:, DEVICE]
        for edge in self.edges:
            for (_, members), first in zip(edge.groups, edge.first, strict=True):
                needs = self.record_of[edge.producer][first]
                readers = self.record_of[edge.consumer][members]
                needs, readers = needs[needs >= 0], readers[readers >= 0]
                for here in (False, True) if len(needs) and len(readers) else ():
                    told_early = here and self.stages[edge.producer].in_turn
                    came = self.at[needs, COMPUTED if told_early else PUBLISHED]
                    last = needs[came.argmax()]
                    those = readers[(device[readers] == device[last]) == here]
                    later = those[came.max() > arrival[those]]
                    found[later], arrival[later] = last, came.max()
        return found, arrival

    @property
    def last_prerequisite(self) -> Int64s:
        """[records]: of the prerequisites to begin with, the one that came last; -1: there is none in the table."""
        return self._arrivals[0]

    @property
    def arrival(self) -> Int64s:
        """[records]: when the last prerequisite to begin with came; -1: there is none in the table.

        That is when it was published. A tile that is sent in turn was announced on its own device before; when, is not
        recorded, and counts as when it was computed.
        """
        return self._arrivals[1]

    def rows(self, first: int, end: int) -> Trace:
        """The trace of the tiles in rows [first, end) of every stage's grid; it starts anew at 0.

        Raises:
            InvalidInput: no tile is left.
        """
        cols = np.array([stage.grid.cols for stage in self.stages])[self.keys[:, STAGE]]
        row = self.keys[:, TILE] // cols
        kept = (row >= first) & (row < end)
        times = self.times[kept]
        start = times[times >= 0].min() if kept.any() else 0
        times = np.where(times >= 0, times - start, times)
        run = {**self.run, "rows": [first, end]}
        return Trace(self.stages, self.edges, self.clock, run, self.keys[kept], times)


def stage_info(stage: Stage, kernel: str, workers: int, *, workers_known: bool = True) -> StageInfo:
    """The stage of a workload as the table describes it."""
    return StageInfo(stage.name, kernel, stage.grid, stage.k, workers, workers_known, stage.under_way is not None)


def edge_info(edge: Edge) -> EdgeInfo:
    """The edge of a workload as the table describes it: groups with the same prerequisites become one."""
    d = edge.dependencies
    producer = np.repeat(np.arange(d.num_producers, dtype=np.int32), np.diff(d.offsets))
    order = np.argsort(d.counters, kind="stable")
    bounds = np.searchsorted(d.counters[order], np.arange(len(d.need) + 1))
    found: dict[tuple[bytes, bytes], tuple[Int32s, Int32s, list[int]]] = {}
    for group in range(d.num_groups):
        start, end = bounds[group * d.num_steps], bounds[(group + 1) * d.num_steps]
        needed = np.unique(producer[order[start:end]])
        first = producer[order[start : bounds[group * d.num_steps + 1]]]
        key = needed.tobytes(), first.tobytes()
        found.setdefault(key, (needed, first, []))[2].extend(d.members_of(group))
    groups = tuple((needed, np.array(sorted(members), dtype=np.int32)) for needed, _, members in found.values())
    return EdgeInfo(edge.producer, edge.consumer, groups, tuple(first for _, first, _ in found.values()))


def first_workers(devices: Sequence[int], workers: Sequence[int]) -> list[int]:
    """Number of each stage's first worker, so that workers of stages on the same device have different numbers."""
    taken: dict[int, int] = {}
    first = []
    for device, count in zip(devices, workers, strict=True):
        first.append(taken.get(device, 0))
        taken[device] = first[-1] + count
    return first
