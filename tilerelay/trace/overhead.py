"""What the protocol costs a tile: the paper's T1 to T4 (section III.C, Figure 2), from a trace.

    T1  epilogue          published - stored: fence, counters, push
    T2  until visible     consumer's seen - last prerequisite's published, of tiles that waited for it
    T3  fetch, broadcast  obtained - seen
    T4  hand-over         loaded - obtained, of tiles that found the math role free (it holds the first load, too)

and "drain", stored - computed, which is not the protocol's: a kernel without it waits for its stores only at its end.
A time is *hidden* when the same worker's math goes on: T1, T3 and drain by the share of their time that overlaps the
math of another tile; T2 and T4 by the share of tiles that did not have to wait for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilerelay.trace.events import COMPUTED, LOADED, OBTAINED, PUBLISHED, SEEN, STAGE, STORED, Trace

QUANTITIES = {
    "T1": "epilogue: fence, counters, push",
    "T2": "until visible on the consumer's device",
    "T3": "fetch and broadcast",
    "T4": "hand-over to the other roles, first load",
    "drain": "stores until complete (not the protocol's)",
}
# Medians in microseconds: the classical kernel on H200, the persistent one on B200 (paper, section III.C).
PAPER_US = {
    "classical": {"T1": 6.0, "T2": 120.0, "T3": 1.5},
    "persistent": {"T1": 6.0, "T2": 5.0, "T3": 1.5, "T4": 0.5},
}
PERCENTILES = (5, 50, 95, 99, 100)


@dataclass(frozen=True)
class Quantity:
    """One of QUANTITIES over all tiles that have it, in microseconds (thousands of the clock's unit).

    Attributes:
        tiles: tiles that it was measured on; of: tiles that could have had it.
        hidden: share that cost nothing (see the module), None where there is no tile.
    """

    tiles: int
    of: int
    p05: float | None
    median: float | None
    p95: float | None
    p99: float | None
    max: float | None
    hidden: float | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def overhead(trace: Trace, *, publishing: Sequence[int] | None = None) -> dict[str, Quantity]:
    """The quantities that the trace's executor records and that some tile has.

    Args:
        publishing: stages that announce their tiles; default: those with a consumer in the trace.
    """
    at, recorded = trace.at, trace.times >= 0
    stage = trace.keys[:, STAGE]
    publishing = [edge.producer for edge in trace.edges] if publishing is None else publishing
    publishes = np.isin(stage, publishing) & recorded[:, PUBLISHED]
    listens = np.isin(stage, [edge.consumer for edge in trace.edges]) & recorded[:, SEEN]
    before, needed = trace.previous, trace.last_prerequisite
    free = np.where(before >= 0, trace.free_at[before], trace.begin)
    arrival = np.where(needed >= 0, trace.arrival, trace.begin)
    waited = listens & (needed >= 0) & (arrival >= free)
    split = recorded[:, LOADED] & listens
    found_free = split & (at[:, OBTAINED] >= free)

    drain_hidden = _overlap(trace, at[:, COMPUTED], at[:, STORED])
    return {
        name: quantity
        for name, quantity in {
            "T1": _timed(trace, publishes, STORED, PUBLISHED, _overlap(trace, at[:, STORED], at[:, PUBLISHED])),
            "T2": _quantity((at[:, SEEN] - arrival)[waited], int((listens & (needed >= 0)).sum()), None),
            "T3": _timed(trace, listens, SEEN, OBTAINED, _overlap(trace, at[:, SEEN], at[:, OBTAINED])),
            "T4": _quantity((at[:, LOADED] - at[:, OBTAINED])[found_free], int(split.sum()), None),
            "drain": _timed(trace, publishes, COMPUTED, STORED, drain_hidden),
        }.items()
        if quantity is not None
    }


def _timed(trace: Trace, chosen: NDArray[np.bool_], first: int, last: int, hidden: NDArray[Any]) -> Quantity | None:
    lengths = (trace.at[:, last] - trace.at[:, first])[chosen]
    share = float(hidden[chosen].sum() / lengths.sum()) if lengths.sum() else None
    return _quantity(lengths, len(lengths), share)


def _quantity(lengths: NDArray[np.int64], of: int, hidden: float | None) -> Quantity | None:
    if not of:
        return None
    if not len(lengths):
        return Quantity(0, of, None, None, None, None, None, hidden=1.0)
    p05, median, p95, p99, largest = (float(v) for v in np.percentile(lengths / 1e3, PERCENTILES))
    share = 1 - len(lengths) / of if hidden is None else hidden
    return Quantity(len(lengths), of, p05, median, p95, p99, largest, hidden=share)


def _overlap(trace: Trace, begin: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.float64]:
    """[records]: how much of [begin, end), before or after the record's own math, the worker spends on other math."""
    found = np.zeros(len(trace))
    for walk in trace.walks.values():
        math = np.sort(trace.at[walk][:, [LOADED, COMPUTED]], axis=0)
        math = np.maximum.accumulate(math.reshape(-1))  # begin, end, begin, end, ...
        spent = np.concatenate([[0], np.cumsum(np.diff(math) * (np.arange(len(math) - 1) % 2 == 0))])
        a, b = begin[walk], end[walk]
        found[walk] = np.interp(b, math, spent) - np.interp(a, math, spent)
    return found
