"""The critical path: what the end of the run waited for, tile by tile, back to its beginning.

A tile begins when its last prerequisite is published (that of its sum's first step, where it has steps) and its worker
is free (its math role, or, where a CTA does one thing at a time, the whole CTA). Whichever came later bound the tile:
the path goes on with the prerequisite (an *arrival*) or with the worker's tile before (a *turn*). It ends at a tile
that neither bound.

Between the moment that bound a tile and the moment at which it released the next one, the tile's own phases, in their
order, account for all of the time; so the path's parts add up to the whole run.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilerelay.trace.events import PHASES, PUBLISHED, SEEN, Trace

ARRIVAL, TURN, START = "arrival", "turn", "start"


@dataclass(frozen=True)
class Step:
    """A tile on the path, first to last.

    Attributes:
        bound: ARRIVAL, TURN or START: what the tile waited for.
        begin, end: from what bound it to what it released, in the clock's unit.
        parts: phase -> time in it; "flight": from the prerequisite's publication until it was seen; "turn": from the
            tile before until this one was taken.
    """

    record: int
    bound: str
    begin: int
    end: int
    parts: dict[str, int]


def critical_path(trace: Trace) -> list[Step]:
    """The path to the tile that was published last."""
    published, arrival, free_at = trace.at[:, PUBLISHED], trace.arrival, trace.free_at
    record, leave = int(published.argmax()), int(published.max())
    steps: list[Step] = []
    while True:
        before, needed = int(trace.previous[record]), int(trace.last_prerequisite[record])
        if needed >= 0 and (before < 0 or arrival[record] >= free_at[before]):
            bound, begin, following = ARRIVAL, int(arrival[record]), needed
        elif before >= 0:
            bound, begin, following = TURN, int(free_at[before]), before
        else:
            bound, begin, following = START, int(trace.at[record, SEEN]), -1
        # Clocks of two devices agree only within an error: what bound a tile can't be later than what it released.
        begin = min(begin, leave)
        steps.append(Step(record, bound, begin, leave, _parts(trace, record, bound, begin, leave)))
        if following < 0:
            return steps[::-1]
        record, leave = following, begin


def _parts(trace: Trace, record: int, bound: str, begin: int, leave: int) -> dict[str, int]:
    """The time from `begin` to `leave`, cut at the record's events."""
    first = "flight" if bound == ARRIVAL else TURN
    parts, clock = {}, begin
    for name, end in [(first, SEEN), *PHASES.items()]:
        until = min(max(int(trace.at[record, end]), clock), leave)
        parts[name] = until - clock
        clock = until
    parts["epilogue"] += leave - clock
    return parts


def path_time(steps: list[Step]) -> dict[str, int]:
    """Part -> time on the whole path; the sum is the run's, from the first step's begin."""
    total = dict.fromkeys(["math", "store", "epilogue", "flight", TURN, "prologue", "first load"], 0)
    for step in steps:
        for name, time in step.parts.items():
            total[name] += time
    return total


def hops(trace: Trace, steps: list[Step]) -> list[tuple[int, int]]:
    """(stage, tiles of it on the path in a row), first to last."""
    found: list[tuple[int, int]] = []
    for step in steps:
        stage = int(trace.keys[step.record, 0])
        if found and found[-1][0] == stage:
            found[-1] = (stage, found[-1][1] + 1)
        else:
            found.append((stage, 1))
    return found
