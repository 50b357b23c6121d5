"""Results arranged for reading: series over M, our reduction against every method, and latencies split in parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilerelay.baselines.cell import Cell
from tilerelay.bench.methods import FLOOR, NAMES, ONE_PROCESS, OURS, TORCHRUN
from tilerelay.bench.records import Record
from tilerelay.bench.statistics import reduction

PARTED = ("tp-nccl", "tp-two-shot", "hybrid-tp")  # methods whose record has a computation part


@dataclass(frozen=True)
class Row:
    """A method of a process set, named as tables and legends name it."""

    method: str
    process_set: str

    @property
    def name(self) -> str:
        # A method that both sets have needs to say which one.
        twice = self.method in (FLOOR, "tp-nccl") and self.process_set == TORCHRUN
        return f"{self.method} (a process per GPU)" if twice else self.method


@dataclass
class Series:
    """All records of one shape, number of GPUs and timing."""

    shape: tuple[int, int, int, int]
    timing: str
    records: list[Record]

    @property
    def ms(self) -> list[int]:
        return sorted({r.m for r in self.records})

    @property
    def rows(self) -> list[Row]:
        """Methods in the order of `NAMES`, one process first."""
        found = {(r.process_set, r.method) for r in self.records}
        order = [(s, n) for s in (ONE_PROCESS, TORCHRUN) for n in NAMES]
        return [Row(name, process_set) for process_set, name in order if (process_set, name) in found]

    def record(self, row: Row, m: int) -> Record | None:
        wanted = (row.method, row.process_set, m)
        return next((r for r in self.records if (r.method, r.process_set, r.m) == wanted), None)

    def ok(self, row: Row, m: int) -> Record | None:
        """The record, when it has figures."""
        record = self.record(row, m)
        return record if record is not None and record.status == "ok" else None

    def reduction(self, row: Row, m: int) -> float | None:
        """Our latency reduction against a method, from ratios to the floor: they alone cross process sets."""
        ours, theirs = self.ok(Row(OURS, ONE_PROCESS), m), self.ok(row, m)
        if ours is None or theirs is None or ours.ratio_to_floor is None or theirs.ratio_to_floor is None:
            return None
        return reduction(ours.ratio_to_floor, theirs.ratio_to_floor)

    @property
    def title(self) -> str:
        gpus, layers, n, k = self.shape
        chain = f"{layers} layer{'s' if layers > 1 else ''} of {n}" if n == k else f"{k} -> {n} -> {k}"
        eager = ", launched eagerly" if self.timing == "eager" else ""
        return f"{chain} on {gpus} GPU{'s' if gpus > 1 else ''}{eager}"

    @property
    def slug(self) -> str:
        gpus, layers, n, k = self.shape
        return f"{gpus}gpu-{layers}x{n}" + ("" if n == k else f"-{k}") + ("" if self.timing == "graph" else "-eager")


def series_of(records: Sequence[Record]) -> list[Series]:
    keys = sorted({(r.cell.shape, r.timing) for r in records})
    return [Series(shape, t, [r for r in records if (r.cell.shape, r.timing) == (shape, t)]) for shape, t in keys]


@dataclass(frozen=True)
class Parts:
    """A method's latency in two parts, in microseconds: its GEMMs alone, and what the rest adds."""

    cell: Cell
    row: Row
    compute_us: float
    communication_us: float


def parts_of(records: Sequence[Record]) -> list[Parts]:
    """Methods that have a breakdown. Communication is what the all-reduce adds: a hidden part counts nowhere."""
    parts = []
    for r in records:
        if r.method in PARTED and r.status == "ok" and r.median_us is not None and r.compute_us is not None:
            added = max(0.0, r.median_us - r.compute_us)
            parts.append(Parts(r.cell, Row(r.method, r.process_set), min(r.compute_us, r.median_us), added))
    return sorted(parts, key=lambda p: (p.cell.shape, p.cell.m, PARTED.index(p.row.method), p.row.process_set))
