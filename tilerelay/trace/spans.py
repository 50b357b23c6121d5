"""Where each worker's time went: phases per role, and a partition of every worker's time into categories."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tilerelay.trace.events import DEVICE, PHASES, PUBLISHED, ROLES, SEEN, WORKER, Trace

WHOLE = "tile"  # the one role of a kernel that does not split its work

# Categories of a worker's time. An earlier one wins where phases of several tiles overlap: while a tile is computed,
# nothing else costs anything; and while a tile's result is written to its buffer, the next one's loads wait for that.
BUSY = ("math", "store", "first load", "prologue", "epilogue")
IDLE = ("waiting", "ramp", "tail")
CATEGORIES = (*BUSY, *IDLE)


@dataclass(frozen=True)
class Span:
    """A phase of a record, in the clock's unit."""

    record: int
    phase: str
    begin: int
    end: int


def spans(trace: Trace) -> Iterator[tuple[tuple[int, int], str, list[Span]]]:
    """(device, worker), role, and the phases that kept the role busy, none overlapping the one before.

    The load role takes the next tile while the last one's first block is on its way: the later phase cuts the earlier.
    """
    for key, walk in trace.walks.items():
        by_role: dict[str, list[Span]] = {}
        for record in walk:
            overlap = bool(trace.roles_overlap[record])
            for phase, event in PHASES.items():
                begin, end = (int(t) for t in trace.at[record, event - 1 : event + 1])
                if end > begin:
                    by_role.setdefault(ROLES[phase] if overlap else WHOLE, []).append(Span(record, phase, begin, end))
        for role, found in by_role.items():
            found.sort(key=lambda s: s.begin)
            cut = [Span(a.record, a.phase, a.begin, min(a.end, b.begin)) for a, b in pairwise(found)]
            yield key, role, [s for s in (*cut, found[-1]) if s.end > s.begin]


@dataclass(frozen=True, eq=False)
class Partition:
    """Every worker's whole run, cut into segments without gaps; all arrays [segments].

    Attributes:
        category: index into CATEGORIES.
        begin, end: in the clock's unit.
    """

    device: NDArray[np.int64]
    worker: NDArray[np.int64]
    category: NDArray[np.int64]
    begin: NDArray[np.int64]
    end: NDArray[np.int64]

    def time(self, device: int | None = None) -> dict[str, int]:
        """Category -> time of all workers (of a device); the sum is the number of workers times the run."""
        here = slice(None) if device is None else self.device == device
        total = np.bincount(self.category[here], (self.end - self.begin)[here], minlength=len(CATEGORIES))
        return {name: int(total[i]) for i, name in enumerate(CATEGORIES)}

    def shares(self, device: int, edges: NDArray[np.float64]) -> NDArray[np.float64]:
        """[CATEGORIES, bins]: the mean share of the device's workers in each category between neighbouring edges."""
        here = self.device == device
        workers = len(np.unique(self.worker[here]))
        found = np.empty((len(CATEGORIES), len(edges) - 1))
        for i in range(len(CATEGORIES)):
            chosen = here & (self.category == i)
            begin, length = self.begin[chosen], (self.end - self.begin)[chosen]
            covered = np.array([np.clip(edge - begin, 0, length).sum() for edge in edges])
            found[i] = np.diff(covered) / np.diff(edges) / workers
        return found


def partition(trace: Trace) -> Partition:
    """Cut every worker's time from the run's first to its last event into CATEGORIES.

    "ramp": before the worker's first tile; "tail": after its last; "waiting": between tiles, when none was there.
    """
    begin, end = trace.begin, trace.end
    columns: list[NDArray[np.int64]] = []
    for (device, worker), walk in trace.walks.items():
        at = trace.at[walk]
        bounds = np.unique(np.concatenate([at.reshape(-1), [begin, end]]))
        found = np.full(len(bounds) - 1, CATEGORIES.index("waiting"))
        found[bounds[:-1] < at[:, SEEN].min()] = CATEGORIES.index("ramp")
        found[bounds[:-1] >= at[:, PUBLISHED].max()] = CATEGORIES.index("tail")
        for phase in reversed(BUSY):
            first = np.searchsorted(bounds, at[:, PHASES[phase] - 1])
            last = np.searchsorted(bounds, at[:, PHASES[phase]])
            for a, b in zip(first, last, strict=True):
                found[a:b] = CATEGORIES.index(phase)
        starts = np.flatnonzero(np.diff(found, prepend=-1))
        ends = np.append(starts[1:], len(found))
        same = np.ones(len(starts), dtype=np.int64)
        columns.append(np.stack([same * device, same * worker, found[starts], bounds[starts], bounds[ends]]))
    return Partition(*np.concatenate(columns, axis=1))


def worker_count(trace: Trace, device: int) -> int:
    """Workers of a device that computed a tile."""
    return len(np.unique(trace.keys[trace.keys[:, DEVICE] == device, WORKER]))
