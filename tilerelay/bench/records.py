"""A record: one method on one cell, as measured. Plain dataclasses with their own checks, no further packages."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from tilerelay.baselines.cell import Cell
from tilerelay.errors import InvalidInput

STATUSES = ("ok", "error", "skipped")
TIMINGS = ("graph", "eager")


@dataclass(frozen=True)
class CellKey:
    """What is measured together and replaced together: a cell in one process set, timed one way."""

    cell: Cell
    process_set: str
    timing: str


@dataclass
class Record:
    """Times in microseconds, reductions and ratios as fractions.

    Attributes:
        suite: names of all suites that hold the cell.
        status: "ok", "error" (it failed; see reason) or "skipped" (it makes no sense here; see reason).
        reason: why not ok; on an ok record, variants of it that failed.
        process_set: "one-process" or "torchrun"; latencies compare within one, ratios to the floor across both.
        variant, chunk: the best of the sweep, which the figures belong to.
        compute_us: median without the communication, from the same rounds.
        check_error: largest relative error of a row against the fp32 reference.
        sm_clock_mhz, power_w: medians over the rounds, of the slowest and of the hungriest GPU.
        paper_us: the paper's latency of this method on this cell; paper_reduction: of its method against this one.
        sweep: every variant: label, chunk, median_us, min_us, max_us, sm_clock_mhz, power_w, error, check_error, and
            late_rounds: in how many rounds the run began before it was enqueued, so that its time contains that.
    """

    suite: list[str]
    method: str
    process_set: str
    timing: str
    status: str
    gpus: int
    layers: int
    m: int
    n: int
    k: int
    reason: str | None = None
    variant: str | None = None
    chunk: int | None = None
    rounds: int = 0
    median_us: float | None = None
    min_us: float | None = None
    max_us: float | None = None
    ratio_to_floor: float | None = None
    compute_us: float | None = None
    check_error: float | None = None
    sm_clock_mhz: float | None = None
    power_w: float | None = None
    paper_us: float | None = None
    paper_reduction: float | None = None
    x_lives: str = ""
    y_lives: str = ""
    replicated: str = ""
    note: str | None = None
    sweep: list[dict[str, Any]] = field(default_factory=list)

    @property
    def cell(self) -> Cell:
        return Cell(self.gpus, self.layers, self.m, self.n, self.k)

    @property
    def key(self) -> CellKey:
        return CellKey(self.cell, self.process_set, self.timing)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: object) -> Record:
        """Raises InvalidInput: not a record of this version, or figures that cannot be."""
        if not isinstance(data, Mapping):
            raise InvalidInput("a record is not an object")
        known = {f.name: f for f in fields(cls)}
        if set(data) != set(known):
            odd = sorted(set(data) ^ set(known))
            raise InvalidInput(f"a record has other fields than this version's: {', '.join(map(str, odd))}")
        record = cls(**data)
        record._check()
        return record

    def _check(self) -> None:
        where = f"record {self.method!r}, M={self.m!r}"
        if not isinstance(self.suite, list) or not all(isinstance(s, str) for s in self.suite):
            raise InvalidInput(f"{where}: suite is not a list of names")
        for name in ("method", "process_set", "x_lives", "y_lives", "replicated"):
            if not isinstance(getattr(self, name), str):
                raise InvalidInput(f"{where}: {name} is not text")
        for name in ("reason", "variant", "note"):
            if not isinstance(getattr(self, name), str | None):
                raise InvalidInput(f"{where}: {name} is neither text nor null")
        if self.status not in STATUSES:
            raise InvalidInput(f"{where}: status {self.status!r} is none of {', '.join(STATUSES)}")
        if self.timing not in TIMINGS:
            raise InvalidInput(f"{where}: timing {self.timing!r} is none of {', '.join(TIMINGS)}")
        _ = self.cell  # checks the sizes
        times = ("median_us", "min_us", "max_us", "ratio_to_floor", "compute_us", "sm_clock_mhz", "power_w", "paper_us")
        for name in times:
            value = getattr(self, name)
            if value is not None and not _is_positive(value):
                raise InvalidInput(f"{where}: {name}={value!r} is no positive number")
        if self.status == "ok":
            if self.median_us is None or self.min_us is None or self.max_us is None:
                raise InvalidInput(f"{where}: ok without figures")
            if not self.min_us <= self.median_us <= self.max_us:
                raise InvalidInput(f"{where}: the median {self.median_us} lies outside {self.min_us} to {self.max_us}")
        elif not self.reason:
            raise InvalidInput(f"{where}: {self.status} without a reason")
        if not isinstance(self.sweep, list) or not all(isinstance(entry, dict) for entry in self.sweep):
            raise InvalidInput(f"{where}: the sweep is not a list of objects")


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def blank(cell: Cell, method: str, process_set: str, timing: str, status: str, reason: str | None = None) -> Record:
    """A record without figures."""
    return Record(
        [], method, process_set, timing, status, cell.gpus, cell.layers, cell.m, cell.n, cell.k, reason=reason
    )
