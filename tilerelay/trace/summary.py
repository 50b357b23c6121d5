"""A run in numbers: ramp, steady state and tail, what each device did, bytes over the links, the critical path."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tilerelay.trace.events import DEVICE, OBTAINED, PUBLISHED, SEEN, STAGE, STORED, TILE, Trace
from tilerelay.trace.path import critical_path, hops, path_time
from tilerelay.trace.spans import BUSY, IDLE, partition, worker_count


@dataclass(frozen=True)
class DeviceSummary:
    """What a device did in the run; times in the clock's unit.

    Attributes:
        begin, end: its first tile was seen, its last one published.
        share: category -> share of its workers' time over the whole run; sums to 1.
    """

    device: int
    name: str
    stages: list[str]
    tiles: int
    workers: int
    begin: int
    end: int
    share: dict[str, float]

    @property
    def idle(self) -> float:
        """Share of its workers' time without a tile: ramp, waiting and tail."""
        return sum(self.share[name] for name in IDLE)

    @property
    def protocol_and_stores(self) -> float:
        """Share of its workers' time with a tile, but without math."""
        return sum(self.share[name] for name in BUSY if name != "math")


@dataclass(frozen=True)
class LinkSummary:
    """Tiles written from one device into another's memory.

    Attributes:
        begin, end: the first and the last of them was stored, in the clock's unit.
    """

    source: int
    target: int
    bytes: int
    begin: int
    end: int


@dataclass(frozen=True)
class Summary:
    """See `summarise`. Times in `unit`."""

    unit: str
    total: int
    ramp: int
    steady: int
    tail: int
    devices: list[DeviceSummary]
    links: list[LinkSummary]
    path: dict[str, int]
    path_tiles: list[tuple[str, int]]
    backward: int

    @property
    def idle(self) -> float:
        """Share of all workers' time without a tile."""
        return sum(d.idle * d.workers for d in self.devices) / sum(d.workers for d in self.devices)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "idle": self.idle}


def summarise(trace: Trace) -> Summary:
    """The run in numbers.

    The ramp ends when the last device has obtained its first tile, the tail begins when the first device has published
    its last one; between them, in the steady state, every device has work. The three add up to the run.
    """
    begin, end = trace.begin, trace.end
    cut = partition(trace)
    devices = []
    ramp_end, tail_begin = begin, end
    for device in trace.devices:
        here = trace.keys[:, DEVICE] == device
        time = cut.time(device)
        total = sum(time.values())
        stages = [trace.stages[stage].name for stage in np.unique(trace.keys[here, STAGE])]
        at = trace.at[here]
        ramp_end, tail_begin = max(ramp_end, int(at[:, OBTAINED].min())), min(tail_begin, int(at[:, PUBLISHED].max()))
        share = {name: spent / max(1, total) for name, spent in time.items()}
        devices.append(
            DeviceSummary(
                device, trace.device_name(device), stages, int(here.sum()), worker_count(trace, device),
                int(at[:, SEEN].min()) - begin, int(at[:, PUBLISHED].max()) - begin, share,
            )
        )  # fmt: skip
    tail_begin = max(tail_begin, ramp_end)  # runs so short that the first device ends before the last one begins
    steps = critical_path(trace)
    return Summary(
        trace.clock.unit, end - begin, ramp_end - begin, tail_begin - ramp_end, end - tail_begin,
        devices, links(trace), path_time(steps), [(trace.stages[s].name, n) for s, n in hops(trace, steps)],
        trace.backward,
    )  # fmt: skip


def links(trace: Trace) -> list[LinkSummary]:
    """Bytes of output tiles that another device's tiles read, by source and target; signals are not counted."""
    devices = trace.keys[:, DEVICE]
    sent: dict[tuple[int, int], list[int]] = {}
    for edge in trace.edges:
        pairs: set[tuple[int, int]] = set()
        for needed, members in edge.groups:
            readers = trace.record_of[edge.consumer][members]
            targets = np.unique(devices[readers[readers >= 0]]).tolist()
            makers = trace.record_of[edge.producer][needed]
            pairs |= {(record, t) for record in makers[makers >= 0].tolist() for t in targets if t != devices[record]}
        for record, target in pairs:
            sent.setdefault((int(devices[record]), target), []).append(record)
    found = []
    for (source, target), records in sorted(sent.items()):
        size = sum(trace.stages[trace.keys[r, STAGE]].tile_bytes(int(trace.keys[r, TILE])) for r in records)
        stored = trace.at[records, STORED] - trace.begin
        found.append(LinkSummary(source, target, size, int(stored.min()), int(stored.max())))
    return found
