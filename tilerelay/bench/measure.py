"""Measure one cell: prepare every method, check it, time all of them round by round, and make records.

One method's failure becomes its record and leaves the others alone. On several ranks all of them go through the same
steps: after each, the session lets the ranks agree on whether it worked, so that none waits for one that gave up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tilerelay.baselines.cell import Cell
from tilerelay.baselines.deadline import Stuck
from tilerelay.bench.clocks import Reading
from tilerelay.bench.methods import FLOOR
from tilerelay.bench.records import Record, blank
from tilerelay.bench.rounds import interleave
from tilerelay.bench.statistics import Summary, middle, summarise

Emit = Callable[[dict[str, Any]], None]


class ContextLost(RuntimeError):
    """The process cannot use its GPUs any more; `method` was running."""

    def __init__(self, method: str, reason: str) -> None:
        super().__init__(reason)
        self.method, self.reason = method, reason


@dataclass(frozen=True)
class Timed:
    """One run: its latency, what the GPUs were doing meanwhile, and whether the host was still enqueuing it then."""

    us: float
    reading: Reading | None
    late: bool = False


class Session(Protocol):
    """One process set at work. `Any` stands for methods, variants and launches, which this module only hands on."""

    process_set: str
    timing: str
    tolerance: float

    def method(self, name: str) -> Any: ...

    def variants(self, method: Any, cell: Cell) -> Sequence[Any]: ...

    def launch(self, variant: Any) -> Any: ...

    def check(self, variant: Any, launch: Any, cell: Cell) -> float: ...

    def time(self, launch: Any) -> Timed: ...

    def agree(self, failure: str | None) -> str | None:
        """This failure or any other rank's; None when all went well."""

    def healthy(self) -> bool:
        """Whether the GPUs still answer."""

    def end_cell(self) -> None:
        """All launches of the cell are closed."""


@dataclass
class Entry:
    """A variant on its way through the rounds."""

    method: str
    variant: Any
    launch: Any = None
    failure: str | None = None
    check_error: float | None = None
    times_us: list[float] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)
    late: int = 0

    @property
    def summary(self) -> Summary | None:
        return summarise(self.times_us) if self.failure is None and self.times_us else None

    def to_json(self) -> dict[str, Any]:
        summary = self.summary
        return {
            "label": self.variant.label,
            "chunk": self.variant.chunk,
            "compute_only": self.variant.compute_only,
            "median_us": summary and summary.median_us,
            "min_us": summary and summary.min_us,
            "max_us": summary and summary.max_us,
            "sm_clock_mhz": middle([r.sm_clock_mhz for r in self.readings]),
            "power_w": middle([r.power_w for r in self.readings]),
            "late_rounds": self.late,
            "check_error": self.check_error,
            "error": self.failure,
        }


@dataclass
class Tried:
    """A method on a cell."""

    name: str
    method: Any = None
    refusal: str | None = None
    failure: str | None = None
    entries: list[Entry] = field(default_factory=list)

    @property
    def best(self) -> Entry | None:
        done = [e for e in self.entries if e.summary is not None and not e.variant.compute_only]
        return min(done, key=lambda e: summarise(e.times_us).median_us, default=None)


def describe(error: BaseException) -> str:
    """One line for a record."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)}"[:500]


def measure_cell(session: Session, cell: Cell, names: Sequence[str], *, rounds: int, emit: Emit) -> list[Record]:
    """Records of all named methods on one cell.

    Raises:
        ContextLost, Stuck: the process must be replaced; nothing of this cell counts.
    """
    tried = [_prepare(session, cell, name, emit) for name in names]
    _time(session, tried, rounds, emit)
    # Not in a `finally`: after ContextLost and Stuck the GPUs do not answer, and closing would wait for them.
    for entry in (e for t in tried for e in t.entries):
        if entry.launch is not None:
            entry.launch.close()
            entry.launch = None
    session.end_cell()
    floor = next((t.best for t in tried if t.name == FLOOR), None)
    return [_record(session, cell, t, rounds, floor) for t in tried]


def _attempt(session: Session, method: str, step: Callable[[], None]) -> str | None:
    """Run a step on every rank; what went wrong, on whichever rank."""
    failure = None
    try:
        step()
    except Stuck:
        raise  # asking the GPUs whether they are well would wait for them
    except Exception as error:  # whatever it is, it belongs in this method's record
        failure = describe(error)
    if failure is not None and not session.healthy():
        raise ContextLost(method, failure)
    return session.agree(failure)


def _prepare(session: Session, cell: Cell, name: str, emit: Emit) -> Tried:
    tried = Tried(name)
    emit({"event": "try", "method": name, "variant": "preparation"})

    def make() -> None:
        tried.method = session.method(name)
        tried.refusal = tried.method.refusal(cell)
        if tried.refusal is None:
            tried.entries = [Entry(name, variant) for variant in session.variants(tried.method, cell)]

    tried.failure = _attempt(session, name, make)
    if tried.failure is not None:
        tried.entries = []
    for entry in tried.entries:
        emit({"event": "try", "method": name, "variant": entry.variant.label})
        entry.failure = _attempt(session, name, lambda entry=entry: _launch(session, entry))  # type: ignore[misc]
        if entry.failure is None and entry.variant.checked:
            entry.failure = _attempt(session, name, lambda entry=entry: _check(session, cell, entry))  # type: ignore[misc]
    return tried


def _launch(session: Session, entry: Entry) -> None:
    entry.launch = session.launch(entry.variant)


def _check(session: Session, cell: Cell, entry: Entry) -> None:
    error = session.check(entry.variant, entry.launch, cell)
    if not error <= session.tolerance:  # NaN is not
        raise ValueError(f"wrong result: a row is off by {error:.3g} of its norm, the limit is {session.tolerance:.3g}")
    entry.check_error = error


def _time(session: Session, tried: Sequence[Tried], rounds: int, emit: Emit) -> None:
    def run(entry: Entry, timed: bool) -> None:
        if entry.failure is not None:
            return
        emit({"event": "try", "method": entry.method, "variant": entry.variant.label})
        result: list[Timed] = []
        entry.failure = _attempt(session, entry.method, lambda: result.append(session.time(entry.launch)))
        if timed and entry.failure is None:
            entry.times_us.append(result[0].us)
            entry.late += result[0].late
            if result[0].reading is not None:
                entry.readings.append(result[0].reading)

    interleave(
        [e for t in tried for e in t.entries],
        rounds,
        run,
        after_round=lambda done, of: emit({"event": "round", "done": done, "of": of}),
    )


def _record(session: Session, cell: Cell, tried: Tried, rounds: int, floor: Entry | None) -> Record:
    record = blank(cell, tried.name, session.process_set, session.timing, "ok")
    if tried.method is not None:
        lives = tried.method.lives
        record.x_lives, record.y_lives, record.replicated = lives.x, lives.y, lives.replicated
    failures = [f"{e.variant.label}: {e.failure}" for e in tried.entries if e.failure is not None]
    record.reason = "; ".join(failures) or None
    record.sweep = [entry.to_json() for entry in tried.entries]
    best = tried.best
    if best is None:
        record.status = "skipped" if tried.refusal is not None and tried.failure is None else "error"
        record.reason = tried.failure or tried.refusal or record.reason or "nothing was measured"
        return record
    summary = summarise(best.times_us)
    record.variant, record.chunk, record.rounds = best.variant.label, best.variant.chunk, rounds
    record.median_us, record.min_us, record.max_us = summary.median_us, summary.min_us, summary.max_us
    record.check_error, record.note = best.check_error, best.variant.note
    record.sm_clock_mhz = middle([r.sm_clock_mhz for r in best.readings])
    record.power_w = middle([r.power_w for r in best.readings])
    if floor is not None:
        record.ratio_to_floor = summary.median_us / summarise(floor.times_us).median_us
    parts = [e.summary for e in tried.entries if e.variant.compute_only and e.summary is not None]
    record.compute_us = parts[0].median_us if parts else None
    return record
