"""Made-up runs: a persistent two-stage pipeline with times that are known exactly, and tables of any dependencies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tilerelay.graph.catalog import dense_chain
from tilerelay.graph.cut import cut
from tilerelay.graph.placement import sharded
from tilerelay.graph.workload import Workload, with_orders
from tilerelay.runtime.tracing import StageRun, assemble
from tilerelay.trace.events import EVENTS, KEYS, ClockInfo, EdgeInfo, Trace, edge_info, stage_info

WORKERS = 4
# Durations in ns: what a tile takes from one event to the next.
MATH, SWITCH, STORE, T1, T2, T3, T4 = 50_000, 800, 4_000, 3_000, 2_500, 700, 1_500
START = 10**15  # device clocks count from their start


def pipeline_stamps(workload: Workload) -> tuple[list[Any], list[Any]]:
    """(stamps, tickets) of both stages of a pipeline of persistent kernels with WORKERS workers each."""
    grids = [stage.grid for stage in workload.stages]
    stamps = [np.zeros((g.tiles, len(EVENTS)), np.int64) for g in grids]
    ready = np.zeros(grids[0].rows, np.int64)

    def walk(stage: int, tickets: Sequence[int], first: int, arrival: Mapping[int, int] | None) -> None:
        free = [first] * WORKERS
        for ticket, tile in enumerate(tickets):
            worker = ticket % WORKERS
            # The load role runs ahead of the math; it takes the next tile 5 us before the math is done.
            seen = max(free[worker] - 5_000 if ticket >= WORKERS else first, arrival[tile] + T2 if arrival else 0)
            obtained = seen + T3
            loaded = max(obtained + T4, free[worker] + SWITCH)
            computed = loaded + MATH
            stored = computed + STORE
            stamps[stage][tile] = seen, obtained, loaded, computed, stored, stored + T1
            free[worker] = computed

    order = np.asarray(workload.stages[0].order)
    walk(0, order.tolist(), START, None)
    for tile in range(grids[0].tiles):
        row = tile // grids[0].cols
        ready[row] = max(ready[row], stamps[0][tile, -1])
    panels = np.argsort(ready, kind="stable")
    tickets = (panels[:, None] * grids[1].cols + np.arange(grids[1].cols)).reshape(-1).astype(np.int32)
    walk(1, tickets.tolist(), START, {t: int(ready[t // grids[1].cols]) for t in range(grids[1].tiles)})
    return stamps, [order, tickets]


def pipeline(m: int = 768, rows: int = 128, wide: int = 512) -> Trace:
    """Six row panels by default, of two tiles each, on two GPUs."""
    workload = with_orders(dense_chain(m, [wide] * 3, tile=(rows, 256)), [WORKERS] * 2)
    stamps, tickets = pipeline_stamps(workload)
    runs = {i: StageRun(i, "persistent", stamps[i], tickets[i], WORKERS) for i in range(2)}
    facts = {"backend": "cuda", "placement": "pipelined: 0,1", "signalling": "queue"}
    return assemble(workload, runs, "globaltimer", None, facts)


def table(
    workload: Workload, records: Sequence[tuple[Sequence[int], Sequence[int]]], kernel: str = "classical"
) -> Trace:
    """A trace from (keys, times) of every record."""
    keys = np.array([k for k, _ in records], dtype=np.int64).reshape(-1, len(KEYS))
    times = np.array([t for _, t in records], dtype=np.int64).reshape(-1, len(EVENTS))
    stages = tuple(stage_info(s, kernel, 1) for s in workload.stages)
    edges: tuple[EdgeInfo, ...] = tuple(edge_info(e) for e in workload.edges)
    return Trace(stages, edges, ClockInfo("made up"), {"backend": "cuda"}, keys, times)


def random_trace(rng: np.random.Generator) -> Trace:
    """Any table: tiles on random devices and workers, events of random length, some events missing."""
    rows = int(rng.integers(1, 5))
    widths = [64 * int(rng.integers(1, 4)) for _ in range(2)]
    workload = dense_chain(64 * rows, [64, *widths], tile=(64, 64))
    if rng.random() < 0.5:  # parts with several producers
        workload = cut(workload, sharded(widths, [0, 1])).workload
    records = []
    for stage, info in enumerate(workload.stages):
        clocks: dict[tuple[int, int], int] = {}
        for tile in rng.permutation(info.grid.tiles).tolist():
            key = int(rng.integers(0, 2)), int(rng.integers(0, 3)) + 3 * stage
            begin = clocks.get(key, int(rng.integers(0, 2000))) + int(rng.integers(-50, 500))
            times = max(0, begin) + np.cumsum(rng.integers(0, 300, len(EVENTS)))
            clocks[key] = int(times[3])  # stores and epilogue overlap the next tile
            times[[0, 2, 5]] = np.where(rng.random(3) < 0.2, -1, times[[0, 2, 5]])
            records.append(((stage, tile, *key), times.tolist()))
    return table(workload, records, kernel=str(rng.choice(["persistent", "classical"])))
